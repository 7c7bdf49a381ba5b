"""The mirror of the KV cache: sequences ascend, memory is given back at the top, nothing is lost in between.

The mirror is compared with a model that follows llama.cpp itself: a set of owners per cell, cleared slot by slot.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kitelib.backends.llama_cpp.cells import CellMap, Cut, SequenceCells
from kitelib.backends.llama_cpp.placing import Piece, place

SIZE = 48
GRAVEYARD = 0


@dataclasses.dataclass
class Cache:
    """What the library would hold: cell -> slots that own it, and the position of its token."""

    owners: list[set[int]] = dataclasses.field(default_factory=lambda: [set() for _ in range(SIZE)])
    positions: list[int] = dataclasses.field(default_factory=lambda: [-1] * SIZE)

    def remove(self, slot: int, start: int, stop: int) -> None:
        """`llama_memory_seq_rm`, which knows positions, but no cells."""
        for cell, position in enumerate(self.positions):
            if start <= position < stop:
                self.owners[cell].discard(slot)

    def first_free_above(self) -> int:
        """Where the library would put the next token if nothing below the highest used cell is free."""
        used = [cell for cell, slots in enumerate(self.owners) if slots]
        return used[-1] + 1 if used else 0

    def holes(self) -> list[int]:
        return [cell for cell in range(self.first_free_above()) if not self.owners[cell]]


class World:
    """A `CellMap` beside a `Cache`, driven by the same operations."""

    def __init__(self) -> None:
        self.map = CellMap(SIZE)
        self.cache = Cache()
        self.live: list[SequenceCells] = []
        self.slots = iter(range(1, 10_000))

    def append(self, sequence: SequenceCells, count: int) -> None:
        count = min(count, SIZE - self.map.next_cell)
        self.step([(sequence, count, 0)] if count else [])

    def step(self, work: list[tuple[SequenceCells, int, int]]) -> None:
        """Tokens and drafts of several sequences, as `LlamaContext.step` processes them."""
        tails = [sequence for sequence in self.live if sequence.tail]
        free = self.map.drop_tails(tails)
        self.clear(self.map.cut())
        holes = [cell for cell in free if cell < self.map.next_cell]
        pieces = [Piece(sequence.cells[-1] if sequence.cells else -1, *counts) for sequence, *counts in work]
        placement = place(pieces, holes, self.map.next_cell)
        unfilled = set(placement.unfilled)
        for sequence in tails:
            for position, cell in enumerate(sequence.tail, len(sequence.cells)):
                if cell in unfilled:
                    unfilled.remove(cell)
                    self.map.bury_cell(cell, position)
                    self.cache.owners[cell].add(GRAVEYARD)
            self.cache.remove(sequence.slot, len(sequence.cells), SIZE)
            del sequence.tail[:]
        for row in range(sum(tokens for _, tokens, _ in work)):  # the library: each row takes the lowest free cell
            (index,) = [index for index, rows in enumerate(placement.rows) if row in rows]
            cell = next(cell for cell, slots in enumerate(self.cache.owners) if not slots)
            assert placement.cells[row] == cell
            self.cache.owners[cell].add(work[index][0].slot)
            self.cache.positions[cell] = len(work[index][0].cells) + list(placement.rows[index]).index(row)
        for (sequence, _, _), rows in zip(work, placement.rows, strict=True):
            self.map.assign(sequence, [placement.cells[row] for row in rows])

    def create(self) -> SequenceCells:
        self.live.append(SequenceCells(next(self.slots)))
        return self.live[-1]

    def share(self, source: SequenceCells, count: int) -> None:
        target = self.create()
        self.map.share(source, target, min(count, len(source.cells)))
        for cell in target.cells:
            self.cache.owners[cell].add(target.slot)

    def bury_and_cut(self, sequence: SequenceCells) -> None:
        self.live.remove(sequence)
        self.map.bury(sequence)
        self.clear(self.map.cut())

    def clear(self, cut: Cut) -> None:
        for dead, position in cut.trims:
            self.cache.remove(dead.slot, position, SIZE)
        for dead in cut.removed:
            self.cache.remove(dead.slot, 0, SIZE)
        for position in cut.graves:
            self.cache.remove(GRAVEYARD, position, position + 1)

    def compact(self) -> None:
        for dead in self.map.forget_dead():
            self.cache.remove(dead.slot, 0, SIZE)
        self.cache.remove(GRAVEYARD, 0, SIZE)
        for sequence in self.live:
            self.cache.remove(sequence.slot, len(sequence.cells), SIZE)
            del sequence.tail[:]
        moved = np.arange(SIZE, dtype=np.int32)
        used = [cell for cell, slots in enumerate(self.cache.owners) if slots]
        moved[used] = np.arange(len(used))
        free = SIZE - len(used)
        self.cache.owners = [self.cache.owners[cell] for cell in used] + [set() for _ in range(free)]
        self.cache.positions = [self.cache.positions[cell] for cell in used] + [-1] * free
        self.map.renumber(moved, self.live)

    def check(self) -> None:
        assert self.map.next_cell == self.cache.first_free_above()
        # No hole, so the library can only append: that is what makes every sequence ascend.
        assert self.cache.holes() == []
        live = {cell for sequence in self.live for cell in sequence.cells}
        tails = {cell for sequence in self.live for cell in sequence.tail}
        assert self.map.live_cells == len(live)
        assert self.map.wasted_cells == self.map.next_cell - len(live | tails)
        # Nothing dead at the top, but for graves that have the position of one further down.
        if (top := self.map.next_cell - 1) >= 0 and top not in live | tails:
            assert top in self.map.graveyard
            assert list(self.map.graveyard.values()).count(self.map.graveyard[top]) > 1
        for sequence in self.live:
            cells = [*sequence.cells, *sequence.tail]
            assert cells == sorted(set(cells))
            assert cells == [cell for cell, slots in enumerate(self.cache.owners) if sequence.slot in slots]
            assert [self.cache.positions[cell] for cell in cells] == list(range(len(cells)))
        for dead in self.map.dead:
            assert list(dead.cells) == [cell for cell, slots in enumerate(self.cache.owners) if dead.slot in slots]
            # Kept only as long as it fills a hole of its own.
            assert any(cell not in live for cell in dead.cells)
        graves = {
            cell: self.cache.positions[cell] for cell, slots in enumerate(self.cache.owners) if GRAVEYARD in slots
        }
        assert self.map.graveyard == graves
        assert not live & set(graves)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["create", "append", "append", "share", "bury", "compact", *["truncate", "step"] * 3]),
        st.integers(0, 9),
        st.integers(0, 12),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(OPERATIONS)
def test_every_sequence_of_operations_keeps_the_promises(operations: list[tuple[str, int, int]]) -> None:
    world = World()
    for name, which, count in operations:
        sequence = world.live[which % len(world.live)] if world.live else None
        if name == "create":
            world.create()
        elif name == "compact":
            world.compact()
        elif sequence is None:
            continue
        elif name == "append":
            world.append(sequence, count)
        elif name == "truncate":
            world.map.take_back(sequence, max(0, len(sequence.cells) - count))
        elif name == "step":  # some of the sequences, each with another number of drafts
            work = [
                (each, 1 + (count + i) % 4, (count + i) % 4) for i, each in enumerate(world.live) if (i + which) % 3
            ]
            if sum(tokens for _, tokens, _ in work) <= SIZE - world.map.next_cell:
                world.step(work)
        elif name == "share":
            world.share(sequence, count)
        else:
            world.bury_and_cut(sequence)
        world.check()


def world_with(*counts: int) -> tuple[World, list[SequenceCells]]:
    world = World()
    sequences = [world.create() for _ in counts]
    for sequence, count in zip(sequences, counts, strict=True):
        world.append(sequence, count)
    return world, sequences


def test_the_top_is_given_back_at_once() -> None:
    world, (_, second) = world_with(5, 7)
    world.bury_and_cut(second)
    assert (world.map.next_cell, world.map.dead) == (5, [])


def test_what_dies_below_a_live_cell_stays_until_the_top_is_free() -> None:
    world, (first, second) = world_with(5, 7)
    world.bury_and_cut(first)
    assert (world.map.next_cell, world.map.live_cells, world.map.wasted_cells) == (12, 7, 5)
    assert world.map.dead == [first]
    world.bury_and_cut(second)
    assert (world.map.next_cell, world.map.dead) == (0, [])


def test_a_dead_sequence_is_trimmed_to_what_fills_a_hole() -> None:
    world, (first, second) = world_with(5, 2)
    world.append(first, 4)
    world.bury_and_cut(first)  # cells 0-4 lie below the second's, 7-10 above
    assert list(first.cells) == [0, 1, 2, 3, 4]
    assert world.map.next_cell == 7
    assert list(second.cells) == [5, 6]


def test_shared_cells_live_as_long_as_one_owner() -> None:
    world, (first,) = world_with(6)
    world.share(first, 4)
    world.bury_and_cut(first)
    assert (world.map.live_cells, world.map.next_cell, world.map.dead) == (4, 4, [])
    world.bury_and_cut(world.live[0])
    assert world.map.next_cell == 0


def test_after_compaction_the_live_cells_are_the_lowest_in_the_same_order() -> None:
    world, (first, second, third) = world_with(4, 3, 5)
    world.append(second, 2)
    world.bury_and_cut(first)
    world.bury_and_cut(third)
    world.compact()
    assert list(second.cells) == [0, 1, 2, 3, 4]
    assert (world.map.next_cell, world.map.wasted_cells) == (5, 0)
    world.check()


def test_cells_as_an_array_are_a_copy() -> None:
    _, (first,) = world_with(3)
    copy: Any = first.as_array()
    copy[0] = 9
    assert list(first.cells) == [0, 1, 2]
    assert copy.dtype == np.int32


def test_rejected_drafts_at_the_top_leave_nothing() -> None:
    world, (first, second) = world_with(3, 3)
    world.step([(first, 3, 2), (second, 3, 2)])
    assert list(first.cells[3:]) == [6, 8, 10]  # first all tokens that stay, then the guesses by depth
    assert list(second.cells[3:]) == [7, 9, 11]
    world.map.take_back(first, 4)
    world.map.take_back(second, 4)
    world.check()
    world.step([(first, 1, 0)])
    assert list(first.cells[3:]) == [6, 8]
    assert (world.map.next_cell, world.map.wasted_cells, world.map.graveyard) == (9, 0, {})


def test_holes_of_rejected_drafts_are_filled_by_the_next_step() -> None:
    world, (first, second) = world_with(3, 3)
    world.step([(first, 3, 2), (second, 3, 2)])
    world.map.take_back(first, 4)  # leaves cells 8 and 10; the second keeps 9 and 11
    world.step([(second, 1, 0), (first, 3, 2)])
    assert list(first.cells[3:]) == [6, 8, 10, 13]
    assert list(second.cells[3:]) == [7, 9, 11, 12]
    assert (world.map.wasted_cells, world.map.graveyard) == (0, {})


def test_a_hole_that_no_row_may_fill_is_kept_occupied() -> None:
    world, (first, second) = world_with(3, 3)
    world.step([(first, 3, 2), (second, 3, 2)])
    world.map.take_back(first, 4)
    assert world.map.wasted_cells == 0
    world.step([(second, 2, 1)])  # all of it has to lie above cell 11
    assert (world.map.graveyard, world.map.wasted_cells) == ({8: 4, 10: 5}, 2)
    world.check()
    world.step([(first, 1, 0)])
    assert list(first.cells[3:]) == [6, 14]
    world.compact()
    assert (world.map.graveyard, world.map.wasted_cells, world.map.next_cell) == ({}, 0, 13)
    world.check()


def test_what_a_fork_still_needs_is_no_hole() -> None:
    world, (first,) = world_with(6)
    world.share(first, 5)
    world.map.take_back(first, 2)
    world.step([(first, 2, 0)])
    assert list(first.cells) == [0, 1, 5, 6]
    assert list(world.live[1].cells) == [0, 1, 2, 3, 4]
    world.check()


def test_graves_at_one_position_are_given_back_together() -> None:
    world = World()
    world.map.next_cell = 6
    for cell, position in ((1, 4), (3, 7), (4, 4), (5, 8)):
        world.map.bury_cell(cell, position)
    world.map.append(world.create(), 0)
    # Nothing is live, so nothing is below the top, and all can go.
    assert world.map.cut() == Cut([], [], [4, 7, 8])
    sequence = world.create()
    world.map.assign(sequence, [0, 2])
    for cell, position in ((1, 4), (3, 7), (4, 4), (5, 8)):
        world.map.bury_cell(cell, position)
    assert world.map.cut() == Cut([], [], [8])  # position 4 is below the top, so cell 4 stays, and cell 3 below it
    assert (world.map.next_cell, world.map.graveyard) == (5, {1: 4, 3: 7, 4: 4})
