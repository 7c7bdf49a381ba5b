"""Block tables: who holds which block, copy-on-write, and that what `room` promises can be had."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitelib.abc import SequenceId
from kitelib.backends.torch_engine.blocks import BlockTables
from kitelib.errors import BackendError

SIZE = 4
BLOCKS = 12
SEQUENCES = 5


class Memory:
    """Block tables over memory that remembers what was written, beside what each sequence ought to hold."""

    def __init__(self, num_blocks: int = BLOCKS, sequences: int = SEQUENCES) -> None:
        self.tables = BlockTables(num_blocks, SIZE, sequences, self._copy)
        self.cells = [[-1] * SIZE for _ in range(num_blocks)]
        self.wanted: dict[SequenceId, list[int]] = {}
        self._next = 0

    def _copy(self, source: int, target: int) -> None:
        self.cells[target] = list(self.cells[source])

    def create(self) -> SequenceId:
        sequence = self.tables.create(None)
        self.wanted[sequence] = []
        return sequence

    def fork(self, source: SequenceId, count: int) -> SequenceId:
        sequence = self.tables.fork(source, count)
        self.wanted[sequence] = self.wanted[source][:count]
        return sequence

    def extend(self, sequence: SequenceId, count: int) -> None:
        """Makes room, then writes tokens that nobody else has."""
        start = len(self.wanted[sequence])
        self.tables.extend(sequence, count)
        for place in range(start, start + count):
            self.cells[self.tables[sequence].blocks[place // SIZE]][place % SIZE] = self._next
            self.wanted[sequence].append(self._next)
            self._next += 1

    def shrink(self, sequence: SequenceId, count: int) -> None:
        self.tables.shrink(sequence, count)
        del self.wanted[sequence][count:]

    def release(self, sequence: SequenceId) -> None:
        self.tables.release(sequence)
        del self.wanted[sequence]

    def held(self, sequence: SequenceId) -> list[int]:
        table = self.tables[sequence]
        return [self.cells[table.blocks[place // SIZE]][place % SIZE] for place in range(table.num_tokens)]

    def check(self) -> None:
        """Everybody has what they wrote, and every block is counted for exactly those who hold it."""
        holders: Counter[int] = Counter()
        for sequence, wanted in self.wanted.items():
            assert self.held(sequence) == wanted
            table = self.tables[sequence]
            assert table.num_blocks == -(-table.num_tokens // SIZE)
            blocks = table.blocks[: table.num_blocks].tolist()
            assert len(set(blocks)) == len(blocks)
            holders.update(blocks)
        tables = self.tables
        assert [tables._references[block] for block in range(tables.num_blocks)] == [
            holders[block] for block in range(tables.num_blocks)
        ]
        assert sorted([*tables._free, *holders]) == list(range(tables.num_blocks))
        assert tables.free_sequences == tables._max_sequences - len(self.wanted)
        places = {
            (int(tables[sequence].blocks[place // SIZE]), place % SIZE)
            for sequence, wanted in self.wanted.items()
            for place in range(len(wanted))
        }
        assert tables.used_tokens() == len(places)


OPERATIONS = st.tuples(st.sampled_from(("create", "fork", "extend", "shrink", "release")), st.integers(0, 2**20))


@settings(max_examples=300, deadline=None)
@given(st.lists(OPERATIONS, max_size=60))
def test_any_history_keeps_contents_and_counts(history: list[tuple[str, int]]) -> None:
    memory = Memory()
    for name, number in history:
        chance = random.Random(number)
        live = list(memory.wanted)
        if name == "create" or not live:
            if len(live) < SEQUENCES:
                memory.create()
            else:
                with pytest.raises(BackendError, match=f"all {SEQUENCES} sequences"):
                    memory.tables.create(None)
            continue
        sequence = chance.choice(live)
        if name == "fork" and len(live) < SEQUENCES:
            memory.fork(sequence, chance.randint(0, len(memory.wanted[sequence])))
        elif name == "extend":
            count = chance.randint(0, 3 * SIZE)
            if count <= memory.tables.room(sequence, (), 0):
                memory.extend(sequence, count)
            else:
                before = memory.tables.free_blocks
                with pytest.raises(BackendError, match="free blocks"):
                    memory.tables.extend(sequence, count)
                assert memory.tables.free_blocks == before
        elif name == "shrink":
            memory.shrink(sequence, chance.randint(0, len(memory.wanted[sequence])))
        elif name == "release":
            memory.release(sequence)
        memory.check()


@settings(max_examples=200, deadline=None)
@given(st.lists(OPERATIONS, max_size=40), st.integers(0, 2**20))
def test_room_can_be_had(history: list[tuple[str, int]], number: int) -> None:
    """After those beside it got theirs, a sequence gets every token that was promised; and, alone, not one more."""
    memory, chance = Memory(), random.Random(number)
    play(memory, history)
    live = list(memory.wanted)
    beside = [(each, chance.randint(0, 6)) for each in live if chance.random() < 0.5]
    sequence = chance.choice(live)
    shared = chance.randint(0, len(memory.wanted[sequence]))
    new = len(live) < SEQUENCES and chance.random() < 0.5
    if not new:
        beside = [(each, count) for each, count in beside if each != sequence]
    room = memory.tables.room(None if new else sequence, beside, shared if new else 0)
    if room < 0:
        needed = sum(memory.tables.blocks_needed(each, count) for each, count in beside)
        assert needed > memory.tables.free_blocks
        return
    target = memory.fork(sequence, shared) if new else sequence
    for each, count in beside:
        memory.extend(each, count)
    memory.extend(target, room)
    memory.check()
    if not beside and room:
        with pytest.raises(BackendError):
            memory.tables.extend(target, 1)


def play(memory: Memory, history: Sequence[tuple[str, int]]) -> None:
    """A history in which only what fits is done; at least one sequence is alive at its end."""
    for name, number in history:
        chance, live = random.Random(number), list(memory.wanted)
        if name == "create" or not live:
            if len(live) < SEQUENCES:
                memory.create()
            continue
        sequence = chance.choice(live)
        if name == "fork" and len(live) < SEQUENCES:
            memory.fork(sequence, chance.randint(0, len(memory.wanted[sequence])))
        elif name in ("extend", "create"):
            memory.extend(sequence, min(chance.randint(0, 9), memory.tables.room(sequence, (), 0)))
        elif name == "release" and len(live) > 1:
            memory.release(sequence)
    if not memory.wanted:
        memory.create()


def test_first_writer_of_a_shared_tail_copies_it() -> None:
    memory = Memory()
    first = memory.create()
    memory.extend(first, 6)
    second = memory.fork(first, 5)
    assert (memory.tables.free_blocks, memory.tables.copies) == (BLOCKS - 2, 0)
    memory.extend(second, 1)
    assert (memory.tables.free_blocks, memory.tables.copies) == (BLOCKS - 3, 1)
    memory.extend(first, 1)  # alone with its block by now
    assert memory.tables.copies == 1
    memory.check()


def test_full_shared_blocks_are_never_copied() -> None:
    memory = Memory()
    first = memory.create()
    memory.extend(first, 8)
    forks = [memory.fork(first, 8) for _ in range(3)]
    for each in forks:
        memory.extend(each, 1)
    assert memory.tables.copies == 0
    assert memory.tables.used_tokens() == 8 + 3
    memory.check()


def test_any_free_blocks_serve_one_sequence() -> None:
    """Fragmentation is zero by construction: whichever blocks are free, all of them are one sequence's room."""
    for seed in range(20):
        chance = random.Random(seed)
        memory = Memory(40, 40)
        sequences = [memory.create() for _ in range(39)]
        for each in sequences:
            memory.extend(each, min(chance.randint(1, 2 * SIZE), memory.tables.room(each, (), 0)))
        for each in chance.sample(sequences, 25):
            memory.release(each)
        free = memory.tables.free_blocks
        assert free > 0
        one = memory.create()
        assert memory.tables.room(one, (), 0) == free * SIZE
        memory.extend(one, free * SIZE)
        assert memory.tables.free_blocks == 0
        memory.check()


def test_unknown_sequence_and_too_long_fork_are_refused() -> None:
    tables = BlockTables(4, SIZE, 2, lambda source, target: None)
    with pytest.raises(BackendError, match="there is no sequence 7"):
        tables[SequenceId(7)]
    sequence = tables.create("tone")
    tables.extend(sequence, 3)
    with pytest.raises(BackendError, match="holds 3 tokens; 4 can't be shared"):
        tables.fork(sequence, 4)
    assert tables[tables.fork(sequence, 3)].adapter == "tone"
    tables.release(sequence)
    with pytest.raises(BackendError, match="was released"):
        tables.release(sequence)


def test_shrink_after_a_copy_keeps_the_contents_apart() -> None:
    """A step that failed after it had split a shared block leaves both sequences as they were."""
    memory = Memory()
    first = memory.create()
    memory.extend(first, 6)
    second = memory.fork(first, 6)
    memory.extend(second, 9)
    memory.shrink(second, 6)
    assert memory.held(second) == memory.held(first)
    memory.extend(first, 1)
    memory.extend(second, 1)
    memory.check()
