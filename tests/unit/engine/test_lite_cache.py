"""``yoco_lite_cache_size``: no more units in process memory than it says, and those worth most are kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kitelib import KiteConfig, KiteEngine, PoolConfig
from tests.support.engines import evict_context, until

UNITS = 8
FIRST, SECOND = (list(range(start, start + 80)) for start in (100, 500))  # five blocks each, and their logits


@pytest.fixture(params=["code", "file"])
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> PoolConfig:
    if request.param == "code":
        return PoolConfig(yoco_lite_cache_size=UNITS)
    path = tmp_path / "upcycle_config.yaml"
    path.write_text(f"yoco_lite_cache_size: {UNITS}\n")
    return KiteConfig.from_yaml(path).to_pool_config()


async def test_process_memory_holds_at_most_so_many_units(tiny_model: Callable[..., Path], pool: PoolConfig) -> None:
    async with KiteEngine.open(tiny_model("llama"), threads=1, n_ctx=512, pool=pool) as engine:
        for prompt in (FIRST, SECOND):
            await engine.generate(prompt, max_tokens=2)
            await evict_context(engine)
        await until(lambda: engine.pool.memory.counters().evictions > 0)
        stats = engine.stats()["pool"]["memory"]
        assert stats["items"] == UNITS
        assert stats["bytes"] < stats["limit_bytes"] / 100  # it is the number that bounds it
        assert (await engine.generate([*SECOND, 7], max_tokens=1)).usage.cached_tokens == len(SECOND)
        assert engine.stats()["pool"]["memory"]["items"] <= UNITS
