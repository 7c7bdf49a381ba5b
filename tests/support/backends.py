"""One suite for every backend: the same models, damages and adapters in the form that each of them reads.

Fixtures for ``pytest_plugins``: a test that asks for `kit`, or for anything made of it, runs once per backend.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.support import gguf_files, hf_folders, peft_folders

__all__ = ["BackendKit", "kit", "smollm2_like"]

_SMALL_VOCAB = 2048


@dataclasses.dataclass(frozen=True)
class BackendKit:
    """What tests need of a backend.

    Attributes:
        name: "llama_cpp" or "torch".
        real: SmolLM2; for torch in bfloat16, where its self-test alone takes a minute.
        text: a model with the tokens and the chat template of SmolLM2 whose numerics are bitwise. For llama_cpp it is
            SmolLM2; for torch a small random one in float32: nothing of what is tested depends on what a text means.
        small: ``small(seed=1)``: a random llama of 2 layers with 2048 token ids.
    """

    name: Literal["llama_cpp", "torch"]
    real: Callable[[], Path]
    text: Callable[[], Path]
    small: Callable[..., Path]

    @property
    def backend_type(self) -> type[Any]:
        """Its class."""
        if self.name == "torch":
            from kitelib.backends.torch_engine.backend import TorchBackend

            return TorchBackend
        from kitelib.backends.llama_cpp.backend import LlamaCppBackend

        return LlamaCppBackend

    def load(self, path: Path, **options: Any) -> Any:
        """A backend with one thread."""
        if self.name == "torch":
            from kitelib.backends.torch_engine.backend import TorchBackend, TorchOptions

            return TorchBackend.load(path, TorchOptions(**{"threads": 1, "compile": False, **options}))
        from kitelib.backends.llama_cpp.backend import LlamaCppBackend, LlamaCppOptions

        return LlamaCppBackend.load(path, LlamaCppOptions(**{"threads": 1, **options}))

    def kv_tokens(self, capacity: int) -> int:
        """What to ask for to get room for exactly so many tokens in all, a multiple of 256."""
        return capacity - 256 if self.name == "llama_cpp" else capacity  # llama.cpp gets cells to move things in

    def copy(self, model: Path, target: Path) -> Path:
        """The same model elsewhere."""
        return Path(shutil.copytree(model, target) if model.is_dir() else shutil.copy2(model, target))

    def one_byte_changed(self, model: Path, target: Path) -> Path:
        """A copy in which a byte of the weights differs; same size and time of modification."""
        if self.name == "llama_cpp":
            gguf_files.modified_copy(model, target)
        else:
            shutil.copytree(model, target)
            _flip(target / "model.safetensors")
            shutil.copystat(model / "model.safetensors", target / "model.safetensors")
        shutil.copystat(model, target)
        return target

    def replace(self, model: Path, other: Path) -> None:
        """Puts `other` where `model` is, as a deployment would."""
        if self.name == "torch":
            (other / "model.safetensors").replace(model / "model.safetensors")
        else:
            other.replace(model)

    def replace_adapter(self, adapter: Path, other: Path) -> None:
        """Puts another adapter of the same size and time of modification in its place."""
        name = "adapter_model.safetensors" if self.name == "torch" else "."
        shutil.copystat(adapter / name, other / name)
        (other / name).replace(adapter / name)

    def damaged(self, model: Path, target: Path) -> Path:
        """A copy that can't be loaded."""
        if self.name == "llama_cpp":
            return gguf_files.corrupt_copy(model, target)
        shutil.copytree(model, target)
        (target / "model.safetensors").write_bytes(b"\xff" * 64)
        return target

    def adapter(self, target: Path, model: Path, seed: int) -> Path:
        """A random LoRA adapter for a model."""
        if self.name == "llama_cpp":
            return gguf_files.write_lora(target, model, seed=seed)
        peft_folders.write_adapter(target, hf_folders.reference_model(model), seed=seed)
        return target

    def adapter_of(self, backend: Any, sequence: Any) -> str | None:
        """The adapter that a sequence is computed with; raises if it is gone."""
        table = backend.runner.tables[sequence] if self.name == "torch" else backend._context._sequences[sequence]
        return None if table.adapter is None else str(table.adapter)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-2] ^= 0x40  # the exponent of the last weight: its value changes visibly
    path.write_bytes(data)


@pytest.fixture(scope="session")
def smollm2_like(tmp_path_factory: pytest.TempPathFactory, smollm2_hf: Path) -> Path:
    """A random llama of 2 layers in float32, with the tokenizer and the chat template of SmolLM2."""
    folder = tmp_path_factory.mktemp("like") / "smollm2-like"
    sizes = {"vocab_size": 49152, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    hf_folders.write_model(folder, "llama", seed=1, bos_token_id=1, eos_token_id=2, pad_token_id=2, **sizes)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(smollm2_hf / name, folder / name)
    return folder


@pytest.fixture(scope="session", params=["llama_cpp", "torch"])
def kit(request: pytest.FixtureRequest) -> BackendKit:
    """Everything that asks for it is tested on each backend."""
    fixture = request.getfixturevalue
    if request.param == "llama_cpp":
        return BackendKit(
            "llama_cpp",
            real=lambda: fixture("smollm2"),
            text=lambda: fixture("smollm2"),
            small=lambda seed=1: fixture("tiny_model")("llama", seed),
        )
    hf_model = fixture("hf_model")
    hf_model("llama", vocab_size=_SMALL_VOCAB)  # here, since importing transformers would block an event loop
    return BackendKit(
        "torch",
        real=lambda: fixture("smollm2_hf"),
        text=lambda: fixture("smollm2_like"),
        small=lambda seed=1: hf_model("llama", seed, vocab_size=_SMALL_VOCAB),
    )
