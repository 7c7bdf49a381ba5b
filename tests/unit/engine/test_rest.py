"""An engine that nobody uses makes no rounds; its next request still uses nothing that was invalidated meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kitelib import KiteEngine, PoolConfig
from tests.support.engines import until

PROMPT = list(range(100, 180))


async def test_after_a_rest_the_first_request_looks_before_it_uses_anything(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    pool = PoolConfig(disk=str(tmp_path / "pool"), freshness_check_interval=0.001)

    def opened() -> Any:
        return KiteEngine.open(tiny_model("llama"), threads=1, n_ctx=512, pool=pool)

    async with opened() as engine, opened() as other:
        await engine.generate(PROMPT, max_tokens=2)
        await until(lambda: engine.pool.memory.counters().items > 0)
        await engine.pool.settle()
        assert (await engine.generate(PROMPT, max_tokens=2)).usage.cached_tokens > 0
        await until(lambda: engine.pool._lifecycle._resting)
        await other.invalidate()
        for _ in range(20):
            await asyncio.sleep(0.01)
        assert (engine.pool.epoch, other.pool.epoch) == (0, 1)  # at rest it does not know
        assert (await engine.generate(PROMPT, max_tokens=2)).usage.cached_tokens == 0
        assert engine.pool.epoch == 1
