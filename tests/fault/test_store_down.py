"""An engine whose tier is cut off: right answers, at the price of a few calls, until the tier is back."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from kitelib import KiteEngine, PoolConfig
from kitelib.stores.breaker import Breaker
from kitelib.stores.registry import open_stores
from kitelib.testing import FaultyStore
from kitelib.upcycle import preheat_ru_pool
from tests.support.answers import ONE_STEP, answer, cold_answer, evict_to_pool, prompt_of
from tests.support.engines import assert_nothing_left, computes_slowly, until
from tests.support.event_loop import MeasureLoopGap
from tests.support.file_systems import mounted, remounted
from tests.support.outages import OUTAGES, Outage, outage
from tests.support.redis_servers import free_port
from tests.support.s3_server import S3Server

GREEDY: dict[str, Any] = {"max_tokens": 2, "logprobs": 2, "ignore_eos": True}
READS = ("leading_run", "get_many")
HANGS_S = 120.0  # only ends a hanging test; nothing is measured
MAX_GAP_S = 0.010
STORED = prompt_of(100, seed=1, vocab_size=2048)


@pytest.fixture(params=OUTAGES)
def down(request: pytest.FixtureRequest, tmp_path: Path, s3_server: S3Server) -> Iterator[Outage]:
    """A tier to cut off."""
    with outage(request.param, tmp_path, s3_server) as each:
        yield each


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> collections.Counter[str]:
    """How often each method of the engine's stores is called."""
    counted: collections.Counter[str] = collections.Counter()

    def note(operation: str, _: int) -> None:
        counted[operation] += 1

    def opened(config: PoolConfig) -> list[tuple[str, Any]]:
        return [(name, FaultyStore(store, note)) for name, store in open_stores(config)]

    monkeypatch.setattr("kitelib.stores.pool.open_stores", opened)
    return counted


@pytest.fixture
def lasting_breakers(monkeypatch: pytest.MonkeyPatch) -> None:
    """No breaker lets a probe through during the test."""
    monkeypatch.setattr(Breaker.__init__, "__defaults__", (3, 3600.0, 3600.0, None))


class Asker:
    """Asks the engine what nobody asked before, and compares with what an engine without a pool says."""

    def __init__(self, engine: KiteEngine, cold: KiteEngine) -> None:
        self._engine = engine
        self._cold = cold
        self._count = 0

    async def new(self, count: int) -> None:
        for _ in range(count):
            self._count += 1
            await self.known(prompt_of(50, 1000 + self._count, vocab_size=2048))

    async def known(self, prompt: list[int]) -> dict[str, int]:
        """Returns where it came from."""
        with anyio.fail_after(HANGS_S):
            gen = await self._engine.generate(prompt, reuse=ONE_STEP, **GREEDY)
        assert answer(gen) == await cold_answer(self._cold, prompt, **GREEDY)
        return dict(gen.reuse.tiers)

    async def settled(self) -> None:
        """Waits until all that was computed is stored, or lost."""
        await self._engine.flush()
        await self._engine.pool.drain()

    async def stored(self) -> None:
        """Has a prompt that only the tier knows."""
        await self.known(STORED)
        await evict_to_pool(self._engine)
        await self._engine.pool.drain()
        self._engine.pool.memory.clear()


@pytest.fixture
async def cold(open_tiny: Callable[..., Any]) -> Any:
    """An engine that keeps nothing."""
    async with open_tiny(pool=PoolConfig(memory_bytes=0)) as engine:
        yield engine


async def in_thread(function: Callable[[], object]) -> None:
    await anyio.to_thread.run_sync(function)


@pytest.fixture(autouse=True)
def impatient_background(monkeypatch: pytest.MonkeyPatch) -> None:
    """The archive, and calls that no request waits for, get no more time than the others."""
    monkeypatch.setattr("kitelib.stores.pool._ARCHIVE_TIMEOUT_S", 0.4)
    monkeypatch.setattr("kitelib.stores.tier._PATIENCE", 2)
    monkeypatch.setattr("kitelib.stores.tier._PATIENCE_S", 0.5)


@pytest.mark.usefixtures("lasting_breakers", "patient")
async def test_answers_stay_right_and_soon_nobody_asks_the_dead_store(
    down: Outage, open_tiny: Callable[..., Any], cold: KiteEngine, calls: collections.Counter[str]
) -> None:
    """B7, B49: what a dead store had is a miss. After a few failed calls the breaker opens, and requests don't pay."""
    async with open_tiny(pool=PoolConfig(memory_bytes=2**20, **down.pool)) as engine:
        computes_slowly(engine)
        asker = Asker(engine, cold)
        await asker.stored()
        assert calls["put_many"] > 0
        await in_thread(down.cut)
        assert (down.tier in await asker.known(STORED)) == down.reads
        for _ in range(10):
            await asker.new(1)
            await asker.settled()
        stats = engine.stats()["pool"][down.tier]
        assert stats["write_breaker"] == "open"
        assert stats["breaker"] == ("closed" if down.reads else "open")
        assert stats["errors"] > 0
        assert stats["dropped"] > 0
        calls.clear()
        await asker.known(STORED)
        await asker.new(20)
        await asker.settled()
        assert calls["put_many"] == 0
        assert down.reads == any(calls[name] for name in READS)
        await assert_nothing_left(engine)


@pytest.mark.usefixtures("quick_breakers", "patient")
async def test_it_is_used_again_by_itself_when_it_is_back(
    down: Outage, open_tiny: Callable[..., Any], cold: KiteEngine
) -> None:
    """B30, B31: a probe finds that the store is back; what is written then is found, and nothing wrong is."""
    async with open_tiny(pool=PoolConfig(memory_bytes=2**20, **down.pool)) as engine:
        computes_slowly(engine)
        asker = Asker(engine, cold)
        await asker.stored()
        await in_thread(down.cut)
        for _ in range(4):
            await asker.new(1)
            await asker.settled()
        assert engine.stats()["pool"][down.tier]["write_breaker"] != "closed"
        await in_thread(down.restore)
        written = engine.stats()["pool"][down.tier]["written"]
        with anyio.fail_after(HANGS_S):
            while engine.stats()["pool"][down.tier]["written"] <= written:
                await asker.new(1)
                await asker.settled()
                await asyncio.sleep(0.05)
        again = prompt_of(90, seed=2, vocab_size=2048)
        await asker.known(again)
        await evict_to_pool(engine)
        await engine.pool.drain()
        engine.pool.memory.clear()
        with anyio.fail_after(HANGS_S):
            while (await asker.known(again)).get(down.tier, 0) == 0:
                await evict_to_pool(engine)
                engine.pool.memory.clear()
                await asyncio.sleep(0.05)
        stats = engine.stats()["pool"][down.tier]
        assert (stats["breaker"], stats["write_breaker"], stats["refused"]) == ("closed", "closed", 0)


@pytest.mark.usefixtures("lasting_breakers")
async def test_the_event_loop_goes_on_and_closing_ends_while_a_store_hangs(
    down: Outage, open_tiny: Callable[..., Any], cold: KiteEngine, loop_gap: MeasureLoopGap
) -> None:
    """B30: neither asking nor closing waits for a store that does not answer; what could not be written is counted."""
    before = asyncio.all_tasks()
    config = PoolConfig(memory_bytes=2**20, drain_seconds=0.5, **down.pool)
    async with open_tiny(pool=config) as engine:
        computes_slowly(engine)
        asker = Asker(engine, cold)
        await asker.stored()
        await in_thread(down.cut)
        async with loop_gap() as gap:
            await asker.known(STORED)
            await asker.new(5)
        assert gap.turns > 5
        assert gap.longest_cpu_s < MAX_GAP_S
        await evict_to_pool(engine)  # much to write, and nobody who takes it
        with anyio.fail_after(HANGS_S):
            await engine.aclose()
        stats = engine.pool.stats()[down.tier]
        assert stats["dropped"] > 0
        assert stats["pending_bytes"] == 0
    await until(lambda: not asyncio.all_tasks() - before)


async def test_an_engine_opens_and_answers_when_all_its_tiers_are_dead(
    tmp_path: Path, open_tiny: Callable[..., Any], cold: KiteEngine, s3_server: S3Server
) -> None:
    """Opening needs no tier; `preheat_ru_pool` says what is wrong with each."""
    (tmp_path / "file").write_bytes(b"no folder")
    config = PoolConfig(
        disk=str(tmp_path / "file"),
        redis=f"redis+cluster://127.0.0.1:{free_port()}",
        s3=s3_server.new_url(),
        s3_options=s3_server.options(endpoint=f"http://127.0.0.1:{free_port()}"),
    )
    async with open_tiny(pool=config) as engine:
        computes_slowly(engine)
        await Asker(engine, cold).new(3)
        report = await preheat_ru_pool(engine)
        assert set(report["tiers"]) == {"disk", "redis", "s3"}
        assert "ready" not in report["tiers"].values()
        assert str(tmp_path / "file") in report["tiers"]["disk"]


async def test_an_engine_opens_and_answers_when_its_tier_hangs_from_the_start(
    down: Outage, open_tiny: Callable[..., Any], cold: KiteEngine
) -> None:
    """As above, for every way in which a tier can be away."""
    await in_thread(down.cut)
    with anyio.fail_after(HANGS_S):
        async with open_tiny(pool=PoolConfig(drain_seconds=0.5, **down.pool)) as engine:
            computes_slowly(engine)
            await Asker(engine, cold).new(2)
            assert engine.pool.epoch == 0
            cleared = await engine.invalidate()
            assert cleared[down.tier] == 0
            assert engine.pool.epoch == 1
            await Asker(engine, cold).new(2)


@pytest.mark.usefixtures("patient", "quick_breakers")
async def test_a_read_only_folder_goes_on_giving(
    tmp_path: Path, open_tiny: Callable[..., Any], cold: KiteEngine
) -> None:
    """B26: what can't be written is dropped and counted; what is there is used; and later it is written again."""
    with mounted(tmp_path / "disk", 8 * 2**20) as disk:
        config = PoolConfig(disk=str(disk / "pool"))
        async with open_tiny(pool=config) as engine:
            await Asker(engine, cold).stored()
        await in_thread(lambda: remounted(disk, "ro"))
        async with open_tiny(pool=config) as engine:
            computes_slowly(engine)
            asker = Asker(engine, cold)
            assert await asker.known(STORED) == {"disk": len(STORED) - 1}
            for _ in range(4):
                await asker.new(1)
                await asker.settled()
            stats = engine.stats()["pool"]["disk"]
            assert stats["breaker"] == "closed"
            assert stats["write_breaker"] != "closed"
            assert (stats["written"], stats["dropped"] > 0) == (0, True)
            await in_thread(lambda: remounted(disk, "rw"))
            with anyio.fail_after(HANGS_S):
                while engine.stats()["pool"]["disk"]["written"] == 0:
                    await asyncio.sleep(0.05)
                    await asker.new(1)
                    await asker.settled()
