"""An export takes what was used most, whole, checked, and of nobody but who was named."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from kitelib.abc import SharedStore
from kitelib.config import PoolConfig
from kitelib.errors import ConfigError, FormatError, StoreError
from kitelib.fingerprint import model_key
from kitelib.runtime.threads import ThreadDoor
from kitelib.stores.disk import DiskStore
from kitelib.stores.hits import HitCounts, HitPublisher
from kitelib.stores.hot_units import PoolView, live_sources, live_view, read_ledgers, source_of
from kitelib.stores.keys import unit_key
from kitelib.stores.memory import MemoryStore
from kitelib.stores.pinned import PinnedUnits
from kitelib.stores.tier import Tier
from kitelib.upcycle.bundle.exporting import ExportSummary, export_pool, export_units
from kitelib.upcycle.bundle.manifest import BundleRoot, ModelIdentity
from kitelib.upcycle.bundle.reader import Bundle
from kitelib.upcycle.bundle.writer import BundleWriter
from kitelib.upcycle.unit import RecyclableUnit
from tests.support.bundle_files import OLD_BUNDLE
from tests.support.hits import MODEL, OWN, fill_pool, prompt_units, publish, root_of, today
from tests.support.pools import entry, key_of
from tests.support.units import INFO, chain_of, kv_unit

# Blocks have four tokens. The two first have a block in common; the third stands alone and ends with a full block.
SHARED = [1, 2, 3, 4]
FIRST = [*SHARED, 5, 6, 7, 8, 9]
SECOND = [*SHARED, 20, 21]
THIRD = [40, 41, 42, 43]
PROMPTS = [(FIRST, 10), (SECOND, 7), (THIRD, 3)]


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[DiskStore]:
    disk = DiskStore(tmp_path / "pool", 2**26)
    yield disk
    await disk.aclose()


async def view_of(store: SharedStore, **options: object) -> PoolView:
    hits, roots = await read_ledgers([store], MODEL, [today()], 1000)  # type: ignore[list-item]
    epoch = await store.get_epoch(MODEL)
    return PoolView(MODEL, epoch, hits, roots, [source_of("disk", store)], **options)  # type: ignore[arg-type]


async def export(view: PoolView, path: Path, **options: object) -> tuple[ExportSummary, set[str]]:
    """Exports; gives the summary and the keys in the bundle, all of whose units were read again in full."""
    summary = await export_units(view, path, door=ThreadDoor(), **options)  # type: ignore[arg-type]
    with Bundle.open(path, hmac_key=view.hmac_key) as bundle:
        assert bundle.check() == []
        return summary, set(bundle.keys)


def keys_of(*units: Sequence[RecyclableUnit]) -> set[str]:
    return {key_of(unit) for some in units for unit in some}


async def test_everything_that_was_used_goes_into_the_bundle(store: DiskStore, tmp_path: Path) -> None:
    await fill_pool(store, PROMPTS)
    view = await view_of(store)
    stages: list[str] = []
    path = tmp_path / "hot.kite"
    summary, keys = await export(
        view, path, labels={"fleet": "cockpit"}, progress=lambda stage, part: stages.append(stage)
    )
    assert keys == keys_of(*(prompt_units(tokens) for tokens, _ in PROMPTS))
    assert (summary.fewest_hits, summary.leaves, summary.lost, summary.refused) == (3, 3, 0, 0)
    assert summary.bundle.units == {"kv": 5, "logits": 3, "completion": 3}
    assert list(dict.fromkeys(stages)) == ["following prompts to their start", "reading units", "writing"]
    with Bundle.open(path) as bundle:
        model, (root,) = bundle.manifest.model, bundle.manifest.roots
        assert (model.model_state, model.layout, model.block_tokens) == (INFO.model_state, "test.kv", 4)
        assert (model.name, model.vocab_size, model.block_bytes) == ("test", 10, 96)
        assert (root.root, root.execution_path, root.namespace) == (OWN, INFO.execution_path, None)
        assert (bundle.manifest.labels, bundle.manifest.epoch) == ({"fleet": "cockpit"}, 0)
        by_key = {key_of(unit): unit for tokens, _ in PROMPTS for unit in prompt_units(tokens)}
        for key, unit in bundle.keys.items():
            assert bundle.read(unit).data.tobytes() == by_key[key].data.tobytes()


async def test_a_block_has_the_hits_of_all_that_goes_on_from_it(store: DiskStore, tmp_path: Path) -> None:
    await fill_pool(store, PROMPTS)
    await export(await view_of(store), tmp_path / "hot.kite")
    with Bundle.open(tmp_path / "hot.kite") as bundle:
        hits = {key: unit.hits for key, unit in bundle.keys.items()}
    assert hits[key_of(kv_unit(FIRST, 0, 4, root=OWN))] == 17
    assert hits[key_of(kv_unit(FIRST, 4, 8, root=OWN))] == 10
    assert hits[key_of(kv_unit(SECOND, 4, 6, root=OWN))] == 7
    assert hits[key_of(kv_unit(THIRD, 0, 4, root=OWN))] == 3


@pytest.mark.parametrize(
    ("options", "blocks"),
    [
        ({"top": 1}, [(FIRST, 0, 4)]),
        ({"top": 2}, [(FIRST, 0, 4), (FIRST, 4, 8)]),
        ({"top": 3}, [(FIRST, 0, 4), (FIRST, 4, 8), (FIRST, 8, 9)]),
        ({"top": 4}, [(FIRST, 0, 4), (FIRST, 4, 8), (FIRST, 8, 9), (SECOND, 4, 6)]),
        ({"min_hits": 8}, [(FIRST, 0, 4), (FIRST, 4, 8), (FIRST, 8, 9)]),
        ({"min_hits": 17}, [(FIRST, 0, 4)]),
        ({"min_hits": 8, "top": 1}, [(FIRST, 0, 4)]),
    ],
)
async def test_top_and_min_hits_choose_blocks_with_all_before_them(
    store: DiskStore, tmp_path: Path, options: dict[str, int], blocks: list[tuple[list[int], int, int]]
) -> None:
    await fill_pool(store, PROMPTS)
    _, keys = await export(await view_of(store), tmp_path / "hot.kite", **options)
    kv = {key for key in keys if ":kv:" in key}
    assert kv == {key_of(kv_unit(tokens, start, stop, root=OWN)) for tokens, start, stop in blocks}
    # What follows a prompt comes with the prompt's end, and only with it.
    ends = [tokens for tokens, _, stop in blocks if stop == len(tokens)]
    assert keys - kv == keys_of(*(prompt_units(tokens)[-2:] for tokens in ends))


async def test_completions_can_be_left_out(store: DiskStore, tmp_path: Path) -> None:
    await fill_pool(store, PROMPTS)
    summary, _ = await export(await view_of(store), tmp_path / "hot.kite", with_completions=False)
    assert summary.bundle.units == {"kv": 5, "logits": 3}


async def test_a_bundle_keeps_to_its_bytes(store: DiskStore, tmp_path: Path) -> None:
    await fill_pool(store, [(list(range(start, start + 9)), 100 - start) for start in range(0, 100, 10)])
    whole, _ = await export(await view_of(store), tmp_path / "whole.kite")
    half = whole.bundle.num_bytes // 2
    small, keys = await export(await view_of(store), tmp_path / "small.kite", max_bytes=half)
    assert 0 < small.bundle.num_bytes <= half
    assert small.bundle.left_out == sum(whole.bundle.units.values()) - len(keys) > 0
    with Bundle.open(tmp_path / "small.kite") as bundle:
        there = {unit.cf for unit in bundle.units if unit.kind == "kv"}
        assert all(unit.parent == OWN or unit.parent in there for unit in bundle.units)


async def test_compressed_units_of_a_tier_come_out_as_they_were(store: DiskStore, tmp_path: Path) -> None:
    units = prompt_units(FIRST)
    await store.put_many([entry(unit, codec="paged_kvcache_v2", compression="zstd") for unit in units[:-2]])
    await store.put_many([entry(unit, compression="zstd") for unit in units[-2:]])
    await publish(store, {chain_of(FIRST, OWN).end(): 1})
    for compression in ("none", "zstd", "entropy"):
        _, keys = await export(await view_of(store), tmp_path / "hot.kite", compression=compression)
        assert keys == keys_of(units)


# What must not get into a bundle


async def test_units_of_tenants_stay_where_they_are_unless_named(store: DiskStore, tmp_path: Path) -> None:
    tenant = root_of("tenant")
    await fill_pool(store, PROMPTS[:1])
    await fill_pool(store, [(SECOND, 1000)], root=tenant)
    await publish(store, {}, root=tenant, namespace="tenant")
    _, own = await export(await view_of(store), tmp_path / "own.kite")
    assert own == keys_of(prompt_units(FIRST))
    _, both = await export(await view_of(store), tmp_path / "both.kite", namespaces=(None, "tenant"))
    assert both == own | keys_of(prompt_units(SECOND, root=tenant))
    _, theirs = await export(await view_of(store), tmp_path / "theirs.kite", namespaces=("tenant",))
    assert theirs == both - own
    with Bundle.open(tmp_path / "theirs.kite") as bundle:
        assert [root.namespace for root in bundle.manifest.roots] == ["tenant"]


async def test_a_ledger_that_lies_about_a_root_gives_no_tenant_away(store: DiskStore, tmp_path: Path) -> None:
    """Whoever can write to a tier may describe a tenant's root as the engine's own, and count hits as he likes."""
    tenant = root_of("tenant")
    await fill_pool(store, PROMPTS[:1])
    await fill_pool(store, [(SECOND, 1000)], root=tenant)  # described as if it had no namespace
    await publish(store, {chain_of(SECOND, tenant).end(): 1000})  # as if it started at the engine's own root
    summary, keys = await export(await view_of(store), tmp_path / "own.kite")
    assert keys == keys_of(prompt_units(FIRST))
    assert (summary.leaves, summary.lost) == (2, 1)


async def test_private_roots_are_found_with_the_secret_only(store: DiskStore, tmp_path: Path) -> None:
    secret = b"s" * 16
    tenant = root_of("tenant", secret)
    await fill_pool(store, [(FIRST, 5)], root=tenant)
    await publish(store, {}, root=tenant, namespace="tenant", private=True)
    with pytest.raises(ConfigError, match="none in the namespaces that were asked for"):
        await export(await view_of(store), tmp_path / "no.kite", namespaces=(None, "tenant"))
    view = await view_of(store, namespace_secret=secret)
    with pytest.raises(ConfigError, match="none in the namespaces"):
        await export(view, tmp_path / "no.kite")
    _, keys = await export(view, tmp_path / "hot.kite", namespaces=("tenant",))
    assert keys == keys_of(prompt_units(FIRST, root=tenant))
    assert not (tmp_path / "no.kite").exists()


async def test_with_a_key_only_what_it_authenticates_is_taken(store: DiskStore, tmp_path: Path) -> None:
    key = b"k" * 16
    await fill_pool(store, [(FIRST, 5)], hmac_key=unit_key(key, None))
    await fill_pool(store, [(THIRD, 3)])  # written without it
    summary, keys = await export(await view_of(store, hmac_key=key), tmp_path / "hot.kite")
    assert keys == keys_of(prompt_units(FIRST))
    assert summary.refused == 3
    with Bundle.open(tmp_path / "hot.kite", hmac_key=key) as bundle:
        assert bundle.has_hmac
    with pytest.raises(ConfigError, match="none of the .* units chosen passed its checks.*HMAC"):
        await export(await view_of(store, hmac_key=b"other" * 4), tmp_path / "no.kite")


async def test_a_damaged_block_is_left_out_with_all_behind_it(store: DiskStore, tmp_path: Path) -> None:
    await fill_pool(store, PROMPTS)
    key, value = entry(kv_unit(FIRST, 4, 8, root=OWN))
    await store.put_many([(key, value[:-1] + bytes([value[-1] ^ 1]))])
    summary, keys = await export(await view_of(store), tmp_path / "hot.kite")
    assert keys == keys_of(prompt_units(FIRST)[:1], prompt_units(SECOND), prompt_units(THIRD))
    assert summary.refused == 4  # the block, the tail, logits, completion
    assert summary.bundle.units["kv"] == 3


async def test_a_block_that_is_gone_costs_what_stands_behind_it(store: DiskStore, tmp_path: Path) -> None:
    await fill_pool(store, PROMPTS)
    await store.delete_many([key_of(kv_unit(FIRST, 4, 8, root=OWN))])
    summary, keys = await export(await view_of(store), tmp_path / "hot.kite")
    assert keys == keys_of(prompt_units(SECOND), prompt_units(THIRD))
    assert (summary.leaves, summary.lost, summary.refused) == (3, 1, 0)


async def test_void_units_are_as_good_as_gone(store: DiskStore, tmp_path: Path) -> None:
    await fill_pool(store, [(FIRST, 10)])
    await fill_pool(store, [(THIRD, 3)], epoch=4)
    await store.raise_epoch(MODEL, 4)
    summary, keys = await export(await view_of(store), tmp_path / "hot.kite")
    assert keys == keys_of(prompt_units(THIRD))
    assert summary.lost == 1
    with Bundle.open(tmp_path / "hot.kite") as bundle:
        assert bundle.manifest.epoch == 4


async def test_heads_that_lie_about_what_comes_before_are_found_out(store: DiskStore, tmp_path: Path) -> None:
    """A block that claims to be a first one, and one that claims to go on from itself."""
    await fill_pool(store, PROMPTS)
    key, value = entry(kv_unit(FIRST, 4, 8, root=OWN))
    parent = kv_unit(FIRST, 4, 8, root=OWN).parent
    at = value.index(parent)
    await store.put_many([(key, value[:at] + OWN + value[at + 32 :])])
    summary, keys = await export(await view_of(store), tmp_path / "hot.kite")
    assert keys == keys_of(prompt_units(SECOND), prompt_units(THIRD))
    await store.put_many([(key, value[:at] + kv_unit(FIRST, 4, 8, root=OWN).cf + value[at + 32 :])])
    summary, keys = await export(await view_of(store), tmp_path / "hot.kite")
    assert keys == keys_of(prompt_units(SECOND), prompt_units(THIRD))
    assert summary.lost == 1


async def test_rounded_numbers_do_not_pass_for_exact_ones(store: DiskStore, tmp_path: Path) -> None:
    await fill_pool(store, [(FIRST, 5)])
    logits = prompt_units(FIRST)[-2]
    await store.put_many([entry(logits, codec="fp16_quant")])
    summary, keys = await export(await view_of(store), tmp_path / "hot.kite")
    assert keys == keys_of(prompt_units(FIRST)) - {key_of(logits)}
    assert summary.refused == 1


async def test_units_of_another_layout_are_refused(store: DiskStore, tmp_path: Path) -> None:
    await fill_pool(store, PROMPTS[:2])
    await store.put_many([entry(dataclasses.replace(kv_unit(SECOND, 4, 6, root=OWN), layout="other"))])
    summary, keys = await export(await view_of(store), tmp_path / "hot.kite")
    assert key_of(kv_unit(SECOND, 4, 6, root=OWN)) not in keys
    assert summary.refused >= 1


# Several places


async def test_what_one_source_has_damaged_the_next_may_have_whole(store: DiskStore, tmp_path: Path) -> None:
    await fill_pool(store, PROMPTS)
    other = MemoryStore(2**20)
    key, value = entry(kv_unit(FIRST, 4, 8, root=OWN))
    await other.put_many([(key, value[:-1] + bytes([value[-1] ^ 1]))])
    view = await view_of(store)
    sources = [source_of("fast", other), *view.sources]
    summary, keys = await export(dataclasses.replace(view, sources=sources), tmp_path / "hot.kite")
    assert keys == keys_of(*(prompt_units(tokens) for tokens, _ in PROMPTS))
    assert summary.refused == 0


async def test_a_running_engine_exports_its_memory_and_what_it_has_not_published(
    store: DiskStore, tmp_path: Path
) -> None:
    """Units of the first prompt are in memory only, those of the second on the disk only; the same for the hits."""
    memory = MemoryStore(2**20)
    await memory.put_many([entry(unit) for unit in prompt_units(FIRST)])
    await fill_pool(store, [(SECOND, 7)])
    tier = Tier("disk", store, door=ThreadDoor(), timeout_s=5.0, write_bytes=2**20)
    counts = HitCounts()
    counts.use_model(INFO)
    counts.describe(OWN, {"execution_path": INFO.execution_path, "namespace": None, "adapter": None})
    publisher = HitPublisher(counts, lambda: today() * 86400.0)
    for _ in range(4):
        counts.note(OWN, chain_of(FIRST, OWN).end())
    door = ThreadDoor()
    sources = live_sources(memory, PinnedUnits(), [tier], door)
    options = {"epoch": 0, "config": PoolConfig(), "days": 1, "limit": 1000}
    view = await live_view(counts, publisher, [tier], sources, **options)  # type: ignore[arg-type]
    before = memory.counters().misses
    summary, keys = await export(view, tmp_path / "hot.kite")
    assert keys == keys_of(prompt_units(FIRST), prompt_units(SECOND))
    assert summary.fewest_hits == 4
    assert memory.counters().misses == before

    await publisher.publish([tier])  # published hits count once, wherever they are
    again = await live_view(counts, publisher, [tier], sources, **options)  # type: ignore[arg-type]
    assert again.hits == view.hits


async def test_without_any_tier_an_engine_exports_what_it_counted_itself(tmp_path: Path) -> None:
    """From memory, and from a bundle that it preloaded."""
    memory, counts, pinned, door = MemoryStore(2**20), HitCounts(), PinnedUnits(), ThreadDoor()
    await memory.put_many([entry(unit) for unit in prompt_units(FIRST)])

    def write() -> None:
        with BundleWriter(tmp_path / "old.kite", ModelIdentity.of(INFO)) as writer:
            for unit in prompt_units(SECOND):
                writer.add(unit, BundleRoot(OWN, INFO.execution_path))
            writer.finish()

    await door.run(write)
    counts.use_model(INFO)
    counts.describe(OWN, {"execution_path": INFO.execution_path, "namespace": None, "adapter": None})
    for tokens in (FIRST, SECOND):
        counts.note(OWN, chain_of(tokens, OWN).end())
    with Bundle.open(tmp_path / "old.kite") as old:
        pinned.add("old", old, old.keys, old.num_bytes)
        view = await live_view(
            counts,
            None,
            [],
            live_sources(memory, pinned, [], door),
            epoch=0,
            config=PoolConfig(),
            days=1,
            limit=1000,
        )
        _, keys = await export(view, tmp_path / "hot.kite")
    assert keys == keys_of(prompt_units(FIRST), prompt_units(SECOND))


async def test_the_pool_of_an_engine_is_asked_for_the_days_that_count(store: DiskStore, tmp_path: Path) -> None:
    await fill_pool(store, PROMPTS)
    asked = []

    class Pool:
        async def view(self, days: int, limit: int) -> PoolView:
            asked.append((days, limit))
            return await view_of(store)

    summary = await export_pool(Pool(), tmp_path / "hot.kite", days=3, top=1, min_hits=2)
    assert summary.bundle.units == {"kv": 1}
    assert asked == [(3, 2000)]
    for options in ({"days": 0}, {"days": 9}, {"top": "many"}):
        with pytest.raises(ConfigError, match="give a whole number from 1"):
            await export_pool(Pool(), tmp_path / "hot.kite", **options)  # type: ignore[arg-type]


async def test_two_ledgers_of_one_fleet_do_not_count_double(store: DiskStore, tmp_path: Path) -> None:
    other = DiskStore(tmp_path / "other", 2**26)
    for ledger, count in ((store, 5), (other, 9)):
        await publish(ledger, {b"1" * 32: count})
    hits, roots = await read_ledgers([store, other], MODEL, [today()], 10)
    assert list(hits.values()) == [9]
    assert set(roots) == {"model", OWN.hex()}
    await other.aclose()


# Errors


@pytest.mark.parametrize("options", [{"top": 0}, {"min_hits": 0}, {"top": True}, {"min_hits": 1.5}])
async def test_options_out_of_range_are_refused(store: DiskStore, tmp_path: Path, options: dict[str, object]) -> None:
    await fill_pool(store, PROMPTS)
    (name,) = options
    with pytest.raises(ConfigError, match=f"{name} is .*; give a whole number from 1"):
        await export(await view_of(store), tmp_path / "hot.kite", **options)


async def test_nothing_to_export_says_why(store: DiskStore, tmp_path: Path) -> None:
    path = tmp_path / "hot.kite"
    with pytest.raises(FormatError, match="does not say what the model"):
        await export(await view_of(store), path)
    await publish(store, {})
    with pytest.raises(ConfigError, match="has no hits of the model"):
        await export(await view_of(store), path)
    await publish(store, {chain_of(FIRST, OWN).end(): 5})
    with pytest.raises(ConfigError, match="of 1 blocks that were used none is in the pool any more"):
        await export(await view_of(store), path)
    await fill_pool(store, PROMPTS)
    with pytest.raises(ConfigError, match="no unit has 100 hits; the most is 22: lower min_hits"):
        await export(await view_of(store), path, min_hits=100)
    assert list(tmp_path.glob("hot*")) == []


async def test_a_bundle_that_was_there_stays_when_the_export_fails(store: DiskStore, tmp_path: Path) -> None:
    path = tmp_path / "hot.kite"
    path.write_bytes(OLD_BUNDLE)
    await fill_pool(store, PROMPTS)
    with pytest.raises(ConfigError, match="max_bytes"):
        await export(await view_of(store), path, max_bytes=10)
    with pytest.raises(ConfigError):
        await export(await view_of(store), path, sign_key=tmp_path / "none.pem")
    assert path.read_bytes() == OLD_BUNDLE
    assert sorted(each.name for each in tmp_path.iterdir()) == ["hot.kite", "pool"]


async def test_a_source_that_fails_ends_the_export(store: DiskStore, tmp_path: Path) -> None:
    await fill_pool(store, PROMPTS)
    view = await view_of(store)
    await store.aclose()
    with pytest.raises(StoreError):
        await export(dataclasses.replace(view, sources=[await failing_source()]), tmp_path / "hot.kite")


async def failing_source():
    async def fail(keys: Sequence[str]) -> list[bytes | None]:
        raise StoreError("down")

    return dataclasses.replace(source_of("down", MemoryStore(0)), heads=fail, read=fail)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"execution_path":{}}',
        '{"execution_path":{"a":[]},"namespace":null,"adapter":null}',
        "null",
        "1",
    ],
)
async def test_descriptions_that_make_no_sense_are_passed_over(store: DiskStore, tmp_path: Path, text: str) -> None:
    await fill_pool(store, PROMPTS)
    view = await view_of(store)
    _, keys = await export(dataclasses.replace(view, roots={**view.roots, "a" * 64: text}), tmp_path / "hot.kite")
    assert len(keys) == 11
    with pytest.raises(FormatError):
        await export(dataclasses.replace(view, roots={**view.roots, "model": text}), tmp_path / "hot.kite")


async def test_the_description_of_another_model_is_refused(store: DiskStore, tmp_path: Path) -> None:
    other = dataclasses.replace(INFO, model_state=b"n" * 32)
    await publish(store, {}, info=other)
    _, roots = await read_ledgers([store], model_key(other.model_state), [today()], 10)
    with pytest.raises(FormatError, match="describes another model"):
        await export(PoolView(MODEL, 0, {}, roots, []), tmp_path / "hot.kite")
