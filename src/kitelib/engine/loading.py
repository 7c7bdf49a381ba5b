"""Choosing and loading a backend."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kitelib.config import AdapterConfig, Numerics
from kitelib.errors import ConfigError, UnsupportedOptionError
from kitelib.upcycle.adapter_unit import AdapterContent

__all__ = ["Loader"]

_BACKENDS = ("auto", "llama_cpp", "torch", "vllm")
_SEQUENCES, _CUDA_SEQUENCES = 16, 256


@dataclasses.dataclass(frozen=True, slots=True)
class Loader:
    """Everything `KiteEngine.open` was told about the model; `load` runs off the event loop."""

    model: str
    backend: str
    dtype: str
    device: str
    n_ctx: int | None
    kv_tokens: int | None
    threads: int | None
    max_sequences: int | None
    block_tokens: int | None
    block_table: Mapping[str, int]
    adapters: dict[str, str | AdapterConfig]
    numerics: Numerics
    cache_dir: Path | None
    progress: Callable[[str, float], None] | None

    def __post_init__(self) -> None:
        for name in ("n_ctx", "kv_tokens", "threads", "max_sequences", "block_tokens"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} is {value!r}; give a whole number of at least 1, or None")

    @property
    def most_requests(self) -> int:
        """Requests that may run at once, as far as that is known before the model is loaded."""
        if self.max_sequences is not None:
            return self.max_sequences
        return _CUDA_SEQUENCES if self._backend_name() == "torch" and self.device != "cpu" else _SEQUENCES

    def poolable_adapters(self) -> dict[str, AdapterConfig]:
        """Adapters that the pool may have: those of the torch backend."""
        return self._adapters() if self._backend_name() == "torch" else {}

    def load(self, contents: Mapping[str, AdapterContent] | None = None) -> Any:
        """The loaded backend; `contents` are the adapters that the pool had. Raises as `KiteEngine.open`."""
        name = self._backend_name()
        if name == "torch":
            return self._load_torch(contents or {})
        if name == "llama_cpp":
            return self._load_llama_cpp()
        raise UnsupportedOptionError(
            f"backend is {name!r}, which this release does not have; give 'llama_cpp' for a GGUF file, or 'torch'"
        )

    def _load_torch(self, contents: Mapping[str, AdapterContent]) -> Any:
        from kitelib.backends.torch_engine.backend import TorchBackend, TorchOptions

        options = TorchOptions(**self._common(), dtype=self.dtype, device=self.device, adapter_contents=contents)
        return TorchBackend.load(self.model, options, self.progress)

    def _load_llama_cpp(self) -> Any:
        if os.path.isdir(self.model):
            raise UnsupportedOptionError(
                f"{self.model!r} is a folder; the llama_cpp backend takes a .gguf file, the torch backend folders"
            )
        for option, value, allowed in (
            ("dtype", self.dtype, ("auto", "float16")),
            ("device", self.device, ("auto", "cpu")),
        ):
            if value not in allowed:
                raise UnsupportedOptionError(
                    f"{option} is {value!r}; the llama_cpp backend takes {' or '.join(map(repr, allowed))}"
                )
        from kitelib.backends.llama_cpp.backend import LlamaCppBackend, LlamaCppOptions

        options = LlamaCppOptions(**{**self._common(), "max_sequences": self.most_requests})
        return LlamaCppBackend.load(self.model, options, self.progress)

    def _common(self) -> dict[str, Any]:
        """Options that every backend has."""
        return {
            "n_ctx": self.n_ctx,
            "kv_tokens": self.kv_tokens,
            "threads": self.threads,
            "max_sequences": self.max_sequences,
            "block_tokens": self.block_tokens,
            "block_table": self.block_table,
            "numerics": self.numerics,
            "adapters": self._adapters(),
            "cache_dir": self.cache_dir,
        }

    def _adapters(self) -> dict[str, AdapterConfig]:
        found = {}
        for name, value in self.adapters.items():
            if isinstance(value, (str, os.PathLike)):
                found[name] = AdapterConfig(os.fspath(value))
            elif isinstance(value, AdapterConfig):
                found[name] = value
            else:
                raise ConfigError(
                    f"adapters[{name!r}] is {value!r}; give the path of a GGUF file, for the torch backend of a PEFT "
                    "folder, or an AdapterConfig"
                )
        return found

    def _backend_name(self) -> str:
        if self.backend not in _BACKENDS:
            near = difflib.get_close_matches(self.backend, _BACKENDS, 1, 0.0)[0]
            raise ConfigError(f"backend is {self.backend!r}; did you mean {near!r}? There are: {', '.join(_BACKENDS)}")
        if self.backend == "auto":
            return "torch" if os.path.isdir(self.model) else "llama_cpp"
        return self.backend
