"""The backend as a whole: loading it leaves no thread, and its figures can be asked for at any time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kitelib.backends.torch_engine.backend import TorchBackend, TorchOptions


@pytest.fixture
def load(hf_model: Callable[..., Path], tmp_path: Path) -> Callable[[], TorchBackend]:
    options = TorchOptions(n_ctx=64, threads=1, numerics="standard", compile=False, cache_dir=tmp_path)
    return lambda: TorchBackend.load(hf_model("llama"), options)


def test_loading_leaves_no_thread_of_its_own(load: Callable[[], TorchBackend]) -> None:
    """A thread that stays keeps OpenMP workers, which slow every step down."""
    load().close()
    assert not [thread for thread in threading.enumerate() if thread.name == "kite-load"]


def test_figures_can_be_asked_for_while_it_closes(load: Callable[[], TorchBackend]) -> None:
    """`KiteEngine.stats` may run in another thread, between the end of the old model and the start of the new one."""
    backend = load()
    assert backend.stats() == {"fragmentation": 0.0, "block_copies": 0, "compiled": "off"}
    backend.close()
    assert backend.stats() == {"fragmentation": 0.0, "block_copies": 0, "compiled": "off"}
    assert backend.used_tokens() == 0
