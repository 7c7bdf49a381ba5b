"""Engines that the tests of this folder compare; one thread, small contexts, nothing outside temporary folders.

Everything that uses `model` or `cold_engine` runs on each backend.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from kitelib import KiteEngine
from tests.support.backends import BackendKit


@pytest.fixture(scope="session")
def kite_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where digests and self-test results are remembered during this run."""
    return tmp_path_factory.mktemp("kite-cache")


@pytest.fixture(scope="session")
def open_engine(kite_cache: Path) -> Callable[..., Any]:
    """`KiteEngine.open` with one thread and the cache of this run."""

    def open_with(model: Path, **options: Any) -> Any:
        return KiteEngine.open(model, **{"threads": 1, "cache_dir": kite_cache, **options})

    return open_with


@pytest.fixture(scope="session")
def model(kit: BackendKit) -> Path:
    """SmolLM2, or what `BackendKit.text` has in its place."""
    return kit.text()


@pytest.fixture(scope="module")
async def cold_engine(model: Path, open_engine: Callable[..., Any]) -> AsyncIterator[KiteEngine]:
    """The reference: a request at a time, always with reuse off."""
    async with open_engine(model, n_ctx=1024, kv_tokens=1024) as engine:
        yield engine
