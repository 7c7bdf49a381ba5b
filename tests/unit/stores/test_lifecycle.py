"""Epochs only move forward, reach every process and every tier, and cold units move without ever being nowhere."""

from __future__ import annotations

import asyncio
from pathlib import Path

import anyio
import pytest

from kitelib.config import TierThresholds
from kitelib.errors import StoreError
from kitelib.fingerprint import model_key, store_key
from kitelib.runtime.threads import ThreadDoor
from kitelib.stores import archiving
from kitelib.stores.disk import DiskStore
from kitelib.stores.lifecycle import Lifecycle, purge_stale
from kitelib.stores.memory import MemoryStore
from kitelib.stores.tier import Pending, Tier
from kitelib.stores.tiered import Tiers
from kitelib.upcycle.codec import get_codec
from kitelib.upcycle.unit import pack
from tests.support.shared_memory import HandClock, SharedMemory
from tests.support.units import INFO, units_of

MODEL = model_key(INFO.model_state)
COLD_S = 7 * 86400.0


def stored(first_token: int, *, epoch: int = 0) -> list[tuple[str, bytes]]:
    """Four units of a prompt: three blocks and the logits."""
    units = units_of(range(first_token, first_token + 12), epoch=epoch)
    codec = get_codec("raw", "none")
    return [(store_key(MODEL, unit.kind, unit.cf), pack(unit, codec)) for unit in units]


class Process:
    """The outer tiers of one process over stores that others may use too."""

    def __init__(self, clock: HandClock, **stores: object) -> None:
        self.epochs: list[int] = []
        self.clock = clock
        self.tiers = Tiers(
            [
                Tier(name, store, door=ThreadDoor(), timeout_s=2.0, write_bytes=2**20, clock=clock)
                for name, store in stores.items()
            ],
            thresholds=TierThresholds(cold_after_s=COLD_S),
            share="at_once",
            clock=clock,
        )
        self.lifecycle = Lifecycle(
            self.tiers,
            interval_s=60.0,
            thresholds=TierThresholds(cold_after_s=COLD_S),
            on_epoch=self.epochs.append,
            clock=clock,
        )

    def mend(self) -> None:
        for tier in self.tiers.tiers:
            tier.breaker.succeed()


@pytest.fixture
def clock() -> HandClock:
    return HandClock(1e9)


# Epochs


async def test_a_model_starts_at_the_highest_epoch_that_any_tier_knows(clock: HandClock) -> None:
    disk, redis, s3 = SharedMemory(clock), SharedMemory(clock), SharedMemory(clock)
    redis.epochs[MODEL] = 7
    s3.epochs[MODEL] = 3
    process = Process(clock, disk=disk, redis=redis, s3=s3)
    assert process.lifecycle.epoch == 0
    assert await process.lifecycle.use_model(MODEL) == 7
    assert process.lifecycle.epoch == 7
    assert [store.epochs[MODEL] for store in (disk, redis, s3)] == [7, 7, 7]  # those that lagged were raised
    assert await process.lifecycle.use_model("other") == 0  # each model has its own
    assert await process.lifecycle.use_model(MODEL) == 7
    assert process.epochs == []


async def test_a_damaged_epoch_is_not_followed_and_said(clock: HandClock, caplog: pytest.LogCaptureFixture) -> None:
    """One tier's nonsense must not use up the epochs of all the others."""
    disk, redis = SharedMemory(clock), SharedMemory(clock)
    redis.epochs[MODEL] = 2**63 - 1
    process = Process(clock, disk=disk, redis=redis)
    assert await process.lifecycle.use_model(MODEL) == 0
    assert "9223372036854775807, which is damaged" in caplog.text
    await process.lifecycle.raise_epoch()
    assert (process.lifecycle.epoch, disk.epochs[MODEL]) == (1, 1)
    await process.lifecycle.check()
    assert process.lifecycle.epoch == 1


async def test_an_invalidation_reaches_every_tier_and_every_process(clock: HandClock) -> None:
    """B18, B20: one call invalidates all tiers; every other process knows at its next check."""
    redis, disk_a, disk_b = SharedMemory(clock), SharedMemory(clock), SharedMemory(clock)
    ours, theirs = Process(clock, disk=disk_a, redis=redis), Process(clock, disk=disk_b, redis=redis)
    for process in (ours, theirs):
        await process.lifecycle.use_model(MODEL)
    for store in (redis, disk_a, disk_b):
        await store.put_many(stored(0))

    assert await ours.lifecycle.raise_epoch() == {"disk": 4, "redis": 4}
    assert ours.lifecycle.epoch == 1
    assert ours.epochs == [1]
    assert (len(redis.inner.keys()), len(disk_a.inner.keys()), len(disk_b.inner.keys())) == (0, 0, 4)

    await theirs.lifecycle.check()
    assert theirs.epochs == [1]
    assert disk_b.epochs[MODEL] == 1
    assert disk_b.inner.keys() == []
    await theirs.lifecycle.check()
    await ours.lifecycle.check()
    assert (ours.epochs, theirs.epochs) == ([1], [1])  # told once


async def test_the_caller_is_told_only_of_what_it_does_not_know(clock: HandClock) -> None:
    redis = SharedMemory(clock)
    process = Process(clock, redis=redis)
    await process.lifecycle.use_model(MODEL)
    await process.lifecycle.raise_epoch(1)
    assert (process.lifecycle.epoch, process.epochs) == (1, [])
    redis.epochs[MODEL] = 9
    await process.lifecycle.raise_epoch(2)
    assert (process.lifecycle.epoch, process.epochs, redis.epochs[MODEL]) == (10, [10], 10)
    assert await Process(clock, redis=redis).lifecycle.raise_epoch() == {}  # no model, nothing to invalidate


async def test_a_lagging_or_restored_store_never_takes_the_epoch_back(clock: HandClock) -> None:
    """B18: an old copy of a store can't make old units valid again."""
    redis, s3 = SharedMemory(clock), SharedMemory(clock)
    process = Process(clock, redis=redis, s3=s3)
    await process.lifecycle.use_model(MODEL)
    await process.lifecycle.raise_epoch()
    await process.lifecycle.raise_epoch()
    redis.epochs[MODEL] = 0  # restored from a backup
    await process.lifecycle.check()
    assert (process.lifecycle.epoch, redis.epochs[MODEL]) == (2, 2)


async def test_what_can_not_be_reached_is_invalidated_as_soon_as_it_can(clock: HandClock) -> None:
    """B20: a tier that was down during the invalidation is raised and cleared later, for certain."""
    redis, s3 = SharedMemory(clock), SharedMemory(clock)
    process = Process(clock, redis=redis, s3=s3)
    await process.lifecycle.use_model(MODEL)
    for store in (redis, s3):
        await store.put_many(stored(0))
    redis.failing.add("all")
    assert await process.lifecycle.raise_epoch() == {"redis": 0, "s3": 4}
    for _ in range(2):
        await process.lifecycle.check()  # does not raise, and goes on
        process.mend()
    assert len(redis.inner.keys()) == 4
    redis.failing.clear()
    await process.lifecycle.check()
    assert (redis.epochs[MODEL], redis.inner.keys()) == (1, [])


async def test_an_invalidation_that_no_tier_heard_of_comes_after_those_of_others(clock: HandClock) -> None:
    """B20: while this process was cut off, others raised the epoch and wrote units; those are stale too."""
    redis = SharedMemory(clock)
    ours, theirs = Process(clock, redis=redis), Process(clock, redis=redis)
    for process in (ours, theirs):
        await process.lifecycle.use_model(MODEL)
    redis.failing.add("all")
    await ours.lifecycle.raise_epoch()
    assert ours.lifecycle.epoch == 1
    redis.failing.clear()
    await theirs.lifecycle.raise_epoch()
    await redis.put_many(stored(0, epoch=1))
    ours.mend()
    await ours.lifecycle.check()
    assert (ours.lifecycle.epoch, redis.epochs[MODEL]) == (2, 2)
    assert ours.epochs[-1] == 2
    assert redis.inner.keys() == []
    await theirs.lifecycle.check()
    assert theirs.lifecycle.epoch == 2
    await ours.lifecycle.check()
    assert ours.lifecycle.epoch == 2  # once is enough


async def test_a_tier_that_turns_out_to_be_ahead_is_gone_past(clock: HandClock) -> None:
    redis = SharedMemory(clock)
    process = Process(clock, redis=redis)
    await process.lifecycle.use_model(MODEL)
    redis.epochs[MODEL] = 5
    await redis.put_many(stored(0, epoch=5))
    redis.failing.add("get_epoch")
    assert await process.lifecycle.raise_epoch() == {"redis": 4}
    assert (process.lifecycle.epoch, redis.epochs[MODEL]) == (6, 6)


async def test_an_invalidation_that_is_cancelled_halfway_is_completed_later(clock: HandClock) -> None:
    """B12, B20: whoever asked may give up; the invalidation does not."""
    redis = SharedMemory(clock)
    process = Process(clock, redis=redis)
    await process.lifecycle.use_model(MODEL)
    await redis.put_many(stored(0))
    redis.delays["raise_epoch"] = 3600.0
    with anyio.move_on_after(0.02):
        await process.lifecycle.raise_epoch()
    redis.delays.clear()
    assert len(redis.inner.keys()) == 4
    await process.lifecycle.check()
    assert (process.lifecycle.epoch, redis.epochs[MODEL], redis.inner.keys()) == (1, 1, [])


async def test_a_plain_store_takes_no_part(clock: HandClock) -> None:
    process = Process(clock, vault=MemoryStore(2**20), redis=SharedMemory(clock))
    await process.lifecycle.use_model(MODEL)
    assert await process.lifecycle.raise_epoch() == {"redis": 0}
    assert await process.lifecycle.purge_stale(process.tiers.tiers[0], MODEL) == 0
    await process.lifecycle.check()


# Purging


async def test_only_older_units_of_the_model_are_purged(clock: HandClock) -> None:
    store = SharedMemory(clock)
    other = store_key("0123456789abcdef", "kv", b"x" * 32)
    damaged = store_key(MODEL, "kv", b"y" * 32)
    await store.put_many(
        [*stored(0, epoch=1), *stored(50, epoch=2), *stored(100, epoch=3), (other, b"z" * 300), (damaged, b"junk")]
    )
    assert await purge_stale(store, MODEL, 3) == 8
    assert set(store.inner.keys()) == {key for key, _ in stored(100, epoch=3)} | {other, damaged}
    assert await purge_stale(store, MODEL, 3) == 0


async def test_purging_many_units_goes_in_bounded_batches(clock: HandClock) -> None:
    store = SharedMemory(clock)
    for first in range(0, 150, 1):
        await store.put_many(stored(first))
    kept = len(store.inner.keys())
    store.calls.clear()
    assert await purge_stale(store, MODEL, 1) == kept
    assert max(len(keys) for name, keys in store.calls if name in ("get_heads", "delete_many")) <= 256
    assert store.inner.keys() == []


async def test_a_store_that_fails_in_the_middle_says_so(clock: HandClock) -> None:
    store = SharedMemory(clock)
    await store.put_many(stored(0))
    store.failing.add("get_heads")
    with pytest.raises(StoreError, match="get_heads fails"):
        await purge_stale(store, MODEL, 1)
    store.failing = {"list_items"}
    process = Process(clock, redis=store)
    await process.lifecycle.use_model(MODEL)
    assert await process.lifecycle.raise_epoch() == {"redis": 0}
    store.failing.clear()
    process.mend()
    await process.lifecycle.check()
    assert (store.inner.keys(), process.lifecycle.purged) == ([], 4)


# Rounds


async def test_a_round_sweeps_and_counts_and_no_store_stops_it(clock: HandClock) -> None:
    """B30: a store that fails every call costs the others nothing."""
    disk, redis, s3 = SharedMemory(clock), SharedMemory(clock), SharedMemory(clock)
    process = Process(clock, disk=disk, redis=redis, s3=s3)
    await process.lifecycle.use_model(MODEL)
    redis.failing.add("all")
    await disk.put_many(stored(0))
    for _ in range(300):
        await process.lifecycle.check()
        clock.advance(60)
    assert disk.swept == 300  # a local look is cheap
    assert 4 <= s3.swept <= 8  # listing a bucket is not: 300 minutes, a 200th of 7 days between two
    assert process.tiers.stats()["disk"]["items"] == 4
    assert process.tiers.stats()["redis"]["breaker"] in ("open", "half_open")


async def test_processes_that_start_together_do_not_stay_together(clock: HandClock, monkeypatch) -> None:
    waits: list[float] = []
    process = Process(clock, redis=SharedMemory(clock))

    async def note(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 50:
            raise anyio.get_cancelled_exc_class()

    monkeypatch.setattr("kitelib.stores.lifecycle.anyio.sleep", note)
    with pytest.raises(asyncio.CancelledError):
        await process.lifecycle.run()
    assert 0 <= waits[0] <= 60
    assert all(48 <= seconds <= 72 for seconds in waits[1:])
    assert len(set(waits)) == 50


# Rest


def timers() -> list[object]:
    return [each for each in asyncio.get_running_loop()._scheduled if not each.cancelled()]  # type: ignore[attr-defined]


async def settled(lifecycle: Lifecycle, *, resting: bool) -> None:
    with anyio.fail_after(10):
        while lifecycle._resting != resting:
            await asyncio.sleep(0)


async def test_a_process_with_local_tiers_rests_until_it_is_used(clock: HandClock) -> None:
    """No timer while nobody asks; one round after the last use; and what others invalidated is known in time."""
    disk = SharedMemory(clock)
    ours, theirs = Process(clock, disk=disk), Process(clock, disk=disk)
    for process in (ours, theirs):
        await process.lifecycle.use_model(MODEL)
    run = asyncio.get_running_loop().create_task(ours.lifecycle.run())
    await settled(ours.lifecycle, resting=True)
    before = timers()
    assert not ours.lifecycle.note_use()
    clock.now += 60.0
    with anyio.fail_after(10):
        while disk.swept == 0:  # the one round
            await asyncio.sleep(0.01)
    await settled(ours.lifecycle, resting=True)
    assert timers() == before == []

    clock.now += 3600.0
    await theirs.lifecycle.raise_epoch()
    for _ in range(100):
        await asyncio.sleep(0)
    assert (ours.epochs, disk.swept) == ([], 1)  # still at rest
    assert ours.lifecycle.note_use()
    assert ours.lifecycle.note_use()  # nor may the next request go ahead, until somebody has looked
    await ours.lifecycle.look()
    assert ours.epochs == [1]
    assert not ours.lifecycle.note_use()
    run.cancel()


async def test_a_process_with_a_shared_tier_does_not_rest(clock: HandClock) -> None:
    """Others wait for its rounds: the archive, and counters of hits."""
    process = Process(clock, disk=SharedMemory(clock), redis=SharedMemory(clock))
    await process.lifecycle.use_model(MODEL)
    run = asyncio.get_running_loop().create_task(process.lifecycle.run())
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(timers()) == 1
    assert not process.lifecycle.note_use()
    run.cancel()


async def test_what_could_not_be_cleared_keeps_a_process_awake(clock: HandClock) -> None:
    disk = SharedMemory(clock)
    process = Process(clock, disk=disk)
    await process.lifecycle.use_model(MODEL)
    disk.failing = {"get_epoch", "raise_epoch", "list_items"}
    await process.lifecycle.raise_epoch()
    assert not process.lifecycle._may_rest()
    disk.failing = set()
    process.mend()
    await process.lifecycle.check()
    assert process.lifecycle._may_rest()


async def test_a_store_that_hangs_in_a_listing_is_left_behind(clock: HandClock) -> None:
    redis = SharedMemory(clock)
    process = Process(clock, redis=redis)
    await process.lifecycle.use_model(MODEL)
    await redis.put_many(stored(0))
    process.tiers.tiers[0].shared._timeout_s = 0.05  # type: ignore[union-attr]
    redis.delays = {"list_items": 3600.0}
    with anyio.fail_after(5):
        assert await process.lifecycle.raise_epoch() == {"redis": 0}
    assert process.tiers.stats()["redis"]["timeouts"] == 1
    await process.tiers.aclose()


# The archive


async def archive(clock: HandClock) -> tuple[Process, SharedMemory, SharedMemory, SharedMemory]:
    disk, redis, s3 = SharedMemory(clock), SharedMemory(clock), SharedMemory(clock)
    process = Process(clock, disk=disk, redis=redis, s3=s3)
    await process.lifecycle.use_model(MODEL)
    return process, disk, redis, s3


async def test_cold_units_move_to_the_archive_and_warm_ones_stay(clock: HandClock) -> None:
    process, disk, redis, s3 = await archive(clock)
    old, used, known = stored(0), stored(50), stored(100)
    for store in (disk, redis):
        await store.put_many(old + used + known)
    clock.advance(COLD_S + 1)
    await disk.get_many([key for key, _ in used])
    for key, _ in known:
        process.tiers.note_hit(key)  # used from process memory: the stores don't know
    assert await process.lifecycle.archive_cold() == 12  # the old ones of both tiers, those in Redis that disk used
    assert set(disk.inner.keys()) == {key for key, _ in used + known}
    assert set(redis.inner.keys()) == {key for key, _ in known}
    assert await s3.get_many([key for key, _ in old]) == [value for _, value in old]
    assert await process.lifecycle.archive_cold() == 0

    found = await process.tiers.get_many([key for key, _ in old])  # and back
    assert [each and each[0].name for each in found] == ["s3"] * 4
    writer = asyncio.create_task(process.tiers.tiers[0].run_writer())
    await process.tiers.drain(5)
    assert await disk.leading_run([key for key, _ in old]) == 4
    writer.cancel()


async def test_a_unit_never_leaves_before_the_archive_shows_it(clock: HandClock) -> None:
    """B31: an archive that fails, loses or damages what it is given costs no unit."""

    class Lossy(SharedMemory):
        mode = "lose"

        async def put_many(self, items):
            if self.mode == "lose":
                return
            await super().put_many([(key, value[:-1][::-1]) for key, value in items])

    disk, s3 = SharedMemory(clock), Lossy(clock)
    process = Process(clock, disk=disk, s3=s3)
    await disk.put_many(stored(0))
    clock.advance(COLD_S + 1)
    for s3.mode in ("lose", "damage"):
        assert await process.lifecycle.archive_cold() == 0
        assert len(disk.inner.keys()) == 4
        clock.advance(COLD_S + 1)
    for operation in ("put_many", "get_heads", "all"):
        s3.failing = {operation}
        assert await process.lifecycle.archive_cold() == 0
        assert len(disk.inner.keys()) == 4
        process.mend()
        clock.advance(COLD_S + 1)


async def test_two_processes_may_archive_at_once(clock: HandClock) -> None:
    redis, s3 = SharedMemory(clock), SharedMemory(clock)
    processes = [Process(clock, redis=redis, s3=s3) for _ in range(2)]
    values = [pair for first in range(0, 200, 20) for pair in stored(first)]
    await redis.put_many(values)
    for name in ("get_heads", "put_many", "get_many", "delete_many"):
        redis.delays[name] = s3.delays[name] = 0.001
    clock.advance(COLD_S + 1)
    moved = await asyncio.gather(*[process.lifecycle.archive_cold() for process in processes])
    assert sum(moved) == len(values)
    assert redis.inner.keys() == []
    assert await s3.get_many([key for key, _ in values]) == [value for _, value in values]


async def test_what_is_archived_already_is_not_copied_again(clock: HandClock) -> None:
    process, disk, _, s3 = await archive(clock)
    await disk.put_many(stored(0))
    await s3.put_many(stored(0))
    clock.advance(COLD_S + 1)
    s3.calls.clear()
    assert await process.lifecycle.archive_cold() == 4
    assert s3.called("put_many") == 0
    assert disk.called("get_many") == 0


async def test_stale_units_and_strangers_are_not_archived(clock: HandClock) -> None:
    """B18: what an invalidation made stale is not kept for later."""
    process, disk, _, s3 = await archive(clock)
    await disk.put_many([*stored(0), (store_key(MODEL, "kv", b"y" * 32), b"junk" * 100)])
    clock.advance(COLD_S + 1)
    disk.failing.add("list_items")  # not purged yet
    await process.lifecycle.raise_epoch()
    disk.failing.clear()
    assert await process.lifecycle.archive_cold() == 0
    assert s3.inner.keys() == []
    assert disk.inner.keys() == [store_key(MODEL, "kv", b"y" * 32)]


async def test_a_round_is_bounded_in_bytes(clock: HandClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """B27: archiving takes a bounded share of memory and bandwidth."""
    monkeypatch.setattr(archiving, "_BATCH_BYTES", 2000)
    monkeypatch.setattr(archiving.cold_batches, "__defaults__", (5000,))
    process, disk, _, s3 = await archive(clock)
    for first in range(0, 200, 20):
        await disk.put_many(stored(first))
    clock.advance(COLD_S + 1)
    moved = [await process.lifecycle.archive_cold() for _ in range(10)]
    assert 0 < moved[0] < 40
    assert sum(moved) == 40
    sizes = dict(pair for first in range(0, 200, 20) for pair in stored(first))
    for name, keys in s3.calls:
        if name == "put_many":
            assert sum(len(sizes[key]) for key in keys) <= 2000


async def test_without_an_archive_nothing_moves(clock: HandClock) -> None:
    disk = SharedMemory(clock)
    process = Process(clock, disk=disk)
    await disk.put_many(stored(0))
    clock.advance(COLD_S + 1)
    assert await process.lifecycle.archive_cold() == 0
    assert len(disk.inner.keys()) == 4


# On a real disk


async def test_two_processes_share_a_disk_and_its_epoch(tmp_path: Path) -> None:
    """B18, B20: written by one, invalidated by the other, gone for both, and still gone after a restart."""
    clock = HandClock(1e9)
    stores = [DiskStore(str(tmp_path), 2**26) for _ in range(2)]
    ours, theirs = (Process(clock, disk=store) for store in stores)
    for process in (ours, theirs):
        await process.lifecycle.use_model(MODEL)
    writer = asyncio.create_task(ours.tiers.tiers[0].run_writer())
    ours.tiers.offer([Pending(key, len(value), lambda _, value=value: value) for key, value in stored(0)])
    assert await ours.tiers.drain(5) == 0
    writer.cancel()
    keys = [key for key, _ in stored(0)]
    assert [each and each[1] for each in await theirs.tiers.get_many(keys)] == [value for _, value in stored(0)]

    assert await theirs.lifecycle.raise_epoch() == {"disk": 4}
    await ours.lifecycle.check()
    assert ours.epochs == [1]
    assert await ours.tiers.get_many(keys) == [None] * 4
    for process in (ours, theirs):
        await process.tiers.aclose()

    again = Process(clock, disk=DiskStore(str(tmp_path), 2**26))
    assert await again.lifecycle.use_model(MODEL) == 1
    await again.tiers.aclose()


async def test_cold_units_of_a_real_disk_move_to_the_archive(tmp_path: Path) -> None:
    disk, s3 = DiskStore(str(tmp_path / "disk"), 2**26), DiskStore(str(tmp_path / "archive"), 2**26)
    process = Process(HandClock(4e9), disk=disk, s3=s3)  # far in the future: everything is cold
    await disk.put_many(stored(0))
    assert await process.lifecycle.archive_cold() == 4
    assert (await disk.stats()).items == 0
    assert await s3.get_many([key for key, _ in stored(0)]) == [value for _, value in stored(0)]
    await process.tiers.aclose()
