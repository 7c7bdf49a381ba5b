"""With two threads the self-test of llama.cpp still proves bitwise numerics, and what it promises holds past its own size."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.answers import ONE_STEP, answer, cold_answer, evict_to_pool, prompt_of

GREEDY = {"max_tokens": 6, "logprobs": 5, "ignore_eos": True}


async def test_two_threads(smollm2_path: Path, open_engine: Callable[..., Any]) -> None:
    """Also with more than 512 cells in use, from where a lone row takes another attention path."""
    prompts = [prompt_of(length, seed=500 + length) for length in (1, 17, 33, 70)]
    async with open_engine(smollm2_path, threads=2, n_ctx=512, kv_tokens=1024) as engine:
        assert engine.stats()["numerics"] == "bitwise"
        expected = [await cold_answer(engine, prompt, **GREEDY) for prompt in prompts]
        for _ in range(2):
            gens = await asyncio.gather(*(engine.generate(prompt, reuse=ONE_STEP, **GREEDY) for prompt in prompts))
            assert [answer(gen) for gen in gens] == expected
            await evict_to_pool(engine)
        long = prompt_of(500, seed=510)
        expected.append(await cold_answer(engine, long, **GREEDY))
        await engine.generate(long, max_tokens=1)
        gens = await asyncio.gather(*(engine.generate(prompt, reuse=ONE_STEP, **GREEDY) for prompt in [*prompts, long]))
        assert [answer(gen) for gen in gens] == expected
        assert gens[-1].reuse.tiers == {"context": 499}
        assert engine.stats()["blocks_idle"] * 16 > 512
        await evict_to_pool(engine)
        restored = await engine.generate(long, reuse=ONE_STEP, **GREEDY)
        assert (answer(restored), restored.reuse.tiers) == (expected[-1], {"memory": 499})
