"""Finds out, with the loaded model on this machine, under which numbers of rows a row's bits don't depend on its
company: then every KV block and every logit is the same in prefill and decode, in any chunking, beside anything.

Attention gives every row its own bits by construction (`AttentionKernel.row_invariant`). Matrix libraries choose
their kernels, and so the order of their sums, by the number of rows; from some number on, and up to another, they
agree.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from kitelib.abc import SequenceId, StepWork
from kitelib.backends.torch_engine.packing import RowPlan
from kitelib.backends.torch_engine.runner import Runner
from kitelib.errors import KiteError

__all__ = ["CUDA_PLANS", "PLANS", "TEST_TOKENS", "find_plan"]

_MOST = 256
PLANS = (
    (RowPlan(1, _MOST), RowPlan(2, _MOST), RowPlan(4, _MOST), RowPlan(16, _MOST)),
    (RowPlan(64, _MOST, 16), RowPlan(64, 128, 16), RowPlan(64, 64, 64)),
    (RowPlan(1, 32), RowPlan(4, 32), RowPlan(16, 32), RowPlan(16, 16, 16)),
)
"""Groups of plans: any row numbers, many rows at a time, few rows at a time. In a group the cheapest come first."""
# Up to about so many rows a step costs a GPU no more than reading the weights does.
CUDA_PLANS = ((RowPlan(_MOST, _MOST, _MOST), RowPlan(128, 128, 128), RowPlan(64, 64, 64)),)
_NUM_TOKENS = 24
_SPLITS: tuple[tuple[int, ...], ...] = ((16, 8), (9, 7, 5, 3), (23, 1), (1,) * _NUM_TOKENS, (2, 3, 2, 3, 4, 2, 3, 5))
# Numbers of rows at which libraries are known to change kernels, and their neighbours.
_TOTALS = (25, 31, 32, 33, 47, 48, 49, 63, 64, 65, 80, 96, 127, 128, 129, 160, 192, 193, 224, 255, 256)
TEST_TOKENS = 2 * _MOST
"""Tokens that the cache of a runner under test has to hold."""


def find_plan(
    make: Callable[[RowPlan], Runner],
    groups: Sequence[Sequence[RowPlan]],
    vocab_size: int,
    max_outputs: int,
    adapters: Sequence[str] = (),
) -> RowPlan | None:
    """The cheapest plan under which KV and logits depend on nothing but a sequence's own tokens; None if none.

    Args:
        make: gives a runner with an empty cache of at least `TEST_TOKENS` tokens.
        groups: what to try. If a plan of the first group holds, it is taken; else the best of the others' first ones.
        vocab_size: token ids.
        max_outputs: rows of a step that may ask for logits.
        adapters: it has to hold with each of these, too.
    """
    found: list[tuple[float, RowPlan]] = []
    for place, plans in enumerate(groups):
        for plan in plans:
            bench = _Bench(make(plan), plan, vocab_size)
            if bench.holds_with(adapters, max_outputs):
                if not place:
                    return plan
                found.append((bench.cost(), plan))
                break
    return min(found, key=lambda pair: pair[0])[1] if found else None


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

    def cost(self) -> float:
        """Seconds that a mix of work takes: three quarters of the steps with one row, one quarter with several, and
        eight prompt tokens for each of them."""
        most = self._plan.max_rows
        return 48 * self._time(1) + 16 * self._time(min(16, most)) + 512 / most * self._time(most)

    def _time(self, rows: int) -> float:
        tables, best = self._runner.tables, float("inf")
        for _ in range(3):
            sequence = tables.create(None)
            begun = time.perf_counter()
            self._runner.step([StepWork(sequence, self._others[:rows], 0, True)])
            best = min(best, time.perf_counter() - begun)
            tables.release(sequence)
        return best

    def holds(self, adapter: str | None, max_outputs: int) -> bool:
        reference = self._run(adapter, (min(_NUM_TOKENS, self._plan.max_rows),))
        if any(self._run(adapter, split) != reference for split in _SPLITS):
            return False
        if not self._outputs_hold(adapter, max_outputs):
            return False
        totals = [total for total in _TOTALS if total <= self._plan.max_rows]
        if any(self._run(adapter, (_NUM_TOKENS,), total - _NUM_TOKENS) != reference for total in totals):
            return False
        # A lone last token, as in a decode step, in a large crowd.
        return self._run(adapter, (_NUM_TOKENS - 1, 1), self._plan.max_rows // 2) == reference

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
