"""Which runs in the context hold which tokens: finds what a new prompt can share without copying."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kitelib.engine.request import Run
from kitelib.fingerprint import BlockChain, Fingerprint

__all__ = ["RecentPrompts", "Residency"]

_MAX_CANDIDATES = 32


class Residency:
    """Index over the shared runs that hold a sequence, active and idle.

    A block's entry exists exactly as long as its KV is in the context: `forget` removes it before the memory goes.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._holders: dict[Fingerprint, dict[Run, None]] = {}
        self._roots: dict[Fingerprint, dict[Run, None]] = {}

    def update(self, run: Run) -> None:
        """Takes in what the run has computed since the last call."""
        if not run.shared or run.sequence is None:
            return
        self._roots.setdefault(run.chain.root, {})[run] = None
        full = min(run.computed // self._block_tokens, len(run.chain.fingerprints))
        for fingerprint in run.chain.fingerprints[run.indexed : full]:
            self._holders.setdefault(fingerprint, {})[run] = None
        run.indexed = max(run.indexed, full)

    def forget(self, run: Run) -> None:
        """The run's KV is about to go."""
        for fingerprint in run.chain.fingerprints[: run.indexed]:
            self._discard(self._holders, fingerprint, run)
        self._discard(self._roots, run.chain.root, run)
        run.indexed = 0

    @staticmethod
    def _discard(table: dict[Fingerprint, dict[Run, None]], key: Fingerprint, run: Run) -> None:
        holders = table.get(key)
        if holders is not None:
            holders.pop(run, None)
            if not holders:
                del table[key]

    def resident_blocks(self, chain: BlockChain) -> int:
        """How many of the first blocks are in the context right now. A hint: any thread may ask."""
        count = 0
        for fingerprint in chain.fingerprints:
            if fingerprint not in self._holders:
                break
            count += 1
        return count

    def candidates(self, chain: BlockChain, tokens: Sequence[int], limit: int) -> Iterator[tuple[Run, int]]:
        """Runs that share a prefix with `tokens`, the longest first, with the shared length (at most `limit`).

        The token ids are compared, not only the fingerprints.
        """
        size = self._block_tokens
        blocks, holders = 0, self._roots.get(chain.root, {})
        for fingerprint in chain.fingerprints[: limit // size]:
            found = self._holders.get(fingerprint)
            if not found:
                break
            blocks, holders = blocks + 1, found
        start = blocks * size
        matches = []
        # The youngest first: they are the likeliest to go on in the same way.
        for run in itertools.islice(reversed(holders), _MAX_CANDIDATES):
            if run.tokens[:start] != tokens[:start]:
                continue
            stop = min(limit, run.computed, start + size)
            length = start
            while length < stop and run.tokens[length] == tokens[length]:
                length += 1
            if length:
                matches.append((run, length))
        return iter(sorted(matches, key=lambda match: -match[1]))


class RecentPrompts:
    """The last prompts, to say where a new one leaves what was seen before. Bounded to `size` prompts."""

    def __init__(self, size: int = 64) -> None:
        self._prompts: collections.deque[tuple[Fingerprint, npt.NDArray[np.int32]]] = collections.deque(maxlen=size)

    def add(self, chain: BlockChain, tokens: Sequence[int]) -> None:
        """Remembers the tokens of a finished run."""
        self._prompts.append((chain.root, np.array(tokens, np.int32)))

    def clear(self) -> None:
        """Forgets them all."""
        self._prompts.clear()

    def divergence(self, chain: BlockChain, tokens: Sequence[int]) -> tuple[int, int | None] | None:
        """First position where `tokens` leaves its longest known run, and that run's token there.

        None if nothing is shared, or if all of `tokens` is known.
        """
        ids = np.array(tokens, np.int32)
        best, other = 0, None
        for root, known in self._prompts:
            if root != chain.root:
                continue
            length = min(len(ids), len(known))
            differs = np.flatnonzero(ids[:length] != known[:length])
            shared = int(differs[0]) if len(differs) else length
            if shared == len(ids):
                return None
            if shared > best or (shared == best and other is None):  # one that goes on says more
                best, other = shared, int(known[shared]) if shared < len(known) else None
        return (best, other) if best else None
