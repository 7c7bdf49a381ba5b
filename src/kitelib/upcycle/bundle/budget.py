"""Which units a bundle keeps when not all fit: those that save the most tokens per byte."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Sequence

from kitelib.errors import InvalidRequestError

__all__ = ["Candidate", "choose"]


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """A unit that may go into a bundle.

    Attributes:
        key: names it among the candidates.
        parent: key of the unit without which this one is of no use: of a KV block the one before it, of logits their
            prompt's last KV. None, or a key that no candidate has, if it stands alone.
        num_bytes: what it takes in the file.
        saved_tokens: tokens that need not be computed whenever it is used.
        hits: how often it is expected to be used. Its value is ``saved_tokens * hits``.
    """

    key: str
    parent: str | None
    num_bytes: int
    saved_tokens: float
    hits: float


def choose(candidates: Sequence[Candidate], max_bytes: int) -> list[int]:
    """Indices, ascending, of the candidates to keep: at most `max_bytes` together, none without its parent.

    This is the knapsack problem with precedence constraints that form trees (tree knapsack; Johnson and Niemi, 1983),
    which is NP-hard; exact solutions take time in proportion to the budget in bytes. A greedy order is enough here: units
    are small beside a bundle, and what it loses is at most the value of the first group, as below, that does not fit.

    Taking units by their own value per byte would never get to valuable ones behind a parent of little value. So the
    order is that of Horn (1972) for jobs with tree-like precedence: the unit of the highest value per byte joins its
    parent's group, which from then on counts with the value and the bytes of both, until no group is worth more per
    byte than the one it hangs on. Where a group does not fit, those of its units that fit are taken. At last the
    result is compared with the one most valuable unit that fits with its ancestors, since a greedy choice may spend the
    budget on small units that leave no room for it.

    Where no unit is worth more per byte than its parent (a prefix is used at least as often as what continues it) the
    result has at least half the value of the best choice, and its value never falls when the budget grows. With units
    of one size it is the best choice. Equal values keep the order given. Takes O(n log n).

    Args:
        max_bytes: the budget; 0 or less keeps nothing that has bytes.

    Raises:
        InvalidRequestError: two candidates have one key, or a number is negative or not finite.
    """
    forest = _Forest(candidates, max_bytes)
    chosen: set[int] = set()
    left = max_bytes
    for index in forest.order():
        parent = forest.parents[index]
        if candidates[index].num_bytes <= left and (parent is None or parent in chosen):
            chosen.add(index)
            left -= candidates[index].num_bytes
    alone = forest.best_path()
    if sum(map(forest.value, alone)) > sum(map(forest.value, sorted(chosen))):
        chosen = set(alone)
    return sorted(chosen)


class _Forest:
    """The candidates that fit the budget together with all they hang on; indices everywhere.

    Attributes:
        parents: index of each unit's parent, None for a root.
        reachable: parents before children; what fits. Units whose parents form a circle are never reached.
    """

    def __init__(self, candidates: Sequence[Candidate], max_bytes: int) -> None:
        self._candidates = candidates
        by_key: dict[str, int] = {}
        for index, each in enumerate(candidates):
            if by_key.setdefault(each.key, index) != index:
                raise InvalidRequestError(f"two candidates for a bundle have the key {each.key!r}; keys must differ")
            for name in ("num_bytes", "saved_tokens", "hits"):
                number = getattr(each, name)
                if not (math.isfinite(number) and number >= 0):
                    raise InvalidRequestError(f"{name} of the candidate {each.key!r} is {number}; give at least 0")
        self.parents = [None if each.parent is None else by_key.get(each.parent) for each in candidates]
        children: dict[int | None, list[int]] = {}
        for index, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(index)
        self._depth: dict[int, int] = {}
        self._path_value: dict[int, float] = {}
        self._path_bytes: dict[int, int] = {}
        self.reachable: list[int] = []
        waiting = children.get(None, [])[::-1]
        while waiting:
            index = waiting.pop()
            parent = self.parents[index]
            num_bytes = candidates[index].num_bytes + (0 if parent is None else self._path_bytes[parent])
            if num_bytes > max_bytes:
                continue  # neither this one nor anything behind it will ever fit
            self._path_bytes[index] = num_bytes
            self._path_value[index] = self.value(index) + (0.0 if parent is None else self._path_value[parent])
            self._depth[index] = 0 if parent is None else self._depth[parent] + 1
            self.reachable.append(index)
            waiting.extend(reversed(children.get(index, [])))

    def value(self, index: int) -> float:
        """Tokens that a unit is expected to save."""
        return self._candidates[index].saved_tokens * self._candidates[index].hits

    def best_path(self) -> list[int]:
        """The unit that is worth most together with its ancestors, and those."""
        index = max(self.reachable, key=lambda each: (self._path_value[each], -each), default=None)
        path = []
        while index is not None:
            path.append(index)
            index = self.parents[index]
        return path

    def order(self) -> list[int]:
        """Horn's order: groups of falling value per byte, each unit after its parent."""
        value = {index: self.value(index) for index in self.reachable}  # of the group whose first unit this is
        num_bytes = {index: self._candidates[index].num_bytes for index in self.reachable}
        first = {index: index for index in self.reachable}  # towards the first unit of the group (union-find)
        following: dict[int, int] = {}  # the unit after this one in its group
        last = {index: index for index in self.reachable}  # the last unit of the group whose first this is
        settled: set[int] = set()  # first units of groups that have their place in the order
        version = dict.fromkeys(self.reachable, 0)

        def entry(head: int) -> tuple[float, int, int, int]:
            # A parent goes before a child of the same value per byte, then the order given decides.
            return -value[head] / max(1, num_bytes[head]), self._depth[head], head, version[head]

        heap = list(map(entry, self.reachable))
        heapq.heapify(heap)
        order = []
        while heap:
            _, _, head, seen = heapq.heappop(heap)
            if seen != version[head]:
                continue
            parent = self.parents[head]
            above = None if parent is None else _find(first, parent)
            if above is None or above in settled:
                settled.add(head)
                unit: int | None = head
                while unit is not None:
                    order.append(unit)
                    unit = following.get(unit)
                continue
            value[above] += value[head]
            num_bytes[above] += num_bytes[head]
            following[last[above]] = head
            last[above] = last[head]
            first[head] = above
            version[above] += 1
            heapq.heappush(heap, entry(above))
        return order


def _find(first: dict[int, int], index: int) -> int:
    """The first unit of a unit's group; halves the way there for the next time."""
    while first[index] != index:
        first[index] = first[first[index]]
        index = first[index]
    return index
