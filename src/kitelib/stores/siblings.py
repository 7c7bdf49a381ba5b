"""Which units go on from the same block: finds the one whose tokens agree longest with a prompt.

Prompts that share a prefix hardly ever part at a block boundary. The block in which they part is stored under other
tokens, but its first rows are what the new prompt needs: the KV of a token does not depend on later tokens.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from kitelib.fingerprint import Fingerprint, TokenIds, as_token_ids

__all__ = ["Siblings"]

_MAX_PER_PARENT = 16


class Siblings:
    """Bounded index over KV units: parent fingerprint -> fingerprints and token ids. A hint: units may be gone.

    An entry takes about 400 bytes; the least recently added parents go first. Used on the event loop only.
    """

    def __init__(self, max_parents: int = 16384) -> None:
        self._max_parents = max_parents
        self._parents: OrderedDict[bytes, OrderedDict[Fingerprint, npt.NDArray[np.uint32]]] = OrderedDict()

    def add(self, parent: bytes, cf: Fingerprint, token_ids: npt.NDArray[np.uint32]) -> None:
        """Takes in a stored unit."""
        units = self._parents.setdefault(parent, OrderedDict())
        self._parents.move_to_end(parent)
        units[cf] = token_ids
        units.move_to_end(cf)
        if len(units) > _MAX_PER_PARENT:
            units.popitem(last=False)
        if len(self._parents) > self._max_parents:
            self._parents.popitem(last=False)

    def best(
        self, parent: bytes, token_ids: TokenIds, max_tokens: int
    ) -> tuple[Fingerprint, npt.NDArray[np.uint32], int] | None:
        """The unit of at most `max_tokens` tokens after `parent` that shares the most first ones with `token_ids`, and
        how many, at most all but the last of `max_tokens`: a whole block has its own key. None if there is none."""
        ids = as_token_ids(token_ids)[: max_tokens - 1]
        best: tuple[Fingerprint, npt.NDArray[np.uint32], int] | None = None
        for cf, known in self._parents.get(parent, {}).items():
            if len(known) > max_tokens:
                continue
            length = min(len(ids), len(known))
            differs = np.flatnonzero(ids[:length] != known[:length])
            common = int(differs[0]) if len(differs) else length
            if common > (best[2] if best else 0):
                best = cf, known, common
        return best

    def discard(self, parent: bytes, cf: Fingerprint) -> None:
        """The unit turned out to be gone."""
        units = self._parents.get(parent)
        if units is not None:
            units.pop(cf, None)
            if not units:
                del self._parents[parent]

    def clear(self) -> None:
        """Forgets everything."""
        self._parents.clear()
