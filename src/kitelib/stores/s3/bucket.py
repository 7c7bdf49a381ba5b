"""Single requests to one bucket: what the S3 store's calls are made of. Errors are those of the client."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import anyio

from kitelib.errors import StoreError
from kitelib.runtime.threads import ThreadDoor
from kitelib.stores.s3.client import PART_BYTES, Clients, Settings, open_clients

__all__ = ["BULK", "PAGE", "Bucket"]

BULK: Final = 1000
"""Most objects that one request of S3 deletes."""
PAGE: Final = 500
"""Items of a listing that are turned into Python objects in one turn of the loop; S3 itself sends 1000."""

_MAX_REQUESTS: Final = 64  # of one store at once
_MAX_UPLOADS_IN_PARTS: Final = 2  # each holds up to `_PARTS` copies of `PART_BYTES`
_PARTS: Final = 4
_DIRECT_BYTES: Final = 2**16  # up to it, copying on the loop costs less than the way through a thread
_PIECE_BYTES: Final = 4 * 2**20


class Bucket:
    """Objects below the root of one store. `meta` is obstore's: a mapping with ``path``, ``size``, ``last_modified``.

    Attributes:
        requests: to be held during each request.
    """

    def __init__(self, settings: Settings, clients: Clients, door: ThreadDoor) -> None:
        self.requests = anyio.CapacityLimiter(_MAX_REQUESTS)
        self._uploads = anyio.CapacityLimiter(_MAX_UPLOADS_IN_PARTS)
        self._root = settings.root
        self._name = settings.bucket
        self._clients = clients
        self._api = clients.api
        self._door = door

    @classmethod
    async def open(cls, settings: Settings, door: ThreadDoor) -> Bucket:
        """Builds the clients in a thread.

        Raises:
            StoreError: the client refuses a setting.
        """
        return cls(settings, await door.run(lambda: open_clients(settings)), door)

    async def get(self, path: str, first_bytes: int | None = None) -> Any:
        """The answer to a GET, its body not yet read; None if there is no such object."""
        options = None if first_bytes is None else {"range": (0, first_bytes)}
        with _missing_is_none():
            return await self._api.get_async(self._clients.read, self._path(path), options=options)

    async def meta(self, path: str) -> Any:
        """The answer to a HEAD; None if there is no such object."""
        with _missing_is_none():
            return await self._api.head_async(self._clients.read, self._path(path))

    async def start(self, path: str, num_bytes: int) -> tuple[Any, bytes] | None:
        """Meta and the first bytes of an object, at least one."""
        try:
            result = await self.get(path, num_bytes)
        except self._api.exceptions.GenericError as error:
            # An empty object has no first byte, so S3 refuses every range of it.
            meta = await self.meta(path) if "416" in str(error) else None
            if meta is None or meta["size"]:
                raise
            return meta, b""
        return None if result is None else (result.meta, await self.read(result))

    async def read(self, result: Any) -> bytes:
        """The body. A client's thread makes the pieces, each one copy, so that many values that arrive together don't
        hold the loop up; several pieces are put together in a thread, outside the interpreter's lock."""
        start, end = result.range
        if end - start <= _DIRECT_BYTES:
            value = bytes(await result.bytes_async())
        else:
            pieces = [piece async for piece in result.stream(min_chunk_size=min(end - start, _PIECE_BYTES))]
            value = pieces[0] if len(pieces) == 1 else await self._door.run(lambda: b"".join(pieces))
        if len(value) != end - start:
            raise StoreError(f"{len(value)} bytes came instead of {end - start}")
        return value

    async def put(self, path: str, value: bytes) -> None:
        """Uploads, in parts above `PART_BYTES`; the object appears when it is complete."""
        in_parts = len(value) > PART_BYTES
        async with self._uploads if in_parts else contextlib.nullcontext():
            await self._api.put_async(
                self._clients.write,
                self._path(path),
                value,
                use_multipart=in_parts,
                chunk_size=PART_BYTES,
                max_concurrency=_PARTS,
            )

    async def delete(self, paths: Sequence[str]) -> None:
        """Deletes up to `BULK` objects; those that are not there are fine."""
        await self._api.delete_async(self._clients.write, [self._path(path) for path in paths])

    def pages(self, folder: str, size: int = PAGE) -> AsyncIterator[Sequence[Any]]:
        """Metas of all objects in a folder and below, in the order of their names."""
        stream: AsyncIterator[Sequence[Any]] = self._api.list(self._clients.read, self._path(folder), chunk_size=size)
        return stream

    async def folders(self, folder: str) -> list[str]:
        """The folders right below a folder; one request per 1000."""
        listed = await self._api.list_with_delimiter_async(self._clients.read, self._path(folder))
        return [self.below(each) for each in listed["common_prefixes"]]

    def below(self, path: str) -> str:
        """A path as listings give it, relative to the root."""
        return path.removeprefix(f"{self._root}/")

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}"


@contextlib.contextmanager
def _missing_is_none() -> Any:
    """Swallows "no such object", so that the function around it returns None. A bucket that does not exist is no miss:
    nothing would ever be found, and nobody would know why."""
    try:
        yield
    except FileNotFoundError as error:
        if "<Code>NoSuchBucket</Code>" in str(error):
            raise
