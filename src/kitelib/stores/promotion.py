"""Units read from an outer tier are kept in process memory as well, behind the request that read them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from kitelib.runtime.threads import ThreadDoor
from kitelib.upcycle.unit import RecyclableUnit

__all__ = ["Promotion"]

_MAX_BYTES: Final = 64 * 2**20

Items = list[tuple[str, bytes]]


class Promotion:
    """Encodes and stores, a bounded number of bytes at a time; past it, units are only used and not kept.

    Args:
        door: to the threads.
        encode: gives a unit's key and value in memory; called in a thread.

    Attributes:
        num_bytes: bytes of data that are on their way.
    """

    def __init__(self, door: ThreadDoor, encode: Callable[[RecyclableUnit], tuple[str, bytes]]) -> None:
        self.num_bytes = 0
        self._door = door
        self._encode = encode

    def begin(
        self,
        units: Sequence[RecyclableUnit],
        store: Callable[[Items], Awaitable[None]],
        spawn: Callable[[str, Callable[[], Awaitable[None]]], Any],
    ) -> None:
        """Has `store` take the units, in a task that `spawn` runs."""
        num_bytes = sum(len(unit.data) for unit in units)
        if not units or self.num_bytes + num_bytes > _MAX_BYTES:
            return
        self.num_bytes += num_bytes

        async def keep() -> None:
            try:
                await store(await self._door.run(lambda: [self._encode(unit) for unit in units]))
            finally:
                self.num_bytes -= num_bytes

        spawn("promote", keep)
