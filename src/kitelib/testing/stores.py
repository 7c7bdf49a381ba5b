"""`check_store` proves a store, `FaultyStore` breaks one on schedule."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Literal

import anyio
import anyio.lowlevel

from kitelib.abc import Store, StoreStats
from kitelib.errors import StoreError

__all__ = ["Fault", "FaultyStore", "Operation", "check_store", "fault_every"]

MakeStore = Callable[[], Awaitable[Store] | Store]
Operation = Literal["get_many", "put_many", "leading_run", "delete_many", "stats"]
FaultKind = Literal["fail", "delay", "lose", "corrupt", "truncate", "swap"]


async def check_store(make_store: MakeStore) -> None:
    """Checks that a store keeps the contract of `kitelib.abc.Store`.

    Args:
        make_store: gives a new, empty store that holds at least 8 MiB; called once per promise. It may be `async`.

    Raises:
        AssertionError: a promise is broken; the message says which one.
    """
    for promise in (
        _misses_are_none,
        _order_and_duplicates_are_kept,
        _values_are_binary,
        _put_replaces,
        _empty_input_is_fine,
        _leading_run_stops_at_the_first_miss,
        _delete_counts,
        _replacing_is_atomic,
        _concurrent_calls_keep_their_answers,
        _stats_move,
    ):
        async with _opened(make_store) as store:
            await promise(store)
    await _closing_twice_is_fine(make_store)


async def _misses_are_none(store: Store) -> None:
    _require(await store.get_many([_key(0), _key(1)]) == [None, None], "an empty store must answer None for every key")
    await store.put_many([(_key(0), b"value")])
    found = await store.get_many([_key(1), _key(0), _key(2)])
    _require(found == [None, b"value", None], "misses must stay in the answer as None, at their key's position")


async def _order_and_duplicates_are_kept(store: Store) -> None:
    await store.put_many([(_key(index), b"%d" % index) for index in range(20)])
    wanted = [7, 3, 3, 19, 0, 3]
    found = await store.get_many([_key(index) for index in wanted])
    _require(
        found == [b"%d" % index for index in wanted], "values must come in the order of the keys, repeats included"
    )


async def _values_are_binary(store: Store) -> None:
    values = [b"", b"\0", b"\r\n\x1a\x00", bytes(range(256)) * 3, b"\xff" * 100_003]
    await store.put_many([(_key(index), value) for index, value in enumerate(values)])
    found = await store.get_many([_key(index) for index in range(len(values))])
    _require(found == values, "values must come back byte for byte, the empty one too")
    _require(all(type(value) is bytes for value in found), "values must be bytes")


async def _put_replaces(store: Store) -> None:
    await store.put_many([(_key(0), b"old" * 100)])
    await store.put_many([(_key(0), b"new")])
    _require(await store.get_many([_key(0)]) == [b"new"], "put_many must replace what a key held")
    _require((await store.stats()).items == 1, "replacing must not count as another item")
    await store.put_many([(_key(1), b"first"), (_key(1), b"second")])
    _require(await store.get_many([_key(1)]) == [b"second"], "of two items with one key, the later must win")


async def _empty_input_is_fine(store: Store) -> None:
    await store.put_many([])
    _require(await store.get_many([]) == [], "get_many([]) must give []")
    _require(await store.leading_run([]) == 0, "leading_run([]) must give 0")
    _require(await store.delete_many([]) == 0, "delete_many([]) must give 0")


async def _leading_run_stops_at_the_first_miss(store: Store) -> None:
    await store.put_many([(_key(index), b"x") for index in (0, 1, 3)])
    keys = [_key(index) for index in range(4)]
    _require(await store.leading_run(keys) == 2, "leading_run must stop at the first key that is not there")
    _require(await store.leading_run(keys[:2]) == 2, "leading_run must count all keys when all are there")
    _require(await store.leading_run(keys[2:]) == 0, "leading_run must give 0 when the first key is not there")


async def _delete_counts(store: Store) -> None:
    await store.put_many([(_key(index), b"x") for index in range(3)])
    deleted = await store.delete_many([_key(0), _key(9), _key(2)])
    _require(deleted == 2, "delete_many must count only the keys that existed")
    _require(
        await store.get_many([_key(0), _key(1)]) == [None, b"x"], "delete_many must delete what it was given, only"
    )
    _require(await store.delete_many([_key(0)]) == 0, "deleting a second time must count nothing")
    _require(await store.leading_run([_key(2)]) == 0, "a deleted key must not exist any more")


async def _replacing_is_atomic(store: Store) -> None:
    values = {bytes([letter]) * size for letter, size in ((65, 60_000), (66, 90_000), (67, 10))}
    await store.put_many([(_key(0), min(values))])
    torn: list[bytes | None] = []  # collected, since a raise in a task would come out wrapped in an exception group
    done = anyio.Event()

    async def write() -> None:
        for _ in range(10):
            for value in values:
                await store.put_many([(_key(0), value)])
                await anyio.lowlevel.checkpoint()
        done.set()

    async def read() -> None:
        while not done.is_set():
            (found,) = await store.get_many([_key(0)])
            if found not in values:
                torn.append(found)
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as group:
        group.start_soon(read)
        group.start_soon(read)
        group.start_soon(write)
    _require(not torn, "a reader must see a whole old or a whole new value while one is replaced")


async def _concurrent_calls_keep_their_answers(store: Store) -> None:
    wrong: list[str] = []

    async def use(task: int) -> None:
        keys = [_key(100 * task + index) for index in range(10)]
        values = [b"%d/%d" % (task, index) * 50 for index in range(10)]
        for _ in range(5):
            await store.put_many(list(zip(keys, values, strict=True)))
            answers = (await store.get_many(keys), await store.leading_run(keys), await store.delete_many(keys))
            if answers != (values, 10, 10):
                wrong.append(f"task {task}")

    async with anyio.create_task_group() as group:
        for task in range(8):
            group.start_soon(use, task)
    _require(not wrong, "concurrent calls must not see each other's answers")
    _require((await store.stats()).items == 0, "nothing must be left when every task deleted what it stored")


async def _stats_move(store: Store) -> None:
    before = await store.stats()
    _require((before.items, before.bytes) == (0, 0), "an empty store must have no items and no bytes")
    await store.put_many([(_key(0), b"x" * 5000), (_key(1), b"y" * 3000)])
    await store.get_many([_key(0), _key(1), _key(0), _key(7)])
    after = await store.stats()
    _require(after.items == 2, "items must count the values that are there")
    _require(after.bytes >= 8000, "bytes must count at least the bytes of the values")
    _require(after.hits - before.hits == 3, "hits must count the keys that were found")
    _require(after.misses - before.misses == 1, "misses must count the keys that were not found")
    await store.delete_many([_key(0), _key(1)])
    empty = await store.stats()
    _require((empty.items, empty.bytes) == (0, 0), "after deleting everything, items and bytes must be 0")


async def _closing_twice_is_fine(make_store: MakeStore) -> None:
    async with _opened(make_store) as store:
        await store.aclose()


@asynccontextmanager
async def _opened(make_store: MakeStore) -> AsyncIterator[Store]:
    made = make_store()
    store = await made if inspect.isawaitable(made) else made
    try:
        yield store
    finally:
        await store.aclose()


def _key(number: int) -> str:
    """A key as `kitelib.fingerprint.store_key` builds them; distinct for distinct numbers, spread over slots."""
    cf = f"{number * 40503 % 65536:04x}{number:060x}"
    return f"kite:{{{cf[:4]}}}:0123456789abcdef:kv:{cf}"


def _require(good: bool, promise: str) -> None:
    if not good:
        raise AssertionError(promise)


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        kind: "fail" raises `StoreError`; "delay" waits, then works; "lose" finds or stores nothing, silently;
            "corrupt" flips a bit in every value, "truncate" cuts every value in half, "swap" exchanges the values of
            neighbouring keys: on the way out of `get_many`, on the way in of `put_many`.
        delay_s: seconds that "delay" waits.
    """

    kind: FaultKind
    delay_s: float = 0.0


Schedule = Callable[[Operation, int], Fault | None]


def fault_every(n: int, fault: Fault, *operations: Operation) -> Schedule:
    """A schedule that strikes every n-th call of the given operations (of each, if none is given)."""

    def schedule(operation: Operation, call: int) -> Fault | None:
        return fault if call % n == n - 1 and (not operations or operation in operations) else None

    return schedule


class FaultyStore:
    """A `Store` that passes everything on to another and goes wrong on schedule.

    Args:
        inner: the store that does the work.
        schedule: called with the operation and how many calls of it came before; gives the fault, or None.

    Attributes:
        faults: how many calls went wrong so far.
    """

    def __init__(self, inner: Store, schedule: Schedule) -> None:
        self.inner = inner
        self.faults = 0
        self._schedule = schedule
        self._calls: dict[Operation, int] = {}

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Values of the inner store, or what the fault makes of them."""
        fault = await self._strike("get_many")
        if fault == "lose":
            return [None] * len(keys)
        found = await self.inner.get_many(keys)
        spoilt = iter(_spoil([value for value in found if value is not None], fault))
        return [None if value is None else next(spoilt) for value in found]

    async def put_many(self, items: Sequence[tuple[str, bytes]]) -> None:
        """Stores, or what the fault makes of it."""
        fault = await self._strike("put_many")
        if fault != "lose":
            values = _spoil([value for _, value in items], fault)
            await self.inner.put_many([(key, value) for (key, _), value in zip(items, values, strict=True)])

    async def leading_run(self, keys: Sequence[str]) -> int:
        """The inner store's answer; "lose" gives 0."""
        return 0 if await self._strike("leading_run") == "lose" else await self.inner.leading_run(keys)

    async def delete_many(self, keys: Sequence[str]) -> int:
        """The inner store's answer; "lose" deletes nothing."""
        return 0 if await self._strike("delete_many") == "lose" else await self.inner.delete_many(keys)

    async def stats(self) -> StoreStats:
        """The inner store's counters."""
        await self._strike("stats")
        return await self.inner.stats()

    async def aclose(self) -> None:
        """Closes the inner store; never goes wrong."""
        await self.inner.aclose()

    async def _strike(self, operation: Operation) -> FaultKind | None:
        call = self._calls.get(operation, 0)
        self._calls[operation] = call + 1
        fault = self._schedule(operation, call)
        if fault is None:
            return None
        self.faults += 1
        if fault.kind == "fail":
            raise StoreError(f"call {call} of {operation} fails on schedule")
        if fault.kind == "delay":
            await anyio.sleep(fault.delay_s)
        return fault.kind


def _spoil(values: list[bytes], fault: FaultKind | None) -> list[bytes]:
    if fault == "corrupt":
        return [_flip_bit(value) for value in values]
    if fault == "truncate":
        return [value[: len(value) // 2] for value in values]
    if fault == "swap":
        return values[1:] + values[:1]
    return values


def _flip_bit(value: bytes) -> bytes:
    middle = len(value) // 2
    return value[:middle] + bytes(byte ^ 0x10 for byte in value[middle : middle + 1]) + value[middle + 1 :]
