"""The books of a disk pool that several processes share: real bytes per shard, and what each process has reserved.

They are one page of a file that is only read and written under a file lock. What a process puts into a shard or takes
from it, it does under the same lock, so that the books of a shard are right whenever nobody holds the lock, with two
exceptions that a process leaves when it is killed: a reservation, and a file that got its place but not its entry. Both
stay covered by the reservation until another process, which sees from a second lock that the owner is gone, has counted
the shards again.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from typing import Final

from kitelib.errors import StoreError
from kitelib.stores.disk.files import NUM_SHARDS, STALE_ERRORS, read_start

__all__ = ["NUM_OWNERS", "Books", "Ledger", "LedgerGoneError", "Owner", "read_books", "take_lock"]

NUM_OWNERS: Final = 128
"""Most stores that may have one folder open for writing at once."""
_MAGIC: Final = 0x4B49544542303031  # in the byte order of the machine: books of another order are counted anew
_BYTES_AT: Final = 8
_ITEMS_AT: Final = _BYTES_AT + NUM_SHARDS
_FOLDER_AT: Final = _ITEMS_AT + NUM_SHARDS
_RESERVED_AT: Final = _FOLDER_AT + NUM_SHARDS
_WORDS: Final = 512
_PAGE_BYTES: Final = 8 * _WORDS
_LOCK_WAIT_S: Final = 2.0
_POLL_S: Final = (0.0001, 0.0005, 0.002, 0.005)


class LedgerGoneError(Exception):
    """The folder was deleted or replaced since it was opened."""


class Books:
    """A copy of the books that may be changed; `Ledger.locked` writes it back.

    Per shard: bytes that its files take, number of files, bytes that the folder itself takes. Per owner: bytes
    reserved. All bytes are real ones (blocks of the file system).
    """

    def __init__(self, page: bytes) -> None:
        self.words = array.array("Q", bytes(_PAGE_BYTES))
        if len(page) == _PAGE_BYTES and array.array("Q", page)[0] == _MAGIC:
            self.words = array.array("Q", page)
        self.words[0] = _MAGIC
        self.before = self.words.tobytes()

    @property
    def file_bytes(self) -> int:
        """Bytes of all values' files."""
        return sum(self.words[_BYTES_AT:_ITEMS_AT])

    @property
    def items(self) -> int:
        """Number of all values' files."""
        return sum(self.words[_ITEMS_AT:_FOLDER_AT])

    @property
    def total_bytes(self) -> int:
        """Bytes of files and shards' folders, and all reservations."""
        return sum(self.words[_BYTES_AT:_ITEMS_AT]) + sum(self.words[_FOLDER_AT : _RESERVED_AT + NUM_OWNERS])

    @property
    def folder_bytes(self) -> int:
        """Bytes of the shards' folders themselves."""
        return sum(self.words[_FOLDER_AT:_RESERVED_AT])

    def owners_with_reservations(self) -> set[int]:
        """Numbers of the owners that have reserved anything."""
        return {owner for owner in range(NUM_OWNERS) if self.words[_RESERVED_AT + owner]}

    def add(self, shard: int, items: int, num_bytes: int) -> None:
        """Enters files that came (or, with negative numbers, went)."""
        self.words[_ITEMS_AT + shard] = max(0, self.words[_ITEMS_AT + shard] + items)
        self.words[_BYTES_AT + shard] = max(0, self.words[_BYTES_AT + shard] + num_bytes)

    def set_shard(self, shard: int, items: int, num_bytes: int, folder_bytes: int) -> None:
        """Enters what was counted."""
        self.words[_ITEMS_AT + shard], self.words[_BYTES_AT + shard] = items, num_bytes
        self.words[_FOLDER_AT + shard] = folder_bytes

    def set_folder(self, shard: int, folder_bytes: int) -> None:
        """Enters what the shard's folder itself takes."""
        self.words[_FOLDER_AT + shard] = folder_bytes

    def reserved(self, owner: int) -> int:
        """Bytes that an owner has reserved."""
        return self.words[_RESERVED_AT + owner]

    def reserve(self, owner: int, num_bytes: int) -> None:
        """Adds to an owner's reservation (or, negative, takes from it)."""
        self.words[_RESERVED_AT + owner] = max(0, self.words[_RESERVED_AT + owner] + num_bytes)


class Owner:
    """A place in the books that belongs to one open store as long as its lock is held, which dies with the process."""

    def __init__(self, number: int, descriptor: int) -> None:
        self.number = number
        self._descriptor = descriptor

    def release(self) -> None:
        """Gives the place up."""
        os.close(self._descriptor)


class Ledger:
    """The open books. All methods are for any thread, and block.

    Args:
        folder: the pool's folder; its sub-folders exist.

    Raises:
        OSError: the file can't be opened for writing.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._path = f"{folder}/ledger"
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | _no_follow(), 0o600)
        self._identity = _identity(os.fstat(self._descriptor))
        self._mutex = threading.Lock()

    @contextlib.contextmanager
    def locked(self) -> Iterator[Books]:
        """The books, alone among all threads and processes; what is changed in them is kept, also on an exception.

        Raises:
            LedgerGoneError: the folder was deleted or replaced.
            StoreError: the lock was not to be had within two seconds: its holder is stopped, or the disk hangs.
            OSError: the books can't be read or written.
        """
        if not self._mutex.acquire(timeout=_LOCK_WAIT_S):
            raise StoreError(f"the disk pool {self._folder!r} is held by a write that does not end")
        try:
            take_lock(self._descriptor, self._folder)
            try:
                self._check_place()
                books = Books(os.pread(self._descriptor, _PAGE_BYTES, 0))
                try:
                    yield books
                finally:
                    page = books.words.tobytes()
                    if page != books.before:
                        os.pwrite(self._descriptor, page, 0)  # one page in one call: whole, whenever the process dies
            finally:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        finally:
            self._mutex.release()

    def _check_place(self) -> None:
        try:
            there = _identity(os.stat(self._path))
        except OSError as error:
            if error.errno in STALE_ERRORS:
                raise LedgerGoneError from error
            raise
        if there != self._identity:
            raise LedgerGoneError

    def claim(self) -> Owner:
        """A free place, with whatever its last owner left in it.

        Raises:
            StoreError: all are taken.
            OSError: the folder can't be written.
        """
        for number in range(NUM_OWNERS):
            owner = self.try_claim(number)
            if owner is not None:
                return owner
        raise StoreError(f"{NUM_OWNERS} stores have the disk pool {self._folder!r} open; close some of them")

    def try_claim(self, number: int) -> Owner | None:
        """That place if it is free: its owner is gone, or there was none."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | _no_follow()
        descriptor = os.open(f"{self._folder}/owners/{number}", flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return None
            raise
        return Owner(number, descriptor)

    def close(self) -> None:
        """Closes the file."""
        with self._mutex:
            os.close(self._descriptor)


def take_lock(descriptor: int, folder: str) -> None:
    """Locks an open file of the pool against all other processes; ``fcntl.flock(..., LOCK_UN)`` or closing ends it.

    Raises:
        StoreError: the lock was not to be had within two seconds.
        OSError: the file system has no locks.
    """
    deadline = time.monotonic() + _LOCK_WAIT_S
    for turn in range(10**9):
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise StoreError(
                    f"the disk pool {folder!r} was locked by another process for {_LOCK_WAIT_S:g} s; "
                    "if that process is stopped, continue or end it"
                ) from None
            time.sleep(_POLL_S[min(turn // 4, len(_POLL_S) - 1)])
    return None


def read_books(folder: str) -> Books:
    """The books as they are, without the lock; empty ones if they can't be read."""
    try:
        return Books(read_start(f"{folder}/ledger", _PAGE_BYTES))
    except OSError:
        return Books(b"")


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _no_follow() -> int:
    return getattr(os, "O_NOFOLLOW", 0)
