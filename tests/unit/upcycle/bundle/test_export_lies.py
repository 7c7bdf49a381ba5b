"""What an export makes of a pool in which somebody lies: about hits, sizes, ages, and what goes on from what."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from kitelib.errors import ConfigError, FormatError
from kitelib.fingerprint import root_fingerprint
from kitelib.runtime.threads import ThreadDoor
from kitelib.stores.disk import DiskStore
from kitelib.stores.hot_units import PoolView, StoredUnits, live_sources, read_ledgers, source_of
from kitelib.stores.memory import MemoryStore
from kitelib.stores.pinned import PinnedUnits
from kitelib.upcycle.bundle import Bundle, BundleWriter
from kitelib.upcycle.bundle.exporting import export_units
from kitelib.upcycle.bundle.writer import MAX_HITS
from kitelib.upcycle.codec import get_codec
from kitelib.upcycle.unit import HEAD_BYTES, inspect, pack
from tests.support.hits import MODEL, OWN, fill_pool, prompt_units, publish, today
from tests.support.pools import entry, key_of
from tests.support.units import INFO, chain_of, kv_unit

FIRST = [1, 2, 3, 4, 5, 6, 7, 8, 9]
SECOND = [40, 41, 42, 43]


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[DiskStore]:
    disk = DiskStore(tmp_path / "pool", 2**26)
    yield disk
    await disk.aclose()


async def view_of(store: DiskStore) -> PoolView:
    hits, roots = await read_ledgers([store], MODEL, [today()], 1000)
    return PoolView(MODEL, await store.get_epoch(MODEL), hits, roots, [source_of("disk", store)])


async def test_any_number_of_hits_is_taken_and_bounded(store: DiskStore, tmp_path: Path) -> None:
    await fill_pool(store, [(FIRST, 2**53 - 1), (SECOND, 2**53 - 1)])
    await publish(store, {kv_unit(FIRST, 0, 4, root=OWN).cf: 2**53 - 1})
    summary = await export_units(await view_of(store), tmp_path / "hot.kite", door=ThreadDoor())
    assert summary.refused == 0
    with Bundle.open(tmp_path / "hot.kite") as bundle:
        assert {unit.hits for unit in bundle.units} == {MAX_HITS}


@pytest.mark.parametrize("lie", [{"block_tokens": 1}, {"block_tokens": 8}])
async def test_sizes_that_the_roots_do_not_have_are_refused(store: DiskStore, tmp_path: Path, lie: dict) -> None:  # type: ignore[type-arg]
    path = {**INFO.execution_path, "block_tokens": INFO.block_tokens}
    info = dataclasses.replace(INFO, execution_path=path)
    root = root_fingerprint(info.model_state, path, None)
    for unit in prompt_units(FIRST, root=root):
        await store.put_many([entry(unit)])
    await publish(store, {chain_of(FIRST, root).end(): 3}, root=root, info=info)
    good = await export_units(await view_of(store), tmp_path / "good.kite", door=ThreadDoor())
    assert good.bundle.units["kv"] == 3
    await publish(store, {}, root=root, info=dataclasses.replace(info, **lie))
    with pytest.raises(FormatError, match=f"block_tokens {lie['block_tokens']} .*of its units 4"):
        await export_units(await view_of(store), tmp_path / "bad.kite", door=ThreadDoor())
    assert not (tmp_path / "bad.kite").exists()


async def test_block_bytes_that_the_units_do_not_have_are_refused(store: DiskStore, tmp_path: Path) -> None:
    await fill_pool(store, [(FIRST, 3)])
    await publish(store, {}, info=dataclasses.replace(INFO, block_bytes=1))
    with pytest.raises(
        ConfigError, match="it has 24 bytes for 1 tokens; 4 take 1|it has 96 bytes for 4 tokens; 4 take 1"
    ):
        await export_units(await view_of(store), tmp_path / "bad.kite", door=ThreadDoor())


async def test_what_is_larger_than_any_unit_is_not_decoded(
    store: DiskStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A completion of 64 MB that takes some kilobytes in the pool."""
    await fill_pool(store, [(FIRST, 3)])
    completion = prompt_units(FIRST)[-1]
    data = np.zeros(2**26, np.uint8)
    await store.put_many([entry(dataclasses.replace(completion, shape=(2**24,), data=data), compression="zstd")])
    decoded = []
    codec = get_codec("raw", "zstd")
    decode = type(codec).decode
    monkeypatch.setattr(type(codec), "decode", lambda self, *values: decoded.append(values[1]) or decode(self, *values))
    summary = await export_units(await view_of(store), tmp_path / "hot.kite", door=ThreadDoor())
    assert (summary.refused, summary.bundle.units) == (1, {"kv": 3, "logits": 1})
    assert max(decoded, default=0) < 2**26


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        ({"epoch": 0}, 1),
        ({"parent": kv_unit(FIRST, 0, 4, root=OWN).cf}, 3),  # and what comes after the prompt
    ],
)
async def test_a_unit_is_checked_again_when_it_is_read(
    store: DiskStore,
    tmp_path: Path,
    change: dict,  # type: ignore[type-arg]
    refused: int,
) -> None:
    """Between the look at its head and the reading of it, another unit came in its place."""
    await fill_pool(store, [(FIRST, 3)], epoch=4)
    await store.raise_epoch(MODEL, 4)
    view = await view_of(store)
    victim = dataclasses.replace(kv_unit(FIRST, 8, 9, root=OWN), epoch=4)
    (source,) = view.sources

    async def read(keys: Sequence[str]) -> list[bytes | None]:
        values = await source.read(keys)
        forged = dict([entry(dataclasses.replace(victim, **change))]) if "epoch" in change else {}
        return [forged.get(key, value) for key, value in zip(keys, values, strict=True)]

    async def heads(keys: Sequence[str]) -> list[bytes | None]:
        values = [None if value is None else bytearray(value) for value in await source.heads(keys)]
        for key, value in zip(keys, values, strict=True):
            if value is not None and key == key_of(victim) and "parent" in change:
                at = value.index(victim.parent)
                value[at : at + 32] = change["parent"]
        return [None if value is None else bytes(value[:HEAD_BYTES]) for value in values]

    changed = dataclasses.replace(view, sources=[StoredUnits("odd", heads, read)])
    summary = await export_units(changed, tmp_path / "hot.kite", door=ThreadDoor())
    assert summary.refused == refused
    with Bundle.open(tmp_path / "hot.kite") as bundle:
        assert victim.cf not in {unit.cf for unit in bundle.units if unit.kind == "kv"}


async def test_rounded_units_of_a_bundle_do_not_come_out_as_exact(tmp_path: Path) -> None:
    unit = prompt_units(FIRST)[-2]
    codec = get_codec("fp16_quant", "none")

    class Source:
        changed = False

        def read(self, unit: object, expected: object = None, *, full: bool = False) -> object:
            return unit

    pinned = PinnedUnits()
    rounded = inspect(pack(unit, codec))
    pinned.add("a.kite", Source(), {key_of(unit): rounded, "exact": unit}, 100)  # type: ignore[arg-type]
    (source,) = live_sources(MemoryStore(0), pinned, [], ThreadDoor())
    assert [value is None for value in await source.read([key_of(unit), "exact"])] == [True, False]


async def test_the_scratch_file_is_given_back_in_a_thread(
    store: DiskStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill_pool(store, [(FIRST, 3)])
    threads = []
    abandon = BundleWriter.abandon
    monkeypatch.setattr(BundleWriter, "abandon", lambda self: (threads.append(threading.get_ident()), abandon(self))[1])
    await export_units(await view_of(store), tmp_path / "hot.kite", door=ThreadDoor())
    assert threads
    assert threading.get_ident() not in threads
