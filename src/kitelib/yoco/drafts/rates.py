"""How often predictions of each kind came true: what the chances of a proposal are made of."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Final

__all__ = ["Rates"]

_PRIOR_WEIGHT: Final = 12.0  # observations that a prior counts as
_OBJECT_BYTES: Final = 64
_MOST_WEIGHT: Final = 400.0  # observations after which older ones count half


class Rates:
    """Shares of predictions that came true, one per cell; recent ones count more.

    Args:
        priors: the shares before anything was observed.

    Attributes:
        values: the shares now; to be read only.
    """

    __slots__ = ("_hits", "_weights", "values")

    def __init__(self, priors: Sequence[float]) -> None:
        self.values = array("d", priors)
        self._hits = array("d", (_PRIOR_WEIGHT * prior for prior in priors))
        self._weights = array("d", (_PRIOR_WEIGHT,)) * len(priors)

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return 3 * sys.getsizeof(self.values) + _OBJECT_BYTES

    def note(self, cell: int, hit: bool) -> None:
        """Takes in one prediction of the cell, and whether it came true."""
        weight = self._weights[cell] + 1.0
        hits = self._hits[cell] + hit
        self.values[cell] = hits / weight
        if weight >= _MOST_WEIGHT:
            weight *= 0.5
            hits *= 0.5
        self._weights[cell] = weight
        self._hits[cell] = hits
