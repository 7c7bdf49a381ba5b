"""Write-behind: finished blocks and logits become stored units without a request waiting for it."""

from __future__ import annotations

import asyncio
import collections
import logging
import threading
from collections.abc import Sequence

from kitelib.stores.pool import RUPool
from kitelib.upcycle.unit import RecyclableUnit

__all__ = ["Recycler"]

_LOG = logging.getLogger("kitelib.recycler")


class Recycler:
    """A bounded queue of units on their way to the pool.

    `reserve` may be called from the model's thread; everything else belongs to the event loop.

    Attributes:
        registered: units stored so far.
        dropped: units dropped because too many bytes were in flight, or because storing them failed.
        pending_bytes: bytes of data on the way.
    """

    def __init__(self, pool: RUPool, max_pending_bytes: int) -> None:
        self._pool = pool
        self._max_pending_bytes = max_pending_bytes
        self._queue: collections.deque[tuple[int, bytes, int, list[RecyclableUnit]]] = collections.deque()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._lock = threading.Lock()
        self._closed = False
        self.registered = 0
        self.dropped = 0
        self.pending_bytes = 0

    def reserve(self, num_bytes: int, count: int) -> bool:
        """Sets `num_bytes` aside for `count` units, to be passed to `submit`.

        False if that many are in flight already: the units are counted as dropped, and not even copied.
        """
        with self._lock:
            if self._pool.enabled and self.pending_bytes + num_bytes <= self._max_pending_bytes:
                self.pending_bytes += num_bytes
                return True
            if self._pool.enabled:
                self.dropped += count
        return False

    def submit(self, units: Sequence[RecyclableUnit], reserved_bytes: int, epoch: int, root: bytes = b"") -> None:
        """Takes units made under a reservation; returns at once. `epoch` is the pool's when they were computed, `root`
        what their fingerprints start from."""
        self._queue.append((epoch, root, reserved_bytes, list(units)))
        if self._closed:
            self._drop_all()
            return
        self._idle.clear()
        self._wake.set()

    async def run(self) -> None:
        """Stores what is submitted, for ever; any failure drops the batch and is counted."""
        while True:
            while not self._queue:
                self._idle.set()
                self._wake.clear()
                await self._wake.wait()
            epoch, root, reserved_bytes, units = self._queue.popleft()
            try:
                await self._pool.put_units(units, epoch, root)
                self.registered += len(units)
            except Exception:  # noqa: BLE001 - the caller of the request must never see a failing store
                self.dropped += len(units)
                _LOG.exception("storing %d units failed", len(units))
            finally:
                with self._lock:
                    self.pending_bytes -= reserved_bytes

    async def drain(self) -> None:
        """Waits until everything submitted so far is stored or dropped."""
        await self._idle.wait()

    def close(self) -> None:
        """To be called when `run` has ended: drops what is left and what comes later, so that nobody waits for it."""
        self._closed = True
        self._drop_all()
        self._idle.set()

    def _drop_all(self) -> None:
        while self._queue:
            _, _, reserved_bytes, units = self._queue.popleft()
            self.dropped += len(units)
            with self._lock:
                self.pending_bytes -= reserved_bytes
