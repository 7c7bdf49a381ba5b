"""Where the tokens of each sequence lie in llama.cpp's unified KV cache.

The order matters: attention adds up cells in the order in which they lie in the cache, so a sequence gives the same
bits wherever it lies and whatever lies between its cells, as long as its cells ascend with the position. llama.cpp
puts new tokens into the lowest free cells. So memory is only ever given back at the top (`CellMap.cut`), everything
freed below stays occupied by a dead sequence until the cache is compacted, and every sequence ascends by construction.

Tokens that a sequence is taken back from (rejected drafts) stay in its slot as its *tail* until the next step. Then
what lies at the top is cut off, the rest is free for the rows of that very step (see placing.py), and cells that none
of them may take go to the *graveyard*: one slot for all of them, which is emptied by compaction.
"""

from __future__ import annotations

import array
import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["CellMap", "Cells", "Cut", "SequenceCells"]

Cells = npt.NDArray[np.int32]
"""Cells by position, or where each cell went."""


def _none() -> array.array[int]:
    return array.array("i")


@dataclasses.dataclass(slots=True)
class SequenceCells:
    """Cells of one sequence.

    Attributes:
        slot: the library's id of the sequence.
        adapter: what it is computed with.
        cells: `cells[p]` is the cell of position p, ascending.
        tail: cells of the positions that follow, which it was taken back from but still has in the cache.
    """

    slot: int
    adapter: str | None = None
    cells: array.array[int] = dataclasses.field(default_factory=_none)
    tail: array.array[int] = dataclasses.field(default_factory=_none)

    def as_array(self) -> Cells:
        """A copy of shape (num_tokens,)."""
        return np.array(self.cells, np.int32)


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """What can be removed from the cache without leaving a hole below a live cell.

    Attributes:
        trims: dead sequences, and the first position to remove of each.
        removed: dead sequences to remove whole.
        graves: positions to remove from the graveyard.
    """

    trims: list[tuple[SequenceCells, int]]
    removed: list[SequenceCells]
    graves: list[int]


class CellMap:
    """Mirror of the cache's occupancy. `size` is in cells (tokens)."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.next_cell = 0
        self._owners = np.zeros(size, np.int32)  # live sequences that need the cell
        self._tails = np.zeros(size, np.int32)  # tails that hold it
        self._buried = np.zeros(size, np.int32)  # dead sequences that hold it, the graveyard included
        self.dead: list[SequenceCells] = []
        self.graveyard: dict[int, int] = {}
        """Cell -> position. Several cells may have the same position, and are then only removed together."""

    @property
    def live_cells(self) -> int:
        """Cells that at least one live sequence needs."""
        return int(np.count_nonzero(self._owners))

    @property
    def wasted_cells(self) -> int:
        """Cells below the top that no live sequence needs, and that the next step does not get rid of."""
        return self.next_cell - int(np.count_nonzero(self._owners + self._tails))

    def append(self, sequence: SequenceCells, count: int) -> None:
        """The next `count` cells now hold the next tokens of `sequence`."""
        self.assign(sequence, range(self.next_cell, self.next_cell + count))

    def assign(self, sequence: SequenceCells, cells: Sequence[int]) -> None:
        """These cells, ascending and free, now hold the next tokens of `sequence`."""
        if not len(cells):
            return
        sequence.cells.extend(cells)
        self._owners[np.asarray(cells, np.int32)] += 1
        self.next_cell = max(self.next_cell, cells[-1] + 1)

    def share(self, source: SequenceCells, target: SequenceCells, count: int) -> None:
        """`target`, which is empty, also owns the first `count` cells of `source`."""
        target.cells = source.cells[:count]
        self._owners[np.array(target.cells, np.int32)] += 1

    def take_back(self, sequence: SequenceCells, count: int) -> None:
        """The sequence needs its first `count` cells only; the others become part of its tail."""
        cells = sequence.cells[count:]
        del sequence.cells[count:]
        sequence.tail = cells + sequence.tail
        self._owners[np.array(cells, np.int32)] -= 1
        self._tails[np.array(cells, np.int32)] += 1

    def drop_tails(self, sequences: Sequence[SequenceCells]) -> list[int]:
        """These tails, all there are, are about to be removed from the cache; they stay in the records.

        Returns:
            The cells that become free, ascending, wherever they lie; `cut` or `bury_cell` has to deal with them.
        """
        for sequence in sequences:
            self._tails[np.array(sequence.tail, np.int32)] -= 1
        cells = {cell for sequence in sequences for cell in sequence.tail}
        return sorted(cell for cell in cells if not self._owners[cell] and not self._buried[cell])

    def bury_cell(self, cell: int, position: int) -> None:
        """A free cell stays occupied, in the graveyard."""
        self._buried[cell] += 1
        self.graveyard[cell] = position

    def bury(self, sequence: SequenceCells) -> None:
        """The sequence is not needed any more; its cells, the tail too, stay occupied until `cut`."""
        self._owners[np.array(sequence.cells, np.int32)] -= 1
        self._tails[np.array(sequence.tail, np.int32)] -= 1
        sequence.cells.extend(sequence.tail)
        del sequence.tail[:]
        self._buried[np.array(sequence.cells, np.int32)] += 1
        self.dead.append(sequence)

    def cut(self) -> Cut:
        """Gives back the top of the cache. The map already counts as gone what it returns."""
        used = np.flatnonzero(self._owners + self._tails)
        top, graves = self._cut_graves(int(used[-1]) + 1 if len(used) else 0)
        trims, removed, kept = [], [], []
        for sequence in self.dead:
            cells = np.array(sequence.cells, np.int32)
            keep = int(np.searchsorted(cells, top))
            if not np.any(self._owners[cells[:keep]] == 0):
                self._buried[cells] -= 1
                removed.append(sequence)  # all that is left of it belongs to live sequences as well
                continue
            if keep < len(cells):
                self._buried[cells[keep:]] -= 1
                trims.append((sequence, keep))
                del sequence.cells[keep:]
            kept.append(sequence)
        self.dead = kept
        self.next_cell = top
        return Cut(trims, removed, graves)

    def _cut_graves(self, top: int) -> tuple[int, list[int]]:
        """The top, raised above graves that can't be removed, and the positions of those that can."""
        above = sorted(cell for cell in self.graveyard if cell >= top)
        if not above:
            return top, []
        below = {position for cell, position in self.graveyard.items() if cell < top}
        stuck = 0  # how many of `above` have to stay, because one that does has the same position as one below it
        for index, cell in enumerate(above):
            if self.graveyard[cell] in below:
                below.update(self.graveyard[each] for each in above[stuck : index + 1])
                stuck = index + 1
        if stuck:
            top = above[stuck - 1] + 1
        positions = set()
        for cell in above[stuck:]:
            positions.add(self.graveyard.pop(cell))
            self._buried[cell] -= 1
        return top, sorted(positions)

    def forget_dead(self) -> list[SequenceCells]:
        """All dead sequences, to be removed whole, as the graveyard and the tails; compaction has to follow at once."""
        dead, self.dead = self.dead, []
        self.graveyard = {}
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
        """Cell i is now `moved[i]`, for all live sequences; there is nothing else."""
        for counts in (self._owners, self._tails, self._buried):
            counts[:] = 0
        top = 0
        for sequence in sequences:
            cells = moved[np.array(sequence.cells, np.int32)]
            sequence.cells = array.array("i", cells.tobytes())
            self._owners[cells] += 1
            top = max(top, int(cells[-1]) + 1 if len(cells) else 0)
        self.next_cell = top
