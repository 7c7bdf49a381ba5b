"""The life of an engine: opening, closing, reuse on and off, tenants, and what the pool's bounds do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from tests.support.engines import assert_nothing_left, until
from tests.support.gguf_files import corrupt_copy

from kitelib import KiteEngine, PoolConfig, ReusePolicy
from kitelib.errors import BackendError, DeadlineExceededError, EngineClosedError, KiteError, ModelFormatError
from kitelib.stores.memory import MemoryStore
from kitelib.testing import Fault, FaultyStore, Operation, fault_every

OFF = ReusePolicy(mode="off")
# Long enough for several blocks and a tail.
STORY = list(range(100, 170))


def tokens(count: int, first: int = 100) -> list[int]:
    return [first + 7 * index % 1800 for index in range(count)]


async def evict_context(engine: KiteEngine) -> None:
    """Makes everything idle leave the context; the pool keeps it."""
    await engine.flush()
    memory = engine._current.memory
    await engine._current.on_model_thread(lambda: sum(1 for _ in iter(memory.evict_one, False)))


# Opening and closing


async def test_an_engine_opens_with_await_and_with_async_with(open_tiny: Any) -> None:
    engine = await open_tiny()
    assert (await engine.generate(STORY, max_tokens=2)).usage.completion_tokens == 2
    await engine.aclose()
    async with open_tiny() as engine:
        assert (await engine.generate(STORY, max_tokens=2)).usage.completion_tokens == 2
    async with await open_tiny() as engine:
        pass
    with pytest.raises(EngineClosedError):
        engine.stats()


async def test_progress_is_told_while_loading(open_tiny: Any) -> None:
    told: list[tuple[str, float]] = []
    async with open_tiny(progress=lambda what, share: told.append((what, share))):
        pass
    assert any("weights" in what for what, _ in told)
    assert all(0.0 <= share <= 1.0 for _, share in told)


@pytest.mark.parametrize(
    "call",
    [
        lambda engine: engine.generate(STORY),
        lambda engine: anext(engine.stream(STORY)),
        lambda engine: engine.chat([{"role": "user", "content": "Hi"}]),
        lambda engine: anext(aiter(engine.chat([{"role": "user", "content": "Hi"}], stream=True))),
        lambda engine: engine.preheat([STORY]),
        lambda engine: engine.flush(),
        lambda engine: engine.invalidate(),
        lambda engine: engine.reload(),
        lambda engine: engine.tokenize("Hi"),
        lambda engine: engine.conversation("Be brief.").send("Hi"),
    ],
)
async def test_a_closed_engine_says_so(open_tiny: Any, call: Callable[[KiteEngine], Any]) -> None:
    engine = await open_tiny()
    await engine.aclose()
    with pytest.raises(EngineClosedError):
        await call(engine)


async def test_closing_ends_what_is_open(open_tiny: Any, record: Any) -> None:
    engine = await open_tiny(max_sequences=1)
    steps = record(engine)
    steps.gate.clear()

    async def stream() -> None:
        async for _ in engine.stream(tokens(20, 300), max_tokens=50):
            pass

    calls = [
        asyncio.create_task(engine.generate(tokens(20), max_tokens=50)),  # running
        asyncio.create_task(engine.generate(tokens(20, 500), max_tokens=50)),  # waiting
        asyncio.create_task(stream()),
        asyncio.create_task(engine.flush()),
    ]
    await until(steps.reached.is_set)
    await until(lambda: engine.stats()["open_requests"] == 3)
    closing = [asyncio.create_task(engine.aclose()) for _ in range(2)]
    late = asyncio.create_task(engine.generate(tokens(5)))
    await asyncio.sleep(0)
    steps.gate.set()
    results = await asyncio.gather(*calls, late, return_exceptions=True)
    await asyncio.gather(*closing)
    assert [type(each) for each in [*results[:3], results[4]]] == [EngineClosedError] * 4
    assert results[3] is None or isinstance(results[3], EngineClosedError)
    assert not any(thread.name == "kite-model" for thread in threading.enumerate())
    await engine.aclose()


async def test_a_cancelled_closing_still_closes(open_tiny: Any, record: Any) -> None:
    engine = await open_tiny()
    steps = record(engine)
    steps.gate.clear()
    call = asyncio.create_task(engine.generate(tokens(20), max_tokens=50))
    await until(steps.reached.is_set)
    closing = asyncio.create_task(engine.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    steps.gate.set()
    with pytest.raises(EngineClosedError):
        await call
    await engine.aclose()
    assert not any(thread.name == "kite-model" for thread in threading.enumerate())


async def test_no_task_and_no_thread_outlives_an_engine(open_tiny: Any) -> None:
    tasks = asyncio.all_tasks()
    async with open_tiny() as engine:
        await asyncio.gather(*(engine.generate(tokens(20 + i), max_tokens=3, n=2) for i in range(4)))
    assert asyncio.all_tasks() == tasks
    assert not any(thread.name == "kite-model" for thread in threading.enumerate())


async def test_if_the_model_thread_fails_everyone_hears_of_it(
    open_tiny: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_tiny() as engine:

        def broken(work: Any) -> Any:
            raise RuntimeError("the library broke")

        monkeypatch.setattr(engine._current.backend, "step", broken)
        calls = [asyncio.create_task(engine.generate(tokens(20, 100 * i), max_tokens=5)) for i in range(1, 4)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(each, BackendError) and "the library broke" in str(each) for each in results)
        with pytest.raises(BackendError, match="the library broke"):  # and later ones do not wait for ever
            await engine.generate(tokens(5))
        with pytest.raises(KiteError):
            await engine.flush()
        with pytest.raises(KiteError):
            await engine.invalidate()
    assert "the model's thread failed" in caplog.text


async def test_a_reload_that_fails_leaves_the_old_model(open_tiny: Any, tmp_path: Path, tiny_model: Any) -> None:
    async with open_tiny() as engine:
        before = await engine.generate(STORY, max_tokens=4, ignore_eos=True)
        with pytest.raises(ModelFormatError):
            await engine.reload(corrupt_copy(tiny_model("llama"), tmp_path / "bad.gguf"))
        after = await engine.generate(STORY, max_tokens=4, ignore_eos=True)
        assert after.token_ids == before.token_ids
        assert after.reuse.zero_prefill  # nothing was forgotten either


# Deadlines


async def test_a_deadline_ends_a_running_request(open_tiny: Any, record: Any) -> None:
    async with open_tiny() as engine:
        steps = record(engine)
        steps.gate.clear()
        call = asyncio.create_task(engine.generate(tokens(20), max_tokens=200, deadline=0.05, ignore_eos=True))
        await until(steps.reached.is_set)
        await asyncio.sleep(0.06)  # passes while the first step is held
        steps.gate.set()
        with pytest.raises(DeadlineExceededError):
            await call
        assert len(steps.steps) <= 2
        await assert_nothing_left(engine)
        with pytest.raises(TimeoutError):
            await engine.generate(tokens(20), max_tokens=200, deadline=1e-9)
        assert (await engine.generate(tokens(20), max_tokens=2, deadline=3600.0)).finish_reason == "length"


async def test_a_deadline_ends_a_waiting_request(open_tiny: Any, record: Any) -> None:
    async with open_tiny(max_sequences=1) as engine:
        steps = record(engine)
        running = asyncio.create_task(engine.generate(tokens(20), max_tokens=100, ignore_eos=True))
        await until(steps.reached.is_set)
        steps.gate.clear()
        waiting = asyncio.create_task(engine.generate(tokens(20, 900), max_tokens=5, deadline=0.05))
        await asyncio.sleep(0.06)
        steps.gate.set()
        with pytest.raises(DeadlineExceededError):
            await waiting
        assert (await running).usage.completion_tokens == 100
        computed = {tuple(item.token_ids) for work in steps.steps for item in work}
        assert tuple(tokens(20, 900)) not in computed
        await assert_nothing_left(engine)


# Leaving


async def test_leaving_a_stream_ends_the_request(engine: KiteEngine) -> None:
    async with aclosing(engine.stream(STORY, max_tokens=300, ignore_eos=True)) as chunks:
        async for _ in chunks:
            break
    assert engine.stats()["open_requests"] == 0
    await until(lambda: engine.stats()["running"] == 0)
    assert (await engine.generate(STORY, max_tokens=2)).reuse.computed_tokens == 0


# What is kept


async def test_preheat_computes_once_and_keeps(engine: KiteEngine) -> None:
    chat = [{"role": "system", "content": "You are a bank's assistant."}, {"role": "user", "content": "Hi"}]
    first = await engine.preheat([STORY, "You are a bank's assistant.", chat])
    again = await engine.preheat([STORY, "You are a bank's assistant.", chat])
    assert first["prompts"] == again["prompts"] == 3
    assert first["prompt_tokens"] == again["prompt_tokens"] == first["computed_tokens"]
    assert again["computed_tokens"] == 0
    assert engine.stats()["pool"]["memory"]["items"] > 0
    gen = await engine.chat([*chat[:1], {"role": "user", "content": "How are you?"}], max_tokens=1)
    assert gen.usage.cached_tokens > len(await engine.tokenize("You are a bank's assistant."))
    assert await engine.preheat([]) == {"prompts": 0, "prompt_tokens": 0, "computed_tokens": 0}


async def test_flush_waits_until_everything_is_in_the_pool(open_tiny: Any, record: Any) -> None:
    async with open_tiny() as engine:
        gen = await engine.generate(tokens(40), max_tokens=4, ignore_eos=True)
        steps = record(engine)
        steps.gate.clear()
        busy = asyncio.create_task(engine.generate(tokens(40, 900), max_tokens=4, ignore_eos=True))
        await until(steps.reached.is_set)  # the model's thread is held in a step
        flushing = asyncio.create_task(engine.flush())
        await asyncio.sleep(0.01)
        assert not flushing.done()
        steps.gate.set()
        await flushing
        await busy
        # Two full blocks of prompt and answer, the tail, and the prompt's logits.
        keys = engine.pool.memory.keys()
        assert sum(":logits:" in key for key in keys) >= 1
        assert sum(":kv:" in key for key in keys) >= 3
        assert engine.stats()["recycler"]["pending_bytes"] == 0
        await evict_context(engine)
        again = await engine.generate([*gen.prompt_token_ids, 5], max_tokens=1)
        assert again.reuse.tiers == {"memory": 40}


async def test_invalidate_forgets_everything_and_says_how_much(engine: KiteEngine) -> None:
    await engine.generate(STORY, max_tokens=2)
    await engine.generate([5, *STORY], max_tokens=2)
    await engine.flush()
    items = engine.stats()["pool"]["memory"]["items"]
    assert items > 0
    assert await engine.invalidate() == {"context": 2, "memory": items}
    assert engine.stats()["pool"]["memory"]["items"] == 0
    gen = await engine.generate(STORY, max_tokens=2)
    assert (gen.usage.cached_tokens, gen.reuse.zero_prefill) == (0, False)
    await engine.invalidate()
    assert await engine.invalidate() == {"context": 0, "memory": 0}


@pytest.mark.parametrize("n", [1, 2])
async def test_what_ran_during_an_invalidation_leaves_nothing_behind(open_tiny: Any, record: Any, n: int) -> None:
    async with open_tiny(max_sequences=2) as engine:
        await engine.generate(tokens(40), max_tokens=2)
        steps = record(engine)
        steps.gate.clear()
        running = asyncio.create_task(engine.generate(tokens(40, 900), max_tokens=20, n=n, ignore_eos=True))
        others = [
            asyncio.create_task(engine.generate([*tokens(40), 5 + i], max_tokens=9, ignore_eos=True)) for i in range(3)
        ]
        await until(lambda: steps.reached.is_set() and engine.stats()["open_requests"] == 4)
        invalidating = asyncio.create_task(engine.invalidate())
        await asyncio.sleep(0.01)
        steps.gate.set()
        await invalidating
        gens = await asyncio.gather(running, *others)
        assert [gen.usage.completion_tokens for gen in gens] == [20 * n, 9, 9, 9]
        await engine.flush()
        assert engine.stats()["pool"]["memory"]["items"] == 0
        assert engine.stats()["idle_sequences"] == 0
        for prompt in (tokens(40, 900), tokens(40), [*tokens(40), 6]):
            assert (await engine.generate(prompt, max_tokens=1, reuse=None)).usage.cached_tokens == 0
            await engine.invalidate()


async def test_reuse_off_computes_everything_and_keeps_nothing(engine: KiteEngine, record: Any) -> None:
    known = await engine.generate(STORY, max_tokens=3)
    steps = record(engine)
    cold = await engine.generate(STORY, max_tokens=3, reuse=OFF)
    assert cold.token_ids == known.token_ids
    assert (cold.usage.cached_tokens, cold.reuse.computed_tokens, cold.reuse.tiers) == (0, len(STORY), {})
    assert steps.tokens == len(STORY) + 2
    await engine.generate([7, *STORY], max_tokens=3, reuse=OFF)
    assert (await engine.generate([7, *STORY], max_tokens=3)).usage.cached_tokens == 0


async def test_the_engine_policy_holds_where_a_call_gives_none(open_tiny: Any) -> None:
    async with open_tiny(reuse=OFF) as engine:
        for _ in range(2):
            assert (await engine.generate(STORY, max_tokens=2)).usage.cached_tokens == 0
        on = ReusePolicy()
        await engine.generate(STORY, max_tokens=2, reuse=on)
        assert (await engine.generate(STORY, max_tokens=2, reuse=on)).usage.cached_tokens == len(STORY)


# Zero prefill


async def test_a_full_hit_takes_no_step_at_all_for_one_token(engine: KiteEngine) -> None:
    cold = await engine.generate(STORY, max_tokens=1, logprobs=3)
    await engine.flush()
    for evicted in (False, True):
        if evicted:
            await evict_context(engine)
        before = engine.stats()
        gen = await engine.generate(STORY, max_tokens=1, logprobs=3)
        after = engine.stats()
        assert after["steps"] == before["steps"]
        assert after["zero_prefills"] == before["zero_prefills"] + 1
        assert (gen.token_ids, gen.logprobs) == (cold.token_ids, cold.logprobs)
        assert (gen.usage.cached_tokens, gen.reuse.computed_tokens) == (len(STORY), 0)
        assert gen.reuse.zero_prefill


@pytest.mark.parametrize("evicted", [False, True])
async def test_the_first_token_of_a_full_hit_does_not_wait_for_a_step(
    engine: KiteEngine, record: Any, evicted: bool
) -> None:
    cold = await engine.generate(STORY, max_tokens=4, ignore_eos=True)
    await engine.flush()
    if evicted:
        await evict_context(engine)
    steps = record(engine)
    steps.gate.clear()  # no step ends before the first chunk is here
    before = engine.stats()["steps"]
    got = []
    async for chunk in engine.stream(STORY, max_tokens=4, ignore_eos=True):
        if not got:
            assert engine.stats()["steps"] == before
            assert steps.steps == []
            steps.gate.set()
        got += chunk.token_ids
    assert got == cold.token_ids
    if evicted:  # the KV came back from the pool; the last prompt token and the answer are left to compute
        assert steps.tokens <= 1 + 4
    else:
        assert steps.tokens == 3


async def test_zero_prefill_can_be_turned_off(engine: KiteEngine, record: Any) -> None:
    cold = await engine.generate(STORY, max_tokens=2)
    steps = record(engine)
    gen = await engine.generate(STORY, max_tokens=2, reuse=ReusePolicy(zero_prefill=False))
    assert gen.token_ids == cold.token_ids
    assert not gen.reuse.zero_prefill
    assert gen.usage.cached_tokens == len(STORY) - 1
    assert steps.tokens == 2


# Tenants


async def test_namespaces_share_nothing(engine: KiteEngine) -> None:
    def tenant(name: str | None) -> ReusePolicy:
        return ReusePolicy(namespace=name)

    for name in (None, "a", "b", ""):
        gen = await engine.generate(STORY, max_tokens=2, reuse=tenant(name))
        assert gen.usage.cached_tokens == 0
    await evict_context(engine)
    for name in (None, "a", "b", ""):
        gen = await engine.generate(STORY, max_tokens=2, reuse=tenant(name))
        assert gen.usage.cached_tokens == len(STORY)
    assert (await engine.generate(STORY, max_tokens=2, reuse=tenant("c"))).usage.cached_tokens == 0


async def test_concurrent_tenants_do_not_share_a_prefill(engine: KiteEngine, record: Any) -> None:
    steps = record(engine)
    gens = await asyncio.gather(
        *(engine.generate(STORY, max_tokens=1, reuse=ReusePolicy(namespace=name)) for name in ("a", "b"))
    )
    assert [gen.usage.cached_tokens for gen in gens] == [0, 0]
    assert steps.tokens == 2 * len(STORY)


async def test_a_namespace_secret_changes_every_key_but_no_answer(open_tiny: Any) -> None:
    keys, answers = [], []
    for secret in (None, b"one", b"two", b"one"):
        async with open_tiny(pool=PoolConfig(namespace_secret=secret)) as engine:
            policy = ReusePolicy(namespace="bank")
            answers.append((await engine.generate(STORY, max_tokens=2, reuse=policy)).token_ids)
            await engine.flush()
            keys.append(frozenset(engine.pool.memory.keys()))
    assert keys[1] == keys[3]
    assert not keys[0] & keys[1]
    assert not keys[0] & keys[2]
    assert not keys[1] & keys[2]
    assert answers[0] == answers[1] == answers[2]


# Bounds and failures of the pool


PROMPTS = [tokens(40, 100 + 50 * i) for i in range(6)]


async def answers_of(engine: KiteEngine) -> list[list[int]]:
    found = []
    for _ in range(2):
        for prompt in PROMPTS:
            found.append((await engine.generate(prompt, max_tokens=4, ignore_eos=True)).token_ids)
            await evict_context(engine)
    return found


@pytest.fixture
async def right_answers(open_tiny: Any) -> list[list[int]]:
    async with open_tiny(reuse=OFF) as engine:
        return await answers_of(engine)


@pytest.mark.parametrize("memory_bytes", [0, 1, 5000, 60_000, 10**9])
async def test_a_tiny_pool_is_kept_and_changes_no_answer(
    open_tiny: Any, right_answers: list[list[int]], memory_bytes: int
) -> None:
    async with open_tiny(pool=PoolConfig(memory_bytes=memory_bytes)) as engine:
        assert await answers_of(engine) == right_answers
        stats = engine.stats()["pool"]["memory"]
        assert stats["bytes"] <= memory_bytes
        assert stats["refused"] == 0
        if memory_bytes == 10**9:
            assert stats["hits"] > 0
        if memory_bytes == 0:
            assert engine.stats()["recycler"] == {"registered": 0, "dropped": 0, "pending_bytes": 0}


class Faulty(MemoryStore):
    """A memory tier whose contract methods go wrong on schedule; its own methods work."""

    def __init__(self, fault: Fault, operation: Operation) -> None:
        super().__init__(10**9)
        self.outer = FaultyStore(_Plain(self), fault_every(1, fault, operation))

    async def get_many(self, keys: Any) -> Any:
        return await self.outer.get_many(keys)

    async def put_many(self, items: Any) -> None:
        await self.outer.put_many(items)

    async def leading_run(self, keys: Any) -> int:
        return await self.outer.leading_run(keys)


class _Plain:
    """The inherited methods of a store, past its own."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(super(Faulty, self._store), name)


@pytest.mark.parametrize("operation", ["get_many", "put_many", "leading_run"])
@pytest.mark.parametrize("kind", ["fail", "lose", "corrupt", "truncate", "swap"])
async def test_a_broken_store_is_a_miss_and_never_an_answer(
    open_tiny: Any, right_answers: list[list[int]], operation: Operation, kind: Any
) -> None:
    async with open_tiny() as engine:
        engine.pool.memory = faulty = Faulty(Fault(kind), operation)
        assert await answers_of(engine) == right_answers
        assert faulty.outer.faults > 0
        stats = engine.stats()
        if kind == "fail" and operation == "put_many":
            assert stats["recycler"]["dropped"] > 0
        elif kind == "fail" or (kind in ("corrupt", "truncate") and operation != "leading_run"):
            assert stats["pool"]["memory"]["refused"] > 0
        await assert_nothing_left(engine)


async def test_a_codec_that_breaks_is_a_miss(
    open_tiny: Any, right_answers: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **options: Any) -> Any:
        raise ZeroDivisionError("a bug in a codec")

    async with open_tiny() as engine:
        monkeypatch.setattr("kitelib.stores.pool.unpack", broken)
        assert await answers_of(engine) == right_answers
        assert engine.stats()["pool"]["memory"]["refused"] > 0


async def test_a_key_protects_what_is_stored(open_tiny: Any, right_answers: list[list[int]]) -> None:
    async with open_tiny(pool=PoolConfig(hmac_key=b"k" * 32)) as engine:
        assert await answers_of(engine) == right_answers
        assert engine.stats()["pool"]["memory"]["hits"] > 0
        engine.pool._hmac_key = b"x" * 32
        gen = await engine.generate(PROMPTS[0], max_tokens=4, ignore_eos=True)
        assert (gen.token_ids, gen.usage.cached_tokens) == (right_answers[0], 0)
        assert engine.stats()["pool"]["memory"]["refused"] > 0


async def test_units_can_be_looked_up_by_fingerprint(open_tiny: Any) -> None:
    async with open_tiny() as engine:
        await engine.generate(STORY, max_tokens=1)
        await engine.flush()
        key = next(key for key in engine.pool.memory.keys() if ":kv:" in key)  # noqa: SIM118
        (unit,) = await engine.pool.get_rus_by_cf(bytes.fromhex(key.rsplit(":", 1)[1]))
        assert unit.kind == "kv"
        assert set(unit.token_ids.tolist()) <= set(STORY)
        assert await engine.pool.get_rus_by_cf(bytes(32)) == []
