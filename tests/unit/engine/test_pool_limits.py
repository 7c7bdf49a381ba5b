"""A small, broken or foreign pool costs time; it never changes an answer and never fails a request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kitelib import KiteEngine, PoolConfig, ReusePolicy
from kitelib.stores.memory import MemoryStore
from kitelib.testing import Fault, FaultyStore, Operation, fault_every
from tests.support.engines import assert_nothing_left, evict_context, some_tokens

OFF = ReusePolicy(mode="off")
STORY = list(range(100, 170))


PROMPTS = [some_tokens(40, 100 + 50 * i) for i in range(6)]


async def answers_of(engine: KiteEngine) -> list[list[int]]:
    found = []
    for _ in range(2):
        for prompt in PROMPTS:
            found.append((await engine.generate(prompt, max_tokens=4, ignore_eos=True)).token_ids)
            await evict_context(engine)
    return found


@pytest.fixture
async def right_answers(open_tiny: Any) -> list[list[int]]:
    async with open_tiny(reuse=OFF) as engine:
        return await answers_of(engine)


@pytest.mark.parametrize("memory_bytes", [0, 1, 5000, 60_000, 10**9])
async def test_a_tiny_pool_is_kept_and_changes_no_answer(
    open_tiny: Any, right_answers: list[list[int]], memory_bytes: int
) -> None:
    async with open_tiny(pool=PoolConfig(memory_bytes=memory_bytes)) as engine:
        assert await answers_of(engine) == right_answers
        stats = engine.stats()["pool"]["memory"]
        assert stats["bytes"] <= memory_bytes
        assert stats["refused"] == 0
        if memory_bytes == 10**9:
            assert stats["hits"] > 0
        if memory_bytes == 0:
            assert engine.stats()["recycler"] == {"registered": 0, "dropped": 0, "pending_bytes": 0}


class Faulty(MemoryStore):
    """A memory tier whose contract methods go wrong on schedule; its own methods work."""

    def __init__(self, fault: Fault, operation: Operation) -> None:
        super().__init__(10**9)
        self.outer = FaultyStore(_Plain(self), fault_every(1, fault, operation))

    async def get_many(self, keys: Any) -> Any:
        return await self.outer.get_many(keys)

    async def put_many(self, items: Any) -> None:
        await self.outer.put_many(items)

    async def leading_run(self, keys: Any) -> int:
        return await self.outer.leading_run(keys)


class _Plain:
    """The inherited methods of a store, past its own."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(super(Faulty, self._store), name)


@pytest.mark.parametrize("operation", ["get_many", "put_many", "leading_run"])
@pytest.mark.parametrize("kind", ["fail", "lose", "corrupt", "truncate", "swap"])
async def test_a_broken_store_is_a_miss_and_never_an_answer(
    open_tiny: Any, right_answers: list[list[int]], operation: Operation, kind: Any
) -> None:
    async with open_tiny() as engine:
        engine.pool.memory = faulty = Faulty(Fault(kind), operation)
        assert await answers_of(engine) == right_answers
        assert faulty.outer.faults > 0
        stats = engine.stats()
        if kind == "fail" and operation == "put_many":
            assert stats["recycler"]["dropped"] > 0
        elif kind == "fail" or (kind in ("corrupt", "truncate") and operation != "leading_run"):
            assert stats["pool"]["memory"]["refused"] > 0
        await assert_nothing_left(engine)


async def test_a_codec_that_breaks_is_a_miss(
    open_tiny: Any, right_answers: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **options: Any) -> Any:
        raise ZeroDivisionError("a bug in a codec")

    async with open_tiny() as engine:
        monkeypatch.setattr("kitelib.stores.checking.unpack", broken)
        assert await answers_of(engine) == right_answers
        assert engine.stats()["pool"]["memory"]["refused"] > 0


async def test_a_key_protects_what_is_stored(open_tiny: Any, right_answers: list[list[int]], tmp_path: Path) -> None:
    """A tier outside the process that another key has written is refused, and the answers stay right."""
    folder = str(tmp_path / "pool")
    async with open_tiny(pool=PoolConfig(disk=folder, hmac_key=b"k" * 32)) as engine:
        assert await answers_of(engine) == right_answers
    async with open_tiny(pool=PoolConfig(disk=folder, hmac_key=b"x" * 32)) as engine:
        gen = await engine.generate(PROMPTS[0], max_tokens=4, ignore_eos=True)
        assert (gen.token_ids, gen.usage.cached_tokens) == (right_answers[0], 0)
        assert engine.stats()["pool"]["disk"]["refused"] > 0


async def test_units_can_be_looked_up_by_fingerprint(open_tiny: Any) -> None:
    async with open_tiny() as engine:
        await engine.generate(STORY, max_tokens=1)
        await engine.flush()
        key = next(key for key in engine.pool.memory.keys() if ":kv:" in key)  # noqa: SIM118
        (unit,) = await engine.pool.get_rus_by_cf(bytes.fromhex(key.rsplit(":", 1)[1]))
        assert unit.kind == "kv"
        assert set(unit.token_ids.tolist()) <= set(STORY)
        assert await engine.pool.get_rus_by_cf(bytes(32)) == []
