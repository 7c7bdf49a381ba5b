"""Packs the work of one step into the rows of one forward pass, as arrays on the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kitelib.abc import StepWork
from kitelib.backends.torch_engine.blocks import BlockTables
from kitelib.backends.torch_engine.plan import StepPlan

if TYPE_CHECKING:
    import torch

__all__ = ["PackedStep", "RowPlan", "pack"]


@dataclasses.dataclass(frozen=True, slots=True)
class RowPlan:
    """Which numbers of rows a pass may have: `min_rows` to `max_rows`, in multiples of `multiple`. Missing rows are
    padded. Packed linears (`linear.py`) compute `tile` rows at once; 0 means all. Matrix kernels choose their way of
    summing by the number of rows, so this decides whether a row's bits depend on its company."""

    min_rows: int
    max_rows: int
    multiple: int = 1
    tile: int = 0

    def padded(self, rows: int) -> int:
        """Rows of a pass that has `rows` real ones."""
        return max(self.min_rows, -(-rows // self.multiple) * self.multiple)


@dataclasses.dataclass(eq=False, slots=True)
class PackedStep:
    """Arrays of a `StepPlan`, and what else the pass needs.

    Attributes:
        ids: int64 (rows,): token ids; 0 for padding.
        positions, slots, row_starts, contexts, tables: as in `StepPlan`.
        select: int64 (outputs,): rows whose logits are wanted, then padding; empty if none are.
        num_outputs: of these, how many are real.
        max_rows: most rows of one sequence.
    """

    ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    row_starts: npt.NDArray[np.int32]
    contexts: npt.NDArray[np.int32]
    tables: npt.NDArray[np.int32]
    select: npt.NDArray[np.int64]
    num_outputs: int
    max_rows: int
    block_tokens: int

    @property
    def num_rows(self) -> int:
        """Rows of the pass, padding included."""
        return len(self.ids)

    @property
    def is_decode(self) -> bool:
        """Every sequence has one row, and its logits are wanted."""
        return self.max_rows == 1 and self.num_outputs == len(self.contexts)

    def plan(self, device: torch.device | str, *, history: bool) -> StepPlan:
        """The plan on a device; `history` for latent attention."""
        import torch

        def move(array: npt.NDArray[np.generic]) -> torch.Tensor:
            tensor = torch.from_numpy(array)
            return tensor if device == "cpu" else tensor.to(device, non_blocking=True)

        return StepPlan(
            num_rows=self.num_rows,
            num_sequences=len(self.contexts),
            max_rows=self.max_rows,
            max_context=int(self.contexts.max()),
            row_starts=move(self.row_starts),
            contexts=move(self.contexts),
            tables=move(self.tables),
            slots=move(self.slots),
            positions=move(self.positions),
            history=move(self._history()) if history else None,
            num_real=int(self.row_starts[-1]),
        )

    def _history(self) -> npt.NDArray[np.int64]:
        size = self.block_tokens
        parts = []
        for table, context in zip(self.tables, self.contexts.tolist(), strict=True):
            places = np.arange(context, dtype=np.int64)
            parts.append(table[places // size] * size + places % size)
        return np.concatenate(parts).astype(np.int64)


def pack(tables: BlockTables, work: Sequence[StepWork], rows: RowPlan, min_outputs: int) -> PackedStep:
    """Lays out a step whose tokens the tables already count (`BlockTables.extend`).

    Args:
        tables: block tables.
        work: what to compute.
        rows: how to pad.
        min_outputs: pad the rows with logits to at least so many, if there are any.
    """
    size = tables.block_tokens
    counts = [len(item.token_ids) for item in work]
    held = [tables[item.sequence] for item in work]
    total = sum(counts)
    padded = rows.padded(total)
    ids, positions = np.zeros(padded, np.int64), np.zeros(padded, np.int64)
    slots = np.full(padded, -1, np.int64)
    row_starts = np.zeros(len(work) + 1, np.int32)
    np.cumsum(counts, out=row_starts[1:])
    contexts = np.fromiter((table.num_tokens for table in held), np.int32, len(held))
    block_tables = np.zeros((len(work), max(table.num_blocks for table in held)), np.int32)
    for place, (item, table) in enumerate(zip(work, held, strict=True)):
        block_tables[place, : table.num_blocks] = table.blocks[: table.num_blocks]
        first, last = row_starts[place], row_starts[place + 1]
        ids[first:last] = item.token_ids
        if last - first > 1:
            positions[first:last] = np.arange(item.start, item.start + len(item.token_ids))
        else:
            positions[first] = item.start
    owners = np.repeat(np.arange(len(work)), counts)
    slots[:total] = block_tables[owners, positions[:total] // size] * np.int64(size) + positions[:total] % size
    outputs = [int(row_starts[place + 1]) - 1 for place, item in enumerate(work) if item.logits or item.draws]
    padding = [outputs[-1]] * max(0, min_outputs - len(outputs)) if outputs else []
    return PackedStep(
        ids=ids,
        positions=positions,
        slots=slots,
        row_starts=row_starts,
        contexts=contexts,
        tables=block_tables,
        select=np.array([*outputs, *padding], np.int64),
        num_outputs=len(outputs),
        max_rows=max(counts),
        block_tokens=size,
    )
