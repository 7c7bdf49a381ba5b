"""What the scheduler puts into the model's steps: counted by looking at every step."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from kitelib import KiteEngine, ReusePolicy
from tests.support.backends import BackendKit
from tests.support.engines import StepRecorder, assert_nothing_left, some_tokens, until
from tests.support.event_loop import MeasureLoopGap, quietest

OFF = ReusePolicy(mode="off")
GREEDY = {"ignore_eos": True}


def limit_steps(engine: KiteEngine, num_tokens: int) -> None:
    """From now on a step takes so many tokens at most; backends differ in how many they take by themselves."""
    backend = engine._current.backend
    backend.info = dataclasses.replace(backend.info, max_step_tokens=num_tokens)


async def test_concurrent_requests_decode_in_the_same_steps(engine: KiteEngine, record: Any) -> None:
    steps = record(engine)
    prompts = [some_tokens(6, 150 * i) for i in range(8)]
    gens = await asyncio.gather(*(engine.generate(prompt, max_tokens=20, **GREEDY) for prompt in prompts))
    assert all(gen.usage.completion_tokens == 20 for gen in gens)
    assert steps.tokens == 8 * (6 + 19)
    # One after the other it takes 160 steps; here it is the longest one's 20, and a few until all have begun.
    assert len(steps.steps) <= 20 + 8
    assert max(len(work) for work in steps.steps) == 8


async def test_prefill_and_decode_share_a_step(open_tiny: Any, record: Any) -> None:
    async with open_tiny() as engine:
        limit_steps(engine, 63)
        steps = record(engine)
        steps.gate.clear()
        first = asyncio.create_task(engine.generate(some_tokens(5), max_tokens=30, **GREEDY))
        await until(steps.reached.is_set)
        second = asyncio.create_task(engine.generate(some_tokens(100, 900), max_tokens=3, **GREEDY))
        await until(lambda: engine.stats()["open_requests"] == 2)
        await asyncio.sleep(0.01)
        steps.gate.set()
        await asyncio.gather(first, second)
        sizes = [sorted(len(item.token_ids) for item in work) for work in steps.steps]
        assert [1, 62] in sizes  # a token of the one, a piece of the other's prompt: 63 rows
        await assert_nothing_left(engine)


@pytest.mark.parametrize("budget", [4, 17, 63])
async def test_no_step_passes_the_budget_and_logits_are_asked_once_a_token(
    open_tiny: Any, record: Any, budget: int
) -> None:
    prompts = [some_tokens(40, 130 * i) for i in range(6)]
    async with open_tiny(reuse=OFF, max_sequences=6) as engine:
        alone = [(await engine.generate(prompt, max_tokens=8, **GREEDY)).token_ids for prompt in prompts]
    async with open_tiny(max_sequences=6) as engine:
        limit_steps(engine, budget)
        steps = record(engine)
        gens = await asyncio.gather(*(engine.generate(prompt, max_tokens=8, **GREEDY) for prompt in prompts))
        assert [gen.token_ids for gen in gens] == alone
        assert max(sum(len(item.token_ids) for item in work) for work in steps.steps) <= budget
        assert all(len(work) == len({item.sequence for item in work}) for work in steps.steps)
        assert all(item.token_ids for work in steps.steps for item in work)
        assert sum(item.logits for work in steps.steps for item in work) == 6 * 8


async def test_a_new_prefix_is_computed_once_for_all_who_want_it(open_tiny: Any, record: Any) -> None:
    prefix = some_tokens(200)
    async with open_tiny() as engine:
        steps = record(engine)
        gens = await asyncio.gather(*(engine.generate([*prefix, 5 + i, 9], max_tokens=2, **GREEDY) for i in range(3)))
        # 192 tokens are whole blocks; the rest of the 200 may be computed by each.
        assert sorted(gen.usage.cached_tokens for gen in gens)[1:] >= [192, 192]
        assert sum(gen.reuse.computed_tokens for gen in gens) <= 200 + 2 + 2 * (8 + 2)
        assert steps.tokens <= 200 + 2 + 2 * 10 + 3
        assert all(gen.reuse.tiers.keys() <= {"context"} for gen in gens)


async def test_identical_prompts_at_once_are_computed_once(open_tiny: Any, record: Any) -> None:
    async with open_tiny() as engine:
        steps = record(engine)
        gens = await asyncio.gather(*(engine.generate(some_tokens(160), max_tokens=3, **GREEDY) for _ in range(4)))
        assert len({tuple(gen.token_ids) for gen in gens}) == 1
        assert steps.tokens <= 160 + 3 * 16 + 4 * 2


async def test_a_waiting_request_goes_on_when_the_one_that_computes_leaves(open_tiny: Any, record: Any) -> None:
    prefix = some_tokens(200)
    async with open_tiny() as engine:
        steps = record(engine)
        steps.gate.clear()
        first = asyncio.create_task(engine.generate([*prefix, 5], max_tokens=3))
        await until(steps.reached.is_set)
        second = asyncio.create_task(engine.generate([*prefix, 6], max_tokens=3, **GREEDY))
        await until(lambda: engine.stats()["open_requests"] == 2)
        first.cancel()
        steps.gate.set()
        assert (await second).usage.completion_tokens == 3
        assert steps.tokens <= 201 + 2 + 8  # what the first computed before it left was not lost
        await assert_nothing_left(engine)


async def test_several_choices_compute_the_prompt_once(open_tiny: Any, record: Any) -> None:
    async with open_tiny() as engine:
        steps = record(engine)
        options = {"max_tokens": 5, "temperature": 1.0, "seed": 1, **GREEDY}
        gen = await engine.generate(some_tokens(100), n=4, **options)
        assert (gen.usage.prompt_tokens, gen.usage.completion_tokens) == (100, 20)
        assert steps.tokens == 100 + 4 * 4
        used = [item for work in steps.steps for item in work if item.start >= 100]
        assert len({item.sequence for item in used}) == 4


# Order


async def test_higher_priority_first_then_first_come(open_tiny: Any, record: Any) -> None:
    async with open_tiny(max_sequences=1) as engine:
        steps = record(engine)
        steps.gate.clear()
        order: list[str] = []

        async def ask(name: str, priority: int) -> None:
            await engine.generate(some_tokens(20, 200 * len(name)), max_tokens=1, priority=priority)
            order.append(name)

        calls = [asyncio.create_task(ask("a", 0))]
        await until(steps.reached.is_set)
        for name, priority in (("low", -1), ("mid", 0), ("midtoo", 0), ("highest", 7), ("last", -5)):
            calls.append(asyncio.create_task(ask(name, priority)))
            await until(lambda: engine.stats()["open_requests"] == len(calls))
        await asyncio.sleep(0.01)
        steps.gate.set()
        await asyncio.gather(*calls)
        assert order == ["a", "highest", "mid", "midtoo", "low", "last"]


async def test_no_more_run_at_once_than_allowed(open_tiny: Any, record: Any) -> None:
    async with open_tiny(max_sequences=2) as engine:
        steps = record(engine)
        await asyncio.gather(*(engine.generate(some_tokens(20, 150 * i), max_tokens=6, **GREEDY) for i in range(5)))
        assert max(len(work) for work in steps.steps) == 2
        assert steps.tokens == 5 * (20 + 5)


# Memory


async def test_preemption_keeps_the_answers_and_is_counted(open_tiny: Any, record: Any) -> None:
    # 512 tokens are two of these at their full length, but four at their start.
    prompts = [some_tokens(100, 130 * i) for i in range(4)]
    options = {"max_tokens": 150, **GREEDY}
    async with open_tiny(reuse=OFF, capacity=512) as engine:
        assert engine.stats()["blocks_total"] * 16 == 512
        alone = [(await engine.generate(prompt, **options)).token_ids for prompt in prompts]
        assert engine.stats()["preemptions"] == 0
    for policy in (ReusePolicy(), OFF):
        async with open_tiny(reuse=policy, capacity=512) as engine:
            steps = record(engine)
            gens = await asyncio.gather(*(engine.generate(prompt, **options) for prompt in prompts))
            assert [gen.token_ids for gen in gens] == alone
            assert engine.stats()["preemptions"] > 0
            if policy.mode == "exact":  # what was preempted came back from the pool
                assert engine.stats()["pool"]["memory"]["hits"] > 0
                assert steps.tokens < 4 * 249 + 100
            await assert_nothing_left(engine)


async def test_preempted_choices_come_back_to_what_they_were(open_tiny: Any) -> None:
    options = {"max_tokens": 150, "n": 3, "temperature": 1.0, "seed": 3, **GREEDY}
    async with open_tiny(kv_tokens=256) as small, open_tiny(kv_tokens=1024) as large:
        found = [await engine.generate(some_tokens(100), **options) for engine in (small, large)]
        assert small.stats()["preemptions"] > 0
        assert large.stats()["preemptions"] == 0
    assert found[0].choices == found[1].choices


async def test_idle_runs_make_room_before_anyone_is_preempted(open_tiny: Any) -> None:
    async with open_tiny(kv_tokens=256) as engine:
        for i in range(6):
            await engine.generate(some_tokens(200, 130 * i), max_tokens=2)
        stats = engine.stats()
        assert stats["preemptions"] == 0
        assert stats["context_evictions"] > 0
        assert stats["blocks_used"] == 0


# Adapters


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory, kit: BackendKit) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: str(kit.adapter(folder / name, kit.small(), seed)) for seed, name in enumerate(("a", "b"))}


async def test_adapters_share_a_step_only_where_the_backend_mixes_them(
    open_tiny: Any, record: Any, adapters: dict[str, str], kit: BackendKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [None, "a", "b", None, "a", "b"]
    async with open_tiny(reuse=OFF, adapters=adapters, max_sequences=6) as engine:
        alone = [
            (await engine.generate(some_tokens(40), adapter=name, max_tokens=6, **GREEDY)).token_ids
            for name in names[:3]
        ]
        assert len({tuple(each) for each in alone}) == 3
    async with open_tiny(adapters=adapters, max_sequences=6) as engine:
        backend, kinds = engine._current.backend, []
        real = backend.step

        def step(work: Any) -> Any:
            kinds.append({kit.adapter_of(backend, item.sequence) for item in work})
            return real(work)

        monkeypatch.setattr(backend, "step", step)
        steps = record(engine)
        gens = await asyncio.gather(
            *(engine.generate(some_tokens(40), adapter=name, max_tokens=6, **GREEDY) for name in names)
        )
        assert [gen.token_ids for gen in gens] == alone * 2
        assert backend.info.mixes_adapters == (kit.name == "torch")
        assert max(len(kind) for kind in kinds) == (3 if backend.info.mixes_adapters else 1)
        assert len({name for kind in kinds for name in kind}) == 3
        # The same tokens, but nothing shared across adapters.
        assert steps.tokens >= 3 * 40
        again = [await engine.generate(some_tokens(40), adapter=name, max_tokens=6, **GREEDY) for name in names[:3]]
        assert [gen.token_ids for gen in again] == alone
        assert all(gen.usage.cached_tokens >= 39 for gen in again)


# Failing steps


async def test_a_failed_step_fails_its_requests_only(
    open_tiny: Any, record: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kitelib.errors import BackendStepError

    async with open_tiny() as engine:
        backend = engine._current.backend
        real, bad = backend.step, some_tokens(20, 900)

        def step(work: Any) -> Any:
            if any(list(item.token_ids) == bad for item in work):
                raise BackendStepError("out of luck")
            return real(work)

        monkeypatch.setattr(backend, "step", step)
        with pytest.raises(BackendStepError, match="out of luck"):
            await engine.generate(bad, max_tokens=3)
        assert engine.stats()["step_failures"] == 1
        assert (await engine.generate(some_tokens(20), max_tokens=3, **GREEDY)).usage.completion_tokens == 3
        await assert_nothing_left(engine)
        assert engine.stats()["idle_sequences"] == 1  # nothing of the failed one stays


# The event loop


async def test_the_event_loop_is_never_held_up(loop_gap: MeasureLoopGap, kit: BackendKit, cache_dir: Path) -> None:
    """B36: at most 10 ms. The loop's own computing time is what the library can answer for: with other processes on the
    machine, any of them can keep a ready thread waiting for longer than that."""
    async with KiteEngine.open(kit.text(), n_ctx=512, threads=1, cache_dir=cache_dir) as sixteen:

        async def consume(number: int) -> int:
            count = 0
            async for chunk in sixteen.stream(some_tokens(8, 110 * number), max_tokens=16, **GREEDY):
                count += len(chunk.token_ids)
            return count

        async def burst() -> None:
            assert await asyncio.gather(*(consume(number) for number in range(16))) == [16] * 16

        await consume(17)
        gap = await quietest(loop_gap, 0.010, burst)
    assert gap.turns > 16
    assert gap.longest_cpu_s < 0.010


def test_the_recorder_holds_and_counts() -> None:
    recorder = StepRecorder(lambda work: work)  # type: ignore[arg-type, return-value]
    recorder([])
    assert (recorder.steps, recorder.tokens, recorder.reached.is_set()) == ([[]], 0, True)
