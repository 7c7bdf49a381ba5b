"""The disk tier: one file per value in a folder that survives restarts and that several processes share."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Final, TypeVar

import anyio

from kitelib.abc import Clock, StoredItem, StoreStats
from kitelib.errors import ConfigError, StoreError
from kitelib.stores.disk.epochs import read_epoch, write_epoch
from kitelib.stores.disk.files import MAX_VALUE_BYTES, NUM_SHARDS
from kitelib.stores.disk.hits import add_hits, hit_models, read_hits
from kitelib.stores.disk.index import DiskIndex
from kitelib.stores.disk.ledger import Books, read_books
from kitelib.stores.disk.reader import DiskReader, Found
from kitelib.stores.disk.writer import DiskWriter, Unread

__all__ = ["DiskStore"]

_LOG = logging.getLogger("kitelib.pool")
T = TypeVar("T")

_READ_THREADS: Final = 2  # each keeps some memory; a disk is told of several files ahead by one thread
_JOB_FILES: Final = 32
_JOB_WRITE_BYTES: Final = 8 * 2**20
_MAX_REPORTS: Final = 1000
_CLOSE_WAIT_S: Final = 5.0


class DiskStore:
    """A `SharedStore` and `HitLedger` in a folder.

    A value is one file that says itself what it is. It appears by renaming, whole; on reading, its length and its key
    are checked, and one that was cut, renamed or exchanged is a miss and goes. There is no other record of what is
    stored, so nothing can disagree with the files: an index in memory only says what to evict next, and is built again
    from them, in the background, when a process first writes.

    All processes together keep `max_bytes`, in blocks of the file system with folders and unfinished files counted:
    room is reserved before a byte is written. Files that are not the pool's are neither counted nor touched. All
    processes should give the same bound; each keeps its own.

    Reading takes no lock, and goes on while another process holds one or the folder can't be written. Any number of
    processes may read, up to 128 may write. The folder should be on a local file system (``flock`` and the renaming of
    files have to work as on one).

    Args:
        folder: made if it is not there; an existing one must be empty or a pool.
        max_bytes: bound, bytes.
        ttl_s: seconds after which a value counts as gone; None means never.
        clock: time source.

    Raises:
        ConfigError: an argument is out of range.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        max_bytes: int,
        *,
        ttl_s: float | None = None,
        clock: Clock | None = None,
    ) -> None:
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes <= 0:
            raise ConfigError(f"max_bytes is {max_bytes!r}; give a positive number of bytes")
        if ttl_s is not None and not (ttl_s > 0 and math.isfinite(ttl_s)):
            raise ConfigError(f"ttl_s is {ttl_s!r}; give a positive number of seconds, or None")
        folder = os.fspath(folder)
        # A relative folder stays where it is now, wherever the process goes later.
        self.folder = folder if os.path.isabs(folder) else os.path.join(os.getcwd(), folder)
        self.max_bytes = max_bytes
        now = time.time if clock is None else clock.time
        self._index = DiskIndex(clock)
        self._reader = DiskReader(self.folder, self._index, now, ttl_s, self._report)
        self._writer = DiskWriter(self.folder, max_bytes, self._index, now, ttl_s, self._found)
        # One thread writes, so that writes of one process never wait for each other's locks; reads don't queue behind.
        self._reads = concurrent.futures.ThreadPoolExecutor(_READ_THREADS, "kite-disk-read")
        self._writes = concurrent.futures.ThreadPoolExecutor(1, "kite-disk-write")
        self._looks = concurrent.futures.ThreadPoolExecutor(1, "kite-disk-index")
        self._indexed: concurrent.futures.Future[None] | None = None
        self._reported: set[tuple[int, int]] = set()
        self._lock = threading.Lock()  # of the reports and of the counters that threads change
        self._stop = threading.Event()
        self._hits = self._misses = self._dropped = self._errors = 0

    # Reading

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        found = await self._read(keys, self._reader.values)
        num_hits = sum(value is not None for value in found)
        self._hits += num_hits
        self._misses += len(found) - num_hits
        return found

    async def get_heads(self, keys: Sequence[str], num_bytes: int) -> list[bytes | None]:
        return await self._read(keys, lambda part: self._reader.heads(part, max(0, num_bytes)))

    async def leading_run(self, keys: Sequence[str]) -> int:
        if not keys or self._stop.is_set():
            return 0
        return await self._on(self._reads, lambda: self._reader.leading_run(keys) if self._reader.ready() else 0)

    async def list_items(self) -> AsyncIterator[list[StoredItem]]:
        if self._stop.is_set() or not await self._on(self._reads, self._reader.ready):
            return
        for shard in range(NUM_SHARDS):
            page = await self._on(self._reads, lambda shard=shard: self._reader.page(shard))  # type: ignore[misc]
            if page:
                yield page

    async def _read(self, keys: Sequence[str], job: Callable[[Sequence[str]], Found]) -> list[bytes | None]:
        if not keys or self._stop.is_set():
            return [None] * len(keys)

        def part(first: int) -> Found:
            some = keys[first : first + _JOB_FILES]
            return job(some) if self._reader.ready() else Found([None] * len(some), [])

        parts = await asyncio.gather(
            *(self._on(self._reads, lambda first=first: part(first)) for first in range(0, len(keys), _JOB_FILES))  # type: ignore[misc]
        )
        errors = [error for each in parts for error in each.errors]
        self._errors += len(errors)
        if len(errors) == len(keys):
            raise StoreError(f"the disk pool {self.folder!r} can't be read: {errors[0]}") from errors[0]
        return [value for each in parts for value in each.values]

    # Writing

    async def put_many(self, items: Sequence[tuple[str, bytes]]) -> None:
        stored, given_up = 0, False
        last_error: Exception | None = None
        cancelled = threading.Event()
        try:
            for part in _parts(items):
                if given_up or self._stop.is_set():
                    self._count(dropped=len(part), errors=len(part) if given_up else 0)
                    continue
                outcome = await self._on(self._writes, lambda part=part: self._put(part, cancelled))  # type: ignore[misc]
                stored, last_error = stored + outcome[0], outcome[1] or last_error
                given_up = isinstance(outcome[1], StoreError)  # locked, or no pool: the rest would fare alike
        finally:
            cancelled.set()
        if last_error is not None and not stored:
            raise StoreError(f"nothing could be written to the disk pool {self.folder!r}: {last_error}") from last_error

    def _put(self, items: Sequence[tuple[str, bytes]], cancelled: threading.Event) -> tuple[int, Exception | None]:
        """Writes until all is done, or the caller is gone; returns how many are stored, and the last error."""
        stored, last_error = 0, None
        for position, (key, value) in enumerate(items):
            if cancelled.is_set():
                break
            if self._stop.is_set():
                self._count(dropped=len(items) - position)
                break
            try:
                if self._writer.put(key, value):
                    stored += 1
                else:
                    self._count(dropped=1)
            except (OSError, MemoryError) as error:
                last_error = error
                self._count(dropped=1, errors=1)
            except StoreError as error:
                self._count(dropped=len(items) - position, errors=len(items) - position)
                return stored, error
        return stored, last_error

    async def delete_many(self, keys: Sequence[str]) -> int:
        if not keys or self._stop.is_set():
            return 0
        return await self._on(self._writes, lambda: self._delete(keys))

    def _delete(self, keys: Sequence[str]) -> int:
        deleted, failed, last_error = 0, 0, None
        for key in keys:
            try:
                deleted += self._writer.delete(key)
            except OSError as error:
                failed, last_error = failed + 1, error
        self._count(errors=failed)
        if last_error is not None and failed == len(keys):
            raise last_error
        return deleted

    async def sweep(self) -> int:
        """Removes values whose time is over and what killed processes left, and puts the books right by counting the
        real files; call it now and then. Returns how many values it removed.

        Raises:
            StoreError: the folder can't be read or written.
        """
        removed, steps = 0, self._writer.sweep()
        try:
            while not self._stop.is_set():
                step = await self._on(self._writes, lambda: next(steps, None))
                if step is None:
                    break
                removed = step
        finally:
            with contextlib.suppress(RuntimeError):  # closed meanwhile
                self._writes.submit(steps.close)
        return removed

    # Epochs

    async def get_epoch(self, name: str) -> int:
        def read() -> int:
            self._reader.ready()  # raises if the folder holds something else
            return read_epoch(self.folder, name)

        return await self._on(self._reads, read)

    async def raise_epoch(self, name: str, epoch: int) -> int:
        return await self._on(self._writes, lambda: write_epoch(self.folder, name, epoch))

    # Hits

    async def add_hits(self, model: str, day: int, hits: Mapping[str, int], roots: Mapping[str, str]) -> None:
        await self._on(self._writes, lambda: add_hits(self.folder, model, day, hits, roots))

    async def read_hits(self, model: str, days: Sequence[int], limit: int) -> tuple[dict[str, int], dict[str, str]]:
        return await self._on(self._reads, lambda: read_hits(self.folder, model, days, limit))

    async def hit_models(self) -> list[str]:
        return await self._on(self._reads, lambda: hit_models(self.folder))

    # Life

    def limit_values(self, max_bytes: int) -> None:
        """Values that are longer are damaged: see `Tier.limit_values`."""
        self._reader.max_value_bytes = min(max_bytes, MAX_VALUE_BYTES)

    async def warm(self) -> None:
        if self._stop.is_set():
            return
        await self._on(self._writes, self._writer.open)
        if self._indexed is not None:
            await asyncio.shield(asyncio.wrap_future(self._indexed))

    async def stats(self) -> StoreStats:
        """Counters of this process; items and bytes are those of the whole pool."""
        books = Books(b"") if self._stop.is_set() else await self._on(self._reads, lambda: read_books(self.folder))
        return StoreStats(
            items=books.items,
            bytes=books.file_bytes,
            hits=self._hits,
            misses=self._misses,
            evictions=self._writer.evictions,
            dropped=self._dropped,
            errors=self._errors,
        )

    async def aclose(self) -> None:
        if self._stop.is_set():
            return
        self._stop.set()
        last = self._writes.submit(self._writer.close)  # after what is being written; what waits is dropped
        for executor in (self._reads, self._writes, self._looks):
            executor.shutdown(wait=False)
        with anyio.move_on_after(_CLOSE_WAIT_S, shield=True):  # a disk that hangs must not hang its user
            await asyncio.shield(asyncio.wrap_future(last))

    # Threads

    async def _on(self, executor: concurrent.futures.Executor, job: Callable[[], T]) -> T:
        """Runs a job in a thread. A cancelled caller does not wait: a job that has begun ends by itself and leaves
        nothing half done, one that has not never runs."""
        if self._stop.is_set():
            raise StoreError(f"the disk pool {self.folder!r} is closed; open a new store")
        try:
            return await asyncio.get_running_loop().run_in_executor(executor, job)
        except StoreError:
            self._errors += 1
            raise
        except (OSError, MemoryError) as error:
            self._errors += 1
            raise StoreError(f"the disk pool {self.folder!r} failed: {error}") from error

    def _count(self, *, dropped: int = 0, errors: int = 0) -> None:
        with self._lock:
            self._dropped += dropped
            self._errors += errors

    def _report(self, shard: int, name: str, identity: tuple[int, int]) -> None:
        """A reader met a file that is damaged or too old: the writer removes it."""
        with self._lock:
            if identity in self._reported or len(self._reported) >= _MAX_REPORTS or self._stop.is_set():
                return
            self._reported.add(identity)

        def remove() -> None:
            with contextlib.suppress(OSError, StoreError):  # it stays a miss
                self._writer.remove_file(shard, name, identity)
            with self._lock:
                self._reported.discard(identity)

        with contextlib.suppress(RuntimeError):  # closed meanwhile
            self._writes.submit(remove)

    def _found(self, unread: list[Unread]) -> None:
        """The writer has met files that the index only knows by name."""

        def look() -> None:
            for shard, name in unread:
                if self._stop.is_set():
                    return
                with contextlib.suppress(OSError):
                    self._reader.learn(shard, name)

        with contextlib.suppress(RuntimeError):  # closed meanwhile
            self._indexed = self._looks.submit(look)


def _parts(items: Sequence[tuple[str, bytes]]) -> Iterator[list[tuple[str, bytes]]]:
    """The items in order, cut so that one job writes a few MiB, or one value."""
    part: list[tuple[str, bytes]] = []
    num_bytes = 0
    for item in items:
        if part and num_bytes + len(item[1]) > _JOB_WRITE_BYTES:
            yield part
            part, num_bytes = [], 0
        part.append(item)
        num_bytes += len(item[1])
    if part:
        yield part
