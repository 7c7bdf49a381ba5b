"""Hits are counted in bounded memory, added up by the tiers that can, and survive whoever counted them."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from kitelib.abc import HitLedger
from kitelib.config import TierThresholds
from kitelib.errors import StoreError
from kitelib.fingerprint import model_key
from kitelib.runtime.threads import ThreadDoor
from kitelib.stores.disk import DiskStore
from kitelib.stores.hits import DAY_S, MAX_DESCRIPTION_BYTES, HitCounts, HitPublisher, most_hit
from kitelib.stores.lifecycle import Lifecycle
from kitelib.stores.redis import RedisStore
from kitelib.stores.tier import Tier
from kitelib.stores.tiered import Tiers
from tests.support.hits import MODEL, OWN, root_of, today
from tests.support.redis_servers import RedisServer
from tests.support.shared_memory import HandClock, SharedMemory
from tests.support.units import INFO

BLOCK, OTHER = b"1" * 32, b"2" * 32
MEMBER, OTHER_MEMBER = (f"{OWN.hex()}:{cf.hex()}" for cf in (BLOCK, OTHER))
ABOUT = {"execution_path": {"layout": "test.kv"}, "namespace": None, "adapter": None}


class Ledger(SharedMemory):
    """A shared tier in memory that counts hits, and can be told to fail."""

    def __init__(self, clock: HandClock | None = None) -> None:
        super().__init__(clock)
        self.hits: dict[str, int] = {}
        self.roots: dict[str, str] = {}
        self.added: list[tuple[str, int, dict[str, int], dict[str, str]]] = []

    async def add_hits(self, model: str, day: int, hits: Mapping[str, int], roots: Mapping[str, str]) -> None:
        await self._enter("add_hits", [])
        self.added.append((model, day, dict(hits), dict(roots)))
        self.roots |= roots
        for member, count in hits.items():
            self.hits[member] = self.hits.get(member, 0) + count

    async def read_hits(self, model: str, days: object, limit: int) -> tuple[dict[str, int], dict[str, str]]:
        await self._enter("read_hits", [])
        return most_hit(self.hits, limit), dict(self.roots)

    async def hit_models(self) -> list[str]:
        return sorted({model for model, *_ in self.added})


def counts_of(**options: object) -> HitCounts:
    counts = HitCounts(**options)  # type: ignore[arg-type]
    counts.use_model(INFO)
    counts.describe(OWN, ABOUT)
    return counts


def tiers_of(**stores: object) -> Tiers:
    tiers = [
        Tier(name, store, door=ThreadDoor(), timeout_s=1.0, write_bytes=2**20)  # type: ignore[arg-type]
        for name, store in stores.items()
    ]
    return Tiers(tiers, thresholds=TierThresholds(), share="at_once")


# Counting


def test_a_block_counts_every_request_that_ended_there() -> None:
    counts = counts_of()
    for cf in (BLOCK, OTHER, BLOCK):
        counts.note(OWN, cf)
    assert counts.peek(MODEL) == {MEMBER: 2, OTHER_MEMBER: 1}
    assert counts.take() == {(MODEL, MEMBER): 2, (MODEL, OTHER_MEMBER): 1}
    assert counts.take() == {}


def test_what_was_used_longest_ago_is_forgotten_first() -> None:
    counts = counts_of(max_entries=2)
    for cf in (BLOCK, OTHER, BLOCK, b"3" * 32):
        counts.note(OWN, cf)
    assert counts.peek(MODEL) == {MEMBER: 2, f"{OWN.hex()}:{(b'3' * 32).hex()}": 1}


def test_hits_of_another_model_stay_apart() -> None:
    other = dataclasses.replace(INFO, model_state=b"n" * 32)
    counts = counts_of()
    counts.note(OWN, BLOCK)
    counts.use_model(other)
    counts.note(OWN, BLOCK)
    assert counts.take() == {(MODEL, MEMBER): 1, (model_key(other.model_state), MEMBER): 1}
    assert set(counts.descriptions(MODEL, [MEMBER])) == {"model", OWN.hex()}
    assert set(counts.descriptions(model_key(other.model_state), [MEMBER])) == {"model"}


def test_a_root_is_described_by_what_it_is_made_of() -> None:
    counts = counts_of()
    tenant = root_of("tenant")
    counts.describe(tenant, {**ABOUT, "namespace": "tenant", "adapter": (b"a" * 32, 0.5)})
    texts = counts.descriptions(MODEL, [MEMBER, f"{tenant.hex()}:{BLOCK.hex()}", f"{'0' * 64}:{BLOCK.hex()}"])
    assert json.loads(texts[OWN.hex()]) == ABOUT
    assert json.loads(texts[tenant.hex()]) == {
        **ABOUT,
        "namespace": "tenant",
        "adapter": {"digest": (b"a" * 32).hex(), "scale": 0.5},
    }
    assert json.loads(texts["model"])["model_state"] == INFO.model_state.hex()
    assert set(texts) == {"model", OWN.hex(), tenant.hex()}


def test_a_secret_keeps_the_names_of_tenants_in_the_process() -> None:
    counts = counts_of(private=True)
    tenant = root_of("tenant", b"secret")
    counts.describe(tenant, {**ABOUT, "namespace": "tenant"})
    texts = counts.descriptions(MODEL, [MEMBER, f"{tenant.hex()}:{BLOCK.hex()}"])
    assert "tenant" not in "".join(texts.values())
    assert json.loads(texts[tenant.hex()])["private"] is True
    assert json.loads(texts[OWN.hex()])["namespace"] is None


def test_descriptions_are_bounded_and_those_that_came_first_stay() -> None:
    counts = counts_of()
    for number in range(2000):
        counts.describe(number.to_bytes(32, "big"), ABOUT)
    counts.describe(BLOCK, {**ABOUT, "namespace": "x" * MAX_DESCRIPTION_BYTES})
    members = [f"{number.to_bytes(32, 'big').hex()}:{BLOCK.hex()}" for number in range(2000)]
    known = counts.descriptions(MODEL, [MEMBER, *members])
    assert {OWN.hex(), "model"} <= set(known)
    assert len(known) == 1024
    assert set(counts.descriptions(MODEL, [f"{BLOCK.hex()}:{BLOCK.hex()}"])) == {"model"}


# Publishing


async def test_a_round_adds_what_is_new_to_every_ledger() -> None:
    clock, disk, redis = HandClock(1e9), Ledger(), Ledger()
    counts, tiers = counts_of(), tiers_of(disk=disk, redis=redis, s3=SharedMemory())
    lifecycle = Lifecycle(
        tiers, interval_s=60, thresholds=TierThresholds(), on_epoch=lambda _: None, clock=clock, hits=counts
    )
    counts.note(OWN, BLOCK)
    await lifecycle.check()
    await lifecycle.check()  # nothing new: nothing is sent
    counts.note(OWN, BLOCK)
    counts.note(OWN, OTHER)
    clock.advance(DAY_S)
    await lifecycle.check()
    for ledger in (disk, redis):
        assert ledger.hits == {MEMBER: 2, OTHER_MEMBER: 1}
        assert [(model, day) for model, day, *_ in ledger.added] == [(MODEL, 11574), (MODEL, 11575)]


async def test_roots_are_told_once_an_hour() -> None:
    clock, ledger = HandClock(1e9), Ledger()
    counts, tiers = counts_of(), tiers_of(redis=ledger)
    publisher = HitPublisher(counts, clock.time)
    for advance in (0, 60, 3600):
        clock.advance(advance)
        counts.note(OWN, BLOCK)
        await publisher.publish(tiers.tiers)
    assert [set(roots) for *_, roots in ledger.added] == [{"model", OWN.hex()}, set(), {"model", OWN.hex()}]


async def test_what_a_tier_does_not_take_waits_for_the_next_round() -> None:
    disk, redis = Ledger(), Ledger()
    counts, tiers = counts_of(), tiers_of(disk=disk, redis=redis)
    publisher = HitPublisher(counts, lambda: 1e9)
    redis.failing.add("add_hits")
    counts.note(OWN, BLOCK)
    await publisher.publish(tiers.tiers)
    counts.note(OWN, BLOCK)
    await publisher.publish(tiers.tiers)
    assert (disk.hits, redis.hits) == ({MEMBER: 2}, {})
    assert publisher.waiting(tiers.tiers[1], MODEL) == {MEMBER: 2}
    redis.failing.clear()
    await publisher.publish(tiers.tiers)
    assert (disk.hits, redis.hits) == ({MEMBER: 2}, {MEMBER: 2})
    assert set(redis.roots) == {"model", OWN.hex()}
    assert publisher.waiting(tiers.tiers[1], MODEL) == {}


async def test_a_tier_that_never_takes_any_costs_bounded_memory() -> None:
    redis = Ledger()
    redis.failing.add("add_hits")
    counts, tiers = counts_of(), tiers_of(redis=redis)
    publisher = HitPublisher(counts, lambda: 1e9)
    for start in range(0, 20_000, 2000):
        for number in range(start, start + 2000):
            counts.note(OWN, number.to_bytes(32, "big"))
        await publisher.publish(tiers.tiers)
    assert len(publisher.waiting(tiers.tiers[0], MODEL)) == 4096


async def test_a_cancelled_round_loses_nothing() -> None:
    ledger = Ledger()
    ledger.delays["add_hits"] = 60.0
    counts, tiers = counts_of(), tiers_of(redis=ledger)
    publisher = HitPublisher(counts, lambda: 1e9)
    counts.note(OWN, BLOCK)
    with anyio.move_on_after(0.05):
        await publisher.publish(tiers.tiers)
    assert publisher.waiting(tiers.tiers[0], MODEL) == {MEMBER: 1}
    await tiers.aclose()


async def test_without_a_ledger_counts_stay() -> None:
    counts, tiers = counts_of(), tiers_of(s3=SharedMemory())
    counts.note(OWN, BLOCK)
    await HitPublisher(counts, lambda: 1e9).publish(tiers.tiers)
    assert counts.peek(MODEL) == {MEMBER: 1}


async def test_a_failing_ledger_does_not_stop_reading_from_its_tier() -> None:
    """A server that is full or read-only refuses counts at every round, and must go on being read."""
    redis = Ledger()
    redis.failing.add("add_hits")
    counts, tiers = counts_of(), tiers_of(redis=redis)
    publisher = HitPublisher(counts, lambda: 1e9)
    await redis.put_many([("kite:{0}:a:kv:b", b"value")])
    for _ in range(10):
        counts.note(OWN, BLOCK)
        await publisher.publish(tiers.tiers)
    assert tiers.tiers[0].counters()["write_breaker"] != "closed"
    assert await tiers.tiers[0].get_many(["kite:{0}:a:kv:b"]) == [b"value"]


async def test_a_dead_redis_changes_nothing_for_requests(tmp_path: Path) -> None:
    """Rounds go on, the disk takes its counts, and reading from it is as before."""
    server = RedisServer(tmp_path / "dead")  # never started
    disk, redis = DiskStore(tmp_path / "pool", 2**24), RedisStore(server.url)
    counts, tiers = counts_of(), tiers_of(disk=disk, redis=redis)
    lifecycle = Lifecycle(tiers, interval_s=60, thresholds=TierThresholds(), on_epoch=lambda _: None, hits=counts)
    await disk.put_many([("kite:{0}:a:kv:b", b"value")])
    for _ in range(5):
        counts.note(OWN, BLOCK)
        await lifecycle.check()
    assert await tiers.get_many(["kite:{0}:a:kv:b"]) == [(tiers.tiers[0], b"value")]
    assert (await disk.read_hits(MODEL, [today()], 10))[0] == {MEMBER: 5}
    assert lifecycle.hits is not None
    assert lifecycle.hits.waiting(tiers.tiers[1], MODEL) == {MEMBER: 5}
    await tiers.aclose()


# Over processes and restarts

_WORKER = """
import asyncio, sys
from kitelib.config import PoolConfig
from kitelib.stores.registry import open_stores
from tests.support.hits import MODEL, today

async def main(redis, disk, member, times):
    config = PoolConfig(redis=redis or None, disk=disk or None)
    ((_, store),) = open_stores(config)
    for _ in range(int(times)):
        await store.add_hits(MODEL, today(), {member: 1, member[:-1] + "f": 2}, {"model": "{}"})
    await store.aclose()

asyncio.run(main(*sys.argv[1:]))
"""


async def two_processes_add(redis: str, disk: str) -> None:
    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", _WORKER, redis, disk, MEMBER, "40"]
        return subprocess.Popen(command, cwd=Path(__file__).parents[3], stderr=subprocess.PIPE)

    processes = [start(), start()]
    for process in processes:
        _, errors = await anyio.to_thread.run_sync(process.communicate)
        assert process.returncode == 0, errors.decode()


async def test_two_processes_add_up_on_the_disk(tmp_path: Path) -> None:
    await two_processes_add("", str(tmp_path / "pool"))
    store = DiskStore(tmp_path / "pool", 2**24)
    assert await store.read_hits(MODEL, [today(), today() - 1], 10) == (
        {MEMBER[:-1] + "f": 160, MEMBER: 80},
        {"model": "{}"},
    )
    await store.aclose()


async def test_two_processes_add_up_in_redis(redis_server: RedisServer) -> None:
    await two_processes_add(redis_server.url, "")
    store = RedisStore(redis_server.url)
    assert (await store.read_hits(MODEL, [today(), today() - 1], 10))[0] == {MEMBER[:-1] + "f": 160, MEMBER: 80}
    await store.aclose()


# Redis


async def test_counts_in_redis_expire_and_are_outside_what_units_are_listed_by(redis_server: RedisServer) -> None:
    store = RedisStore(redis_server.url)
    await store.add_hits(MODEL, today(), {MEMBER: 3}, {OWN.hex(): "{}"})
    keys = [key.decode() for key in await anyio.to_thread.run_sync(redis_server.call, "KEYS", "*")]
    assert sorted(keys) == [
        "kite-hits-models",
        f"kite-hits:{{{MODEL}.{today()}}}:counts",
        f"kite-hits:{{{MODEL}.{today()}}}:roots",
    ]
    for key in keys:
        assert 0 < await anyio.to_thread.run_sync(redis_server.call, "TTL", key) <= 8 * 86400
    await store.aclose()


async def test_redis_keeps_those_used_most_and_gives_them_in_pages(redis_server: RedisServer) -> None:
    store = RedisStore(redis_server.url)
    members = {f"{OWN.hex()}:{number:064x}": number for number in range(1, 63_001)}
    await store.add_hits(MODEL, today(), members, {})
    # What was cut is what had the fewest hits; not more than a quarter over the bound is ever there.
    size = await anyio.to_thread.run_sync(redis_server.call, "ZCARD", f"kite-hits:{{{MODEL}.{today()}}}:counts")
    assert 50_000 <= size <= 62_500
    found, _ = await store.read_hits(MODEL, [today()], 2500)
    assert list(found.items()) == list(most_hit(members, 2500).items())
    assert await store.read_hits(MODEL, [today()], 0) == ({}, {})
    await store.aclose()


async def test_nonsense_in_redis_is_left_out(redis_server: RedisServer) -> None:
    store = RedisStore(redis_server.url)
    await store.add_hits(MODEL, today(), {MEMBER: 3}, {OWN.hex(): "{}"})
    counts, roots = (f"kite-hits:{{{MODEL}.{today()}}}:{name}" for name in ("counts", "roots"))

    def spoil() -> None:
        redis_server.call(
            "ZADD", counts, "1e300", OTHER_MEMBER, "5", "no member", "-3", MEMBER[:-1] + "0", "inf", "\x00"
        )
        redis_server.call("HSET", roots, OWN.hex(), "x" * (MAX_DESCRIPTION_BYTES + 1), "model", "two\nlines")
        redis_server.call("ZADD", "kite-hits-models", "1", "../../etc")

    await anyio.to_thread.run_sync(spoil)
    assert await store.read_hits(MODEL, [today()], 10) == ({MEMBER: 3}, {})
    assert await store.hit_models() == [MODEL]
    await anyio.to_thread.run_sync(redis_server.call, "DEL", counts)
    await anyio.to_thread.run_sync(redis_server.call, "SET", counts, "a text")
    with pytest.raises(StoreError, match="read_hits at .* failed: WRONGTYPE"):
        await store.read_hits(MODEL, [today()], 10)
    await store.aclose()


async def test_the_rights_that_the_manual_names_are_enough(redis_server: RedisServer) -> None:
    rights = "~kite* +@read +@write +eval +ping +select +scan +dbsize +object|idletime +memory|usage"
    await anyio.to_thread.run_sync(
        lambda: redis_server.call("ACL", "SETUSER", "counter", "on", ">secret", *rights.split())
    )
    store = RedisStore(redis_server.url.replace("://", "://counter:secret@"))
    await store.add_hits(MODEL, today(), {MEMBER: 3}, {"model": "{}"})
    assert await store.read_hits(MODEL, [today()], 10) == ({MEMBER: 3}, {"model": "{}"})
    assert await store.hit_models() == [MODEL]
    await store.aclose()
    await anyio.to_thread.run_sync(redis_server.call, "ACL", "DELUSER", "counter")


async def test_a_cluster_keeps_each_day_on_one_server(redis_cluster) -> None:
    store = RedisStore(redis_cluster.url)
    for day in range(today() - 7, today() + 1):
        await store.add_hits(MODEL, day, {MEMBER: 1}, {OWN.hex(): "{}"})
    assert await store.read_hits(MODEL, range(today() - 7, today() + 1), 10) == ({MEMBER: 8}, {OWN.hex(): "{}"})
    stats = await store.stats()
    assert (stats.items, stats.errors) == (0, 0)
    await store.aclose()


# The disk


async def test_counts_on_the_disk_survive_their_writer_and_old_days_go(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "pool", 2**24)
    for day in (100, 101, 107):
        await store.add_hits(MODEL, day, {MEMBER: 1}, {})
    await store.aclose()
    again = DiskStore(tmp_path / "pool", 2**24)
    assert (await again.read_hits(MODEL, range(90, 110), 10))[0] == {MEMBER: 3}
    await again.add_hits(MODEL, 108, {MEMBER: 1}, {})
    assert sorted(path.name for path in (tmp_path / "pool" / "hits").iterdir()) == [
        *(f"{MODEL}@{day}" for day in (101, 107, 108)),
        "lock",
    ]
    await again.aclose()


async def test_the_disk_keeps_those_used_most(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "pool", 2**24)
    members = {f"{OWN.hex()}:{number:064x}": number for number in range(1, 13_001)}
    await store.add_hits(MODEL, today(), members, {})
    found, _ = await store.read_hits(MODEL, [today()], 50_000)
    assert list(found.items()) == list(most_hit(members, 10_000).items())
    for model in range(100):
        await store.add_hits(f"model-{model}", today() - 1, {MEMBER: 1}, {})
    files = [path for path in (tmp_path / "pool" / "hits").iterdir() if path.name != "lock"]
    assert len(files) == 64
    assert MODEL in await store.hit_models()
    await store.aclose()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"something else\n1 2\n",
        b"\x80\x04\x95" + bytes(100),
        b"kite hits 1\n5 %s" % MEMBER.encode(),  # cut in its last line
        b"kite hits 1\n-5 %(m)s\n99999999999999999999 %(m)s\nfive %(m)s\n5 no-member\n= model two\x00\n"
        % {b"m": MEMBER.encode()},
    ],
)
async def test_a_damaged_file_of_counts_begins_anew(tmp_path: Path, content: bytes) -> None:
    store = DiskStore(tmp_path / "pool", 2**24)
    await store.add_hits(MODEL, today(), {MEMBER: 1}, {})
    (tmp_path / "pool" / "hits" / f"{MODEL}@{today()}").write_bytes(content)
    assert await store.read_hits(MODEL, [today()], 10) == ({}, {})
    await store.add_hits(MODEL, today(), {MEMBER: 2}, {"model": "{}"})
    assert await store.read_hits(MODEL, [today()], 10) == ({MEMBER: 2}, {"model": "{}"})
    await store.aclose()


async def test_a_locked_disk_gives_up_in_time(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "pool", 2**24)
    await store.add_hits(MODEL, today(), {MEMBER: 1}, {})
    command = [sys.executable, "-c", _HOLD, str(tmp_path / "pool" / "hits" / "lock")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        await anyio.to_thread.run_sync(process.stdout.readline)
        with pytest.raises(StoreError, match="was locked by another process"):
            await store.add_hits(MODEL, today(), {MEMBER: 1}, {})
    finally:
        await anyio.to_thread.run_sync(process.communicate)
    await store.add_hits(MODEL, today(), {MEMBER: 1}, {})
    assert (await store.read_hits(MODEL, [today()], 10))[0] == {MEMBER: 2}
    await store.aclose()


_HOLD = """
import fcntl, sys
file = open(sys.argv[1])
fcntl.flock(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


async def test_the_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"cat")
    store = DiskStore(tmp_path / "photos", 2**24)
    for call in (
        store.add_hits(MODEL, today(), {MEMBER: 1}, {}),
        store.read_hits(MODEL, [today()], 10),
        store.hit_models(),
    ):
        with pytest.raises(StoreError, match="is no pool"):
            await call
    assert [path.name for path in (tmp_path / "photos").iterdir()] == ["cat.jpg"]
    await store.aclose()


async def test_reading_makes_no_folder(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "pool", 2**24)
    assert await store.read_hits(MODEL, [today()], 10) == ({}, {})
    assert await store.hit_models() == []
    await store.aclose()
    assert not (tmp_path / "pool").exists()


def test_which_stores_count_hits(tmp_path: Path, redis_server: RedisServer) -> None:
    assert isinstance(DiskStore(tmp_path, 2**24), HitLedger)
    assert isinstance(RedisStore(redis_server.url), HitLedger)
    assert not isinstance(SharedMemory(), HitLedger)
