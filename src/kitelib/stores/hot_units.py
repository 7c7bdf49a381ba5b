"""What a pool holds, as an export of its hottest units sees it: hits, what roots stand for, and where to read units."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from kitelib.abc import HitLedger, SharedStore, Store
from kitelib.config import PoolConfig
from kitelib.errors import FormatError, StoreError
from kitelib.runtime.threads import ThreadDoor
from kitelib.stores.hits import HitCounts, HitPublisher, last_days
from kitelib.stores.memory import MemoryStore
from kitelib.stores.pinned import PINNED, PinnedUnits
from kitelib.stores.tier import Tier
from kitelib.upcycle.codec import get_codec, is_lossless
from kitelib.upcycle.unit import HEAD_BYTES, pack

__all__ = ["PoolView", "StoredUnits", "live_sources", "live_view", "read_ledgers", "source_of"]

Values = Awaitable[list[bytes | None]]


@dataclasses.dataclass(frozen=True, slots=True)
class StoredUnits:
    """One place that has units.

    Attributes:
        name: the tier.
        heads: the first `HEAD_BYTES` bytes of the stored units of some keys, in order; None is a miss.
        read: the stored units.
        outside: whether others can write there, so that units must carry the HMAC where a key is set.
    """

    name: str
    heads: Callable[[Sequence[str]], Values]
    read: Callable[[Sequence[str]], Values]
    outside: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class PoolView:
    """A pool at one moment.

    Attributes:
        model: `model_key` of the model that is looked at.
        epoch: its epoch; older units are void.
        hits: hits by ``<root>:<cf>`` of the deepest block that a request used.
        roots: descriptions of roots and of the model, see `HitLedger`; written by anybody who can write to a tier.
        sources: where units are, fastest first.
        hmac_key: `PoolConfig.hmac_key`.
        namespace_secret: `PoolConfig.namespace_secret`.
    """

    model: str
    epoch: int
    hits: Mapping[str, int]
    roots: Mapping[str, str]
    sources: Sequence[StoredUnits]
    hmac_key: bytes | None = dataclasses.field(default=None, repr=False)
    namespace_secret: bytes | None = dataclasses.field(default=None, repr=False)


def source_of(name: str, store: Store) -> StoredUnits:
    """An outer tier's store as a source; its methods may raise StoreError."""
    return _source(name, store, store if isinstance(store, SharedStore) else None)


def live_sources(
    memory: MemoryStore, pinned: PinnedUnits, tiers: Iterable[Tier], door: ThreadDoor
) -> list[StoredUnits]:
    """Process memory, preloaded bundles and the outer tiers of a running engine. What a tier fails in is a miss."""

    async def values(keys: Sequence[str]) -> list[bytes | None]:
        # Looked for first, so that what is not there does not count as a miss of the memory tier.
        return [memory.get(key) if memory.contains(key) else None for key in keys]

    async def heads(keys: Sequence[str]) -> list[bytes | None]:
        return [None if value is None else value[:HEAD_BYTES] for value in await values(keys)]

    sources = [StoredUnits("memory", heads, values, outside=False)] if memory.max_bytes else []
    if len(pinned):
        sources.append(_pinned_source(pinned, door))
    for tier in tiers:
        source = _source(tier.name, tier.background, tier.shared)
        sources.append(dataclasses.replace(source, heads=_lenient(source.heads), read=_lenient(source.read)))
    return sources


def _pinned_source(pinned: PinnedUnits, door: ThreadDoor) -> StoredUnits:
    codec = get_codec("raw", "none")

    def stored(key: str) -> bytes | None:
        found = pinned.get(key)
        try:
            unit = None if found is None else found.read(None)
        except FormatError:
            return None
        # Packed again without loss, it would not be known any more that a rounded one is rounded.
        return pack(unit, codec) if unit is not None and is_lossless(unit.codec) else None

    async def heads(keys: Sequence[str]) -> list[bytes | None]:
        return await door.run(lambda: [None if value is None else value[:HEAD_BYTES] for value in map(stored, keys)])

    async def read(keys: Sequence[str]) -> list[bytes | None]:
        return await door.run(lambda: [*map(stored, keys)])

    return StoredUnits(PINNED, heads, read, outside=False)


def _source(name: str, store: Store, shared: SharedStore | None) -> StoredUnits:
    async def heads(keys: Sequence[str]) -> list[bytes | None]:
        if shared is not None:
            return await shared.get_heads(keys, HEAD_BYTES)
        return [None if value is None else value[:HEAD_BYTES] for value in await store.get_many(keys)]

    return StoredUnits(name, heads, store.get_many)


def _lenient(get: Callable[[Sequence[str]], Values]) -> Callable[[Sequence[str]], Values]:
    async def get_what_comes(keys: Sequence[str]) -> list[bytes | None]:
        try:
            return await get(keys)
        except StoreError:
            return [None] * len(keys)

    return get_what_comes


async def read_ledgers(
    ledgers: Sequence[HitLedger], model: str, days: Sequence[int], limit: int
) -> tuple[dict[str, int], dict[str, str]]:
    """Hits and descriptions from several ledgers. Every process adds its hits to each ledger that it knows, so of one
    unit the highest count holds, not the sum.

    Raises:
        StoreError: one of them can't be read.
    """
    answers = await asyncio.gather(*[ledger.read_hits(model, days, limit) for ledger in ledgers])
    hits: dict[str, int] = {}
    for found, _ in answers:
        _highest(hits, found)
    return hits, {name: text for _, texts in reversed(answers) for name, text in texts.items()}


async def live_view(
    counts: HitCounts,
    publisher: HitPublisher | None,
    tiers: Iterable[Tier],
    sources: Sequence[StoredUnits],
    *,
    epoch: int,
    config: PoolConfig,
    days: int,
    limit: int,
) -> PoolView:
    """What a running engine knows of the model in use: hits of the fleet as of the ledgers, and those that this process
    has not published yet. A ledger that fails counts as empty.

    Args:
        counts: what this process counts.
        publisher: brings it to the ledgers; None if nothing does.
        tiers: the outer tiers.
        sources: see `live_sources`.
        epoch: of the pool.
        config: of the pool.
        days: how many days to add up, today included.
        limit: most entries of each ledger.
    """
    model = counts.model
    hits: dict[str, int] = {}
    roots: dict[str, str] = {}
    for tier in tiers:
        if tier.ledger is None or publisher is None:
            continue
        found: dict[str, int] = {}
        with contextlib.suppress(StoreError):
            found, texts = await tier.background.read_hits(model, last_days(days, time.time()), limit)
            roots |= texts
        for member, count in publisher.waiting(tier, model).items():
            found[member] = found.get(member, 0) + count
        _highest(hits, found)
    for member, count in counts.peek(model).items():
        hits[member] = hits.get(member, 0) + count
    roots |= counts.descriptions(model, hits)
    return PoolView(model, epoch, hits, roots, sources, config.hmac_key, config.namespace_secret)


def _highest(hits: dict[str, int], found: Mapping[str, int]) -> None:
    for member, count in found.items():
        hits[member] = max(count, hits.get(member, 0))
