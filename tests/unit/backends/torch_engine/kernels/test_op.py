"""The operation that models call: eager, compiled, and for latent layers."""

import pytest
import torch

from kitelib.backends.torch_engine.kernels.gathered import GatheredAttention
from kitelib.backends.torch_engine.kernels.op import register_ops
from kitelib.backends.torch_engine.kernels.ragged import ragged_attention
from kitelib.backends.torch_engine.pages import LayerShape, PagedCache
from kitelib.backends.torch_engine.plan import StepState, use_step
from tests.support.attention_cases import Case, Shape, fresh_cache, make_pass, reference, spread

SHAPE = Shape(4, 2, 32, 16, window=30, softcap=4.0)


@pytest.fixture(autouse=True)
def operation():
    register_ops()
    assert register_ops() is register_ops()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _step():
    case = Case(SHAPE, [40, 7])
    tables, num_blocks = spread(case)
    each = make_pass(case, [(0, 40, 40), (1, 7, 7)], tables, padding=1)
    return each, StepState(each.plan, fresh_cache(SHAPE, num_blocks), GatheredAttention())


def _heads_first(each):
    return (tensor.transpose(0, 1)[None] for tensor in (each.query, each.key, each.value))


def test_it_takes_heads_first_and_gives_rows_first():
    each, state = _step()
    with use_step(state):
        out = torch.ops.kitelib.attend(*_heads_first(each), 0, SHAPE.factor, SHAPE.window, SHAPE.softcap)
    torch.testing.assert_close(out[0].double(), reference(each), rtol=0, atol=2e-6)


def test_rows_whose_channels_are_apart_are_welcome():
    each, state = _step()
    apart = [tensor.transpose(2, 3).contiguous().transpose(2, 3) for tensor in _heads_first(each)]
    assert apart[0].stride(3) != 1
    with use_step(state):
        out = torch.ops.kitelib.attend(*apart, 0, SHAPE.factor, SHAPE.window, SHAPE.softcap)
    torch.testing.assert_close(out[0].double(), reference(each), rtol=0, atol=2e-6)


def test_compilers_see_its_shape_and_leave_it_alone():
    each, state = _step()

    def model(query, key, value):
        out = torch.ops.kitelib.attend(query * 2, key, value, 0, SHAPE.factor / 2, SHAPE.window, SHAPE.softcap)
        return out.flatten(2) + 1

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad(), use_step(state):
        out = compiled(*_heads_first(each))
    assert torch.equal(state.cache.keys(0)[each.plan.slots[0] // SHAPE.block, 0], each.key[0])
    torch.testing.assert_close(out[0].double(), reference(each).flatten(1) + 1, rtol=0, atol=2e-6)


def test_latent_layers_attend_to_what_the_model_expanded():
    each, state = _step()
    latent = PagedCache([LayerShape(1, 8, 1, 4, latent=True)], 1, SHAPE.block, SHAPE.dtype, "cpu")
    keys, values = (torch.cat(parts).transpose(0, 1)[None] for parts in (each.case.keys, each.case.values))
    query, _, _ = _heads_first(each)
    with use_step(StepState(each.plan, latent, state.kernel)):
        out = torch.ops.kitelib.attend(query, keys, values, 0, SHAPE.factor, SHAPE.window, SHAPE.softcap)
    torch.testing.assert_close(out[0].double(), reference(each), rtol=0, atol=2e-6)


def test_ragged_attention_takes_chunks_of_several_sequences():
    shape = Shape(4, 4, 48, 32)
    case = Case(shape, [40, 7, 90])
    tables, _ = spread(case)
    each = make_pass(case, [(2, 90, 1), (0, 40, 11), (1, 7, 7)], tables, padding=2)
    keys, values = (
        torch.cat([parts[2], parts[0], parts[1]]).transpose(0, 1)[None] for parts in (case.keys, case.values)
    )
    out = ragged_attention(each.query, keys, values, each.plan, scale=shape.factor, window=0, softcap=0.0)
    assert out.is_contiguous()
    torch.testing.assert_close(out.double(), reference(each), rtol=0, atol=2e-6)
