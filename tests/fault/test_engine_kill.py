"""An engine that is killed while it writes to its tiers leaves nothing that the next one must not use."""

from __future__ import annotations

import collections
import dataclasses
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from kitelib import KiteEngine, PoolConfig
from tests.support.answers import ONE_STEP, answer, cold_answer
from tests.support.endless_writer import endless_writer
from tests.support.engines import assert_nothing_left, computes_slowly
from tests.support.redis_servers import RedisCluster
from tests.support.traffic import shared_prompts

SEED = int(os.environ.get("KITE_CHAOS_SEED", "20261130"))
GREEDY: dict[str, Any] = {"max_tokens": 2, "logprobs": 2, "ignore_eos": True}
ROUNDS = 5


def killed_while_writing(chance: random.Random, *args: Any, **options: Any) -> int:
    """Kills a process after some of its prompts, or a bit later; returns how many it had computed for sure."""
    with endless_writer(*args, **options) as process:
        done = chance.randrange(1, 25)
        assert process.stdout is not None
        for _ in range(done):
            assert process.stdout.readline(), "the process ended by itself"
        time.sleep(chance.uniform(0.0, 0.05))
        assert process.poll() is None
        return done


async def assert_usable(engine: KiteEngine, prompts: list[list[int]], expected: list[Any]) -> dict[str, int]:
    """All answers are right, and nothing is refused. Returns what was found in which tier."""
    computes_slowly(engine)
    for prompt, cold in zip(prompts, expected, strict=True):
        gen = await engine.generate(prompt, reuse=ONE_STEP, **GREEDY)
        assert answer(gen) == cold
    for name, stats in engine.stats()["pool"].items():
        assert (stats["refused"], stats["errors"]) == (0, 0), name
    await assert_nothing_left(engine)
    return {name: stats["hits"] for name, stats in engine.stats()["pool"].items()}


@pytest.mark.usefixtures("patient")
async def test_an_engine_killed_while_writing_leaves_only_what_is_right(
    tmp_path: Path,
    tiny_model: Callable[..., Path],
    kite_cache: Path,
    open_tiny: Callable[..., Any],
    redis_cluster: RedisCluster,
) -> None:
    """B4: what was not written as a whole is not there. B26: the killed process's half-done work is cleared away."""
    print(f"seed {SEED}")
    chance = random.Random(SEED)
    prompts = shared_prompts(chance, 40, most=200, vocab_size=2048)
    async with open_tiny(pool=PoolConfig(memory_bytes=0)) as engine:
        expected = [await cold_answer(engine, prompt, **GREEDY) for prompt in prompts]
    pool: dict[str, Any] = {"disk": str(tmp_path / "pool"), "redis": redis_cluster.url, "memory_bytes": 2**20}
    config = PoolConfig(**{**pool, "connect_timeout": 10.0, "socket_timeout": 10.0})
    found: collections.Counter[str] = collections.Counter()
    options = {"n_ctx": 256, "kv_tokens": 512, "max_sequences": 4}
    for _ in range(ROUNDS):
        done = await anyio.to_thread.run_sync(
            lambda: killed_while_writing(chance, tiny_model("llama"), kite_cache, pool, prompts, **options)
        )
        async with open_tiny(pool=config) as engine:
            engine.pool.tiers.offer = lambda pending: None  # so that all that is found is from the killed process
            found.update(await assert_usable(engine, prompts, expected))
        # The same units are in Redis as well: without the disk they come from there.
        async with open_tiny(pool=dataclasses.replace(config, disk=None)) as engine:
            engine.pool.tiers.offer = lambda pending: None
            found.update(await assert_usable(engine, prompts, expected))
        print(f"killed after {done} prompts; {dict(found)}")
        async with open_tiny(pool=config) as engine:  # writing goes on where the other was interrupted
            await assert_usable(engine, prompts, expected)
            await engine.flush()
            await engine.pool.drain()
            assert not list((tmp_path / "pool" / "temp").iterdir())
            assert (await engine.invalidate())["disk"] > len(prompts)
    assert found["disk"] > 0
    assert found["redis"] > 0
