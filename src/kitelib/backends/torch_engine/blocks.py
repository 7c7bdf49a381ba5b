"""Who holds which block: block tables of sequences, reference counts, copy-on-write. Knows no tensors.

Any free block serves any sequence, so memory does not fragment; what a sequence wastes is the rest of its last block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kitelib.abc import SequenceId
from kitelib.errors import BackendError

__all__ = ["BlockTables", "Table"]


@dataclasses.dataclass(eq=False, slots=True)
class Table:
    """One sequence.

    Attributes:
        blocks: its block numbers in order, int32 with room to grow; the first `num_blocks` count.
        num_blocks: blocks held.
        num_tokens: tokens held.
        adapter: the adapter it is computed with.
    """

    blocks: npt.NDArray[np.int32]
    num_blocks: int = 0
    num_tokens: int = 0
    adapter: str | None = None


class BlockTables:
    """All sequences and the free blocks. `copy(source, target)` copies a block's content.

    Attributes:
        block_tokens: tokens per block.
        num_blocks: blocks in all.
        copies: blocks that were copied because two sequences wrote to them.
    """

    def __init__(
        self, num_blocks: int, block_tokens: int, max_sequences: int, copy: Callable[[int, int], None]
    ) -> None:
        self.block_tokens = block_tokens
        self.num_blocks = num_blocks
        self.copies = 0
        self._copy = copy
        self._max_sequences = max_sequences
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks
        self._tables: dict[SequenceId, Table] = {}
        self._next = 0

    def __getitem__(self, sequence: SequenceId) -> Table:
        """Raises BackendError if there is no such sequence."""
        table = self._tables.get(sequence)
        if table is None:
            raise BackendError(f"there is no sequence {sequence}; it was released, or is another backend's")
        return table

    @property
    def free_sequences(self) -> int:
        """Sequences that can still be created."""
        return self._max_sequences - len(self._tables)

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def used_tokens(self) -> int:
        """Tokens held, shared ones counted once. Any thread."""
        size = self.block_tokens
        # Of blocks that somebody fills in part: how many do, and to which token at most.
        filled: dict[int, tuple[int, int]] = {}
        for table in list(self._tables.values()):
            if table.num_tokens % size:
                block = int(table.blocks[table.num_blocks - 1])
                holders, tokens = filled.get(block, (0, 0))
                filled[block] = (holders + 1, max(tokens, table.num_tokens % size))
        # Who else holds such a block has all of it.
        wasted = sum(size - tokens for block, (holders, tokens) in filled.items() if holders >= self._references[block])
        return max(0, (self.num_blocks - len(self._free)) * size - wasted)

    def create(self, adapter: str | None) -> SequenceId:
        """A new, empty sequence."""
        return self._add(Table(np.zeros(16, np.int32), adapter=adapter))

    def fork(self, source: SequenceId, num_tokens: int) -> SequenceId:
        """A new sequence that shares the first `num_tokens` tokens; a partial last block is shared, too, until one of
        both writes to it."""
        table = self[source]
        if not 0 <= num_tokens <= table.num_tokens:
            raise BackendError(f"sequence {source} holds {table.num_tokens} tokens; {num_tokens} can't be shared")
        count = -(-num_tokens // self.block_tokens)
        sequence = self._add(Table(table.blocks.copy(), count, num_tokens, table.adapter))
        for block in table.blocks[:count]:
            self._references[block] += 1
        return sequence

    def _add(self, table: Table) -> SequenceId:
        if len(self._tables) >= self._max_sequences:
            raise BackendError(f"all {self._max_sequences} sequences are in use; release one first")
        sequence = SequenceId(self._next)
        self._next += 1
        self._tables[sequence] = table
        return sequence

    def release(self, sequence: SequenceId) -> None:
        """Gives up a sequence; blocks that others share stay."""
        table = self[sequence]
        del self._tables[sequence]
        self._give_up(table.blocks[: table.num_blocks])

    def _give_up(self, blocks: npt.NDArray[np.int32]) -> None:
        for block in blocks.tolist():
            self._references[block] -= 1
            if not self._references[block]:
                self._free.append(block)

    def blocks_needed(self, sequence: SequenceId, count: int) -> int:
        """Free blocks that `count` more tokens take."""
        table = self[sequence]
        needed = -(-(table.num_tokens + count) // self.block_tokens) - table.num_blocks
        return needed + (1 if count and self._is_shared_tail(table) else 0)

    def _is_shared_tail(self, table: Table) -> bool:
        partial = table.num_tokens % self.block_tokens != 0
        return partial and self._references[table.blocks[table.num_blocks - 1]] > 1

    def room(self, sequence: SequenceId | None, beside: Sequence[tuple[SequenceId, int]], shared: int) -> int:
        """See `kitelib.abc.Backend.room`."""
        free = len(self._free) - sum(self.blocks_needed(each, count) for each, count in beside)
        size = self.block_tokens
        if free < 0:
            return free * size
        if sequence is None:
            partial = shared % size  # its block is copied by the first write
            return max(0, free * size - partial)
        table = self[sequence]
        if self._is_shared_tail(table):
            return max(0, free * size - table.num_tokens % size)
        return free * size + table.num_blocks * size - table.num_tokens

    def extend(self, sequence: SequenceId, count: int) -> None:
        """Makes room for `count` more tokens and counts them.

        Raises:
            BackendError: too few blocks are free; nothing has changed.
        """
        table = self[sequence]
        needed = self.blocks_needed(sequence, count)
        if needed > len(self._free):
            raise BackendError(
                f"{count} tokens need {needed} free blocks, and there are {len(self._free)}; release a sequence first"
            )
        if count and self._is_shared_tail(table):
            self._unshare_tail(table)
        total = -(-(table.num_tokens + count) // self.block_tokens)
        if total > len(table.blocks):
            table.blocks = np.concatenate((table.blocks, np.zeros(max(total, len(table.blocks)), np.int32)))
        for place in range(table.num_blocks, total):
            table.blocks[place] = self._take()
        table.num_blocks = total
        table.num_tokens += count

    def _unshare_tail(self, table: Table) -> None:
        old = int(table.blocks[table.num_blocks - 1])
        new = self._take()
        self._copy(old, new)
        self.copies += 1
        self._references[old] -= 1
        table.blocks[table.num_blocks - 1] = new

    def _take(self) -> int:
        block = self._free.pop()
        self._references[block] = 1
        return block

    def shrink(self, sequence: SequenceId, num_tokens: int) -> None:
        """Takes a sequence back to its first `num_tokens` tokens: what was to be added was not."""
        table = self[sequence]
        keep = -(-num_tokens // self.block_tokens)
        self._give_up(table.blocks[keep : table.num_blocks])
        table.num_blocks, table.num_tokens = keep, num_tokens
