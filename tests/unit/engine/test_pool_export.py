"""What engines use most goes from their pool into a bundle, and answers like it in an engine that never saw them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

from kitelib import ConfigError, InvalidRequestError, PoolConfig, ReusePolicy
from kitelib.cli import main as cli
from kitelib.runtime.threads import ThreadDoor
from kitelib.stores.pool import RUPool
from tests.support.bundles import open_bundle
from tests.support.engines import some_tokens
from tests.support.redis_servers import RedisServer

# A start in common, and one of its own; a block has 16 tokens.
START = some_tokens(40)
HOT, COLD = [*START, *range(100, 130)], [*START, *range(200, 230)]


async def ask(engine: Any, prompt: list[int], times: int) -> None:
    for _ in range(times):
        await engine.generate(prompt, max_tokens=2, ignore_eos=True)
        await engine.flush()


async def test_a_running_engine_exports_what_it_uses_most(open_tiny: Callable[..., Any], tmp_path: Path) -> None:
    """Without any tier: from its own memory, as it counted itself."""
    path = tmp_path / "hot.kite"
    async with open_tiny() as engine:
        with pytest.raises(ConfigError, match="has no hits of the model"):
            await engine.pool.export(path)
        await ask(engine, COLD, 2)  # the first finds nothing
        await ask(engine, HOT, 4)  # the first finds the start
        summary = await engine.pool.export(path, min_hits=3)
    assert (summary.fewest_hits, summary.refused, summary.lost) == (3, 0, 0)
    assert summary.bundle.tokens == len(HOT)
    hits = sorted(unit.hits for unit in (await open_bundle(path)).units if unit.kind == "kv")
    assert hits == [3, 3, 3, 5, 5]  # of the start all that found it
    async with open_tiny(pool=PoolConfig(memory_bytes=0)) as other:
        fresh = await other.generate(HOT, max_tokens=6, ignore_eos=True, logprobs=3, reuse=ReusePolicy(mode="off"))
        await other.preload(path)
        hot = await other.generate(HOT, max_tokens=6, ignore_eos=True, logprobs=3)
        assert hot.usage.cached_tokens == len(HOT)
        assert hot.reuse.tiers == {"bundle": len(HOT)}
        assert (hot.token_ids, hot.logprobs) == (fresh.token_ids, fresh.logprobs)


@pytest.mark.parametrize("tier", ["disk", "redis"])
async def test_hits_of_a_fleet_outlive_its_engines(
    open_tiny: Callable[..., Any], redis_server: RedisServer, tmp_path: Path, tier: str
) -> None:
    """Two engines one after the other; then the command, which has no model, and an engine that adds to them."""
    where = str(tmp_path / "pool") if tier == "disk" else redis_server.url
    config = PoolConfig(**{tier: where})
    for _ in range(2):
        async with open_tiny(pool=config) as engine:
            await ask(engine, HOT, 2)
    options = ["bundle", "export", "--from-pool", where, "--min-hits", "3", "-o", str(tmp_path / "cli.kite")]
    assert await anyio.to_thread.run_sync(cli.main, options) == 0
    bundle = await open_bundle(tmp_path / "cli.kite")
    assert {unit.hits for unit in bundle.units} == {3.0}  # all but the very first
    assert [root.namespace for root in bundle.manifest.roots] == [None]
    async with open_tiny(pool=config) as engine:
        assert bundle.manifest.roots[0].execution_path == engine._current.execution_path
        await ask(engine, HOT, 1)
        summary = await engine.pool.export(tmp_path / "api.kite")
        assert summary.fewest_hits == 4
        await engine.preload(tmp_path / "cli.kite")


async def test_tenants_are_exported_by_name_only(open_tiny: Callable[..., Any], tmp_path: Path) -> None:
    config = PoolConfig(disk=str(tmp_path / "pool"), hmac_key=b"k" * 32, namespace_secret=b"s" * 32)
    policy = ReusePolicy(namespace="tenant-a")
    async with open_tiny(pool=config) as engine:
        for _ in range(3):
            await engine.generate(HOT, max_tokens=2, ignore_eos=True, reuse=policy)
            await engine.flush()
        with pytest.raises(ConfigError, match="none in the namespaces that were asked for"):
            await engine.pool.export(tmp_path / "own.kite")
        await engine.pool.export(tmp_path / "tenant.kite", namespaces=("tenant-a",))
    files = [each for each in (tmp_path / "pool").rglob("*") if each.is_file()]
    assert any(b"private" in each.read_bytes() for each in files)
    assert not any(b"tenant-a" in each.read_bytes() for each in files)
    async with open_tiny(pool=PoolConfig(memory_bytes=0, hmac_key=b"k" * 32, namespace_secret=b"s" * 32)) as other:
        await other.preload(tmp_path / "tenant.kite")
        assert (await other.generate(HOT, max_tokens=2, reuse=policy)).reuse.tiers == {"bundle": len(HOT)}
        assert (await other.generate(HOT, max_tokens=2)).usage.cached_tokens == 0


async def test_requests_without_reuse_count_nothing(open_tiny: Callable[..., Any], tmp_path: Path) -> None:
    async with open_tiny() as engine:
        for _ in range(3):
            await engine.generate(HOT, max_tokens=2, reuse=ReusePolicy(mode="off"))
        with pytest.raises(ConfigError, match="has no hits"):
            await engine.pool.export(tmp_path / "hot.kite")


async def test_a_pool_without_an_engine_says_so(tmp_path: Path) -> None:
    pool = RUPool(PoolConfig(memory_bytes=2**20), ThreadDoor())
    with pytest.raises(InvalidRequestError, match="only the pool of an engine can be exported"):
        await pool.export(tmp_path / "hot.kite")
    await pool.aclose()
