"""The same answer, bit by bit, whether a prompt is computed, shared in the context, or restored from the pool."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from kitelib import KiteEngine
from tests.support.answers import ONE_STEP, answer, cold_answer, evict_to_pool, prompt_of

LENGTHS = (1, 15, 16, 17, 31, 32, 33, 512, 1000)
BLOCK = 16
GREEDY: Mapping[str, Any] = {"max_tokens": 4, "logprobs": 5, "ignore_eos": True}


@pytest.fixture(scope="module")
async def engine(model: Path, open_engine: Callable[..., Any]) -> AsyncIterator[KiteEngine]:
    async with open_engine(model, n_ctx=1024, kv_tokens=2048) as engine:
        assert engine.stats()["numerics"] == "bitwise"
        assert engine.stats()["block_tokens"] == BLOCK
        yield engine


@pytest.mark.parametrize("length", LENGTHS)
async def test_every_way_to_an_answer_gives_the_same(engine: KiteEngine, cold_engine: KiteEngine, length: int) -> None:
    """B10: also for exact multiples of the block, and one token before and after; how many tokens are computed has one owner."""
    prompt = prompt_of(length, seed=2)
    expected = await cold_answer(cold_engine, prompt, **GREEDY)

    first = await engine.generate(prompt, **GREEDY)
    assert (answer(first), first.usage.cached_tokens) == (expected, 0)
    assert first.reuse.exactness == "bitwise"

    shared = await engine.generate(prompt, reuse=ONE_STEP, **GREEDY)
    assert answer(shared) == expected
    assert shared.reuse.tiers == ({"context": length - 1} if length > 1 else {})
    assert shared.reuse.computed_tokens == 1

    await engine.flush()
    steps = engine.stats()["steps"]
    known = await engine.generate(prompt, **GREEDY)
    assert answer(known) == expected
    assert (known.reuse.zero_prefill, known.usage.cached_tokens) == (True, length)
    assert 0 < engine.stats()["steps"] - steps < GREEDY["max_tokens"]  # fewer where a guess was verified

    await evict_to_pool(engine)
    restored = await engine.generate(prompt, reuse=ONE_STEP, **GREEDY)
    assert answer(restored) == expected
    assert restored.reuse.tiers == ({"memory": length - 1} if length > 1 else {})

    await evict_to_pool(engine)
    steps = engine.stats()["steps"]
    known = await engine.generate(prompt, **GREEDY)
    assert answer(known) == expected
    assert known.reuse.zero_prefill
    # Blocks and tail come back without a step: at most one per token after the first.
    assert 0 < engine.stats()["steps"] - steps < GREEDY["max_tokens"]  # fewer where a guess was verified


async def test_a_known_prompt_needs_no_step_for_its_first_token(engine: KiteEngine) -> None:
    prompt = prompt_of(33, seed=3)
    first = await engine.generate(prompt, max_tokens=1, logprobs=5)
    for forget in (engine.flush, lambda: evict_to_pool(engine)):
        await forget()
        steps = engine.stats()["steps"]
        gen = await engine.generate(prompt, max_tokens=1, logprobs=5)
        assert answer(gen) == answer(first)
        assert engine.stats()["steps"] == steps


@pytest.mark.parametrize("length", [*LENGTHS[:-2], 100])
async def test_a_known_prompt_may_go_on_in_another_way(
    engine: KiteEngine, cold_engine: KiteEngine, length: int
) -> None:
    """From the context and from the pool, also where the part in common ends inside a block."""
    known = prompt_of(length, seed=4)
    await engine.generate(known, **GREEDY)
    for step, from_pool in enumerate((False, True)):
        prompt = known + prompt_of(5, seed=5 + step)
        expected = await cold_answer(cold_engine, prompt, **GREEDY)
        if from_pool:
            await evict_to_pool(engine)
        gen = await engine.generate(prompt, **GREEDY)
        assert answer(gen) == expected
        assert gen.reuse.tiers == {"memory" if from_pool else "context": length}


async def test_an_answer_is_a_known_prompt_too(engine: KiteEngine, cold_engine: KiteEngine) -> None:
    """A next turn continues what was generated: computed a token at a time, reused as if it had been a prompt."""
    prompt = prompt_of(20, seed=7)
    gen = await engine.generate(prompt, max_tokens=30, ignore_eos=True)
    turn = [*prompt, *gen.token_ids, *prompt_of(6, seed=8)]
    expected = await cold_answer(cold_engine, turn, **GREEDY)
    shared = await engine.generate(turn, reuse=ONE_STEP, **GREEDY)
    assert answer(shared) == expected
    assert shared.reuse.tiers == {"context": 49}  # the last token was never computed
    await evict_to_pool(engine)
    restored = await engine.generate(turn, reuse=ONE_STEP, **GREEDY)
    assert answer(restored) == expected
    assert restored.reuse.tiers["memory"] >= 48


async def test_other_prompts_push_a_prompt_into_the_pool(
    model: Path, open_engine: Callable[..., Any], cold_engine: KiteEngine
) -> None:
    """Nothing is forced here: the context is too small for all prompts, and the first comes back from the pool."""
    prompts = [prompt_of(120, seed=seed) for seed in (10, 11, 12)]
    expected = await cold_answer(cold_engine, prompts[0], **GREEDY)
    async with open_engine(model, n_ctx=128, kv_tokens=128) as engine:
        for prompt in prompts:
            await engine.generate(prompt, **GREEDY)
        assert engine.stats()["context_evictions"] > 0
        await engine.flush()
        gen = await engine.generate(prompts[0], reuse=ONE_STEP, **GREEDY)
        assert answer(gen) == expected
        assert gen.reuse.tiers == {"memory": 119}


async def test_text_and_chat_answers_are_the_same(engine: KiteEngine, cold_engine: KiteEngine) -> None:
    messages = [
        {"role": "system", "content": "You are a bank's assistant. Antworte kurz. 请简短回答。🙂"},
        {"role": "user", "content": "How do I block my card?"},
    ]
    prompt = await cold_engine.tokenize_chat(messages)
    expected = await cold_answer(cold_engine, prompt, max_tokens=12, logprobs=2)
    for _ in range(2):
        assert answer(await engine.chat(messages, max_tokens=12, logprobs=2)) == expected
    pieces = [chunk async for chunk in engine.chat(messages, stream=True, max_tokens=12, logprobs=2)]
    assert "".join(piece.text for piece in pieces) == expected[0]["text"]
    assert [token for piece in pieces for token in piece.token_ids] == expected[0]["token_ids"]
    assert pieces[-1].generation is not None
    assert answer(pieces[-1].generation) == expected
