"""Hundreds of requests while every tier is killed, paused, flushed, filled and spoilt: each answer is the cold one."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import functools
import logging
import os
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from kitelib import KiteEngine, PoolConfig
from kitelib.config import TierThresholds
from tests.support.answers import ONE_STEP, answer, cold_answer, evict_to_pool
from tests.support.chaos import Disturber, MemoryWatch
from tests.support.damage import spoil_disk, spoil_redis, value_files
from tests.support.engines import assert_nothing_left, computes_slowly, until
from tests.support.file_systems import mounted
from tests.support.redis_servers import RedisCluster
from tests.support.s3_server import S3Proxy, S3Server
from tests.support.traffic import Ask, asks, shared_prompts

SEED = int(os.environ.get("KITE_CHAOS_SEED", "20261130"))
OPTIONS: dict[str, Any] = {"max_tokens": 3, "logprobs": 2, "ignore_eos": True}
MOST_GROWN_BYTES = 300 * 2**20
HANGS_S = 300.0  # only ends a hanging test; nothing is measured


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of the run; a failure shows it, and ``KITE_CHAOS_SEED`` sets it."""
    print(f"seed {SEED}: KITE_CHAOS_SEED={SEED} pytest {request.node.nodeid!r}")
    return SEED


@contextlib.asynccontextmanager
async def nothing_unnoticed(caplog: pytest.LogCaptureFixture) -> AsyncIterator[None]:
    """No background task fails, nothing reaches the loop's last resort, and every task ends."""
    loop = asyncio.get_running_loop()
    lost: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: lost.append(context))
    before = asyncio.all_tasks()
    try:
        yield
        await until(lambda: not asyncio.all_tasks() - before)
    finally:
        loop.set_exception_handler(None)
    assert not lost
    assert not [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR]


class Callers:
    """Those who ask, and compare what they get with the cold answers."""

    def __init__(self, engine: KiteEngine, prompts: Sequence[list[int]], expected: Sequence[Any]) -> None:
        self.answered = self.cancelled = 0
        self.wrong: list[str] = []
        self.tiers: collections.Counter[str] = collections.Counter()
        self._engine = engine
        self._prompts = prompts
        self._expected = expected

    async def ask(self, ask: Ask) -> None:
        """One request."""
        gen = None
        with anyio.fail_after(HANGS_S):
            with anyio.move_on_after(ask.cancel_after_s if ask.cancel_after_s is not None else HANGS_S + 1):
                gen = await self._engine.generate(self._prompts[ask.prompt], reuse=ask.reuse, **OPTIONS)
        if gen is None:
            self.cancelled += 1
            return
        self.answered += 1
        self.tiers.update(gen.reuse.tiers)
        if answer(gen) != self._expected[ask.prompt]:
            self.wrong.append(f"prompt {ask.prompt}, reuse {gen.reuse}")

    async def all_of(self, traffic: Sequence[Ask]) -> None:
        """Asks at the times that the traffic says, without waiting for answers."""
        async with anyio.create_task_group() as group:
            for each in traffic:
                await asyncio.sleep(each.after_s)
                group.start_soon(self.ask, each)


@dataclasses.dataclass(frozen=True)
class Size:
    """How big everything is.

    Attributes:
        requests, prompts, most_tokens: of the traffic, and the longest prompt.
        gap_s, trouble_gap_s: mean seconds between two requests, and between two troubles.
        memory_bytes, disk_bytes, file_system_bytes, write_bytes: the bounds; each too small for what comes.
        engine: options of the engine.
    """

    requests: int
    prompts: int
    most_tokens: int
    gap_s: float
    trouble_gap_s: float
    memory_bytes: int
    disk_bytes: int
    file_system_bytes: int
    write_bytes: int
    engine: dict[str, Any]
    vocab_size: int


TINY = Size(500, 48, 160, 0.04, 0.15, 2**18, 2**20, 3 * 2**20, 2**21, {"n_ctx": 256, "kv_tokens": 512}, 2048)
REAL = Size(40, 10, 100, 0.25, 0.2, 2**22, 2**23, 3 * 2**23, 2**24, {"n_ctx": 256, "kv_tokens": 512}, 49152)


@dataclasses.dataclass(frozen=True)
class Tiers:
    """The tiers of a run, and how an engine over them is opened."""

    size: Size
    disk: Path
    cluster: RedisCluster
    s3: S3Server
    proxy: S3Proxy
    open_engine: Callable[..., Any]

    @property
    def pool(self) -> Path:
        return self.disk / "pool"

    def engine(self) -> Any:
        """All tiers; units are cold after a second, and the lifecycle makes its rounds all the time."""
        config = PoolConfig(
            memory_bytes=self.size.memory_bytes,
            disk=str(self.pool),
            disk_bytes=self.size.disk_bytes,
            redis=self.cluster.url,
            s3=self.s3.new_url(),
            s3_options=self.s3.options(endpoint=self.proxy.endpoint),
            hmac_key=b"k" * 32,
            freshness_check_interval=0.3,
            write_bytes=self.size.write_bytes,
            thresholds=TierThresholds(hot_hits_per_hour=20, cold_after_s=1.0),
        )
        return self.open_engine(pool=config, **self.size.engine)

    def spoil_redis(self, chance: random.Random) -> int:
        """Spoils every value in Redis, and leaves nothing on the disk that could be read instead."""
        for path in value_files(self.pool):
            path.unlink(missing_ok=True)
        return sum(spoil_redis(chance, node) for node in self.cluster.primaries())


@contextlib.contextmanager
def tiers_of(
    size: Size, open_engine: Callable[..., Any], folder: Path, cluster: RedisCluster, s3: S3Server, proxy: S3Proxy
) -> Iterator[Tiers]:
    with mounted(folder, size.file_system_bytes) as disk:
        yield Tiers(size, disk, cluster, s3, proxy, open_engine)


async def chaos(engine: KiteEngine, disturber: Disturber, callers: Callers, traffic: Sequence[Ask], size: Size) -> None:
    """The traffic with the disturber at work; memory is looked at all the time."""
    watch = MemoryWatch(engine, size.write_bytes)
    with anyio.fail_after(HANGS_S):
        async with anyio.create_task_group() as group:
            group.start_soon(watch.run)
            group.start_soon(disturber.run, size.trouble_gap_s)
            await callers.all_of(traffic)
            group.cancel_scope.cancel()
    print(f"{dict(disturber.done)}; {disturber.spoilt} values spoilt; {watch.grown_bytes // 2**20} MiB grown")
    assert not callers.wrong
    assert callers.answered + callers.cancelled == len(traffic)
    assert watch.violations == []
    assert watch.samples > 100
    assert watch.grown_bytes < MOST_GROWN_BYTES


async def assert_mended(engine: KiteEngine, callers: Callers, traffic: Sequence[Ask]) -> None:
    """Everything is right, nothing is left over, and what is written reaches the tiers again."""
    await callers.all_of(traffic)
    assert not callers.wrong
    await assert_nothing_left(engine)
    await engine.flush()
    await engine.pool.drain()
    tiers = engine.pool.tiers.tiers
    await until(lambda: not any(len(tier._flights) for tier in tiers))
    assert all(tier.counters()["pending_bytes"] == 0 for tier in tiers)
    assert engine.stats()["recycler"]["pending_bytes"] == 0


async def assert_refused(
    engine: KiteEngine, callers: Callers, traffic: Sequence[Ask], tier: str, spoil: Callable[[], int]
) -> None:
    """What was spoilt is asked for, refused and counted, and the answers are right."""
    await engine.invalidate()  # so that all is written anew
    await callers.all_of(traffic)
    await evict_to_pool(engine)
    await engine.pool.drain()
    engine.pool.memory.clear()
    before = engine.stats()["pool"][tier]["refused"]
    assert await anyio.to_thread.run_sync(spoil) > 10
    await callers.all_of(traffic)
    assert not callers.wrong
    assert engine.stats()["pool"][tier]["refused"] > before


async def run(chance: random.Random, tiers: Tiers, *, spoil_all: bool) -> collections.Counter[str]:
    """Chaos, then peace, then perhaps everything spoilt; returns how many tokens came from which tier."""
    size = tiers.size
    prompts = shared_prompts(chance, size.prompts, most=size.most_tokens, vocab_size=size.vocab_size)
    traffic = asks(chance, size.requests, prompts, mean_gap_s=size.gap_s)
    async with tiers.open_engine(pool=PoolConfig(memory_bytes=0), **size.engine) as engine:
        expected = [await cold_answer(engine, prompt, **OPTIONS) for prompt in prompts]
    async with tiers.engine() as engine:
        computes_slowly(engine)
        disturber = Disturber(chance, engine, tiers.cluster, tiers.disk, tiers.pool, tiers.proxy)
        callers = Callers(engine, prompts, expected)
        await chaos(engine, disturber, callers, traffic, size)
        await anyio.to_thread.run_sync(disturber.mend)
        calm = [Ask(index, ONE_STEP, size.gap_s / 2, None) for index in range(len(prompts))]
        await assert_mended(engine, callers, calm)
        stats = engine.stats()["pool"]
        print(*(f"{name}: {counters}" for name, counters in stats.items()), sep="\n")
        assert disturber.spoilt > 0
        assert all(stats[tier]["misses"] > 0 for tier in stats)
        if spoil_all:
            await assert_refused(engine, callers, calm, "disk", lambda: spoil_disk(chance, tiers.pool))
            await assert_refused(engine, callers, calm, "redis", lambda: tiers.spoil_redis(chance))
        print(f"tokens: {dict(callers.tiers)}")
    return callers.tiers


@pytest.mark.usefixtures("quick_breakers", "patient")
async def test_500_requests_in_chaos_are_answered_as_if_nothing_was_ever_reused(
    seed: int,
    open_tiny: Callable[..., Any],
    tmp_path: Path,
    redis_cluster: RedisCluster,
    s3_server: S3Server,
    s3_proxy: Callable[..., S3Proxy],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """B2, B4, B5, B7, B15: content of others, half written, raced, failed or torn, is never given out. B27, B35: memory
    stays in its bounds. B26: a full disk costs values only. B30: background work goes on after every failure. B31, B49:
    nodes die, hang and come back, and no answer is wrong."""
    with tiers_of(TINY, open_tiny, tmp_path / "disk", redis_cluster, s3_server, s3_proxy()) as tiers:
        async with nothing_unnoticed(caplog):
            used = await run(random.Random(seed), tiers, spoil_all=True)
    assert all(used[name] > 0 for name in ("context", "memory", "disk", "redis"))


@pytest.mark.usefixtures("quick_breakers", "patient")
async def test_a_real_model_in_chaos(
    seed: int,
    smollm2_path: Path,
    open_model: Callable[..., Any],
    tmp_path: Path,
    redis_cluster: RedisCluster,
    s3_server: S3Server,
    s3_proxy: Callable[..., S3Proxy],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """B5, B31: the same with a model whose blocks have 360 KiB, and steps that take their time."""
    opening = functools.partial(open_model, smollm2_path)
    with tiers_of(REAL, opening, tmp_path / "disk", redis_cluster, s3_server, s3_proxy()) as tiers:
        async with nothing_unnoticed(caplog):
            await run(random.Random(seed), tiers, spoil_all=False)
