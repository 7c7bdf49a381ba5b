"""Moving cold units from a tier to the archive, so that no moment and no crash leaves a unit nowhere."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Final

from kitelib.abc import StoredItem
from kitelib.errors import FormatError
from kitelib.stores.guard import GuardedStore
from kitelib.upcycle.unit import HEAD_BYTES, UnitHead, peek

__all__ = ["archive_batch", "cold_batches"]

_BATCH_BYTES: Final = 8 * 2**20
_BATCH_ITEMS: Final = 32
_ROUND_BYTES: Final = 256 * 2**20  # per tier and round, so that archiving never takes the bandwidth for long

IsStale = Callable[[UnitHead], bool]


async def cold_batches(
    store: GuardedStore, is_cold: Callable[[StoredItem], bool], round_bytes: int = _ROUND_BYTES
) -> AsyncGenerator[list[StoredItem], None]:
    """The cold items of a tier in batches that fit into memory, about `round_bytes` together at most.

    Raises:
        StoreError: the tier can't be listed.
    """
    batch: list[StoredItem] = []
    batch_bytes = 0
    async with aclosing(store.list_items()) as pages:
        async for page in pages:
            for item in filter(is_cold, page):
                if batch and (batch_bytes + item.num_bytes > _BATCH_BYTES or len(batch) == _BATCH_ITEMS):
                    yield batch
                    batch, batch_bytes = [], 0
                    if round_bytes <= 0:
                        return
                batch.append(item)
                batch_bytes += item.num_bytes
                round_bytes -= item.num_bytes
    if batch:
        yield batch


async def archive_batch(
    source: GuardedStore, archive: GuardedStore, items: Sequence[StoredItem], is_stale: IsStale
) -> int:
    """Copies units to the archive, checks that they are there, and only then deletes them from their tier.

    What another process archived already is not copied again. Stale units are deleted and not copied; what is no unit,
    or not whole, stays where it is.

    Returns:
        How many units left the tier for the archive.

    Raises:
        StoreError: one of the stores failed; every unit still is in at least one of them.
    """
    keys = [item.key for item in items]
    heads = dict(zip(keys, await source.get_heads(keys, HEAD_BYTES), strict=True))
    kept = dict(zip(keys, await archive.get_heads(keys, HEAD_BYTES), strict=True))
    stale: list[str] = []
    there: list[str] = []
    missing: list[str] = []
    for key, head in heads.items():
        unit = _peeked(head)
        if unit is None:
            continue
        # A head names the length and the checksum of its payload, so equal heads mean equal units.
        (stale if is_stale(unit) else there if kept[key] == head else missing).append(key)
    values = dict(zip(missing, await source.get_many(missing), strict=True)) if missing else {}
    copies = [(key, value) for key, value in values.items() if value is not None and _is_whole(value)]
    if copies:
        await archive.put_many(copies)
        now_kept = await archive.get_heads([key for key, _ in copies], HEAD_BYTES)
        there += [key for (key, value), head in zip(copies, now_kept, strict=True) if head == value[:HEAD_BYTES]]
    if stale:
        await source.delete_many(stale)
    return await source.delete_many(there) if there else 0


def _peeked(head: bytes | None) -> UnitHead | None:
    try:
        return None if head is None else peek(head)
    except FormatError:
        return None


def _is_whole(value: bytes) -> bool:
    head = _peeked(value[:HEAD_BYTES])
    return head is not None and head.num_bytes == len(value)
