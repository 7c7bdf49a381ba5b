"""Preloaded bundles: found like what is in memory, and let go of when they have to be."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import os
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest

from kitelib import (
    BundleMismatchError,
    InvalidRequestError,
    KiteEngine,
    PoolConfig,
    ReusePolicy,
)
from kitelib.fingerprint import Fingerprint, block_fingerprint
from tests.support.backends import BackendKit
from tests.support.bundles import BUNDLED, bundle_of, bundle_of_units, memory_units, open_bundle, root_of
from tests.support.engines import assert_nothing_left, evict_context, some_tokens

PROMPT = BUNDLED
SMALL = PoolConfig(memory_bytes=0)
STANDARD = ReusePolicy(numerics="standard")


# Use


async def test_the_first_request_is_answered_from_the_bundle(fresh: KiteEngine, bundle: Path) -> None:
    """B44: one file, and the first request is answered as if it had been asked before."""
    cold = await fresh.generate(PROMPT, max_tokens=8, ignore_eos=True, logprobs=5, reuse=ReusePolicy(mode="off"))
    report = await fresh.preload(bundle)
    opened = await open_bundle(bundle)
    assert report["units"] == len(opened.units) > 5
    assert (report["bundle"], report["bytes"]) == (str(bundle), bundle.stat().st_size)
    assert (report["skipped"], report["digest"], report["signer"]) == (0, opened.digest, None)
    hot = await fresh.generate(PROMPT, max_tokens=8, ignore_eos=True, logprobs=5)
    assert hot.usage.cached_tokens == len(PROMPT)
    assert hot.reuse.zero_prefill
    assert hot.reuse.tiers == {"bundle": len(PROMPT)}
    assert (hot.token_ids, hot.logprobs, hot.reuse.exactness) == (cold.token_ids, cold.logprobs, "bitwise")


async def test_a_prompt_that_goes_on_elsewhere_reuses_up_to_the_token(fresh: KiteEngine, bundle: Path) -> None:
    await fresh.preload(bundle)
    for length in (16, 32, 37, 64, 69):
        prompt = [*PROMPT[:length], 7, 8, 9]
        cold = await fresh.generate(prompt, max_tokens=4, ignore_eos=True, reuse=ReusePolicy(mode="off"))
        hot = await fresh.generate(prompt, max_tokens=4, ignore_eos=True)
        assert hot.usage.cached_tokens >= length
        assert hot.token_ids == cold.token_ids
        await evict_context(fresh)


async def test_the_same_bits_from_compressed_bundles(fresh: KiteEngine, open_tiny: Any, tmp_path: Path) -> None:
    cold = await fresh.generate(PROMPT, max_tokens=6, ignore_eos=True, logprobs=5, reuse=ReusePolicy(mode="off"))
    async with open_tiny() as engine:
        await engine.generate(PROMPT, max_tokens=1)
        for compression in ("zstd", "entropy"):
            await bundle_of(engine, tmp_path / compression, compression=compression)
    for compression in ("zstd", "entropy"):
        await fresh.preload(tmp_path / compression)
        hot = await fresh.generate(PROMPT, max_tokens=6, ignore_eos=True, logprobs=5)
        assert (hot.token_ids, hot.logprobs) == (cold.token_ids, cold.logprobs)
        assert hot.reuse.tiers == {"bundle": len(PROMPT)}
        await fresh.unload(tmp_path / compression)
        await evict_context(fresh)


async def test_statistics_show_their_use(fresh: KiteEngine, bundle: Path) -> None:
    assert fresh.stats()["bundles"] == {}
    assert "bundle" not in fresh.stats()["pool"]
    await fresh.preload(bundle)
    before = fresh.stats()["bundles"][str(bundle)]
    assert (before["hits"], before["hit_bytes"], before["bytes"]) == (0, 0, bundle.stat().st_size)
    await fresh.generate(PROMPT, max_tokens=1)
    after, tier = fresh.stats()["bundles"][str(bundle)], fresh.stats()["pool"]["bundle"]
    assert after["hits"] == tier["hits"] >= 5
    assert after["hit_bytes"] >= 4 * fresh.stats()["block_bytes"]
    assert {"hits", "misses", "bytes", "dropped"} <= set(tier)
    misses = tier["misses"]
    await fresh.generate(some_tokens(40, 700), max_tokens=1)
    assert fresh.stats()["pool"]["bundle"]["misses"] >= misses
    assert fresh.stats()["pool"]["memory"]["misses"] > 0


async def test_what_a_bundle_has_is_not_stored_again(open_tiny: Any, bundle: Path) -> None:
    async with open_tiny() as engine:
        await engine.preload(bundle)
        await engine.generate(PROMPT, max_tokens=1)
        await engine.flush()
        assert engine.stats()["pool"]["memory"]["items"] == 0


async def test_nothing_evicts_it(open_tiny: Any, bundle: Path) -> None:
    async with open_tiny(pool=PoolConfig(memory_bytes=200_000)) as engine:
        await engine.preload(bundle)
        for start in range(10):
            await engine.generate(some_tokens(60, 100 + 100 * start), max_tokens=1)
        await evict_context(engine)
        assert engine.stats()["pool"]["memory"]["evictions"] > 0
        assert (await engine.generate(PROMPT, max_tokens=1)).reuse.tiers == {"bundle": len(PROMPT)}


async def test_several_bundles_and_memory_serve_one_prompt(open_tiny: Any, tmp_path: Path) -> None:
    paths = [tmp_path / f"{part}.kite" for part in "abc"]
    async with open_tiny() as engine:
        await engine.generate(PROMPT, max_tokens=1)
        units = await memory_units(engine)
        blocks = {tuple(unit.token_ids.tolist()): unit for unit in units}
        parts = [[blocks[tuple(PROMPT[index * 16 : index * 16 + 16])]] for index in range(3)]
        for path, part in zip(paths, parts, strict=True):
            await bundle_of_units(engine, path, part)
    async with open_tiny() as engine:
        await engine.preload(paths[0])
        await engine.preload(paths[2])
        assert (await engine.generate(PROMPT, max_tokens=1)).reuse.tiers == {"bundle": 16}
        await evict_context(engine)  # blocks 1 and up are in memory now, but for what a bundle has
        gen = await engine.generate([*PROMPT, 9], max_tokens=1)
        assert gen.reuse.tiers == {"bundle": 32, "memory": len(PROMPT) - 32}
        await engine.preload(paths[1])
        assert list(engine.stats()["bundles"]) == [str(paths[0]), str(paths[2]), str(paths[1])]


async def test_the_same_path_again_replaces_it(fresh: KiteEngine, bundle: Path, tmp_path: Path) -> None:
    first = await fresh.preload(bundle)
    assert await fresh.preload(bundle) == first
    assert len(fresh.stats()["bundles"]) == 1


async def test_units_of_an_adapter_that_the_engine_lacks_are_skipped(open_tiny: Any, tmp_path: Path) -> None:
    path = tmp_path / "both.kite"
    async with open_tiny() as engine:
        await engine.generate(PROMPT, max_tokens=1)
        units = await memory_units(engine)
        other = dataclasses.replace(root_of(engine), root=Fingerprint(b"a" * 32), adapter=(b"d" * 32, 1.0))
        ids = np.arange(16, dtype=np.uint32)
        first = next(unit for unit in units if len(unit.token_ids) == 16)
        alien = dataclasses.replace(
            first, parent=other.root, token_ids=ids, cf=block_fingerprint(other.root, ids.tolist())
        )
        await bundle_of_units(engine, path, units, others=[(alien, other)])
    async with open_tiny(pool=SMALL) as engine:
        report = await engine.preload(path)
        assert (report["units"], report["skipped"]) == (len(units), 1)
        assert engine.stats()["bundles"][str(path)]["units"] == len(units)
        assert (await engine.generate(PROMPT, max_tokens=1)).reuse.tiers == {"bundle": len(PROMPT)}


async def test_unload(fresh: KiteEngine, bundle: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"no bundle was loaded from '.*cockpit.kite'; loaded: none"):
        await fresh.unload(bundle)
    await fresh.preload(bundle)
    with pytest.raises(InvalidRequestError, match=r"'other'; loaded: '.*cockpit.kite'"):
        await fresh.unload("other")
    await fresh.unload(str(bundle))
    assert fresh.stats()["bundles"] == {}
    assert (await fresh.generate(PROMPT, max_tokens=1)).usage.cached_tokens == 0


async def test_unloading_while_requests_use_it(fresh: KiteEngine, bundle: Path) -> None:
    cold = await fresh.generate(PROMPT, max_tokens=12, ignore_eos=True, reuse=ReusePolicy(mode="off"))
    for _ in range(5):
        await fresh.preload(bundle)
        running = [
            asyncio.create_task(fresh.generate([*PROMPT], max_tokens=12, ignore_eos=True, seed=index))
            for index in range(6)
        ]
        await asyncio.sleep(0)
        await fresh.unload(bundle)
        for gen in await asyncio.gather(*running):
            assert gen.token_ids == cold.token_ids
        await evict_context(fresh)


async def test_cancelled_requests_leave_nothing(fresh: KiteEngine, bundle: Path) -> None:
    await fresh.preload(bundle)
    for turns in range(12):
        task = asyncio.create_task(fresh.generate(PROMPT, max_tokens=12, ignore_eos=True))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
    await assert_nothing_left(fresh)
    assert (await fresh.generate(PROMPT, max_tokens=1)).usage.cached_tokens == len(PROMPT)


async def test_a_cancelled_preload_loads_all_or_nothing(fresh: KiteEngine, bundle: Path) -> None:
    for turns in range(12):
        task = asyncio.create_task(fresh.preload(bundle))
        for _ in range(turns):
            await asyncio.sleep(0.0005)
        task.cancel()
        await asyncio.wait([task])
        loaded = bool(fresh.stats()["bundles"])
        gen = await fresh.generate(PROMPT, max_tokens=1)
        assert gen.usage.cached_tokens == (len(PROMPT) if loaded else 0)
        if loaded:
            await fresh.unload(bundle)
        await evict_context(fresh)


def descriptors_of(path: Path) -> int:
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            count += os.readlink(link) == str(path)
    return count


async def test_nothing_stays_open(open_tiny: Any, bundle: Path) -> None:
    async with open_tiny(pool=SMALL) as engine:
        for _ in range(3):
            await engine.preload(bundle)
            await engine.preload(bundle)
            await engine.generate(PROMPT, max_tokens=1)
            await evict_context(engine)
            await engine.unload(bundle)
        gc.collect()
        assert await anyio.to_thread.run_sync(descriptors_of, bundle) == 0
        await engine.preload(bundle)
        assert await anyio.to_thread.run_sync(descriptors_of, bundle) >= 1
    gc.collect()
    assert await anyio.to_thread.run_sync(descriptors_of, bundle) == 0


@pytest.mark.parametrize("accept_stale", [False, True])
async def test_an_invalidation_during_a_preload_wins(open_tiny: Any, bundle: Path, accept_stale: bool) -> None:
    for turns in range(1, 6):
        async with open_tiny(pool=SMALL) as engine:
            task = asyncio.create_task(engine.preload(bundle, accept_stale=accept_stale))
            for _ in range(turns):
                await asyncio.sleep(0.0005)
            await engine.invalidate()
            with contextlib.suppress(BundleMismatchError):
                await task
            assert engine.stats()["bundles"] == {}


# Taking over


async def test_unpinned_units_go_into_the_pool(open_tiny: Any, bundle: Path, tmp_path: Path) -> None:
    pool = PoolConfig(disk=str(tmp_path / "pool"))
    async with open_tiny(pool=pool) as engine:
        report = await engine.preload(bundle, pin=False)
        assert report["units"] == len((await open_bundle(bundle)).units)
        assert engine.stats()["bundles"] == {}
        assert engine.stats()["pool"]["memory"]["items"] == report["units"]
        assert (await engine.generate(PROMPT, max_tokens=1)).reuse.tiers == {"memory": len(PROMPT)}
    async with open_tiny(pool=dataclasses.replace(pool, memory_bytes=0)) as engine:
        found = await engine.pool.get_rus_by_cf(engine_block(engine))
        assert [unit.kind for unit in found] == ["kv"]


def engine_block(engine: KiteEngine) -> bytes:
    serving = engine._current
    from kitelib.fingerprint import BlockChain

    return BlockChain(serving.root(engine.reuse, None), serving.backend.info.block_tokens, PROMPT).fingerprints[0]


async def test_unpinned_units_are_of_the_pools_epoch(open_tiny: Any, bundle: Path) -> None:
    async with open_tiny() as engine:
        await engine.invalidate()
        await engine.preload(bundle, pin=False, accept_stale=True)
        assert (await engine.generate(PROMPT, max_tokens=1)).reuse.tiers == {"memory": len(PROMPT)}


# Freshness


async def test_an_invalidation_unloads_it(fresh: KiteEngine, bundle: Path) -> None:
    report = await fresh.preload(bundle)
    assert (await fresh.invalidate())["bundle"] == report["units"]
    assert fresh.stats()["bundles"] == {}
    assert (await fresh.generate(PROMPT, max_tokens=1)).usage.cached_tokens == 0
    with pytest.raises(BundleMismatchError, match=r"invalidated after it was made .*accept_stale=True") as caught:
        await fresh.preload(bundle)
    assert set(caught.value.differences) == {"epoch"}
    await fresh.preload(bundle, accept_stale=True)
    assert (await fresh.generate(PROMPT, max_tokens=1)).usage.cached_tokens == len(PROMPT)
    assert "bundle" in await fresh.invalidate()


async def test_an_invalidation_before_the_restart_holds(open_tiny: Any, bundle: Path, tmp_path: Path) -> None:
    """Replay: a bundle from before an invalidation is not loaded after a restart either."""
    pool = PoolConfig(memory_bytes=0, disk=str(tmp_path / "pool"))
    async with open_tiny(pool=pool) as engine:
        await engine.invalidate()
    async with open_tiny(pool=pool) as engine:
        with pytest.raises(BundleMismatchError, match="invalidated"):
            await engine.preload(bundle)


async def test_an_older_bundle_in_the_place_of_a_newer(fresh: KiteEngine, bundle: Path) -> None:
    """Replay: a bundle that was signed and then replaced is as valid as before, so its age has to be asked for."""
    made = (await open_bundle(bundle)).manifest.created_at
    with pytest.raises(BundleMismatchError, match="an older one in the place of a newer") as caught:
        await fresh.preload(bundle, not_before=made + 1)
    assert set(caught.value.differences) == {"created_at"}
    await fresh.preload(bundle, not_before=made)


async def test_an_invalidation_by_another_process_unloads_it(open_tiny: Any, bundle: Path, tmp_path: Path) -> None:
    pool = PoolConfig(memory_bytes=0, disk=str(tmp_path / "pool"), freshness_check_interval=0.05)
    async with open_tiny(pool=pool) as engine, open_tiny(pool=pool) as other:
        await engine.preload(bundle)
        await other.invalidate()
        with anyio.fail_after(60):
            while engine.stats()["bundles"]:  # the request that comes after an interval looks, if nothing did before
                await asyncio.sleep(0.1)
                await engine.generate(some_tokens(20, 900), max_tokens=1)
        assert (await engine.generate(PROMPT, max_tokens=1)).usage.cached_tokens == 0


async def test_a_bundle_does_not_expire(open_tiny: Any, bundle: Path) -> None:
    async with open_tiny(pool=PoolConfig(ttl_seconds=0.000_001)) as engine:
        await engine.preload(bundle)
        assert (await engine.generate(PROMPT, max_tokens=1)).reuse.tiers == {"bundle": len(PROMPT)}


async def test_other_weights_unload_it(open_tiny: Any, kit: BackendKit, bundle: Path, tmp_path: Path) -> None:
    async with open_tiny(pool=SMALL) as engine:
        await engine.preload(bundle)
        await engine.reload(kit.copy(kit.small(seed=2), tmp_path / "other"))
        assert engine.stats()["bundles"] == {}
        with pytest.raises(BundleMismatchError, match="weights"):
            await engine.preload(bundle)


async def test_the_bundle_of_the_new_weights_comes_with_them(
    open_tiny: Any, kit: BackendKit, bundle: Path, tmp_path: Path
) -> None:
    model, path = kit.copy(kit.small(seed=2), tmp_path / "other"), tmp_path / "other.kite"
    async with KiteEngine.open(model, n_ctx=256, threads=1) as engine:
        await engine.generate(PROMPT, max_tokens=1)
        await bundle_of(engine, path)
    async with open_tiny(pool=SMALL) as engine:
        await engine.preload(bundle)
        await engine.reload(model)
        await engine.preload(path)
        assert (await engine.generate(PROMPT, max_tokens=1)).reuse.tiers == {"bundle": len(PROMPT)}
