"""Which value a full store gives up next: leaves before their parents, then what is least likely to pay for its bytes."""

from __future__ import annotations

import heapq
import math
import time
import zlib
from array import array
from typing import Final

from kitelib.abc import Clock
from kitelib.fingerprint import model_key, store_key
from kitelib.upcycle.unit import UnitHead

__all__ = ["EvictionPolicy"]

_WORTH: Final = 0.5
"""What one doubling of uses, or of cost per byte, is worth: this many mean times to the first reuse."""
_RATE: Final = 1 / 500
"""Weight of one more sample in that mean."""
_MAX_GAP_S: Final = 30 * 86400.0
_LOG2: Final = (0.0, *map(math.log2, range(1, 65)))
"""log2 of a number of uses; more uses than that are not told apart."""
_MAX_USES: Final = len(_LOG2) - 1
_GAINS: Final = tuple(step / 4 for step in range(-12, 13))
"""log2 of the cost per byte relative to the average, in steps: an eighth to eight times."""
_STEP_TOKENS: Final = 16
"""Tokens of prompt that cost about as much as one step that computes a single token."""
_SLACK: Final = 64


class _Node:
    """One key: what is known of it or, if it was never used, only that units that go on from it are there."""

    __slots__ = ("children", "entry", "gain", "key", "parent", "score", "used_at", "uses")

    def __init__(self, key: str) -> None:
        self.key = key
        self.parent: _Node | None = None
        self.children = 0
        self.uses = 0
        self.used_at = self.score = self.gain = 0.0
        self.entry: _Entry | None = None

    def __lt__(self, other: _Node) -> bool:
        return False  # equal scores: any order


_Entry = tuple[float, _Node]


class EvictionPolicy:
    """Orders the keys of one store by what losing them would cost. Thread-compatible: the store holds its own lock.

    A unit is never the victim while a unit that goes on from it is in the store, unless all have such units: without
    its parent a block is of no use to any prompt. Among the leaves the lowest score goes::

        score = last use + 0.5 * gap * (log2(uses) + log2(recompute cost per byte / average))

    where gap is the mean time between the first and the second use, learned while running. Where values stay much
    longer than the gap, that is LRU; where they can't stay that long, only those that came back are worth their
    bytes. So uses are remembered for some time after a value has gone. Recency and frequency as one number of the
    last use's time: LRFU (Lee et al., IEEE Transactions on Computers 50(12), 2001); the memory of what has gone: 2Q (Johnson
    and Shasha, VLDB 1994) and ARC (Megiddo and Modha, FAST 2003); cost per byte: GreedyDual-Size (Cao and Irani, USITS 1997).

    Every operation takes O(log n), amortized; one key takes 220 to 270 bytes besides its
    string, 36 to 72 more once keys have gone, and as much again with a string for a parent that is not in the store.

    Args:
        clock: source of the default `used_at`.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._time = time.time if clock is None else clock.time
        self._now = 0.0
        self._nodes: dict[str, _Node] = {}
        self._num_present = 0
        self._leaves: list[_Entry] = []
        self._past = _Past(self._time())
        self._gap = 0.0
        self._num_gaps = 0
        self._tokens = self._token_bytes = 0
        self._rest: list[str] = []

    def __len__(self) -> int:
        return self._num_present

    def __contains__(self, key: object) -> bool:
        node = self._nodes.get(key) if isinstance(key, str) else None
        return node is not None and node.uses > 0

    def add(self, key: str, num_bytes: int, *, head: UnitHead | None = None, used_at: float | None = None) -> None:
        """Adds a key. If it is there already, that is one more use of it, and the rest is replaced.

        Args:
            num_bytes: bytes that its eviction gives back.
            head: what the value says of itself; None if it is no unit.
            used_at: when it was last used, seconds since 1970; default, and latest, is now.
        """
        self.discard(key)
        before = self._past.take(key)
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = _Node(key)
        self._num_present += 1
        self._link(node, head)
        node.gain = self._gain_of(num_bytes, head)
        if before is None:
            self._use(node, self._when(used_at))
        else:
            node.uses, node.used_at = before
            self._use(node, max(node.used_at, self._when(used_at)))
        if not node.children:
            self._push(node)

    def touch(self, key: str, used_at: float | None = None) -> None:
        """Notes a use; nothing happens if the key is not there."""
        node = self._nodes.get(key)
        if node is not None and node.uses:
            self._use(node, max(node.used_at, self._when(used_at)))

    def discard(self, key: str) -> None:
        """Forgets a key; nothing happens if it is not there."""
        node = self._nodes.get(key)
        if node is None or not node.uses:
            return
        self._past.note(key, node.uses, node.used_at, self._num_present)
        node.uses = 0
        node.entry = None
        self._num_present -= 1
        parent, node.parent = node.parent, None
        if not node.children:
            del self._nodes[key]
        if parent is not None:
            self._release(parent)
        if len(self._leaves) > 2 * self._num_present + _SLACK:
            self._leaves = [entry for entry in self._leaves if entry[1].entry is entry]
            heapq.heapify(self._leaves)

    def victim(self) -> str | None:
        """The key to evict next, which stays until `discard`; None if there is none."""
        leaves = self._leaves
        while leaves:
            entry = leaves[0]
            score, node = entry
            if node.entry is not entry:
                heapq.heappop(leaves)  # discarded or replaced
            elif node.children:
                heapq.heappop(leaves)
                node.entry = None  # comes back when its last child goes
            elif node.score > score:
                node.entry = (node.score, node)
                heapq.heapreplace(leaves, node.entry)
            else:
                return node.key
        return self._any()

    def _any(self) -> str | None:
        """Some key, where all have children. Only made-up parents can form such a circle."""
        while self._num_present:
            while self._rest:
                if self._rest[-1] in self:
                    return self._rest[-1]
                self._rest.pop()
            # All that was listed before has gone, so this costs no more than adding what is listed now did.
            self._rest = [node.key for node in self._nodes.values() if node.uses]
        return None

    def _when(self, used_at: float | None) -> float:
        """The time of a use; without a given time always a later one than before, so that the order is kept."""
        now = self._time()
        if used_at is None:
            self._now = now = now if now > self._now else math.nextafter(self._now, math.inf)
            return now
        return used_at if -math.inf < used_at <= now else now

    def _use(self, node: _Node, used_at: float) -> None:
        if node.uses == 1:
            gap = used_at - node.used_at
            if gap <= _MAX_GAP_S:
                self._num_gaps += 1
                self._gap += (gap - self._gap) * max(1 / self._num_gaps, _RATE)
        uses = node.uses = min(node.uses + 1, _MAX_USES)
        node.used_at = used_at
        bonus = _LOG2[uses] + node.gain
        # While it is in the heap a score only grows: its place there is put right when it comes to the top.
        score = used_at + _WORTH * self._gap * bonus if bonus else used_at
        if node.entry is None or score > node.score:
            node.score = score

    def _gain_of(self, num_bytes: int, head: UnitHead | None) -> float:
        """log2 of the recompute cost per byte, relative to that of all KV units so far."""
        if head is None or num_bytes <= 0 or head.kind == "lora":
            return 0.0
        if head.kind == "kv":
            tokens = head.num_tokens
            self._tokens += tokens
            self._token_bytes += num_bytes
        elif head.kind == "logits":
            tokens = _STEP_TOKENS
        else:
            tokens = _STEP_TOKENS * (1 + head.data_bytes // 4)  # a completion: one step per token of four bytes
        if not tokens or not self._tokens:
            return 0.0
        gain = math.log2(tokens / num_bytes * self._token_bytes / self._tokens)
        return _GAINS[min(max(round(4 * gain) + 12, 0), 24)]

    def _link(self, node: _Node, head: UnitHead | None) -> None:
        if head is None:
            return
        key = store_key(model_key(head.model_state), "kv", head.parent)
        if key == node.key:
            return
        parent = self._nodes.get(key)
        if parent is None:
            parent = self._nodes[key] = _Node(key)
        parent.children += 1
        node.parent = parent

    def _release(self, parent: _Node) -> None:
        parent.children -= 1
        if parent.children:
            return
        if not parent.uses:
            del self._nodes[parent.key]
        elif parent.entry is None:
            self._push(parent)

    def _push(self, node: _Node) -> None:
        node.entry = (node.score, node)
        heapq.heappush(self._leaves, node.entry)


class _Past:
    """Uses of keys that have gone: a table with a fixed place per key, where the newest stays.

    Four to eight places for each key that the store holds, nine bytes each. Two keys that share a place and 32 bits of
    hash are taken for each other, which only costs a wrong guess.
    """

    def __init__(self, now: float) -> None:
        self._base = now  # four bytes are enough for times that count from here
        self._make(_SLACK)

    def _make(self, size: int) -> None:
        self._mask = size - 1
        self._hashes = array("I", bytes(size * array("I").itemsize))
        self._uses = array("B", bytes(size))
        self._used_at = array("f", bytes(size * 4))

    def note(self, key: str, uses: int, used_at: float, num_present: int) -> None:
        """Remembers a key that goes from a store of `num_present`."""
        if 4 * num_present > self._mask + 1:
            self._grow()
        code = zlib.crc32(key.encode())
        place = code & self._mask
        self._hashes[place], self._uses[place], self._used_at[place] = code, uses, used_at - self._base

    def take(self, key: str) -> tuple[int, float] | None:
        """Uses and last use of a key that has come back, and forgets it; None if it is not remembered."""
        code = zlib.crc32(key.encode())
        place = code & self._mask
        uses = self._uses[place]
        if not uses or self._hashes[place] != code:
            return None
        self._uses[place] = 0
        return uses, self._base + self._used_at[place]

    def _grow(self) -> None:
        old = [row for row in zip(self._hashes, self._uses, self._used_at, strict=True) if row[1]]
        self._make(2 * (self._mask + 1))
        for code, uses, used_at in old:
            place = code & self._mask
            self._hashes[place], self._uses[place], self._used_at[place] = code, uses, used_at
