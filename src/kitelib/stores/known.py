"""Which keys are worth a thought: what an outer tier had a moment ago, and what it used last."""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict
from collections.abc import Iterable

from kitelib.abc import SharedStore

__all__ = ["HitRoots", "KnownKeys", "most_recent"]


class KnownKeys:
    """Keys that an outer tier had, or was given, a moment ago, so that they are not written again.

    A hint, bounded in number (about 250 bytes each) and in age: an entry that is no longer true costs one write that
    is not made. Adding belongs to the event loop; asking is for any thread.
    """

    def __init__(self, max_keys: int, max_age_s: float) -> None:
        self._max_keys = max_keys
        self._max_age_s = max_age_s
        self._added: OrderedDict[str, float] = OrderedDict()

    def __contains__(self, key: str) -> bool:
        added = self._added.get(key)
        return added is not None and time.monotonic() - added < self._max_age_s

    def add(self, keys: Iterable[str]) -> None:
        """Takes in keys."""
        now = time.monotonic()
        for key in keys:
            self._added[key] = now
            self._added.move_to_end(key)
        while len(self._added) > self._max_keys:
            self._added.popitem(last=False)

    def discard(self, keys: Iterable[str]) -> None:
        """The keys are gone."""
        for key in keys:
            self._added.pop(key, None)

    def clear(self) -> None:
        """Forgets everything."""
        self._added.clear()


class HitRoots:
    """The root of the namespace in which a key in memory was hit; the last `max_keys` of them. Event loop only."""

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._roots: OrderedDict[str, bytes] = OrderedDict()

    def add(self, key: str, root: bytes) -> None:
        """The key was hit."""
        if self._max_keys:
            self._roots[key] = root
            self._roots.move_to_end(key)
            if len(self._roots) > self._max_keys:
                self._roots.popitem(last=False)

    def get(self, key: str) -> bytes | None:
        """The root, or None if the key was not hit lately."""
        return self._roots.get(key)


async def most_recent(store: SharedStore, model: str, max_bytes: int) -> list[str]:
    """Keys of the most recently used KV and logits units of a model, newest first, of at most `max_bytes` together.

    Raises:
        StoreError: the store can't be listed.
    """
    newest: list[tuple[float, str, int]] = []
    num_bytes = 0
    async for page in store.list_items():
        for item in page:
            if f":{model}:" not in item.key:
                continue
            heapq.heappush(newest, (item.used_at or item.written_at or 0.0, item.key, item.num_bytes))
            num_bytes += item.num_bytes
            while newest and num_bytes > max_bytes:
                num_bytes -= heapq.heappop(newest)[2]
    return [key for _, key, _ in sorted(newest, reverse=True)]
