"""The writing side of a disk pool: reserves room, publishes whole files, evicts, and keeps the books right.

Files are not synced to the disk one by one: this is a cache, whose readers find out when a power cut left a file torn.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Callable, Generator, Iterator
from typing import Final, NamedTuple, TypeVar

from kitelib.errors import StoreError
from kitelib.stores.disk.files import (
    MAX_KEY_BYTES,
    MAX_VALUE_BYTES,
    NUM_SHARDS,
    check_format,
    create_folder,
    file_name,
    is_missing,
    key_of_name,
    make_header,
    names_in,
    real_bytes,
    shard_of,
    shard_path,
)
from kitelib.stores.disk.index import DiskIndex
from kitelib.stores.disk.ledger import Books, Ledger, LedgerGoneError, Owner
from kitelib.upcycle.unit import HEAD_BYTES

__all__ = ["DiskWriter", "Unread"]

T = TypeVar("T")

_SLACK_BYTES: Final = 32 * 1024
"""Reserved on top of each file, until it is known what it took: folders that grow, blocks that map the file's."""
_MAX_SPARE_BYTES: Final = 64 * 2**20
_TEMP_NAME: Final = re.compile(r"([0-9]{1,3})-[0-9]+")
_WRITE_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class Unread(NamedTuple):
    """A file that was found but not looked into."""

    shard: int
    name: str


class DiskWriter:
    """All methods block and are called from one thread at a time; any of them opens the pool if need be.

    Args:
        folder: the pool's folder.
        max_bytes: bound on what all processes keep in it, bytes of the file system.
        index: gets to know every file.
        now: seconds since 1970.
        ttl_s: seconds after which a value is gone; None means never.
        found: called with the files that were found when the pool was opened or swept.

    Attributes:
        evictions: values removed for room or because their time was over.
    """

    def __init__(
        self,
        folder: str,
        max_bytes: int,
        index: DiskIndex,
        now: Callable[[], float],
        ttl_s: float | None,
        found: Callable[[list[Unread]], None],
    ) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._index = index
        self._now = now
        self._ttl_s = ttl_s
        self._found = found
        self._ledger: Ledger | None = None
        self._owner: Owner | None = None
        self._block_bytes = 4096
        self._num_temps = 0
        self.evictions = 0

    def open(self) -> None:
        """Opens or makes the pool and counts what is there. Nothing happens if it is open.

        Raises:
            StoreError: the folder holds something else, or the pool is locked.
            OSError: it can't be written.
        """
        if self._ledger is not None:
            return
        create_folder(self._folder)
        self._block_bytes = max(4096, os.statvfs(self._folder).f_frsize)
        self._ledger = Ledger(self._folder)
        try:
            self._owner = self._ledger.claim()
            for _ in self._recount(self._ledger, self._owner):
                pass
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Lets go of the pool. Idempotent."""
        if self._owner is not None:
            self._owner.release()
        if self._ledger is not None:
            self._ledger.close()
        self._owner = self._ledger = None

    def put(self, key: str, value: bytes) -> bool:
        """Stores or replaces; False if it can't fit.

        Raises:
            StoreError, OSError: it was not stored, and nothing of it is left.
        """
        return self._run(lambda ledger, owner: self._put(ledger, owner, key, value))

    def delete(self, key: str) -> bool:
        """Deletes; whether it was there. A pool that is not there is not made."""
        if self._ledger is None and not check_format(self._folder):
            return False
        return self._run(lambda ledger, _: self._delete(ledger, key))

    def remove_file(self, shard: int, name: str, identity: tuple[int, int]) -> bool:
        """Removes a file that a reader found damaged or too old, unless another one has its place by now."""
        return self._run(lambda ledger, _: self._remove_file(ledger, shard, name, identity))

    def sweep(self) -> Generator[int, None, None]:
        """Removes what is too old, and what killed processes left; puts books and index right, and keeps the bound.

        Gives, shard by shard, how many values it has removed, so that writes get their turn in between. To be closed
        when it is not used up.
        """
        if self._ledger is None and not check_format(self._folder):
            return
        before, was_open = self.evictions, self._ledger is not None
        ledger, owner = self._run(lambda ledger, owner: (ledger, owner))
        if not was_open:  # opening has done it all
            yield self.evictions - before
            return
        try:
            for _ in self._recount(ledger, owner):
                yield self.evictions - before
                if self._ledger is not ledger:
                    return  # the folder was replaced meanwhile, and counted anew
        except LedgerGoneError:
            self._forget()
        yield self.evictions - before

    def _run(self, job: Callable[[Ledger, Owner], T]) -> T:
        """Runs a job with the pool open; once more if the folder turns out to be another one, or gone."""
        for _ in range(2):
            try:
                self.open()
                assert self._ledger is not None  # open sets both
                assert self._owner is not None
                return job(self._ledger, self._owner)
            except LedgerGoneError:
                self._forget()
        raise StoreError(f"the folder {self._folder!r} of the disk pool is replaced again and again; leave it alone")

    def _forget(self) -> None:
        self.close()
        self._index.clear()

    # Writing

    def _put(self, ledger: Ledger, owner: Owner, key: str, value: bytes) -> bool:
        if len(value) > MAX_VALUE_BYTES or len(key.encode("utf-8", "surrogatepass")) > MAX_KEY_BYTES:
            return False
        now = self._now()
        header = make_header(key, len(value), now)
        reserved = self._rounded(len(header) + len(value)) + _SLACK_BYTES
        if not self._reserve(ledger, owner, reserved):
            return False
        self._num_temps += 1
        temp = f"{self._folder}/temp/{owner.number}-{self._num_temps}"
        try:
            status = self._write(temp, header, value, now)
            with ledger.locked() as books:
                self._publish(books, key, temp, real_bytes(status))
                books.reserve(owner.number, -reserved)
                reserved = 0
                self._index.add(key, real_bytes(status), value[:HEAD_BYTES], now)
                if self._base_bytes() + books.total_bytes > self._max_bytes:  # it took more than anyone would think
                    self._make_room(books, 0)
        finally:
            if reserved:
                with contextlib.suppress(OSError):
                    os.unlink(temp)
                with contextlib.suppress(OSError, StoreError, LedgerGoneError), ledger.locked() as books:
                    books.reserve(owner.number, -reserved)
        return True

    def _write(self, temp: str, header: bytes, value: bytes, now: float) -> os.stat_result:
        try:
            descriptor = os.open(temp, _WRITE_FLAGS, 0o600)
        except OSError as error:
            if is_missing(error):  # the folder went away: open it anew, or make it again
                raise LedgerGoneError from error
            raise
        try:
            rest = [memoryview(header), memoryview(value)]
            while rest:
                written = os.writev(descriptor, rest)
                while rest and written >= len(rest[0]):
                    written -= len(rest.pop(0))
                if rest:
                    rest[0] = rest[0][written:]
            os.utime(descriptor, (now, now))
            return os.fstat(descriptor)
        finally:
            os.close(descriptor)

    def _publish(self, books: Books, key: str, temp: str, num_bytes: int) -> None:
        shard = shard_of(key)
        folder = shard_path(self._folder, shard)
        path = f"{folder}/{file_name(key)}"
        old = _status(path)
        try:
            os.rename(temp, path)
        except FileNotFoundError:
            os.makedirs(folder, mode=0o700, exist_ok=True)  # shards are made when their first file comes
            os.rename(temp, path)
        books.add(shard, int(old is None), num_bytes - (0 if old is None else real_bytes(old)))
        books.set_folder(shard, real_bytes(os.stat(folder)))

    def _rounded(self, num_bytes: int) -> int:
        return -(-num_bytes // self._block_bytes) * self._block_bytes

    # Room

    def _base_bytes(self) -> int:
        """What the pool takes apart from values and their folders."""
        names = ("", "values", "temp", "owners", "epochs", "ledger", "FORMAT")
        found = (_status(f"{self._folder}/{name}") for name in names)
        return sum(real_bytes(status) for status in found if status is not None)

    def _reserve(self, ledger: Ledger, owner: Owner, needed: int) -> bool:
        with ledger.locked() as books:
            base = self._base_bytes()
            if base + books.folder_bytes + needed > self._max_bytes:
                return False  # not even in an empty pool: nothing has to go for it
            if base + books.total_bytes + needed > self._max_bytes:
                self._make_room(books, needed)
                if base + books.total_bytes + needed > self._max_bytes:
                    return False
            books.reserve(owner.number, needed)
            return True

    def _make_room(self, books: Books, needed: int) -> None:
        """Evicts until `needed` bytes fit and some are to spare, so that not every write has to."""
        spare = min(self._max_bytes // 32, _MAX_SPARE_BYTES)
        goal = self._max_bytes - self._base_bytes() - needed
        rescanned = False
        while books.total_bytes > goal - spare:
            key = self._index.victim()
            if key is not None:
                self._evict(books, key)
            elif rescanned or books.total_bytes <= goal:
                return
            else:  # what is there was written by others
                rescanned = True
                self._found([each for shard in range(NUM_SHARDS) for each in self._count(books, shard, {})])

    def _evict(self, books: Books, key: str) -> None:
        shard, name = shard_of(key), file_name(key)
        path = f"{shard_path(self._folder, shard)}/{name}"
        status, used_at = _status(path), self._index.used_at(key)
        if status is None:
            self._index.discard(key)
        elif used_at is not None and used_at + 1.0 < status.st_atime <= self._now():
            self._index.touch(key, status.st_atime)  # another process has used it since
        else:
            self._index.discard(key)
            self._unlink(books, shard, path, status)
            self.evictions += 1

    def _unlink(self, books: Books, shard: int, path: str, status: os.stat_result) -> bool:
        try:
            os.unlink(path)
        except OSError as error:
            if is_missing(error):
                return False
            raise
        books.add(shard, -1, -real_bytes(status))
        return True

    # Removing

    def _delete(self, ledger: Ledger, key: str) -> bool:
        shard = shard_of(key)
        path = f"{shard_path(self._folder, shard)}/{file_name(key)}"
        with ledger.locked() as books:
            self._index.discard(key)
            status = _status(path)
            return status is not None and self._unlink(books, shard, path, status) and not self._expired(status)

    def _remove_file(self, ledger: Ledger, shard: int, name: str, identity: tuple[int, int]) -> bool:
        path = f"{shard_path(self._folder, shard)}/{name}"
        with ledger.locked() as books:
            status = _status(path)
            if status is None or (status.st_dev, status.st_ino) != identity:
                return False
            key = key_of_name(name, shard)
            if key:
                self._index.discard(key)
            self.evictions += 1
            return self._unlink(books, shard, path, status)

    def _expired(self, status: os.stat_result) -> bool:
        return self._ttl_s is not None and self._now() - status.st_mtime >= self._ttl_s

    # Counting

    def _recount(self, ledger: Ledger, owner: Owner) -> Iterator[None]:
        dead: list[Owner] = []
        try:
            self._clean_up(ledger, owner, dead)
            unread: list[Unread] = []
            for shard in range(NUM_SHARDS):
                keys = self._look_at(shard)  # what takes long is done before the lock is taken
                with ledger.locked() as books:
                    unread += self._count(books, shard, keys)
                yield
            with ledger.locked() as books:
                for each in [owner, *dead]:
                    books.reserve(each.number, -books.reserved(each.number))
                if self._base_bytes() + books.total_bytes > self._max_bytes:
                    self._make_room(books, 0)
        finally:
            for each in dead:
                each.release()
        self._found(unread)

    def _clean_up(self, ledger: Ledger, owner: Owner, dead: list[Owner]) -> None:
        """Removes what owners that are gone, and this one before now, were writing. Adds to `dead` those whose places
        it took: they are to be held until their reservations are gone."""
        with ledger.locked() as books:
            numbers = books.owners_with_reservations()
        temps: dict[int, list[str]] = {}
        for name in os.listdir(f"{self._folder}/temp"):
            match = _TEMP_NAME.fullmatch(name)
            if match:
                temps.setdefault(int(match[1]), []).append(name)
        for number in sorted(numbers | set(temps)):
            each = owner if number == owner.number else ledger.try_claim(number)
            if each is None:
                continue  # alive, and writing
            if each is not owner:
                dead.append(each)
            for name in temps.get(number, ()):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"{self._folder}/temp/{name}")

    def _look_at(self, shard: int) -> dict[str, str]:
        """Name -> key of the files in a shard, whose entries the system has at hand afterwards."""
        keys = {}
        for name in names_in(shard_path(self._folder, shard)):
            key = key_of_name(name, shard)
            if key is not None:
                keys[name] = key
                _status(f"{shard_path(self._folder, shard)}/{name}")
        return keys

    def _count(self, books: Books, shard: int, known: dict[str, str]) -> list[Unread]:
        """Enters what is really there in the books and the index, without what is too old; returns what is new."""
        folder = shard_path(self._folder, shard)
        num_bytes, names, unread = 0, set(), []
        for name in names_in(folder):
            key = known[name] if name in known else key_of_name(name, shard)
            status = None if key is None else _status(f"{folder}/{name}")
            if key is None or status is None or not stat.S_ISREG(status.st_mode):
                continue  # not ours
            if self._expired(status):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"{folder}/{name}")
                self.evictions += 1
                continue
            names.add(name)
            num_bytes += real_bytes(status)
            used_at = min(status.st_atime, self._now())
            # A name may be a digest: then the key is in the file only.
            if not key or (
                self._index.used_at(key) is None and self._index.add(key, real_bytes(status), None, used_at)
            ):
                unread.append(Unread(shard, name))
        self._index.keep_only(shard, names)
        own = _status(folder)
        books.set_shard(shard, len(names), num_bytes, 0 if own is None else real_bytes(own))
        return unread


def _status(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except OSError as error:
        if is_missing(error):
            return None
        raise
