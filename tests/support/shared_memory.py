"""A `SharedStore` in memory whose clock, epochs and failures a test holds in its hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from kitelib.abc import StoredItem, StoreStats
from kitelib.errors import StoreError
from kitelib.stores.memory import MemoryStore

__all__ = ["HandClock", "SharedMemory"]


class HandClock:
    """Time that moves only when told."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class SharedMemory:
    """Keeps values as `MemoryStore` does, with what a shared tier adds.

    Attributes:
        failing: operations that raise StoreError.
        delays: operation -> seconds that it takes.
        calls: every operation so far, in order, with its keys.
        epochs: as stored.
    """

    def __init__(self, clock: HandClock | None = None, max_bytes: int = 2**26) -> None:
        self.inner = MemoryStore(max_bytes)
        self.clock = HandClock() if clock is None else clock
        self.failing: set[str] = set()
        self.delays: dict[str, float] = {}
        self.calls: list[tuple[str, list[str]]] = []
        self.epochs: dict[str, int] = {}
        self.used: dict[str, tuple[float, float]] = {}  # key -> written, used
        self.swept = 0
        self.closed = False

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        await self._enter("get_many", keys)
        found = await self.inner.get_many(keys)
        for key, value in zip(keys, found, strict=True):
            if value is not None:
                self.used[key] = self.used[key][0], self.clock.now
        return found

    async def put_many(self, items: Sequence[tuple[str, bytes]]) -> None:
        await self._enter("put_many", [key for key, _ in items])
        await self.inner.put_many(items)
        for key, _ in items:
            self.used[key] = self.clock.now, self.clock.now

    async def leading_run(self, keys: Sequence[str]) -> int:
        await self._enter("leading_run", keys)
        return await self.inner.leading_run(keys)

    async def delete_many(self, keys: Sequence[str]) -> int:
        await self._enter("delete_many", keys)
        return await self.inner.delete_many(keys)

    async def stats(self) -> StoreStats:
        await self._enter("stats", [])
        return await self.inner.stats()

    async def aclose(self) -> None:
        self.closed = True

    async def warm(self) -> None:
        await self._enter("warm", [])

    async def sweep(self) -> int:
        await self._enter("sweep", [])
        self.swept += 1
        return 0

    async def list_items(self) -> AsyncIterator[list[StoredItem]]:
        keys = self.inner.keys()
        for start in range(0, max(len(keys), 1), 10):
            await self._enter("list_items", [])
            page = []
            for key in keys[start : start + 10]:
                value = self.inner.get(key)
                if value is not None:
                    page.append(StoredItem(key, len(value), *self.used[key]))
            yield page

    async def get_heads(self, keys: Sequence[str], num_bytes: int) -> list[bytes | None]:
        await self._enter("get_heads", keys)
        return [None if value is None else value[:num_bytes] for value in await self.inner.get_many(keys)]

    async def get_epoch(self, name: str) -> int:
        await self._enter("get_epoch", [name])
        return self.epochs.get(name, 0)

    async def raise_epoch(self, name: str, epoch: int) -> int:
        await self._enter("raise_epoch", [name])
        self.epochs[name] = max(epoch, self.epochs.get(name, 0))
        return self.epochs[name]

    def called(self, operation: str) -> int:
        """How often an operation was called."""
        return sum(name == operation for name, _ in self.calls)

    async def _enter(self, operation: str, keys: Sequence[str]) -> None:
        self.calls.append((operation, list(keys)))
        await asyncio.sleep(self.delays.get(operation, 0))
        if operation in self.failing or "all" in self.failing:
            raise StoreError(f"{operation} fails")
