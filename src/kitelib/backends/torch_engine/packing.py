"""Packs the work of one step into the rows of one forward pass, as arrays on the host, and hands out what it gave."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kitelib.abc import StepResult, StepWork
from kitelib.backends.torch_engine.blocks import BlockTables
from kitelib.backends.torch_engine.plan import StepPlan

if TYPE_CHECKING:
    import torch

__all__ = ["PackedStep", "RowPlan", "num_outputs", "pack", "step_result"]


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
        """Something is wanted of every row: each sequence has its next token, and drafts that follow it."""
        return self.num_outputs == int(self.row_starts[-1])

    @property
    def max_context(self) -> int:
        """Tokens of the longest sequence, this pass included."""
        return int(self.contexts.max())

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
            max_context=self.max_context,
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


def num_outputs(item: StepWork) -> int:
    """Rows of an item, its last ones, of which logits or drawn tokens are wanted."""
    return 1 + item.drafts if item.logits or item.draws else 0


def pack(tables: BlockTables, work: Sequence[StepWork], rows: RowPlan) -> PackedStep:
    """Lays out a step whose tokens the tables already count (`BlockTables.extend`).

    Args:
        tables: block tables.
        work: what to compute.
        rows: how to pad; the rows with logits are padded in the same way, if there are any.
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
    ends = row_starts[1:].tolist()
    outputs = [row for end, item in zip(ends, work, strict=True) for row in range(end - num_outputs(item), end)]
    padding = [outputs[-1]] * (rows.padded(len(outputs)) - len(outputs)) if outputs else []
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


def step_result(
    work: Sequence[StepWork], rows: Sequence[npt.NDArray[np.float32]], tokens: Sequence[int] = ()
) -> StepResult:
    """What each item gets.

    Args:
        work: the step.
        rows: logits (vocabulary,) of each row that they are wanted of, in order.
        tokens: drawn tokens in order, one for each `TokenDraw`.
    """
    row, token = iter(rows), iter(tokens)
    logits: list[npt.NDArray[np.float32] | None] = []
    drafts: list[Sequence[npt.NDArray[np.float32]]] = []
    for item in work:
        found = [next(row) for _ in range(num_outputs(item))] if item.logits else []
        logits.append(found.pop() if found else None)
        drafts.append(found)
    return StepResult(
        logits,
        [[next(token) for _ in item.draws] for item in work] if tokens else (),
        drafts if any(item.drafts for item in work) else (),
    )
