"""Blocks that come while their request computes: whatever comes when, every answer is the one without reuse."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kitelib import KiteEngine, PoolConfig, ReusePolicy
from kitelib.abc import StepResult, StepWork
from kitelib.engine.results import Generation
from kitelib.stores.memory import MemoryStore
from kitelib.testing import Fault, FaultyStore, Operation
from kitelib.yoco.held import HeldBytes
from kitelib.yoco.search import Late
from tests.support.answers import answer
from tests.support.engines import assert_nothing_left, computes_slowly, evict_context, some_tokens, until

OFF = ReusePolicy(mode="off")
NO_LOGITS = ReusePolicy(zero_prefill=False)
SIZES: dict[str, Any] = {"n_ctx": 256, "capacity": 512, "max_sequences": 6}
Call = dict[str, Any]


def calls_of(rng: random.Random, count: int) -> list[Call]:
    """Prompts from a few stems, so that they share prefixes that end inside blocks as well as at their borders."""
    stems = [some_tokens(200, 100 + 311 * index) for index in range(4)]
    calls = []
    for number in range(count):
        stem = rng.choice(stems)
        length = rng.choice([16, 17, 31, 32, 33, 48, 64, 65, 96, 127, 128, 160])
        tail = some_tokens(rng.randrange(4), 500 + 17 * (number % 5))
        calls.append(
            {
                "prompt": [*stem[:length], *tail],
                "n": 1 if number % 4 else rng.choice([3, 5]),
                "max_tokens": rng.choice([1, 3, 18]) if number % 4 else 80,
                "temperature": rng.choice([0.0, 1.5]) if number % 4 else 1.5,
                "seed": number % 7,
                "logprobs": 2,
                "ignore_eos": True,
            }
        )
    return calls


def slow_steps(engine: KiteEngine, monkeypatch: pytest.MonkeyPatch, seconds: float, step_tokens: int = 32) -> None:
    """Steps of few tokens that take a while, as if the model were of some size: blocks have a time to be late in."""
    backend = engine._current.backend
    backend.info = dataclasses.replace(backend.info, max_step_tokens=step_tokens)
    step = backend.step

    def slowly(work: Sequence[StepWork]) -> StepResult:
        time.sleep(seconds)
        result: StepResult = step(work)
        return result

    monkeypatch.setattr(backend, "step", slowly)
    computes_slowly(engine)


def attach(monkeypatch: pytest.MonkeyPatch, store: Any) -> None:
    monkeypatch.setattr("kitelib.stores.pool.open_stores", lambda config: [("outer", store)])


async def cold(open_tiny: Any, calls: Sequence[Call]) -> list[Any]:
    async with open_tiny(**{**SIZES, "capacity": 1280}, reuse=OFF) as engine:
        return [answer(await engine.generate(**call)) for call in calls]


def nothing_on_its_way(engine: KiteEngine) -> Callable[[], bool]:
    def quiet() -> bool:
        gc.collect()
        lates = [
            each for each in gc.get_objects() if type(each) is Late
        ]  # torch has objects that mind being asked more
        tiers = engine.pool.tiers.tiers
        return (
            not any(late.promising for late in lates)
            and not any(len(tier._flights) for tier in tiers)
            and engine.pool._promotion.num_bytes == 0
            and engine.stats()["recycler"]["pending_bytes"] == 0
        )

    return quiet


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_comes_late_or_never_every_answer_is_the_one_without_reuse(
    open_tiny: Any, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """B31: delays, losses, damage, cancellation, invalidation, preemption, several choices, priorities."""
    rng = random.Random(seed)
    calls = calls_of(rng, 45)
    expected = await cold(open_tiny, calls)
    faults = [Fault("lose"), Fault("corrupt"), Fault("truncate"), Fault("swap"), Fault("fail")]

    def schedule(operation: Operation, call: int) -> Fault | None:
        if operation in ("put_many", "delete_many") or rng.random() < 0.3:
            return None
        return (
            rng.choice(faults) if rng.random() < 0.1 else Fault("delay", delay_s=rng.choice([0.0, 0.003, 0.02, 0.06]))
        )

    store = FaultyStore(MemoryStore(2**28), schedule)
    attach(monkeypatch, store)
    monkeypatch.setattr("kitelib.yoco.planner.patience", lambda compute_s, measured: rng.choice([0.0, 0.002, 0.03]))
    async with open_tiny(**SIZES, pool=PoolConfig(memory_bytes=rng.choice([0, 300_000]))) as engine:
        slow_steps(engine, monkeypatch, 0.001)
        engine.pool.tiers.tiers[0].breaker._max_failures = 10**9
        wrong: list[int] = []
        queue = asyncio.Semaphore(10)

        async def ask(index: int) -> None:
            async with queue:
                policy = NO_LOGITS if index % 2 else None
                await asyncio.sleep(0.004 * (index % 7))
                asking = asyncio.ensure_future(engine.generate(**calls[index], reuse=policy, priority=index % 3))
                if index % 9 == 0:
                    await asyncio.sleep(0.01 * (index % 5))
                    asking.cancel()
                    await asyncio.wait([asking])
                    return
                gen: Generation = await asking
                check_report(gen)
                if answer(gen) != expected[index]:
                    wrong.append(index)

        async def forget() -> None:
            for _ in range(2):
                await asyncio.sleep(rng.random())
                await engine.invalidate()

        await asyncio.gather(
            *(ask(index) for index in range(len(calls))), *(ask(index) for index in range(len(calls))), forget()
        )
        assert not wrong
        assert engine.stats()["pool"]["outer"]["hits"] > 0  # in time or not
        assert engine.stats()["preemptions"] > 0
        await assert_nothing_left(engine)
        await until(nothing_on_its_way(engine))


def check_report(gen: Generation) -> None:
    """Every prompt token is accounted for once."""
    prompt = gen.usage.prompt_tokens
    assert sum(gen.reuse.tiers.values()) == gen.usage.cached_tokens <= prompt, gen.reuse
    assert gen.reuse.computed_tokens == prompt - gen.usage.cached_tokens


async def test_late_blocks_of_one_choice_never_get_into_another(
    open_tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B31: choices that were preempted look for different tokens at the same positions; each gets its own."""
    call: Call = {"prompt": some_tokens(20), "n": 5, "max_tokens": 200, "temperature": 2.0, "seed": 5, "logprobs": 2}
    call |= {"ignore_eos": True}
    (expected,) = await cold(open_tiny, [call])
    monkeypatch.setattr("kitelib.yoco.planner.patience", lambda compute_s, measured: 0.0)
    attach(monkeypatch, FaultyStore(MemoryStore(2**28), lambda operation, call: Fault("delay", delay_s=0.005)))
    async with open_tiny(**SIZES, pool=PoolConfig(memory_bytes=0)) as engine:
        slow_steps(engine, monkeypatch, 0.003, step_tokens=16)
        gen = await engine.generate(**call)
        assert engine.stats()["preemptions"] > 1
        assert answer(gen) == expected
        check_report(gen)
        await until(nothing_on_its_way(engine))


async def test_requests_that_wait_hold_little_and_still_find_what_the_pool_has(
    open_tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More wait than may hold anything: who came too late to look looks when it is its turn."""
    calls: list[Call] = [
        {"prompt": some_tokens(100, 100 + 131 * index), "max_tokens": 3, "ignore_eos": True} for index in range(10)
    ]
    expected = await cold(open_tiny, calls)
    async with open_tiny(**{**SIZES, "max_sequences": 1}) as engine:
        for call in calls:
            await engine.generate(**call)
        await evict_context(engine)
        serving = engine._current
        block_bytes = serving.backend.info.block_bytes
        monkeypatch.setattr(serving.planner, "held", HeldBytes(14 * block_bytes))
        slow_steps(engine, monkeypatch, 0.005)
        gens = await asyncio.gather(*(engine.generate(**call, reuse=NO_LOGITS) for call in calls))
        assert [answer(gen) for gen in gens] == expected
        assert [gen.reuse.tiers for gen in gens if not gen.reuse.tiers.get("memory")] == []
        await until(lambda: serving.planner.held.num_bytes == 0)
