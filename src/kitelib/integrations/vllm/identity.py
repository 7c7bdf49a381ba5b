"""What KV depends on: the content of the weights and of adapters, what shapes the numbers, and the tenant."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any, Final

from kitelib.backends.digest import content_digest, file_state
from kitelib.backends.torch_engine.state import torch_model_state
from kitelib.backends.torch_engine.weights import weights_digest
from kitelib.errors import ConfigError, KiteError, ModelFormatError, ModelNotFoundError, UnsupportedOptionError
from kitelib.fingerprint import Fingerprint, encode_fields, root_fingerprint
from kitelib.integrations.vllm.layout import Rank

__all__ = ["Adapter", "Adapters", "model_state_of", "rank_state", "request_root"]

_FILE_FORMATS: Final = ("auto", "safetensors", "hf", "runai_streamer", "fastsafetensors", "instanttensor")
_WEIGHT_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".json")


def model_state_of(vllm_config: Any) -> bytes:
    """Digest of the weights' content and of what shapes their numbers, 32 bytes. Blocks for about a second per GB of
    weights that were never seen before.

    Raises:
        UnsupportedOptionError: the weights don't come from safetensors files, so nobody knows what they are.
        ModelNotFoundError, ModelFormatError, BackendError: the files are missing, damaged or can't be read.
        ConfigError: the overrides of the configuration are a function.
    """
    model = vllm_config.model_config
    load_format = str(getattr(vllm_config.load_config, "load_format", "auto")).rpartition(".")[2].lower()
    if load_format not in _FILE_FORMATS:
        raise UnsupportedOptionError(
            f"load_format is {load_format!r}, so the weights are not those of the model's safetensors files, and KITE "
            f"can't tell whose KV it keeps; use one of {', '.join(_FILE_FORMATS)}"
        )
    folder = _folder(str(model.model), getattr(model, "revision", None))
    overrides = getattr(model, "hf_overrides", None) or {}
    if not isinstance(overrides, Mapping):
        raise ConfigError("hf_overrides is a function, whose effect KITE can't compare; give a mapping")
    settings: dict[str, Any] = {
        "hf_overrides": overrides,
        "quantization": None if model.quantization is None else str(model.quantization),
        "model_impl": str(getattr(model, "model_impl", "auto")),
    }
    config = _config(folder)
    if "longrope" in json.dumps(config):  # its factors depend on the longest sequence that is served
        settings["max_model_len"] = model.max_model_len
    dtype = str(model.dtype).removeprefix("torch.")
    kv_dtype = str(vllm_config.cache_config.cache_dtype)
    return torch_model_state(
        weights_digest(folder), config, weights_dtype=dtype, kv_dtype=kv_dtype, settings={"vllm": settings}
    )


def rank_state(model_state: bytes, rank: Rank) -> bytes:
    """What a worker's units have as model state: that of the model if the worker has all of it, else that of its
    part."""
    if rank.tp_size == rank.pp_size == 1:
        return model_state
    return hashlib.sha256(encode_fields("kite.vllm.rank", model_state, rank.fields)).digest()


def request_root(
    model_state: bytes,
    *,
    layout: str,
    block_tokens: int,
    rank: Rank,
    salt: str | None,
    secret: bytes | None,
    adapter: bytes | None,
) -> Fingerprint:
    """Fingerprint that a request's blocks start from.

    Args:
        model_state: of the whole model.
        layout: layout of the first rank.
        block_tokens: tokens in a block.
        rank: sizes count; the place is that of the first.
        salt: the request's ``cache_salt``, which is its namespace.
        secret: `PoolConfig.namespace_secret`.
        adapter: digest of the request's adapter.
    """
    path: dict[str, str | int | bool] = {
        "backend": "vllm",
        "layout": layout,
        "block_tokens": block_tokens,
        "tp_size": rank.tp_size,
        "pp_size": rank.pp_size,
        "numerics": "standard",
    }
    scaled = None if adapter is None else (adapter, 1.0)
    return root_fingerprint(model_state, path, salt, namespace_secret=secret, adapter=scaled)


@dataclasses.dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter as it was when it was first asked for.

    Attributes:
        path: its folder or file.
        digest: of its content, 32 bytes.
        states: what each of its files looked like.
    """

    path: str
    digest: bytes
    states: Mapping[str, Mapping[str, int]]

    def unchanged(self) -> bool:
        """Whether the files still look the same. A few calls of the system."""
        try:
            return {name: file_state(name) for name in self.states} == self.states
        except OSError:
            return False


class Adapters:
    """The adapters that requests named, by vLLM's own number of each.

    vLLM loads an adapter once and keeps it under its number. So what was there first counts: if the files change
    afterwards, nobody knows which content the engine has, and requests with that number are left alone.
    """

    def __init__(self) -> None:
        self._known: dict[int, Adapter | None] = {}

    def get(self, request: Any) -> Adapter | None:
        """The adapter of a vLLM ``LoRARequest`` that was read before; None if it can't be told."""
        adapter = self._known.get(request.lora_int_id)
        if adapter is None or adapter.path != str(request.lora_path) or not adapter.unchanged():
            return None
        return adapter

    def is_known(self, request: Any) -> bool:
        """Whether it was read, or tried to."""
        return request.lora_int_id in self._known

    def read(self, request: Any) -> None:
        """Reads the content. Blocks."""
        adapter: Adapter | None = None
        if not getattr(request, "load_inplace", False):
            with contextlib.suppress(KiteError, OSError):
                adapter = _read_adapter(str(request.lora_path))
        self._known.setdefault(request.lora_int_id, adapter)


def _read_adapter(path: str) -> Adapter:
    root = pathlib.Path(_snapshot(path, None) if not os.path.exists(path) else path)
    files = [root] if root.is_file() else sorted(each for each in root.iterdir() if each.suffix in _WEIGHT_SUFFIXES)
    if not files:
        raise ModelNotFoundError(f"no adapter at {path!r}; check the path")
    states = {str(each): file_state(each) for each in files}
    content = [(each.name, content_digest(each)) for each in files]
    if {name: file_state(name) for name in states} != states:
        raise ModelFormatError(f"the adapter at {path!r} changed while it was read")
    return Adapter(path, hashlib.sha256(encode_fields("kite.vllm.adapter", content)).digest(), states)


def _folder(model: str, revision: str | None) -> pathlib.Path:
    return pathlib.Path(model if os.path.exists(model) else _snapshot(model, revision))


def _snapshot(model: str, revision: str | None) -> str:
    """Where the files of a model on the hub lie on this machine."""
    from huggingface_hub import snapshot_download

    try:
        return str(snapshot_download(model, revision=revision, local_files_only=True))
    except Exception as error:
        raise ModelNotFoundError(
            f"{model!r} is neither a folder nor in the hub's cache on this machine; download it first: {error}"
        ) from error


def _config(folder: pathlib.Path) -> Mapping[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ModelFormatError(f"{str(folder / 'config.json')!r} can't be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelFormatError(f"{str(folder / 'config.json')!r} holds no mapping")
    return config
