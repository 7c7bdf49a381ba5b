"""The pool with a tier outside the process: what it writes, what it believes, and what it refuses."""

from __future__ import annotations

import dataclasses
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kitelib.config import PoolConfig
from kitelib.native import library
from kitelib.runtime.supervisor import Supervisor
from kitelib.runtime.threads import ThreadDoor
from kitelib.stores.disk import DiskStore
from kitelib.stores.keys import KeyRing, unit_key
from kitelib.stores.pool import RUPool
from kitelib.stores.wanted import Wanted
from kitelib.upcycle.codec import get_codec
from kitelib.upcycle.unit import RecyclableUnit, inspect, pack
from kitelib.yoco.planner import Planner
from tests.support.units import INFO, LAYOUT, ROOT, chain_of, kv_unit, logits_unit, units_of

PROMPT = list(range(1, 17))  # four blocks
OpenPool = Callable[..., AbstractAsyncContextManager[RUPool]]


@pytest.fixture
def open_pool(tmp_path: Path) -> OpenPool:
    """``async with open_pool(**options) as pool``: over one folder, with its writers running."""

    @asynccontextmanager
    async def opened(*, bitwise: bool = True, **options: Any) -> AsyncIterator[RUPool]:
        config = PoolConfig(**{"memory_bytes": 10**7, "disk": str(tmp_path / "pool"), **options})
        supervisor = Supervisor()
        supervisor.start()
        pool = RUPool(config, ThreadDoor())
        try:
            await pool.start(supervisor)
            await pool.use_model(INFO.model_state, bitwise=bitwise)
            yield pool
            await pool.drain()
        finally:
            await supervisor.aclose()
            await pool.aclose()

    return opened


def blocks(epoch: int = 0) -> list[RecyclableUnit]:
    return [unit for unit in units_of(PROMPT, epoch=epoch) if unit.kind == "kv"]


def wanted(pool: RUPool, root: bytes = ROOT) -> list[Wanted]:
    planner, chain = Planner(pool, INFO, LAYOUT), chain_of(PROMPT, root)
    return [Wanted.of(planner.expect_block(chain, index, PROMPT), root) for index in range(4)]


async def read(pool: RUPool, root: bytes = ROOT) -> list[RecyclableUnit]:
    """What the outer tiers give for the prompt."""
    keys = wanted(pool, root)
    return [
        unit for span in await pool.locate(keys) for unit, _ in await pool.read(span, keys[span.first :][: span.count])
    ]


async def write(pool: RUPool, units: Sequence[RecyclableUnit], root: bytes = ROOT) -> None:
    await pool.put_units(units, pool.epoch, root)
    await pool.drain()


async def replace_value(folder: str, change: Callable[[list[tuple[str, bytes]]], list[tuple[str, bytes]]]) -> None:
    """Stores what `change` makes of everything in the folder's tier."""
    store = DiskStore(folder, 2**30)
    keys = [item.key async for page in store.list_items() for item in page]
    values = [value for value in await store.get_many(sorted(keys)) if value is not None]
    await store.put_many(change(list(zip(sorted(keys), values, strict=True))))
    await store.aclose()


async def test_another_pool_gives_back_what_one_wrote(open_pool: OpenPool) -> None:
    async with open_pool() as pool:
        await write(pool, units_of(PROMPT))
    async with open_pool() as pool:
        assert await pool.leading_run(wanted(pool)) == 0
        found = await read(pool)
        assert [unit.data.tobytes() for unit in found] == [unit.data.tobytes() for unit in blocks()]
        stats = pool.stats()["disk"]
        assert (stats["hits"], stats["refused"], stats["errors"]) == (4, 0, 0)


async def test_what_came_from_outside_is_in_memory_the_next_time(open_pool: OpenPool) -> None:
    async with open_pool() as pool:
        await write(pool, blocks())
    async with open_pool() as pool:
        await read(pool)
        while pool._promotion.num_bytes:
            await pool._door.run(lambda: None)
        assert len(await pool.fetch_run(wanted(pool))) == 4


async def test_what_a_tier_already_had_is_not_written_again(open_pool: OpenPool) -> None:
    async with open_pool() as pool:
        await write(pool, blocks())
    async with open_pool(memory_bytes=0) as pool:
        assert not any(pool.contains(each) for each in wanted(pool))
        await read(pool)
        assert all(pool.contains(each) for each in wanted(pool))
        await write(pool, blocks())
        assert pool.stats()["disk"]["written"] == 0


def forged(value: bytes, hmac_key: bytes | None) -> bytes:
    """Right key, right token ids, sound checksums, wrong data: only an HMAC can tell."""
    unit = inspect(value)
    return pack(
        dataclasses.replace(unit, data=np.full_like(unit.data, 0xAB)), get_codec("raw", "none"), hmac_key=hmac_key
    )


SPOIL: dict[str, Callable[[list[tuple[str, bytes]]], list[tuple[str, bytes]]]] = {
    "tampered": lambda items: [(key, value[:-40] + bytes([value[-40] ^ 1]) + value[-39:]) for key, value in items],
    "truncated": lambda items: [(key, value[: len(value) // 2]) for key, value in items],
    "swapped": lambda items: [(key, value) for (key, _), (_, value) in zip(items, [*items[1:], items[0]], strict=True)],
    "replayed under another key": lambda items: [(key, items[0][1]) for key, _ in items[1:]],
    "empty": lambda items: [(key, b"") for key, _ in items],
    "forged without a key": lambda items: [(key, forged(value, None)) for key, value in items],
    "forged with a guessed key": lambda items: [(key, forged(value, b"guess")) for key, value in items],
    "signed without the key": lambda items: [
        (key, pack(inspect(value), get_codec("raw", "none"))) for key, value in items
    ],
}


@pytest.mark.parametrize("how", SPOIL)
async def test_b2_b24_a_spoilt_value_is_a_miss_counted_and_gone(open_pool: OpenPool, tmp_path: Path, how: str) -> None:
    """B2, B24: fingerprint, token ids, checksum and HMAC are checked after every read, before use."""
    options = {"hmac_key": b"k" * 32}
    async with open_pool(**options) as pool:
        await write(pool, blocks())
    await replace_value(str(tmp_path / "pool"), SPOIL[how])
    async with open_pool(**options) as pool:
        found = await read(pool)
        assert len(found) <= 1  # where one value stayed as it was
        for unit, original in zip(found, blocks(), strict=False):
            assert unit.data.tobytes() == original.data.tobytes()
        assert pool.stats()["disk"]["refused"] == 1
        assert await pool.locate(wanted(pool)[len(found) :]) == []


async def test_each_namespace_has_a_key_of_its_own(open_pool: OpenPool) -> None:
    """A value that another tenant's key authenticates is refused, even under the right fingerprint."""
    key = b"k" * 32
    assert len({unit_key(key, name, secret) for name in (None, "a", "b") for secret in (None, b"s")}) == 6
    async with open_pool(hmac_key=key) as pool:
        pool.add_namespace(ROOT, "a")
        await write(pool, blocks())
        assert len(await read(pool)) == 4
    async with open_pool(hmac_key=key) as pool:
        pool.add_namespace(ROOT, "b")
        assert await read(pool) == []
        assert pool.stats()["disk"]["refused"] == 1


async def test_b18_older_epochs_are_misses_in_every_process_and_purged(open_pool: OpenPool) -> None:
    """B18: what an invalidation made stale is unreachable at once, also for who did not call it."""
    async with open_pool() as one, open_pool() as other:
        await write(one, blocks())
        assert len(await read(other)) == 4
        assert (await one.clear())["disk"] == 4
        await other._lifecycle.check()
        assert (one.epoch, other.epoch) == (1, 1)
        await write(other, blocks(epoch=0))  # computed before it heard
        assert await other.locate(wanted(other)) != []
        assert await read(one) == []
        await write(one, [dataclasses.replace(unit, epoch=1) for unit in blocks()])
    async with open_pool() as later:
        assert later.epoch == 1


async def test_lossy_units_are_refused_unless_they_were_asked_for(open_pool: OpenPool, tmp_path: Path) -> None:
    """B13: a rounded unit never serves an exact engine, whoever put it there."""
    unit = logits_unit(PROMPT)
    expected = Wanted.of(
        Planner(RUPool(PoolConfig(memory_bytes=1), ThreadDoor()), INFO, LAYOUT).expect_logits(chain_of(PROMPT)), ROOT
    )
    async with open_pool(logits_codec="fp16_quant", bitwise=False) as pool:
        await write(pool, [unit])
        (found,) = await pool.fetch_any([expected])
        assert found is not None
        assert found[0].codec.startswith("fp16_quant")
    for options in ({"bitwise": False}, {"logits_codec": "fp16_quant", "bitwise": True}):
        async with open_pool(**options) as pool:
            assert await pool.fetch_any([expected]) == [None]
            assert pool.stats()["disk"]["refused"] in (0, 1)  # the first one deleted it


async def test_eight_bit_units_take_half_the_bytes(open_pool: OpenPool, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    data = rng.normal(size=(60, 4, 64)).astype(np.float16)
    unit = dataclasses.replace(
        kv_unit(PROMPT, 0, 4), data=data.reshape(-1).view(np.uint8), shape=data.shape, dtype="float16"
    )
    sizes = []
    for options in ({}, {"kv_precision": "int8"}):
        async with open_pool(disk=str(tmp_path / str(len(sizes))), **options) as pool:
            await write(pool, [unit])
            await pool.tiers.tiers[0].refresh()
            items = [item async for page in pool.tiers.tiers[0].store.list_items() for item in page]  # type: ignore[attr-defined]
            sizes.append(items[0].num_bytes)
    assert sizes[1] < 0.75 * sizes[0]


async def test_what_a_tier_lost_it_gets_back_from_memory(open_pool: OpenPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an outage or a flush, a tier must not stay without exactly the units that are used all the time."""
    async with open_pool() as pool:
        await write(pool, blocks())
        (tier,) = pool.tiers.tiers
        assert await tier.delete_many([each.key for each in wanted(pool)[2:]]) == 2
        assert len(await pool.fetch_run(wanted(pool))) == 4
        await pool.drain()
        assert await tier.leading_run([each.key for each in wanted(pool)]) == 2  # written a moment ago: not looked at
        pool._writes.clear()  # as if that were long ago
        assert len(await pool.fetch_run(wanted(pool))) == 4
        while await tier.leading_run([each.key for each in wanted(pool)]) < 4:
            await pool.drain()
        assert tier.counters()["written"] == 6


async def test_a_unit_is_gone_when_its_time_is_over_wherever_it_is(open_pool: OpenPool) -> None:
    """A tier only knows how long it has had a unit; what counts is when it was computed."""
    units = [dataclasses.replace(unit, created_at=time.time() - 50.0) for unit in blocks()]
    async with open_pool(ttl_seconds=60.0) as pool:
        await write(pool, units)
        assert len(await read(pool)) == 4
        assert len(await pool.fetch_run(wanted(pool))) == 4
    async with open_pool(ttl_seconds=40.0) as pool:
        assert await read(pool) == []
        assert pool.stats()["disk"]["refused"] == 0


async def test_units_are_found_by_fingerprint_in_outer_tiers_too(open_pool: OpenPool) -> None:
    async with open_pool() as pool:
        await write(pool, blocks())
    async with open_pool() as pool:
        (unit,) = await pool.get_rus_by_cf(blocks()[2].cf)
        assert unit.token_ids.tolist() == PROMPT[8:12]


async def test_the_hot_set_is_what_was_used_last_and_of_this_model(open_pool: OpenPool) -> None:
    foreign = dataclasses.replace(kv_unit(PROMPT, 0, 4), model_state=b"x" * 32)
    async with open_pool() as pool:
        await write(pool, [*blocks(), foreign])
    async with open_pool() as pool:
        assert await pool.warm() == {"disk": "ready"}
        assert await pool.warm_hot_set() == 4
        assert await pool.leading_run(wanted(pool)) == 4
    async with open_pool(hmac_key=b"k" * 32) as pool:  # what can't be authenticated stays outside
        assert await pool.warm_hot_set() == 0


async def test_what_is_to_say_about_the_codec_is_known_before_anybody_asks(open_pool):
    """B36: `engine.stats()` is called on the event loop, where the native library must not be loaded from its file."""
    library._found.cache_clear()
    async with open_pool() as pool:
        pool.notes()  # touching a file here fails the test


async def test_b35_values_far_longer_than_a_unit_are_not_read(open_pool: OpenPool, tmp_path: Path) -> None:
    """B35: how long a value can be is known before anything is allocated for it."""
    async with open_pool() as pool:
        await write(pool, blocks())
    await replace_value(str(tmp_path / "pool"), lambda items: [(key, value + bytes(2**23)) for key, value in items])
    async with open_pool() as pool:
        await pool.use_model(INFO.model_state, max_data_bytes=INFO.block_bytes)
        tracemalloc.start()
        try:
            assert await read(pool) == []
            assert tracemalloc.get_traced_memory()[1] < 2**22
        finally:
            tracemalloc.stop()


async def test_what_a_look_up_does_not_find_is_written_again(open_pool: OpenPool) -> None:
    """After a tier was emptied, what is computed again goes there at once."""
    async with open_pool(memory_bytes=0) as pool:
        await write(pool, blocks())
        (tier,) = pool.tiers.tiers
        await tier.delete_many([each.key for each in wanted(pool)])
        assert await read(pool) == []
        await write(pool, blocks())
        assert len(await read(pool)) == 4


def test_an_unknown_root_is_trusted_with_nothing() -> None:
    """Not even what it authenticated itself a moment ago."""
    ring = KeyRing(b"k" * 32, None)
    ring.add(b"a" * 32, "a")
    assert ring.of(b"a" * 32) == unit_key(b"k" * 32, "a")
    assert ring.of(b"") == ring.own == unit_key(b"k" * 32, None)
    assert len({ring.of(b"b" * 32), ring.of(b"b" * 32), ring.own}) == 3
    assert KeyRing(None, b"s").of(b"b" * 32) is None
