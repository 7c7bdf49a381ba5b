"""A store for KITE in one SQLite file: bounded in bytes, least recently used out first, safe for several processes."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import parse_qs, unquote, urlsplit

import anyio
import anyio.to_thread

from kitelib import PoolConfig
from kitelib.abc import StoreStats
from kitelib.errors import ConfigError, StoreError

__all__ = ["SqliteStore", "open_store"]

T = TypeVar("T")

PAGE_BYTES = 4096
ROW_BYTES = 200  # what SQLite keeps per row besides key and value, both indexes included; rounded up
BUSY_S = 5.0  # how long to wait for another process that is writing

SCHEMA = """
CREATE TABLE IF NOT EXISTS units (
    key TEXT PRIMARY KEY, value BLOB NOT NULL, num_bytes INTEGER NOT NULL, written_at REAL NOT NULL, used_at REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS by_use ON units (used_at);
CREATE INDEX IF NOT EXISTS by_age ON units (written_at);
CREATE TABLE IF NOT EXISTS total (items INTEGER NOT NULL, num_bytes INTEGER NOT NULL);
INSERT INTO total SELECT 0, 0 WHERE NOT EXISTS (SELECT * FROM total);
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON units
    BEGIN UPDATE total SET items = items + 1, num_bytes = num_bytes + new.num_bytes; END;
CREATE TRIGGER IF NOT EXISTS gone AFTER DELETE ON units
    BEGIN UPDATE total SET items = items - 1, num_bytes = num_bytes - old.num_bytes; END;
"""


def open_store(url: str, config: PoolConfig) -> SqliteStore:
    """What the entry point names: ``sqlite:///folder/file.db?max_bytes=N``; N is 1 GiB if it is not given."""
    parts = urlsplit(url)
    options = parse_qs(parts.query)
    limit = options.pop("max_bytes", [str(2**30)])[-1]
    if parts.netloc or len(parts.path) < 2 or options or not limit.isdigit():
        raise ConfigError("give sqlite:///folder/file.db, or sqlite:///folder/file.db?max_bytes=N with a whole number")
    return SqliteStore(unquote(parts.path), int(limit), ttl_s=config.ttl_seconds)


class SqliteStore:
    """A `kitelib.abc.Store`. Every call is one transaction in a thread.

    Args:
        path: the file; made when it is first needed.
        max_bytes: bound of the pages that values take; the write-ahead log adds a few MB for a while.
        ttl_s: seconds after its last write when a value counts as gone; None means never.
        time: gives seconds since 1970.
    """

    def __init__(
        self, path: str, max_bytes: int, *, ttl_s: float | None = None, time: Callable[[], float] = time.time
    ) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._time = time
        self._database: sqlite3.Connection | None = None
        self._closed = False
        self._one_at_a_time = threading.Lock()  # a cancelled call's thread goes on for a moment
        self._hits = self._misses = self._evictions = self._dropped = self._errors = 0

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        def job(database: sqlite3.Connection) -> list[bytes | None]:
            now, oldest = self._now()
            read = "SELECT value FROM units WHERE key = ? AND written_at > ?"
            rows = [database.execute(read, (key, oldest)).fetchone() for key in keys]
            used = [(now, key) for key, row in zip(keys, rows, strict=True) if row]
            database.executemany("UPDATE units SET used_at = ? WHERE key = ?", used)
            self._hits += len(used)
            self._misses += len(keys) - len(used)
            return [row[0] if row else None for row in rows]

        return await self._run(job)

    async def put_many(self, items: Sequence[tuple[str, bytes]]) -> None:
        def job(database: sqlite3.Connection) -> None:
            now, oldest = self._now()
            self._evictions += database.execute("DELETE FROM units WHERE written_at <= ?", (oldest,)).rowcount
            for key, value in items:
                database.execute("DELETE FROM units WHERE key = ?", (key,))
                num_bytes = -(-(len(key) + len(value) + ROW_BYTES) // PAGE_BYTES) * PAGE_BYTES
                if num_bytes > self._max_bytes:
                    self._dropped += 1
                    continue
                self._make_room(database, num_bytes)
                row = (key, value, num_bytes, now, now)
                database.execute("INSERT INTO units VALUES (?, ?, ?, ?, ?)", row)

        await self._run(job)

    async def leading_run(self, keys: Sequence[str]) -> int:
        def job(database: sqlite3.Connection) -> int:
            _, oldest = self._now()
            look = "SELECT 1 FROM units WHERE key = ? AND written_at > ?"
            for count, key in enumerate(keys):
                if database.execute(look, (key, oldest)).fetchone() is None:
                    return count
            return len(keys)

        return await self._run(job)

    async def delete_many(self, keys: Sequence[str]) -> int:
        def job(database: sqlite3.Connection) -> int:
            return sum(database.execute("DELETE FROM units WHERE key = ?", (key,)).rowcount for key in keys)

        return await self._run(job)

    async def stats(self) -> StoreStats:
        def job(database: sqlite3.Connection) -> tuple[int, int]:
            _, oldest = self._now()
            self._evictions += database.execute("DELETE FROM units WHERE written_at <= ?", (oldest,)).rowcount
            items, num_bytes = database.execute("SELECT items, num_bytes FROM total").fetchone()
            return items, num_bytes

        items, num_bytes = await self._run(job)
        counters = (self._hits, self._misses, self._evictions, self._dropped, self._errors)
        return StoreStats(items, num_bytes, *counters)

    async def aclose(self) -> None:
        def close() -> None:
            with self._one_at_a_time:
                self._closed = True
                if self._database is not None:
                    self._database.close()
                    self._database = None

        await anyio.to_thread.run_sync(close)

    def _make_room(self, database: sqlite3.Connection, num_bytes: int) -> None:
        (taken,) = database.execute("SELECT num_bytes FROM total").fetchone()
        while taken + num_bytes > self._max_bytes:
            oldest = "SELECT key, num_bytes FROM units ORDER BY used_at LIMIT 1"
            key, freed = database.execute(oldest).fetchone()
            database.execute("DELETE FROM units WHERE key = ?", (key,))
            taken -= freed
            self._evictions += 1

    def _now(self) -> tuple[float, float]:
        """The time, and the time of writing up to which values have expired."""
        now = self._time()
        return now, now - self._ttl_s if self._ttl_s is not None else float("-inf")

    async def _run(self, job: Callable[[sqlite3.Connection], T]) -> T:
        """The job as one transaction, off the event loop. A cancelled caller's transaction is complete or undone."""

        def locked() -> T:
            with self._one_at_a_time:
                database = self._open()
                database.execute("BEGIN IMMEDIATE")
                with database:  # commits, or rolls back after an exception
                    return job(database)

        try:
            return await anyio.to_thread.run_sync(locked)
        except (sqlite3.Error, OSError) as error:
            self._errors += 1
            raise StoreError(f"SQLite failed at {self._path!r}: {error}") from error

    def _open(self) -> sqlite3.Connection:
        if self._closed:
            raise StoreError(f"the store at {self._path!r} is closed; open a new one")
        if self._database is None:
            database: Any = sqlite3.connect(
                self._path, timeout=BUSY_S, isolation_level=None, check_same_thread=False, cached_statements=16
            )
            try:
                database.execute(f"PRAGMA page_size = {PAGE_BYTES}")
                database.execute("PRAGMA journal_mode = WAL")
                database.execute("PRAGMA synchronous = NORMAL")  # a power cut may cost the last values, never the file
                database.executescript(SCHEMA)
            except sqlite3.Error:
                database.close()
                raise
            self._database = database
        return self._database
