"""`check_shared_store` proves a store that several processes use, or that outlives one."""

from __future__ import annotations

import inspect
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import anyio
import anyio.lowlevel

from kitelib.abc import HitLedger, SharedStore, StoredItem
from kitelib.errors import KiteError
from kitelib.testing.stores import require, unit_key

__all__ = ["check_shared_store"]

MakeShared = Callable[[str], Awaitable[SharedStore] | SharedStore]
Two = tuple[SharedStore, SharedStore]

_MAX_EPOCH = 2**63 - 1
_DAY_S = 86400.0


async def check_shared_store(make_store: MakeShared) -> None:
    """Checks what `kitelib.abc.SharedStore` promises beyond `Store`, and `HitLedger` if it is one; run `check_store` too.

    Args:
        make_store: gives a new handle on the place with the given name (a folder, a database, a prefix); the places
            are empty at first, hold at least 8 MiB, and different names are different places. May be `async`.

    Raises:
        AssertionError: a promise is broken; the message says which one.
    """
    for number, promise in enumerate(
        (
            _both_see_what_one_does,
            _values_outlive_their_writer,
            _listing_is_complete,
            _listing_bears_changes,
            _heads_are_the_first_bytes,
            _epochs_only_grow,
            _epochs_are_no_values,
            _concurrent_raisers_agree,
            _bad_epochs_are_refused,
            _hits_add_up,
            _hits_are_no_values,
            _warming_is_idempotent,
        )
    ):
        async with _two(make_store, f"place-{number}") as (first, second):
            require(isinstance(first, SharedStore), "a shared store must have every method of SharedStore")
            if promise is _values_outlive_their_writer:
                await first.put_many([(unit_key(0), b"value")])
                await first.raise_epoch("model", 3)
                await first.aclose()
            await promise(first, second)
    async with _two(make_store, "place-0") as (first, _):
        await _places_are_apart(first, make_store)


async def _both_see_what_one_does(first: SharedStore, second: SharedStore) -> None:
    await first.put_many([(unit_key(0), b"zero"), (unit_key(1), b"one")])
    require(await second.get_many([unit_key(0)]) == [b"zero"], "a second handle must read what the first wrote")
    await second.put_many([(unit_key(0), b"new")])
    require(await first.get_many([unit_key(0)]) == [b"new"], "the first handle must read what the second replaced")
    require(await second.leading_run([unit_key(0), unit_key(1)]) == 2, "a second handle must count the same run")
    require(await second.delete_many([unit_key(0)]) == 1, "a second handle must delete what the first wrote")
    found = await first.get_many([unit_key(0), unit_key(1)])
    require(found == [None, b"one"], "the first handle must not find what the second deleted")
    require(await first.leading_run([unit_key(0)]) == 0, "the first handle must not count what the second deleted")


async def _values_outlive_their_writer(_: SharedStore, second: SharedStore) -> None:
    require(
        await second.get_many([unit_key(0)]) == [b"value"], "values must stay when the handle that wrote them closes"
    )
    require(await second.get_epoch("model") == 3, "epochs must stay when the handle that raised them closes")


async def _listing_is_complete(first: SharedStore, second: SharedStore) -> None:
    require(await _listed(first) == {}, "an empty store must list nothing")
    values = {unit_key(index): b"x" * index for index in range(150)}
    await first.put_many([*values.items(), ("not-ours", b"another program's")])
    await first.raise_epoch("model", 2)
    for store in (first, second):
        listed = await _listed(store)
        require(set(listed) == set(values), "list_items must list every key that starts with kite:, and no other")
        sizes = {key: item.num_bytes for key, item in listed.items()}
        require(sizes == {key: len(value) for key, value in values.items()}, "num_bytes must be the value's length")
        times = [at for item in listed.values() for at in (item.written_at, item.used_at) if at is not None]
        require(all(abs(at - time.time()) < _DAY_S for at in times), "times must be seconds since 1970")
    gone = list(values)[::2]
    await second.delete_many(gone)
    require(set(await _listed(first)) == set(values) - set(gone), "list_items must not list what was deleted")
    await first.delete_many(["not-ours"])


async def _listing_bears_changes(first: SharedStore, second: SharedStore) -> None:
    fixed = {unit_key(index) for index in range(40)}
    await first.put_many([(key, b"stays") for key in fixed])
    done = anyio.Event()

    async def change() -> None:
        passing = [unit_key(index) for index in range(100, 110)]
        for _ in range(5):
            await second.put_many([(key, b"passes") for key in passing])
            await anyio.sleep(0.003)
            await second.delete_many(passing)
            await anyio.sleep(0.003)
        done.set()

    missing: set[str] = set()
    async with anyio.create_task_group() as group:
        group.start_soon(change)
        while not done.is_set():
            missing |= fixed - set(await _listed(first))
            await anyio.lowlevel.checkpoint()
    require(not missing, "what does not change must be listed, whatever changes meanwhile")


async def _heads_are_the_first_bytes(first: SharedStore, second: SharedStore) -> None:
    await first.put_many([(unit_key(0), bytes(range(200))), (unit_key(1), b"short"), (unit_key(2), b"")])
    wanted = [unit_key(2), unit_key(9), unit_key(0), unit_key(1), unit_key(0)]
    for store in (first, second):
        heads = await store.get_heads(wanted, 100)
        right = [b"", None, bytes(range(100)), b"short", bytes(range(100))]
        require(heads == right, "get_heads must give the first bytes, None for a miss, in the order of the keys")
    require(await first.get_heads([], 100) == [], "get_heads([]) must give []")
    require(await first.get_many([unit_key(0)]) == [bytes(range(200))], "get_heads must leave the value whole")


async def _epochs_only_grow(first: SharedStore, second: SharedStore) -> None:
    require(await first.get_epoch("model-a") == 0, "an epoch that was never raised must be 0")
    require(await first.raise_epoch("model-a", 0) == 0, "raising an epoch to 0 must give 0")
    require(await first.raise_epoch("model-a", 5) == 5, "raise_epoch must give what the epoch is now")
    require(await second.get_epoch("model-a") == 5, "a second handle must see a raised epoch")
    require(
        await second.raise_epoch("model-a", 3) == 5, "raise_epoch must not lower an epoch, and give the greater one"
    )
    require(await first.get_epoch("model-a") == 5, "an epoch must not go down")
    require(await second.raise_epoch("model-a", 100) == 100, "a second handle must be able to raise an epoch")
    require(await first.get_epoch("model-a") == 100, "numbers must be compared as numbers, not as texts")
    require(await first.get_epoch("model-b") == 0, "epochs of different names must be independent")
    require(await first.get_epoch("model") == 0, "a name that begins like another is another name")
    name = "0123456789abcdefghijklmnopqrstuvwxyz_.-".ljust(64, "x")
    require(await first.raise_epoch(name, _MAX_EPOCH) == _MAX_EPOCH, "an epoch must reach 2**63 - 1")
    require(await second.get_epoch(name) == _MAX_EPOCH, "the greatest epoch must come back exactly")


async def _epochs_are_no_values(first: SharedStore, second: SharedStore) -> None:
    await first.raise_epoch("model", 7)
    stats = await second.stats()
    require((stats.items, stats.bytes) == (0, 0), "epochs must not count as items")
    require(await _listed(second) == {}, "list_items must not list epochs")
    await first.put_many([(unit_key(0), b"x")])
    await first.delete_many([item for page in [await _listed(first)] for item in page])
    require(await second.get_epoch("model") == 7, "an epoch must stay when every value is deleted")


async def _concurrent_raisers_agree(first: SharedStore, second: SharedStore) -> None:
    numbers = list(range(1, 41))
    random.Random(3).shuffle(numbers)  # noqa: S311 - no secret
    broken: list[str] = []
    done = anyio.Event()

    async def raise_all(store: SharedStore, mine: list[int]) -> None:
        for number in mine:
            if await store.raise_epoch("model", number) < number:
                broken.append("raise_epoch must give at least what was asked for")
            if await store.get_epoch("model") < number:
                broken.append("an epoch must be at least what was raised before")

    async def watch(store: SharedStore) -> None:
        seen = 0
        while not done.is_set():
            now = await store.get_epoch("model")
            if now < seen:
                broken.append("an epoch must not go down while several raise it")
            seen = max(seen, now)
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as watching:
        watching.start_soon(watch, first)
        watching.start_soon(watch, second)
        async with anyio.create_task_group() as group:
            for part in range(4):
                group.start_soon(raise_all, (first, second)[part % 2], numbers[part::4])
        done.set()
    require(not broken, broken[0] if broken else "")
    for store in (first, second):
        require(await store.get_epoch("model") == 40, "the greatest number that anyone raised must win")


async def _bad_epochs_are_refused(first: SharedStore, _: SharedStore) -> None:
    for name in ("", "Model", "a" * 65, "a/b", "a b", "a\n", "\u00e4", "{a}", "*"):
        for call in (partial(first.get_epoch, name), partial(first.raise_epoch, name, 1)):
            require(await _refused(call), f"the epoch name {name!r} must be refused")
    for epoch in (-1, _MAX_EPOCH + 1):
        require(await _refused(partial(first.raise_epoch, "model", epoch)), f"epoch {epoch} must be refused")
    require(await first.get_epoch("model") == 0, "a refused epoch must change nothing")


async def _hits_add_up(first: SharedStore, second: SharedStore) -> None:
    if not (isinstance(first, HitLedger) and isinstance(second, HitLedger)):
        return
    root, day = "a" * 64, int(time.time() // _DAY_S)
    much, little, least = (f"{root}:{letter * 64}" for letter in "123")
    require(await first.read_hits("model-a", [day], 10) == ({}, {}), "nothing must be counted at first")
    require(await first.hit_models() == [], "no model must have counts at first")
    await first.add_hits("model-a", day, {much: 5, little: 2}, {root: "{}", "model": "{}"})
    await second.add_hits("model-a", day, {much: 1, least: 1}, {})
    await second.add_hits("model-a", day - 1, {much: 10, little: 1}, {})
    for store in (first, second):
        hits, roots = await store.read_hits("model-a", [day], 10)
        require(hits == {much: 6, little: 2, least: 1}, "counts of two handles must add up")
        require(roots == {root: "{}", "model": "{}"}, "descriptions must come back")
        hits, _ = await store.read_hits("model-a", [day - 1, day], 2)
        require(hits == {much: 16, little: 3}, "counts of two days must add up, and the highest come within the limit")
        require(await store.read_hits("model-b", [day], 10) == ({}, {}), "each model must have its own counts")
    await first.add_hits("model-b", day, {least: 1}, {})
    require(await second.hit_models() == ["model-a", "model-b"], "hit_models must name all models that have counts")
    for bad in ({"no member": 1}, {much: 0}, {much: -1}):
        require(await _refused(partial(_add, first, bad)), f"the hits {bad!r} must be refused")


async def _add(store: HitLedger, hits: dict[str, int]) -> int:
    await store.add_hits("model-a", 0, hits, {})
    return 0


async def _hits_are_no_values(first: SharedStore, second: SharedStore) -> None:
    if isinstance(first, HitLedger):
        await first.add_hits("model", int(time.time() // _DAY_S), {f"{'a' * 64}:{'b' * 64}": 1}, {"model": "{}"})
        stats = await second.stats()
        require((stats.items, stats.bytes) == (0, 0), "hits must not count as items")
        require(await _listed(second) == {}, "list_items must not list hits")


async def _warming_is_idempotent(first: SharedStore, second: SharedStore) -> None:
    await first.warm()
    await first.put_many([(unit_key(0), b"x")])
    await first.warm()
    await second.warm()
    require(await second.get_many([unit_key(0)]) == [b"x"], "warm must change nothing")


async def _places_are_apart(first: SharedStore, make_store: MakeShared) -> None:
    await first.put_many([(unit_key(7), b"here")])
    await first.raise_epoch("apart", 1)
    async with _two(make_store, "elsewhere") as (other, _):
        require(await other.get_many([unit_key(7)]) == [None], "one place must not show the values of another")
        require(await other.get_epoch("apart") == 0, "one place must not have the epochs of another")


async def _refused(call: Callable[[], Awaitable[int]]) -> bool:
    try:
        await call()
    except KiteError:
        return True
    return False


async def _listed(store: SharedStore) -> dict[str, StoredItem]:
    return {item.key: item async for page in store.list_items() for item in page}


@asynccontextmanager
async def _two(make_store: MakeShared, place: str) -> AsyncIterator[Two]:
    stores: list[SharedStore] = []
    try:
        for _ in range(2):
            made = make_store(place)
            stores.append(await made if inspect.isawaitable(made) else made)
        yield stores[0], stores[1]
    finally:
        for store in stores:
            await store.aclose()
