"""Engines on real models; the one that the tests of a module share has nothing to reuse when a test begins.

Everything that uses `engine` or `open_tiny` runs on each backend.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from kitelib import KiteEngine, PoolConfig
from tests.support.backends import BackendKit
from tests.support.bundles import BUNDLED, bundle_of
from tests.support.engines import StepRecorder, assert_nothing_left


@pytest.fixture(autouse=True)
def steps_can_be_counted(no_drafts: None) -> None:
    """Tests of drafts themselves ask for `eager_drafts`."""


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digests and self-test results, kept for the session: opening a model again is quick."""
    return tmp_path_factory.mktemp("kite-cache")


@pytest.fixture(scope="module")
async def shared_engine(kit: BackendKit, cache_dir: Path) -> AsyncIterator[KiteEngine]:
    """SmolLM2, or what `BackendKit.text` has in its place; use `engine`, which empties it first."""
    async with KiteEngine.open(kit.text(), n_ctx=512, threads=1, max_sequences=8, cache_dir=cache_dir) as engine:
        yield engine


@pytest.fixture
async def engine(shared_engine: KiteEngine) -> AsyncIterator[KiteEngine]:
    """`shared_engine` with nothing to reuse; whatever the test does, nothing may stay open afterwards."""
    await shared_engine.invalidate()
    yield shared_engine
    await assert_nothing_left(shared_engine)


@pytest.fixture
def open_tiny(kit: BackendKit, cache_dir: Path) -> Callable[..., Any]:
    """``open_tiny(**options)``: a random llama of 2 layers, which opens and runs in no time. Option `capacity` is
    the room for tokens in all."""
    path = kit.small()

    def opening(*, capacity: int | None = None, **options: Any) -> Any:
        if capacity is not None:
            options["kv_tokens"] = kit.kv_tokens(capacity)
        defaults = {"n_ctx": 256, "threads": 1, "max_sequences": 4, "cache_dir": cache_dir}
        return KiteEngine.open(path, **{**defaults, **options})

    return opening


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Callable[[KiteEngine], StepRecorder]:
    """``record(engine)``: its model steps from now to the end of the test."""
    return lambda engine: StepRecorder.install(engine, monkeypatch)


@pytest.fixture
async def bundle(open_tiny: Callable[..., Any], tmp_path: Path) -> Path:
    """What an engine keeps of one prompt, `BUNDLED`, and its answer."""
    path = tmp_path / "cockpit.kite"
    async with open_tiny() as engine:
        await engine.generate(BUNDLED, max_tokens=4, ignore_eos=True)
        await bundle_of(engine, path)
    return path


@pytest.fixture
async def fresh(open_tiny: Callable[..., Any]) -> AsyncIterator[KiteEngine]:
    """An engine that keeps nothing itself, so that whatever it reuses is from a bundle or from its context."""
    async with open_tiny(pool=PoolConfig(memory_bytes=0)) as engine:
        yield engine
        await assert_nothing_left(engine)
