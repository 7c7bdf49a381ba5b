"""Units come from the fastest tier that has them, and move to where they are used."""

from __future__ import annotations

import asyncio
import random

import anyio
import pytest

from kitelib.config import TierThresholds
from kitelib.runtime.supervisor import Supervisor
from kitelib.runtime.threads import ThreadDoor
from kitelib.stores.heat import ENTRY_BYTES, Heat
from kitelib.stores.memory import MemoryStore
from kitelib.stores.tier import Pending, Tier
from kitelib.stores.tiered import Tiers
from kitelib.testing import Fault, FaultyStore
from tests.support.shared_memory import HandClock, SharedMemory

KEYS = [f"key {index:02}" for index in range(20)]
HOT, WARM = 5, 2


def value(key: str) -> bytes:
    return key.encode() * 20


class Setup:
    """Tiers over memory, with writers that run."""

    def __init__(self, *names: str, share: str = "at_once", resident=None) -> None:
        self.clock = HandClock()
        self.stores = {name: SharedMemory(self.clock) for name in names}
        self.tiers = Tiers(
            [
                Tier(name, store, door=ThreadDoor(), timeout_s=30.0, write_bytes=2**20, clock=self.clock)
                for name, store in self.stores.items()
            ],
            thresholds=TierThresholds(hot_hits_per_hour=HOT, warm_hits_per_day=WARM),
            share=share,
            resident=resident,
            clock=self.clock,
        )
        self.supervisor = Supervisor()

    async def __aenter__(self) -> Setup:
        self.supervisor.start()
        for name, job in self.tiers.jobs():
            self.supervisor.keep(name, job)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.supervisor.aclose()
        await self.tiers.aclose()

    async def fill(self, name: str, keys: list[str]) -> None:
        await self.stores[name].put_many([(key, value(key)) for key in keys])

    def held(self, name: str) -> set[str]:
        return set(self.stores[name].inner.keys())

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)
        assert await self.tiers.drain(5) == 0

    async def spans(self, keys: list[str] = KEYS) -> list[tuple[str, int, int]]:
        return [(span.tier.name, span.first, span.count) for span in await self.tiers.locate(keys)]


def offered(*keys: str) -> list[Pending]:
    return [Pending(key, len(value(key)), lambda _, key=key: value(key)) for key in keys]


# Finding and reading


async def test_a_run_is_cut_into_spans_by_the_fastest_tier_that_has_each_part() -> None:
    async with Setup("disk", "redis", "s3") as pool:
        await pool.fill("disk", KEYS[:4] + KEYS[5:8])
        await pool.fill("redis", KEYS[:10])
        await pool.fill("s3", KEYS[8:15] + KEYS[16:])
        assert await pool.spans() == [("disk", 0, 4), ("redis", 4, 1), ("disk", 5, 3), ("redis", 8, 2), ("s3", 10, 5)]
        assert await pool.spans([]) == []
        assert await pool.spans(["nowhere", *KEYS]) == []


async def test_a_tier_that_fails_only_leaves_its_part_out() -> None:
    async with Setup("disk", "redis") as pool:
        await pool.fill("disk", KEYS[:3])
        await pool.fill("redis", KEYS)
        pool.stores["redis"].failing.add("all")
        assert await pool.spans() == [("disk", 0, 3)]
        pool.stores["disk"].failing.add("all")
        assert await pool.spans() == []
        assert await pool.tiers.get_many(KEYS[:2]) == [None, None]
        assert await pool.tiers.delete_many(KEYS) == 0


async def test_spans_are_read_in_order_with_misses_kept() -> None:
    """B28: a value that vanished between looking and reading leaves a None in its place."""
    async with Setup("disk") as pool:
        await pool.fill("disk", KEYS[:5])
        (span,) = await pool.tiers.locate(KEYS)
        await pool.stores["disk"].delete_many([KEYS[2]])
        assert await pool.tiers.read(span, KEYS[:5]) == [
            *map(value, KEYS[:2]),
            None,
            *map(value, KEYS[3:5]),
        ]


async def test_what_vanished_is_looked_for_in_the_next_tier_if_that_is_quick() -> None:
    async with Setup("disk", "redis", "s3") as pool:
        for name in ("disk", "redis", "s3"):
            await pool.fill(name, KEYS[:5])
        (span,) = await pool.tiers.locate(KEYS[:5])
        await pool.stores["disk"].delete_many([KEYS[2]])
        assert await pool.tiers.read(span, KEYS[:5]) == [value(key) for key in KEYS[:5]]
        reads = pool.stores["redis"].called("get_many")
        for _ in range(10):
            pool.tiers.tiers[1].cost.note_read(100, 0.5)
        assert (await pool.tiers.read(span, KEYS[:5]))[2] is None
        assert pool.stores["redis"].called("get_many") == reads
        assert pool.stores["s3"].called("get_many") == 0


async def test_single_values_come_from_the_fastest_tier_that_has_them() -> None:
    async with Setup("disk", "redis", "s3") as pool:
        await pool.fill("disk", ["a"])
        await pool.fill("redis", ["a", "b"])
        await pool.fill("s3", ["c"])
        disk, redis, s3 = pool.tiers.tiers
        found = await pool.tiers.get_many(["c", "x", "b", "a", "b"])
        assert found == [(s3, value("c")), None, (redis, value("b")), (disk, value("a")), (redis, value("b"))]


async def test_a_hanging_tier_holds_up_no_other() -> None:
    async with Setup("disk", "redis") as pool:
        await pool.fill("disk", KEYS)
        pool.stores["redis"].delays = {"leading_run": 3600.0}
        with anyio.fail_after(10):
            assert await pool.spans() == [("disk", 0, 20)]
        pool.stores["redis"].delays = {}


async def test_nothing_is_lost_or_mixed_up_over_faulty_tiers() -> None:
    """B31: through stores that fail, lose and are slow, every value is the right one or a miss."""
    chance = random.Random(2)
    stores = [MemoryStore(2**24), MemoryStore(2**24)]
    for store in stores:
        await store.put_many([(key, value(key)) for key in KEYS])
    faults = [Fault("fail"), Fault("lose"), Fault("delay", 0.001)]

    def schedule(operation: str, call: int) -> Fault | None:
        return chance.choice([None, *faults])

    tiers = Tiers(
        [
            Tier(name, FaultyStore(store, schedule), door=ThreadDoor(), timeout_s=2.0, write_bytes=2**20)
            for name, store in zip(("disk", "redis"), stores, strict=True)
        ],
        thresholds=TierThresholds(),
        share="at_once",
    )
    hits = 0
    for _ in range(200):
        start = chance.randrange(10)
        keys = KEYS[start:]
        for tier in tiers.tiers:
            tier.breaker.succeed()
        for span in await tiers.locate(keys):
            part = keys[span.first : span.first + span.count]
            found = await tiers.read(span, part)
            assert all(got is None or got == value(key) for key, got in zip(part, found, strict=True))
            hits += len(found) - found.count(None)
    assert hits > 500
    await tiers.aclose()


# Where new units go


async def test_new_units_go_everywhere_but_to_the_archive() -> None:
    async with Setup("disk", "redis", "vault", "s3") as pool:
        pool.tiers.offer(offered("a", "b"))
        await pool.settle()
        assert [pool.held(name) for name in pool.stores] == [{"a", "b"}] * 3 + [set()]


async def test_an_archive_that_is_the_only_tier_takes_new_units() -> None:
    async with Setup("s3") as pool:
        pool.tiers.offer(offered("a"))
        await pool.settle()
        assert pool.held("s3") == {"a"}
        assert await pool.spans(["a", "b"]) == [("s3", 0, 1)]


async def test_redis_gets_units_when_they_are_warm_if_that_is_wanted() -> None:
    async with Setup("disk", "redis", share="when_warm") as pool:
        pool.tiers.offer(offered("a", "b"))
        await pool.settle()
        assert (pool.held("disk"), pool.held("redis")) == ({"a", "b"}, set())
        for _ in range(WARM):
            pool.tiers.note_hit("a")  # hits in process memory
        await pool.settle()
        assert pool.held("redis") == set()
        pool.tiers.note_hit("a")
        await pool.settle()
        assert pool.held("redis") == {"a"}
        for _ in range(10):
            pool.tiers.note_hit("a")
        await pool.settle()
        assert pool.stores["redis"].called("put_many") == 1  # once, not with every hit
        for _ in range(WARM + 1):
            pool.tiers.note_hit("c")
        pool.tiers.offer(offered("c"))
        await pool.settle()
        assert pool.held("redis") == {"a", "c"}  # warm before it was stored


async def test_without_a_disk_warm_units_come_from_process_memory() -> None:
    kept = {"a": offered("a")[0]}
    async with Setup("redis", share="when_warm", resident=kept.get) as pool:
        for key in ("a", "b"):
            for _ in range(WARM + 1):
                pool.tiers.note_hit(key)
        await pool.settle()
        assert pool.held("redis") == {"a"}


# Promotion


async def test_hot_units_are_copied_to_every_faster_tier() -> None:
    async with Setup("disk", "vault", "redis") as pool:
        await pool.fill("redis", ["a"])
        for _ in range(HOT):
            assert await pool.tiers.get_many(["a"]) == [(pool.tiers.tiers[2], value("a"))]
        await pool.settle()
        assert (pool.held("disk"), pool.held("vault"), pool.tiers.promoted) == (set(), set(), 0)
        assert not pool.tiers.is_hot("a")
        await pool.tiers.get_many(["a"])
        await pool.settle()
        assert pool.tiers.is_hot("a")
        assert (pool.held("disk"), pool.held("vault"), pool.tiers.promoted) == ({"a"}, {"a"}, 2)
        assert pool.stores["disk"].inner.get("a") == value("a")  # the stored bytes as they are
        assert await pool.spans(["a"]) == [("disk", 0, 1)]


async def test_units_find_their_way_back_from_the_archive() -> None:
    async with Setup("disk", "redis", "s3") as pool:
        await pool.fill("s3", ["a", "b"])
        (span,) = await pool.tiers.locate(["a"])
        assert await pool.tiers.read(span, ["a"]) == [value("a")]
        await pool.settle()
        assert (pool.held("disk"), pool.held("redis")) == ({"a"}, set())  # used again, but not warm
        for _ in range(WARM):
            pool.tiers.note_hit("b")
        await pool.tiers.get_many(["b"])
        await pool.settle()
        assert (pool.held("disk"), pool.held("redis")) == ({"a", "b"}, {"b"})


async def test_heat_cools_down() -> None:
    async with Setup("disk", "redis") as pool:
        for _ in range(HOT + 1):
            pool.tiers.note_hit("a")
        assert (pool.tiers.is_hot("a"), pool.tiers.is_warm("a")) == (True, True)
        pool.clock.advance(7200)
        assert (pool.tiers.is_hot("a"), pool.tiers.is_warm("a")) == (False, True)
        pool.clock.advance(2 * 86400)
        assert (pool.tiers.is_hot("a"), pool.tiers.is_warm("a")) == (False, False)


def test_the_window_is_exact_for_a_steady_rate_and_bounded_otherwise() -> None:
    clock = HandClock(0.0)
    heat = Heat(clock=clock)
    for _ in range(3 * 3600 // 10):
        clock.advance(10)
        heat.note("steady")
        if clock.now > 3600:
            assert heat.per_hour("steady") == pytest.approx(360, abs=2)
    chance = random.Random(1)
    times: list[float] = []
    for _ in range(500):
        clock.advance(chance.expovariate(1 / 60))
        heat.note("random")
        times.append(clock.now)
        real = sum(clock.now - when < 3600 for when in times)
        last = sum(clock.now // 3600 - when // 3600 == 1 for when in times)
        assert abs(heat.per_hour("random") - real) <= last
    assert heat.per_hour("never") == 0
    assert heat.idle_s("never") > 1e9
    assert heat.idle_s("random") == 0


def test_the_heat_table_is_bounded_in_bytes() -> None:
    """B27: what is remembered about keys is bounded as well; the keys hit longest ago go first."""
    heat = Heat(max_bytes=100 * (ENTRY_BYTES + 100), clock=HandClock())
    for index in range(10_000):
        heat.note(f"{index:030}")
        assert heat.num_bytes <= 100 * (ENTRY_BYTES + 100)
    assert len(heat) >= 100
    assert heat.per_day(f"{9_999:030}") == 1
    assert heat.per_day(f"{0:030}") == 0


# Managing


async def test_everything_is_invalidated_deleted_and_counted_together() -> None:
    """B20: one call covers all tiers."""
    async with Setup("disk", "redis", "s3") as pool:
        await pool.fill("disk", KEYS[:3])
        await pool.fill("redis", KEYS[:2])
        await pool.fill("s3", KEYS[:1])
        assert await pool.tiers.delete_many(KEYS) == 6
        assert await pool.tiers.get_many(KEYS[:3]) == [None] * 3
        pool.tiers.offer(offered("a"))
        pool.tiers.void()
        await pool.settle()
        assert all(not pool.held(name) for name in pool.stores)
        assert set(pool.tiers.stats()) == {"disk", "redis", "s3"}
        assert pool.tiers.stats()["disk"]["misses"] == 3


async def test_warming_says_who_is_ready_and_why_others_are_not() -> None:
    async with Setup("disk", "redis", "s3") as pool:
        pool.stores["redis"].failing.add("warm")
        pool.stores["s3"].delays = {"warm": 3600.0}
        answers = await pool.tiers.warm(0.05)
        assert answers == {"disk": "ready", "redis": "warm fails", "s3": "not ready within 0.05 s"}


async def test_two_tiers_of_one_name_are_told_apart() -> None:
    def tier() -> Tier:
        return Tier("vault", MemoryStore(2**20), door=ThreadDoor(), timeout_s=1, write_bytes=10)

    tiers = Tiers([tier(), tier()], thresholds=TierThresholds(), share="at_once")
    assert list(tiers.stats()) == ["vault", "vault-2"]
    assert await tiers.warm(1) == {"vault": "ready", "vault-2": "ready"}
    await tiers.aclose()


async def test_draining_waits_for_all_tiers_and_counts_what_is_late() -> None:
    """B26: what a slow tier did not take in time is counted there and nowhere else."""
    async with Setup("disk", "redis") as pool:
        pool.stores["redis"].delays = {"put_many": 3600.0}
        pool.tiers.offer(offered("a", "b"))
        await asyncio.sleep(0.05)
        with anyio.fail_after(5):
            assert await pool.tiers.drain(0.05) == 2
        stats = pool.tiers.stats()
        assert (stats["disk"]["written"], stats["disk"]["dropped"], stats["redis"]["dropped"]) == (2, 0, 2)


async def test_no_tiers_are_fine() -> None:
    tiers = Tiers([], thresholds=TierThresholds(), share="at_once")
    assert await tiers.locate(KEYS) == []
    assert await tiers.get_many(["a"]) == [None]
    tiers.offer(offered("a"))
    tiers.note_hit("a")
    assert (tiers.jobs(), tiers.stats(), await tiers.drain(1), await tiers.warm(1)) == ([], {}, 0, {})
    await tiers.aclose()
