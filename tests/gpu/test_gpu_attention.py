"""The attention kernel on the device against a float64 reference, for the shapes that models have."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from kitelib.backends.torch_engine.pages import LayerShape, PagedCache
from tests.gpu.rig import Skipped, device, on_gpu
from tests.support.attention_cases import Case, Pass, Shape, make_pass, reference

# Head sizes, blocks, groups, windows and caps of the models that are to be served, each value at least once.
_SHAPES = [
    Shape(query_heads=8, kv_heads=2, key_dim=64, block=8),
    Shape(query_heads=8, kv_heads=8, key_dim=80, block=16),
    Shape(query_heads=6, kv_heads=2, key_dim=96, block=32, window=40),
    Shape(query_heads=32, kv_heads=8, key_dim=128, block=16),
    Shape(query_heads=8, kv_heads=1, key_dim=128, block=32, softcap=30.0),
    Shape(query_heads=4, kv_heads=4, key_dim=192, value_dim=128, block=16),
    Shape(query_heads=8, kv_heads=4, key_dim=256, block=16, window=70, softcap=50.0),
]
_LENGTHS = [1, 17, 300, 64, 533]


def _kernel(shape: Shape, *, bitwise: bool) -> Any:
    if not on_gpu():
        from kitelib.backends.torch_engine.kernels.gathered import GatheredAttention

        return GatheredAttention()
    from kitelib.backends.torch_engine.kernels.triton_attention import TritonAttention

    return TritonAttention(shape.block, bitwise=bitwise, max_context=1024)


def _tables(shape: Shape, seed: int) -> tuple[list[list[int]], int]:
    """Blocks of every sequence in a random order, and how many there are in all."""
    counts = [-(-length // shape.block) for length in _LENGTHS]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed)).tolist()
    tables, start = [], 0
    for count in counts:
        tables.append(order[start : start + count])
        start += count
    return tables, start


class _Run:
    """One cache on the device, to which passes are given one after the other."""

    def __init__(self, case: Case, *, bitwise: bool, seed: int = 0) -> None:
        self.case = case
        self.tables, count = _tables(case.shape, seed)
        shape = case.shape
        layer = LayerShape(shape.kv_heads, shape.key_dim, shape.kv_heads, shape.values)
        self.cache = PagedCache([layer], count, shape.block, shape.dtype, device())
        self.cache.arena.fill_(900.0)  # what nobody has written must not matter
        self.kernel = _kernel(case.shape, bitwise=bitwise)

    def attend(self, parts: list[tuple[int, int, int]], padding: int = 0) -> tuple[Pass, torch.Tensor]:
        found, shape = make_pass(self.case, parts, self.tables, padding=padding), self.case.shape
        moved = {
            field.name: getattr(found.plan, field.name).to(device())
            for field in dataclasses.fields(found.plan)
            if isinstance(getattr(found.plan, field.name), torch.Tensor)
        }
        plan = dataclasses.replace(found.plan, **moved)
        query = found.query.transpose(0, 1).to(device()).transpose(0, 1)
        out = self.kernel.attend(
            query,
            found.key.to(device()),
            found.value.to(device()),
            self.cache.keys(0),
            self.cache.values(0),
            plan,
            scale=shape.factor,
            window=shape.window,
            softcap=shape.softcap,
        )
        return found, out.cpu()


def _chunks() -> list[list[tuple[int, int, int]]]:
    """Prefill in two parts, with a cached prefix in the second, then decode rows of all sequences."""
    halves = [(each, max(1, length // 2), max(1, length // 2)) for each, length in enumerate(_LENGTHS)]
    rests = [(each, length, length - length // 2 - 1) for each, length in enumerate(_LENGTHS) if length > 2]
    rests = [(each, length - 1, rows) for each, length, rows in rests]
    return [halves, rests, [(each, length, 1) for each, length in enumerate(_LENGTHS)]]


def test_every_shape_agrees_with_the_reference() -> None:
    """Within what rounding to the type allows; float32 much closer."""
    for base in _SHAPES if on_gpu() else _SHAPES[:3]:
        for dtype, tolerance in ((torch.bfloat16, 2e-2), (torch.float32, 1e-4)):
            if dtype is torch.float32 and base is not _SHAPES[0]:
                continue
            shape = dataclasses.replace(base, dtype=dtype)
            case = Case(shape, _LENGTHS, seed=3)
            for bitwise in (False, True):
                run = _Run(case, bitwise=bitwise)
                for parts in _chunks():
                    found, out = run.attend(parts, padding=2)
                    expected = reference(found)
                    error = (out.double() - expected).abs().max().item()
                    assert error < tolerance, f"{shape}, bitwise={bitwise}: largest error {error}"
                    assert not out[-2:].any(), f"{shape}: rows of padding are not 0"


def test_bitwise_rows_do_not_depend_on_their_company() -> None:
    """The same rows alone, in a decode step, in a crowd and in other blocks: the same bytes."""
    if not on_gpu():
        raise Skipped("the kernel of the CPU has tests of its own")
    for base in _SHAPES:
        shape = dataclasses.replace(base, dtype=torch.bfloat16)
        case = Case(shape, _LENGTHS, seed=5)
        whole = _Run(case, bitwise=True, seed=1)
        _, together = whole.attend([(each, length, length) for each, length in enumerate(_LENGTHS)])
        starts = [sum(_LENGTHS[:each]) for each in range(len(_LENGTHS))]
        other = _Run(case, bitwise=True, seed=2)
        for parts in _chunks():
            _, out = other.attend(parts)
            first = 0
            for each, context, rows in parts:
                start = starts[each] + context - rows
                assert torch.equal(out[first : first + rows], together[start : start + rows]), f"{shape}, {each}"
                first += rows
