"""Engines in one process don't notice each other, whether their models are the same or not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kitelib import KiteEngine, PoolConfig
from tests.support.answers import answer, cold_answer, evict_to_pool, prompt_of
from tests.support.backends import BackendKit

GREEDY = {"max_tokens": 8, "logprobs": 3, "ignore_eos": True}
TINY_VOCAB = 2048


async def answers(engine: KiteEngine, prompts: list[list[int]]) -> list[Any]:
    gens = await asyncio.gather(*(engine.generate(prompt, **GREEDY) for prompt in prompts))
    return [answer(gen) for gen in gens]


async def test_side_by_side_as_alone(
    model: Path,
    kit: BackendKit,
    open_engine: Callable[..., Any],
    cold_engine: KiteEngine,
) -> None:
    prompts = [prompt_of(length, seed=200, vocab_size=TINY_VOCAB) for length in (5, 33, 80)]
    expected = [await cold_answer(cold_engine, prompt, **GREEDY) for prompt in prompts]
    small = {"n_ctx": 256, "kv_tokens": 256}
    async with open_engine(kit.small(), **small) as tiny:
        tiny_expected = [await cold_answer(tiny, prompt, **GREEDY) for prompt in prompts]
    assert tiny_expected != expected
    async with (
        open_engine(model, **small) as first,
        open_engine(model, pool=PoolConfig(memory_bytes=4 * 2**20), **small) as second,
        open_engine(kit.small(), **small) as tiny,
    ):
        for _ in range(2):
            found = await asyncio.gather(*(answers(engine, prompts) for engine in (first, second, tiny)))
            assert found == [expected, expected, tiny_expected]
            for engine in (first, second, tiny):
                await evict_to_pool(engine)
        # What one forgets, the other still has; closing one leaves the other alone.
        await first.invalidate()
        assert (await first.generate(prompts[2], max_tokens=1)).usage.cached_tokens == 0
        assert (await second.generate(prompts[2], max_tokens=1)).usage.cached_tokens == len(prompts[2])
        await first.aclose()
        assert await answers(second, prompts) == expected
