"""Pinned units: where they are looked for, what is counted, and what happens to those that are no good."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import anyio
import pytest

from kitelib.config import PoolConfig
from kitelib.errors import FormatError
from kitelib.runtime.threads import ThreadDoor
from kitelib.stores.pinned import PinnedUnits
from kitelib.stores.pool import RUPool
from kitelib.stores.wanted import Wanted
from kitelib.upcycle.unit import Expectation, RecyclableUnit
from tests.support.units import BLOCK_TOKENS, INFO, LAYOUT, kv_unit

PROMPT = list(range(1, 9)) + [0] * 4


@dataclasses.dataclass
class Shelf:
    """A source whose entries are the units themselves; `broken` ones fail their checks."""

    broken: set[bytes] = dataclasses.field(default_factory=set)
    changed: bool = False

    def read(self, unit: Any, expected: Expectation | None = None, *, full: bool = False) -> RecyclableUnit:
        if self.changed or unit.cf in self.broken:
            raise FormatError("damaged")
        assert isinstance(unit, RecyclableUnit)
        return unit


def blocks() -> list[RecyclableUnit]:
    return [kv_unit(PROMPT, start, start + BLOCK_TOKENS) for start in range(0, len(PROMPT), BLOCK_TOKENS)]


def wanted() -> list[Wanted]:
    return [
        Wanted.of(Expectation("kv", unit.cf, unit.token_ids, INFO.model_state, LAYOUT, len(unit.data)))
        for unit in blocks()
    ]


def pool_with(shelf: Shelf, *indexes: int, memory: int = 2**20) -> RUPool:
    pool = RUPool(PoolConfig(memory_bytes=memory), ThreadDoor())
    units = {wanted()[index].key: blocks()[index] for index in indexes}
    pool.pinned.add("a.kite", shelf, units, 1000)
    return pool


async def names(pool: RUPool) -> list[str]:
    return [name for _, name in await pool.fetch_run(wanted())]


async def test_a_run_may_alternate_between_memory_and_bundles() -> None:
    pool = pool_with(Shelf(), 0, 2)
    assert await pool.leading_run(wanted()) == 1
    await pool.put_units([blocks()[1]], 0)
    assert await pool.leading_run(wanted()) == 3
    assert await names(pool) == ["bundle", "memory", "bundle"]
    assert [pool.contains(each) for each in wanted()] == [True, True, True]


async def test_memory_goes_first() -> None:
    pool = pool_with(Shelf(), 0, 1, 2)
    await pool.put_units(blocks(), 0)
    assert await names(pool) == ["memory"] * 3
    assert pool.stats()["bundle"]["hits"] == 0


async def test_hits_and_misses_are_counted_where_they_belong() -> None:
    pool = pool_with(Shelf(), 0, 1)
    assert await names(pool) == ["bundle", "bundle"]
    stats = pool.stats()
    assert (stats["bundle"]["hits"], stats["bundle"]["misses"]) == (2, 1)
    assert (stats["memory"]["hits"], stats["memory"]["misses"]) == (0, 1)
    assert pool.pinned.stats()["a.kite"]["hit_bytes"] == sum(len(unit.data) for unit in blocks()[:2])


async def test_a_damaged_unit_is_a_miss_for_itself_and_all_after_it() -> None:
    shelf = Shelf(broken={blocks()[1].cf})
    pool = pool_with(shelf, 0, 1, 2)
    assert await names(pool) == ["bundle"]
    assert pool.stats()["bundle"]["refused"] == 1
    assert not pool.contains(wanted()[1])  # so that it is stored again
    assert pool.contains(wanted()[2])
    assert pool.refused == 0


async def test_nothing_of_a_changed_source_is_used() -> None:
    shelf = Shelf()
    pool = pool_with(shelf, 0, 1, 2)
    shelf.changed = True
    assert await names(pool) == []
    assert (pool.stats()["bundle"]["refused"], pool.stats()["bundle"]["items"]) == (1, 0)


async def test_a_pool_that_keeps_nothing_still_finds_what_is_pinned() -> None:
    pool = pool_with(Shelf(), 0, memory=0)
    assert (pool.enabled, pool.searchable) == (False, True)
    assert await names(pool) == ["bundle"]
    pool.pinned.remove("a.kite")
    assert not pool.searchable


async def test_forgetting_lets_go_of_everything() -> None:
    pool = pool_with(Shelf(), 0, 1, 2)
    pool.forget()
    assert await names(pool) == []
    assert "bundle" not in pool.stats()


async def test_a_lossy_unit_that_was_not_asked_for_is_refused() -> None:
    shelf = Shelf()
    pool = pool_with(shelf, 0)
    key = wanted()[0].key
    rounded = dataclasses.replace(blocks()[0], codec="int8_kv/none")
    pool.pinned.add("a.kite", shelf, {key: rounded}, 1000)
    assert await names(pool) == []
    assert pool.stats()["bundle"]["refused"] == 1


async def test_what_was_loaded_before_the_epoch_was_known_goes_if_it_is_too_old(tmp_path: Path) -> None:
    config = PoolConfig(memory_bytes=2**20, disk=str(tmp_path))
    first, second = RUPool(config, ThreadDoor()), RUPool(config, ThreadDoor())
    await first.use_model(INFO.model_state)
    await first.clear()
    second.pinned.add("old", Shelf(), {"x": 1}, 1, 0)
    second.pinned.add("accepted", Shelf(), {"x": 1}, 1, None)
    await second.use_model(INFO.model_state)
    assert list(second.pinned.stats()) == ["accepted"]
    await first.aclose()
    await second.aclose()


def test_sources_by_name() -> None:
    pinned = PinnedUnits()
    pinned.add("a", Shelf(), {"x": 1}, 10, 0)
    pinned.add("b", Shelf(), {"x": 2, "y": 3}, 20, None)
    found = pinned.get("x")
    assert found is not None
    assert found.entry == 1  # the source that came first
    assert (len(pinned), pinned.counters()["bytes"], pinned.counters()["items"]) == (2, 30, 3)
    pinned.expire(1)
    assert list(pinned.stats()) == ["b"]  # the other is to be used in any epoch
    assert not pinned.remove("a")
    assert pinned.clear() == 2


class Freed(Shelf):
    """A unit, or a source, that says where it was freed."""

    def __init__(self, threads: list[int]) -> None:
        super().__init__()
        self._threads = threads

    def __del__(self) -> None:
        self._threads.append(threading.get_ident())


@pytest.mark.parametrize("how", ["remove", "clear", "expire", "replace"])
async def test_many_units_are_freed_in_another_thread(how: str) -> None:
    threads: list[int] = []
    pinned = PinnedUnits()
    pinned.add("a.kite", Freed(threads), {str(index): Freed(threads) for index in range(5000)}, 1000, epoch=0)
    if how == "remove":
        assert pinned.remove("a.kite")
    elif how == "clear":
        assert pinned.clear() == 5000
    elif how == "expire":
        pinned.expire(1)
    else:
        pinned.add("a.kite", Shelf(), {}, 1000)
    assert not pinned.contains("0")
    with anyio.fail_after(30):
        while len(threads) < 5001:
            await anyio.sleep(0.001)
    assert threading.get_ident() not in threads
