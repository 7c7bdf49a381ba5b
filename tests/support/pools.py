"""Shared tiers that hold known units, for the tests of the commands that look at them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import anyio

from kitelib.abc import SharedStore
from kitelib.fingerprint import model_key, store_key
from kitelib.stores.disk import DiskStore
from kitelib.upcycle.codec import get_codec
from kitelib.upcycle.unit import RecyclableUnit, pack

__all__ = ["DISK_BYTES", "disk_at", "entry", "filled", "key_of", "of_model", "with_store"]

DISK_BYTES = 2**30


def key_of(unit: RecyclableUnit) -> str:
    """The key that a unit belongs under."""
    return store_key(model_key(unit.model_state), unit.kind, unit.cf)


def entry(unit: RecyclableUnit, *, codec: str = "raw", compression: str = "none", **options: Any) -> tuple[str, bytes]:
    """Key and stored form of a unit."""
    return key_of(unit), pack(unit, get_codec(codec, compression), **options)


def of_model(unit: RecyclableUnit, letter: bytes) -> RecyclableUnit:
    """The same unit of another model."""
    return dataclasses.replace(unit, model_state=letter * 32)


def disk_at(folder: Any) -> Callable[[], SharedStore]:
    """Makes disk stores over one folder."""
    return lambda: DiskStore(folder, DISK_BYTES)


def with_store(make: Callable[[], SharedStore], use: Callable[[SharedStore], Any]) -> Any:
    """``await use(store)`` on a store that is opened and closed for it, in an event loop of its own."""

    store = make()

    async def run() -> Any:
        try:
            return await use(store)
        finally:
            await store.aclose()

    return anyio.run(run)


def filled(make: Callable[[], SharedStore], items: Iterable[tuple[str, bytes]], **epochs: int) -> None:
    """Puts values and epochs (by model key) into a store."""

    async def fill(store: SharedStore) -> None:
        await store.put_many(list(items))
        for model, epoch in epochs.items():
            await store.raise_epoch(model, epoch)

    with_store(make, fill)
