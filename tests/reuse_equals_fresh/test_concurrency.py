"""Many requests at once, with little memory, give each the answer that it gets alone with reuse off."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from kitelib import KiteEngine, PoolConfig, ReusePolicy
from tests.support.answers import REUSE_OFF, answer, cold_answer, prompt_of
from tests.support.backends import BackendKit

Options = Mapping[str, Any]
Case = tuple[list[int], Options, list[Mapping[str, Any]]]

MAX_TOKENS = 20


def sampling(rng: random.Random, n: int) -> dict[str, Any]:
    """A random request: every option that shapes the choice of tokens takes part."""
    options: dict[str, Any] = {
        "max_tokens": MAX_TOKENS - rng.randrange(6),
        "ignore_eos": rng.random() < 0.8,
        "logprobs": rng.choice((None, 0, 3)),
        "n": n,
    }
    if rng.random() < 0.25:
        return options  # greedy
    options |= {"temperature": rng.uniform(0.3, 1.6), "seed": rng.randrange(2**32)}
    if rng.random() < 0.5:
        options["top_p"] = rng.uniform(0.5, 1.0)
    if rng.random() < 0.5:
        options["top_k"] = rng.randrange(1, 200)
    if rng.random() < 0.3:
        options["min_p"] = rng.uniform(0.0, 0.2)
    if rng.random() < 0.5:
        options["repetition_penalty"] = rng.uniform(0.8, 1.5)
    if rng.random() < 0.5:
        options |= {"presence_penalty": rng.uniform(-1, 1), "frequency_penalty": rng.uniform(-1, 1)}
    if rng.random() < 0.3:
        options["logit_bias"] = {rng.randrange(49152): rng.uniform(-5, 5) for _ in range(3)}
    return options


def requests() -> list[tuple[list[int], dict[str, Any]]]:
    """Seven prompts with one prefix (it ends inside a block), six unrelated ones; two ask for several choices."""
    rng = random.Random(3)
    prefix = prompt_of(54, seed=20)
    prompts = [prefix + prompt_of(rng.randrange(1, 25), seed=30 + index) for index in range(7)]
    prompts += [prompt_of(rng.randrange(10, 90), seed=40 + index) for index in range(6)]
    return [(prompt, sampling(rng, 3 if index in (2, 9) else 1)) for index, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
async def cases(cold_engine: KiteEngine) -> list[Case]:
    """Each request with the answer it gets alone, with reuse off."""
    found = [(prompt, options, await cold_answer(cold_engine, prompt, **options)) for prompt, options in requests()]
    ids = [tuple(expected[0]["token_ids"]) for _, _, expected in found]
    assert len(set(ids)) > len(ids) // 2
    return found


async def ask_all(engine: KiteEngine, cases: list[Case], *, seed: int, **options: Any) -> None:
    """All requests at once, in a random order and with small pauses; every answer has to be the expected one."""
    rng = random.Random(seed)
    order = rng.sample(range(len(cases)), len(cases))

    async def ask(index: int) -> None:
        prompt, sampled, expected = cases[index]
        await asyncio.sleep(rng.choice((0.0, 0.0, 0.05, 0.3)))
        gen = await engine.generate(prompt, **sampled, **options)
        assert answer(gen) == expected, f"request {index}: {gen.reuse.note}"

    await asyncio.gather(*(ask(index) for index in order))


def check_nothing_is_left(engine: KiteEngine) -> None:
    stats = engine.stats()
    assert [stats[name] for name in ("queued", "running", "open_requests", "blocks_used")] == [0, 0, 0, 0]


async def test_together_as_alone(model: Path, open_engine: Callable[..., Any], cases: list[Case]) -> None:
    async with open_engine(model, n_ctx=512, kv_tokens=2048) as engine:
        await ask_all(engine, cases, seed=0)
        await engine.flush()
        first = engine.stats()
        assert first["cached_tokens"] >= 6 * 48  # the common prefix was computed once
        await ask_all(engine, cases, seed=1)
        again = engine.stats()
        assert again["zero_prefills"] - first["zero_prefills"] == len(cases)
        await ask_all(engine, cases, seed=2, reuse=ReusePolicy(zero_prefill=False))
        check_nothing_is_left(engine)


@pytest.mark.parametrize("memory_bytes", [None, 3 * 2**20], ids=["pool", "tiny pool"])
async def test_preempted_requests_end_as_alone(
    model: Path, open_engine: Callable[..., Any], cases: list[Case], memory_bytes: int | None
) -> None:
    """Memory for a few requests only: they push each other out in the middle of prompts and answers."""
    pool = PoolConfig(memory_bytes=memory_bytes)
    async with open_engine(model, n_ctx=192, kv_tokens=192, pool=pool) as engine:
        await ask_all(engine, cases, seed=3)
        stats = engine.stats()
        assert stats["preemptions"] > 0
        if memory_bytes is None:
            assert stats["pool"]["memory"]["hits"] > 0
        check_nothing_is_left(engine)


async def test_requests_without_reuse_beside_others(kit: BackendKit, open_engine: Callable[..., Any]) -> None:
    """Half of the requests may not reuse anything, and nothing of them may be reused; without a pool they all go back
    to their first token when they are preempted."""
    pool = PoolConfig(memory_bytes=0)
    async with open_engine(kit.small(), n_ctx=192, kv_tokens=192, pool=pool) as engine:
        rng = random.Random(6)
        cases = []
        for index in range(24):
            prompt = prompt_of(rng.randrange(20, 130), seed=index, vocab_size=2048)
            options = {**sampling(rng, 1 + index % 5 // 4), "logit_bias": {}}
            cases.append((prompt, options, await cold_answer(engine, prompt, **options)))
        await asyncio.gather(ask_all(engine, cases[12:], seed=4, reuse=REUSE_OFF), ask_all(engine, cases[:12], seed=5))
        assert engine.stats()["preemptions"] > 0
        for prompt, options, _ in cases[12:]:
            gen = await engine.generate(prompt, **{**options, "max_tokens": 1, "n": 1})
            assert gen.usage.cached_tokens == 0
        check_nothing_is_left(engine)


async def test_a_shared_prefix_is_computed_once(model: Path, open_engine: Callable[..., Any]) -> None:
    """Single flight: sixteen requests at once compute the prefix that they share one time, not sixteen times."""
    prefix = prompt_of(64, seed=50)
    prompts = [[*prefix, *prompt_of(3, seed=60 + index)] for index in range(16)]
    async with open_engine(model, n_ctx=512, kv_tokens=2048) as engine:
        gens = await asyncio.gather(*(engine.generate(prompt, max_tokens=2) for prompt in prompts))
        computed = sum(gen.reuse.computed_tokens for gen in gens)
        assert computed == len(prefix) + 16 * 3


async def test_choices_are_the_same_shared_or_not(
    model: Path, open_engine: Callable[..., Any], cold_engine: KiteEngine
) -> None:
    """n > 1 forks after the prompt; each choice is what it is when every choice computes its own prompt."""
    prompt = prompt_of(45, seed=70)
    options = {"n": 4, "temperature": 1.1, "seed": 9, "max_tokens": 16, "logprobs": 2, "repetition_penalty": 1.2}
    expected = await cold_answer(cold_engine, prompt, **options)
    assert len({tuple(choice["token_ids"]) for choice in expected}) == 4
    async with open_engine(model, n_ctx=256, kv_tokens=512) as engine:
        steps = engine.stats()["steps"]
        assert answer(await engine.generate(prompt, **options)) == expected
        # One step for the prompt, then all choices go on together.
        assert engine.stats()["steps"] - steps <= 1 + 16 + 1
        assert answer(await engine.generate(prompt, **options)) == expected
