"""Finds out at load whether this model, on these kernels, gives every token the same bits in any company.

Why it can hold: with flash attention on and fewer rows in a micro-batch than the kernel's query tile (64 on x86-64),
llama.cpp computes attention row by row, in the order of the cells, skipping masked cells without a trace; and its
matrix kernels treat rows alone, or four at a time. What differs between models and machines is from how many rows on
and in which multiples; the plans below are tried from the cheapest on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kitelib.abc import SequenceId, StepWork
from kitelib.backends.llama_cpp.context import LlamaContext
from kitelib.errors import KiteError

__all__ = ["PLANS", "SPLITS", "RowPlan", "find_plan"]


@dataclasses.dataclass(frozen=True, slots=True)
class RowPlan:
    """Shape of a step: most rows, fewest rows, and the multiple that the number of rows is padded to."""

    rows: int
    min_rows: int
    row_multiple: int


PLANS = (
    RowPlan(63, 1, 1),
    RowPlan(63, 2, 1),
    RowPlan(60, 4, 4),
    RowPlan(60, 8, 4),
    RowPlan(48, 16, 16),
    RowPlan(15, 1, 1),
)

_NUM_TOKENS = 24
# Lone rows come often: in half precision their other order of summing changes only few values of a narrow model.
SPLITS: tuple[tuple[int, ...], ...] = ((16, 8), (9, 7, 5, 2), (23, 1), (1,) * _NUM_TOKENS, (2, 3, 2, 3, 4, 2, 3, 5))
# Sequences that ask for logits in one step; the output matrix may be quantized in another way than the rest.
_MAX_OUTPUTS = 7
# From 512 cells on a lone row takes another attention path (split over the threads).
_CROWD_CELLS = 520


def find_plan(
    make: Callable[[RowPlan], LlamaContext],
    plans: Sequence[RowPlan],
    vocab_size: int,
    adapters: Sequence[str] = (),
) -> RowPlan | None:
    """The first plan under which KV and logits don't depend on chunking, neighbours, or place; None if none.

    `make` creates a context with its layout probed; it is closed again. It has to hold with each of `adapters` too.
    """
    for plan in plans:
        try:
            context = make(plan)
        except KiteError:
            continue
        try:
            if all(_holds(context, vocab_size, adapter) for adapter in (None, *adapters)):
                return plan
        except KiteError:
            continue
        finally:
            context.close()
    return None


def _tokens(count: int, vocab_size: int, seed: int) -> list[int]:
    # Fixed token ids from the middle of the vocabulary: ordinary text pieces, no control tokens.
    low, high = vocab_size // 16, vocab_size - vocab_size // 16
    return [int(t) for t in np.random.Generator(np.random.PCG64(seed)).integers(low, max(low + 1, high), count)]


def _holds(context: LlamaContext, vocab_size: int, adapter: str | None) -> bool:
    tokens = _tokens(_NUM_TOKENS, vocab_size, 1)
    others = _tokens(context.options.rows, vocab_size, 2)
    reference = _run(context, adapter, tokens, (min(_NUM_TOKENS, context.options.rows),))
    for split in SPLITS:
        if not _same(reference, _run(context, adapter, tokens, split)):
            return False
    if not _outputs_hold(context, adapter, tokens):
        return False
    # Beside another sequence, interleaved, at an odd place.
    neighbour = context.create(adapter)
    context.step([StepWork(neighbour, others[:13], 0, False)])
    same = _same(reference, _run(context, adapter, tokens, (16, 7, 1), beside=(neighbour, others, 1)))
    # In a full step, behind the rows of another sequence.
    filler = context.create(adapter)
    rows_beside = max(1, context.options.rows - _NUM_TOKENS)
    same = same and _same(
        reference, _run(context, adapter, tokens, (_NUM_TOKENS,), beside=(filler, others, rows_beside))
    )
    context.release(filler)
    # With its cells far apart in a full cache: the halves of a split attention path both see some of them.
    crowd = context.create(adapter)
    same = same and _same(
        reference, _run(context, adapter, tokens, (12, 11, 1), pause=lambda: _crowd(context, neighbour, crowd))
    )
    context.release(crowd)
    context.release(neighbour)
    return same


def _outputs_hold(context: LlamaContext, adapter: str | None, tokens: list[int]) -> bool:
    """Whether logits are the same however many rows of a step ask for them."""
    reference: npt.NDArray[np.float32] | None = None
    for count in range(1, min(_MAX_OUTPUTS, context.free_sequences) + 1):
        sequences = [context.create(adapter) for _ in range(count)]
        for logits in context.step([StepWork(each, tokens[:2], 0, True) for each in sequences]).logits:
            assert logits is not None
            reference = logits.copy() if reference is None else reference
            if not np.array_equal(reference, logits):
                return False
        for each in sequences:
            context.release(each)
    return True


def _crowd(context: LlamaContext, source: SequenceId, target: SequenceId) -> None:
    """Fills the cache past the point where kernels change, by restoring the same tokens over and over."""
    payloads = context.export_range(source, 0, [context.num_tokens(source)])
    while context.used_tokens < _CROWD_CELLS and context.room() > 2 * _NUM_TOKENS + payloads[0].num_tokens:
        context.restore(target, payloads)


Result = tuple[npt.NDArray[np.float32], npt.NDArray[np.uint8]]


def _same(first: Result, second: Result) -> bool:
    return np.array_equal(first[0], second[0]) and np.array_equal(first[1], second[1])


def _pieces(total: int, split: Sequence[int], rows: int) -> Iterator[tuple[int, int]]:
    start = 0
    sizes = [*split, *([rows] * total)]
    for size in sizes:
        stop = min(total, start + min(size, rows))
        if stop > start:
            yield start, stop
        start = stop


def _run(
    context: LlamaContext,
    adapter: str | None,
    tokens: list[int],
    split: Sequence[int],
    beside: tuple[SequenceId, list[int], int] | None = None,
    pause: Callable[[], None] | None = None,
) -> Result:
    """Logits after the last token, and the KV of all tokens.

    Each step also has up to n tokens of the sequence `beside`, which consists of these tokens: (sequence, tokens, n).
    """
    sequence = context.create(adapter)
    logits: npt.NDArray[np.float32] | None = None
    room = context.options.rows if beside is None else context.options.rows - beside[2]
    for start, stop in _pieces(len(tokens), split, room):
        work = [StepWork(sequence, tokens[start:stop], start, stop == len(tokens))]
        if beside is not None:
            other, others, count = beside
            held = context.num_tokens(other)
            if held < len(others):
                work.insert(0, StepWork(other, others[held : held + count], held, False))
        logits = context.step(work).logits[-1]
        if pause is not None and start == 0:
            pause()
    assert logits is not None
    logits = logits.copy()
    payloads = context.export_range(sequence, 0, [len(tokens)])
    context.release(sequence)
    return logits, payloads[0].data
