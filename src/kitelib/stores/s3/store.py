"""The archive tier: units as objects in S3, or anything that speaks its protocol, over obstore (extra ``s3``)."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

import anyio

from kitelib.abc import Clock, StoredItem, StoreStats
from kitelib.errors import ConfigError, StoreError
from kitelib.runtime.threads import ThreadDoor
from kitelib.stores.s3.bucket import BULK, PAGE, Bucket
from kitelib.stores.s3.calls import Call
from kitelib.stores.s3.client import Settings, parse_settings, sentence
from kitelib.stores.s3.keys import EPOCHS, OTHER, UNITS, epoch_of, epoch_path, key_of, object_path, share_before
from kitelib.upcycle.unit import MAX_DATA_BYTES

__all__ = ["MAX_OBJECT_BYTES", "S3Store"]

T = TypeVar("T")

MAX_OBJECT_BYTES: Final = MAX_DATA_BYTES + 2**20
"""Most bytes of one object, and of all values in one answer: the data of the largest unit and room for its header."""

_FIRST_WINDOW: Final = 16
_LAST_WINDOW: Final = 64
_COUNTED: Final = 10_000
_NAME: Final = re.compile(r"[0-9a-z_.-]{1,64}")
_MAX_EPOCH: Final = 2**63 - 1


class S3Store:
    """A `SharedStore` in a bucket.

    Objects appear complete or not at all: S3 publishes an upload when its last byte has arrived and its checksum is
    right, and lists and reads are consistent afterwards. Nothing is read back after writing.

    Plain http is refused unless the option ``allow_http`` is "true". Credentials come from the options, from the
    ``AWS_...`` variables, or from the instance, container or web identity; the files below ``~/.aws`` are not read.
    They need ``s3:GetObject``, ``PutObject``, ``DeleteObject`` and ``ListBucket`` (without the last, S3 answers 403 for
    what is not there, which counts as an error).

    Failed requests are tried up to twice more, after random, growing waits. A call ends with what it has once nothing
    has succeeded for four times the read timeout, plus a second per MiB that is on its way.

    An upload in parts that is cut off leaves its parts invisible in the bucket, at a cost: give the bucket a lifecycle
    rule that aborts incomplete uploads.

    Args:
        url: ``s3://bucket/prefix``. Objects lie below ``prefix/v1``, see `kitelib.stores.s3.keys`.
        options: settings by the names that obstore uses (``endpoint``, ``region``, ``access_key_id``, ...), with or
            without ``aws_`` before them; also ``allow_http``, ``root_certificate`` (PEM) and ``ca_bundle`` (a file).
        ttl_s: seconds after its last write when a value counts as gone, by this machine's clock and the bucket's;
            None means never. `sweep` deletes what has expired, and so does a lifecycle rule of the bucket, for nothing.
        connect_timeout: seconds for opening a connection; at least 2, see `kitelib.stores.s3.client.MIN_CONNECT_S`.
        socket_timeout: seconds of silence within a read; at least 2, see `kitelib.stores.s3.client.MIN_READ_S`.
        clock: time source for `ttl_s`.

    Raises:
        ConfigError: the URL or an option is wrong.
        MissingExtraError: obstore is not installed.
    """

    def __init__(
        self,
        url: str,
        *,
        options: Mapping[str, str] = {},
        ttl_s: float | None = None,
        connect_timeout: float = 0.5,
        socket_timeout: float = 0.3,
        clock: Clock | None = None,
    ) -> None:
        if ttl_s is not None and not ttl_s > 0:
            raise ConfigError(f"ttl_s is {ttl_s}; give a positive number of seconds, or None")
        self._settings: Settings = parse_settings(url, options, connect_timeout, socket_timeout)
        self._ttl_s = ttl_s
        self._time = time.time if clock is None else clock.time
        self._door = ThreadDoor(2)
        self._opening = anyio.Lock()
        self._bucket: Bucket | None = None
        self._closed = False
        self._max_object_bytes = MAX_OBJECT_BYTES
        self._hits = self._misses = self._evictions = self._dropped = self._errors = 0

    def __repr__(self) -> str:
        place = f"{self._settings.bucket}/{self._settings.root}"
        return f"S3Store('s3://{place.removesuffix('/v1')}')"

    def limit_values(self, max_bytes: int) -> None:
        """Longer objects are misses: see `Tier.limit_values`."""
        self._max_object_bytes = min(max_bytes, MAX_OBJECT_BYTES)

    async def warm(self) -> None:
        """Builds the client and lists one page, which shows that bucket and credentials work.

        Raises:
            StoreError: they don't; the message has S3's answer.
        """
        bucket = await self._open()
        await self._page(bucket, "warm", bucket.pages(EPOCHS, 1))

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """One GET per distinct key, many at once. An object that is too big to be a unit is a miss; what would make
        the answer bigger than `MAX_OBJECT_BYTES` is left out and counted as an error."""
        bucket, call = await self._open(), self._new_call("get_many")
        found: dict[str, bytes] = {}

        async def fetch(key: str) -> None:
            path = object_path(key)
            result = None if path is None else await bucket.get(path)
            if result is None or not self._live(result.meta) or result.meta["size"] > self._max_object_bytes:
                return
            if not call.reserve(result.meta["size"], MAX_OBJECT_BYTES):
                raise StoreError("the answer would be too big; ask for fewer keys")
            found[key] = await bucket.read(result)

        await self._run(call, bucket, dict.fromkeys(keys), fetch)
        answer = [found.get(key) for key in keys]
        hits = sum(value is not None for value in answer)
        self._hits += hits
        self._misses += len(answer) - hits
        return answer

    async def get_heads(self, keys: Sequence[str], num_bytes: int) -> list[bytes | None]:
        """One GET of a range per distinct key, many at once; counts neither hits nor misses."""
        bucket = await self._open()
        found: dict[str, bytes] = {}

        async def fetch(key: str) -> None:
            path = object_path(key)
            start = None if path is None else await bucket.start(path, max(1, num_bytes))
            if start is not None and self._live(start[0]):
                found[key] = start[1][: max(0, num_bytes)]

        await self._run(self._new_call("get_heads"), bucket, dict.fromkeys(keys), fetch)
        return [found.get(key) for key in keys]

    async def put_many(self, items: Sequence[tuple[str, bytes]]) -> None:
        """One PUT per key, many at once; in parts above 8 MiB. What is too big, or could not be written, is counted
        as dropped."""
        values = {key: bytes(value) for key, value in items}  # the later of two wins; bytes are not copied
        fitting = {
            path: value
            for key, value in values.items()
            if (path := object_path(key)) is not None and len(value) <= MAX_OBJECT_BYTES
        }
        bucket, call = await self._open(), self._new_call("put_many")
        written = 0

        async def upload(path: str) -> None:
            nonlocal written
            call.allow(len(fitting[path]))
            await bucket.put(path, fitting[path])
            written += 1

        try:
            await self._run(call, bucket, fitting, upload)
        finally:
            self._dropped += len(values) - written

    async def leading_run(self, keys: Sequence[str]) -> int:
        """HEAD requests in windows of 16, then 32, then 64: a run of 48 takes two round trips. Fingerprints spread
        over the whole bucket, so a LIST, which costs twelve times as much, would find one key of the run at best."""
        bucket = await self._open()
        done, window = 0, _FIRST_WINDOW
        while done < len(keys):
            part = keys[done : done + window]
            try:
                present = await self._present(bucket, "leading_run", part)
            except StoreError:
                if done:
                    break
                raise
            run = next((at for at, key in enumerate(part) if not present.get(key)), len(part))
            done += run
            if run < len(part):
                break
            window = min(2 * window, _LAST_WINDOW)
        return done

    async def delete_many(self, keys: Sequence[str]) -> int:
        """A HEAD per key, since S3 does not tell what it deleted, then one request per 1000 that may be there."""
        bucket = await self._open()
        present = await self._present(bucket, "delete_many", keys)
        # What is gone needs no deleting; what could not be looked at is deleted, but not counted.
        doomed = [key for key in dict.fromkeys(keys) if present.get(key, True) is not None]
        paths = {path: key for key in doomed if (path := object_path(key)) is not None}
        deleted = await self._delete(bucket, "delete_many", list(paths))
        return sum(present.get(paths[path]) is True for path in deleted)

    async def sweep(self) -> int:
        """Deletes what has expired; returns how many. A value that is written anew meanwhile may go too: a miss.

        Raises:
            StoreError: listing or deleting failed; what was deleted until then is gone.
        """
        if self._ttl_s is None:
            return 0
        bucket = await self._open()
        count = 0
        async for objects in self._objects(bucket, "sweep", UNITS, OTHER):
            expired = [bucket.below(each["path"]) for each in objects if not self._live(each)]
            deleted = await self._delete(bucket, "sweep", expired)
            count += len(deleted)
            self._evictions += len(deleted)
        return count

    async def list_items(self) -> AsyncIterator[list[StoredItem]]:
        """Pages of at most 500, from LIST: one request per 1000 objects. `used_at` is not known.

        Raises:
            StoreError: listing failed, at once or in the middle.
        """
        bucket = await self._open()
        async for objects in self._objects(bucket, "list_items", UNITS, OTHER):
            page = []
            for each in objects:
                key = key_of(bucket.below(each["path"]))
                if key is not None and key.startswith("kite:") and self._live(each):
                    page.append(StoredItem(key, each["size"], written_at=each["last_modified"].timestamp()))
            if page:
                yield page

    async def get_epoch(self, name: str) -> int:
        """The greatest number among the objects of that name; one LIST."""
        _check_name(name)
        return max(await self._epochs(await self._open(), name), default=0)

    async def raise_epoch(self, name: str, epoch: int) -> int:
        """Adds an object, so that nobody's number is overwritten, then removes those that a greater one makes
        needless. The greatest is never removed, so whoever lists meanwhile sees it or a greater one."""
        _check_name(name)
        if not 0 <= epoch <= _MAX_EPOCH:
            raise StoreError(f"the epoch of {name!r} can't be {epoch}; give 0 to 2**63 - 1")
        bucket = await self._open()
        known = await self._epochs(bucket, name)
        if epoch > max(known, default=0):
            new = epoch_path(name, epoch)
            await self._run(self._new_call("raise_epoch"), bucket, [new], lambda path: bucket.put(path, b""))
            known = [*await self._epochs(bucket, name), epoch]
            needless = [epoch_path(name, each) for each in set(known) if each < max(known)]
            with contextlib.suppress(StoreError):  # the next one to raise it tidies up
                await self._delete(bucket, "raise_epoch", needless)
        return max(known, default=0)

    async def stats(self) -> StoreStats:
        """Counters, and what the bucket holds: exact up to 10,000 objects. Above, each kind of each model is estimated
        from its first objects: fingerprints are evenly spread, so the last of them says which share was seen."""
        bucket = await self._open()
        items, num_bytes, last = await self._count(bucket, _COUNTED, UNITS, OTHER)
        if last is not None:
            items, num_bytes = await self._estimate(bucket)
        return StoreStats(
            items, num_bytes, self._hits, self._misses, self._evictions, self._dropped, errors=self._errors
        )

    async def aclose(self) -> None:
        """Lets the client go; afterwards every call raises `StoreError`. Idempotent."""
        self._closed, self._bucket = True, None

    async def _present(self, bucket: Bucket, name: str, keys: Iterable[str]) -> dict[str, bool | None]:
        """Per key: True, False for one that has expired, None for none; a key that failed is left out."""
        present: dict[str, bool | None] = {}

        async def look(key: str) -> None:
            path = object_path(key)
            meta = None if path is None else await bucket.meta(path)
            present[key] = None if meta is None else self._live(meta)

        await self._run(self._new_call(name), bucket, dict.fromkeys(keys), look)
        return present

    async def _delete(self, bucket: Bucket, name: str, paths: Sequence[str]) -> list[str]:
        """Deletes objects; gives those that are certainly gone."""
        deleted: list[str] = []

        async def remove(part: Sequence[str]) -> None:
            try:
                await bucket.delete(part)
            except Exception:
                self._errors += len(part) - 1  # the call counts one
                raise
            deleted.extend(part)

        parts = [paths[at : at + BULK] for at in range(0, len(paths), BULK)]
        await self._run(self._new_call(name), bucket, parts, remove)
        return deleted

    async def _epochs(self, bucket: Bucket, name: str) -> list[int]:
        paths = [each["path"] async for page in self._objects(bucket, "epochs", f"{EPOCHS}/{name}") for each in page]
        return [epoch for path in paths if (epoch := epoch_of(path)) is not None]

    async def _estimate(self, bucket: Bucket) -> tuple[int, int]:
        groups = [OTHER]

        async def look(folder: str) -> None:
            for model in await bucket.folders(folder):
                groups.extend(await bucket.folders(model))

        await self._run(self._new_call("stats"), bucket, [UNITS], look)
        items = num_bytes = 0.0
        for group in groups:
            seen, size, last = await self._count(bucket, max(PAGE, _COUNTED // len(groups)), group)
            share = 1.0 if last is None else share_before(last)
            items += seen / share
            num_bytes += size / share
        return round(items), round(num_bytes)

    async def _count(self, bucket: Bucket, limit: int, *folders: str) -> tuple[int, int, str | None]:
        """Values and their bytes; if there are more than `limit`, those so far and the path of the last one."""
        items = num_bytes = 0
        async with contextlib.aclosing(self._objects(bucket, "stats", *folders)) as pages:
            async for objects in pages:
                for each in objects:
                    if self._live(each) and key_of(bucket.below(each["path"])) is not None:
                        items += 1
                        num_bytes += each["size"]
                if items > limit:
                    return items, num_bytes, bucket.below(objects[-1]["path"])
        return items, num_bytes, None

    async def _objects(self, bucket: Bucket, name: str, *folders: str) -> AsyncGenerator[Sequence[Any], None]:
        for folder in folders:
            pages = bucket.pages(folder)
            while page := await self._page(bucket, name, pages):
                yield page

    async def _page(self, bucket: Bucket, name: str, pages: AsyncIterator[Sequence[Any]]) -> Sequence[Any]:
        """The next page, empty at the end; each has its own deadline, since a caller may take its time in between."""
        page: list[Any] = []

        async def step(pages: AsyncIterator[Sequence[Any]]) -> None:
            with contextlib.suppress(StopAsyncIteration):
                page.extend(await anext(pages))

        await self._run(self._new_call(name), bucket, [pages], step)
        return page

    def _new_call(self, name: str) -> Call:
        return Call(name, 4 * self._settings.read_s, lambda error: sentence(error, self._settings))

    async def _run(self, call: Call, bucket: Bucket, items: Iterable[T], work: Callable[[T], Awaitable[None]]) -> None:
        """The work for every item.

        Raises:
            StoreError: none of it could be done.
        """
        try:
            await call.run(list(items), work, bucket.requests)
        finally:
            self._errors += call.failed
        if call.failed and not call.answered:
            raise StoreError(f"{call.name} of {self!r} failed: {call.reason}")

    async def _open(self) -> Bucket:
        if self._bucket is None:
            async with self._opening:
                if self._closed:
                    raise StoreError(f"{self!r} is closed; open a new one")
                self._bucket = self._bucket or await Bucket.open(self._settings, self._door)
        return self._bucket

    def _live(self, meta: Any) -> bool:
        if self._ttl_s is None:
            return True
        written_at: float = meta["last_modified"].timestamp()
        return self._time() - written_at < self._ttl_s


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise StoreError(f"the epoch's name is {name[:80]!r}; use 1 to 64 of the characters [0-9a-z_.-]")
