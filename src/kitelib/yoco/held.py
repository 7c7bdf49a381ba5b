"""How many bytes of units requests hold while they wait or compute, and that it is bounded.

A request is looked up in the pool before it is admitted, so a thousand waiting requests would hold a thousand prefixes:
decoded, or pinned although process memory has evicted them. Beyond the bound they are looked up when it is their turn.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from kitelib.stores.wanted import Wanted
from kitelib.upcycle.unit import RecyclableUnit

__all__ = ["Found", "HeldBytes"]

Found = tuple[RecyclableUnit, str]
"""A unit, and the name of the tier that it came from."""


class HeldBytes:
    """Counts units from their reading until nobody refers to their data any more. Used on the event loop only; data may
    be let go in any thread.

    Args:
        max_bytes: most bytes of data. A single unit may always be read if nothing is held. The stored form that a unit
            is decoded from comes on top while it is read.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._watched: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._freed: collections.deque[int] = collections.deque()  # filled in any thread

    @property
    def num_bytes(self) -> int:
        """Bytes that are held, or being read."""
        while self._freed:
            self._num_bytes -= self._freed.popleft()
        return self._num_bytes

    def has_room(self, num_bytes: int) -> bool:
        """Whether so much may be read now."""
        return not self.num_bytes or self._num_bytes + num_bytes <= self._max_bytes

    async def read(
        self,
        wanted: Sequence[Wanted],
        read: Callable[[Sequence[Wanted]], Awaitable[list[Found]]],
        *,
        bounded: bool = True,
    ) -> list[Found]:
        """What `read` gives for the first of `wanted`, as many as there is room for; for all if not `bounded`."""
        room, count, num_bytes = self._max_bytes - self.num_bytes, 0, 0
        for each in wanted:
            size = each.expected.num_bytes or 0
            if bounded and num_bytes + size > room and self._num_bytes + num_bytes > 0:
                break
            count, num_bytes = count + 1, num_bytes + size
        if not count:
            return []
        self._num_bytes += num_bytes
        try:
            found = await read(wanted[:count])
        finally:
            self._num_bytes -= num_bytes
        self.watch([unit for unit, _ in found])
        return found

    def watch(self, units: Sequence[RecyclableUnit]) -> None:
        """These were read; they count from now on."""
        for unit in units:
            ref = weakref.ref(unit.data, self._let_go)
            self._watched[id(ref)] = ref, len(unit.data)
            self._num_bytes += len(unit.data)

    def _let_go(self, ref: weakref.ref[Any]) -> None:
        _, num_bytes = self._watched.pop(id(ref))
        self._freed.append(num_bytes)
