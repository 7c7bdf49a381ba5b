"""The pool gives verified units, in order, or none; what it was told to forget stays forgotten."""

from __future__ import annotations

import dataclasses

import pytest

from kitelib.config import PoolConfig
from kitelib.errors import StoreError
from kitelib.runtime.threads import ThreadDoor
from kitelib.stores.memory import MemoryStore
from kitelib.stores.pool import RUPool
from kitelib.stores.wanted import Wanted
from kitelib.upcycle.unit import Expectation, RecyclableUnit
from kitelib.yoco.planner import Planner
from tests.support.units import INFO, LAYOUT, chain_of, kv_unit, units_of

PROMPT = list(range(1, 17))  # four blocks


def make_pool(**options: object) -> RUPool:
    return RUPool(PoolConfig(**{"memory_bytes": 10**7, **options}), ThreadDoor())  # type: ignore[arg-type]


def wanted(pool: RUPool) -> list[Wanted]:
    planner = Planner(pool, INFO, LAYOUT)
    return [Wanted.of(planner.expect_block(chain_of(PROMPT), index, PROMPT)) for index in range(4)]


async def store(pool: RUPool, units: list[RecyclableUnit]) -> None:
    await pool.put_many([pool.encode(unit) for unit in units], pool.epoch)


def blocks(epoch: int = 0) -> list[RecyclableUnit]:
    return [unit for unit in units_of(PROMPT, epoch=epoch) if unit.kind == "kv"]


async def fetched(pool: RUPool) -> list[int]:
    return [int(token) for unit, _ in await pool.fetch_run(wanted(pool)) for token in unit.token_ids]


def test_a_quarter_of_the_memory_is_the_default() -> None:
    assert make_pool(memory_bytes=None).memory.max_bytes > 10**6


async def test_units_come_back_in_order_with_their_bytes() -> None:
    pool = make_pool()
    await store(pool, blocks())
    found = await pool.fetch_run(wanted(pool))
    for (unit, source), original in zip(found, blocks(), strict=True):
        assert source == "memory"
        assert unit.data.tobytes() == original.data.tobytes()
        assert (unit.cf, unit.parent, unit.epoch) == (original.cf, original.parent, 0)
        assert not unit.data.flags.writeable
    assert await pool.leading_run(wanted(pool)) == 4
    assert all(pool.contains(each) for each in wanted(pool))


async def test_a_run_ends_at_the_first_miss() -> None:
    pool = make_pool()
    await store(pool, [blocks()[0], blocks()[2]])
    assert await pool.leading_run(wanted(pool)) == 1
    assert await fetched(pool) == PROMPT[:4]
    assert await pool.fetch_run([]) == []
    assert await pool.leading_run([]) == 0


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "foreign"])
async def test_a_damaged_unit_is_a_miss_for_itself_and_all_after_it_and_goes(damage: str) -> None:
    pool = make_pool()
    await store(pool, blocks())
    key = wanted(pool)[1].key
    value = pool.memory.get(key)
    assert value is not None
    spoilt = {
        "flip": value[:-9] + bytes([value[-9] ^ 1]) + value[-8:],
        "cut": value[: len(value) // 2],
        "empty": b"",
        "foreign": pool.encode(blocks()[2])[1],
    }[damage]
    pool.memory.put(key, spoilt)
    assert await fetched(pool) == PROMPT[:4]
    assert pool.refused == 1
    assert not pool.memory.contains(key)
    assert pool.memory.contains(wanted(pool)[2].key)
    assert await fetched(pool) == PROMPT[:4]
    assert pool.stats()["memory"]["refused"] == 1


async def test_clearing_counts_and_voids_what_is_on_its_way() -> None:
    pool = make_pool()
    await store(pool, blocks())
    late = [pool.encode(unit) for unit in blocks()]
    assert await pool.clear() == {"memory": 4}
    assert pool.epoch == 1
    await pool.put_many(late, 0)  # computed before
    assert (await fetched(pool), pool.memory.counters().items) == ([], 0)
    await store(pool, blocks(epoch=1))
    assert await fetched(pool) == PROMPT


async def test_a_unit_of_an_older_epoch_is_never_given_out() -> None:
    pool = make_pool()
    await pool.clear()
    await store(pool, blocks(epoch=0))  # as a tier would that missed the clearing
    assert await fetched(pool) == []
    assert pool.refused == 0  # a plain miss: nothing is wrong with the unit


async def test_a_failing_tier_is_a_miss() -> None:
    class Failing(MemoryStore):
        async def get_many(self, keys: object) -> list[bytes | None]:
            raise StoreError("down")

        async def leading_run(self, keys: object) -> int:
            raise OSError("down")

    pool = make_pool()
    pool.memory = Failing(10**7)
    await store(pool, blocks())
    assert await pool.leading_run(wanted(pool)) == 0
    assert await pool.fetch_run(wanted(pool)) == []
    assert pool.refused == 2


async def test_the_tier_is_bounded() -> None:
    pool = make_pool(memory_bytes=2000)
    await store(pool, blocks())
    stats = pool.stats()["memory"]
    assert 0 < stats["items"] < 4
    assert stats["bytes"] <= 2000 == stats["limit_bytes"]
    assert stats["dropped"] + stats["items"] == 4
    assert await pool.leading_run(wanted(pool)) == stats["items"]  # the beginning of the prompt, not its end
    off = make_pool(memory_bytes=0)
    assert not off.enabled
    await store(off, blocks())
    assert off.stats()["memory"]["items"] == 0


async def test_units_are_listed_by_fingerprint_whatever_their_kind() -> None:
    pool = make_pool()
    units = units_of(PROMPT[:6])
    await store(pool, units)
    for unit in units:
        found = await pool.get_rus_by_cf(unit.cf)
        same = [each for each in units if each.cf == unit.cf]
        assert sorted(each.kind for each in found) == sorted(each.kind for each in same)
    assert await pool.get_rus_by_cf(b"\0" * 32) == []


async def test_keys_tell_model_kind_and_fingerprint() -> None:
    pool = make_pool()
    unit = kv_unit(PROMPT, 0, 4)
    key, _ = pool.encode(unit)
    assert key == f"kite:{{{unit.cf.hex()[:4]}}}:{INFO.model_state[:8].hex()}:kv:{unit.cf.hex()}"
    expected = Expectation("kv", unit.cf, PROMPT[:4], INFO.model_state, LAYOUT, len(unit.data))
    assert Wanted.of(expected).key == key


async def test_closing_gives_the_memory_back() -> None:
    pool = make_pool()
    await store(pool, blocks())
    await pool.aclose()
    assert pool.memory.counters().bytes == 0
    assert await fetched(pool) == []


async def test_units_from_a_lossy_form_are_not_taken_over_as_exact() -> None:
    pool = make_pool()
    rounded = [dataclasses.replace(unit, codec="int8_kv/none") for unit in blocks()[:1]]
    assert await pool.put_units([*rounded, blocks()[1]], 0) == 1
    assert [pool.contains(each) for each in wanted(pool)[:2]] == [False, True]
    assert await make_pool(kv_precision="int8").put_units(rounded, 0) == 1
