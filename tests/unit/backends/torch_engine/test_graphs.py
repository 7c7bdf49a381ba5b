"""Static memory of decode graphs: what a replay reads is what the step was given, for every size of batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from kitelib.abc import TokenDraw
from kitelib.backends.torch_engine.graphs import BUCKETS, DecodeBatch, DecodeGraphs, PlainReplay, buckets_to
from kitelib.backends.torch_engine.plan import StepPlan

_VOCABULARY = 64
_BLOCK = 4
_CPU = torch.device("cpu")
_GREEDY = TokenDraw(0.0, 0, 1.0, 0.0, 0.0)


class _Recorder:
    """A model whose logits tell what it was given, and which keeps the last plan."""

    def __init__(self) -> None:
        self.calls = 0
        self.seen: dict[str, Any] = {}

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        self.calls += 1
        rows = plan.num_rows
        assert input_ids.shape == positions.shape == (1, rows)
        assert plan.row_starts.tolist() == list(range(rows + 1))
        assert (plan.max_rows, plan.num_sequences, plan.scratch) == (1, rows, None)
        self.seen = {
            "ids": input_ids[0].tolist(),
            "positions": positions[0].tolist(),
            "contexts": plan.contexts.tolist(),
            "slots": plan.slots.tolist(),
            "tables": [
                row[: -(-count // _BLOCK)].tolist()
                for row, count in zip(plan.tables, plan.contexts.tolist(), strict=True)
            ],
        }
        assert plan.positions.tolist() == self.seen["positions"]
        assert (plan.contexts.dtype, plan.tables.dtype, plan.slots.dtype) == (torch.int32, torch.int32, torch.int64)
        logits = torch.zeros((rows, _VOCABULARY))
        logits[torch.arange(rows), (input_ids[0] + 1) % _VOCABULARY] = 10.0
        return logits


class _LateGraphs:
    """Records what is queued and does it only when somebody waits, as a device does."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], None]] = []
        self.captures = 0

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        self.captures += 1
        function()
        return lambda: self.queue.append(function)

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        def copy() -> None:
            target.copy_(source)

        self.queue.append(copy)

    def mark(self) -> Callable[[], None]:
        end = len(self.queue)

        def wait() -> None:
            for index in range(end):
                self.queue[index]()
                self.queue[index] = lambda: None

        return wait

    def scope(self) -> AbstractContextManager[Any]:
        return nullcontext()


def _graphs(forward: Any, api: Any = None, **options: Any) -> DecodeGraphs:
    options = {"buckets": (1, 2, 4, 7), "max_blocks": 5, "max_context": 5 * _BLOCK, **options}
    return DecodeGraphs(
        forward, vocab_size=_VOCABULARY, logits_dtype=torch.float32, device=_CPU, api=api or PlainReplay(), **options
    )


@dataclasses.dataclass(frozen=True)
class _Row:
    token: int
    context: int
    blocks: list[int]
    draw: TokenDraw | None = None

    @property
    def used(self) -> list[int]:
        return self.blocks[: -(-self.context // _BLOCK)]


def _row(token: int, context: int, blocks: list[int], draw: TokenDraw | None = None) -> _Row:
    return _Row(token, context, blocks, draw)


def _batch(rows: list[_Row]) -> DecodeBatch:
    tables = np.full((len(rows), max(len(row.blocks) for row in rows)), -7, np.int32)
    for table, row in zip(tables, rows, strict=True):
        table[: len(row.blocks)] = row.blocks
    return DecodeBatch(
        ids=np.array([row.token for row in rows], np.int64),
        contexts=np.array([row.context for row in rows], np.int32),
        slots=np.array([row.used[-1] * _BLOCK + (row.context - 1) % _BLOCK for row in rows], np.int64),
        tables=tables,
        draws=[row.draw for row in rows],
    )


def test_a_step_reads_what_it_was_given_and_padding() -> None:
    """Three rows use the graph of four; the table may be longer than the context needs."""
    forward = _Recorder()
    graphs = _graphs(forward)
    rows = [_row(5, 1, [9]), _row(6, 4, [3, 77]), _row(7, 13, [8, 2, 4, 1])]
    step = graphs.run(_batch(rows))
    assert forward.seen == {
        "ids": [5, 6, 7, 0],
        "positions": [0, 3, 12, 0],
        "contexts": [1, 4, 13, 0],
        "slots": [36, 15, 4, -1],
        "tables": [[9], [3], [8, 2, 4, 1], []],
    }
    assert step.logits.shape == (3, _VOCABULARY)
    assert step.logits.argmax(-1).tolist() == [6, 7, 8]
    assert step.tokens() == []


def test_sizes_follow_each_other_in_any_order() -> None:
    """All sizes share their memory, so nothing of one step may show in the next."""
    forward = _Recorder()
    graphs = _graphs(forward)
    random = np.random.default_rng(0)
    for count in [7, 1, 4, 2, 3, 7, 5, 1, 6, 2]:
        contexts = random.integers(1, 5 * _BLOCK, count).tolist()
        rows = [
            _row(int(random.integers(60)), context, random.integers(0, 99, 5).tolist(), _GREEDY) for context in contexts
        ]
        step = graphs.run(_batch(rows))
        padding = graphs.bucket(count) - count
        assert forward.seen["ids"] == [row.token for row in rows] + [0] * padding
        assert forward.seen["contexts"] == contexts + [0] * padding
        assert forward.seen["tables"][:count] == [row.used for row in rows]
        assert step.tokens() == [(row.token + 1) % _VOCABULARY for row in rows]


def test_rows_are_drawn_with_their_own_options() -> None:
    """Greedy rows, rows that draw, and rows whose logits the host wants, in one step."""
    graphs = _graphs(lambda ids, positions, plan: torch.zeros((plan.num_rows, _VOCABULARY)))
    draws = [_GREEDY, None, TokenDraw(1.0, 0, 1.0, 0.0, 0.5), TokenDraw(1.0, 8, 1.0, 0.0, 0.5)]
    tokens = graphs.run(_batch([_row(1, 1, [0], draw) for draw in draws])).tokens()
    assert tokens == [0, 0, _VOCABULARY // 2, 4]
    assert graphs.run(_batch([_row(1, 1, [0], draws[2])])).tokens() == [_VOCABULARY // 2]


def test_two_steps_may_be_queued_before_the_first_is_read() -> None:
    """Each has its own host buffers; the third step waits until the first one's were copied."""
    forward, api = _Recorder(), _LateGraphs()
    graphs = _graphs(forward, api)
    graphs.warm()
    first = graphs.run(_batch([_row(10, 1, [0], _GREEDY)]))
    second = graphs.run(_batch([_row(20, 1, [0], _GREEDY), _row(30, 2, [1], _GREEDY)]))
    assert forward.seen["slots"] == [-1]
    assert second.tokens() == [21, 31]
    assert first.tokens() == [11]
    graphs.run(_batch([_row(50, 1, [0], _GREEDY)]))
    third = graphs.run(_batch([_row(54, 1, [0], _GREEDY)]))
    fourth = graphs.run(_batch([_row(58, 1, [0], _GREEDY)]))
    assert third.tokens() == [55]
    assert fourth.tokens() == [59]


def test_warming_captures_everything_once_the_largest_first() -> None:
    """Later steps capture nothing more, unless they sample in a way not seen before."""
    forward, api = _Recorder(), _LateGraphs()
    graphs = _graphs(forward, api)
    progress: list[tuple[int, int]] = []
    sizes: list[int] = []

    def watch(done: int, total: int) -> None:
        progress.append((done, total))
        sizes.append(len(forward.seen["ids"]))

    graphs.warm(watch)
    assert progress == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert sizes == [7, 4, 2, 1]
    assert api.captures == 8
    graphs.run(_batch([_row(1, 1, [0], _GREEDY)] * 3)).tokens()
    graphs.warm()
    assert api.captures == 8
    graphs.run(_batch([_row(1, 1, [0], TokenDraw(1.0, 2, 1.0, 0.0, 0.5))] * 3)).tokens()
    assert api.captures == 9


def test_captures_see_padding_only() -> None:
    """Whatever ran before, a capture must not write to the pages of living sequences."""
    forward, api = _Recorder(), _LateGraphs()
    graphs = _graphs(forward, api)
    graphs.run(_batch([_row(1, 20, [1, 2, 3, 4, 5])] * 7))
    graphs.run(_batch([_row(1, 1, [0])]))
    assert forward.seen == {"ids": [0], "positions": [0], "contexts": [0], "slots": [-1], "tables": [[]]}


def test_what_fits() -> None:
    """More rows or longer sequences than there is static memory for go another way."""
    graphs = _graphs(_Recorder())
    assert graphs.max_rows == 7
    assert graphs.fits(7, 20)
    assert not graphs.fits(8, 1)
    assert not graphs.fits(1, 21)


def test_one_size_pads_every_batch_alike() -> None:
    """So that every step uses the same kernels."""
    forward = _Recorder()
    graphs = _graphs(forward, buckets=(6,))
    graphs.run(_batch([_row(3, 2, [1])]))
    assert forward.seen["ids"] == [3, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("most", [1, 3, 8, 60, 100, 256, 300])
def test_buckets_end_with_the_most(most: int) -> None:
    """Padding is at most the batch itself, and a quarter of large ones."""
    buckets = buckets_to(most)
    assert buckets[-1] == most
    assert list(buckets) == sorted(set(buckets))
    for count in range(1, most + 1):
        size = next(each for each in buckets if each >= count)
        assert size <= max(2 * count, 1)
        assert size - count < 32
    assert BUCKETS[-1] == 256
