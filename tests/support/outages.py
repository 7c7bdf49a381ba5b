"""Tiers that can be cut off and come back, each in its own way."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.support.file_systems import mounted
from tests.support.redis_servers import RedisServer
from tests.support.s3_server import S3Proxy, S3Server

__all__ = ["OUTAGES", "Outage", "outage"]

_QUICK: dict[str, Any] = {"connect_timeout": 0.2, "socket_timeout": 0.2}


@dataclasses.dataclass(frozen=True)
class Outage:
    """A tier that works until it is cut off.

    Attributes:
        tier: its name.
        pool: options of a pool with this tier only.
        cut: cuts it off. Blocks.
        restore: brings it back, perhaps empty. Blocks.
        reads: what was stored before can still be read.
    """

    tier: str
    pool: dict[str, Any]
    cut: Callable[[], object]
    restore: Callable[[], object]
    reads: bool = False


@contextlib.contextmanager
def _redis(folder: Path, cut: str, restore: str) -> Iterator[Outage]:
    server = RedisServer(folder / "redis").start()
    try:
        yield Outage("redis", {"redis": server.url, **_QUICK}, getattr(server, cut), getattr(server, restore))
    finally:
        server.resume()
        server.kill()


@contextlib.contextmanager
def _s3(server: S3Server, fault: str) -> Iterator[Outage]:
    with S3Proxy(server).running() as proxy:
        pool = {"s3": server.new_url(), "s3_options": server.options(endpoint=proxy.endpoint), **_QUICK}
        yield Outage("s3", pool, lambda: setattr(proxy, "always", fault), lambda: setattr(proxy, "always", None))


@contextlib.contextmanager
def _disk_gone(folder: Path) -> Iterator[Outage]:
    pool = folder / "pool"

    def cut() -> None:
        shutil.rmtree(pool, ignore_errors=True)
        pool.write_bytes(b"a file stands where the folder was")

    yield Outage("disk", {"disk": str(pool)}, cut, pool.unlink)


@contextlib.contextmanager
def _disk_full(folder: Path) -> Iterator[Outage]:
    with mounted(folder / "disk", 8 * 2**20) as disk:
        filler = disk / "filler"

        def cut() -> None:
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))

        yield Outage("disk", {"disk": str(disk / "pool")}, cut, filler.unlink, reads=True)


OUTAGES: dict[str, Callable[[Path, S3Server], contextlib.AbstractContextManager[Outage]]] = {
    "redis: port closed": lambda folder, _: _redis(folder, "kill", "start"),
    "redis: stopped": lambda folder, _: _redis(folder, "pause", "resume"),
    "s3: hangs": lambda _, server: _s3(server, "hang"),
    "s3: refuses": lambda _, server: _s3(server, "503"),
    "disk: gone": lambda folder, _: _disk_gone(folder),
    "disk: full": lambda folder, _: _disk_full(folder),
}


def outage(kind: str, folder: Path, server: S3Server) -> contextlib.AbstractContextManager[Outage]:
    """One of `OUTAGES`; `folder` is for what it needs."""
    return OUTAGES[kind](folder, server)
