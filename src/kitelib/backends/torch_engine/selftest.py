"""Finds out, with the loaded model on this machine, under which numbers of rows a row's bits don't depend on its
company: then every KV block and every logit is the same in prefill and decode, in any chunking, beside anything.

Attention gives every row its own bits by construction (`AttentionKernel.row_invariant`). Matrix libraries choose
their kernels, and so the order of their sums, by the number of rows; from some number on, and up to another, they
agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kitelib.abc import SequenceId, StepWork
from kitelib.backends.torch_engine.packing import RowPlan
from kitelib.backends.torch_engine.runner import Runner
from kitelib.errors import KiteError

__all__ = ["CUDA_PLANS", "PLANS", "TEST_TOKENS", "find_plan"]

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
        max_outputs: rows of a step that may ask for logits.
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
        )

    def _outputs_hold(self, adapter: str | None, max_outputs: int) -> bool:
        wanted: bytes | None = None
        most = min(max_outputs, self._plan.max_rows // 2)
        for count in sorted({1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 32, 33, 48, most} & set(range(1, most + 1))):
            sequences = [self._runner.tables.create(adapter) for _ in range(count)]
            work = [StepWork(each, self._tokens[:2], 0, True) for each in sequences]
            found = {logits.tobytes() for logits in self._runner.step(work).logits if logits is not None}
            for each in sequences:
                self._runner.tables.release(each)
            wanted = wanted or next(iter(found))
            if found != {wanted}:
                return False
        return True

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
