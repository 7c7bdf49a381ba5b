"""What goes to the outer tiers: new units, units that became warm, and what a tier lost while memory still has it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from kitelib.fingerprint import model_key, store_key
from kitelib.stores.forms import StoredForms
from kitelib.stores.known import HitRoots, KnownKeys
from kitelib.stores.memory import MemoryStore
from kitelib.stores.tier import Pending, Tier
from kitelib.stores.tiered import Tiers
from kitelib.upcycle.unit import RecyclableUnit, inspect

__all__ = ["OuterWrites"]

_KNOWN_KEYS: Final = 32768
_KNOWN_S: Final = 600.0
_HIT_ROOTS: Final = 8192


class OuterWrites:
    """Decides what is worth writing. Used on the event loop, except `is_known`.

    Args:
        memory: where units that became warm are taken from.
        forms: how units are stored outside.
        key_of: the key that authenticates the units of a root's namespace.
        share_when_warm: whether units may have to be shared long after they were made.
    """

    def __init__(
        self,
        memory: Callable[[], MemoryStore],
        forms: StoredForms,
        key_of: Callable[[bytes], bytes | None],
        *,
        share_when_warm: bool,
    ) -> None:
        self.tiers: Tiers | None = None
        self._memory = memory
        self._forms = forms
        self._key_of = key_of
        self._known = KnownKeys(_KNOWN_KEYS, _KNOWN_S)
        self._hit_roots = HitRoots(_HIT_ROOTS if share_when_warm else 0)

    def is_known(self, key: str) -> bool:
        """Whether an outer tier had the key, or was given it, a moment ago. Any thread."""
        return key in self._known

    def note_there(self, keys: Iterable[str]) -> None:
        """A tier has the keys."""
        self._known.add(keys)

    def note_gone(self, keys: Iterable[str]) -> None:
        """No tier has the keys."""
        self._known.discard(keys)

    def note_hit(self, key: str, root: bytes) -> None:
        """Memory had the key, for a request of that namespace."""
        self._hit_roots.add(key, root)

    def clear(self) -> None:
        """Forgets everything, after an invalidation."""
        self._known.clear()

    def offer(self, units: Sequence[RecyclableUnit], root: bytes) -> None:
        """Queues new units, but for those that are there already."""
        keyed = [(store_key(model_key(unit.model_state), unit.kind, unit.cf), unit) for unit in units]
        new = [self._pending(key, unit, root) for key, unit in keyed if key not in self._known]
        self._known.add(each.key for each in new)
        if self.tiers is not None:
            self.tiers.offer(new)

    def resident(self, key: str) -> Pending | None:
        """What memory has under a key, for a tier that is to have it too."""
        root, value = self._hit_roots.get(key), self._memory().get(key)
        if root is None or value is None:
            return None
        hmac_key = self._key_of(root)
        return Pending(key, len(value), lambda tier: self._forms.outside(inspect(value), tier, hmac_key))

    def missing(self, units: Sequence[tuple[str, RecyclableUnit]]) -> list[tuple[str, RecyclableUnit]]:
        """Those of the units in memory of which nobody knows whether the outer tiers still have them. Each is named at
        most once in a while, and is to be given to `repair` then."""
        unknown = [(key, unit) for key, unit in units if key not in self._known]
        self._known.add(key for key, _ in unknown)
        return unknown

    async def repair(
        self, units: Sequence[tuple[str, RecyclableUnit]], root: bytes, is_void: Callable[[], bool]
    ) -> None:
        """Gives the tiers what they lost, in an outage, by a flush, or because a write was dropped; nothing if `is_void`
        says after asking them that the units are void by now."""
        assert self.tiers is not None
        keys = [key for key, _ in units]
        for tier in self.tiers.tiers:
            if tier is not self.tiers.archive:
                there = await tier.leading_run(keys)
                if is_void():
                    return
                self.tiers.offer_to(tier, [self._pending(key, unit, root) for key, unit in units[there:]])

    def _pending(self, key: str, unit: RecyclableUnit, root: bytes) -> Pending:
        hmac_key = self._key_of(root)

        def encode(tier: Tier) -> bytes:
            return self._forms.outside(unit, tier, hmac_key)

        return Pending(key, len(unit.data), encode)
