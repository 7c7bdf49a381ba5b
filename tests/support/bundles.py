"""Bundles for tests of what uses them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio.to_thread

from kitelib import KiteEngine, ReusePolicy
from kitelib.upcycle.bundle import Bundle, BundleRoot, BundleSummary, BundleWriter, ModelIdentity
from kitelib.upcycle.unit import RecyclableUnit, inspect
from tests.support.engines import some_tokens

__all__ = ["BUNDLED", "bundle_of", "bundle_of_units", "memory_units", "open_bundle", "root_of", "write_units"]


BUNDLED = some_tokens(70)
"""The prompt of the fixture `bundle`."""


async def memory_units(engine: KiteEngine) -> list[RecyclableUnit]:
    """Everything that process memory holds, after what is on its way arrived."""
    await engine.flush()
    values = [engine.pool.memory.get(key) for key in engine.pool.memory.keys()]  # noqa: SIM118 - a store, not a mapping
    return [inspect(value) for value in values if value is not None]


def root_of(engine: KiteEngine, *, namespace: str | None = None, adapter: str | None = None) -> BundleRoot:
    """Where the fingerprints of such requests start."""
    serving = engine._current
    state = None if adapter is None else serving.backend.adapter_states[adapter]
    root = serving.root(ReusePolicy(namespace=namespace), adapter)
    return BundleRoot(root, serving.execution_path, namespace, state)


def write_units(
    path: Path,
    units: list[RecyclableUnit],
    model: ModelIdentity,
    root: BundleRoot,
    *,
    others: Sequence[tuple[RecyclableUnit, BundleRoot]] = (),
    epoch: int = 0,
    **options: Any,
) -> BundleSummary:
    """A bundle of these units, and of others with roots of their own; `options` are those of `BundleWriter` or of its
    `finish`."""
    made = {name: options.pop(name) for name in ("compression", "labels") if name in options}
    with BundleWriter(path, model, epoch=epoch, **made) as writer:
        for unit, start in [*((unit, root) for unit in units), *others]:
            writer.add(unit, start)
        return writer.finish(**options)


async def bundle_of(engine: KiteEngine, path: Path, *, root: BundleRoot | None = None, **options: Any) -> BundleSummary:
    """A bundle of what an engine has in memory, all of one root."""
    units = [unit for unit in await memory_units(engine) if unit.kind != "lora"]
    return await bundle_of_units(engine, path, units, root=root, **options)


async def bundle_of_units(
    engine: KiteEngine, path: Path, units: list[RecyclableUnit], *, root: BundleRoot | None = None, **options: Any
) -> BundleSummary:
    """As `bundle_of`, of these units."""
    identity, start = ModelIdentity.of(engine._current.backend.info), root or root_of(engine)
    return await anyio.to_thread.run_sync(lambda: write_units(path, units, identity, start, **options))


async def open_bundle(path: Path) -> Bundle:
    """The bundle, opened in a thread."""
    return await anyio.to_thread.run_sync(lambda: Bundle.open(path))
