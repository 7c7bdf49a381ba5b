"""Linears with rearranged weights."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest

from kitelib.backends.torch_engine.linear import pack_linears
from tests.support.hf_folders import reference_model, write_model

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")


def small(dtype: torch.dtype = torch.float32, *, tied: bool = False) -> torch.nn.ModuleDict:
    torch.manual_seed(0)
    model = torch.nn.ModuleDict(
        {
            "embed": torch.nn.Embedding(96, 64),
            "up": torch.nn.Linear(64, 128),
            "head": torch.nn.Linear(64, 96, bias=False),
            "gate": torch.nn.Linear(64, 8),
        }
    )
    if tied:
        model["head"].weight = model["embed"].weight
    return model.to(dtype).requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_computes_what_the_plain_linear_does(dtype: torch.dtype) -> None:
    model = small(dtype)
    rows = torch.randn(1, 7, 64, dtype=dtype)
    wanted = model["up"](rows)
    pack_linears(model)
    assert type(model["up"]) is not torch.nn.Linear
    torch.testing.assert_close(model["up"](rows), wanted)


def test_what_it_says_is_what_it_did() -> None:
    done = pack_linears(small())
    assert (done.modules, done.left) == (2, 1)  # the gate is too small to gain anything
    assert done.packed_bytes == 4 * 64 * (128 + 96)
    assert done.kept_bytes == 0


def test_tied_embeddings_stay_usable() -> None:
    model = small(tied=True)
    before = model["embed"].weight.clone()
    rows = torch.randn(3, 64)
    done = pack_linears(model)
    assert done.kept_bytes == 4 * 64 * 96
    torch.testing.assert_close(model["head"](rows), rows @ before.T)
    assert torch.equal(model["embed"](torch.arange(96)), before)


def test_plain_weights_are_freed() -> None:
    model = small()
    plain = weakref.ref(model["up"].weight)
    pack_linears(model)
    gc.collect()
    assert plain() is None


def test_sizes_stay_known_and_hooks_work() -> None:
    model = small()
    pack_linears(model)
    linear = model["up"]
    assert (linear.in_features, linear.out_features) == (64, 128)
    linear.register_forward_hook(lambda _module, _inputs, out: out * 0)
    assert not linear(torch.ones(2, 64)).any()


def test_a_shared_linear_is_packed_once() -> None:
    model = small()
    model["again"] = model["up"]
    assert pack_linears(model).modules == 2
    assert model["again"] is model["up"]


def test_subclasses_hooked_and_foreign_linears_are_left() -> None:
    class Special(torch.nn.Linear):
        pass

    model = torch.nn.ModuleDict(
        {
            "special": Special(64, 128),
            "hooked": torch.nn.Linear(64, 128),
            "wide": torch.nn.Linear(64, 128, dtype=torch.float64),
            "absent": torch.nn.Linear(64, 128, device="meta"),
        }
    )
    model["hooked"].register_forward_hook(lambda *_: None)
    before = dict(model.items())
    assert pack_linears(model).modules == 0
    assert all(model[name] is before[name] for name in before)


def test_a_whole_model_gives_the_same_logits(tmp_path: Path) -> None:
    model = reference_model(write_model(tmp_path, "llama"))
    ids = torch.arange(1, 9)[None]
    with torch.inference_mode():
        wanted = model(input_ids=ids).logits
        assert pack_linears(model).modules >= 8
        torch.testing.assert_close(model(input_ids=ids).logits, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("count", [1, 4, 5, 8, 11])
def test_tiles_compute_so_many_rows_at_once(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    tile = pack_linears(model).tile
    up = model["up"]
    rows = torch.randn(1, count, 64)
    apart = torch.cat([up(rows[:, start : start + 4]) for start in range(0, count, 4)], dim=1)
    sizes: list[int] = []
    multiply = type(up)._multiply

    def counted(self: torch.nn.Module, part: torch.Tensor) -> torch.Tensor:
        sizes.append(part.numel() // 64)
        return multiply(self, part)

    monkeypatch.setattr(type(up), "_multiply", counted)
    tile.rows = 4
    assert torch.equal(up(rows), apart)
    assert sum(sizes) == count
    assert max(sizes) <= 4
