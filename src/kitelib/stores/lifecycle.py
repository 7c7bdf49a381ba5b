"""Freshness, expiry and archiving: what the pool does beside its requests.

Freshness: every model has an epoch, a whole number that only grows and that every shared tier keeps. Invalidating
raises it; units carry the epoch they were computed in, and older ones are never used. Each process looks at the epochs
every `interval_s` and goes forward to the highest one it sees on any tier. A process whose tiers are all on its own
machine, a phone's say, looks only while it has requests, so that it never wakes up for nothing: the first request after
a rest looks before it uses anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import anyio

from kitelib.abc import Clock, SharedStore, StoredItem
from kitelib.config import TierThresholds
from kitelib.errors import FormatError, StoreError
from kitelib.fingerprint import model_key
from kitelib.stores.archiving import archive_batch, cold_batches
from kitelib.stores.hits import HitCounts, HitPublisher
from kitelib.stores.tier import Tier
from kitelib.stores.tiered import Tiers
from kitelib.upcycle.unit import HEAD_BYTES, UnitHead, peek

__all__ = ["Lifecycle", "purge_stale"]

_LOG = logging.getLogger("kitelib.pool")
_LOCAL: Final = "disk"  # the tier that every process on a machine may purge by itself
_JITTER: Final = 0.2  # of an interval, so that a fleet that started together does not stay together
_MAX_RAISES: Final = 5
_MOST_EPOCHS: Final = 2**48
_HEADS: Final = 256  # units looked at, or deleted, in one call
_DEAR_ROUNDS: Final = 200  # listing a shared tier happens that many times while a unit gets cold, at most


async def purge_stale(store: SharedStore, model: str, epoch: int) -> int:
    """Deletes the units of a model whose epoch is older, in bounded batches.

    Args:
        store: the tier.
        model: `kitelib.fingerprint.model_key` of the model state.
        epoch: units of this epoch and newer ones stay; so does what is no unit.

    Returns:
        How many were deleted.

    Raises:
        StoreError: the store failed; what was deleted until then is deleted.
    """
    deleted = 0
    waiting: list[str] = []
    async for page in store.list_items():
        waiting += [item.key for item in page if _model_of(item.key) == model]
        while len(waiting) >= _HEADS:
            deleted += await _purge_batch(store, waiting[:_HEADS], epoch)
            del waiting[:_HEADS]
    return deleted + (await _purge_batch(store, waiting, epoch) if waiting else 0)


async def _purge_batch(store: SharedStore, keys: Sequence[str], epoch: int) -> int:
    heads = await store.get_heads(keys, HEAD_BYTES)
    stale = [key for key, head in zip(keys, heads, strict=True) if head is not None and _epoch_of(head, epoch) < epoch]
    return await store.delete_many(stale) if stale else 0


def _epoch_of(head: bytes, otherwise: int) -> int:
    try:
        return peek(head).epoch
    except FormatError:
        return otherwise


def _sane(tier: Tier, epoch: int) -> int | None:
    """The epoch that a tier told, or None if it can't be one: no pool is invalidated that often, and following it would
    leave no room for later invalidations."""
    if epoch <= _MOST_EPOCHS:
        return epoch
    _LOG.error(
        "the tier %r holds the epoch %d, which is damaged and is not followed; invalidations do not reach other "
        "processes through this tier until its epoch is deleted",
        tier.name,
        epoch,
    )
    return None


def _model_of(key: str) -> str:
    """The model's part of ``kite:{<cf[:4]>}:<model>:<kind>:<cf>``; "" if the key is none of these."""
    parts = key.split(":")
    return parts[2] if len(parts) == 5 else ""


class Lifecycle:
    """Keeps freshness epochs, drops what is stale or expired, and archives what is cold. One per pool.

    Only stores that are a `SharedStore` take part; a plain `Store` can't be listed, and one that outlives the process
    would bring back units from before the last invalidation.

    Args:
        tiers: the outer tiers.
        interval_s: seconds between two rounds; each is up to a fifth shorter or longer, at random.
        thresholds: when a unit is cold.
        on_epoch: called with the new epoch of the model in use as soon as it is known that it was raised.
        clock: time source.
        hits: what this process used; brought to the tiers that add up hits. None counts nothing.

    Attributes:
        hits: brings them there.
        purged: stale units deleted so far.
        archived: units moved to the archive so far.
    """

    def __init__(
        self,
        tiers: Tiers,
        *,
        interval_s: float,
        thresholds: TierThresholds,
        on_epoch: Callable[[int], None],
        clock: Clock | None = None,
        hits: HitCounts | None = None,
    ) -> None:
        self.purged = 0
        self.archived = 0
        self._tiers = tiers
        self._interval_s = interval_s
        self._cold_after_s = thresholds.cold_after_s
        self._on_epoch = on_epoch
        self._time = time.time if clock is None else clock.time
        self._monotonic = time.monotonic if clock is None else clock.monotonic
        self.hits = None if hits is None else HitPublisher(hits, self._time)
        self._model: str | None = None
        self._epochs: dict[str, int] = {}
        self._told: dict[str, int] = {}  # what the pool knows
        self._unheard: set[str] = set()  # models whose invalidation no tier has heard of yet
        self._to_purge: dict[tuple[Tier, str], int] = {}
        self._used = asyncio.Event()  # since the last round
        self._resting = False
        self._due = self._monotonic() + interval_s * random.random()  # noqa: S311 - no secret
        # At a random point of the first period, so that a fleet does not list the tiers together.
        self._dear_period_s = max(interval_s, thresholds.cold_after_s / _DEAR_ROUNDS)
        self._dear_at = self._monotonic() + self._dear_period_s * random.random()  # noqa: S311 - no secret

    @property
    def epoch(self) -> int:
        """The epoch of the model in use, as far as it is known; it only moves forward."""
        return self._epochs.get(self._model, 0) if self._model is not None else 0

    @property
    def _shared(self) -> list[Tier]:
        return [tier for tier in self._tiers.tiers if tier.shared is not None]

    # Epochs

    async def use_model(self, name: str) -> int:
        """Says which model is in use (its `model_key`) and returns its epoch: the highest that any tier knows. Tiers
        that lag are raised to it. What can't be reached is asked again in every round."""
        self._model = name
        self._epochs.setdefault(name, 0)
        seen = await self._read_epochs(name)
        self._go_forward(name, seen.values())
        await self._raise_lagging(name, seen)
        self._told[name] = self._epochs[name]
        return self._epochs[name]

    async def raise_epoch(self, at_least: int = 0) -> dict[str, int]:
        """Invalidates all units of the model in use, in every process, and deletes them from every tier.

        The new `epoch` is above that of every tier. A tier that can't be reached now is raised, and cleared, in a later
        round. Two invalidations at the same moment may count as one.

        Args:
            at_least: the new epoch is not below this.

        Returns:
            How many units were deleted, by the name of the tier.
        """
        if self._model is None:
            return {}
        try:
            return await self._raise_epoch(self._model, at_least)
        finally:
            if not self._may_rest():
                self._used.set()  # what failed is tried again in the next round

    async def _raise_epoch(self, name: str, at_least: int) -> dict[str, int]:
        self._go_forward(name, (await self._read_epochs(name)).values())
        shared = self._shared
        self._unheard.add(name)  # until it is known better, also if this call is cancelled
        for _ in range(_MAX_RAISES):
            epoch = self._go_forward(name, [self._epochs[name] + 1, at_least])
            self._to_purge.update({(tier, name): epoch for tier in shared})
            if await self._raise_lagging(name, dict.fromkeys(shared, -1)):
                self._unheard.discard(name)
            if self._epochs[name] == epoch:
                break
            # A tier that could not be read turned out to be ahead: its units have to become stale as well.
        self._told[name] = max(self._told.get(name, 0), at_least)
        self._tell(name)
        deleted = await asyncio.gather(*[self.purge_stale(tier, name) for tier in shared])
        return {tier.name: count for tier, count in zip(shared, deleted, strict=True)}

    async def _read_epochs(self, name: str) -> dict[Tier, int]:
        """The epochs that can be read now."""

        async def read(tier: Tier) -> int | None:
            assert tier.shared is not None
            try:
                return _sane(tier, await tier.shared.get_epoch(name))
            except StoreError as error:
                _LOG.debug("the epoch of %s is unknown: %s", tier.name, error)
                return None

        shared = self._shared
        answers = await asyncio.gather(*[read(tier) for tier in shared])
        return {tier: epoch for tier, epoch in zip(shared, answers, strict=True) if epoch is not None}

    async def _raise_lagging(self, name: str, seen: Mapping[Tier, int]) -> int:
        """Raises the tiers that are behind; returns how many took it. What they say in turn counts as well."""
        target = self._epochs[name]

        async def lift(tier: Tier) -> int | None:
            assert tier.shared is not None
            try:
                return _sane(tier, await tier.shared.raise_epoch(name, target))
            except StoreError as error:
                _LOG.debug("the epoch of %s could not be raised: %s", tier.name, error)
                return None

        lagging = [tier for tier, epoch in seen.items() if epoch < target]
        for tier in lagging:
            if tier.name == _LOCAL:
                self._to_purge[tier, name] = target
        answers = [epoch for epoch in await asyncio.gather(*map(lift, lagging)) if epoch is not None]
        self._go_forward(name, answers)
        return sum(epoch >= target for epoch in answers)

    def _go_forward(self, name: str, epochs: Iterable[int]) -> int:
        self._epochs[name] = max([self._epochs.get(name, 0), *epochs])
        return self._epochs[name]

    async def _check_epoch(self, name: str) -> None:
        before = self._epochs.get(name, 0)
        seen = await self._read_epochs(name)
        if not seen:
            return
        newest = max(seen.values())
        if name in self._unheard:
            # Others may have raised it meanwhile without knowing of this invalidation; it must come after theirs.
            newest = max(newest + 1, before)
        if self._go_forward(name, [newest]) > before:
            for tier in self._shared:
                if tier.name == _LOCAL or name in self._unheard:
                    self._to_purge[tier, name] = newest
        self._tell(name)
        if await self._raise_lagging(name, seen):
            self._unheard.discard(name)
        self._tell(name)

    def _tell(self, name: str) -> None:
        """Tells the pool of an epoch it does not know yet."""
        if name == self._model and self._epochs[name] > self._told.get(name, 0):
            self._told[name] = self._epochs[name]
            self._on_epoch(self._epochs[name])

    # Rounds

    async def run(self) -> None:
        """Makes a round every interval, for ever; if all tiers are local, only after something was used."""
        while True:
            if self._may_rest():
                self._used.clear()
                self._resting = True
                await self._used.wait()
            await anyio.sleep(max(0.0, self._due - self._monotonic()))
            await self.check()
            self._due = self._monotonic() + self._interval_s * random.uniform(1 - _JITTER, 1 + _JITTER)  # noqa: S311

    def _may_rest(self) -> bool:
        """Whether nobody else waits for what the rounds do."""
        return not self._to_purge and not self._unheard and all(tier.name == _LOCAL for tier in self._tiers.tiers)

    def note_use(self) -> bool:
        """Tells that a request is going to use the tiers. True if it has to `look` first: there was no round for
        longer than an interval. Only on the event loop."""
        self._used.set()
        return self._resting and self._monotonic() >= self._due

    async def look(self) -> None:
        """Looks at the epoch of the model in use, as each round does. No store that fails stops it."""
        if self._model is not None:
            await self._check_epoch(self._model)
        self._resting = False

    async def check(self) -> None:
        """One round: epochs, stale units, hits, expired units, counters, and now and then the archive. No store that
        fails stops it."""
        await self.look()
        for tier, model in list(self._to_purge):
            await self.purge_stale(tier, model)
        await self.publish_hits()
        dear = self._monotonic() >= self._dear_at
        await asyncio.gather(*[self._tend(tier, dear=dear) for tier in self._tiers.tiers])
        if dear:
            self._dear_at = self._monotonic() + self._dear_period_s * random.uniform(1 - _JITTER, 1 + _JITTER)  # noqa: S311
            await self.archive_cold()

    async def publish_hits(self) -> None:
        """Brings what was used since the last time to the tiers that add it up; what fails waits for the next round."""
        if self.hits is not None:
            await self.hits.publish(self._tiers.tiers)

    async def _tend(self, tier: Tier, *, dear: bool) -> None:
        """Removes what is expired, on remote tiers more rarely, and takes the store's counters."""
        if tier.name == _LOCAL or dear:
            with contextlib.suppress(StoreError):
                await tier.background.sweep()
        await tier.refresh()

    async def purge_stale(self, tier: Tier, model: str) -> int:
        """Deletes the units of a model that an invalidation made stale; returns how many. If the store fails, it is
        tried again in the next round."""
        if tier.shared is None:
            return 0
        epoch = self._epochs.get(model, 0)
        try:
            deleted = await purge_stale(tier.shared, model, epoch)
        except StoreError as error:
            _LOG.info("stale units stay in %s for now: %s", tier.name, error)
            return 0
        if self._to_purge.get((tier, model), epoch + 1) <= epoch:
            del self._to_purge[tier, model]
        self.purged += deleted
        return deleted

    # The archive

    async def archive_cold(self) -> int:
        """Moves units that nobody used for `TierThresholds.cold_after_s` to the archive; returns how many.

        A unit leaves its tier only after the archive has shown to have it, so two processes may do this at once. Each
        round is bounded in bytes. Without an archive there is nothing to do: the tiers evict by themselves.
        """
        archive = self._tiers.archive
        if archive is None or archive.shared is None or not archive.breaker.allows():
            return 0
        before = self.archived
        for tier in self._shared:
            if tier is archive or tier.shared is None:
                continue
            try:
                async with contextlib.aclosing(cold_batches(tier.shared, self._is_cold)) as batches:
                    async for batch in batches:
                        self.archived += await archive_batch(tier.shared, archive.shared, batch, self._is_stale)
            except StoreError as error:
                _LOG.info("cold units stay in %s for now: %s", tier.name, error)
        return self.archived - before

    def _is_cold(self, item: StoredItem) -> bool:
        times = [stamp for stamp in (item.used_at, item.written_at) if stamp is not None]
        if not times or self._time() - max(times) <= self._cold_after_s:
            return False
        return self._tiers.idle_s(item.key) > self._cold_after_s

    def _is_stale(self, unit: UnitHead) -> bool:
        return unit.epoch < self._epochs.get(model_key(unit.model_state), 0)
