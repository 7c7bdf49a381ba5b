"""The mirror of the KV cache: sequences ascend, memory is given back at the top, nothing is lost in between.

The mirror is compared with a model that follows llama.cpp itself: a set of owners per cell, cleared slot by slot.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kitelib.backends.llama_cpp.cells import CellMap, SequenceCells

SIZE = 48


@dataclasses.dataclass
class Cache:
    """What the library would hold: cell -> slots that own it."""

    owners: list[set[int]] = dataclasses.field(default_factory=lambda: [set() for _ in range(SIZE)])

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
        start = len(sequence.cells)
        self.map.append(sequence, count)
        for cell in sequence.cells[start:]:
            self.cache.owners[cell].add(sequence.slot)

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
        before = {id(each): list(each.cells) for each in [*self.map.dead, sequence]}
        self.map.bury(sequence)
        trims, removed = self.map.cut()
        for dead, position in trims:
            for cell in before[id(dead)][position:]:
                self.cache.owners[cell].discard(dead.slot)
        for dead in removed:
            for cell in before[id(dead)]:
                self.cache.owners[cell].discard(dead.slot)

    def compact(self) -> None:
        for dead in self.map.forget_dead():
            for slots in self.cache.owners:
                slots.discard(dead.slot)
        moved = np.arange(SIZE, dtype=np.int32)
        used = [cell for cell, slots in enumerate(self.cache.owners) if slots]
        moved[used] = np.arange(len(used))
        owners = [self.cache.owners[cell] for cell in used]
        self.cache.owners = owners + [set() for _ in range(SIZE - len(owners))]
        self.map.renumber(moved, self.live)

    def check(self) -> None:
        live_slots = {sequence.slot for sequence in self.live}
        assert self.map.next_cell == self.cache.first_free_above()
        # No hole, so the library can only append: that is what makes every sequence ascend.
        assert self.cache.holes() == []
        live = [cell for cell, slots in enumerate(self.cache.owners) if slots & live_slots]
        assert self.map.live_cells == len(live)
        assert self.map.wasted_cells == self.map.next_cell - len(live)
        if live:
            assert self.map.next_cell == live[-1] + 1  # nothing dead at the top
        else:
            assert self.map.next_cell == 0
        for sequence in self.live:
            cells = list(sequence.cells)
            assert cells == sorted(set(cells))
            assert cells == [cell for cell, slots in enumerate(self.cache.owners) if sequence.slot in slots]
        for dead in self.map.dead:
            assert list(dead.cells) == [cell for cell, slots in enumerate(self.cache.owners) if dead.slot in slots]
            # Kept only as long as it fills a hole of its own.
            assert any(self.cache.owners[cell] - live_slots == self.cache.owners[cell] for cell in dead.cells)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["create", "append", "append", "share", "bury", "compact"]),
        st.integers(0, 9),
        st.integers(0, 12),
    ),
    max_size=40,
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
