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
    """Computes one step of as many rows as a step may have, of as many sequences as possible, with logits after as many
    tokens as a step gives; `make` gives a runner with so many blocks."""
    count = max(1, min(sequences, rows.max_rows))
    each = rows.max_rows // count
    runner = make(count * -(-each // block_tokens), rows)
    drafts = max(0, min(each, runner.max_outputs // count) - 1)
    work = [StepWork(runner.tables.create(None), [1] * each, 0, True, drafts=drafts) for _ in range(count)]
    runner.step(work)
