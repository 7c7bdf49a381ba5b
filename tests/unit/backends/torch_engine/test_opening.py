"""Opening a model: one call that checks, identifies and loads a folder or a GGUF file."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kitelib.backends.llama_cpp.model import GGUFModel
from kitelib.backends.torch_engine import opening
from kitelib.backends.torch_engine.opening import choose_dtype, open_model
from kitelib.errors import ModelFormatError, UnsupportedOptionError
from tests.support.hf_folders import reference_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors gain nothing from more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def copied(folder: Path, target: Path) -> Path:
    """A copy of a model folder that may be changed."""
    shutil.copytree(folder, target)
    return target


def test_an_opened_folder(hf_model: Callable[..., Path], tmp_path: Path) -> None:
    """Model, tokenizer, types and digest are the folder's."""
    folder = hf_model("llama", dtype="float16")
    opened = open_model(folder, dtype="float32", kv_dtype="bfloat16", cache_dir=tmp_path)
    assert opened.weights_digest == hashlib.sha256((folder / "model.safetensors").read_bytes()).digest()
    assert (opened.dtype, opened.kv_dtype) == (torch.float32, torch.bfloat16)
    assert {each.dtype for each in opened.model.parameters()} == {torch.float32}
    assert opened.tokenizer.vocab_size == opened.facts.vocab_size == 512
    assert opened.tokenizer.end_token_ids >= opened.facts.end_token_ids


def test_the_model_state_is_that_of_the_content(hf_model: Callable[..., Path], tmp_path: Path) -> None:
    """A copy under another name has the same state; other weights, types or settings have another."""
    folder = hf_model("llama")

    def state(path: Path, **options: Any) -> bytes:
        return open_model(path, cache_dir=tmp_path / "cache", **options).model_state

    base = state(folder)
    assert state(copied(folder, tmp_path / "other name")) == base
    changed = copied(folder, tmp_path / "changed")
    config = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-4}))
    others = [state(hf_model("llama", seed=2)), state(changed), state(folder, kv_dtype="bfloat16")]
    assert len({base, *others}) == 4


def test_a_second_opening_reads_nothing(
    hf_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest is remembered and the weights are mapped, so opening again costs no reading."""
    monkeypatch.setattr("kitelib.backends.digest._SETTLED_NS", 0)
    folder = hf_model("qwen3")
    first = open_model(folder, cache_dir=tmp_path)
    monkeypatch.setattr("kitelib.backends.digest._hash", lambda *_: pytest.fail("read again"))
    assert open_model(folder, cache_dir=tmp_path).model_state == first.model_state


def test_progress_grows_to_one_and_may_stop_the_load(hf_model: Callable[..., Path], tmp_path: Path) -> None:
    """It is told on the calling thread; what it raises comes out."""
    folder = hf_model("llama", shard_bytes=200_000)
    seen: list[float] = []
    open_model(folder, cache_dir=tmp_path, progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0

    def stop(_: float) -> None:
        raise InterruptedError("enough")

    with pytest.raises(InterruptedError, match="enough"):
        open_model(folder, cache_dir=tmp_path, progress=stop)


def test_files_that_change_while_they_are_loaded_are_refused(
    hf_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest would not be that of the weights in memory."""
    folder = copied(hf_model("llama"), tmp_path / "model")
    build = opening.build_model

    def touching(*args: Any, **options: Any) -> Any:
        with (folder / "model.safetensors").open("ab") as file:
            file.write(b"\0")
        return build(*args, **options)

    monkeypatch.setattr(opening, "build_model", touching)
    with pytest.raises(ModelFormatError, match="changed while|can't be loaded"):
        open_model(folder, cache_dir=tmp_path / "cache")


def test_a_gguf_file_is_dequantized(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Its weights come out in the wanted type, its tokens and chats are those of the lite engine."""
    path = tiny_model("llama")
    opened = open_model(path, dtype="float32", cache_dir=tmp_path)
    plain = reference_model(path.parent, gguf_file=path.name, dtype=torch.float32)
    expected = dict(plain.named_parameters())
    assert all(torch.equal(each, expected[name]) for name, each in opened.model.named_parameters())
    assert opened.weights_digest == hashlib.sha256(path.read_bytes()).digest()
    assert "dequantized to float32" in opened.notes[-1]
    llama = GGUFModel.load(path, vocab_only=True, cache_dir=tmp_path)
    try:
        assert opened.tokenizer.vocab_bytes() == llama.vocab_bytes()
        assert opened.facts.context_tokens == llama.n_ctx_train
        assert opened.tokenizer.tokenize("Hello <|im_end|>", add_special=False) == llama.tokenize(
            "Hello <|im_end|>", add_special=False
        )
    finally:
        llama.close()


@pytest.mark.parametrize(
    ("name", "content", "error", "reason"),
    [
        ("model.bin", b"PK\3\4", ModelFormatError, "not a GGUF file"),
        ("model-00001-of-00002.gguf", b"GGUF", UnsupportedOptionError, "one part of a split model"),
        ("model.gguf", b"GGUF\3\0\0\0", (ModelFormatError, UnsupportedOptionError), "lite engine"),
    ],
)
def test_other_files_are_refused(
    tmp_path: Path, name: str, content: bytes, error: type[Exception], reason: str
) -> None:
    """Each says what it is and what to do."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=reason):
        open_model(tmp_path / name, cache_dir=tmp_path)


def test_types_are_chosen_by_file_and_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a device can't compute becomes float32 with a note, or is refused if it was asked for."""
    monkeypatch.setattr(opening, "_computes", lambda dtype, device: dtype != "float16")
    assert choose_dtype("auto", "bfloat16", CPU) == ("bfloat16", ())
    assert choose_dtype("auto", None, CPU) == ("float32", ())
    assert choose_dtype("auto", "float64", CPU) == ("float32", ())
    assert choose_dtype("float32", "bfloat16", CPU) == ("float32", ())
    chosen, notes = choose_dtype("auto", "float16", CPU)
    assert chosen == "float32"
    assert "the weights are float16" in notes[0]
    with pytest.raises(UnsupportedOptionError, match="no instructions for it"):
        choose_dtype("float16", None, CPU)
    with pytest.raises(UnsupportedOptionError, match="give 'auto', 'bfloat16'"):
        choose_dtype("int8", None, CPU)


def test_nothing_heavy_is_imported_with_the_module() -> None:
    """torch and transformers load when a model is opened, not before."""
    import subprocess
    import sys

    code = (
        "import sys, kitelib.backends.torch_engine.opening\n"
        "print([name for name in ('torch', 'transformers', 'tokenizers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
