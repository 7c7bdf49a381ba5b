"""A tier never raises for what its store does, never waits longer than it may, and accounts for every byte."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence

import anyio
import pytest

from kitelib.abc import Store, StoreStats
from kitelib.errors import StoreError
from kitelib.runtime import supervisor as supervisor_module
from kitelib.runtime.supervisor import Supervisor
from kitelib.runtime.threads import ThreadDoor
from kitelib.stores import guard as guard_module
from kitelib.stores.memory import MemoryStore
from kitelib.stores.tier import Pending, Tier
from kitelib.testing import Fault, FaultyStore, fault_every
from tests.support.event_loop import MeasureLoopGap, quietest
from tests.support.shared_memory import HandClock, SharedMemory

ROOM = 64 * 2**20


def make(store: Store, *, name: str = "redis", timeout_s: float = 2.0, write_bytes: int = 2**20, **options) -> Tier:
    return Tier(name, store, door=ThreadDoor(), timeout_s=timeout_s, write_bytes=write_bytes, **options)


def pending(key: str, value: bytes, encode: Callable[[Tier], bytes] | None = None) -> Pending:
    return Pending(key, len(value), encode or (lambda _: value))


def items(count: int, size: int = 100) -> list[tuple[str, bytes]]:
    return [(f"key {index}", bytes([index % 256]) * size) for index in range(count)]


class running:
    """The writers of tiers, kept by a supervisor."""

    def __init__(self, *tiers: Tier) -> None:
        self.tiers = tiers
        self.supervisor = Supervisor()

    async def __aenter__(self) -> Supervisor:
        self.supervisor.start()
        for tier in self.tiers:
            self.supervisor.keep(tier.name, tier.run_writer)
        return self.supervisor

    async def __aexit__(self, *_: object) -> None:
        await self.supervisor.aclose()
        for tier in self.tiers:
            await tier.aclose()


class Lying(MemoryStore):
    """Gives whatever a test wants it to."""

    answer: object = None

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        return self.answer  # type: ignore[return-value]

    async def leading_run(self, keys: Sequence[str]) -> int:
        return self.answer  # type: ignore[return-value]

    async def delete_many(self, keys: Sequence[str]) -> int:
        return self.answer  # type: ignore[return-value]

    async def stats(self) -> StoreStats:
        return self.answer  # type: ignore[return-value]


class Deaf(MemoryStore):
    """Hangs, and does not end when it is cancelled until `let_go` is set."""

    def __init__(self) -> None:
        super().__init__(ROOM)
        self.let_go = asyncio.Event()
        self.hanging = 0

    async def _hang(self) -> None:
        self.hanging += 1
        while not self.let_go.is_set():
            try:
                await self.let_go.wait()
            except asyncio.CancelledError:
                continue
        self.hanging -= 1

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        await self._hang()
        return await super().get_many(keys)

    async def leading_run(self, keys: Sequence[str]) -> int:
        await self._hang()
        return len(keys)

    async def aclose(self) -> None:
        await self._hang()


class Gated(MemoryStore):
    """Reads and writes wait at a gate; counts what comes through."""

    def __init__(self) -> None:
        super().__init__(ROOM)
        self.gate = asyncio.Event()
        self.reads: list[list[str]] = []
        self.writes: list[list[str]] = []
        self.cancelled = 0

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        self.reads.append(list(keys))
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return await super().get_many(keys)

    async def put_many(self, values: Sequence[tuple[str, bytes]]) -> None:
        self.writes.append([key for key, _ in values])
        await self.gate.wait()
        await super().put_many(values)


# Reading


async def test_order_and_misses_are_kept() -> None:
    """B28: answers come in the order of the keys, with None where there is no value, repeats included."""
    store = MemoryStore(ROOM)
    await store.put_many([("a", b"1"), ("c", b""), ("d", b"4")])
    tier = make(store)
    assert await tier.get_many(["c", "b", "a", "c", "x", "d"]) == [b"", None, b"1", b"", None, b"4"]
    assert await tier.leading_run(["a", "c", "b", "d"]) == 2
    assert await tier.get_many([]) == []
    assert await tier.leading_run([]) == 0
    assert (tier.counters()["hits"], tier.counters()["misses"]) == (4, 2)
    assert tier.cost.measured


@pytest.mark.parametrize(
    "answer",
    [None, [], [b"1"], [b"1", None, b"3"], ["1", None], [b"1", bytearray(b"2")], (b"1", b"2"), 7, [1, 2]],
)
async def test_an_answer_that_is_none_is_a_miss_and_an_error(answer: object) -> None:
    """B31: nothing of an answer that is wrong in any way is used."""
    store = Lying(ROOM)
    store.answer = answer
    tier = make(store)
    assert await tier.get_many(["a", "b"]) == [None, None]
    assert (tier.counters()["errors"], tier.counters()["misses"]) == (1, 2)
    assert not tier.cost.measured


@pytest.mark.parametrize("answer", [None, True, -1, 3, 1.0, "2"])
async def test_a_count_that_can_not_be_one_is_zero_and_an_error(answer: object) -> None:
    store = Lying(ROOM)
    store.answer = answer
    tier = make(store)
    assert await tier.leading_run(["a", "b"]) == 0
    assert await tier.delete_many(["a", "b"]) == 0
    await tier.refresh()
    assert tier.counters()["errors"] == 3
    assert tier.breaker.state == "open"


async def test_an_open_breaker_misses_without_a_call_and_a_probe_closes_it() -> None:
    clock = HandClock()
    store = SharedMemory()
    await store.put_many([("a", b"1")])
    tier = make(store, clock=clock)
    store.failing.add("all")
    for _ in range(3):
        assert await tier.get_many(["a"]) == [None]
    calls = len(store.calls)
    assert await tier.get_many(["a"]) == [None]
    assert await tier.leading_run(["a"]) == 0
    assert await tier.delete_many(["a"]) == 0
    assert len(store.calls) == calls
    assert (tier.counters()["breaker"], tier.counters()["opened"], tier.counters()["errors"]) == ("open", 1, 3)
    store.failing.clear()
    clock.advance(1.21)
    assert await tier.get_many(["a"]) == [b"1"]
    assert tier.counters()["breaker"] == "closed"


async def test_every_failing_call_is_a_miss() -> None:
    inner = MemoryStore(ROOM)
    await inner.put_many(items(10))
    tier = make(FaultyStore(inner, fault_every(2, Fault("fail"))))
    keys = [key for key, _ in items(10)]
    for turn in range(10):
        found = await tier.get_many(keys)
        assert found == ([value for _, value in items(10)] if turn % 2 == 0 else [None] * 10)
    assert tier.counters()["errors"] == 5
    assert tier.counters()["breaker"] == "closed"  # never two failures in a row


async def test_a_slow_store_is_a_miss_in_time_and_looks_as_slow_as_it_is() -> None:
    """B29: a read that is given up counts with the time it took, or a slow tier would look fast."""
    store = SharedMemory()
    await store.put_many([("a", bytes(1000))])
    tier = make(store)
    assert await tier.get_many(["a"]) == [bytes(1000)]
    quick = tier.cost.read_seconds(1000)
    store.delays = {"get_many": 3600.0, "leading_run": 3600.0}
    for _ in range(8):
        assert await tier.get_many(["a"], timeout_s=0.05) == [None]
        tier.breaker.succeed()
    assert tier.counters()["timeouts"] == 8
    assert tier.cost.read_seconds(1000) > max(quick, 0.03)


async def test_reads_that_callers_cancel_for_being_slow_count_as_slow() -> None:
    store = SharedMemory()
    await store.put_many([("a", bytes(1000))])
    store.delays = {"get_many": 3600.0}
    tier = make(store, name="disk")
    for _ in range(3):
        with anyio.move_on_after(0.05):
            await tier.get_many(["a"])
        await asyncio.sleep(0)
    assert tier.cost.read_seconds(1000) > 0.04


async def test_a_store_that_ignores_cancellation_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call past its time is left behind, and only so many may hang before the store is not called any more."""
    monkeypatch.setattr(guard_module, "_MAX_ABANDONED", 4)
    monkeypatch.setattr(guard_module, "_CLOSE_S", 0.05)
    monkeypatch.setattr(guard_module, "_GRACE_S", 0.05)
    store = Deaf()
    tier = make(store, timeout_s=0.02)
    for _ in range(12):
        assert await tier.get_many(["a"]) == [None]
        assert await tier.leading_run(["a"]) == 0
        tier.breaker.succeed()  # as if it were only now and then
    assert store.hanging == 4
    await tier.aclose()  # ends although the store hangs on
    assert store.hanging == 5
    store.let_go.set()
    while store.hanging:
        await asyncio.sleep(0.001)


async def test_a_hanging_store_costs_a_caller_its_timeout_at_most() -> None:
    store = Deaf()
    tier = make(store, timeout_s=0.05)
    with anyio.fail_after(5):
        assert await tier.get_many(["a"]) == [None]
    store.let_go.set()
    await tier.aclose()


async def test_a_long_run_from_a_slow_tier_may_take_its_time() -> None:
    """B29: the limit for silence does not cut a read that takes long because it brings much."""
    store = SharedMemory()
    keys = [f"key {index}" for index in range(5)]
    await store.put_many([(key, bytes(2**20)) for key in keys])
    tier = make(store, timeout_s=0.2)
    assert None not in await tier.get_many(keys)
    store.delays = {"get_many": 0.35}
    assert await tier.get_many(keys) == [None] * 5  # looked quick so far
    for _ in range(50):
        tier.cost.note_read(10 * 2**20, 0.7)
    assert None not in await tier.get_many(keys)
    store.delays = {"get_many": 3600.0}
    with anyio.fail_after(10):  # and still no more than ten times its limit
        assert await tier.get_many(keys) == [None] * 5


# Single flight


async def test_a_key_is_read_once_however_many_want_it() -> None:
    store = Gated()
    store.put("a", b"A")
    store.put("b", b"B")
    store.put("c", b"C")
    tier = make(store)
    with anyio.fail_after(5):
        readers = [asyncio.create_task(tier.get_many(keys)) for keys in (["a", "b"], ["b", "c", "b"], ["a"], ["c"])]
        await asyncio.sleep(0.01)
        store.gate.set()
        assert [await reader for reader in readers] == [[b"A", b"B"], [b"B", b"C", b"B"], [b"A"], [b"C"]]
    assert store.reads == [["a", "b"], ["c"]]
    assert await tier.get_many(["a"]) == [b"A"]
    assert store.reads[-1] == ["a"]  # only what is under way is shared, nothing is kept


async def test_cancelling_one_reader_leaves_the_others_alone() -> None:
    """B12: a cancelled caller takes nobody's read along; the last one ends it."""
    store = Gated()
    store.put("a", b"A")
    tier = make(store)
    readers = [asyncio.create_task(tier.get_many(["a"])) for _ in range(3)]
    await asyncio.sleep(0.01)
    readers[0].cancel()
    await asyncio.sleep(0.01)
    assert store.cancelled == 0
    readers[1].cancel()
    await asyncio.sleep(0.01)
    store.gate.set()
    assert await readers[2] == [b"A"]

    store.gate.clear()
    alone = asyncio.create_task(tier.get_many(["a"]))
    await asyncio.sleep(0.01)
    alone.cancel()
    again = asyncio.create_task(tier.get_many(["a"]))  # does not join what is being cancelled
    await asyncio.sleep(0.01)
    assert store.cancelled == 1
    store.gate.set()
    assert await again == [b"A"]
    assert len(tier._flights) == 0


async def test_five_hundred_random_cancellations_leave_nothing_behind() -> None:
    """B12: whoever is not cancelled gets the right values, and no read stays listed as under way."""
    chance = random.Random(5)
    values = dict(items(40))
    inner = MemoryStore(ROOM)
    await inner.put_many(list(values.items()))

    class Slow(MemoryStore):
        async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
            await asyncio.sleep(chance.choice([0, 0, 0.001, 0.003]))
            return await inner.get_many(keys)

    tier = make(Slow(ROOM))
    cancelled = right = 0

    async def read(give_up_s: float | None) -> None:
        nonlocal cancelled, right
        keys = [f"key {chance.randrange(50)}" for _ in range(chance.randrange(1, 8))]
        with anyio.move_on_after(give_up_s) as scope:
            assert await tier.get_many(keys) == [values.get(key) for key in keys]
            right += 1
        cancelled += scope.cancelled_caught

    tasks: list[asyncio.Task[None]] = []
    native = 0
    while cancelled + native < 500:
        tasks = [task for task in tasks if not task.done() or task.cancelled() or task.result()]
        for _ in range(20):
            tasks.append(asyncio.create_task(read(chance.choice([None, 0.0, 0.0005, 0.002]))))
        await asyncio.sleep(chance.choice([0, 0.001]))
        for task in chance.sample(tasks, 4):
            native += task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert right > 100
    assert len(tier._flights) == 0
    assert not tier._flights._tasks
    assert await tier.get_many(list(values)) == list(values.values())
    while tier._guard.num_abandoned:
        await asyncio.sleep(0.001)
    assert tier.counters()["errors"] == 0


async def test_who_reads_after_a_deletion_or_an_invalidation_reads_anew() -> None:
    """B20: an answer that was under way when everything was invalidated is not handed to later callers."""
    store = Gated()
    store.put("a", b"old")
    tier = make(store)
    for forget in (tier.void, lambda: asyncio.ensure_future(tier.delete_many(["a"]))):
        store.reads.clear()
        store.gate.clear()
        first = asyncio.create_task(tier.get_many(["a"]))
        await asyncio.sleep(0.01)
        forget()
        await asyncio.sleep(0.01)
        second = asyncio.create_task(tier.get_many(["a"]))
        await asyncio.sleep(0.01)
        store.gate.set()
        await first
        await second
        assert store.reads == [["a"], ["a"]]


# Writing


async def test_what_is_offered_is_written_once() -> None:
    store = Gated()
    tier = make(store)
    async with running(tier):
        tier.offer([pending("a", b"A"), pending("a", b"A"), pending("b", b"B")])
        tier.offer([pending("b", b"B")])
        await asyncio.sleep(0.05)
        tier.offer([pending("a", b"A"), pending("c", b"C")])  # "a" is being written
        store.gate.set()
        assert await tier.drain(5) == 0
        assert sorted(key for keys in store.writes for key in keys) == ["a", "b", "c"]
        assert await tier.get_many(["a", "b", "c"]) == [b"A", b"B", b"C"]
        assert (tier.counters()["written"], tier.counters()["pending_bytes"], tier.counters()["dropped"]) == (3, 0, 0)


async def test_past_the_bound_new_values_are_dropped_and_counted() -> None:
    """B26, B27: bytes on the way are bounded, new writes give way first, and every drop is counted."""
    store = Gated()
    tier = make(store, write_bytes=1000)
    async with running(tier):
        for index in range(100):
            tier.offer([pending(f"key {index}", bytes(100))])
            assert tier.counters()["pending_bytes"] <= 1000
            if index % 10 == 0:
                await asyncio.sleep(0.001)
        assert (tier.counters()["pending_bytes"], tier.counters()["dropped"]) == (1000, 90)
        tier.offer([pending("big", bytes(1001))])
        assert tier.counters()["dropped"] == 91
        store.gate.set()
        assert await tier.drain(5) == 0
        assert (tier.counters()["written"], tier.counters()["pending_bytes"]) == (10, 0)
        tier.offer([pending("big", bytes(1000))])
        assert await tier.drain(5) == 0
        assert tier.counters()["written"] == 11


async def test_values_that_can_not_be_encoded_or_written_are_dropped_alone(caplog: pytest.LogCaptureFixture) -> None:
    """B26: each loss is counted, and takes no other value along."""
    store = SharedMemory()
    tier = make(store)

    def broken(_: Tier) -> bytes:
        raise ValueError("no such codec")

    async with running(tier):
        tier.offer([pending("a", b"A"), pending("b", b"B", broken), pending("c", b"C")])
        await tier.drain(5)
        assert await tier.get_many(["a", "b", "c"]) == [b"A", None, b"C"]
        store.failing.add("put_many")
        tier.offer([pending("d", b"D"), pending("e", b"E")])
        await tier.drain(5)
        store.failing.clear()
        tier.offer([pending("f", b"F")])
        await tier.drain(5)
        counters = tier.counters()
        assert (counters["written"], counters["dropped"], counters["pending_bytes"]) == (3, 3, 0)
    assert "no such codec" in caplog.text


async def test_what_the_store_drops_is_counted_once() -> None:
    """B26: values that a store silently does not keep show in the tier's counters."""
    tier = make(MemoryStore(2000))
    async with running(tier):
        tier.offer([pending("big", bytes(5000)), pending("small", b"x")])
        await tier.drain(5)
        await tier.refresh()
        assert (tier.counters()["dropped"], tier.counters()["items"]) == (1, 1)


async def test_with_an_open_breaker_values_are_dropped_before_they_are_encoded() -> None:
    tier = make(MemoryStore(ROOM), clock=HandClock())
    for _ in range(3):
        tier._write_guard.breaker.fail()
    async with running(tier):
        tier.offer([pending("a", b"A", lambda _: pytest.fail("encoded"))])
        await tier.drain(5)
        assert (tier.counters()["dropped"], tier.counters()["written"]) == (1, 0)


async def test_a_store_that_takes_no_writes_is_still_read() -> None:
    """B26: a full or read-only store costs the writes, counted, and nothing else."""
    store = SharedMemory()
    await store.put_many([("a", b"A")])
    store.failing.add("put_many")
    tier = make(store, clock=HandClock())
    async with running(tier):
        for index in range(10):
            tier.offer([pending(f"key {index}", b"x")])
            await tier.drain(5)
        assert await tier.get_many(["a"]) == [b"A"]
        counters = tier.counters()
        assert (counters["dropped"], counters["errors"]) == (10, 3)
        assert (counters["breaker"], counters["write_breaker"]) == ("closed", "open")


async def test_the_writer_comes_back_after_any_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    """B30: whatever kills the writer, the supervisor starts it again, with growing delays and right accounts."""
    monkeypatch.setattr(supervisor_module, "_RESTART_DELAYS_S", (0.0, 0.001, 0.002))
    tier = make(MemoryStore(ROOM))
    door = tier._door
    failures = 0

    class Broken(ThreadDoor):
        async def run(self, job, *, discard=None):
            nonlocal failures
            failures += 1
            if failures % 2:
                raise MemoryError("no thread to be had")
            return await door.run(job)

    tier._door = Broken()
    async with running(tier):
        for index in range(10):
            tier.offer([pending(f"key {index}", bytes(100))])
            assert await tier.drain(5) == 0
        counters = tier.counters()
        assert (counters["written"], counters["dropped"], counters["pending_bytes"]) == (5, 5, 0)


async def test_draining_ends_at_its_deadline_and_says_what_was_lost() -> None:
    """B26: what is still on its way when the deadline comes is counted, not forgotten."""
    store = Gated()  # never opens
    tier = make(store, write_bytes=2**20)
    async with running(tier):
        tier.offer([pending(key, value) for key, value in items(100)])
        await asyncio.sleep(0.05)
        with anyio.fail_after(5):
            assert await tier.drain(0.05) == 100
        assert (tier.counters()["dropped"], tier.counters()["pending_bytes"]) == (100, 0)
        store.gate.set()
        tier.offer([pending("a", b"A")])  # the writer goes on
        assert await tier.drain(5) == 0
        assert await tier.get_many(["a"]) == [b"A"]


async def test_draining_without_a_writer_ends_too() -> None:
    tier = make(MemoryStore(ROOM))
    assert await tier.drain(0.01) == 0
    tier.offer([pending("a", b"A")])
    with anyio.fail_after(5):
        assert await tier.drain(0.01) == 1
    await tier.aclose()


async def test_after_an_invalidation_nothing_queued_arrives() -> None:
    """B20: what waits, and what is encoded but has not left, is void; it does not count as dropped."""
    store = Gated()
    store.gate.set()
    tier = make(store)
    begun, go_on = asyncio.Event(), False
    loop = asyncio.get_running_loop()

    def slow(_: Tier) -> bytes:
        loop.call_soon_threadsafe(begun.set)
        while not go_on:
            time.sleep(0.001)
        return b"old"

    async with running(tier):
        tier.offer([pending("a", b"old", slow), pending("d", b"old")])
        await begun.wait()
        tier.offer([pending("b", b"old")])
        tier.void()
        tier.offer([pending("a", b"new"), pending("c", b"new")])
        go_on = True
        assert await tier.drain(5) == 0
        assert await tier.get_many(["a", "b", "c", "d"]) == [b"new", None, b"new", None]
        assert store.writes == [["a", "c"]]
        counters = tier.counters()
        assert (counters["written"], counters["dropped"], counters["pending_bytes"]) == (2, 0, 0)


async def test_deleting_a_key_takes_it_off_the_queue() -> None:
    tier = make(MemoryStore(ROOM))
    tier.offer([pending("a", b"A"), pending("b", b"B")])
    await tier.delete_many(["a"])
    async with running(tier):
        await tier.drain(5)
        assert await tier.get_many(["a", "b"]) == [None, b"B"]


async def test_the_loop_is_never_held_up_by_writing(loop_gap: MeasureLoopGap) -> None:
    """B36: offering, encoding and writing 1000 values leaves the event loop free."""
    store = MemoryStore(ROOM)
    tier = make(store, write_bytes=ROOM)
    blob = bytes(24 * 1024)

    def encode(_: Tier) -> bytes:
        return bytes(byte ^ 1 for byte in blob[:2000]) + blob  # as slow as a codec in Python

    async with running(tier):
        await asyncio.sleep(0.01)

        async def write() -> None:
            before = tier.counters()["written"]
            tier.offer([Pending(f"key {index}", len(blob), encode) for index in range(1000)])
            assert await tier.drain(60) == 0
            assert tier.counters()["written"] == before + 1000

        gap = await quietest(loop_gap, 0.010, write)
        assert gap.longest_cpu_s < 0.010


# Closing


async def test_a_closed_tier_misses_and_drops() -> None:
    store = Gated()
    store.put("a", b"A")
    tier = make(store)
    reader = asyncio.create_task(tier.get_many(["a"]))
    tier.offer([pending("b", b"B")])
    await asyncio.sleep(0.01)
    await tier.aclose()
    await tier.aclose()
    assert await reader == [None]
    assert await tier.get_many(["a"]) == [None]
    assert await tier.leading_run(["a"]) == 0
    tier.offer([pending("c", b"C")])
    assert tier.counters()["dropped"] == 2
    assert tier.counters()["pending_bytes"] == 0


async def test_a_store_that_fails_to_close_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Sticky(MemoryStore):
        async def aclose(self) -> None:
            raise StoreError("stuck")

    await make(Sticky(ROOM)).aclose()
    assert "stuck" in caplog.text
