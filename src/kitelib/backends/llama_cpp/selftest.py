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

from kitelib.abc import SequenceId, StepResult, StepWork
from kitelib.backends.llama_cpp.context import LlamaContext
from kitelib.errors import KiteError

__all__ = ["OUTPUTS", "PLANS", "SPLITS", "RowPlan", "find_plan"]


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
# Rows that want logits in one step, beside those that the pieces of SPLITS give: the end of the model sees only these,
# and its matrix may be quantized in another way than the rest. Past the number of a step's rows, it stands for that.
OUTPUTS = (6, 15, 33, 64)
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


Rows = dict[int, npt.NDArray[np.float32]]
"""Logits by the position of the token that they follow."""
Result = tuple[Rows, npt.NDArray[np.uint8]]
"""Logits, and the KV of all tokens."""


def _tokens(count: int, vocab_size: int, seed: int) -> list[int]:
    # Fixed token ids from the middle of the vocabulary: ordinary text pieces, no control tokens.
    low, high = vocab_size // 16, vocab_size - vocab_size // 16
    return [int(t) for t in np.random.Generator(np.random.PCG64(seed)).integers(low, max(low + 1, high), count)]


def _holds(context: LlamaContext, vocab_size: int, adapter: str | None) -> bool:
    tokens = _tokens(_NUM_TOKENS, vocab_size, 1)
    others = _tokens(context.options.rows, vocab_size, 2)
    reference = _run(context, adapter, tokens, (min(_NUM_TOKENS, context.options.rows),), outputs=_NUM_TOKENS)
    for split in SPLITS:
        if not _same(reference, _run(context, adapter, tokens, split, outputs=_NUM_TOKENS)):
            return False
    if not (
        _outputs_hold(context, adapter, tokens, others, reference)
        and _drafts_hold(context, adapter, tokens, others, reference)
    ):
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


def _outputs_hold(
    context: LlamaContext, adapter: str | None, tokens: list[int], others: list[int], reference: Result
) -> bool:
    """Whether logits are the same however many rows of a step want them, the rows of two sequences mixed."""
    most = min(context.options.rows, context.max_outputs)
    for count in sorted({min(each, most) for each in OUTPUTS}):
        own = min(len(tokens), count - count // 3)
        sequence, filler = context.create(adapter), context.create(adapter)
        work = [StepWork(sequence, tokens[:own], 0, True, drafts=own - 1)]
        if count > own:
            work.append(StepWork(filler, others[: count - own], 0, True, drafts=count - own - 1))
        found = _logits(work[0], context.step(work), 0)
        for each in (sequence, filler):
            context.release(each)
        if not _agree(reference[0], found):
            return False
    return True


def _drafts_hold(
    context: LlamaContext, adapter: str | None, tokens: list[int], others: list[int], reference: Result
) -> bool:
    """Whether drafts, the lone token of a decode step and a piece of a prompt go together in one step; and whether a
    sequence goes on as if it never had had the drafts that are taken back, through the holes they leave."""
    wrong = others[-1]
    sequence, lone, filler = (context.create(adapter) for _ in range(3))
    for each, held in ((sequence, 8), (lone, len(tokens) - 1)):
        for start, stop in _pieces(held, (), context.options.rows):
            context.step([StepWork(each, tokens[start:stop], start, False)])
    work = [
        StepWork(filler, others[: max(1, context.options.rows - 9)], 0, False),
        StepWork(sequence, [*tokens[8:12], *[wrong] * 4], 8, True, drafts=7),
        StepWork(lone, tokens[-1:], len(tokens) - 1, True),
    ]
    result = context.step(work)
    found = {position: row for position, row in _logits(work[1], result, 1).items() if position < 12}
    found |= _logits(work[2], result, 2)
    same = _agree(reference[0], found)
    context.truncate(sequence, 12)
    context.release(filler)
    for start in range(12, len(tokens), 3):
        drafts = tokens[start + 1 : start + 3]
        work = [StepWork(sequence, [tokens[start], *drafts], start, True, drafts=len(drafts))]
        same = same and _agree(reference[0], _logits(work[0], context.step(work), 0))
    payloads = context.export_range(sequence, 0, [len(tokens)])
    for each in (sequence, lone):
        context.release(each)
    return same and np.array_equal(payloads[0].data, reference[1])


def _crowd(context: LlamaContext, source: SequenceId, target: SequenceId) -> None:
    """Fills the cache past the point where kernels change, by restoring the same tokens over and over."""
    payloads = context.export_range(source, 0, [context.num_tokens(source)])
    while context.used_tokens < _CROWD_CELLS and context.room() > 2 * _NUM_TOKENS + payloads[0].num_tokens:
        context.restore(target, payloads)


def _same(first: Result, second: Result) -> bool:
    return _agree(first[0], second[0]) and np.array_equal(first[1], second[1])


def _agree(reference: Rows, found: Rows) -> bool:
    """Whether all rows of `found` have the same bits as those of the same positions."""
    return all(np.array_equal(row, reference[position]) for position, row in found.items() if position in reference)


def _logits(item: StepWork, result: StepResult, place: int) -> Rows:
    """Copies of the logits that a step gave for one of its items, by position."""
    last = result.logits[place]
    assert last is not None
    rows = [*(result.draft_logits[place] if item.drafts else ()), last]
    stop = item.start + len(item.token_ids)
    return {stop - len(rows) + i: row.copy() for i, row in enumerate(rows)}


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
    outputs: int = 1,
) -> Result:
    """Logits after the last tokens of each piece, up to `outputs` of them, and the KV of all tokens.

    With one output only the last piece wants logits. Each step also has up to n tokens of the sequence `beside`, which consists of these tokens: (sequence, tokens, n).
    """
    sequence = context.create(adapter)
    logits: Rows = {}
    room = context.options.rows if beside is None else context.options.rows - beside[2]
    for start, stop in _pieces(len(tokens), split, room):
        drafts = min(outputs, stop - start, context.max_outputs) - 1
        wanted = outputs > 1 or stop == len(tokens)
        work = [StepWork(sequence, tokens[start:stop], start, wanted, drafts=drafts)]
        if beside is not None:
            other, others, count = beside
            held = context.num_tokens(other)
            if held < len(others):
                work.insert(0, StepWork(other, others[held : held + count], held, False))
        result = context.step(work)
        if wanted:
            logits |= _logits(work[-1], result, len(work) - 1)
        if pause is not None and start == 0:
            pause()
    payloads = context.export_range(sequence, 0, [len(tokens)])
    context.release(sequence)
    return logits, payloads[0].data
