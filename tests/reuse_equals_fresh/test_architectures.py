"""Models with sliding windows, other block sizes, or a state that can't be cut: reuse equals fresh, or there is none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from kitelib import KiteEngine
from tests.support.answers import ONE_STEP, answer, cold_answer, evict_to_pool, prompt_of

GREEDY = {"max_tokens": 4, "logprobs": 5, "ignore_eos": True}
OpenEngine = Callable[..., Any]
TINY_VOCAB = 2048
GEMMA_WINDOW = 512


@pytest.fixture(scope="module")
async def gemma(gemma_path: Path, open_engine: OpenEngine) -> AsyncIterator[KiteEngine]:
    async with open_engine(gemma_path, n_ctx=768, kv_tokens=2048, max_sequences=8) as engine:
        assert engine.stats()["numerics"] == "bitwise"
        yield engine


async def test_gemma_across_its_window(gemma: KiteEngine) -> None:
    """B41: 600 tokens, so that most layers have lost sight of the first 88; shared, restored, and gone on from."""
    prompt = prompt_of(600, seed=400)
    assert len(prompt) > GEMMA_WINDOW
    expected = await cold_answer(gemma, prompt, **GREEDY)
    first = await gemma.generate(prompt, **GREEDY)
    assert (answer(first), first.usage.cached_tokens) == (expected, 0)
    shared = await gemma.generate(prompt, reuse=ONE_STEP, **GREEDY)
    assert (answer(shared), shared.reuse.tiers) == (expected, {"context": 599})
    await evict_to_pool(gemma)
    restored = await gemma.generate(prompt, reuse=ONE_STEP, **GREEDY)
    assert (answer(restored), restored.reuse.tiers) == (expected, {"memory": 599})
    # A prompt that leaves the first one long before its end: what the window has passed is still there.
    branch = [*prompt[:70], *prompt_of(8, seed=401)]
    branched = await gemma.generate(branch, **GREEDY)
    assert branched.reuse.tiers == {"context": 70}
    assert answer(branched) == await cold_answer(gemma, branch, **GREEDY)
    await evict_to_pool(gemma)
    known = await gemma.generate(prompt, **GREEDY)
    assert (answer(known), known.reuse.zero_prefill) == (expected, True)


async def test_gemma_together(gemma: KiteEngine) -> None:
    """Steps with one row and with many, and with one to five rows of logits; what was decoded is a prompt later."""
    options = {**GREEDY, "max_tokens": 5}
    prompts = [prompt_of(3 + 4 * index, seed=410 + index) for index in range(5)]
    expected = [await cold_answer(gemma, prompt, **options) for prompt in prompts]
    gens = await asyncio.gather(*(gemma.generate(prompt, **options) for prompt in prompts))
    assert [answer(gen) for gen in gens] == expected
    turn = [*prompts[4], *gens[4].token_ids, *prompt_of(4, seed=420)]
    later = await cold_answer(gemma, turn, **options)
    for _ in range(2):
        gen = await gemma.generate(turn, reuse=ONE_STEP, **options)
        assert answer(gen) == later
        assert gen.usage.cached_tokens > 0
        await evict_to_pool(gemma)


# The default block of each architecture; "gemma3" has a window of 64 tokens here.
@pytest.mark.parametrize(("architecture", "block"), [("llama", 16), ("qwen2", 32), ("phi3", 8), ("gemma3", 16)])
async def test_small_models(
    tiny_model: Callable[..., Path], open_engine: OpenEngine, architecture: str, block: int
) -> None:
    async with open_engine(tiny_model(architecture), n_ctx=512, kv_tokens=1024) as engine:
        assert (engine.stats()["numerics"], engine.stats()["block_tokens"]) == ("bitwise", block)
        for length in (1, block - 1, block, block + 1, 2 * block, 2 * block + 1, 100, 200):
            prompt = prompt_of(length, seed=402, vocab_size=TINY_VOCAB)
            expected = await cold_answer(engine, prompt, **GREEDY)
            assert answer(await engine.generate(prompt, **GREEDY)) == expected
            shared = await engine.generate(prompt, reuse=ONE_STEP, **GREEDY)
            assert (answer(shared), shared.usage.cached_tokens) == (expected, length - 1)
            await evict_to_pool(engine)
            restored = await engine.generate(prompt, reuse=ONE_STEP, **GREEDY)
            assert (answer(restored), restored.usage.cached_tokens) == (expected, length - 1)
            branch = [*prompt[: length // 2 + 1], *prompt_of(9, seed=403, vocab_size=TINY_VOCAB)]
            branched = await engine.generate(branch, **GREEDY)
            assert branched.usage.cached_tokens >= length // 2 // block * block
            assert answer(branched) == await cold_answer(engine, branch, **GREEDY)
            await engine.invalidate()


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "phi3", "gemma3"])
async def test_small_models_under_pressure(
    tiny_model: Callable[..., Path], open_engine: OpenEngine, architecture: str
) -> None:
    """Little memory: evictions, preemptions and moves of cells, also while a window slides."""
    prefix = prompt_of(90, seed=404, vocab_size=TINY_VOCAB)
    prompts = [[*prefix[: 90 - index % 7], *prompt_of(5 + index, 405, TINY_VOCAB)] for index in range(16)]
    options = {**GREEDY, "max_tokens": 40, "temperature": 0.9, "seed": 4}
    async with open_engine(tiny_model(architecture), n_ctx=192, kv_tokens=192) as engine:
        expected = [await cold_answer(engine, prompt, **options) for prompt in prompts]
        for _ in range(2):
            gens = await asyncio.gather(*(engine.generate(prompt, **options) for prompt in prompts))
            assert [answer(gen) for gen in gens] == expected
        stats = engine.stats()
        assert stats["preemptions"] > 0
        assert stats["pool"]["memory"]["hits"] > 0
        assert stats["step_failures"] == 0


@pytest.mark.parametrize(("architecture", "kind"), [("mamba", "recurrent"), ("lfm2", "hybrid")])
async def test_models_whose_state_cannot_be_cut(
    tiny_model: Callable[..., Path], open_engine: OpenEngine, architecture: str, kind: str
) -> None:
    """They are served, say that they reuse nothing, and give each request its own answer.

    Numerics are standard: in other company a sum may be taken in another order, so values are compared with a
    tolerance, and tokens only as long as no two candidates are that close.
    """
    prompts = [prompt_of(length, seed=406, vocab_size=TINY_VOCAB) for length in (1, 16, 17, 50, 100, 101, 150)]
    prompts += [prompts[3], prompts[5] + prompts[0]]
    options = {**GREEDY, "max_tokens": 12}
    async with open_engine(tiny_model(architecture), n_ctx=256, kv_tokens=2048) as engine:
        stats = engine.stats()
        assert stats["numerics"] == "standard"
        assert any(kind in note and "without block reuse" in note for note in stats["notes"])
        alone = [await engine.generate(prompt, **options) for prompt in prompts]
        again = [await engine.generate(prompt, **options) for prompt in prompts]
        together = await asyncio.gather(*(engine.generate(prompt, **options) for prompt in prompts))
        for ours in (*alone, *again, *together):
            assert (ours.usage.cached_tokens, ours.reuse.tiers, ours.reuse.zero_prefill) == (0, {}, False)
            assert ours.reuse.exactness == "standard"
            assert kind in ours.reuse.note
        for prompt, first, second, third in zip(prompts, alone, again, together, strict=True):
            assert answer(first) == answer(second), f"{len(prompt)} tokens"
            check_close(first.logprobs, third.logprobs)
            assert len(third.token_ids) == 12
        assert await engine.invalidate() == {"context": 0, "memory": 0}
        assert engine._current.backend.used_tokens() == 0


def check_close(ours: list[dict[int, float]] | None, theirs: list[dict[int, float]] | None) -> None:
    """Same probabilities at every position, up to the first at which the two best tokens are as good as equal."""
    assert ours is not None
    assert theirs is not None
    compared = 0
    for mine, other in zip(ours, theirs, strict=True):
        common = set(mine) & set(other)
        assert len(common) >= 4  # of five; the last may be as close to the next as the best two
        assert all(abs(mine[token] - other[token]) < 0.05 for token in common)
        compared += 1
        best, second, *_ = sorted(mine.values(), reverse=True)
        if best - second < 0.1:
            break
    assert compared
