"""Ledgers of hits, filled as engines fill them, and pools whose hottest units are known."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from kitelib.abc import HitLedger, ModelInfo, SharedStore
from kitelib.fingerprint import Fingerprint, model_key, root_fingerprint
from kitelib.stores.hits import DAY_S, HitCounts
from kitelib.upcycle.unit import RecyclableUnit
from tests.support.pools import entry
from tests.support.units import INFO, chain_of, logits_unit, units_of

__all__ = ["MODEL", "OWN", "completion_unit", "fill_pool", "prompt_units", "publish", "root_of", "today"]

MODEL = model_key(INFO.model_state)


def root_of(namespace: str | None = None, secret: bytes | None = None) -> Fingerprint:
    """The root of a tenant's requests to the small model."""
    return root_fingerprint(INFO.model_state, INFO.execution_path, namespace, namespace_secret=secret)


OWN = root_of()


def today() -> int:
    """Days since 1970."""
    return int(time.time() // DAY_S)


def completion_unit(tokens: Sequence[int], answer: Iterable[int], *, root: bytes = OWN) -> RecyclableUnit:
    """The tokens that followed a prompt."""

    data = np.array(list(answer), "<u4").view(np.uint8)
    return dataclasses.replace(
        logits_unit(tokens, root=root),
        kind="completion",
        layout="kite.tokens",
        dtype="uint32",
        shape=(len(data) // 4,),
        data=data,
    )


def prompt_units(tokens: Sequence[int], *, root: bytes = OWN, epoch: int = 0) -> list[RecyclableUnit]:
    """All units of a prompt: blocks, tail if it has one, logits, and a completion."""
    answer = completion_unit(tokens, (5, 6), root=root)
    return [*units_of(tokens, root=root, epoch=epoch), dataclasses.replace(answer, epoch=epoch)]


async def publish(
    ledger: HitLedger,
    hits: Mapping[bytes, int],
    *,
    root: bytes = OWN,
    namespace: str | None = None,
    private: bool = False,
    info: ModelInfo = INFO,
    day: int | None = None,
) -> None:
    """Adds hits by the fingerprint of the deepest block, described as an engine describes them."""
    counts = HitCounts(private=private)
    counts.use_model(info)
    counts.describe(root, {"execution_path": info.execution_path, "namespace": namespace, "adapter": None})
    members = {f"{root.hex()}:{cf.hex()}": count for cf, count in hits.items()}
    await ledger.add_hits(
        counts.model, today() if day is None else day, members, counts.descriptions(counts.model, members)
    )


async def fill_pool(
    store: SharedStore,
    prompts: Iterable[tuple[Sequence[int], int]],
    *,
    root: bytes = OWN,
    epoch: int = 0,
    hmac_key: bytes | None = None,
) -> None:
    """Stores all units of prompts, and hits of each prompt's end."""
    hits = {}
    for tokens, count in prompts:
        await store.put_many([entry(unit, hmac_key=hmac_key) for unit in prompt_units(tokens, root=root, epoch=epoch)])
        hits[chain_of(tokens, root).end()] = count
    if isinstance(store, HitLedger):
        await publish(store, hits, root=root)
