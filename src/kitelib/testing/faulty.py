"""`FaultyStore`: a store that goes wrong on schedule."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Literal

import anyio

from kitelib.abc import SharedStore, Store, StoredItem, StoreStats
from kitelib.errors import StoreError

__all__ = ["Fault", "FaultyStore", "Operation", "fault_every"]

Operation = Literal[
    "get_many",
    "put_many",
    "leading_run",
    "delete_many",
    "stats",
    "warm",
    "list_items",
    "get_heads",
    "get_epoch",
    "raise_epoch",
]
FaultKind = Literal["fail", "delay", "lose", "corrupt", "truncate", "swap"]


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        kind: "fail" raises `StoreError`; "delay" waits, then works; "lose" finds or stores nothing, silently;
            "corrupt" flips a bit in every value, "truncate" cuts every value in half, "swap" exchanges the values of
            neighbouring keys: on the way out of `get_many` and `get_heads`, on the way in of `put_many`.
        delay_s: seconds that "delay" waits.
    """

    kind: FaultKind
    delay_s: float = 0.0


Schedule = Callable[[Operation, int], Fault | None]


def fault_every(n: int, fault: Fault, *operations: Operation) -> Schedule:
    """A schedule that strikes every n-th call of the given operations (of each, if none is given)."""

    def schedule(operation: Operation, call: int) -> Fault | None:
        return fault if call % n == n - 1 and (not operations or operation in operations) else None

    return schedule


class FaultyStore:
    """A `Store` that passes everything on to another and goes wrong on schedule; a `SharedStore` if the other is one.

    Args:
        inner: the store that does the work.
        schedule: called with the operation and how many calls of it came before; gives the fault, or None.

    Attributes:
        faults: how many calls went wrong so far.
    """

    def __new__(cls, inner: Store, schedule: Schedule) -> FaultyStore:  # noqa: ARG004 - as __init__
        """An instance with the methods that `inner` has."""
        return super().__new__(_FaultySharedStore if cls is FaultyStore and isinstance(inner, SharedStore) else cls)

    def __init__(self, inner: Store, schedule: Schedule) -> None:
        self.inner = inner
        self.faults = 0
        self._schedule = schedule
        self._calls: dict[Operation, int] = {}

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Values of the inner store, or what the fault makes of them."""
        fault = await self._strike("get_many")
        if fault == "lose":
            return [None] * len(keys)
        found = await self.inner.get_many(keys)
        spoilt = iter(_spoil([value for value in found if value is not None], fault))
        return [None if value is None else next(spoilt) for value in found]

    async def put_many(self, items: Sequence[tuple[str, bytes]]) -> None:
        """Stores, or what the fault makes of it."""
        fault = await self._strike("put_many")
        if fault != "lose":
            values = _spoil([value for _, value in items], fault)
            await self.inner.put_many([(key, value) for (key, _), value in zip(items, values, strict=True)])

    async def leading_run(self, keys: Sequence[str]) -> int:
        """The inner store's answer; "lose" gives 0."""
        return 0 if await self._strike("leading_run") == "lose" else await self.inner.leading_run(keys)

    async def delete_many(self, keys: Sequence[str]) -> int:
        """The inner store's answer; "lose" deletes nothing."""
        return 0 if await self._strike("delete_many") == "lose" else await self.inner.delete_many(keys)

    async def stats(self) -> StoreStats:
        """The inner store's counters."""
        await self._strike("stats")
        return await self.inner.stats()

    async def aclose(self) -> None:
        """Closes the inner store; never goes wrong."""
        await self.inner.aclose()

    async def _strike(self, operation: Operation) -> FaultKind | None:
        call = self._calls.get(operation, 0)
        self._calls[operation] = call + 1
        fault = self._schedule(operation, call)
        if fault is None:
            return None
        self.faults += 1
        if fault.kind == "fail":
            raise StoreError(f"call {call} of {operation} fails on schedule")
        if fault.kind == "delay":
            await anyio.sleep(fault.delay_s)
        return fault.kind


class _FaultySharedStore(FaultyStore):
    inner: SharedStore

    async def warm(self) -> None:
        """The inner store's; "lose" opens nothing."""
        if await self._strike("warm") != "lose":
            await self.inner.warm()

    async def list_items(self) -> AsyncIterator[list[StoredItem]]:
        """The inner store's pages; "lose" lists nothing."""
        if await self._strike("list_items") != "lose":
            async for page in self.inner.list_items():
                yield page

    async def get_heads(self, keys: Sequence[str], num_bytes: int) -> list[bytes | None]:
        """Heads from the inner store, or what the fault makes of them."""
        fault = await self._strike("get_heads")
        if fault == "lose":
            return [None] * len(keys)
        found = await self.inner.get_heads(keys, num_bytes)
        spoilt = iter(_spoil([head for head in found if head is not None], fault))
        return [None if head is None else next(spoilt) for head in found]

    async def get_epoch(self, name: str) -> int:
        """The inner store's answer; "lose" gives 0."""
        return 0 if await self._strike("get_epoch") == "lose" else await self.inner.get_epoch(name)

    async def raise_epoch(self, name: str, epoch: int) -> int:
        """The inner store's answer; "lose" claims to have raised it."""
        return epoch if await self._strike("raise_epoch") == "lose" else await self.inner.raise_epoch(name, epoch)


def _spoil(values: list[bytes], fault: FaultKind | None) -> list[bytes]:
    if fault == "corrupt":
        return [_flip_bit(value) for value in values]
    if fault == "truncate":
        return [value[: len(value) // 2] for value in values]
    if fault == "swap":
        return values[1:] + values[:1]
    return values


def _flip_bit(value: bytes) -> bytes:
    middle = len(value) // 2
    return value[:middle] + bytes(byte ^ 0x10 for byte in value[middle : middle + 1]) + value[middle + 1 :]
