"""Units that stay where they are: those of preloaded bundles, which neither eviction nor time takes away."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from typing import Any, Final, Protocol

from kitelib.upcycle.unit import Expectation, RecyclableUnit

__all__ = ["PINNED", "Pinned", "PinnedUnits", "UnitSource"]

_LOG = logging.getLogger("kitelib.pool")

PINNED = "bundle"
"""Name under which reports show these units."""


_FREED_AT_ONCE: Final = 1000  # units; takes about a millisecond


class UnitSource(Protocol):
    """Where pinned units are; `kitelib.upcycle.bundle.Bundle` is one."""

    @property
    def changed(self) -> bool:
        """Whether it turned out not to be any more what it was when it was opened, so that nothing of it is of use."""
        ...

    def read(self, unit: Any, expected: Expectation | None = None, *, full: bool = False) -> RecyclableUnit:
        """A verified unit; any thread.

        Raises:
            FormatError: a check failed.
        """
        ...


@dataclasses.dataclass(slots=True)
class _Shelf:
    """One source with its units by store key, and what they were used for."""

    source: UnitSource
    units: dict[str, Any]
    num_bytes: int
    epoch: int | None
    hits: int = 0
    hit_bytes: int = 0
    refused: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Pinned:
    """A unit that is there and not read yet."""

    entry: Any
    shelf: _Shelf

    def read(self, expected: Expectation | None) -> RecyclableUnit:
        """As `UnitSource.read`."""
        return self.shelf.source.read(self.entry, expected)


class PinnedUnits:
    """Sources by name. Changing it belongs to the event loop; `contains` and `get` are for any thread.

    Attributes:
        misses: units that were looked for, with something loaded, and were not there.
    """

    def __init__(self) -> None:
        self._shelves: dict[str, _Shelf] = {}
        self._order: tuple[
            _Shelf, ...
        ] = ()  # replaced as a whole, so that other threads see all or nothing of a change
        self.misses = 0

    def __len__(self) -> int:
        return len(self._order)

    def add(
        self, name: str, source: UnitSource, units: dict[str, Any], num_bytes: int, epoch: int | None = None
    ) -> None:
        """Takes units, by their store keys, of a source that takes `num_bytes` and was made in this epoch (None: it is
        to be used whatever the epoch is). One of the same name is replaced; `units` belong to this object from now on."""
        left = [self._shelves[name]] if name in self._shelves else []
        self._shelves[name] = _Shelf(source, units, num_bytes, epoch)
        self._order = tuple(self._shelves.values())
        _let_go(left)

    def remove(self, name: str) -> bool:
        """Lets go of a source; whether it was there."""
        left = [self._shelves.pop(name)] if name in self._shelves else []
        self._order = tuple(self._shelves.values())
        found = bool(left)
        _let_go(left)
        return found

    def expire(self, epoch: int) -> None:
        """It turned out what the epoch is: lets go of what was made in an earlier one."""
        for name in [name for name, each in self._shelves.items() if each.epoch is not None and each.epoch < epoch]:
            self.remove(name)

    def clear(self) -> int:
        """Lets go of all; returns how many units that were."""
        left, self._order = list(self._order), ()
        count = sum(len(shelf.units) for shelf in left)
        self._shelves.clear()
        _let_go(left)
        return count

    def contains(self, key: str) -> bool:
        """Whether the unit is there, unchecked."""
        return any(key in shelf.units for shelf in self._order)

    def get(self, key: str) -> Pinned | None:
        """The unit, from the source that came first."""
        for shelf in self._order:
            entry = shelf.units.get(key)
            if entry is not None:
                return Pinned(entry, shelf)
        return None

    def note_hit(self, pinned: Pinned, num_bytes: int) -> None:
        """The unit was read, and gave so many bytes."""
        pinned.shelf.hits += 1
        pinned.shelf.hit_bytes += num_bytes

    def refuse(self, key: str, pinned: Pinned) -> None:
        """The unit failed a check: it is not offered again, nor is anything of a source that changed."""
        shelf = pinned.shelf
        shelf.refused += 1
        shelf.units.pop(key, None)
        if shelf.source.changed and shelf.units:
            names = [name for name, each in self._shelves.items() if each is shelf]
            _LOG.warning("the bundle %s was changed while it was in use; nothing of it is used any more", names)
            shelf.units.clear()

    def stats(self) -> dict[str, dict[str, Any]]:
        """Per source: what it holds and what was used."""
        return {
            name: {
                "units": len(shelf.units),
                "bytes": shelf.num_bytes,
                "hits": shelf.hits,
                "hit_bytes": shelf.hit_bytes,
                "refused": shelf.refused,
            }
            for name, shelf in list(self._shelves.items())
        }

    def counters(self) -> dict[str, int]:
        """All sources together, as a tier of the pool."""
        shelves = self._order
        return {
            "items": sum(len(shelf.units) for shelf in shelves),
            "bytes": sum(shelf.num_bytes for shelf in shelves),
            "hits": sum(shelf.hits for shelf in shelves),
            "misses": self.misses,
            "dropped": 0,
            "refused": sum(shelf.refused for shelf in shelves),
        }


def _let_go(left: list[_Shelf]) -> None:
    """Frees shelves that nobody finds any more; many units in a thread, since the caller is on an event loop. The list
    is emptied and must be all that refers to them: who lets go of a thing last has to free it."""
    if sum(len(shelf.units) for shelf in left) > _FREED_AT_ONCE:
        threading.Thread(target=_free, args=(left,), name="kite-free", daemon=True).start()
    else:
        left.clear()


def _free(left: list[_Shelf]) -> None:
    while left:  # one by one, so that other threads run in between; a source does so with what it holds itself
        shelf = left.pop()
        with contextlib.suppress(KeyError):  # a request that still reads from it takes refused ones away
            while shelf.units:
                shelf.units.popitem()
