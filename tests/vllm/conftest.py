"""Tests of the vLLM connector, on vLLM itself: they run in an environment with vLLM (see README.md), and elsewhere there
is nothing to collect."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.engines import Engine, open_engine

_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in the process that tests talk to
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:  # elsewhere these would be settings of other tests
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights, large enough that loading its KV pays."""
    from tests.vllm.models import write_llama

    return write_llama(tmp_path_factory.mktemp("models") / "llama", seed=1)


@pytest.fixture(scope="session")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The model without the connector."""
    with open_engine(model, tmp_path_factory.mktemp("reference") / "log") as engine:
        yield engine


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """Folder of a disk tier."""
    return tmp_path / "pool"
