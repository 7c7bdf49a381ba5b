"""Looking in the outer tiers: what comes in time, what comes late, and what is never allowed to hold anything up."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import anyio
import pytest

from kitelib.config import PoolConfig
from kitelib.runtime.supervisor import Supervisor
from kitelib.runtime.threads import ThreadDoor
from kitelib.stores.cost import TierCost
from kitelib.stores.memory import MemoryStore
from kitelib.stores.pool import RUPool
from kitelib.stores.wanted import Wanted
from kitelib.testing import Fault, FaultyStore, Operation
from kitelib.upcycle.unit import RecyclableUnit
from kitelib.yoco.held import HeldBytes
from kitelib.yoco.planner import Planner
from kitelib.yoco.search import Late, Search
from tests.support.engines import until
from tests.support.pools import entry
from tests.support.units import BLOCK_TOKENS, INFO, LAYOUT, chain_of, logits_unit, units_of

PROMPT = [1 + index % 50 for index in range(160)]  # forty blocks
NUM_BLOCKS = len(PROMPT) // BLOCK_TOKENS
SLOW = 3600.0
OpenPool = Callable[..., AbstractAsyncContextManager[RUPool]]


class Gated(MemoryStore):
    """A store whose reads can be held, and that notes which keys are read."""

    def __init__(self) -> None:
        super().__init__(2**26)
        self.gate = asyncio.Event()
        self.gate.set()
        self.reads: list[list[str]] = []
        self.lookup_s = 0.0

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        self.reads.append(list(keys))
        found = await super().get_many(keys)
        await self.gate.wait()
        return found

    async def leading_run(self, keys: Sequence[str]) -> int:
        await asyncio.sleep(self.lookup_s)
        return await super().leading_run(keys)


@pytest.fixture
def open_pool(monkeypatch: pytest.MonkeyPatch) -> OpenPool:
    """``async with open_pool(("name", store), ...) as pool``: over these stores, with its writers running."""

    @asynccontextmanager
    async def opened(*stores: tuple[str, Any], **options: Any) -> AsyncIterator[RUPool]:
        monkeypatch.setattr("kitelib.stores.pool.open_stores", lambda config: list(stores))
        supervisor = Supervisor()
        supervisor.start()
        pool = RUPool(PoolConfig(**{"memory_bytes": 0, "socket_timeout": 20.0, **options}), ThreadDoor())
        try:
            await pool.start(supervisor)
            await pool.use_model(INFO.model_state)
            yield pool
        finally:
            await supervisor.aclose()
            await pool.aclose()

    return opened


@functools.cache
def kv_units(epoch: int = 0) -> list[RecyclableUnit]:
    return [unit for unit in units_of(PROMPT, epoch=epoch) if unit.kind == "kv"]


@functools.cache
def stored(epoch: int) -> list[tuple[str, bytes]]:
    return [entry(unit) for unit in kv_units(epoch)]


def wanted_of(pool: RUPool) -> list[Wanted]:
    planner, chain = Planner(pool, INFO, LAYOUT), chain_of(PROMPT)
    return [Wanted.of(planner.expect_block(chain, index, PROMPT), chain.root) for index in range(NUM_BLOCKS)]


async def fill(pool: RUPool, *tiers: tuple[int, slice], epoch: int = 0) -> None:
    """Gives tiers (by number) their part of the prompt's blocks."""
    for number, part in tiers:
        store = pool.tiers.tiers[number].store
        await getattr(store, "inner", store).put_many(stored(epoch)[part])


async def nothing() -> None:
    """No logits."""


async def no_tail(_: int) -> None:
    """No tail."""


def search_in(pool: RUPool, *, compute_block_s: float = 0.01, patience_s: float = 10.0, **options: Any) -> Search:
    blocks = wanted_of(pool)
    defaults: dict[str, Any] = {"logits": nothing, "tail": no_tail, "held": HeldBytes(2**30), "first": 0}
    return Search(
        pool=pool,
        blocks=blocks,
        block_bytes=INFO.block_bytes,
        compute_block_s=compute_block_s,
        patience_s=patience_s,
        **{**defaults, **options},
    )


def cost(pool: RUPool, number: int, latency_s: float, bytes_per_s: float = 1e9) -> None:
    """Makes a tier look that slow."""
    pool.tiers.tiers[number].cost = TierCost(latency_s, bytes_per_s)


class Arrivals:
    """What a `Late` delivers; fails at once if it is not the end of the run, in order."""

    def __init__(self, late: Late, count: int = NUM_BLOCKS) -> None:
        self.first = count
        self.deliveries = 0
        self._count = count
        late.bind(self._deliver)

    def _deliver(self, first: int, units: Sequence[tuple[RecyclableUnit, str]]) -> None:
        assert first + len(units) == self._count
        assert first < self.first
        check_units(first, [unit for unit, _ in units])
        self.first = first
        self.deliveries += 1


def check_units(first: int, units: Sequence[RecyclableUnit]) -> None:
    expected = kv_units()[first : first + len(units)]
    assert [unit.cf for unit in units] == [unit.cf for unit in expected]
    assert all(bytes(unit.data) == bytes(other.data) for unit, other in zip(units, expected, strict=True))


async def test_what_is_quick_is_waited_for(open_pool: OpenPool) -> None:
    async with open_pool(("fast", Gated())) as pool:
        await fill(pool, (0, slice(None)))
        search = search_in(pool)
        await search.run()
        assert search.leave() is None
        check_units(0, [unit for unit, _ in search.front])
        assert [name for _, name in search.front] == ["fast"] * NUM_BLOCKS


async def test_what_is_not_waited_for_comes_from_the_back_until_it_meets_the_front(open_pool: OpenPool) -> None:
    """B29: the front is computed while the back is loaded; nothing is read that is computed by then."""
    store = Gated()
    async with open_pool(("slow", store)) as pool, anyio.create_task_group() as group:
        await fill(pool, (0, slice(None)))
        cost(pool, 0, 0.05)
        search = search_in(pool, patience_s=0.0)
        store.gate.clear()
        group.start_soon(search.run)
        await until(lambda: bool(store.reads))
        late = search.leave()
        assert late is not None
        arrivals = Arrivals(late)
        assert late.promising
        assert store.reads == [[wanted.key for wanted in wanted_of(pool)[32:]]]
        store.gate.set()
        late.frontier = 20
        await until(lambda: not late.promising)
        assert arrivals.first == 16
        assert sorted(key for read in store.reads for key in read) == sorted(w.key for w in wanted_of(pool)[16:])


async def test_nothing_more_is_read_for_a_request_that_is_gone_or_has_enough(open_pool: OpenPool) -> None:
    """B12: cancelling ends the loading as well."""
    for end in (Search.abandon, lambda search: search.late.close()):
        store = Gated()
        async with open_pool(("slow", store)) as pool, anyio.create_task_group() as group:
            await fill(pool, (0, slice(None)))
            cost(pool, 0, 0.05)
            search = search_in(pool, patience_s=0.0)
            store.gate.clear()
            group.start_soon(search.run)
            await until(lambda store=store: bool(store.reads))  # type: ignore[misc]
            late = search.leave()
            assert late is not None
            end(search)
            store.gate.set()
            await until(lambda late=late: not late.promising)  # type: ignore[misc]
            assert len(store.reads) == 1
            late.put(0, [])
            late.bind(lambda *_: pytest.fail("delivered to nobody"))


async def test_b29_a_tier_that_does_not_say_what_it_has_keeps_nobody_from_a_faster_one(open_pool: OpenPool) -> None:
    slow = Gated()
    slow.lookup_s = SLOW
    async with open_pool(("fast", Gated()), ("slow", slow)) as pool:
        await fill(pool, (0, slice(0, 24)))
        search = search_in(pool, compute_block_s=0.001, patience_s=0.2)
        with anyio.fail_after(10):
            await search.run()
        search.leave()
        assert [name for _, name in search.front] == ["fast"] * 24


async def test_logits_and_tails_that_are_slow_do_not_hold_up_blocks(open_pool: OpenPool) -> None:
    async def never(*_: Any) -> None:
        await asyncio.sleep(SLOW)

    async with open_pool(("slow", Gated())) as pool, anyio.create_task_group() as group:
        await fill(pool, (0, slice(None)))
        cost(pool, 0, 0.05)
        search = search_in(pool, patience_s=0.0, logits=never, tail=never)
        group.start_soon(search.run)
        late = search.leave()
        assert late is not None
        arrivals = Arrivals(late)
        await until(lambda: arrivals.first == 0)
        assert not search.settled.is_set()
        group.cancel_scope.cancel()


async def test_measuring_a_slow_tier_again_holds_up_no_request(
    open_pool: OpenPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kitelib.yoco.search._EXPLORE", 1.0)
    slow = Gated()
    async with open_pool(("fast", Gated()), ("slow", slow)) as pool, anyio.create_task_group() as group:
        await fill(pool, (0, slice(0, 24)), (1, slice(24, None)))
        cost(pool, 1, SLOW)
        slow.gate.clear()
        search = search_in(pool)
        group.start_soon(search.run)
        with anyio.fail_after(10):
            await search.settled.wait()
        assert search.leave() is None
        assert (len(search.front), search.skipped) == (24, {"slow": 16})
        await until(lambda: len(slow.reads) == 1)
        slow.gate.set()
    assert [len(read) for read in slow.reads] == [1]


async def test_b29_only_the_first_look_into_a_tier_is_given_time_for_connecting(open_pool: OpenPool) -> None:
    """A tier that never has anything, as an archive of a new deployment, would be waited for patiently for ever."""
    async with open_pool(("empty", Gated())) as pool:
        (tier,) = pool.tiers.tiers
        assert not tier.tried
        await search_in(pool).run()
        assert tier.tried


@pytest.mark.parametrize("seed", range(6))
async def test_whatever_the_tiers_do_what_comes_is_right_and_in_place(open_pool: OpenPool, seed: int) -> None:
    """B31: losses, damage, delays and invalidations while searches run; nothing stays behind."""
    rng = random.Random(seed)
    calm = False
    kinds: list[Any] = ["lose", "corrupt", "truncate", "swap", "fail"]

    def schedule(operation: Operation, call: int) -> Fault | None:
        if calm or operation in ("put_many", "delete_many"):
            return None
        return Fault(rng.choice(kinds)) if rng.random() < 0.15 else Fault("delay", delay_s=rng.choice([0, 0.001, 0.01]))

    stores = [(name, FaultyStore(MemoryStore(2**26), schedule)) for name in ("one", "two")]
    held = HeldBytes(rng.choice([2**30, 200 * INFO.block_bytes]))
    async with open_pool(*stores, memory_bytes=2**20) as pool:
        for tier in pool.tiers.tiers:
            tier.breaker._max_failures = 10**9

        async def request() -> None:
            await asyncio.sleep(0.3 * rng.random())
            parts = (0, slice(0, rng.randrange(NUM_BLOCKS))), (1, slice(rng.randrange(NUM_BLOCKS), None))
            await fill(pool, *parts, epoch=rng.choice([pool.epoch, 0]))
            for number in range(2):
                cost(pool, number, rng.choice([1e-6, 0.02, 0.1]))
            patience_s = rng.choice([0.0, 0.01, 0.1])
            search = search_in(pool, compute_block_s=rng.choice([0.001, 0.01, 0.1]), patience_s=patience_s, held=held)
            task = asyncio.ensure_future(search.run())
            with anyio.move_on_after(patience_s):
                await search.settled.wait()
            if rng.random() < 0.1:
                search.abandon()
            else:
                late = search.leave()
                check_units(0, [unit for unit, _ in search.front])
                if late is not None:
                    assert late.frontier == len(search.front)
                    await computed_with(late)
            await task

        async def computed_with(late: Late) -> None:
            got: list[tuple[int, int]] = []

            def deliver(first: int, units: Sequence[tuple[RecyclableUnit, str]]) -> None:
                check_units(first, [unit for unit, _ in units])
                got.append((first, first + len(units)))

            late.bind(deliver)
            while late.frontier < NUM_BLOCKS:
                await asyncio.sleep(0.002)
                met = [stop for first, stop in got if first <= late.frontier]
                late.frontier = max([late.frontier + 1, *met])
            late.close()

        async def forget() -> None:
            await asyncio.sleep(0.15)
            await pool.clear()

        with anyio.fail_after(10):
            results = await asyncio.gather(*(request() for _ in range(25)), forget(), return_exceptions=True)
            assert [each for each in results if each is not None] == []
            calm = True
            await fill(pool, (0, slice(None)), epoch=pool.epoch)
            cost(pool, 0, 1e-6)
            search = search_in(pool, held=held)
            await search.run()
            search.leave()
            assert len(search.front) == NUM_BLOCKS
            del search
            await until(lambda: pool._promotion.num_bytes == 0)
            assert not any(len(tier._flights) for tier in pool.tiers.tiers)
            await until(lambda: held.num_bytes == 0)
        current = [await pool.get_rus_by_cf(unit.cf) for unit in kv_units()]
        assert all(unit.epoch >= pool.epoch for units in current for unit in units)


async def test_what_was_read_before_an_invalidation_gets_nowhere(open_pool: OpenPool) -> None:
    """B18: neither to the request, nor into memory, nor is it thought to be in the tier."""
    store = Gated()
    async with open_pool(("outer", store), memory_bytes=2**20) as pool, anyio.create_task_group() as group:
        await fill(pool, (0, slice(None)))
        search = search_in(pool)
        store.gate.clear()
        group.start_soon(search.run)
        await until(lambda: bool(store.reads))
        pool.forget()
        store.gate.set()
        await search.settled.wait()
        assert search.leave() is None
        assert search.front == []
        assert pool.memory.keys() == []
        assert not any(pool.contains(wanted) for wanted in wanted_of(pool))


async def test_a_unit_from_before_an_invalidation_is_written_over(open_pool: OpenPool) -> None:
    """B18: a write that was on its way leaves an old unit in a tier; it must not stand in the way of the new one."""
    async with open_pool(("outer", Gated()), memory_bytes=2**20) as pool:
        pool.forget()
        await fill(pool, (0, slice(None)))  # of epoch 0
        search = search_in(pool)
        await search.run()
        assert search.front == []
        await pool.put_units(kv_units(epoch=1), 1)
        await pool.settle()
        again = search_in(pool)
        await again.run()
        again.leave()
        assert [unit.epoch for unit, _ in again.front] == [1] * NUM_BLOCKS


async def test_old_units_in_memory_do_not_keep_new_ones_out(open_pool: OpenPool) -> None:
    async with open_pool(("outer", Gated()), memory_bytes=2**20) as pool:
        blocks = wanted_of(pool)
        await pool.memory.put_many([pool.encode(unit) for unit in kv_units()])
        pool.epoch = 1  # as another model's, or as learnt late
        assert await pool.fetch_run(blocks) == []
        assert not any(pool.contains(wanted) for wanted in blocks)
        assert pool.refused == 0


async def test_waiting_requests_hold_no_more_than_the_bound_and_ask_again(open_pool: OpenPool) -> None:
    """A thousand requests that wait for their turn must not hold a thousand prefixes."""
    async with open_pool(("outer", Gated()), memory_bytes=2**20) as pool:
        await fill(pool, (0, slice(None)))
        supervisor = pool._supervisor
        assert supervisor is not None
        planner = Planner(pool, INFO, LAYOUT, speed=lambda: 100.0, spawn=supervisor.spawn)
        planner.held = HeldBytes(100 * INFO.block_bytes)
        chain = chain_of(PROMPT)
        prefixes = []
        for _ in range(10):
            prefixes.append(await planner.find(chain, PROMPT, 0, logits=False))
            assert planner.held.num_bytes <= 100 * INFO.block_bytes
        assert sum(len(prefix.payloads) for prefix in prefixes) == 100
        assert [prefix.deferred for prefix in prefixes] == [False] * 3 + [True] * 7
        prefixes.clear()
        await until(lambda: planner.held.num_bytes == 0)
        assert len((await planner.find(chain, PROMPT, 0, logits=False)).payloads) == NUM_BLOCKS


async def test_a_read_that_is_cancelled_holds_nothing() -> None:
    held, begun = HeldBytes(1000), asyncio.Event()

    async def read(_: Sequence[Wanted]) -> list[RecyclableUnit]:
        begun.set()
        await asyncio.sleep(SLOW)
        return []

    planner = Planner(RUPool(PoolConfig(memory_bytes=0), ThreadDoor()), INFO, LAYOUT)
    blocks = [Wanted.of(planner.expect_block(chain_of(PROMPT), index, PROMPT)) for index in range(3)]
    task = asyncio.ensure_future(held.read(blocks, read))
    await begun.wait()
    assert held.num_bytes == 3 * INFO.block_bytes
    task.cancel()
    await asyncio.wait([task])
    assert held.num_bytes == 0
    held.watch([logits_unit(PROMPT)])
    assert held.num_bytes == 0
