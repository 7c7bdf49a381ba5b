"""Model folders: what they say, what is refused and why, and that the model made of one has exactly its weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch

from kitelib.backends.torch_engine.attention import ATTENTION
from kitelib.backends.torch_engine.models import build_model, inspect_model
from kitelib.backends.torch_engine.quiet import quiet_transformers
from kitelib.errors import ModelFormatError, ModelNotFoundError, UnsupportedOptionError
from tests.support.hf_folders import ARCHITECTURES, reference_model, write_model, write_tokenizer


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    """Small tensors gain nothing from more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def config_folder(folder: Path, model_type: str, **settings: Any) -> Path:
    """A folder with transformers' default configuration of an architecture, and weights that nobody may need."""
    from transformers import AutoConfig

    folder.mkdir(exist_ok=True)
    with quiet_transformers():
        AutoConfig.for_model(model_type, **settings).save_pretrained(str(folder))
    safetensors.numpy.save_file({"unused": np.zeros(2, np.float32)}, str(folder / "model.safetensors"))
    return folder


def edited(folder: Path, target: Path, **settings: Any) -> Path:
    """A copy of a folder with other settings in its config.json; None removes one."""
    shutil.copytree(folder, target)
    config = {**json.loads((target / "config.json").read_text()), **settings}
    (target / "config.json").write_text(json.dumps({key: each for key, each in config.items() if each is not None}))
    return target


def tensors(model: Any) -> dict[str, torch.Tensor]:
    """All parameters and buffers, also those that are in no file."""
    return dict([*model.named_parameters(), *model.named_buffers()])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_model_has_the_weights_and_buffers_of_the_reference(hf_model: Callable[..., Path], architecture: str) -> None:
    """Nothing stays on the meta device, and every parameter and buffer is bit for bit that of plain transformers."""
    folder = hf_model(architecture)
    built = tensors(build_model(inspect_model(folder), torch.float32, "cpu"))
    reference = tensors(reference_model(folder))
    assert list(built) == list(reference)
    assert [name for name, each in built.items() if each.is_meta or not torch.equal(each, reference[name])] == []


@pytest.mark.parametrize("architecture", ["llama", "mixtral", "deepseek_v3"])
def test_shards_give_the_same_model(hf_model: Callable[..., Path], architecture: str) -> None:
    """A sharded folder, its experts spread over files, is the same model as a single file."""
    folder = hf_model(architecture, shard_bytes=200_000)
    facts = inspect_model(folder)
    assert len(facts.files) > 3
    assert [file.name for file in facts.files] == sorted(file.name for file in facts.files)
    whole = tensors(build_model(inspect_model(hf_model(architecture)), torch.float32, "cpu"))
    assert all(
        torch.equal(each, whole[name]) for name, each in tensors(build_model(facts, torch.float32, "cpu")).items()
    )


def test_the_model_is_ready_to_serve(hf_model: Callable[..., Path]) -> None:
    """It attends through the paged cache, is in evaluation mode and keeps no gradients."""
    model = build_model(inspect_model(hf_model("qwen3")), torch.float32, "cpu")
    assert model.config._attn_implementation == ATTENTION
    assert not model.training
    assert not any(each.requires_grad for each in model.parameters())


def test_weights_are_converted_to_the_wanted_type(hf_model: Callable[..., Path]) -> None:
    """RoPE frequencies stay float32, as transformers keeps them."""
    model = build_model(inspect_model(hf_model("llama")), torch.bfloat16, "cpu")
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_weights_of_the_wanted_type_stay_mapped(hf_model: Callable[..., Path]) -> None:
    """A second load of the same files takes no memory: the weights lie in a mapping of the file."""
    folder = hf_model("llama")
    model = build_model(inspect_model(folder), torch.float32, "cpu")
    address = model.model.layers[1].mlp.up_proj.weight.data_ptr()
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [(*(int(end, 16) for end in line[0].split("-")), line[-1]) for line in lines]
    owners = [path for start, end, path in spans if start <= address < end]
    assert owners == [str((folder / "model.safetensors").resolve())]


def test_tied_embeddings_are_one_tensor(hf_model: Callable[..., Path]) -> None:
    """The output matrix is the embedding's, not a copy."""
    model = build_model(inspect_model(hf_model("qwen2", tie_word_embeddings=True)), torch.float32, "cpu")
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_facts_of_a_folder(hf_model: Callable[..., Path]) -> None:
    """Sizes, windows and types are those of its configuration."""
    facts = inspect_model(hf_model("gemma3_text", dtype="bfloat16"))
    assert (facts.architecture, facts.num_layers, facts.vocab_size) == ("gemma3_text", 3, 512)
    assert (facts.context_tokens, facts.windows, facts.stored_dtype) == (2048, (32, 32, 0), "bfloat16")
    assert facts.notes == ()
    assert not facts.is_gguf
    assert inspect_model(hf_model("mistral")).windows == (32, 32)
    assert inspect_model(hf_model("llama")).windows == (0, 0)


def test_a_window_that_is_switched_off_is_none(hf_model: Callable[..., Path]) -> None:
    """Qwen2 names a window, but uses it only if told so, and only from some layer on."""
    assert inspect_model(hf_model("qwen2", sliding_window=32, use_sliding_window=False)).windows == (0, 0)
    some = hf_model("qwen2", sliding_window=32, use_sliding_window=True, max_window_layers=1)
    assert inspect_model(some).windows == (0, 32)


def test_end_tokens_of_both_configurations(hf_model: Callable[..., Path], tmp_path: Path) -> None:
    """generation_config.json may name several; ids outside of the vocabulary are none."""
    folder = edited(hf_model("llama"), tmp_path / "model", eos_token_id=3)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7, 100_000]}))
    assert inspect_model(folder).end_token_ids == {3, 5, 7}


def test_a_longrope_context_ends_where_factors_change(tmp_path: Path) -> None:
    """Up to the original length one set of factors holds; the model computes them without asking for the longest
    position."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.1 * index for index in range(16)],
        "long_factor": [2.0 + index for index in range(16)],
        "original_max_position_embeddings": 128,
        "factor": 4.0,
    }
    lengths = {"max_position_embeddings": 512, "original_max_position_embeddings": 128}
    folder = write_model(tmp_path / "model", "phi3", rope_parameters=rope, **lengths)
    facts = inspect_model(folder)
    assert facts.context_tokens == 128
    assert "limited to 128 of 512 tokens" in facts.notes[0]
    assert facts.settings == {"rope_longrope_limit": 128}
    built, plain = build_model(facts, torch.float32, "cpu").model.rotary_emb, reference_model(folder).model.rotary_emb
    states, positions = torch.zeros(1, 128, 4), torch.arange(128)[None]
    for ours, theirs in zip(built(states, positions), plain(states, positions), strict=True):
        assert torch.equal(ours, theirs)
    built(torch.zeros(1, 200, 4), torch.arange(200)[None])
    assert torch.equal(built.inv_freq, built.original_inv_freq)


def test_the_language_model_of_a_model_with_images(tmp_path: Path) -> None:
    """Gemma 3 with a vision tower is served as the language model it holds."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    inner = write_model(tmp_path / "inner", "gemma3_text")
    text = json.loads((inner / "config.json").read_text())
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14})
    whole = Gemma3ForConditionalGeneration(config)
    folder = tmp_path / "whole"
    with quiet_transformers():
        whole.save_pretrained(str(folder))
    write_tokenizer(folder)
    facts = inspect_model(folder)
    model = build_model(facts, torch.float32, "cpu")
    assert facts.architecture == "gemma3_text"
    assert facts.windows == (32, 32, 0)
    assert "only the language model" in facts.notes[0]
    expected = dict(whole.model.language_model.named_parameters())
    found = dict(model.model.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(each, found[name]) for name, each in expected.items())


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("t5", {}, "no causal language model|has an encoder"),
        ("bart", {}, "has an encoder"),
        ("bloom", {}, "does not let the attention be replaced"),
        ("mamba", {}, "recurrent state"),
        ("jamba", {}, "recurrent state"),
        ("qwen3_next", {}, "recurrent state|linear_attention"),
        ("lfm2", {}, "recurrent state|conv"),
        ("llama4_text", {}, "cut into chunks"),
        ("gpt_oss", {}, "attention sinks"),
        ("gemma3n_text", {}, "KV of other layers"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "looks ahead"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic NTK"),
        ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"quantized \(gptq\)"),
        ("llama", {"quantization_config": {"quant_method": "awq", "bits": 4}}, r"quantized \(awq\)"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, r"quantized \(fp8\)"),
    ],
)
def test_what_cant_be_served_is_refused_with_its_reason(
    tmp_path: Path, model_type: str, settings: dict[str, Any], reason: str
) -> None:
    """By the configuration alone, before any weight is read."""
    with pytest.raises(UnsupportedOptionError, match=reason) as caught:
        inspect_model(config_folder(tmp_path / "model", model_type, **settings))
    assert str(tmp_path / "model") in str(caught.value)


def test_sinks_are_found_in_the_modules(tmp_path: Path) -> None:
    """Also where no configuration tells: the model's own parameters do."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    with quiet_transformers():
        config = AutoConfig.for_model("granite_swa", vocab_size=64, hidden_size=32, intermediate_size=32, **sizes)
        AutoModelForCausalLM.from_config(config).save_pretrained(str(tmp_path))
    with pytest.raises(UnsupportedOptionError, match="attention sinks"):
        build_model(inspect_model(tmp_path), torch.float32, "cpu")


def test_an_encoder_without_a_decoder_looks_ahead(tmp_path: Path) -> None:
    """BERT has a language model's head, but its attention is not causal."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 32}
    with quiet_transformers():
        config = AutoConfig.for_model("bert", vocab_size=64, **sizes)
        AutoModelForCausalLM.from_config(config).save_pretrained(str(tmp_path))
    with pytest.raises(UnsupportedOptionError, match="looks ahead"):
        build_model(inspect_model(tmp_path), torch.float32, "cpu")


def test_code_in_the_folder_is_never_run(hf_model: Callable[..., Path], tmp_path: Path) -> None:
    """Where transformers knows the architecture its own code is used; where it does not the folder is refused."""
    mine = {"AutoConfig": "mine.MyConfig", "AutoModelForCausalLM": "mine.MyModel"}
    known = edited(hf_model("llama"), tmp_path / "known", auto_map=mine)
    unknown = edited(hf_model("llama"), tmp_path / "unknown", auto_map=mine, model_type="mine")
    for folder in (known, unknown):
        (folder / "mine.py").write_text(f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n")
    facts = inspect_model(known)
    assert "own code is not run" in facts.notes[0]
    assert type(build_model(facts, torch.float32, "cpu")).__module__.startswith("transformers.")
    with pytest.raises(UnsupportedOptionError, match="needs code from its folder"):
        inspect_model(unknown)
    assert not (tmp_path / "ran").exists()


def test_an_unknown_architecture_is_refused(hf_model: Callable[..., Path], tmp_path: Path) -> None:
    """The message names it and the version of transformers."""
    with pytest.raises(UnsupportedOptionError, match="'brand_new', which transformers 5"):
        inspect_model(edited(hf_model("llama"), tmp_path / "model", model_type="brand_new"))


def test_missing_weights_are_named(hf_model: Callable[..., Path], tmp_path: Path) -> None:
    """A model with random weights in place of missing ones would be worse than none."""
    folder = edited(hf_model("llama"), tmp_path / "model")
    found = safetensors.numpy.load_file(str(folder / "model.safetensors"))
    del found["model.layers.1.mlp.up_proj.weight"]
    safetensors.numpy.save_file(found, str(folder / "model.safetensors"), {"format": "pt"})
    with pytest.raises(ModelFormatError, match=r"lacks weights of the model: model\.layers\.1\.mlp\.up_proj\.weight"):
        build_model(inspect_model(folder), torch.float32, "cpu")


def test_weights_of_another_shape_are_refused(hf_model: Callable[..., Path], tmp_path: Path) -> None:
    """Configuration and weights have to fit."""
    folder = edited(hf_model("llama"), tmp_path / "model", intermediate_size=100)
    with pytest.raises(ModelFormatError, match="can't be loaded"):
        build_model(inspect_model(folder), torch.float32, "cpu")


def test_truncated_weights_are_refused(hf_model: Callable[..., Path], tmp_path: Path) -> None:
    """As an interrupted download leaves them."""
    folder = edited(hf_model("llama"), tmp_path / "model")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ModelFormatError, match="can't be loaded"):
        build_model(inspect_model(folder), torch.float32, "cpu")


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff"])
def test_a_damaged_config_is_refused(hf_model: Callable[..., Path], tmp_path: Path, text: str) -> None:
    """The message names the file."""
    folder = edited(hf_model("llama"), tmp_path / "model")
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelFormatError, match=r"config\.json"):
        inspect_model(folder)


def test_nothing_there(tmp_path: Path) -> None:
    """A path without a model is not found, and never looked up on the network."""
    with pytest.raises(ModelNotFoundError, match="check the path"):
        inspect_model(tmp_path / "org" / "model")


def test_loading_is_silent_and_leaves_no_trace(
    hf_model: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    """No progress bars or reports, and transformers' switches are as before."""
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    build_model(inspect_model(hf_model("mixtral")), torch.float32, "cpu")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
def test_experts_are_multiplied_as_asked(hf_model: Callable[..., Path], experts: str) -> None:
    """The choice reaches the modules, where it decides about the order of sums."""
    model = build_model(inspect_model(hf_model("mixtral")), torch.float32, "cpu", experts=experts)
    assert {each.config._experts_implementation for each in model.modules() if hasattr(each, "config")} == {experts}
