"""The tier logic over a real disk, a real Redis server and S3 over HTTP."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import anyio

from kitelib.abc import SharedStore
from kitelib.config import TierThresholds
from kitelib.fingerprint import model_key, store_key
from kitelib.runtime.supervisor import Supervisor
from kitelib.runtime.threads import ThreadDoor
from kitelib.stores.disk import DiskStore
from kitelib.stores.lifecycle import Lifecycle
from kitelib.stores.redis import RedisStore
from kitelib.stores.s3 import S3Store
from kitelib.stores.tier import Pending, Tier
from kitelib.stores.tiered import Tiers
from kitelib.upcycle.codec import get_codec
from kitelib.upcycle.unit import pack
from tests.support.redis_servers import RedisServer
from tests.support.s3_server import S3Server
from tests.support.shared_memory import HandClock
from tests.support.units import INFO, units_of

MODEL = model_key(INFO.model_state)
COLD_S = 7 * 86400.0


def stored(first_token: int, *, epoch: int = 0) -> dict[str, bytes]:
    units = units_of(range(first_token, first_token + 40), epoch=epoch)
    return {store_key(MODEL, unit.kind, unit.cf): pack(unit, get_codec("raw", "none")) for unit in units}


class Process:
    """One process of a fleet: a disk of its own, Redis and S3 shared."""

    def __init__(self, disk: Path, server: RedisServer, s3: S3Server, bucket: str, *, days: float = 0.0) -> None:
        self.epochs: list[int] = []
        stores: dict[str, SharedStore] = {
            "disk": DiskStore(str(disk), 2**26),
            "redis": RedisStore(server.url),
            "s3": S3Store(bucket, options=s3.options()),
        }
        clock = HandClock(time.time() + days * 86400) if days else None
        thresholds = TierThresholds(cold_after_s=COLD_S)
        self.tiers = Tiers(
            [
                Tier(name, store, door=ThreadDoor(), timeout_s=5.0 if name == "s3" else 1.0, write_bytes=2**22)
                for name, store in stores.items()
            ],
            thresholds=thresholds,
            share="at_once",
        )
        self.lifecycle = Lifecycle(
            self.tiers, interval_s=60, thresholds=thresholds, on_epoch=self.epochs.append, clock=clock
        )
        self.supervisor = Supervisor()

    async def __aenter__(self) -> Process:
        self.supervisor.start()
        for name, job in self.tiers.jobs():
            self.supervisor.keep(name, job)
        assert set((await self.tiers.warm(10)).values()) == {"ready"}
        await self.lifecycle.use_model(MODEL)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.supervisor.aclose()
        await self.tiers.aclose()

    async def write(self, values: dict[str, bytes]) -> None:
        self.tiers.offer([Pending(key, len(value), lambda _, value=value: value) for key, value in values.items()])
        assert await self.tiers.drain(10) == 0

    async def found(self, keys: list[str]) -> tuple[list[str], list[bytes | None]]:
        """Names of the tiers of the leading run, and its values."""
        names: list[str] = []
        values: list[bytes | None] = []
        for span in await self.tiers.locate(keys):
            names.append(span.tier.name)
            values += await self.tiers.read(span, keys[span.first : span.first + span.count])
        return names, values


async def test_a_fleet_shares_what_one_wrote_until_one_invalidates(
    tmp_path: Path, redis_server: RedisServer, s3_server: S3Server
) -> None:
    """B18, B20: written by one process, found by the other, invalidated by either for both, on every tier."""
    bucket, values = s3_server.new_url(), stored(0)
    keys = list(values)
    async with (
        Process(tmp_path / "a", redis_server, s3_server, bucket) as ours,
        Process(tmp_path / "b", redis_server, s3_server, bucket) as theirs,
    ):
        await ours.write(values)
        assert await ours.found(keys) == (["disk"], list(values.values()))
        assert await theirs.found(keys) == (["redis"], list(values.values()))
        await theirs.tiers.tiers[0].background.put_many(list(values.items()))  # as a promotion would

        assert await ours.lifecycle.raise_epoch() == {"disk": len(keys), "redis": len(keys), "s3": 0}
        assert await ours.found(keys) == ([], [])
        await theirs.lifecycle.check()
        assert theirs.epochs == [1]
        assert await theirs.found(keys) == ([], [])
        fresh = stored(0, epoch=1)
        await theirs.write(fresh)
        await ours.lifecycle.check()
        assert await ours.found(keys) == (["redis"], list(fresh.values()))
    async with Process(tmp_path / "c", redis_server, s3_server, bucket) as new:
        assert new.lifecycle.epoch == 1


async def test_cold_units_go_to_s3_and_come_back(
    tmp_path: Path, redis_server: RedisServer, s3_server: S3Server
) -> None:
    bucket, values = s3_server.new_url(), stored(0)
    keys = list(values)
    async with Process(tmp_path / "a", redis_server, s3_server, bucket) as ours:
        await ours.write(values)
        assert await ours.lifecycle.archive_cold() == 0
    async with Process(tmp_path / "a", redis_server, s3_server, bucket, days=8) as later:
        assert await later.lifecycle.archive_cold() == 2 * len(keys)
        assert redis_server.call("DBSIZE") <= 1  # nothing, or the epoch
        assert await later.found(keys) == (["s3"], list(values.values()))
        assert await later.tiers.drain(10) == 0
        assert await later.found(keys) == (["disk"], list(values.values()))
        assert await later.tiers.tiers[1].leading_run(keys) == 0  # not warm: not worth Redis's memory


async def test_a_server_that_stops_answering_costs_its_timeout_and_then_nothing(
    tmp_path: Path, redis_server: RedisServer, s3_server: S3Server
) -> None:
    """B28: timeouts and a breaker; what the disk has is found all the same."""
    values = stored(0)
    keys = list(values)
    async with Process(tmp_path / "a", redis_server, s3_server, s3_server.new_url()) as ours:
        await ours.write(dict(list(values.items())[:4]))
        await ours.tiers.tiers[1].background.put_many(list(values.items()))
        assert (await ours.found(keys))[0] == ["disk", "redis"]
        redis = ours.tiers.tiers[1]
        redis_server.pause()
        try:
            with anyio.fail_after(30):
                while redis.breaker.state == "closed":
                    assert (await ours.found(keys))[0] == ["disk"]
            calls = redis.counters()["errors"]
            for _ in range(20):
                assert (await ours.found(keys))[1] == list(values.values())[:4]
            assert redis.counters()["errors"] <= calls + 1  # a probe at most
        finally:
            redis_server.resume()
        with anyio.fail_after(30):
            while (await ours.found(keys))[0] != ["disk", "redis"]:
                await asyncio.sleep(0.05)
        assert redis.breaker.state == "closed"
