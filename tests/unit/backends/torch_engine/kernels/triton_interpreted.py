"""Cases for Triton's interpreter; `test_triton_attention` runs this module with the interpreter switched on.

The switch is an environment variable that must be set before triton is imported, and stays for the whole process.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

from kitelib.backends.torch_engine.kernels import triton_attention
from kitelib.backends.torch_engine.kernels.gathered import GatheredAttention
from kitelib.backends.torch_engine.kernels.triton_attention import TritonAttention
from kitelib.backends.torch_engine.pages import LayerShape, PagedCache
from kitelib.backends.torch_engine.plan import StepPlan
from tests.support.attention_cases import Case as PassCase
from tests.support.attention_cases import Shape as PassShape
from tests.support.attention_cases import attend, fresh_cache, make_pass, reference, spread

torch.set_num_threads(1)


def _dot(
    self: interpreter.InterpreterBuilder,
    a: TensorHandle,
    b: TensorHandle,
    d: TensorHandle,
    precision: Any,
    imprecise: int,
) -> TensorHandle:
    """The interpreter keeps bfloat16 as 16-bit integers, and multiplies those."""

    def numbers(handle: TensorHandle) -> np.ndarray:
        if handle.dtype.scalar == tl.bfloat16:
            return (handle.data.astype(np.uint32) << 16).view(np.float32)
        return handle.data.astype(np.float32)

    return TensorHandle(np.matmul(numbers(a), numbers(b)) + d.data, d.dtype.scalar)


class _Kept:
    """In place of what would undo the patches."""

    def restore(self) -> None:
        pass


def _patch_once(function: Any, *, patch: Any = interpreter._patch_lang, done: set[int] = set()) -> _Kept:  # noqa: B006
    """The interpreter patches triton.language anew for each call of a function, which is most of its time."""
    if id(function.__globals__) not in done:
        done.add(id(function.__globals__))
        patch(function)
    return _Kept()


interpreter._patch_lang = _patch_once
interpreter.InterpreterBuilder.create_dot = _dot

FILLING = 1e4
"""What blocks hold that no sequence wrote: finite, and far from anything right."""


@dataclasses.dataclass
class Case:
    """Sequences of one pass: (tokens in the cache before, new rows) each, and the shape of their layer."""

    sequences: list[tuple[int, int]]
    heads: int = 4
    kv_heads: int = 2
    key_dim: int = 64
    value_dim: int = 0
    block_tokens: int = 16
    window: int = 0
    softcap: float = 0.0
    dtype: torch.dtype = torch.float32
    padding_rows: int = 0
    padding_sequences: int = 0
    num_sms: int = 1
    bitwise: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        self.value_dim = self.value_dim or self.key_dim

    @property
    def scale(self) -> float:
        return self.key_dim**-0.5


@dataclasses.dataclass
class Content:
    """Queries, keys and values of all tokens of every sequence, cached ones included: (tokens, heads, dim)."""

    queries: list[torch.Tensor]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


def content_of(case: Case) -> Content:
    """Random content; that of a sequence depends on the seed and its number only."""
    content = Content([], [], [])
    for number, (cached, new) in enumerate(case.sequences):
        generator = torch.Generator().manual_seed(case.seed * 1000 + number)

        def draw(heads: int, dim: int, count: int = cached + new, source: torch.Generator = generator) -> torch.Tensor:
            return torch.randn((count, heads, dim), generator=source).to(case.dtype)

        content.queries.append(draw(case.heads, case.key_dim) * 2)
        content.keys.append(draw(case.kv_heads, case.key_dim))
        content.values.append(draw(case.kv_heads, case.value_dim))
    return content


def run(case: Case, content: Content, block_seed: int = 0) -> tuple[list[torch.Tensor], PagedCache, StepPlan]:
    """New rows' output per sequence, (rows, heads, value dim), of the second of two layers of a cache whose blocks are
    dealt at random."""
    size = case.block_tokens
    needed = [-(-(cached + new) // size) for cached, new in case.sequences]
    layers = [LayerShape(1, 8, 1, 8), LayerShape(case.kv_heads, case.key_dim, case.kv_heads, case.value_dim)]
    cache = PagedCache(layers, sum(needed) + 3, size, case.dtype, "cpu")
    cache.arena.fill_(FILLING)
    order = torch.randperm(cache.num_blocks, generator=torch.Generator().manual_seed(block_seed)).tolist()
    total = len(case.sequences) + case.padding_sequences
    tables = torch.full((total, max(needed) + 2), 2**30, dtype=torch.int32)
    slots: list[int] = []
    positions: list[int] = []
    for number, (cached, new) in enumerate(case.sequences):
        blocks = [order.pop() for _ in range(needed[number])]
        tables[number, : len(blocks)] = torch.tensor(blocks)
        for token in range(cached):
            cache.keys(1)[blocks[token // size], token % size] = content.keys[number][token]
            cache.values(1)[blocks[token // size], token % size] = content.values[number][token]
        slots += [blocks[token // size] * size + token % size for token in range(cached, cached + new)]
        positions += range(cached, cached + new)
    new_rows = [new for _, new in case.sequences]
    starts = [0, *itertools.accumulate(new_rows)]
    # As in a captured graph: sequences of padding have context 0, and a row each as long as there are any.
    starts += [starts[-1] + min(number + 1, case.padding_rows) for number in range(case.padding_sequences)]
    real_rows = sum(new_rows)
    plan = StepPlan(
        num_rows=real_rows + case.padding_rows,
        num_sequences=len(case.sequences),
        max_rows=max(new_rows),
        max_context=max(cached + new for cached, new in case.sequences),
        row_starts=torch.tensor(starts, dtype=torch.int32),
        contexts=torch.tensor([*(sum(each) for each in case.sequences), *[0] * case.padding_sequences]).int(),
        tables=tables,
        slots=torch.tensor(slots + [-1] * case.padding_rows),
        positions=torch.tensor(positions + [0] * case.padding_rows),
    )
    kernel = TritonAttention(size, bitwise=case.bitwise, max_context=1 << 20, num_sms=case.num_sms, architecture=90)
    out = kernel.attend(
        *(_packed(case, each) for each in (content.queries, content.keys, content.values)),
        cache.keys(1),
        cache.values(1),
        plan,
        scale=case.scale,
        window=case.window,
        softcap=case.softcap,
    )
    assert out.is_contiguous()
    assert out.dtype == case.dtype
    assert not out[real_rows:].any()
    return list(out[:real_rows].split(new_rows)), cache, plan


def _packed(case: Case, tensors: list[torch.Tensor]) -> torch.Tensor:
    """The new rows of all sequences as a model hands them over, (heads, rows, dim) with the first two exchanged."""
    rows = torch.cat([each[cached:] for each, (cached, _) in zip(tensors, case.sequences, strict=True)])
    padding = torch.full((case.padding_rows, *rows.shape[1:]), 3.0, dtype=rows.dtype)
    return torch.cat([rows, padding]).transpose(0, 1).contiguous().transpose(0, 1)


def expected(case: Case, content: Content) -> list[torch.Tensor]:
    """The same in float64, straight from the definition."""
    results = []
    for number, (cached, new) in enumerate(case.sequences):
        query, key, value = (each[number].double() for each in (content.queries, content.keys, content.values))
        key = key.repeat_interleave(case.heads // case.kv_heads, 1)
        value = value.repeat_interleave(case.heads // case.kv_heads, 1)
        scores = torch.einsum("qhd,khd->hqk", query[cached:], key) * case.scale
        if case.softcap:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        distance = torch.arange(cached, cached + new)[:, None] - torch.arange(cached + new)[None, :]
        hidden = distance < 0
        if case.window:
            hidden |= distance >= case.window
        scores = scores.masked_fill(hidden, -torch.inf)
        results.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), value))
    return results


TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def check(case: Case) -> None:
    """The kernel agrees with the definition, and the new rows' keys and values are in their pages."""
    content = content_of(case)
    results, cache, plan = run(case, content)
    for number, (got, want) in enumerate(zip(results, expected(case, content), strict=True)):
        torch.testing.assert_close(got.double(), want, atol=TOLERANCES[case.dtype], rtol=0)
        for token in range(sum(case.sequences[number])):
            block = int(plan.tables[number, token // case.block_tokens])
            assert torch.equal(cache.keys(1)[block, token % case.block_tokens], content.keys[number][token])
            assert torch.equal(cache.values(1)[block, token % case.block_tokens], content.values[number][token])
    written = sum(sum(each) for each in case.sequences) * case.kv_heads * case.key_dim
    assert int((cache.keys(1) != FILLING).sum()) == written, "only the slots of the pass were written"


DECODE = [(40, 1), (3, 1), (17, 1)]
MIXED = [(33, 5), (40, 1), (0, 18)]

kinds = pytest.mark.parametrize(
    ("sequences", "bitwise"),
    [(DECODE, False), (MIXED, False), (MIXED, True)],
    ids=["decode", "mixed", "mixed bitwise"],
)
"""Decoding in mode bitwise is the subject of `test_bits` and `test_spans`."""


@kinds
@pytest.mark.parametrize(
    ("key_dim", "value_dim"), [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]
)
def test_dims(key_dim: int, value_dim: int, sequences: list[tuple[int, int]], bitwise: bool) -> None:
    check(Case(sequences, key_dim=key_dim, value_dim=value_dim, bitwise=bitwise))


@kinds
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (9, 3), (8, 2), (8, 1), (20, 1)])
def test_groups(heads: int, kv_heads: int, sequences: list[tuple[int, int]], bitwise: bool) -> None:
    check(Case(sequences, heads=heads, kv_heads=kv_heads, key_dim=16, bitwise=bitwise))


@kinds
@pytest.mark.parametrize("block_tokens", [8, 16, 32])
def test_blocks(block_tokens: int, sequences: list[tuple[int, int]], bitwise: bool) -> None:
    check(Case(sequences, block_tokens=block_tokens, key_dim=16, bitwise=bitwise))


@kinds
@pytest.mark.parametrize("window", [1, 7, 32, 1000])
def test_windows(window: int, sequences: list[tuple[int, int]], bitwise: bool) -> None:
    check(Case(sequences, window=window, key_dim=16, bitwise=bitwise))


@kinds
@pytest.mark.parametrize("window", [0, 12])
def test_caps(window: int, sequences: list[tuple[int, int]], bitwise: bool) -> None:
    check(Case(sequences, softcap=1.5, window=window, key_dim=32, bitwise=bitwise))


@kinds
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_types(dtype: torch.dtype, sequences: list[tuple[int, int]], bitwise: bool) -> None:
    check(Case(sequences, heads=8, key_dim=80, dtype=dtype, bitwise=bitwise))


@kinds
@pytest.mark.parametrize(("padding_rows", "padding_sequences"), [(3, 0), (5, 5), (0, 2)])
def test_padding(padding_rows: int, padding_sequences: int, sequences: list[tuple[int, int]], bitwise: bool) -> None:
    case = Case(sequences, key_dim=16, bitwise=bitwise)
    check(dataclasses.replace(case, padding_rows=padding_rows, padding_sequences=padding_sequences))


@pytest.mark.parametrize("bitwise", [False, True])
@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize(
    "sequences",
    [[(600, 1), (2, 1), (300, 1)], [(580, 9), (5, 3)], [(530, 1), (100, 9)]],
    ids=["decode", "prefill", "mixed"],
)
def test_spans(sequences: list[tuple[int, int]], window: int, bitwise: bool) -> None:
    case = Case(sequences, window=window, kv_heads=1, heads=2, key_dim=16, bitwise=bitwise, num_sms=20)
    check(dataclasses.replace(case, padding_rows=1, padding_sequences=1))


def bits_in(case: Case, content: Content, pieces: list[tuple[int, int]], others: bool, block_seed: int) -> torch.Tensor:
    """Output of the rows of sequence 0, computed in passes of some rows each: (first row, end)."""
    rows = []
    for begin, end in pieces:
        partners = [(90, 1), (0, 37 if end - begin > 1 else 1)] if others else []
        moved = dataclasses.replace(case, sequences=[(begin, end - begin), *partners])
        extra = content_of(dataclasses.replace(moved, seed=7))
        mine = Content(
            *([each[0][:end], *rest[1:]] for each, rest in (
                (content.queries, extra.queries), (content.keys, extra.keys), (content.values, extra.values)
            ))
        )  # fmt: skip
        rows.append(run(moved, mine, block_seed)[0][0])
    return torch.cat(rows)


@pytest.mark.parametrize(
    ("dtype", "window", "softcap"),
    [(torch.float16, 0, 0.0), (torch.bfloat16, 70, 0.0), (torch.float16, 0, 20.0)],
    ids=["plain", "window", "cap"],
)
def test_bits(dtype: torch.dtype, window: int, softcap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_attention, "FIXED_SPAN", 64)  # so that few tokens make enough spans to merge
    tokens, start = 200, 182
    case = Case([(0, tokens)], heads=3, kv_heads=1, key_dim=16, dtype=dtype, window=window, softcap=softcap)
    case = dataclasses.replace(case, bitwise=True)
    content = content_of(case)
    whole = bits_in(case, content, [(0, tokens)], others=False, block_seed=1)[start:]
    chunks = bits_in(case, content, [(160, 187), (187, tokens)], others=False, block_seed=2)[start - 160 :]
    assert torch.equal(chunks, whole)
    assert torch.equal(bits_in(case, content, [(start, tokens)], others=True, block_seed=3), whole)
    blocks = dataclasses.replace(case, block_tokens=8)
    assert torch.equal(bits_in(blocks, content, [(start, tokens)], others=False, block_seed=6), whole)
    for num_sms in (1, 200):  # spans merged by one program, or shared by several
        sized = dataclasses.replace(case, num_sms=num_sms)
        for others in (False, True):
            rows = [(row, row + 1) for row in range(start, tokens)][1 + others :: 5]
            decoded = bits_in(sized, content, rows, others=others, block_seed=4)
            assert torch.equal(decoded, whole[1 + others :: 5])


@pytest.mark.parametrize(("window", "bitwise"), [(0, True), (70, True), (0, False)])
def test_drafts_bits_as_sequences_of_their_own(window: int, bitwise: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with the same blocks and one token more each, as a captured decode step has them: each sees the KV of those
    before it, and has the bits of rows of one sequence where bits matter."""
    monkeypatch.setattr(triton_attention, "FIXED_SPAN", 64)
    shape = PassShape(6, 2, 16, dtype=torch.float16, window=window)
    case = PassCase(shape, [200, 90])
    tables, num_blocks = spread(case)
    first = [(0, 195, 195), (1, 89, 89)]
    found = []
    for parts in ([(0, 200, 5), (1, 90, 1)], [*((0, end, 1) for end in range(196, 201)), (1, 90, 1)]):
        cache = fresh_cache(shape, num_blocks, FILLING)
        kernel = TritonAttention(shape.block, bitwise=bitwise, max_context=1 << 20, num_sms=20, architecture=90)
        attend(GatheredAttention(), make_pass(case, first, tables), cache)
        step = make_pass(case, parts, tables)
        found.append(attend(kernel, step, cache))
        torch.testing.assert_close(found[-1].double(), reference(step), atol=TOLERANCES[shape.dtype], rtol=0)
    assert torch.equal(*found) or not bitwise
