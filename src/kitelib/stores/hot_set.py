"""Bringing what was used last from a shared tier into process memory, before requests need it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import anyio

from kitelib.errors import FormatError, StoreError
from kitelib.runtime.threads import ThreadDoor
from kitelib.stores.known import most_recent
from kitelib.stores.tier import Tier
from kitelib.upcycle.unit import RecyclableUnit, inspect

__all__ = ["warm_memory"]

_BATCH: Final = 16

Items = list[tuple[str, bytes]]


async def warm_memory(
    tier: Tier,
    model: str,
    max_bytes: int,
    deadline_s: float,
    *,
    door: ThreadDoor,
    form: Callable[[RecyclableUnit], tuple[str, bytes] | None],
    store: Callable[[Items], Awaitable[None]],
    hmac_key: bytes | None,
) -> int:
    """Copies the most recently used units of a model; returns how many came until the deadline.

    Args:
        tier: where they are.
        model: `model_key` of the model.
        max_bytes: most stored bytes to read.
        form: the key and value that a unit has in memory, or None if it may not be there; called in a thread.
        store: takes them.
        hmac_key: units that this key does not authenticate stay away.
    """
    count = 0
    if tier.shared is None:
        return 0
    with anyio.move_on_after(deadline_s), contextlib.suppress(StoreError):
        keys = await most_recent(tier.shared, model, max_bytes)
        for start in range(0, len(keys), _BATCH):
            batch = keys[start : start + _BATCH]
            values = await tier.get_many(batch)
            items = await door.run(functools.partial(_forms, batch, values, form, hmac_key))
            await store(items)
            count += len(items)
    return count


def _forms(
    keys: Sequence[str],
    values: Sequence[bytes | None],
    form: Callable[[RecyclableUnit], tuple[str, bytes] | None],
    hmac_key: bytes | None,
) -> Items:
    items = []
    for key, value in zip(keys, values, strict=True):
        if value is None:
            continue
        try:
            item = form(inspect(value, hmac_key=hmac_key))
        except FormatError:
            continue
        if item is not None and item[0] == key:
            items.append(item)
    return items
