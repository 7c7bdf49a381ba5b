"""Which units of a pool are used most: from the ledger's leaves to their roots, and from hits there to hits of all.

A ledger knows the deepest block that each request used. A hit of a block is one of each block before it, so hits are
added up from the leaves towards the roots, and a unit never has more hits than what it goes on from. Hence the units
with the most hits, ancestors first among equals, always are a set that is closed under ancestors.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from kitelib.errors import FormatError
from kitelib.fingerprint import Fingerprint, store_key
from kitelib.runtime.threads import ThreadDoor
from kitelib.stores.hot_units import PoolView
from kitelib.upcycle.bundle.manifest import BundleRoot, ModelIdentity
from kitelib.upcycle.unit import Kind, UnitHead, peek

__all__ = ["HotTree", "HotUnit", "grow"]

_LEAVES_AT_ONCE: Final = 256
_KEYS_AT_ONCE: Final = 512
_MAX_NODES: Final = 100_000  # about 60 MB
_END_KINDS: Final[tuple[Kind, ...]] = ("logits", "completion")


@dataclasses.dataclass(slots=True)
class _Node:
    """What heads say of the units with one fingerprint; nothing of it is verified yet."""

    parent: bytes
    root: bytes
    kinds: set[Kind]
    hits: int = 0
    depth: int = -1  # blocks between it and its root; -1 if no way leads there


@dataclasses.dataclass(frozen=True, slots=True)
class HotUnit:
    """A unit to export.

    Attributes:
        key: its key in every store.
        kind, cf, parent: as in `RecyclableUnit`.
        root: the root that it goes back to.
        hits: requests that used it.
    """

    key: str
    kind: Kind
    cf: Fingerprint
    parent: bytes
    root: BundleRoot
    hits: int


class HotTree:
    """Units that are there, with everything they go on from.

    Attributes:
        leaves: blocks that the ledger has hits of, in the roots that were looked at.
        lost: those of them that can't be used any more: they, or a block before them, are gone or void.
        most_hits: hits of the unit that was used most.
    """

    def __init__(
        self,
        model: str,
        roots: Mapping[bytes, BundleRoot],
        nodes: Mapping[bytes, _Node],
        leaves: Mapping[tuple[bytes, bytes], int],
        looked_for: Sequence[tuple[bytes, bytes]],
    ) -> None:
        self._model = model
        self._roots = roots
        children: dict[bytes, list[bytes]] = {}
        for cf, node in nodes.items():
            children.setdefault(node.parent, []).append(cf)
            node.hits = leaves.get((node.root, cf), 0)
        # From the roots down: what heads claim in circles, or without a way to a root, is never reached.
        self._order: list[tuple[bytes, _Node]] = []
        level = list(roots)
        for depth in itertools.count():
            level = [cf for parent in level for cf in children.get(parent, ())]
            if not level:
                break
            for cf in level:
                nodes[cf].depth = depth
                self._order.append((cf, nodes[cf]))
        for _, node in reversed(self._order):
            above = nodes.get(node.parent)
            if above is not None:
                above.hits += node.hits
        self.most_hits = max((node.hits for _, node in self._order), default=0)
        self.leaves = len(leaves)
        self.lost = sum(cf not in nodes or nodes[cf].depth < 0 for _, cf in looked_for)

    def choose(self, top: int, min_hits: int, *, with_completions: bool) -> list[HotUnit]:
        """The units of the `top` blocks with the most hits, at least `min_hits`, parents before children; blocks before
        them are among those. The logits of a prompt whose KV is chosen, and what followed it, come with it and don't
        count."""
        blocks = [(cf, node) for cf, node in self._order if "kv" in node.kinds and node.hits >= min_hits]
        blocks.sort(key=lambda each: (-each[1].hits, each[1].depth))
        chosen = {cf for cf, _ in blocks[:top]}
        units = []
        for cf, node in self._order:
            if cf in chosen:
                units.append(self._unit("kv", cf, node))
            # A prompt that ends with a full block has no KV of its own.
            there = cf in chosen or ("kv" not in node.kinds and node.hits >= min_hits)
            if there and (node.parent in chosen or node.parent in self._roots):
                kinds = _END_KINDS if with_completions else _END_KINDS[:1]
                units += [self._unit(kind, cf, node) for kind in kinds if kind in node.kinds]
        return units

    def _unit(self, kind: Kind, cf: bytes, node: _Node) -> HotUnit:
        name = Fingerprint(cf)
        return HotUnit(store_key(self._model, kind, cf), kind, name, node.parent, self._roots[node.root], node.hits)


async def grow(
    view: PoolView,
    model: ModelIdentity,
    roots: Mapping[bytes, BundleRoot],
    leaves: Mapping[tuple[bytes, bytes], int],
    door: ThreadDoor,
) -> HotTree:
    """Follows leaves to their roots through the heads of stored units, a level at a time.

    Args:
        view: where to look.
        model: the model; units of others are as good as gone.
        roots: those to look at, by fingerprint.
        leaves: hits by root and fingerprint, most first; the tree has at most 100,000 nodes, so the last may be left
            out.
        door: runs what takes long.

    Raises:
        StoreError: a source can't be read.
    """
    nodes: dict[bytes, _Node] = {}
    gone: set[bytes] = set()
    grown: list[tuple[bytes, bytes]] = []
    for some in _parts(list(leaves), _LEAVES_AT_ONCE):
        if len(nodes) >= _MAX_NODES:
            break
        grown += some
        frontier, kinds = {cf: root for root, cf in some if cf not in nodes}, ("kv", *_END_KINDS)
        while frontier and len(nodes) < _MAX_NODES:
            found = await _look(view, model, list(frontier), kinds)
            for cf, heads in found.items():
                nodes[cf] = _Node(next(iter(heads.values())).parent, frontier[cf], set(heads))
            gone.update(frontier.keys() - found.keys())
            parents = {nodes[cf].parent: frontier[cf] for cf in found}
            frontier = {cf: of for cf, of in parents.items() if cf not in nodes and cf not in gone and cf not in roots}
            kinds = ("kv",)
    return await door.run(lambda: HotTree(view.model, roots, nodes, leaves, grown))


async def _look(
    view: PoolView, model: ModelIdentity, cfs: Sequence[bytes], kinds: Sequence[Kind]
) -> dict[bytes, dict[Kind, UnitHead]]:
    """Heads of the units with these fingerprints, by kind; only of those that are there."""
    found: dict[bytes, dict[Kind, UnitHead]] = {}
    for part in _parts([(cf, kind) for cf in cfs for kind in kinds], _KEYS_AT_ONCE):
        missing = list(part)
        for source in view.sources:
            raw = await source.heads([store_key(view.model, kind, cf) for cf, kind in missing])
            for (cf, kind), head in zip(missing, map(_peeked, raw), strict=True):
                if head is None or head.epoch < view.epoch or head.model_state != model.model_state:
                    continue
                if (head.cf, head.kind) == (cf, kind):
                    found.setdefault(cf, {})[kind] = head
            missing = [(cf, kind) for cf, kind in missing if kind not in found.get(cf, ())]
            if not missing:
                break
    return found


def _peeked(raw: bytes | None) -> UnitHead | None:
    try:
        return None if raw is None else peek(raw)
    except FormatError:
        return None


def _parts(each: Sequence, most: int) -> Iterator[Sequence]:  # type: ignore[type-arg]
    for start in range(0, len(each), most):
        yield each[start : start + most]
