"""Moves the live cells of the KV cache down, so that what dead ones occupied is free again.

In place and in order, a bounded piece at a time, through the state functions that also export and restore blocks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kitelib.backends.llama_cpp.cells import Cells, SequenceCells
from kitelib.backends.llama_cpp.kv_memory import SCRATCH, KvMemory

__all__ = ["move_down"]


def move_down(memory: KvMemory, records: list[SequenceCells], capacity: int, used: int, chunk: int) -> Cells:
    """Moves all live tokens to the lowest cells. Nothing but them may be in the cache.

    Args:
        memory: the cache.
        records: all live sequences.
        capacity: cells of the cache.
        used: from this cell on nothing is used.
        chunk: tokens moved at a time, which bounds the staging memory.

    Returns:
        Shape (capacity,): where each live cell is now.
    """
    cells = [record.as_array() for record in records]
    occupied = np.zeros(capacity, bool)
    for own in cells:
        occupied[own] = True
    moved = np.arange(capacity, dtype=np.int32)
    holes = np.flatnonzero(~occupied[:used])
    if not len(holes):
        return moved
    done = np.zeros(capacity, bool)
    done[: holes[0]] = True
    for own in cells:
        pending = np.flatnonzero(~done[own])
        start = int(pending[0]) if len(pending) else len(own)
        while start < len(own):
            stop = min(start + chunk, len(own))
            _move(memory, records, cells, own, start, stop, occupied, moved)
            done[own[start:stop]] = True
            start = stop
    return moved


def _move(
    memory: KvMemory,
    records: list[SequenceCells],
    cells: list[Cells],
    own: Cells,
    start: int,
    stop: int,
    occupied: npt.NDArray[np.bool_],
    moved: Cells,
) -> None:
    """Moves positions start..stop of one sequence, and of all that share them, into the lowest free cells."""
    slots_and_ends = []
    slot = -1
    for record, theirs in zip(records, cells, strict=True):
        end = min(stop, len(theirs))
        shared = int(np.count_nonzero(theirs[start:end] == own[start:end])) if end > start else 0
        if shared:
            slots_and_ends.append((record.slot, start + shared))
        if theirs is own:
            slot = record.slot
    blob = memory.read(slot, start, stop)
    for each, end in slots_and_ends:
        memory.forget(each, start, end)
    occupied[own[start:stop]] = False
    memory.write_scratch(blob)
    free = np.flatnonzero(~occupied)[: stop - start].astype(np.int32)
    occupied[free] = True
    moved[own[start:stop]] = free
    for each, end in slots_and_ends:
        memory.share(SCRATCH, each, start, end)
    memory.clear_scratch()
