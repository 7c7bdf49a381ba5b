"""Passes over a paged cache with random contents, and what attention must give for them, in float64."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from kitelib.backends.torch_engine.pages import LayerShape, PagedCache
from kitelib.backends.torch_engine.plan import StepPlan

__all__ = ["SHAPES", "TOLERANCE", "Case", "Pass", "Shape", "attend", "fresh_cache", "make_pass", "reference", "spread"]

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Largest difference to float64 that rounding explains, by type."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """What attention computes with."""

    query_heads: int = 4
    kv_heads: int = 2
    key_dim: int = 64
    value_dim: int | None = None
    block: int = 16
    dtype: torch.dtype = torch.float32
    window: int = 0
    softcap: float = 0.0
    scale: float | None = None

    @property
    def values(self) -> int:
        return self.value_dim or self.key_dim

    @property
    def factor(self) -> float:
        return self.scale or 1 / math.sqrt(self.key_dim)


SHAPES = (
    Shape(),
    Shape(9, 3, 64, block=8),
    Shape(8, 8, 80, block=8, window=33),
    Shape(8, 1, 96, 32, block=32),
    Shape(4, 4, 128, block=32, softcap=15.0),
    Shape(6, 2, 192, 128),
    Shape(2, 1, 256, window=70, softcap=5.0),
    Shape(14, 2, 20, 7, window=1),
)
"""Head sizes, ratios of heads, blocks, windows and caps that models have, and odd ones."""


class Case:
    """Sequences with fixed random tokens: the same seed gives the same rows in every pass."""

    def __init__(self, shape: Shape, lengths: list[int], seed: int = 0) -> None:
        self.shape, self.lengths = shape, lengths
        random = torch.Generator().manual_seed(seed)

        def rows(count: int, heads: int, dim: int) -> torch.Tensor:
            return torch.randn((count, heads, dim), generator=random).to(shape.dtype)

        self.queries = [rows(length, shape.query_heads, shape.key_dim) for length in lengths]
        self.keys = [rows(length, shape.kv_heads, shape.key_dim) for length in lengths]
        self.values = [rows(length, shape.kv_heads, shape.values) for length in lengths]


@dataclasses.dataclass
class Pass:
    """One pass: tokens contexts[i] - rows[i] .. contexts[i] - 1 of each chosen sequence."""

    case: Case
    sequences: list[int]
    contexts: list[int]
    rows: list[int]
    plan: StepPlan
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


def spread(case: Case, seed: int = 1) -> tuple[list[list[int]], int]:
    """Blocks for each sequence, in no order, and how many there are."""
    counts = [-(-length // case.shape.block) for length in case.lengths]
    numbers = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed)).tolist()
    return [[numbers.pop() for _ in range(count)] for count in counts], sum(counts)


def fresh_cache(shape: Shape, num_blocks: int, fill: float = 0.0) -> PagedCache:
    """A cache of one layer; `fill` is what blocks hold that nobody has written."""
    layer = LayerShape(shape.kv_heads, shape.key_dim, shape.kv_heads, shape.values)
    cache = PagedCache([layer], num_blocks, shape.block, shape.dtype, "cpu")
    cache.arena.fill_(fill)
    return cache


def make_pass(case: Case, parts: list[tuple[int, int, int]], tables: list[list[int]], *, padding: int = 0) -> Pass:
    """A pass over (sequence, context, new rows) parts; `tables` are the blocks of all sequences of the case."""
    shape = case.shape
    slots: list[int] = []
    positions: list[int] = []
    starts = [0]
    for sequence, context, rows in parts:
        for position in range(context - rows, context):
            slots.append(tables[sequence][position // shape.block] * shape.block + position % shape.block)
            positions.append(position)
        starts.append(len(slots))
    width = max(len(table) for table in tables) + 1
    plan = StepPlan(
        num_rows=len(slots) + padding,
        num_sequences=len(parts),
        max_rows=max(rows for _, _, rows in parts),
        max_context=max(context for _, context, _ in parts),
        row_starts=torch.tensor(starts, dtype=torch.int32),
        contexts=torch.tensor([context for _, context, _ in parts], dtype=torch.int32),
        tables=torch.tensor(
            [tables[each] + [0] * (width - len(tables[each])) for each, _, _ in parts], dtype=torch.int32
        ),
        slots=torch.tensor(slots + [-1] * padding, dtype=torch.int64),
        positions=torch.tensor(positions + [0] * padding, dtype=torch.int64),
    )

    def pack(sources: list[torch.Tensor]) -> torch.Tensor:
        real = [sources[each][context - rows : context] for each, context, rows in parts]
        return torch.cat([*real, torch.full((padding, *sources[0].shape[1:]), 3.0, dtype=shape.dtype)])

    return Pass(
        case,
        [each for each, _, _ in parts],
        [context for _, context, _ in parts],
        [rows for _, _, rows in parts],
        plan,
        # As models give it: heads first, seen through a transposed view.
        pack(case.queries).transpose(0, 1).contiguous().transpose(0, 1),
        pack(case.keys),
        pack(case.values),
    )


def attend(kernel: Any, done: Pass, cache: PagedCache) -> torch.Tensor:
    """Runs the kernel on the pass."""
    shape = done.case.shape
    out: torch.Tensor = kernel.attend(
        done.query,
        done.key,
        done.value,
        cache.keys(0),
        cache.values(0),
        done.plan,
        scale=shape.factor,
        window=shape.window,
        softcap=shape.softcap,
    )
    assert out.is_contiguous()
    assert out.dtype == shape.dtype
    assert out.shape == (done.plan.num_rows, shape.query_heads, shape.values)
    return out


def reference(done: Pass) -> torch.Tensor:
    """What the pass must give, float64."""
    shape = done.case.shape
    group = shape.query_heads // shape.kv_heads
    out = []
    for sequence, context, rows in zip(done.sequences, done.contexts, done.rows, strict=True):
        query = done.case.queries[sequence][context - rows : context].double()
        key = done.case.keys[sequence][:context].double().repeat_interleave(group, 1)
        value = done.case.values[sequence][:context].double().repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * shape.factor
        if shape.softcap:
            scores = shape.softcap * torch.tanh(scores / shape.softcap)
        position = torch.arange(context - rows, context)[:, None]
        other = torch.arange(context)[None, :]
        hidden = other > position
        if shape.window:
            hidden |= other <= position - shape.window
        weights = torch.softmax(scores.masked_fill(hidden, -math.inf), -1)
        out.append(torch.einsum("hqk,khd->qhd", weights, value))
    padding = done.plan.num_rows - sum(done.rows)
    return torch.cat([*out, torch.zeros((padding, shape.query_heads, shape.values), dtype=torch.float64)])
