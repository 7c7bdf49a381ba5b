"""The generated model files are what the other tests take them for: llama.cpp loads and runs them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.support.gguf_files import corrupt_copy, modified_copy, truncated_copy, write_lora, write_model
from tests.support.reference import open_reference

pytest_plugins = ["tests.support.fixtures"]

TinyModel = Callable[..., Path]

PROMPT = "The quick brown fox jumps over the lazy dog, says the 2nd naïve reader."
# architecture: (recurrent, hybrid, sliding window)
KINDS = {
    "llama": (False, False, 0),
    "qwen2": (False, False, 0),
    "phi3": (False, False, 0),
    "gemma3": (False, False, 64),
    "mamba": (True, False, 0),
    "lfm2": (False, True, 0),
}


@pytest.mark.parametrize("architecture", KINDS)
def test_model_decodes_100_tokens_with_varied_logits(tiny_model: TinyModel, architecture: str) -> None:
    with open_reference(tiny_model(architecture)) as model:
        assert (model.is_recurrent, model.is_hybrid, model.window) == KINDS[architecture]
        tokens, logits = model.greedy(model.tokenize(PROMPT), 100)
    assert np.isfinite(logits).all()
    assert (logits.std(axis=1) > 1.0).all()
    assert len({row.tobytes() for row in logits}) == 100
    assert len(set(tokens)) >= 10


@pytest.mark.parametrize("architecture", KINDS)
def test_logits_depend_on_the_first_token_of_the_context(tiny_model: TinyModel, architecture: str) -> None:
    with open_reference(tiny_model(architecture)) as model:
        tokens = model.tokenize(PROMPT)
        plain = model.logits(tokens)[-1]
        other = model.logits([tokens[0] + 1, *tokens[1:]])[-1]
    assert np.abs(plain - other).max() > 0.01


def test_truncated_vocabulary_encodes_text_and_special_tokens(tiny_model: TinyModel) -> None:
    with open_reference(tiny_model("llama")) as model:
        assert model.vocab_size == 2048
        words = model.tokenize(PROMPT)
        assert 1 < len(words) < len(PROMPT.encode())
        assert max(words) < 2048
        assert model.tokenize("<|im_start|>") == [1]


def test_same_arguments_give_the_same_file(tmp_path: Path) -> None:
    first = write_model(tmp_path / "a.gguf", "qwen2", seed=3).read_bytes()
    assert write_model(tmp_path / "b.gguf", "qwen2", seed=3).read_bytes() == first
    other = write_model(tmp_path / "c.gguf", "qwen2", seed=4).read_bytes()
    assert other != first
    assert len(other) == len(first)


def test_quantized_matrices_load(tmp_path: Path) -> None:
    path = write_model(tmp_path / "q8.gguf", "llama", seed=1, quantization="Q8_0")
    with open_reference(path) as model:
        assert np.isfinite(model.logits(model.tokenize(PROMPT))).all()


def test_unknown_architecture_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'gpt9'.*llama"):
        write_model(tmp_path / "a.gguf", "gpt9", seed=1)


@pytest.mark.parametrize("architecture", KINDS)
def test_lora_changes_the_logits(tiny_model: TinyModel, tmp_path: Path, architecture: str) -> None:
    base = tiny_model(architecture)
    adapter = write_lora(tmp_path / "lora.gguf", base, seed=1)
    with open_reference(base) as model:
        tokens = model.tokenize(PROMPT)
        plain = model.logits(tokens)
        model.apply_lora(adapter)
        adapted = model.logits(tokens)
    assert np.isfinite(adapted).all()
    assert np.abs(plain - adapted).max() > 0.5


def test_lora_changes_what_smollm2_says(smollm2: Path, smollm2_lora: Path) -> None:
    with open_reference(smollm2) as model:
        tokens = model.tokenize(PROMPT)
        plain = model.logits(tokens)
        model.apply_lora(smollm2_lora)
        adapted = model.logits(tokens)
    assert np.isfinite(adapted).all()
    assert np.abs(plain - adapted).max() > 0.5
    assert (plain.argmax(axis=1) != adapted.argmax(axis=1)).any()


def test_lora_of_another_model_is_rejected(tiny_model: TinyModel, smollm2_lora: Path) -> None:
    with open_reference(tiny_model("llama")) as model, pytest.raises(RuntimeError, match="adapter"):
        model.apply_lora(smollm2_lora)


@pytest.mark.parametrize("architecture", KINDS)
def test_modified_copy_differs_in_one_byte_and_in_the_logits(
    tiny_model: TinyModel, tmp_path: Path, architecture: str
) -> None:
    base = tiny_model(architecture)
    changed = modified_copy(base, tmp_path / "changed.gguf")
    before = np.frombuffer(base.read_bytes(), dtype=np.uint8)
    after = np.frombuffer(changed.read_bytes(), dtype=np.uint8)
    assert (before != after).sum() == 1
    with open_reference(base) as model:
        tokens = model.tokenize(PROMPT)
        plain = model.logits(tokens)
    with open_reference(changed) as model:
        assert np.abs(plain - model.logits(tokens)).max() > 0.1


@pytest.mark.parametrize("damage", ["magic", "metadata", "tensor_type"])
def test_corrupt_copy_is_rejected(tiny_model: TinyModel, tmp_path: Path, damage: str) -> None:
    base = tiny_model("llama")
    broken = corrupt_copy(base, tmp_path / "broken.gguf", damage=damage)  # type: ignore[arg-type]
    assert broken.stat().st_size == base.stat().st_size
    with pytest.raises(RuntimeError, match="cannot load"), open_reference(broken):
        pass


@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.5, 0.999])
def test_truncated_copy_is_rejected(tiny_model: TinyModel, tmp_path: Path, fraction: float) -> None:
    broken = truncated_copy(tiny_model("llama"), tmp_path / "broken.gguf", fraction=fraction)
    with pytest.raises(RuntimeError, match="cannot load"), open_reference(broken):
        pass
