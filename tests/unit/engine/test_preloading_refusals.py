"""Bundles that do not fit, are damaged, or come from somebody else: refused, or a miss, and never a wrong answer."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import anyio.to_thread
import numpy as np
import pytest

from kitelib import (
    BundleError,
    BundleMismatchError,
    BundleNotFoundError,
    BundleSignatureError,
    KiteEngine,
    KiteError,
    PoolConfig,
    ReusePolicy,
)
from kitelib.fingerprint import end_fingerprint
from kitelib.upcycle.unit import RecyclableUnit
from tests.support.backends import BackendKit
from tests.support.bundles import BUNDLED, bundle_of, bundle_of_units, memory_units, open_bundle, root_of
from tests.support.engines import evict_context, some_tokens, until

PROMPT = BUNDLED
SMALL = PoolConfig(memory_bytes=0)
STANDARD = ReusePolicy(numerics="standard")


# What does not fit


async def test_another_model(kit: BackendKit, cache_dir: Path, bundle: Path) -> None:
    async with KiteEngine.open(kit.small(seed=2), n_ctx=256, threads=1, cache_dir=cache_dir) as engine:
        with pytest.raises(BundleMismatchError, match=r"cockpit\.kite.*weights") as caught:
            await engine.preload(bundle)
    assert "weights" in caught.value.differences
    assert "layout" not in caught.value.differences


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"block_tokens": 32}, "block_tokens"),
        ({"reuse": STANDARD}, "numerics"),
        ({"pool": PoolConfig(kv_precision="int8")}, "kv_precision"),
        ({"pool": PoolConfig(namespace_secret=b"s" * 16)}, "namespace_secret"),
    ],
)
async def test_the_field_that_differs_is_named(open_tiny: Any, bundle: Path, options: Any, field: str) -> None:
    async with open_tiny(**options) as engine:
        with pytest.raises(BundleMismatchError, match=field) as caught:
            await engine.preload(bundle)
        assert field in caught.value.differences
        assert engine.stats()["bundles"] == {}


async def test_tenants_keep_their_bundles_to_themselves(open_tiny: Any, tmp_path: Path) -> None:
    path = tmp_path / "tenant.kite"
    policy = ReusePolicy(namespace="a")
    async with open_tiny() as engine:
        await engine.generate(PROMPT, max_tokens=1, reuse=policy)
        await bundle_of(engine, path, root=root_of(engine, namespace="a"))
    async with open_tiny(pool=SMALL) as engine:
        await engine.preload(path)
        assert (await engine.generate(PROMPT, max_tokens=1)).usage.cached_tokens == 0
        other = await engine.generate(PROMPT, max_tokens=1, reuse=ReusePolicy(namespace="b"))
        assert other.usage.cached_tokens == 0
        gen = await engine.generate(PROMPT, max_tokens=1, reuse=policy)
        assert gen.reuse.tiers == {"bundle": len(PROMPT)}


async def test_from_another_path_and_with_a_copy_of_the_model(
    kit: BackendKit, cache_dir: Path, bundle: Path, tmp_path: Path
) -> None:
    moved = shutil.copy(bundle, tmp_path / "renamed")
    model = kit.copy(kit.small(), tmp_path / "model-elsewhere")
    async with KiteEngine.open(model, n_ctx=128, threads=1, pool=SMALL, cache_dir=cache_dir) as engine:
        await engine.preload(moved)
        assert (await engine.generate(PROMPT, max_tokens=1)).usage.cached_tokens == len(PROMPT)


# What is wrong


async def test_no_file(fresh: KiteEngine, tmp_path: Path) -> None:
    with pytest.raises(BundleNotFoundError, match="absent"):
        await fresh.preload(tmp_path / "absent.kite")
    with pytest.raises(BundleError):
        await fresh.preload(tmp_path)


@pytest.mark.parametrize("size", [0, 7, 100, -1, -1000])
async def test_a_truncated_file(fresh: KiteEngine, bundle: Path, size: int) -> None:
    with bundle.open("rb+") as file:
        file.truncate(size if size >= 0 else bundle.stat().st_size + size)
    with pytest.raises(BundleError):
        await fresh.preload(bundle)


async def test_a_damaged_unit_is_a_miss_and_is_counted(fresh: KiteEngine, bundle: Path) -> None:
    cold = await fresh.generate(PROMPT, max_tokens=6, ignore_eos=True, reuse=ReusePolicy(mode="off"))
    units = (await open_bundle(bundle)).units
    second = next(unit for unit in units if unit.token_ids.tolist() == PROMPT[16:32])
    flip(bundle, second.start + 5)
    await fresh.preload(bundle)
    hot = await fresh.generate(PROMPT, max_tokens=6, ignore_eos=True, reuse=ReusePolicy(zero_prefill=False))
    assert hot.token_ids == cold.token_ids
    assert hot.usage.cached_tokens <= 31  # the first block, and what another unit shares of the second
    assert fresh.stats()["bundles"][str(bundle)]["refused"] >= 1


async def test_units_of_another_prompt_under_this_prompts_key(open_tiny: Any, tmp_path: Path) -> None:
    """A unit says for which tokens it is; one that was renamed is no unit at all."""
    path = tmp_path / "hostile.kite"
    async with open_tiny() as engine:
        await engine.generate(PROMPT, max_tokens=1)
        await bundle_of(engine, path)
    data = path.read_bytes()
    units = (await open_bundle(path)).units
    first, second = [unit for unit in units if len(unit.token_ids) == 16][:2]
    swapped = data.replace(first.cf.hex().encode(), b"?" * 64)
    swapped = swapped.replace(second.cf.hex().encode(), first.cf.hex().encode())
    path.write_bytes(swapped.replace(b"?" * 64, second.cf.hex().encode()))
    async with open_tiny(pool=SMALL) as engine:
        cold = await engine.generate(PROMPT, max_tokens=4, ignore_eos=True, reuse=ReusePolicy(mode="off"))
        try:
            await engine.preload(path)
        except BundleError:
            return  # found at once
        hot = await engine.generate(PROMPT, max_tokens=4, ignore_eos=True)
        assert hot.token_ids == cold.token_ids
        assert hot.usage.cached_tokens < len(PROMPT)


async def test_a_file_that_is_overwritten_in_place_is_not_used(fresh: KiteEngine, bundle: Path) -> None:
    await fresh.preload(bundle)
    with bundle.open("rb+") as file:
        file.truncate(4096)
    gen = await fresh.generate(PROMPT, max_tokens=4, ignore_eos=True)
    assert gen.usage.cached_tokens == 0
    stats = fresh.stats()["bundles"][str(bundle)]
    assert (stats["units"], stats["refused"]) == (0, 1)
    assert (await fresh.generate(PROMPT, max_tokens=4, ignore_eos=True)).token_ids == gen.token_ids


async def test_a_file_that_is_replaced_by_renaming_goes_on_being_used(fresh: KiteEngine, bundle: Path) -> None:
    await fresh.preload(bundle)
    other = bundle.with_suffix(".new")
    shutil.copy(bundle, other)
    os.replace(other, bundle)
    gen = await fresh.generate(PROMPT, max_tokens=1)
    assert gen.usage.cached_tokens == len(PROMPT)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
async def test_logits_that_no_token_can_be_chosen_by_are_a_miss(
    fresh: KiteEngine, open_tiny: Any, bundle: Path, wrong: float
) -> None:
    async with open_tiny() as engine:
        cold = await engine.generate(PROMPT, max_tokens=4, ignore_eos=True)
        units = []
        for unit in await memory_units(engine):
            data = unit.data.copy()
            if unit.kind == "logits":
                data.view(np.float32)[5] = wrong
            units.append(dataclasses.replace(unit, data=data))
        await bundle_of_units(engine, bundle, units)
    await fresh.preload(bundle)
    gen = await fresh.generate(PROMPT, max_tokens=4, ignore_eos=True)
    assert gen.token_ids == cold.token_ids
    assert (gen.reuse.zero_prefill, gen.reuse.tiers) == (False, {"bundle": len(PROMPT) - 1})


@pytest.mark.parametrize("extra", [1, 24])
async def test_a_unit_of_more_tokens_than_a_block_is_of_no_use(open_tiny: Any, tmp_path: Path, extra: int) -> None:
    """Nobody writes such a unit; a hostile bundle may, with the fingerprint that belongs to its tokens."""
    path, prompt = tmp_path / "long.kite", PROMPT[:40]
    async with open_tiny(pool=SMALL) as engine:
        serving = engine._current
        ids, size = prompt[: 16 + extra], serving.backend.info.block_bytes // 16
        root = root_of(engine)
        unit = RecyclableUnit(
            kind="kv",
            cf=end_fingerprint(root.root, ids),
            parent=root.root,
            token_ids=np.array(ids, np.uint32),
            model_state=serving.backend.info.model_state,
            epoch=0,
            created_at=1.0,
            layout=str(serving.execution_path["layout"]),
            dtype="uint8",
            shape=(size * len(ids),),
            data=np.full(size * len(ids), 7, np.uint8),
        )
        cold = await engine.generate(prompt, max_tokens=4, ignore_eos=True, reuse=ReusePolicy(mode="off"))
        try:
            await bundle_of_units(engine, path, [unit])
            await engine.preload(path)
        except KiteError:
            # Refused by the format. What is in the index of siblings from elsewhere has to be harmless as well.
            engine.pool.siblings.add(unit.parent, unit.cf, unit.token_ids)
            await engine.pool.put_units([unit], engine.pool.epoch, root.root)
        gen = await engine.generate(prompt, max_tokens=4, ignore_eos=True)
        assert gen.token_ids == cold.token_ids


async def test_a_completion_that_unpacks_to_far_more_than_a_context_is_not_unpacked(
    fresh: KiteEngine, open_tiny: Any, bundle: Path
) -> None:
    async with open_tiny() as engine:
        await engine.generate(PROMPT, max_tokens=6, ignore_eos=True)
        units = [unit for unit in await memory_units(engine) if unit.kind == "completion"]
        bomb = np.zeros(2_000_000, np.uint32)
        bombs = [dataclasses.replace(unit, data=bomb.view(np.uint8), shape=(len(bomb),)) for unit in units]
        assert bombs
        try:
            await bundle_of_units(engine, bundle, bombs, compression="zstd")
        except KiteError:
            return  # it can't even be written
    assert bundle.stat().st_size < 20_000
    cold = await fresh.generate(PROMPT, max_tokens=4, ignore_eos=True)
    await evict_context(fresh)
    await fresh.preload(bundle)
    gen = await fresh.generate(PROMPT, max_tokens=4, ignore_eos=True)
    assert gen.token_ids == cold.token_ids
    assert fresh.stats()["bundles"][str(bundle)]["hit_bytes"] == 0


@pytest.mark.parametrize("how", ["overwrite", "truncate"])
async def test_a_file_that_changes_while_a_request_waits(
    fresh: KiteEngine, bundle: Path, record: Any, how: str
) -> None:
    cold = await fresh.generate(PROMPT, max_tokens=4, ignore_eos=True, reuse=ReusePolicy(mode="off"))
    await fresh.preload(bundle)
    steps = record(fresh)
    steps.gate.clear()
    busy = asyncio.create_task(fresh.generate(some_tokens(20, 900), max_tokens=1, reuse=ReusePolicy(mode="off")))
    await until(steps.reached.is_set)  # the model's thread is held in a step
    waiting = asyncio.create_task(fresh.generate(PROMPT, max_tokens=4, ignore_eos=True))
    await until(lambda: fresh.stats()["bundles"][str(bundle)]["hits"] > 0)  # its units were read
    await anyio.to_thread.run_sync(damage, bundle, how)
    steps.gate.set()
    assert (await waiting).token_ids == cold.token_ids
    await busy


def damage(path: Path, how: str) -> None:
    size = path.stat().st_size
    with path.open("rb+") as file:
        if how == "truncate":
            file.truncate(4096)
        else:
            file.write(b"\x55" * size)


# Signatures and keys


async def test_a_signature_can_be_required(fresh: KiteEngine, bundle: Path, tmp_path: Path, open_tiny: Any) -> None:
    from kitelib.upcycle.bundle.signing import new_key

    pem, public = new_key()
    _, stranger = new_key()
    key = tmp_path / "key.pem"
    key.write_bytes(pem)
    with pytest.raises(BundleSignatureError):
        await fresh.preload(bundle, require_signature=True, trusted_keys=[public])
    async with open_tiny() as engine:
        await engine.generate(PROMPT, max_tokens=1)
        await bundle_of(engine, bundle, sign_key=key)
    with pytest.raises(BundleSignatureError):
        await fresh.preload(bundle, require_signature=True, trusted_keys=[stranger])
    report = await fresh.preload(bundle, require_signature=True, trusted_keys=[stranger, public])
    assert report["signer"] == public
    assert (await fresh.generate(PROMPT, max_tokens=1)).usage.cached_tokens == len(PROMPT)


async def test_with_an_hmac_key_bundles_are_authenticated(open_tiny: Any, bundle: Path) -> None:
    pool = dataclasses.replace(SMALL, hmac_key=b"k" * 16)
    async with open_tiny(pool=pool) as engine:
        with pytest.raises(BundleSignatureError):
            await engine.preload(bundle)
        async with open_tiny() as maker:
            await maker.generate(PROMPT, max_tokens=1)
            await bundle_of(maker, bundle, hmac_key=b"k" * 16)
        await engine.preload(bundle)
        assert (await engine.generate(PROMPT, max_tokens=1)).usage.cached_tokens == len(PROMPT)
        flip(bundle, (await open_bundle(bundle)).units[0].start)
    async with open_tiny(pool=dataclasses.replace(pool, hmac_key=b"other key 16 byt")) as engine:
        with pytest.raises(BundleSignatureError):
            await engine.preload(bundle)


def flip(path: Path, offset: int) -> None:
    with path.open("rb+") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x40]))
