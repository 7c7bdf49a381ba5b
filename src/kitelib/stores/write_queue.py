"""Write-behind: values on their way to one tier, bounded in bytes. What does not fit is dropped and counted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Generic, Protocol, TypeVar

import anyio

__all__ = ["Queued", "WriteQueue"]

_LOG = logging.getLogger("kitelib.pool")
_BATCH_BYTES: Final = 4 * 2**20  # encoded and written together; what is encoded comes on top of the bound
_BATCH_ITEMS: Final = 64


class Queued(Protocol):
    """What a queue holds: anything with a key and a size."""

    @property
    def key(self) -> str: ...
    @property
    def num_bytes(self) -> int: ...


Q = TypeVar("Q", bound=Queued)


class WriteQueue(Generic[Q]):
    """Values waiting for one writer. Used on the event loop only.

    Args:
        max_bytes: most bytes of values that wait or are being written.
        write: writes a batch and returns how many of it were lost. It asks `is_void` right before the values leave.

    Attributes:
        pending_bytes: bytes that wait or are being written.
        dropped: values that were lost: no room, not writable, or still waiting at a deadline. Void ones don't count.
        written: values that were written.
    """

    def __init__(self, max_bytes: int, write: Callable[[Sequence[Q], Callable[[], bool]], Awaitable[int]]) -> None:
        self.pending_bytes = 0
        self.dropped = 0
        self.written = 0
        self._max_bytes = max_bytes
        self._write = write
        self._waiting: dict[str, Q] = {}
        self._writing: dict[str, Q] = {}
        self._scope: anyio.CancelScope | None = None
        self._generation = 0
        self._closed = False
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def offer(self, values: Sequence[Q]) -> None:
        """Queues values and returns at once. One that waits or is being written under the same key already is the
        same value, since keys are fingerprints, and is not queued again."""
        for value in values:
            if value.key in self._waiting or value.key in self._writing:
                continue
            if self._closed or self.pending_bytes + value.num_bytes > self._max_bytes:
                self.dropped += 1
                continue
            self._waiting[value.key] = value
            self.pending_bytes += value.num_bytes
        if self._waiting:
            self._idle.clear()
            self._wake.set()

    async def run(self) -> None:
        """Writes what is offered, for ever. However it ends, the accounts are right, and it may be run again."""
        while True:
            while not self._waiting:
                self._wake.clear()
                await self._wake.wait()
            await self._write_batch()

    async def _write_batch(self) -> None:
        batch = self._take()
        self._writing = {value.key: value for value in batch}
        generation = self._generation
        lost = len(batch)  # whatever ends the writing, what is not known to be written counts as lost
        try:
            with anyio.CancelScope() as self._scope:
                lost = await self._write(batch, lambda: generation != self._generation)
        finally:
            self._scope, self._writing = None, {}
            self.pending_bytes -= sum(value.num_bytes for value in batch)
            if generation == self._generation:
                self.dropped += lost
                self.written += len(batch) - lost
            if not self._waiting:
                self._idle.set()

    def _take(self) -> list[Q]:
        batch: list[Q] = []
        num_bytes = 0
        for value in self._waiting.values():
            if batch and (num_bytes + value.num_bytes > _BATCH_BYTES or len(batch) == _BATCH_ITEMS):
                break
            batch.append(value)
            num_bytes += value.num_bytes
        for value in batch:
            del self._waiting[value.key]
        return batch

    def discard(self, keys: Sequence[str]) -> None:
        """Takes values out that are not to be written any more; they don't count as dropped."""
        for key in keys:
            value = self._waiting.pop(key, None)
            if value is not None:
                self.pending_bytes -= value.num_bytes
        if not self._waiting and self._scope is None:
            self._idle.set()

    def void(self) -> None:
        """Makes everything void that waits, and what is being written if it has not left yet. `_writing` is emptied,
        so that a value offered from now on is written even if the same key is on its way."""
        self._generation += 1
        self.discard(list(self._waiting))
        self._writing = {}

    async def settle(self) -> None:
        """Waits until everything is written, however long that takes."""
        await self._idle.wait()

    async def drain(self, deadline_s: float) -> int:
        """Waits until everything is written; at the deadline drops the rest and returns how many values that were."""
        with anyio.move_on_after(deadline_s):
            await self._idle.wait()
            return 0
        before = self.dropped
        self.dropped += len(self._waiting)
        self.discard(list(self._waiting))
        if self._scope is not None:
            self._scope.cancel()
            await self._idle.wait()  # soon: nothing but a thread that encodes a batch can hold it up
        return self.dropped - before

    def close(self) -> None:
        """Drops what waits and what will come."""
        self._closed = True
        self.dropped += len(self._waiting)
        self.discard(list(self._waiting))
