"""What the GPU tests and the benchmark share: the device, small model folders, and running a backend by hand.

`KITE_GPU_DEVICE=cpu` runs everything on the CPU instead, to check the tests themselves where there is no GPU.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kitelib.abc import BlockPayload, SequenceId, StepWork, TokenDraw
from tests.gpu.missing import stand_in

with stand_in("zstandard"):
    from kitelib.backends.torch_engine.backend import TorchBackend, TorchOptions
    from kitelib.backends.torch_engine.lora import AdapterSet  # noqa: F401 - imports it, too

__all__ = [
    "GREEDY",
    "Skipped",
    "compute",
    "device",
    "export_all",
    "greedy",
    "load",
    "model_folder",
    "on_gpu",
    "prompt",
    "scratch",
]

GREEDY = TokenDraw(0.0, 0, 1.0, 0.0, 0.0)


class Skipped(Exception):
    """A test can't run here; the message says why."""


def device() -> torch.device:
    """The device under test."""
    return torch.device(os.environ.get("KITE_GPU_DEVICE", "cuda"))


def on_gpu() -> bool:
    """Whether the device under test is one, and not the CPU of a dry run."""
    return device().type == "cuda"


@functools.cache
def scratch() -> Path:
    """A folder that lives as long as the process."""
    folder = Path(tempfile.mkdtemp(prefix="kite-gpu-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def model_folder(architecture: str = "llama", dtype: str = "bfloat16") -> Path:
    """A random model of four layers with heads of 64, large enough that a GPU's matrix kernels vary with the batch."""
    with stand_in("gguf", "zstandard"):
        from tests.support.hf_folders import write_model

    # On the CPU only the code is tested.
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8} if on_gpu() else {}
    layers = {} if architecture == "gemma3_text" else {"num_hidden_layers": 4 if on_gpu() else 2}
    return write_model(scratch() / f"{architecture}-{dtype}", architecture, dtype=dtype, **sizes, **layers)


@contextlib.contextmanager
def load(folder: Path, **options: Any) -> Iterator[TorchBackend]:
    """A backend on the device under test; small unless told otherwise."""
    settings = {"n_ctx": 512, "kv_tokens": 8192, "max_sequences": 32, "threads": 2, "compile": False, **options}
    backend = TorchBackend.load(
        folder, TorchOptions(device=str(device()), cache_dir=scratch() / "cache", **settings), None
    )
    try:
        yield backend
    finally:
        backend.close()


def prompt(count: int, seed: int = 0) -> list[int]:
    """Token ids that every test model has."""
    return np.random.default_rng(seed).integers(3, 300, count).tolist()


def compute(
    backend: TorchBackend, sequence: SequenceId, tokens: Sequence[int], start: int = 0, *, chunk: int = 10_000
) -> np.ndarray:
    """Processes tokens in steps of `chunk`; a copy of the logits after the last one."""
    chunk = min(chunk, backend.info.max_step_tokens)
    logits = None
    for first in range(0, len(tokens), chunk):
        part = tokens[first : first + chunk]
        logits = backend.step([StepWork(sequence, part, start + first, True)]).logits[0]
    assert logits is not None
    return logits.copy()


def greedy(backend: TorchBackend, sequence: SequenceId, logits: np.ndarray, start: int, count: int) -> list[int]:
    """Generates `count` tokens, the first of them from `logits`."""
    tokens = [int(logits.argmax())]
    while len(tokens) < count:
        logits = compute(backend, sequence, tokens[-1:], start + len(tokens) - 1)
        tokens.append(int(logits.argmax()))
    return tokens


def export_all(backend: TorchBackend, sequence: SequenceId, num_tokens: int) -> list[BlockPayload]:
    """All blocks of a sequence, the last one cut."""
    count = -(-num_tokens // backend.info.block_tokens)
    payloads = backend.export_blocks(sequence, 0, count, num_tokens)
    assert sum(payload.num_tokens for payload in payloads) == num_tokens
    return payloads
