"""The largest step there can be, to see what memory it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kitelib.abc import StepWork
from kitelib.backends.torch_engine.packing import RowPlan

if TYPE_CHECKING:
    from kitelib.backends.torch_engine.runner import Runner

__all__ = ["largest_step"]


def largest_step(make: Callable[[int, RowPlan], Runner], rows: RowPlan, block_tokens: int, sequences: int) -> None:
    """Computes one step of as many rows as a step may have, of as many sequences as possible, all with logits; `make`
    gives a runner with so many blocks."""
    count = max(1, min(sequences, rows.max_rows))
    each = rows.max_rows // count
    runner = make(count * -(-each // block_tokens), rows)
    work = [StepWork(runner.tables.create(None), [1] * each, 0, True) for _ in range(count)]
    runner.step(work)
