"""What a process knows of the files in a disk pool: only enough to choose what goes next. The files are the truth."""

from __future__ import annotations

import contextlib
import threading
from typing import Final

from kitelib.abc import Clock
from kitelib.errors import FormatError
from kitelib.stores.disk.files import NUM_SHARDS, file_name, shard_of
from kitelib.stores.eviction import EvictionPolicy
from kitelib.upcycle.unit import UnitHead, peek

__all__ = ["DiskIndex"]

_MAX_KEYS: Final = 500_000
"""Bounds the index at some hundred MiB; files past it are read as ever, and indexed when others have gone."""


class DiskIndex:
    """Keys in the order in which they go. For any thread; no I/O."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self._policy = EvictionPolicy(clock)
        self._used_at: list[dict[str, float]] = [{} for _ in range(NUM_SHARDS)]

    def add(self, key: str, num_bytes: int, start: bytes | None, used_at: float) -> bool:
        """Adds a key, or replaces what is known of it; False if there are too many.

        Args:
            key: the key.
            num_bytes: what its file takes.
            start: the first bytes of its value; None if they were not read yet.
            used_at: when it was last used, seconds since 1970.
        """
        head = _head_of(start)
        with self._lock:
            if key not in self._policy and len(self._policy) >= _MAX_KEYS:
                return False
            self._policy.add(key, num_bytes, head=head, used_at=used_at)
            self._used_at[shard_of(key)][key] = used_at
            return True

    def learn(self, key: str, num_bytes: int, start: bytes, used_at: float) -> None:
        """Adds what a value says of itself to a key that is known only by name, or not at all."""
        with self._lock:
            used_at = max(used_at, self._used_at[shard_of(key)].get(key, used_at))
        self.add(key, num_bytes, start, used_at)

    def touch(self, key: str, used_at: float) -> bool:
        """Notes a use; False if the key is not known."""
        with self._lock:
            times = self._used_at[shard_of(key)]
            if key not in times:
                return False
            times[key] = max(times[key], used_at)
            self._policy.touch(key, used_at)
            return True

    def discard(self, key: str) -> None:
        """Forgets a key."""
        with self._lock:
            self._discard(key)

    def used_at(self, key: str) -> float | None:
        """When the key was last used, as far as this process knows; None if the key is not known."""
        with self._lock:
            return self._used_at[shard_of(key)].get(key)

    def victim(self) -> str | None:
        """The key that goes next; it stays until `discard`."""
        with self._lock:
            return self._policy.victim()

    def keep_only(self, shard: int, names: set[str]) -> None:
        """Forgets the keys of a shard whose files are not among these."""
        with self._lock:
            for key in [key for key in self._used_at[shard] if file_name(key) not in names]:
                self._discard(key)

    def clear(self) -> None:
        """Forgets everything."""
        with self._lock:
            self._policy = EvictionPolicy(self._clock)
            self._used_at = [{} for _ in range(NUM_SHARDS)]

    def __len__(self) -> int:
        return len(self._policy)

    def _discard(self, key: str) -> None:
        self._policy.discard(key)
        self._used_at[shard_of(key)].pop(key, None)


def _head_of(start: bytes | None) -> UnitHead | None:
    head = None
    if start is not None:
        with contextlib.suppress(FormatError):
            head = peek(start)
    return head
