"""What the connector did is among vLLM's own metrics."""

from __future__ import annotations

from pathlib import Path

from tests.vllm.engines import open_engine, prompt, transfer_config
from tests.vllm.models import BLOCK


def test_metrics_through_vllm(model: Path, disk: Path, tmp_path: Path) -> None:
    tokens = prompt(31, 4 * BLOCK + 1)
    with open_engine(model, tmp_path / "log", transfer_config({"disk": str(disk), "memory_bytes": 0})) as engine:
        engine.generate(prompts=[tokens], max_tokens=4)
        engine.settle()
        engine.reset()
        engine.generate(prompts=[tokens], max_tokens=4)
        metrics = engine.metrics()
        counters = engine.stats()["counters"]
    assert metrics["vllm:kite_saved_blocks"] == counters["saved_blocks"] == 4
    assert metrics["vllm:kite_loaded_blocks"] == counters["loaded_blocks"] == 4
    assert metrics["vllm:kite_loaded_tokens"] == 4 * BLOCK
    assert metrics["vllm:kite_lookups"] == 2
    assert metrics["vllm:kite_failed_blocks"] == 0
    assert counters["load_seconds"] > 0
    assert metrics["vllm:external_prefix_cache_hits"] == 4 * BLOCK
