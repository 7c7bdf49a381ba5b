"""The runs in a bundle: which prompts its units are of, found by following their parents from the roots."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kitelib.fingerprint import Fingerprint
from kitelib.upcycle.bundle.manifest import BundleUnit, Manifest

__all__ = ["BundleRun", "runs_of"]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class BundleRun:
    """A prompt that a bundle has units of, and no longer one with the same last block and tail.

    Attributes:
        root: index in `Manifest.roots`.
        blocks: KV of its full blocks, from the first on.
        tail: KV of what follows them; None if there is nothing or it was left out.
        logits: after its last token; None if they were left out.
    """

    root: int
    blocks: Sequence[BundleUnit]
    tail: BundleUnit | None = None
    logits: BundleUnit | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return sum(len(unit.token_ids) for unit in self._parts())

    def tokens(self) -> list[int]:
        """Token ids of the prompt."""
        return [token for unit in self._parts() for token in unit.token_ids.tolist()]

    def _parts(self) -> list[BundleUnit]:
        last = self.tail or self.logits
        return [*self.blocks, *([last] if last is not None else [])]


def runs_of(manifest: Manifest) -> tuple[list[BundleRun], list[BundleUnit]]:
    """All runs: one for every tail, for all logits, and for every full block that nothing goes on from. Then the KV and
    logits that no run leads to, because a block before them is not in the bundle.

    Only the units' fields are looked at. Each unit is visited once, whatever a hostile manifest says about parents.
    """
    size = manifest.model.block_tokens
    following: dict[bytes, list[BundleUnit]] = {}
    for unit in manifest.units:
        if unit.kind in ("kv", "logits"):
            following.setdefault(unit.parent, []).append(unit)
    runs: list[BundleRun] = []
    for index, root in enumerate(manifest.roots):
        waiting: list[tuple[Fingerprint, tuple[BundleUnit, ...]]] = [(root.root, ())]
        while waiting:
            cf, blocks = waiting.pop()
            units = following.pop(cf, [])
            full = [unit for unit in units if _is_block(unit, size)]
            waiting += [(unit.cf, (*blocks, unit)) for unit in full]
            ends = _ends([unit for unit in units if not _is_block(unit, size)])
            runs += [BundleRun(index, blocks, tail, logits) for tail, logits in ends]
            if blocks and not full and not ends:
                runs.append(BundleRun(index, blocks))
    return runs, [unit for units in following.values() for unit in units]


def _is_block(unit: BundleUnit, block_tokens: int) -> bool:
    return unit.kind == "kv" and len(unit.token_ids) == block_tokens


def _ends(units: Sequence[BundleUnit]) -> list[tuple[BundleUnit | None, BundleUnit | None]]:
    """Tails and logits after the same block, those of the same tokens together."""
    found: dict[bytes, tuple[BundleUnit | None, BundleUnit | None]] = {}
    for unit in units:
        tail, logits = found.get(unit.cf, (None, None))
        found[unit.cf] = (unit, logits) if unit.kind == "kv" else (tail, unit)
    return list(found.values())
