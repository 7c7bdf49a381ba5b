"""The reading side of a disk pool. It needs no lock and writes nothing but times of use, so it also works on a folder
that can't be written, and while the index is still being built: whether a value is there, its file decides."""

from __future__ import annotations

import contextlib
import os
import stat
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from kitelib.abc import StoredItem
from kitelib.runtime.allocator import keep_freed_memory
from kitelib.stores.disk.files import (
    MAX_VALUE_BYTES,
    BadFileError,
    FileHead,
    check_format,
    file_name,
    header_bytes,
    is_missing,
    key_of_name,
    names_in,
    open_for_reading,
    read_head,
    read_value,
    real_bytes,
    shard_of,
    shard_path,
)
from kitelib.stores.disk.index import DiskIndex
from kitelib.upcycle.unit import HEAD_BYTES

__all__ = ["DiskReader", "Found", "OpenFile"]

TOUCH_AFTER_S: Final = 60.0
"""How exact times of use are in the files, seconds."""
_AHEAD_FILES: Final = 4
_ADVISE: Final = getattr(os, "posix_fadvise", None)


class Found(NamedTuple):
    """What a call found.

    Attributes:
        values: in the order of the keys; None is a miss.
        errors: one per key that could not be read although it may be there.
    """

    values: list[bytes | None]
    errors: list[Exception]


class OpenFile(NamedTuple):
    """A value's file that is open for reading."""

    key: str
    shard: int
    name: str
    descriptor: int
    status: os.stat_result


class DiskReader:
    """All methods block and are for any thread.

    Args:
        folder: the pool's folder.
        index: gets to know what is used.
        now: seconds since 1970.
        ttl_s: seconds after which a value is gone; None means never.
        report: called with shard, name, and (device, inode) of a file that is damaged or too old.

    Attributes:
        max_value_bytes: a longer value counts as damaged, and nothing is allocated for it.
    """

    def __init__(
        self,
        folder: str,
        index: DiskIndex,
        now: Callable[[], float],
        ttl_s: float | None,
        report: Callable[[int, str, tuple[int, int]], None],
    ) -> None:
        self._folder = folder
        self._index = index
        self._now = now
        self._ttl_s = ttl_s
        self._report = report
        self._checked = False
        self.max_value_bytes = MAX_VALUE_BYTES

    def ready(self) -> bool:
        """Whether there is a pool to read.

        Raises:
            StoreError: the folder holds something else.
            OSError: it can't be read.
        """
        self._checked = self._checked or check_format(self._folder)
        return self._checked

    def values(self, keys: Sequence[str]) -> Found:
        """Whole values, each read by one call of the system into its final place."""
        keep_freed_memory()
        found = Found([], [])
        for key, file in zip(keys, self._opened(keys, found.errors, ahead=True), strict=True):
            found.values.append(None if file is None else self._value(key, file, found.errors))
        return found

    def heads(self, keys: Sequence[str], num_bytes: int) -> Found:
        """The first bytes of values; says nothing about use."""
        found = Found([], [])
        for key, file in zip(keys, self._opened(keys, found.errors, ahead=False), strict=True):
            head = None if file is None else self._checked_head(key, file, num_bytes, found.errors)
            found.values.append(None if head is None else head.start)
        return found

    def leading_run(self, keys: Sequence[str]) -> int:
        """How many of the first keys have a file that is young enough and not cut short.

        Raises:
            OSError: not even the first could be looked at.
        """
        for count, key in enumerate(keys):
            try:
                status = os.lstat(f"{shard_path(self._folder, shard_of(key))}/{file_name(key)}")
            except OSError as error:
                if count or is_missing(error):
                    return count
                raise
            if status.st_size < header_bytes(key) or not stat.S_ISREG(status.st_mode) or self._expired(status.st_mtime):
                return count
        return len(keys)

    def page(self, shard: int) -> list[StoredItem]:
        """What is in a shard, without what is too old or not ours."""
        folder = shard_path(self._folder, shard)
        items = []
        for name in names_in(folder):
            key = key_of_name(name, shard)
            try:
                if key == "":
                    key = self.learn(shard, name)
                status = os.lstat(f"{folder}/{name}")
            except OSError:
                continue
            if key and key.startswith("kite:") and not self._expired(status.st_mtime):
                num_bytes = status.st_size - header_bytes(key)
                if num_bytes >= 0:
                    items.append(StoredItem(key, num_bytes, status.st_mtime, min(status.st_atime, self._now())))
        return items

    def learn(self, shard: int, name: str) -> str | None:
        """Tells the index what a file says of itself; returns its key, or None if it is no whole file of ours.

        Raises:
            OSError: it can't be read.
        """
        descriptor = open_for_reading(f"{shard_path(self._folder, shard)}/{name}")
        try:
            status = os.fstat(descriptor)
            try:
                head = read_head(descriptor, status.st_size, HEAD_BYTES)
            except BadFileError:
                head = None
        finally:
            os.close(descriptor)
        if head is None or file_name(head.key) != name or shard_of(head.key) != shard:
            self._report(shard, name, (status.st_dev, status.st_ino))
            return None
        self._index.learn(head.key, real_bytes(status), head.start, min(status.st_atime, self._now()))
        return head.key

    # One file

    def _opened(self, keys: Sequence[str], errors: list[Exception], *, ahead: bool) -> Iterator[OpenFile | None]:
        """The files of the keys, in order, closed when the next one is asked for. A few are opened ahead, and the
        system is told to fetch them, so that a disk works on several at a time."""
        rest, waiting = iter(keys), deque[OpenFile | None]()
        try:
            for position in range(len(keys)):
                while len(waiting) <= (_AHEAD_FILES if ahead else 0) and position + len(waiting) < len(keys):
                    waiting.append(self._open(next(rest), errors, advise=ahead and len(waiting) > 0))
                yield waiting[0]
                _close(waiting.popleft())
        finally:
            for file in waiting:
                _close(file)

    def _open(self, key: str, errors: list[Exception], *, advise: bool) -> OpenFile | None:
        shard, name = shard_of(key), file_name(key)
        try:
            descriptor = open_for_reading(f"{shard_path(self._folder, shard)}/{name}")
        except OSError as error:
            if is_missing(error):
                self._index.discard(key)
            else:
                errors.append(error)
            return None
        status = os.fstat(descriptor)
        if advise and _ADVISE is not None:
            with contextlib.suppress(OSError):
                _ADVISE(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        return OpenFile(key, shard, name, descriptor, status)

    def _value(self, key: str, file: OpenFile, errors: list[Exception]) -> bytes | None:
        try:
            head, value = read_value(file.descriptor, key, file.status.st_size, self.max_value_bytes)
        except BadFileError:
            self._reject(file)
            return None
        except (OSError, MemoryError) as error:
            errors.append(error)
            return None
        now = self._now()
        if self._expired(min(head.written_at, file.status.st_mtime)):
            self._reject(file)
            return None
        if not self._index.touch(key, now):
            self._index.add(key, real_bytes(file.status), value[:HEAD_BYTES], now)
        if abs(now - file.status.st_atime) >= TOUCH_AFTER_S:
            with contextlib.suppress(OSError):  # a folder that can't be written is read all the same
                os.utime(file.descriptor, ns=(int(now * 1e9), file.status.st_mtime_ns))
        return value

    def _checked_head(self, key: str, file: OpenFile, num_bytes: int, errors: list[Exception]) -> FileHead | None:
        try:
            head = read_head(file.descriptor, file.status.st_size, num_bytes)
        except BadFileError:
            self._reject(file)
            return None
        except (OSError, MemoryError) as error:
            errors.append(error)
            return None
        if head.key != key or self._expired(min(head.written_at, file.status.st_mtime)):
            self._reject(file)
            return None
        return head

    def _reject(self, file: OpenFile) -> None:
        self._index.discard(file.key)
        self._report(file.shard, file.name, (file.status.st_dev, file.status.st_ino))

    def _expired(self, written_at: float) -> bool:
        return self._ttl_s is not None and self._now() - written_at >= self._ttl_s


def _close(file: OpenFile | None) -> None:
    if file is not None:
        os.close(file.descriptor)
