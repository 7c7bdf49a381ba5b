"""`check_store` proves a store."""

from __future__ import annotations

import inspect
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import anyio
import anyio.lowlevel

from kitelib.abc import Store

__all__ = ["check_store", "opened", "require", "unit_key"]

S = TypeVar("S", bound=Store)
MakeStore = Callable[[], Awaitable[Store] | Store]

_LARGE_BYTES = 4 * 2**20


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
        _sizes_from_one_byte_up_are_kept,
        _a_thousand_keys_keep_their_places,
        _every_part_of_a_key_counts,
        _deleting_while_reading_tears_nothing,
    ):
        async with opened(make_store) as store:
            await promise(store)
            require((await store.stats()).errors == 0, "errors must stay 0 while nothing fails")
    async with opened(make_store) as store:
        await _cancelled_calls_break_nothing(store)
    await _closing_twice_is_fine(make_store)


async def _misses_are_none(store: Store) -> None:
    require(
        await store.get_many([unit_key(0), unit_key(1)]) == [None, None],
        "an empty store must answer None for every key",
    )
    await store.put_many([(unit_key(0), b"value")])
    found = await store.get_many([unit_key(1), unit_key(0), unit_key(2)])
    require(found == [None, b"value", None], "misses must stay in the answer as None, at their key's position")


async def _order_and_duplicates_are_kept(store: Store) -> None:
    await store.put_many([(unit_key(index), b"%d" % index) for index in range(20)])
    wanted = [7, 3, 3, 19, 0, 3]
    found = await store.get_many([unit_key(index) for index in wanted])
    require(found == [b"%d" % index for index in wanted], "values must come in the order of the keys, repeats included")


async def _values_are_binary(store: Store) -> None:
    values = [b"", b"\0", b"\r\n\x1a\x00", bytes(range(256)) * 3, b"\xff" * 100_003]
    await store.put_many([(unit_key(index), value) for index, value in enumerate(values)])
    found = await store.get_many([unit_key(index) for index in range(len(values))])
    require(found == values, "values must come back byte for byte, the empty one too")
    require(all(type(value) is bytes for value in found), "values must be bytes")


async def _put_replaces(store: Store) -> None:
    await store.put_many([(unit_key(0), b"old" * 100)])
    await store.put_many([(unit_key(0), b"new")])
    require(await store.get_many([unit_key(0)]) == [b"new"], "put_many must replace what a key held")
    require((await store.stats()).items == 1, "replacing must not count as another item")
    await store.put_many([(unit_key(1), b"first"), (unit_key(1), b"second")])
    require(await store.get_many([unit_key(1)]) == [b"second"], "of two items with one key, the later must win")


async def _empty_input_is_fine(store: Store) -> None:
    await store.put_many([])
    require(await store.get_many([]) == [], "get_many([]) must give []")
    require(await store.leading_run([]) == 0, "leading_run([]) must give 0")
    require(await store.delete_many([]) == 0, "delete_many([]) must give 0")


async def _leading_run_stops_at_the_first_miss(store: Store) -> None:
    await store.put_many([(unit_key(index), b"x") for index in (0, 1, 3)])
    keys = [unit_key(index) for index in range(4)]
    require(await store.leading_run(keys) == 2, "leading_run must stop at the first key that is not there")
    require(await store.leading_run(keys[:2]) == 2, "leading_run must count all keys when all are there")
    require(await store.leading_run(keys[2:]) == 0, "leading_run must give 0 when the first key is not there")


async def _delete_counts(store: Store) -> None:
    await store.put_many([(unit_key(index), b"x") for index in range(3)])
    deleted = await store.delete_many([unit_key(0), unit_key(9), unit_key(2)])
    require(deleted == 2, "delete_many must count only the keys that existed")
    require(
        await store.get_many([unit_key(0), unit_key(1)]) == [None, b"x"],
        "delete_many must delete what it was given, only",
    )
    require(await store.delete_many([unit_key(0)]) == 0, "deleting a second time must count nothing")
    require(await store.leading_run([unit_key(2)]) == 0, "a deleted key must not exist any more")


async def _replacing_is_atomic(store: Store) -> None:
    values = {bytes([letter]) * size for letter, size in ((65, 60_000), (66, 90_000), (67, 10))}
    await store.put_many([(unit_key(0), min(values))])
    torn: list[bytes | None] = []  # collected, since a raise in a task would come out wrapped in an exception group
    done = anyio.Event()

    async def write() -> None:
        for _ in range(10):
            for value in values:
                await store.put_many([(unit_key(0), value)])
                await anyio.lowlevel.checkpoint()
        done.set()

    async def read() -> None:
        while not done.is_set():
            (found,) = await store.get_many([unit_key(0)])
            if found not in values:
                torn.append(found)
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as group:
        group.start_soon(read)
        group.start_soon(read)
        group.start_soon(write)
    require(not torn, "a reader must see a whole old or a whole new value while one is replaced")


async def _concurrent_calls_keep_their_answers(store: Store) -> None:
    wrong: list[str] = []

    async def use(task: int) -> None:
        keys = [unit_key(100 * task + index) for index in range(10)]
        values = [b"%d/%d" % (task, index) * 50 for index in range(10)]
        for _ in range(5):
            await store.put_many(list(zip(keys, values, strict=True)))
            answers = (await store.get_many(keys), await store.leading_run(keys), await store.delete_many(keys))
            if answers != (values, 10, 10):
                wrong.append(f"task {task}")

    async with anyio.create_task_group() as group:
        for task in range(8):
            group.start_soon(use, task)
    require(not wrong, "concurrent calls must not see each other's answers")
    require((await store.stats()).items == 0, "nothing must be left when every task deleted what it stored")


async def _stats_move(store: Store) -> None:
    before = await store.stats()
    require((before.items, before.bytes) == (0, 0), "an empty store must have no items and no bytes")
    await store.put_many([(unit_key(0), b"x" * 5000), (unit_key(1), b"y" * 3000)])
    await store.get_many([unit_key(0), unit_key(1), unit_key(0), unit_key(7)])
    after = await store.stats()
    require(after.items == 2, "items must count the values that are there")
    require(after.bytes >= 8000, "bytes must count at least the bytes of the values")
    require(after.hits - before.hits == 3, "hits must count the keys that were found")
    require(after.misses - before.misses == 1, "misses must count the keys that were not found")
    await store.delete_many([unit_key(0), unit_key(1)])
    empty = await store.stats()
    require((empty.items, empty.bytes) == (0, 0), "after deleting everything, items and bytes must be 0")


async def _sizes_from_one_byte_up_are_kept(store: Store) -> None:
    large = random.Random(1).randbytes(_LARGE_BYTES)  # noqa: S311 - no secret
    await store.put_many([(unit_key(0), large), (unit_key(1), b"1")])
    found = await store.get_many([unit_key(1), unit_key(0)])
    require(found == [b"1", large], "a value of 4 MiB and one of one byte must come back byte for byte")
    await store.put_many([(unit_key(0), b"2")])
    require(await store.get_many([unit_key(0)]) == [b"2"], "one byte must replace 4 MiB, and nothing of them may stay")
    require((await store.stats()).bytes < _LARGE_BYTES, "bytes must go down when a small value replaces a large one")


async def _a_thousand_keys_keep_their_places(store: Store) -> None:
    values = {unit_key(index): b"%d" % index * 20 for index in range(200)}
    await store.put_many(list(values.items()))
    wanted = [unit_key(index * 7 % 400) for index in range(1000)]  # half of them are not there, all come repeatedly
    found = await store.get_many(wanted)
    require(found == [values.get(key) for key in wanted], "get_many must answer 1000 keys in their order")
    require(await store.leading_run([*values, unit_key(300)]) == 200, "leading_run must count 200 keys, and then stop")
    require(await store.delete_many(list(values)) == 200, "delete_many must delete 200 keys at once")
    require(await store.leading_run(list(values)) == 0, "nothing must be left of 200 keys that were deleted")


async def _every_part_of_a_key_counts(store: Store) -> None:
    key = unit_key(5)
    others = [
        key.replace(":kv:", ":logits:"),
        key.replace(":0123456789abcdef:", ":0123456789abcdee:"),
        key[:-1] + ("0" if key[-1] != "0" else "1"),
    ]
    await store.put_many([(key, b"kv")])
    require(await store.get_many(others) == [None] * 3, "a key that differs in kind, model or fingerprint is another")
    await store.put_many([(other, b"%d" % index) for index, other in enumerate(others)])
    found = await store.get_many([key, *others])
    require(found == [b"kv", b"0", b"1", b"2"], "keys that differ in kind, model or fingerprint must not share a value")
    require(
        await store.delete_many(others) == 3, "keys that differ in kind, model or fingerprint are deleted one by one"
    )
    require(await store.get_many([key]) == [b"kv"], "deleting a key must not touch one that resembles it")


async def _deleting_while_reading_tears_nothing(store: Store) -> None:
    value = bytes(range(256)) * 400
    torn: list[int] = []
    done = anyio.Event()

    async def come_and_go() -> None:
        for _ in range(15):
            await store.put_many([(unit_key(0), value)])
            await anyio.lowlevel.checkpoint()
            await store.delete_many([unit_key(0)])
        done.set()

    async def read() -> None:
        while not done.is_set():
            torn.extend(len(found) for found in await store.get_many([unit_key(0)]) if found not in (None, value))
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as group:
        group.start_soon(read)
        group.start_soon(read)
        group.start_soon(come_and_go)
    require(not torn, "a reader must see a whole value or none while it is deleted")


async def _cancelled_calls_break_nothing(store: Store) -> None:
    dice = random.Random(2)  # noqa: S311 - no secret
    values = {unit_key(index): b"%d;" % index * 3000 for index in range(12)}
    items = list(values.items())
    wrong: list[str] = []

    async def use(patience_s: float, start: int) -> None:
        keys = [key for key, _ in items[start:] + items[:start]]
        with anyio.move_on_after(patience_s):
            await store.put_many([(key, values[key]) for key in keys])
            await store.leading_run(keys)
            found = await store.get_many(keys)
            wrong.extend(key for key, value in zip(keys, found, strict=True) if value not in (None, values[key]))
            await store.delete_many(keys[:4])

    for _ in range(5):
        async with anyio.create_task_group() as group:
            for start in range(8):
                group.start_soon(use, dice.expovariate(50.0), start)
    require(not wrong, "a call must get the value of its own key, also when others are cancelled around it")
    found = await store.get_many(list(values))
    right = [value in (None, expected) for value, expected in zip(found, values.values(), strict=True)]
    require(all(right), "after cancelled calls, every key must have its whole value or none")
    await store.put_many(items)
    require(await store.get_many(list(values)) == list(values.values()), "a store must work on after cancelled calls")
    require(await store.delete_many(list(values)) == len(values), "a store must delete after cancelled calls")
    require((await store.stats()).items == 0, "cancelled calls must leave nothing behind that still counts")


async def _closing_twice_is_fine(make_store: MakeStore) -> None:
    async with opened(make_store) as store:
        await store.aclose()


@asynccontextmanager
async def opened(make_store: Callable[[], Awaitable[S] | S]) -> AsyncIterator[S]:
    """A store for the length of a block; closed at the end."""
    made = make_store()
    store = await made if inspect.isawaitable(made) else made
    try:
        yield store
    finally:
        await store.aclose()


def unit_key(number: int) -> str:
    """A key as `kitelib.fingerprint.store_key` builds them; distinct for distinct numbers, spread over slots."""
    cf = f"{number * 40503 % 65536:04x}{number:060x}"
    return f"kite:{{{cf[:4]}}}:0123456789abcdef:kv:{cf}"


def require(good: bool, promise: str) -> None:
    """Raises AssertionError with the promise, unless it is kept."""
    if not good:
        raise AssertionError(promise)
