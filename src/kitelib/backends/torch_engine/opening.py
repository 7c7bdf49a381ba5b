"""Opens a model folder or GGUF file: checks it, identifies it by content, loads it."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from kitelib.backends.digest import file_state
from kitelib.backends.torch_engine.models import ModelFacts, build_model, inspect_model
from kitelib.backends.torch_engine.state import config_digest, torch_model_state
from kitelib.backends.torch_engine.tokenizer import FolderTokenizer
from kitelib.backends.torch_engine.weights import files_digest, read_ahead
from kitelib.errors import MissingExtraError, ModelFormatError, UnsupportedOptionError

if TYPE_CHECKING:
    import torch

__all__ = ["Dtype", "OpenedModel", "choose_dtype", "open_model"]

Dtype = Literal["auto", "bfloat16", "float16", "float32"]
Progress = Callable[[float], None]

_DTYPES = ("bfloat16", "float16", "float32")
_READ_SHARE = 0.9  # of the time of a load; the rest is making the modules


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class OpenedModel:
    """A model in memory, with what identifies it.

    Attributes:
        model: transformers' model, whose attention runs in a step (`use_step`) only.
        tokenizer: its tokenizer and chat template.
        facts: what its files say.
        dtype: type of its weights in memory.
        kv_dtype: type its KV is kept in.
        weights_digest: SHA-256 over the content of its weight files, 32 bytes.
        model_state: `ModelInfo.model_state`, 32 bytes.
        notes: plain sentences for people.
    """

    model: torch.nn.Module
    tokenizer: FolderTokenizer
    facts: ModelFacts
    dtype: torch.dtype
    kv_dtype: torch.dtype
    weights_digest: bytes
    model_state: bytes
    notes: tuple[str, ...]

    @property
    def state_parts(self) -> dict[str, str]:
        """`ModelInfo.state_parts`: what `model_state` is made of."""
        return {
            "weights": self.weights_digest.hex(),
            "weights_type": str(self.dtype).removeprefix("torch."),
            "kv_type": str(self.kv_dtype).removeprefix("torch."),
            "config": config_digest(self.facts.raw_config, self.facts.settings).hex(),
        }


def open_model(
    path: str | os.PathLike[str],
    *,
    dtype: Dtype = "auto",
    kv_dtype: Dtype = "auto",
    device: torch.device | str = "cpu",
    experts: str | None = None,
    cache_dir: pathlib.Path | None = None,
    progress: Progress | None = None,
) -> OpenedModel:
    """Checks, identifies and loads a model. Blocks: about 1 s per GB and thread where files were not read before.

    Args:
        path: folder with safetensors weights, or a GGUF file, which is dequantized.
        dtype: type of the weights in memory; "auto" is that of the files (bfloat16 for GGUF), or float32 where the
            device lacks it.
        kv_dtype: type of the KV cache; "auto" is that of the weights.
        device: where the weights go, e.g. "cpu" or "cuda:0".
        experts: as of `build_model`.
        cache_dir: where content digests are remembered; None means the user's cache folder.
        progress: called with the fraction done, 0 to 1, on the calling thread; what it raises stops the load and
            comes out of this call.

    Raises:
        ModelNotFoundError: nothing there.
        ModelFormatError: corrupt, incomplete, or no language model.
        UnsupportedOptionError: a model or type that can't be served; says why.
        BackendError: memory is short, or a file can't be read.
        MissingExtraError: torch or transformers is not installed.
    """
    _check_packages()
    report = progress or (lambda _: None)
    import torch

    device = torch.device(device)
    facts = inspect_model(path)
    # Blocks of GGUF have no type of their own once dequantized; bfloat16 keeps more than they hold.
    chosen, notes = choose_dtype(dtype, "bfloat16" if facts.is_gguf else facts.stored_dtype, device)
    if facts.is_gguf:
        notes += (f"the GGUF file is dequantized to {chosen}; the lite engine computes with its quantized weights",)
    kept = chosen if kv_dtype == "auto" else choose_dtype(kv_dtype, None, device)[0]
    tokenizer = FolderTokenizer(facts.path, vocab_size=facts.vocab_size, end_token_ids=facts.end_token_ids)
    before = [file_state(file) for file in facts.files]
    digest = files_digest(facts.files, cache_dir, lambda done: report(done * _READ_SHARE / 2))
    read_ahead(facts.files, lambda done: report(_READ_SHARE * (0.5 + done / 2)))
    model = build_model(facts, getattr(torch, chosen), device, experts=experts)
    if before != [file_state(file) for file in facts.files]:
        raise ModelFormatError(f"{str(facts.path)!r} changed while it was loaded; open it when it is complete")
    report(1.0)
    return OpenedModel(
        model=model,
        tokenizer=tokenizer,
        facts=facts,
        dtype=getattr(torch, chosen),
        kv_dtype=getattr(torch, kept),
        weights_digest=digest,
        model_state=torch_model_state(
            digest, facts.raw_config, weights_dtype=chosen, kv_dtype=kept, settings=facts.settings
        ),
        notes=(*facts.notes, *notes),
    )


def choose_dtype(asked: str, stored: str | None, device: torch.device) -> tuple[str, tuple[str, ...]]:
    """The type for the weights, and notes about it.

    Args:
        asked: "auto" or a type.
        stored: type of the weights in the files; None if unknown.
        device: where they will be.

    Raises:
        UnsupportedOptionError: no such type, or the device can't compute with it.
    """
    if asked not in ("auto", *_DTYPES):
        raise UnsupportedOptionError(f"dtype is {asked!r}; give 'auto', {', '.join(map(repr, _DTYPES))}")
    wanted = asked if asked != "auto" else stored
    if wanted not in _DTYPES:
        wanted = "float32"
    if _computes(wanted, device):
        return wanted, ()
    if asked != "auto":
        raise UnsupportedOptionError(
            f"dtype is {asked!r}, but {device} has no instructions for it; give 'auto' or 'float32'"
        )
    return "float32", (f"the weights are {wanted}, which {device} has no instructions for; they are used as float32",)


def _computes(dtype: str, device: torch.device) -> bool:
    """Whether the device multiplies matrices of this type by itself, not by converting them each time."""
    import torch

    if dtype == "float32" or device.type not in ("cpu", "cuda"):
        return True
    if device.type == "cuda":
        return dtype == "float16" or torch.cuda.get_device_capability(device)[0] >= 8
    name = "_is_mkldnn_bf16_supported" if dtype == "bfloat16" else "_is_mkldnn_fp16_supported"
    try:
        return bool(getattr(torch.ops.mkldnn, name)())
    except (AttributeError, RuntimeError):  # a torch without oneDNN
        return False


def _check_packages() -> None:
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, "torch", "opening a Hugging Face model")
