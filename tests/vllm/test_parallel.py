"""Tensor parallel: the scheduler decides, and each rank keeps and loads its own part."""

from __future__ import annotations

from pathlib import Path

from tests.vllm.engines import open_engine, prompt, transfer_config
from tests.vllm.models import BLOCK

PROMPTS = [prompt(41, 4 * BLOCK), prompt(42, 150)]
TOKENS = 12


def test_two_ranks(model: Path, disk: Path, tmp_path: Path) -> None:
    options = {"tensor_parallel_size": 2}
    with open_engine(model, tmp_path / "plain", **options) as engine:
        plain = engine.generate(prompts=PROMPTS, max_tokens=TOKENS)["tokens"]
    transfer = transfer_config({"disk": str(disk), "memory_bytes": 2**26})
    with open_engine(model, tmp_path / "first", transfer, **options) as engine:
        assert engine.generate(prompts=PROMPTS, max_tokens=TOKENS)["tokens"] == plain
    units = [each for each in disk.rglob("*") if each.is_file() and each.stat().st_size > 2**16]
    # What both prompts and answers fill, but for the last token of an answer; once of each rank.
    assert len(units) == 2 * (4 + 5)
    with open_engine(model, tmp_path / "second", transfer, **options) as engine:
        restored = engine.generate(prompts=PROMPTS, max_tokens=TOKENS)
        engine.reset(connector=True)
        again = engine.generate(prompts=PROMPTS, max_tokens=TOKENS)
    assert restored == {"tokens": plain, "cached": [3 * BLOCK, 4 * BLOCK]}
    assert again == {"tokens": plain, "cached": [0, 0]}, "a reset reaches the workers' process memory"
    # One rank has all of the model: another layout, and none of these parts fits it.
    with open_engine(model, tmp_path / "third", transfer) as engine:
        assert engine.generate(prompts=PROMPTS, max_tokens=TOKENS)["cached"] == [0, 0]
