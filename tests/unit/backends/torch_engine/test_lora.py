"""Adapters give what PEFT gives, rows don't mind their neighbours, and without an adapter nothing has changed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kitelib.config import AdapterConfig
from kitelib.errors import (
    BackendStepError,
    ConfigError,
    ModelFormatError,
    ModelNotFoundError,
    UnknownAdapterError,
    UnsupportedOptionError,
)
from tests.support.peft_folders import edit_config, edit_tensors, small_model, write_adapter

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
IDS = [[5, 17, 80, 3, 44, 9, 61, 30, 2, 77, 12]]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def llama() -> Any:
    return small_model("llama", seed=3)


def logits(model: Any, ids: Sequence[Sequence[int]] = IDS) -> Any:
    with torch.inference_mode():
        return model(input_ids=torch.tensor(ids), use_cache=False).logits


def adapters_of(model: Any, folders: dict[str, Any], cache: Path, **options: Any) -> Any:
    from kitelib.backends.torch_engine.lora import AdapterSet

    configs = {
        name: each if isinstance(each, AdapterConfig) else AdapterConfig(str(each)) for name, each in folders.items()
    }
    return AdapterSet(model, configs, torch.float32, "cpu", cache, **options)


@pytest.mark.parametrize("row_invariant", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"target_modules": ALL, "r": 16, "lora_alpha": 8},
        {"target_modules": ALL, "use_rslora": True, "r": 5, "lora_alpha": 3},
        {"target_modules": r".*layers\.1\..*(q|up)_proj"},
        {
            "target_modules": ALL,
            "rank_pattern": {r"layers\.0\.self_attn\.q_proj": 9, "down_proj": 2},
            "alpha_pattern": {r".*\.1\.mlp\.up_proj": 31, "q_proj": 1},
        },
        {"target_modules": ALL, "use_rslora": True, "rank_pattern": {"o_proj": 3}, "alpha_pattern": {"o_proj": 7}},
        {"target_modules": ["q_proj"], "layers_to_transform": [1]},
        {"target_modules": ["v_proj"], "exclude_modules": ["model.layers.0.self_attn.v_proj"]},
        {"dtype": "bfloat16"},
    ],
)
def test_logits_are_those_of_peft(tmp_path: Path, llama: Any, options: dict[str, Any], row_invariant: bool) -> None:
    reference = write_adapter(tmp_path / "a", llama, **options)
    adapters = adapters_of(llama, {"a": tmp_path / "a"}, tmp_path / "cache", row_invariant=row_invariant)
    with adapters.use("a"):
        found = logits(llama)
    adapters.close()
    assert (logits(llama) - found).abs().max() > 0.05
    torch.testing.assert_close(found, logits(reference), rtol=1e-5, atol=1e-5)


def test_qwen2_with_biases_matches_peft(tmp_path: Path) -> None:
    model = small_model("qwen2")
    reference = write_adapter(tmp_path / "a", model, target_modules=ALL)
    adapters = adapters_of(model, {"a": tmp_path / "a"}, tmp_path / "cache")
    with adapters.use("a"):
        torch.testing.assert_close(logits(model), logits(reference), rtol=1e-5, atol=1e-5)
    adapters.close()


def test_without_adapter_not_a_bit_changes(tmp_path: Path, llama: Any) -> None:
    before = logits(llama)
    write_adapter(tmp_path / "a", llama, target_modules=ALL)
    adapters = adapters_of(llama, {"a": tmp_path / "a"}, tmp_path / "cache")
    assert torch.equal(logits(llama), before)
    with adapters.use(None):
        assert torch.equal(logits(llama), before)
    with adapters.use("a"):
        assert not torch.equal(logits(llama), before)
    assert torch.equal(logits(llama), before)
    with adapters.use("a"):
        adapters.close()
        assert torch.equal(logits(llama), before)
    adapters.close()


def test_several_adapters_take_turns(tmp_path: Path, llama: Any) -> None:
    first = write_adapter(tmp_path / "a", llama, seed=1)
    second = write_adapter(tmp_path / "b", llama, seed=2, r=8, target_modules=["down_proj", "q_proj"])
    adapters = adapters_of(llama, {"a": tmp_path / "a", "b": tmp_path / "b"}, tmp_path / "cache")
    for name, reference in (("a", first), ("b", second), ("a", first)):
        with adapters.use(name):
            torch.testing.assert_close(logits(llama), logits(reference), rtol=1e-5, atol=1e-5)
    with adapters.use("a"), adapters.use("b"):
        torch.testing.assert_close(logits(llama), logits(second), rtol=1e-5, atol=1e-5)
    adapters.close()


def test_scale_multiplies_what_is_added(tmp_path: Path, llama: Any) -> None:
    write_adapter(tmp_path / "a", llama, lora_alpha=8)
    write_adapter(tmp_path / "b", llama, lora_alpha=4)
    folders = {
        "half": AdapterConfig(str(tmp_path / "a"), 0.5),
        "b": AdapterConfig(str(tmp_path / "b")),
        "zero": AdapterConfig(str(tmp_path / "a"), 0.0),
    }
    base = logits(llama)
    adapters = adapters_of(llama, folders, tmp_path / "cache")
    with adapters.use("half"):
        half = logits(llama)
    with adapters.use("b"):
        assert torch.equal(logits(llama), half)
    with adapters.use("zero"):
        assert torch.equal(logits(llama), base)
    assert adapters.states["half"][0] == adapters.states["zero"][0] != adapters.states["b"][0]
    assert [scale for _, scale in adapters.states.values()] == [0.5, 1.0, 0.0]
    adapters.close()


@pytest.fixture
def mixed(tmp_path: Path, llama: Any) -> Iterator[Callable[..., Any]]:
    """``mixed(x, segments)``: an adapted linear alone, so that rows have nothing to do with each other."""
    write_adapter(tmp_path / "a", llama, seed=1, r=4)
    write_adapter(tmp_path / "b", llama, seed=2, r=7)
    write_adapter(tmp_path / "other", llama, seed=2, target_modules=["o_proj"])
    folders = {name: tmp_path / name for name in ("a", "b", "other")}
    adapters = adapters_of(llama, folders, tmp_path / "cache")
    linear = llama.model.layers[0].self_attn.q_proj

    def compute(x: Any, segments: Any) -> Any:
        with torch.inference_mode(), adapters.use(segments, rows=x.shape[-2]):
            return linear(x)

    yield compute
    adapters.close()


def test_rows_of_one_step_have_their_own_adapters(mixed: Callable[..., Any]) -> None:
    from kitelib.backends.torch_engine.lora import Segment

    x = torch.randn((1, 40, 64), generator=torch.Generator().manual_seed(0))
    segments = [Segment(20, 37, "b"), Segment(2, 5, "a"), Segment(5, 7, "other")]
    found = mixed(x, segments)[0]
    expected = torch.cat([mixed(x, None)[0, :2], mixed(x, "a")[0, 2:5], mixed(x, None)[0, 5:20]])
    torch.testing.assert_close(found[:20], expected, rtol=0, atol=0)
    assert torch.equal(found[20:37], mixed(x, "b")[0, 20:37])
    assert torch.equal(found[37:], mixed(x, None)[0, 37:])
    assert not torch.equal(found[20:37], mixed(x, "a")[0, 20:37])


def test_what_is_added_to_a_row_depends_on_no_other_row(tmp_path: Path) -> None:
    """The base product may depend on the number of rows, so it is taken away: zero weights."""
    from kitelib.backends.torch_engine.lora import Segment

    model = small_model("llama", intermediate_size=101)
    write_adapter(tmp_path / "a", model, r=5, lora_alpha=3, target_modules=["up_proj"])
    adapters = adapters_of(model, {"a": tmp_path / "a"}, tmp_path / "cache")
    linear = model.model.layers[1].mlp.up_proj
    linear.weight.data.zero_()
    x = torch.randn((1, 70, 64), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        with adapters.use("a"):
            whole = linear(x)[0]
            for first, last in ((0, 1), (3, 4), (1, 18), (31, 70), (16, 32)):
                assert torch.equal(linear(x[:, first:last])[0], whole[first:last]), (first, last)
        with adapters.use([Segment(3, 5, "a"), Segment(9, 60, "a")], rows=70):
            part = linear(x)[0]
            assert torch.equal(part[3:5], whole[3:5])
            assert torch.equal(part[9:60], whole[9:60])
    adapters.close()


def test_segments_that_are_no_rows_of_the_step_are_refused(mixed: Callable[..., Any]) -> None:
    from kitelib.backends.torch_engine.lora import Segment

    x = torch.zeros((1, 8, 64))
    for segments in ([Segment(0, 9, "a")], [Segment(0, 4, "a"), Segment(3, 6, "b")], [Segment(4, 2, "a")]):
        with pytest.raises(BackendStepError, match="do not lie one after the other in 8 rows"):
            mixed(x, segments)
    with pytest.raises(UnknownAdapterError, match="'nobody'.*'a', 'b', 'other'"):
        mixed(x, [Segment(0, 1, "nobody")])
    with pytest.raises(UnknownAdapterError, match="no adapter is called 'nobody'"):
        mixed(x, "nobody")


def test_linear_with_other_rows_than_the_step_is_noticed(tmp_path: Path, llama: Any) -> None:
    from kitelib.backends.torch_engine.lora import Segment

    write_adapter(tmp_path / "a", llama)
    adapters = adapters_of(llama, {"a": tmp_path / "a"}, tmp_path / "cache")
    with (
        adapters.use([Segment(0, 2, "a")], rows=8),
        pytest.raises(BackendStepError, match=r"q_proj' got 11 rows in a step of 8"),
    ):
        logits(llama)
    adapters.close()


def test_latent_projections_take_one_adapter_per_step(tmp_path: Path) -> None:
    from kitelib.backends.torch_engine.lora import Segment

    model = small_model(
        "deepseek_v2", num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=None, qk_rope_head_dim=8,
        qk_nope_head_dim=16, v_head_dim=16, n_routed_experts=2, n_shared_experts=1, num_experts_per_tok=1,
        moe_intermediate_size=32, first_k_dense_replace=1, n_group=1, topk_group=1,
    )  # fmt: skip
    reference = write_adapter(tmp_path / "a", model, target_modules=["kv_b_proj"])
    write_adapter(tmp_path / "b", model, target_modules=["o_proj"])
    plain = adapters_of(model, {"b": tmp_path / "b"}, tmp_path / "cache")
    assert plain.mixable
    plain.close()
    adapters = adapters_of(model, {"a": tmp_path / "a", "b": tmp_path / "b"}, tmp_path / "cache")
    assert not adapters.mixable
    with adapters.use([Segment(0, 3, "a"), Segment(3, 11, "a")], rows=11):
        torch.testing.assert_close(logits(model), logits(reference), rtol=1e-5, atol=1e-5)
    with (
        pytest.raises(BackendStepError, match="a, b can't be mixed"),
        adapters.use([Segment(0, 3, "a"), Segment(3, 4, "b")], rows=11),
    ):
        pass
    adapters.close()


def test_fused_experts_and_the_output_layer_are_refused(tmp_path: Path, llama: Any) -> None:
    write_adapter(tmp_path / "out", llama, target_modules=["lm_head"])
    with pytest.raises(UnsupportedOptionError, match=r"'lm_head'.*leave it out of target_modules"):
        adapters_of(llama, {"x": tmp_path / "out"}, tmp_path / "cache")
    experts = small_model("mixtral", num_local_experts=2, num_experts_per_tok=1)
    old = "base_model.model.model.layers.0.block_sparse_moe.experts.0.w1.lora_"
    write_adapter(tmp_path / "moe", experts)

    def add(tensors: dict[str, Any]) -> None:
        tensors[f"{old}A.weight"], tensors[f"{old}B.weight"] = torch.zeros(4, 64), torch.zeros(96, 4)

    edit_config(edit_tensors(tmp_path / "moe", add), target_modules=["q_proj", "v_proj", "w1"])
    with pytest.raises(UnsupportedOptionError, match=r"experts\.0\.w1'; experts are fused"):
        adapters_of(experts, {"x": tmp_path / "moe"}, tmp_path / "cache")


def test_adapter_of_another_model_is_refused_with_both_shapes(tmp_path: Path, llama: Any) -> None:
    write_adapter(tmp_path / "wide", small_model("llama", hidden_size=128), target_modules=["q_proj"])
    with pytest.raises(ModelFormatError, match=r"shape \(4, 128\) at '.*q_proj\.lora_A\.weight'.*shape \(64, 64\)"):
        adapters_of(llama, {"x": tmp_path / "wide"}, tmp_path / "cache")
    write_adapter(tmp_path / "deep", small_model("llama", num_hidden_layers=3))
    with pytest.raises(ModelFormatError, match=r"layers\.2\.self_attn.*does not have"):
        adapters_of(llama, {"x": tmp_path / "deep"}, tmp_path / "cache")
    assert not llama.model.layers[0].self_attn.q_proj._forward_hooks


def test_adapter_trained_without_the_output_layer_fits_the_whole_model(tmp_path: Path, llama: Any) -> None:
    write_adapter(tmp_path / "a", llama)
    write_adapter(tmp_path / "bare", llama.model)
    adapters = adapters_of(llama, {"a": tmp_path / "a", "bare": tmp_path / "bare"}, tmp_path / "cache")
    with adapters.use("a"):
        expected = logits(llama)
    with adapters.use("bare"):
        assert torch.equal(logits(llama), expected)
    adapters.close()


def test_content_from_elsewhere_needs_no_folder(tmp_path: Path, llama: Any) -> None:
    write_adapter(tmp_path / "a", llama)
    first = adapters_of(llama, {"a": tmp_path / "a"}, tmp_path / "cache")
    with first.use("a"):
        expected = logits(llama)
    (content,) = first.take_contents().values()
    assert first.take_contents() == {}
    first.close()
    config = AdapterConfig(str(tmp_path / "gone"), digest=content.digest.hex().upper())
    second = adapters_of(llama, {"b": config}, tmp_path / "cache", contents={"b": content})
    with second.use("b"):
        assert torch.equal(logits(llama), expected)
    assert second.states == {"b": first.states["a"]}
    assert second.take_contents() == {"b": content}
    assert second.largest_content_bytes == len(content.weights)
    second.close()
    with pytest.raises(ModelNotFoundError, match="the pool does not have its content"):
        adapters_of(llama, {"b": config}, tmp_path / "cache")


def test_digest_of_the_configuration_must_be_that_of_the_folder(tmp_path: Path, llama: Any) -> None:
    write_adapter(tmp_path / "a", llama)
    with pytest.raises(ModelFormatError, match="not " + "ab" * 32):
        adapters_of(llama, {"a": AdapterConfig(str(tmp_path / "a"), digest="ab" * 32)}, tmp_path / "cache")
    with pytest.raises(ConfigError, match="give 64 hexadecimal digits"):
        AdapterConfig("x", digest="abc")
    with pytest.raises(ConfigError, match="finite"):
        adapters_of(llama, {"a": AdapterConfig(str(tmp_path / "a"), float("nan"))}, tmp_path / "cache")


def test_choice_belongs_to_its_thread(tmp_path: Path, llama: Any) -> None:
    write_adapter(tmp_path / "a", llama)
    adapters = adapters_of(llama, {"a": tmp_path / "a"}, tmp_path / "cache")
    base, found = logits(llama), []
    with adapters.use("a"):
        thread = threading.Thread(target=lambda: found.append(logits(llama)))
        thread.start()
        thread.join()
    adapters.close()
    assert torch.equal(found[0], base)


def test_compiled_graph_of_a_step_without_adapter_has_nothing_of_it(tmp_path: Path, llama: Any) -> None:
    write_adapter(tmp_path / "a", llama)
    adapters = adapters_of(llama, {"a": tmp_path / "a"}, tmp_path / "cache")
    linear = llama.model.layers[0].self_attn.q_proj
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append([node.op for node in graph.graph.nodes])
        return graph.forward

    x = torch.ones((1, 3, 64))
    with torch.inference_mode():
        compiled = torch.compile(linear, backend=backend, fullgraph=True)
        assert torch.equal(compiled(x), linear(x))
    torch._dynamo.reset()
    adapters.close()
    assert len(graphs) == 1
    assert graphs[0].count("call_function") == 1


def test_half_precision_model_gets_its_own_type(tmp_path: Path, llama: Any) -> None:
    import copy

    model = copy.deepcopy(llama).to(torch.bfloat16)
    reference = write_adapter(tmp_path / "a", model, target_modules=ALL)
    adapters = adapters_of(model, {"a": tmp_path / "a"}, tmp_path / "cache")
    with adapters.use("a"):
        found = logits(model)
    adapters.close()
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, logits(reference), rtol=0.05, atol=0.3)
    assert adapters.num_bytes == 0


def test_memory_counts_ranks_in_steps_of_sixteen(tmp_path: Path, llama: Any) -> None:
    write_adapter(tmp_path / "a", llama, r=4, target_modules=["q_proj"])
    done: list[float] = []
    adapters = adapters_of(llama, {"a": tmp_path / "a"}, tmp_path / "cache", progress=lambda _, part: done.append(part))
    assert adapters.num_bytes == 2 * 4 * (16 * 64 + 64 * 16)
    assert done == [1.0]
    adapters.close()


def test_packed_linears_are_adapted_like_plain_ones(tmp_path: Path) -> None:
    from kitelib.backends.torch_engine.linear import pack_linears

    model = small_model("llama", hidden_size=128)
    reference = write_adapter(tmp_path / "a", model, target_modules=ALL)
    if not pack_linears(model).modules:
        pytest.skip("this torch has no oneDNN")
    adapters = adapters_of(model, {"a": tmp_path / "a"}, tmp_path / "cache")
    with adapters.use("a"):
        torch.testing.assert_close(logits(model), logits(reference), rtol=1e-5, atol=2e-5)
    adapters.close()


def test_an_adapter_with_numbers_that_are_none_is_refused(llama: Any, tmp_path: Path) -> None:
    write_adapter(tmp_path / "broken", llama, target_modules=["q_proj"])

    def spoil(tensors: dict[str, Any]) -> None:
        next(iter(tensors.values()))[0, 0] = float("nan")

    edit_tensors(tmp_path / "broken", spoil)
    with pytest.raises(ModelFormatError, match="not finite"):
        adapters_of(llama, {"broken": tmp_path / "broken"}, tmp_path)
