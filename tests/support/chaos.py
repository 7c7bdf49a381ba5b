"""Somebody who breaks the tiers of a running engine, at random but from a seed."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import random
from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.to_thread
import psutil
import redis

from kitelib import KiteEngine
from tests.support.damage import spoil_disk, spoil_redis, value_files
from tests.support.engines import evict_context
from tests.support.redis_servers import RedisCluster, RedisServer
from tests.support.s3_server import S3Proxy

__all__ = ["Disturber", "MemoryWatch"]

_MOST_NODES_DOWN = 3


class Disturber:
    """Breaks one thing after the other, and mends some of it on the way.

    Args:
        chance: decides everything.
        engine: whose tiers they are.
        cluster: the Redis tier.
        disk: the file system of the disk tier, as small as it should be.
        pool: the folder of the disk tier in there.
        archive: what stands before the S3 tier.

    Attributes:
        done: how often each kind of trouble was made.
        spoilt: values that were overwritten.
    """

    def __init__(
        self,
        chance: random.Random,
        engine: KiteEngine,
        cluster: RedisCluster,
        disk: Path,
        pool: Path,
        archive: S3Proxy,
    ) -> None:
        self.done: collections.Counter[str] = collections.Counter()
        self.spoilt = 0
        self._chance = chance
        self._engine = engine
        self._cluster = cluster
        self._disk = disk
        self._pool = pool
        self._archive = archive
        self._paused: set[RedisServer] = set()
        self._dead: set[RedisServer] = set()

    async def run(self, mean_gap_s: float) -> None:
        """Makes trouble for ever; cancel it."""
        troubles: dict[str, tuple[int, Callable[[], object]]] = {
            "pause a node": (4, self._pause),
            "kill a node": (3, self._kill),
            "resume and restart": (5, self._mend_nodes),
            "flush Redis": (1, self._flush),
            "spoil Redis": (5, self._spoil_redis),
            "spoil the disk": (5, self._spoil_disk),
            "delete files": (2, self._delete_files),
            "fill the disk": (2, self._fill_disk),
            "make room on the disk": (3, self._free_disk),
            "break the archive": (2, self._break_archive),
            "mend the archive": (3, self._mend_archive),
        }
        names = list(troubles)
        weights = [weight for weight, _ in troubles.values()]
        while True:
            await anyio.sleep(self._chance.expovariate(1 / mean_gap_s))
            if self._chance.random() < 0.2:
                await self._trouble_engine()
                continue
            (name,) = self._chance.choices(names, weights)
            self.done[name] += 1
            # To its end even when the traffic is over: half of a restart would leave a server behind.
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(troubles[name][1])

    async def _trouble_engine(self) -> None:
        """Makes the engine need its tiers, or forget them."""
        (name,) = self._chance.choices(["evict the context", "empty memory", "invalidate"], [4, 4, 1])
        self.done[name] += 1
        if name == "evict the context":
            await evict_context(self._engine)
        elif name == "empty memory":
            self._engine.pool.memory.clear()
        else:
            await self._engine.invalidate()

    def mend(self) -> None:
        """Everything runs again, and the cluster is whole."""
        self._free_disk()
        self._mend_archive()
        self._cluster.heal()
        self._paused.clear()
        self._dead.clear()

    # Redis

    def _running(self) -> list[RedisServer]:
        return [node for node in self._cluster.nodes if node not in self._paused | self._dead]

    def _victim(self) -> RedisServer | None:
        running = self._running()
        return self._chance.choice(running) if len(running) > 6 - _MOST_NODES_DOWN else None

    def _pause(self) -> None:
        node = self._victim()
        if node is not None:
            node.pause()
            self._paused.add(node)

    def _kill(self) -> None:
        node = self._victim()
        if node is not None:
            node.kill()
            self._dead.add(node)

    def _mend_nodes(self) -> None:
        for node in self._paused:
            node.resume()
        self._paused.clear()
        for node in self._dead:
            node.restart()
        self._dead.clear()

    def _flush(self) -> None:
        for node in self._running():
            with contextlib.suppress(redis.RedisError, OSError):  # replicas refuse
                node.call("FLUSHALL")

    def _spoil_redis(self) -> None:
        for node in self._running():
            self.spoilt += spoil_redis(self._chance, node, 0.5)

    # The disk

    def _spoil_disk(self) -> None:
        self.spoilt += spoil_disk(self._chance, self._pool, 0.5)

    def _delete_files(self) -> None:
        for path in value_files(self._pool):
            if self._chance.random() < 0.3:
                path.unlink(missing_ok=True)

    def _fill_disk(self) -> None:
        with contextlib.suppress(OSError), (self._disk / "filler").open("ab", buffering=0) as file:
            while True:
                file.write(b"f" * 4096)

    def _free_disk(self) -> None:
        (self._disk / "filler").unlink(missing_ok=True)

    # The archive

    def _break_archive(self) -> None:
        self._archive.always = self._chance.choice(["500", "503", "drop", "truncate", "hang"])

    def _mend_archive(self) -> None:
        self._archive.always = None


class MemoryWatch:
    """Looks at what an engine holds, at every turn of the loop or so.

    Attributes:
        samples: how often it looked.
        violations: what was over its bound, in words.
        grown_bytes: the most that the process grew.
    """

    def __init__(self, engine: KiteEngine, write_bytes: int) -> None:
        self.samples = 0
        self.violations: list[str] = []
        self.grown_bytes = 0
        self._engine = engine
        self._write_bytes = write_bytes
        self._process = psutil.Process()
        self._first_bytes = self._process.memory_info().rss

    async def run(self) -> None:
        """Looks for ever; cancel it."""
        while True:
            self.look()
            await asyncio.sleep(0.005)

    def look(self) -> None:
        """Looks once."""
        self.samples += 1
        memory = self._engine.pool.memory
        held = memory.counters().bytes
        if held > memory.max_bytes:
            self.violations.append(f"memory holds {held} bytes")
        for tier in self._engine.pool.tiers.tiers:
            pending = tier.counters()["pending_bytes"]
            if not 0 <= pending <= self._write_bytes:
                self.violations.append(f"{pending} bytes are on the way to {tier.name}")
        if self.samples % 20 == 0:
            self.grown_bytes = max(self.grown_bytes, self._process.memory_info().rss - self._first_bytes)
