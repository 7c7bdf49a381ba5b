"""Writing behind: bounded, in order, and never a request's problem."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kitelib.config import PoolConfig
from kitelib.errors import StoreError
from kitelib.runtime.threads import ThreadDoor
from kitelib.stores.memory import MemoryStore
from kitelib.stores.pool import RUPool
from kitelib.upcycle.recycler import Recycler
from kitelib.upcycle.unit import RecyclableUnit
from tests.support.units import units_of

UNITS = units_of([1, 2, 3, 4, 5, 6])
SIZE = sum(len(unit.data) for unit in UNITS)


class SlowStore(MemoryStore):
    """Waits before it stores; fails where it is told to."""

    def __init__(self) -> None:
        super().__init__(10**7)
        self.gate = asyncio.Event()
        self.gate.set()
        self.waiting = asyncio.Event()
        self.fails = 0
        self.batches: list[int] = []

    async def put_many(self, items: Any) -> None:
        self.waiting.set()
        await self.gate.wait()
        if self.fails:
            self.fails -= 1
            raise StoreError("the store is down")
        self.batches.append(len(items))
        await super().put_many(items)


@asynccontextmanager
async def running(limit: int = 10**6, memory_bytes: int = 10**7) -> AsyncIterator[tuple[Recycler, RUPool, SlowStore]]:
    door = ThreadDoor()
    pool = RUPool(PoolConfig(memory_bytes=memory_bytes), door)
    pool.memory = store = SlowStore()
    recycler = Recycler(pool, limit)
    task = asyncio.create_task(recycler.run())
    try:
        yield recycler, pool, store
    finally:
        task.cancel()
        await asyncio.wait([task])


def give(recycler: Recycler, units: list[RecyclableUnit], epoch: int = 0) -> bool:
    size = sum(len(unit.data) for unit in units)
    if not recycler.reserve(size, len(units)):
        return False
    recycler.submit(units, size, epoch)
    return True


async def test_submitted_units_are_stored_in_order() -> None:
    async with running() as (recycler, pool, store):
        assert give(recycler, UNITS[:1])
        assert give(recycler, UNITS[1:])
        await recycler.drain()
        assert store.batches == [1, len(UNITS) - 1]
        assert (recycler.registered, recycler.dropped, recycler.pending_bytes) == (len(UNITS), 0, 0)
        assert {key for key in store.keys()} == {pool.encode(unit)[0] for unit in UNITS}  # noqa: SIM118, C416


async def test_submitting_never_waits_and_drain_does() -> None:
    async with running() as (recycler, _, store):
        store.gate.clear()
        assert give(recycler, UNITS)
        await store.waiting.wait()
        draining = asyncio.create_task(recycler.drain())
        await asyncio.sleep(0.01)
        assert not draining.done()
        assert give(recycler, UNITS[:1])  # more may come meanwhile
        assert recycler.pending_bytes == SIZE + len(UNITS[0].data)
        store.gate.set()
        await draining
        assert (recycler.registered, recycler.pending_bytes) == (len(UNITS) + 1, 0)


async def test_when_too_much_is_in_flight_units_are_dropped_and_counted() -> None:
    async with running(limit=SIZE) as (recycler, _, store):
        store.gate.clear()
        assert give(recycler, UNITS)
        assert not recycler.reserve(1, 3)
        assert (recycler.dropped, recycler.pending_bytes) == (3, SIZE)
        store.gate.set()
        await recycler.drain()
        assert (recycler.registered, recycler.pending_bytes) == (len(UNITS), 0)
        assert give(recycler, UNITS)  # there is room again
        await recycler.drain()
        assert recycler.registered == 2 * len(UNITS)


async def test_one_batch_larger_than_the_bound_is_dropped() -> None:
    async with running(limit=SIZE - 1) as (recycler, _, _store):
        assert not give(recycler, UNITS)
        assert recycler.dropped == len(UNITS)


async def test_a_pool_that_is_off_takes_nothing_and_drops_nothing() -> None:
    async with running(memory_bytes=0) as (recycler, _, _store):
        assert not recycler.reserve(1, 1)
        assert (recycler.dropped, recycler.pending_bytes) == (0, 0)


async def test_a_failing_store_drops_the_batch_and_the_next_one_is_stored(caplog: pytest.LogCaptureFixture) -> None:
    async with running() as (recycler, _, store):
        store.fails = 1
        give(recycler, UNITS)
        give(recycler, UNITS[:1])
        await recycler.drain()
        assert (recycler.dropped, recycler.registered, recycler.pending_bytes) == (len(UNITS), 1, 0)
    assert "the store is down" in caplog.text


async def test_a_failing_codec_drops_the_batch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running() as (recycler, pool, _):
        with monkeypatch.context() as patch:
            patch.setattr(pool, "encode", lambda unit: 1 / 0)
            give(recycler, UNITS)
            await recycler.drain()
        assert (recycler.dropped, recycler.registered, recycler.pending_bytes) == (len(UNITS), 0, 0)
        give(recycler, UNITS)
        await recycler.drain()
        assert recycler.registered == len(UNITS)


async def test_what_was_computed_before_a_clearing_is_not_stored() -> None:
    async with running() as (recycler, pool, store):
        store.gate.clear()
        give(recycler, UNITS)
        await store.waiting.wait()
        give(recycler, UNITS, epoch=0)
        await pool.clear()
        store.gate.set()
        await recycler.drain()
        assert store.batches == [len(UNITS)]  # the first was in the store's hands already
        assert all(unit.epoch < pool.epoch for unit in UNITS)  # and is refused on reading


async def test_nobody_waits_for_a_recycler_that_has_ended() -> None:
    async with running() as (recycler, _, store):
        store.gate.clear()
        give(recycler, UNITS)
        await store.waiting.wait()
        give(recycler, UNITS[:1])
        draining = asyncio.create_task(recycler.drain())
        await asyncio.sleep(0)
    assert not draining.done()
    recycler.close()
    await asyncio.wait_for(draining, 30)
    assert recycler.pending_bytes == 0
    assert give(recycler, UNITS[:2])  # a straggler
    assert (recycler.dropped, recycler.pending_bytes) == (3, 0)
    await asyncio.wait_for(recycler.drain(), 30)
