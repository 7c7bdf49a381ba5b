"""One outer tier: a store behind a breaker, timeouts, single flight, measured cost and a write-behind queue."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import anyio

from kitelib.abc import Clock, HitLedger, SharedStore, Store, StoreStats
from kitelib.errors import StoreError
from kitelib.runtime.threads import ThreadDoor
from kitelib.stores.breaker import Breaker
from kitelib.stores.cost import TierCost
from kitelib.stores.flights import Flights
from kitelib.stores.guard import GuardedStore, StoreGuard
from kitelib.stores.write_queue import WriteQueue

__all__ = ["ARCHIVE", "Pending", "Tier"]

_LOG = logging.getLogger("kitelib.pool")

ARCHIVE: Final = "s3"
"""Name of the tier that keeps cold units."""

# Assumed before anything was measured: latency in seconds and bytes per second, on the slow side of what is usual.
_PRIORS: Final[Mapping[str, tuple[float, float]]] = MappingProxyType(
    {"disk": (0.5e-3, 500e6), "redis": (2e-3, 200e6), ARCHIVE: (50e-3, 50e6)}
)
_PRIOR: Final = (5e-3, 100e6)
_PATIENCE: Final = 10  # calls that no request waits for may take that many times the usual timeout
_PATIENCE_S: Final = 5.0  # and always this long
_NOTHING: Final = StoreStats(items=0, bytes=0, hits=0, misses=0, evictions=0, dropped=0)


@dataclasses.dataclass(frozen=True, slots=True)
class Pending:
    """A value on its way to a tier.

    Attributes:
        key: its key.
        num_bytes: bytes that are kept alive until it is written.
        encode: gives the stored bytes for the tier they go to; called in a thread. If it raises, the value is dropped
            and counted.
    """

    key: str
    num_bytes: int
    encode: Callable[[Tier], bytes]


class Tier:
    """A store as one tier of the pool. No method raises for what the store does: what fails is a miss, and counted.

    Args:
        name: "disk", "redis", "s3", or what a third party calls its store.
        store: the store; closed with the tier.
        door: runs `Pending.encode`.
        timeout_s: seconds that a call on a request's path may take; reading many bytes may take longer, see
            `get_many`.
        write_bytes: most bytes on the way to the store; past it, new values are dropped.
        clock: time source of the breaker and the measurements.

    Attributes:
        cost: what lookups and reads take.
        refused: values of it that failed their checks after they were read; counted by who checks.
        breaker: stops calls while the store keeps failing; writing has one of its own.
        write_failure: why the last batch could not be written, for people; "" if it could.
        background: the store for calls that no request waits for: guarded like the others, with more patience, and
            raising StoreError.
        shared: `background`, if the store is a `SharedStore`; else None.
        ledger: adds up hits, if the store is a `HitLedger`; else None. Guarded as writes are.
    """

    def __init__(
        self,
        name: str,
        store: Store,
        *,
        door: ThreadDoor,
        timeout_s: float,
        write_bytes: int,
        clock: Clock | None = None,
    ) -> None:
        self.name = name
        self.store = store
        self.timeout_s = timeout_s
        self.cost = TierCost(*_PRIORS.get(name, _PRIOR))
        self.breaker = Breaker(clock=clock)
        self._door = door
        self._monotonic = time.monotonic if clock is None else clock.monotonic
        self._guard = StoreGuard(name, self.breaker, timeout_s)
        # A store that is full or read-only fails every write, and must go on being read.
        self._write_guard = StoreGuard(name, Breaker(clock=clock), timeout_s)
        patience_s = max(_PATIENCE * timeout_s, _PATIENCE_S)
        self.background = GuardedStore(store, self._guard, patience_s)
        self.shared = self.background if isinstance(store, SharedStore) else None
        self._quick = GuardedStore(store, self._guard, timeout_s)
        self._writes = GuardedStore(store, self._write_guard, patience_s)
        self.ledger = self._writes if isinstance(store, HitLedger) else None
        self._flights = Flights(self._read)
        self._queue: WriteQueue[Pending] = WriteQueue(write_bytes, self._write)
        self._stats = _NOTHING
        self.refused = 0
        self.write_failure = ""
        self._hits = self._misses = self._lost = 0
        self._mean_bytes = 0.0
        self._looked_up = False
        self._closed = False

    @property
    def is_archive(self) -> bool:
        """Whether this tier keeps cold units, so that new ones don't go there."""
        return self.name == ARCHIVE

    @property
    def tried(self) -> bool:
        """Whether a call has shown what this tier is like, or that it fails: its connections are open by then."""
        return self._looked_up or self.cost.measured or self._guard.errors > 0

    @property
    def mean_bytes(self) -> float:
        """Average size of the values read lately, bytes; 0 before the first."""
        return self._mean_bytes

    def limit_values(self, max_bytes: int) -> None:
        """Tells the store how long a value can be at most, so that it refuses longer ones, which nobody here wrote,
        before it allocates anything. Stores that don't offer `limit_values` keep their own bound."""
        limit = getattr(self.store, "limit_values", None)
        if limit is not None:
            limit(max_bytes)

    # Reading

    async def leading_run(self, keys: Sequence[str]) -> int:
        """How many of the first keys exist; 0 if the store does not say."""
        if not keys or self._closed:
            return 0
        begun = self._monotonic()
        try:
            count = await self._quick.leading_run(keys)
        except StoreError as error:
            if isinstance(error.__cause__, TimeoutError):
                self.cost.note_lookup(self._monotonic() - begun)
            return 0
        self._looked_up = True
        self.cost.note_lookup(self._monotonic() - begun)
        return count

    async def get_many(self, keys: Sequence[str], *, timeout_s: float | None = None) -> list[bytes | None]:
        """Values in the order of `keys`; None is a miss, whatever the reason.

        A key that another caller is reading already is not read again, and cancelling one caller leaves the others
        alone.

        Args:
            timeout_s: seconds after which all that did not come is a miss; None means the tier's own, and on top twice
                what so many bytes take as measured, up to nine times the tier's own.
        """
        if not keys:
            return []
        if self._closed:
            self._misses += len(keys)
            return [None] * len(keys)
        values = await self._flights.get(keys, self._limit_s(len(keys)) if timeout_s is None else timeout_s)
        found = len(values) - values.count(None)
        self._hits += found
        self._misses += len(values) - found
        return values

    def _limit_s(self, num_keys: int) -> float:
        """A long run from a slow tier may be worth its time, and must not be cut by a limit made for silence."""
        transfer_s = num_keys * self._mean_bytes / self.cost.bytes_per_s
        return self.timeout_s + min(2 * transfer_s, (_PATIENCE - 1) * self.timeout_s)

    async def _read(self, keys: Sequence[str], timeout_s: float) -> dict[str, bytes | None]:
        begun = self._monotonic()
        try:
            values = await GuardedStore(self.store, self._guard, timeout_s).get_many(keys)
        except StoreError as error:
            if isinstance(error.__cause__, TimeoutError):
                self._note_unfinished(len(keys), self._monotonic() - begun)
            return {}
        except asyncio.CancelledError:
            self._note_unfinished(len(keys), self._monotonic() - begun)
            raise
        seconds = self._monotonic() - begun
        sizes = [len(value) for value in values if value is not None]
        if sizes:
            self.cost.note_read(sum(sizes), seconds)
            mean = sum(sizes) / len(sizes)
            self._mean_bytes += (mean - self._mean_bytes) * (1 / 8 if self._mean_bytes else 1)
        else:
            self.cost.note_lookup(seconds)
        return dict(zip(keys, values, strict=True))

    def _note_unfinished(self, num_keys: int, seconds: float) -> None:
        """A read would have taken at least that long. Not counting it would make a slow tier look fast, since only
        its quick answers would ever be measured."""
        expected = int(num_keys * self._mean_bytes)
        if seconds > self.cost.read_seconds(expected):
            self.cost.note_read(expected, seconds)

    # Writing

    def offer(self, pending: Sequence[Pending]) -> None:
        """Queues values for the writer and returns at once. Past `write_bytes`, new ones are dropped and counted; a
        key that waits already is not queued again."""
        self._queue.offer(pending)

    async def run_writer(self) -> None:
        """Writes what is offered, for ever. To be restarted whenever it ends; the accounts stay right."""
        await self._queue.run()

    async def _write(self, batch: Sequence[Pending], is_void: Callable[[], bool]) -> int:
        """Writes a batch; returns how many of it were lost before the store had them."""
        if not self._write_guard.breaker.allows():
            return len(batch)
        items = await self._door.run(lambda: [item for each in batch if (item := self._encoded(each)) is not None])
        if is_void() or not items:
            return len(batch) - len(items)
        try:
            await self._writes.put_many(items)
        except StoreError as error:
            # The store may have counted these as dropped too; `counters` takes care of it.
            self._lost += len(items)
            self.write_failure = str(error)
        else:
            self.write_failure = ""
        return len(batch) - len(items)

    def _encoded(self, pending: Pending) -> tuple[str, bytes] | None:
        try:
            return pending.key, pending.encode(self)
        except Exception:  # noqa: BLE001 - one unit that can't be stored must not take the others with it
            _LOG.exception("a unit could not be encoded for %s", self.name)
            return None

    async def settle(self) -> None:
        """Waits until all that was offered is written or dropped."""
        await self._queue.settle()

    async def drain(self, deadline_s: float) -> int:
        """Waits until all that was offered is written; at the deadline the rest is dropped. Returns how many values
        that were."""
        return await self._queue.drain(deadline_s)

    def void(self) -> None:
        """After an invalidation: what waits to be written is forgotten, and who reads from now on reads anew."""
        self._queue.void()
        self._flights.detach_all()

    # Managing

    async def delete_many(self, keys: Sequence[str]) -> int:
        """Deletes; returns how many existed, 0 if that failed. Values on their way under these keys are void."""
        if not keys or self._closed:
            return 0
        self._queue.discard(keys)
        self._flights.detach(keys)
        try:
            return await self._quick.delete_many(keys)
        except StoreError:
            return 0

    async def refresh(self) -> None:
        """Takes the store's own counters, as far as it gives them."""
        if not self._closed:
            try:
                self._stats = await self.background.stats()
            except StoreError as error:
                _LOG.debug("no counters: %s", error)

    def counters(self) -> dict[str, int | float | str]:
        """What this tier did so far; `items`, `bytes` and `evictions` as of the last `refresh`. No I/O.

        `dropped` counts values that were not stored, here (no room in the queue, not encodable, late at closing) or
        by the store. `errors` counts failed calls, or what the store counts as failed, whichever is more.
        """
        return {
            "hits": self._hits,
            "misses": self._misses,
            "bytes": self._stats.bytes,
            "items": self._stats.items,
            "evictions": self._stats.evictions,
            "written": self._queue.written - self._lost,
            "dropped": self._queue.dropped + max(self._lost, self._stats.dropped),
            "errors": max(self._guard.errors + self._write_guard.errors, self._stats.errors),
            "timeouts": self._guard.timeouts + self._write_guard.timeouts,
            "refused": self.refused,
            "pending_bytes": self._queue.pending_bytes,
            "breaker": self.breaker.state,
            "opened": self.breaker.opened,
            "write_breaker": self._write_guard.breaker.state,
        }

    async def aclose(self) -> None:
        """Drops what waits, ends what is under way and closes the store. Idempotent; afterwards everything misses."""
        if self._closed:
            return
        self._closed = True
        self._queue.close()
        with anyio.CancelScope(shield=True):
            await self._flights.aclose()
            await self._write_guard.settle()
            await self._guard.close(self.store)
