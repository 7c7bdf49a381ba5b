"""Where the tokens of each sequence lie in llama.cpp's unified KV cache.

The order matters: attention adds up cells in the order in which they lie in the cache, so a sequence gives the same
bits wherever it lies and whatever lies between its cells, as long as its cells ascend with the position. llama.cpp
puts new tokens into the first free cells after its search head. If no free cell is left below the head, that is
always at the end: so memory is only ever given back at the top (`CellMap.cut`), everything freed below stays
occupied by a dead sequence until the cache is compacted, and every sequence ascends by construction.
"""

from __future__ import annotations

import array
import dataclasses
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

__all__ = ["CellMap", "SequenceCells"]

Cells = npt.NDArray[np.int32]


@dataclasses.dataclass(slots=True)
class SequenceCells:
    """Cells of one sequence: `cells[p]` is the cell of position p, ascending."""

    slot: int
    adapter: str | None = None
    cells: array.array[int] = dataclasses.field(default_factory=lambda: array.array("i"))

    def as_array(self) -> Cells:
        """A copy of shape (num_tokens,)."""
        return np.array(self.cells, np.int32)


class CellMap:
    """Mirror of the cache's occupancy. `size` is in cells (tokens)."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.next_cell = 0
        self._owners = np.zeros(size, np.int32)
        self.dead: list[SequenceCells] = []

    @property
    def live_cells(self) -> int:
        """Cells that at least one live sequence needs."""
        return int(np.count_nonzero(self._owners))

    @property
    def wasted_cells(self) -> int:
        """Cells below the top that no live sequence needs."""
        return self.next_cell - self.live_cells

    def append(self, sequence: SequenceCells, count: int) -> None:
        """The next `count` cells now hold the next tokens of `sequence`."""
        first = self.next_cell
        sequence.cells.extend(range(first, first + count))
        self._owners[first : first + count] += 1
        self.next_cell += count

    def share(self, source: SequenceCells, target: SequenceCells, count: int) -> None:
        """`target`, which is empty, also owns the first `count` cells of `source`."""
        target.cells = source.cells[:count]
        self._owners[np.array(target.cells, np.int32)] += 1

    def bury(self, sequence: SequenceCells) -> None:
        """The sequence is not needed any more; its cells stay occupied until `cut`."""
        self._owners[np.array(sequence.cells, np.int32)] -= 1
        self.dead.append(sequence)

    def cut(self) -> tuple[list[tuple[SequenceCells, int]], list[SequenceCells]]:
        """Decides what can be removed from the cache without leaving a hole below a live cell.

        Returns:
            Trims (dead sequence, first position to remove) and dead sequences to remove whole. The map already
            counts them as gone.
        """
        used = np.flatnonzero(self._owners)
        top = int(used[-1]) + 1 if len(used) else 0
        trims, removed, kept = [], [], []
        for sequence in self.dead:
            cells = np.array(sequence.cells, np.int32)
            keep = int(np.searchsorted(cells, top))
            if not np.any(self._owners[cells[:keep]] == 0):
                removed.append(sequence)  # all that is left of it belongs to live sequences as well
                continue
            if keep < len(cells):
                trims.append((sequence, keep))
                del sequence.cells[keep:]
            kept.append(sequence)
        self.dead = kept
        self.next_cell = top
        return trims, removed

    def forget_dead(self) -> list[SequenceCells]:
        """All dead sequences, to be removed whole; compaction has to follow at once."""
        dead, self.dead = self.dead, []
        return dead

    def recount(self, sequences: Iterable[SequenceCells]) -> None:
        """Numbers all cells anew, for models whose cells are only counted: nothing is shared, order does not matter."""
        self._owners[:] = 0
        self.next_cell = 0
        for sequence in sequences:
            count = len(sequence.cells)
            del sequence.cells[:]
            self.append(sequence, count)

    def renumber(self, moved: Cells, sequences: list[SequenceCells]) -> None:
        """Cell i is now `moved[i]`, for all live sequences."""
        self._owners[:] = 0
        top = 0
        for sequence in sequences:
            cells = moved[np.array(sequence.cells, np.int32)]
            sequence.cells = array.array("i", cells.tobytes())
            self._owners[cells] += 1
            top = max(top, int(cells[-1]) + 1 if len(cells) else 0)
        self.next_cell = top
