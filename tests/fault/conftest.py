"""What tests of broken tiers need: quick breakers and engines."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kitelib import KiteEngine
from kitelib.stores.breaker import Breaker


@pytest.fixture(scope="session")
def kite_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where digests and self-test results are remembered during this run."""
    return tmp_path_factory.mktemp("kite-cache")


@pytest.fixture
def open_model(kite_cache: Path) -> Callable[..., Any]:
    """``open_model(path, **options)``: an engine with one thread and a small context."""

    def opening(model: Path, **options: Any) -> Any:
        defaults = {"n_ctx": 256, "kv_tokens": 512, "threads": 1, "max_sequences": 4, "cache_dir": kite_cache}
        return KiteEngine.open(model, **{**defaults, **options})

    return opening


@pytest.fixture
def open_tiny(tiny_model: Callable[..., Path], open_model: Callable[..., Any]) -> Callable[..., Any]:
    """``open_tiny(**options)``: a random llama of 2 layers, whose blocks have 8 KiB."""
    return functools.partial(open_model, tiny_model("llama"))


@pytest.fixture
def quick_breakers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breakers let the first probe through after 0.1 s, and wait no longer than 0.4 s."""
    original = Breaker.__init__

    def init(
        self: Breaker, max_failures: int = 3, open_s: float = 0.1, max_open_s: float = 0.4, clock: Any = None
    ) -> None:
        original(self, max_failures, min(open_s, 0.1), min(max_open_s, 0.4), clock)

    monkeypatch.setattr(Breaker, "__init__", init)
