"""Parts of the torch engine, for tests that put them together themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["GREEDY_DRAW", "Parts", "compute", "device_loader", "export_all", "open_parts"]

GREEDY_DRAW: dict[str, Any] = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "uniform": 0.0}


@dataclasses.dataclass(frozen=True)
class Parts:
    """A model that is ready for steps.

    Attributes:
        forward: the model as a function of rows.
        layers: what its layers keep.
        dtype: type of its KV.
    """

    forward: Any
    layers: tuple[Any, ...]
    dtype: Any

    def runner(
        self,
        kind: Any = None,
        *,
        num_blocks: int = 32,
        block_tokens: int = 16,
        rows: Any = None,
        max_sequences: int = 16,
        **options: Any,
    ) -> Any:
        """A `Runner`, or another kind of one, with an empty cache on the CPU."""
        from kitelib.backends.torch_engine.kernels.gathered import GatheredAttention
        from kitelib.backends.torch_engine.kernels.native import native_attention
        from kitelib.backends.torch_engine.packing import RowPlan
        from kitelib.backends.torch_engine.pages import PagedCache
        from kitelib.backends.torch_engine.runner import Runner

        cache = PagedCache(self.layers, num_blocks, block_tokens, self.dtype, "cpu")
        kernel = native_attention() or GatheredAttention()
        return (kind or Runner)(self.forward, cache, kernel, rows or RowPlan(1, 256), max_sequences, **options)


def open_parts(folder: Path, cache_dir: Path) -> Parts:
    """Loads a folder, with one thread."""
    from kitelib.backends.torch_engine.forward import Forward, probe_layers
    from kitelib.backends.torch_engine.linear import pack_linears
    from kitelib.backends.torch_engine.opening import open_model
    from kitelib.backends.torch_engine.threads import prepare_torch

    prepare_torch(1)
    opened = open_model(folder, cache_dir=cache_dir)
    pack_linears(opened.model)
    layers = probe_layers(opened.model, opened.facts.name)
    return Parts(Forward(opened.model, latent=any(each.latent for each in layers)), layers, opened.kv_dtype)


def device_loader() -> type[Any]:
    """A `TorchLoader` that makes what CUDA devices get (steps beside the thread, captured decode steps, drawn tokens)
    out of the CPU. `DecodeGraphs` calls the model again there instead of replaying a capture."""
    from kitelib.backends.torch_engine.device_runner import DeviceRunner
    from kitelib.backends.torch_engine.loader import TorchLoader

    class DeviceLoader(TorchLoader):
        @property
        def _runner_type(self) -> Any:
            return DeviceRunner

        @_runner_type.setter
        def _runner_type(self, value: Any) -> None:
            """The loader would choose by the device."""

    return DeviceLoader


def compute(backend: Any, sequence: Any, tokens: Sequence[int], start: int = 0, *, piece: int = 10_000) -> Any:
    """Computes ``tokens[start:]`` on a backend or runner, at most `piece` tokens a step; logits after the last one."""
    from kitelib.abc import StepWork

    logits = None
    for first in range(start, len(tokens), piece):
        part = tokens[first : first + piece]
        (logits,) = backend.step([StepWork(sequence, part, first, first + len(part) == len(tokens))]).logits
    assert logits is not None
    return logits.copy()


def export_all(runner: Any, sequence: Any, num_tokens: int) -> list[bytes]:
    """The bytes of a runner's sequence, block by block."""
    size = runner.tables.block_tokens
    payloads = runner.export(sequence, 0, -(-num_tokens // size), num_tokens)
    assert sum(payload.num_tokens for payload in payloads) == num_tokens
    return [payload.data.tobytes() for payload in payloads]
