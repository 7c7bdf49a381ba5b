"""Finds out, with the loaded model on this machine, under which numbers of rows a row's bits don't depend on its
company: then every KV block and every logit is the same in prefill and decode, in any chunking, beside anything, and
drafts are verified by the logits that the same tokens have one by one.

Attention gives every row its own bits by construction (`AttentionKernel.row_invariant`). Matrix libraries choose
their kernels, and so the order of their sums, by the number of rows; from some number on, and up to another, they
agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kitelib.abc import SequenceId, StepResult, StepWork
from kitelib.backends.torch_engine.packing import RowPlan
from kitelib.backends.torch_engine.runner import Runner
from kitelib.errors import KiteError

__all__ = ["CUDA_PLANS", "PLANS", "SELF_TEST", "TEST_TOKENS", "find_plan"]

SELF_TEST = 2
"""Number of what is tested; results of another one are not taken."""
_MOST = 256
PLANS = (
    RowPlan(1, _MOST),
    RowPlan(2, _MOST),
    RowPlan(4, _MOST),
    RowPlan(16, _MOST),
    RowPlan(1, _MOST, tile=32),
    RowPlan(4, _MOST, 4, tile=32),
    RowPlan(16, _MOST, 16, tile=16),
    RowPlan(64, _MOST, 16),
    RowPlan(64, 128, 16),
    RowPlan(64, 64, 64),
    RowPlan(1, 32),
    RowPlan(16, 16, 16),
)
"""What is tried on the CPU; the cheapest come first."""
# Up to about so many rows a step costs a GPU no more than reading the weights does.
CUDA_PLANS = (RowPlan(_MOST, _MOST, _MOST), RowPlan(128, 128, 128), RowPlan(64, 64, 64))
_NUM_TOKENS = 24
_SPLITS: tuple[tuple[int, ...], ...] = ((16, 8), (9, 7, 5, 3), (23, 1), (1,) * _NUM_TOKENS, (2, 3, 2, 3, 4, 2, 3, 5))
# Numbers of rows at which libraries are known to change kernels, and their neighbours; those that differ most often come
# first, so that a plan that does not hold costs little.
_TOTALS = (256, 33, 129, 64, 193, 49, 96, 25, 31, 32, 47, 48, 63, 65, 80, 127, 128, 160, 192, 224, 255)
# Numbers of rows with logits, likewise; the largest comes after them.
_OUTPUTS = (33, 2, 129, 3, 4, 5, 8, 15, 16, 17, 31, 32, 48, 63, 65, 96, 192, 1)
_CONTEXT, _DRAFTS = 186, 8
"""Tokens of a text and of the drafts that follow it; they cross position 192, where the native kernel starts a tile."""
TEST_TOKENS = 2 * _MOST
"""Tokens that the cache of a runner under test has to hold."""


def find_plan(
    make: Callable[[RowPlan], Runner],
    plans: Sequence[RowPlan],
    vocab_size: int,
    max_outputs: int,
    adapters: Sequence[str] = (),
) -> RowPlan | None:
    """The first plan under which KV and logits depend on nothing but a sequence's own tokens; None if none.

    It does not depend on how fast anything is: machines of one kind find the same plan, and so the same fingerprints.

    Args:
        make: gives a runner with an empty cache of at least `TEST_TOKENS` tokens.
        plans: what to try.
        vocab_size: token ids.
        max_outputs: rows of a step that logits may be wanted of.
        adapters: it has to hold with each of these, too.
    """
    for plan in plans:
        if _Bench(make(plan), plan, vocab_size).holds_with(adapters, max_outputs):
            return plan
    return None


class _Bench:
    def __init__(self, runner: Runner, plan: RowPlan, vocab_size: int) -> None:
        self._runner = runner
        self._plan = plan
        # Fixed ids from the middle of the vocabulary: ordinary text pieces, no control tokens.
        low, high = vocab_size // 16, vocab_size - vocab_size // 16
        rng = np.random.Generator(np.random.PCG64(1))
        self._tokens = [int(token) for token in rng.integers(low, max(low + 1, high), _NUM_TOKENS)]
        self._others = [int(token) for token in rng.integers(low, max(low + 1, high), _MOST)]

    def holds_with(self, adapters: Sequence[str], max_outputs: int) -> bool:
        try:
            return all(self.holds(adapter, max_outputs) for adapter in (None, *adapters))
        except KiteError:
            return False

    def holds(self, adapter: str | None, max_outputs: int) -> bool:
        reference = self._run(adapter, (min(_NUM_TOKENS, self._plan.max_rows),))
        totals = [total for total in _TOTALS if total <= self._plan.max_rows]
        return (
            all(self._run(adapter, (_NUM_TOKENS,), total - _NUM_TOKENS) == reference for total in totals)
            # A lone last token, as in a decode step, in a large crowd.
            and self._run(adapter, (_NUM_TOKENS - 1, 1), self._plan.max_rows // 2) == reference
            and all(self._run(adapter, split) == reference for split in _SPLITS)
            and self._outputs_hold(adapter, max_outputs)
            and self._drafts_hold(adapter, max_outputs)
        )

    def _outputs_hold(self, adapter: str | None, max_outputs: int) -> bool:
        """Whether logits stay the same beside any number of others: of sequences of four tokens, wanted of the last."""
        wanted: list[bytes] = []
        most = min(max_outputs, self._plan.max_rows // 4 * 4)
        for count in (*(count for count in _OUTPUTS if count < most), most):
            sequences = [self._runner.tables.create(adapter) for _ in range(-(-count // 4))]
            drafts = [3] * (count // 4) + [count % 4 - 1] * (count % 4 > 0)
            result = self._runner.step(
                [
                    StepWork(each, self._tokens[:4], 0, True, drafts=number)
                    for each, number in zip(sequences, drafts, strict=True)
                ]
            )
            rows = [_bytes_of(result, place) for place in range(len(sequences))]
            for each in sequences:
                self._runner.tables.release(each)
            wanted = max(wanted, *rows, key=len)
            if any(row != wanted[-len(row) :] for row in rows):
                return False
        return True

    def _drafts_hold(self, adapter: str | None, max_outputs: int) -> bool:
        """Whether drafts at the end of a text have the logits and the KV of the same tokens one by one, alone and beside
        decoding sequences and prompts."""
        text, most, size = self._runner.tables.create(adapter), self._plan.max_rows, _DRAFTS + 1
        for first in range(0, _CONTEXT, most):
            self._runner.step([StepWork(text, self._others[first : min(first + most, _CONTEXT)], first, False)])
        wanted = self._verify(text, adapter, (1,) * size)
        free, others = most - size, max(0, min(most, max_outputs) - size)
        held = (
            all(self._verify(text, adapter, split) == wanted for split in ((size,), (2, 4, 3), (5, 4)))
            and self._verify(text, adapter, (size,), decoding=min(15, others)) == wanted
            and self._verify(text, adapter, (size,), prompt=free) == wanted
            and self._verify(text, adapter, (4, 5), decoding=min(5, others), prompt=min(24, free - 5)) == wanted
        )
        self._runner.tables.release(text)
        return held

    def _verify(
        self, text: SequenceId, adapter: str | None, split: Sequence[int], decoding: int = 0, prompt: int = 0
    ) -> tuple[list[bytes], list[bytes]]:
        """Logits and KV of the tokens after the text, those of each step but the first taken as drafts; the text is as
        before. Each step also has `decoding` sequences with one row, half of them before, and `prompt` rows of another."""
        tables, start = self._runner.tables, _CONTEXT
        rows: list[bytes] = []
        for size in split:
            offset = start - _CONTEXT
            work = [StepWork(tables.create(adapter), self._others[:prompt], 0, False)] if prompt else []
            work += [StepWork(tables.create(adapter), [token], 0, True) for token in self._others[:decoding]]
            beside, place = [item.sequence for item in work], len(work) // 2
            drafts = StepWork(text, self._tokens[offset : offset + size], start, True, drafts=size - 1)
            rows += _bytes_of(self._runner.step([*work[:place], drafts, *work[place:]]), place)
            for each in beside:
                tables.release(each)
            start += size
        first = _CONTEXT // tables.block_tokens
        blocks = self._runner.export(text, first, -(-start // tables.block_tokens) - first, None)
        self._runner.truncate(text, _CONTEXT)
        return rows, [block.data.tobytes() for block in blocks]

    def _run(self, adapter: str | None, split: Sequence[int], crowd: int = 0) -> tuple[bytes, list[bytes]]:
        """Logits after the last token, and the KV of all; each step also has `crowd` rows of another sequence before."""
        tables = self._runner.tables
        sequence, start = tables.create(adapter), 0
        last = b""
        for size in (*split, *([self._plan.max_rows] * _NUM_TOKENS)):
            count = min(size, _NUM_TOKENS - start, self._plan.max_rows - crowd)
            if count <= 0:
                break
            end = start + count
            work = [StepWork(sequence, self._tokens[start:end], start, end == _NUM_TOKENS)]
            other: SequenceId | None = None
            if crowd:
                other = tables.create(adapter)
                work.insert(0, StepWork(other, self._others[:crowd], 0, False))
            logits = self._runner.step(work).logits[-1]
            if logits is not None:
                last = logits.tobytes()
            if other is not None:
                tables.release(other)
            start = end
        blocks = self._runner.export(sequence, 0, -(-_NUM_TOKENS // tables.block_tokens), None)
        tables.release(sequence)
        return last, [block.data.tobytes() for block in blocks]


def _bytes_of(result: StepResult, place: int) -> list[bytes]:
    """The logits of one item, those before its drafts first."""
    last = result.logits[place]
    assert last is not None
    drafts = result.draft_logits[place] if result.draft_logits else ()
    return [row.tobytes() for row in (*drafts, last)]
