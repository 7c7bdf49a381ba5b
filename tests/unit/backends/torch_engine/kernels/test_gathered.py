"""Attention in plain torch gives what the definition gives."""

import dataclasses
import math

import pytest
import torch

from kitelib.backends.torch_engine.kernels.gathered import GatheredAttention
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

KERNEL = GatheredAttention()


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_chunks_decode_and_padding_give_what_the_definition_gives(shape, dtype):
    shape = dataclasses.replace(shape, dtype=dtype)
    case = Case(shape, [90, 77, 1, 130])
    tables, num_blocks = spread(case)
    cache = fresh_cache(shape, num_blocks, math.nan)
    first = make_pass(case, [(0, 50, 50), (1, 40, 40), (3, 128, 128)], tables)
    mixed = make_pass(case, [(2, 1, 1), (0, 89, 39), (3, 129, 1), (1, 76, 36)], tables, padding=3)
    decode = make_pass(case, [(3, 130, 1), (0, 90, 1), (1, 77, 1)], tables, padding=2)
    for each in (first, mixed, decode):
        torch.testing.assert_close(attend(KERNEL, each, cache).double(), reference(each), rtol=0, atol=TOLERANCE[dtype])


def test_a_decode_step_of_unlike_lengths_goes_one_by_one():
    shape = Shape()
    case = Case(shape, [200, 2, 1])
    tables, num_blocks = spread(case)
    cache = fresh_cache(shape, num_blocks, math.nan)
    attend(KERNEL, make_pass(case, [(0, 199, 199), (1, 1, 1)], tables), cache)
    decode = make_pass(case, [(0, 200, 1), (1, 2, 1), (2, 1, 1)], tables)
    torch.testing.assert_close(attend(KERNEL, decode, cache).double(), reference(decode), rtol=0, atol=2e-6)


def test_drafts_as_sequences_of_their_own_see_those_before_them():
    shape = Shape(window=33)
    case = Case(shape, [90, 77])
    tables, num_blocks = spread(case)
    cache = fresh_cache(shape, num_blocks, math.nan)
    attend(KERNEL, make_pass(case, [(0, 85, 85), (1, 76, 76)], tables), cache)
    decode = make_pass(case, [*((0, end, 1) for end in range(86, 91)), (1, 77, 1)], tables)
    torch.testing.assert_close(attend(KERNEL, decode, cache).double(), reference(decode), rtol=0, atol=2e-6)


def test_new_rows_go_to_their_slots_and_nowhere_else():
    shape = Shape(block=8)
    case = Case(shape, [20])
    cache = fresh_cache(shape, 5, 7.0)
    attend(KERNEL, make_pass(case, [(0, 20, 20)], [[4, 1, 2]], padding=2), cache)
    assert torch.equal(cache.keys(0)[4], case.keys[0][:8])
    assert torch.equal(cache.values(0)[1], case.values[0][8:16])
    assert torch.equal(cache.keys(0)[2, :4], case.keys[0][16:])
    assert (cache.keys(0)[2, 4:] == 7).all()
    assert (cache.arena[[0, 3]] == 7).all()
