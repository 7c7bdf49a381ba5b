"""Cases for Triton's interpreter; `test_triton_lora` runs this module with the interpreter switched on.

The switch is an environment variable that must be set before triton is imported, and stays for the whole process.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kitelib.backends.torch_engine.kernels.triton_lora import TileTable, add_adapters
from kitelib.backends.torch_engine.lora_linear import Active, AdaptedLinear, Current

torch.set_num_threads(1)

FEATURES, OUT = 530, 70
RANKS = {0: 16, 2: 48, 3: 32}
FACTORS = {0: 2.0, 2: 0.5, 3: 0.0}


def drawn(*shape: int, seed: int) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


MATRICES = {
    number: (drawn(rank, FEATURES, seed=number), drawn(OUT, rank, seed=10 + number)) for number, rank in RANKS.items()
}
X, START = drawn(60, FEATURES, seed=20), drawn(60, OUT, seed=21)


def site(*numbers: int) -> AdaptedLinear:
    found = AdaptedLinear("linear", Current(), row_invariant=True)
    for number in numbers:
        found.add(number, *MATRICES[number], FACTORS[number])
    return found


def added(active: Active, numbers: tuple[int, ...] = (0, 2, 3), first: int = 0, last: int = 60) -> Any:
    out = START[first:last].clone()
    add_adapters(X[first:last], out, active.tiles(last - first, torch.device("cpu")), site(*numbers).tables())
    return out


def test_rows_get_what_their_adapters_add() -> None:
    segments = ((2, 7, 0), (7, 9, 1), (9, 45, 2), (50, 60, 3))
    expected = START.double()
    for first, stop, number in segments:
        if number in RANKS:
            a, b = MATRICES[number]
            expected[first:stop] += FACTORS[number] * (X[first:stop].double() @ a.double().T) @ b.double().T
    found = added(Active(segments, 60))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-3)
    untouched = [0, 1, 7, 8, *range(45, 60)]
    assert torch.equal(found[untouched], START[untouched])


def test_bits_of_a_row_depend_on_no_other_row_and_no_other_adapter() -> None:
    whole = added(Active(((0, None, 2),), None))
    assert torch.equal(added(Active(((0, None, 2),), None), numbers=(2,)), whole)
    for first, last in ((0, 1), (5, 6), (17, 60), (3, 20)):
        assert torch.equal(added(Active(((0, None, 2),), None), first=first, last=last), whole[first:last])
    mixed = added(Active(((0, 5, 0), (5, 30, 2), (31, 60, 2)), 60))
    assert torch.equal(mixed[5:30], whole[5:30])
    assert torch.equal(mixed[31:], whole[31:])


def test_tiles_cut_segments_every_sixteen_rows() -> None:
    table = Active(((1, 4, 2), (4, 40, 0)), 64).tiles(64, torch.device("cpu"))
    assert isinstance(table, TileTable)
    rows = list(zip(table.first.tolist(), table.rows.tolist(), table.adapters.tolist(), strict=True))
    assert rows == [(1, 3, 2), (4, 16, 0), (20, 16, 0), (36, 4, 0)]
    whole = Active(((0, None, 5),), None).tiles(17, torch.device("cpu"))
    assert whole.rows.tolist() == [16, 1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_output_keeps_its_type(dtype: Any) -> None:
    a, b = (each.to(dtype) * 0.1 for each in MATRICES[0])
    one = AdaptedLinear("linear", Current(), row_invariant=True)
    one.add(0, a, b, 1.5)
    x, out = X[:20].to(dtype), START[:20].to(dtype)
    expected = out.double() + 1.5 * (x.double() @ a.double().T) @ b.double().T
    add_adapters(x, out, Active(((0, None, 0),), None).tiles(20, torch.device("cpu")), one.tables())
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=2e-3, atol=2e-3 if dtype == torch.float32 else 2e-2)
