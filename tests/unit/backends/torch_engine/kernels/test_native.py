"""Native attention gives what the definition gives, and the same bits for a row whatever surrounds it."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from kitelib.backends.torch_engine.kernels import native
from kitelib.backends.torch_engine.kernels.native import NativeAttention
from kitelib.backends.torch_engine.kernels.openmp import parallel_function
from kitelib.errors import BackendStepError
from kitelib.native import library
from tests.support.attention_cases import (
    SHAPES,
    TOLERANCE,
    Case,
    Shape,
    attend,
    fresh_cache,
    make_pass,
    reference,
    spread,
)

LIBRARY = library.native_library()
KERNELS = LIBRARY.kernels() if LIBRARY else ()
needs_library = pytest.mark.skipif(LIBRARY is None, reason="the native part is not built")
each_kernel = pytest.mark.parametrize("kernel", KERNELS)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@needs_library
@each_kernel
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_chunks_decode_and_padding_give_what_the_definition_gives(shape, dtype, kernel):
    shape = dataclasses.replace(shape, dtype=dtype)
    case = Case(shape, [90, 77, 1, 130])
    tables, num_blocks = spread(case)
    cache = fresh_cache(shape, num_blocks, math.nan)
    attention = NativeAttention(LIBRARY, kernel, threads=1)
    first = make_pass(case, [(0, 50, 50), (1, 40, 40), (3, 128, 128)], tables)
    mixed = make_pass(case, [(2, 1, 1), (0, 89, 39), (3, 129, 1), (1, 76, 36)], tables, padding=3)
    decode = make_pass(case, [(3, 130, 1), (0, 90, 1), (1, 77, 1)], tables, padding=2)
    for each in (first, mixed, decode):
        out = attend(attention, each, cache).double()
        torch.testing.assert_close(out, reference(each), rtol=0, atol=TOLERANCE[dtype])


@needs_library
@each_kernel
@pytest.mark.parametrize(
    "shape",
    [
        Shape(9, 3, 64, dtype=torch.bfloat16),
        Shape(8, 1, 80, 96, window=50),
        Shape(7, 7, 40, dtype=torch.float16, softcap=5.0, window=100),
    ],
    ids=str,
)
def test_a_row_has_the_same_bits_whatever_surrounds_it(shape, kernel):
    length = 210
    whole = _rows_of(shape, kernel, [[(0, length, length)]])
    chunks = [[(0, end, size)] for end, size in ((3, 3), (67, 64), (131, 64), (132, 1), (210, 78))]
    by_one = [[(0, length - 20, length - 20)], *([(0, end, 1)] for end in range(length - 19, length + 1))]
    crowd = [[(1, 33, 33), (0, 100, 100), (2, 9, 9)], [(2, 10, 1), (0, 190, 90), (1, 70, 37)]]
    crowd += [[(0, end, 1), *((other, 70, 1) for other in (1, 2))] for end in range(191, length + 1)]
    for parts in (chunks, by_one, crowd):
        assert torch.equal(_rows_of(shape, kernel, parts), whole)
    for block in (8, 32, 48, 1):
        assert torch.equal(_rows_of(dataclasses.replace(shape, block=block), kernel, chunks), whole)
    for threads in (2, 5):
        assert torch.equal(_rows_of(shape, kernel, [[(0, length, length)]], threads), whole)
        assert torch.equal(_rows_of(shape, kernel, crowd, threads), whole)


def _rows_of(shape, kernel, passes, threads=1):
    """Output of all rows of sequence 0, computed in these passes, as bits."""
    case = Case(shape, [210, 70, 70])
    tables, num_blocks = spread(case, seed=shape.block)
    cache = fresh_cache(shape, num_blocks, math.inf)
    attention = NativeAttention(LIBRARY, kernel, threads)
    rows = []
    for parts in passes:
        # Neighbours that don't add tokens one after the other read what nobody has written: it must not matter.
        out, at = attend(attention, make_pass(case, parts, tables, padding=len(passes) % 2), cache), 0
        for sequence, _, count in parts:
            if sequence == 0:
                rows.append(out[at : at + count])
            at += count
    bits = torch.int32 if shape.dtype == torch.float32 else torch.int16
    return torch.cat(rows).view(bits)


@needs_library
@each_kernel
@pytest.mark.parametrize("window", [0, 50])
def test_drafts_as_sequences_of_their_own_have_the_bits_of_one_sequence(window, kernel):
    """Five rows that have the same blocks and one token more each: each sees the KV of those before it."""
    shape = Shape(9, 3, 64, dtype=torch.bfloat16, window=window)
    whole = _rows_of(shape, kernel, [[(0, 195, 195)], [(0, 200, 5)]])
    for threads in (1, 3):
        apart = [(0, end, 1) for end in range(196, 201)]
        assert torch.equal(_rows_of(shape, kernel, [[(0, 195, 195)], [(1, 60, 1), *apart, (2, 9, 1)]], threads), whole)
        assert torch.equal(_rows_of(shape, kernel, [[(0, 195, 195)], apart[::-1]], threads)[-5:].flip(0), whole[-5:])


@needs_library
def test_many_decoding_sequences_have_the_bits_of_one():
    """With many sequences a thread does all KV heads of one at once."""
    shape = Shape(9, 3, 64, dtype=torch.bfloat16)
    case = Case(shape, [3 * i + 1 for i in range(40)])
    tables, num_blocks = spread(case)
    attention = NativeAttention(LIBRARY, threads=2)
    cache = fresh_cache(shape, num_blocks)
    attend(attention, make_pass(case, [(i, n - 1, n - 1) for i, n in enumerate(case.lengths) if n > 1], tables), cache)
    together = attend(attention, make_pass(case, [(i, n, 1) for i, n in enumerate(case.lengths)], tables), cache)
    for i, n in enumerate(case.lengths):
        assert torch.equal(attend(attention, make_pass(case, [(i, n, 1)], tables), cache)[0], together[i])


@needs_library
def test_layers_of_one_pass_may_differ_in_shape():
    attention = NativeAttention(LIBRARY, threads=1)
    shapes = [Shape(4, 2, 64), Shape(8, 1, 128, 32, window=20), Shape(4, 2, 64, softcap=3.0)]
    cases = [Case(shape, [70]) for shape in shapes]
    tables, num_blocks = spread(cases[0])
    passes = [make_pass(case, [(0, 70, 70)], tables) for case in cases]
    for each in passes:
        each.plan = passes[0].plan
        out = attend(attention, each, fresh_cache(each.case.shape, num_blocks))
        torch.testing.assert_close(out.double(), reference(each), rtol=0, atol=2e-6)


@needs_library
def test_new_rows_go_to_their_slots_and_nowhere_else():
    shape = Shape(block=8)
    case = Case(shape, [20])
    cache = fresh_cache(shape, 5, 7.0)
    attend(NativeAttention(LIBRARY, threads=2), make_pass(case, [(0, 20, 20)], [[4, 1, 2]], padding=2), cache)
    assert torch.equal(cache.keys(0)[4], case.keys[0][:8])
    assert torch.equal(cache.values(0)[1], case.values[0][8:16])
    assert torch.equal(cache.keys(0)[2, :4], case.keys[0][16:])
    assert (cache.keys(0)[2, 4:] == 7).all()
    assert (cache.arena[[0, 3]] == 7).all()


@needs_library
@each_kernel
def test_what_is_no_number_stays_none_and_large_scores_are_safe(kernel):
    shape = Shape(2, 1, 16, dtype=torch.bfloat16)
    case = Case(shape, [70])
    case.queries[0][:, 0] *= 1e4
    cache = fresh_cache(shape, 5)
    each = make_pass(case, [(0, 70, 70)], [[0, 1, 2, 3, 4]])
    each.value[69] = math.nan
    out = attend(NativeAttention(LIBRARY, kernel, threads=1), each, cache)
    assert out[69].isnan().all()
    torch.testing.assert_close(out[:69].double(), reference(each)[:69], rtol=0, atol=2e-2)


@needs_library
def test_what_it_cannot_compute_is_refused_with_the_reason():
    case = Case(Shape(), [4])
    each = make_pass(case, [(0, 4, 4)], [[0]])
    cache = fresh_cache(dataclasses.replace(case.shape, dtype=torch.bfloat16), 1)
    with pytest.raises(BackendStepError, match="float32 rows for a KV cache of torch.bfloat16"):
        attend(NativeAttention(LIBRARY), each, cache)
    with pytest.raises(BackendStepError, match="kernel 9 refuses 4 query heads"):
        attend(NativeAttention(LIBRARY, kernel=9), make_pass(case, [(0, 4, 4)], [[0]]), fresh_cache(case.shape, 1))


@needs_library
def test_without_openmp_it_runs_on_the_calling_thread(monkeypatch):
    monkeypatch.setattr(native, "parallel_function", lambda: None)
    case = Case(Shape(), [90])
    tables, num_blocks = spread(case)
    each = make_pass(case, [(0, 90, 90)], tables)
    out = attend(NativeAttention(LIBRARY, threads=3), each, fresh_cache(case.shape, num_blocks))
    torch.testing.assert_close(out.double(), reference(each), rtol=0, atol=2e-6)


def test_torchs_own_threads_are_found():
    if not any("libgomp" in line for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()):
        pytest.skip("this torch has another OpenMP")
    assert parallel_function()


def test_without_the_library_there_is_no_kernel_but_a_note(monkeypatch):
    monkeypatch.setattr(native, "native_library", lambda: None)
    monkeypatch.setattr(native, "native_note", lambda: "the native part is not built")
    native.native_attention.cache_clear()
    try:
        assert native.native_attention() is None
        assert "not built" in native.native_attention_note()
    finally:
        native.native_attention.cache_clear()
