"""The same answer, bit by bit, when another process left what is reused in a Redis Cluster or in S3."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kitelib import KiteEngine, PoolConfig
from kitelib.upcycle.unit import inspect
from tests.support.answers import ONE_STEP, answer, cold_answer, prompt_of
from tests.support.backends import BackendKit
from tests.support.engines import assert_nothing_left, computes_slowly
from tests.support.redis_servers import RedisCluster, RedisServer
from tests.support.s3_server import S3Server
from tests.support.writer_process import write_in_another_process

GREEDY: dict[str, Any] = {"max_tokens": 4, "logprobs": 5, "ignore_eos": True}
SIZES: dict[str, Any] = {"n_ctx": 512, "kv_tokens": 1024}
LENGTHS = (1, 15, 16, 17, 32, 150)
TINY_PROMPTS = [prompt_of(length, 5, vocab_size=2048) for length in LENGTHS]
PATIENT: dict[str, Any] = {"connect_timeout": 10.0, "socket_timeout": 10.0}

Make = Callable[..., dict[str, Any]]

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "replicas": {"replica_reads": True},
    "keys": {"hmac_key": b"k" * 32, "namespace_secret": b"s" * 32},
    "zstd": {"codec": "zstd"},
    "entropy": {"codec": "entropy", "hmac_key": b"k" * 32},
}


@pytest.fixture(params=["redis", "s3"])
def tier(request: pytest.FixtureRequest) -> str:
    """The tier that the processes share."""
    return str(request.param)


@pytest.fixture
def shared(tier: str, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Options of pools that share one empty place there."""
    if tier == "redis":
        cluster: RedisCluster = request.getfixturevalue("redis_cluster")
        return {"redis": cluster.url, **PATIENT}
    server: S3Server = request.getfixturevalue("s3_server")
    return {"s3": server.new_url(), "s3_options": server.options(), **PATIENT}


async def assert_all_hits(engine: KiteEngine, cold: KiteEngine, tier: str, prompts: list[list[int]]) -> None:
    """Each prompt comes from the tier, all but the token that is computed on purpose."""
    computes_slowly(engine)
    for prompt in prompts:
        expected = await cold_answer(cold, prompt, **GREEDY)
        gen = await engine.generate(prompt, reuse=ONE_STEP, **GREEDY)
        assert answer(gen) == expected, len(prompt)
        assert gen.reuse.tiers == ({tier: len(prompt) - 1} if len(prompt) > 1 else {})
        assert gen.reuse.computed_tokens == 1
        assert gen.reuse.exactness == "bitwise"
    stats = engine.stats()["pool"][tier]
    assert (stats["refused"], stats["errors"]) == (0, 0)
    await assert_nothing_left(engine)


@pytest.mark.usefixtures("patient")
async def test_the_first_request_of_another_process_is_all_hits_and_bit_by_bit_the_same(
    model: Path,
    kite_cache: Path,
    open_engine: Callable[..., Any],
    cold_engine: KiteEngine,
    tier: str,
    shared: dict[str, Any],
) -> None:
    """B5, B6, B11: also when the prompt is an exact multiple of the block size; then no model step is needed for it."""
    prompts = [prompt_of(length, seed=8) for length in (16, 17, 130)]
    await write_in_another_process(model, kite_cache, shared, prompts, **SIZES)
    for prompt in prompts:
        expected = await cold_answer(cold_engine, prompt, **GREEDY)
        async with open_engine(model, pool=PoolConfig(**shared), **SIZES) as engine:
            computes_slowly(engine)
            gen = await engine.generate(prompt, **GREEDY)
            assert answer(gen) == expected
            assert (gen.reuse.zero_prefill, gen.usage.cached_tokens) == (True, len(prompt))
            assert engine.stats()["steps"] < GREEDY["max_tokens"]
    async with open_engine(model, pool=PoolConfig(**shared), **SIZES) as engine:
        await assert_all_hits(engine, cold_engine, tier, prompts)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("kit", "tier", "kind"),
    [
        *(("llama_cpp", "redis", kind) for kind in OPTIONS),
        *(("llama_cpp", "s3", kind) for kind in ("keys", "zstd", "entropy")),
        ("torch", "redis", "entropy"),  # its payloads have another type and shape
        ("torch", "s3", "zstd"),
    ],
    indirect=["kit", "tier"],
)
async def test_whatever_the_form_and_the_keys(
    kind: str,
    request: pytest.FixtureRequest,
    kit: BackendKit,
    kite_cache: Path,
    open_engine: Callable[..., Any],
    tier: str,
    shared: dict[str, Any],
) -> None:
    """B2, B22: compressed or not, authenticated or not, from primaries or replicas: the units are what was stored."""
    config = {**shared, **OPTIONS[kind]}
    await write_in_another_process(kit.small(), kite_cache, config, TINY_PROMPTS, **SIZES)
    async with (
        open_engine(kit.small(), pool=PoolConfig(memory_bytes=0), **SIZES) as cold,
        open_engine(kit.small(), pool=PoolConfig(**config), **SIZES) as engine,
    ):
        await assert_all_hits(engine, cold, tier, TINY_PROMPTS)
        await assert_form(engine, config.get("codec"))
    if kind == "replicas":
        cluster: RedisCluster = request.getfixturevalue("redis_cluster")
        assert sum(hits_of(node) for node in cluster.replicas()) > 0
    if "hmac_key" in config:
        wrong = PoolConfig(**{**config, "hmac_key": b"x" * 32})
        async with open_engine(kit.small(), pool=wrong, **SIZES) as engine:
            computes_slowly(engine)
            gen = await engine.generate(TINY_PROMPTS[-1], reuse=ONE_STEP, **GREEDY)
            assert gen.usage.cached_tokens == 0
            assert engine.stats()["pool"][tier]["refused"] > 0


def hits_of(node: RedisServer) -> int:
    """Values that clients of this server have found since it was started."""
    return int(re.search(rb"keyspace_hits:(\d+)", node.call("INFO", "stats"))[1])


async def assert_form(engine: KiteEngine, codec: str | None) -> None:
    """KV in the tier is stored with the codec that was asked for."""
    (tier,) = engine.pool.tiers.tiers
    keys = [item.key async for page in tier.shared.list_items() for item in page if ":kv:" in item.key]
    values = [value for value in await tier.get_many(keys) if value is not None]
    assert len(values) > 150 // 16
    key = engine.pool._keys.own
    codecs = {inspect(value, hmac_key=key).codec for value in values}
    if codec is not None:
        assert codecs == {f"paged_kvcache_v2/{codec}"}


@pytest.mark.usefixtures("patient")
async def test_rounded_units_are_called_approximate_and_never_meet_exact_ones(
    tiny_model: Callable[..., Path],
    kite_cache: Path,
    open_engine: Callable[..., Any],
    tier: str,
    shared: dict[str, Any],
) -> None:
    """B6, B23: what shapes the numbers is in the key, so an exact engine finds nothing rounded, nor the other way."""
    model, prompt = tiny_model("llama"), TINY_PROMPTS[-1]
    rounded = {**shared, "kv_precision": "int8"}
    await write_in_another_process(model, kite_cache, rounded, [prompt], **SIZES)
    async with (
        open_engine(model, pool=PoolConfig(memory_bytes=0), **SIZES) as cold,
        open_engine(model, pool=PoolConfig(**shared), **SIZES) as exact,
        open_engine(model, pool=PoolConfig(**rounded), **SIZES) as approximate,
    ):
        computes_slowly(exact)
        computes_slowly(approximate)
        gen = await exact.generate(prompt, reuse=ONE_STEP, **GREEDY)
        assert (gen.usage.cached_tokens, gen.reuse.exactness) == (0, "bitwise")
        assert answer(gen) == await cold_answer(cold, prompt, **GREEDY)
        await exact.flush()
        await exact.pool.drain()
        gen = await approximate.generate(prompt, reuse=ONE_STEP, **GREEDY)
        assert gen.reuse.tiers == {tier: len(prompt) - 1}
        assert gen.reuse.exactness == "approximate"
        other = prompt_of(100, 6, vocab_size=2048)
        await exact.generate(other, **GREEDY)
        await exact.flush()
        await exact.pool.drain()
        gen = await approximate.generate(other, reuse=ONE_STEP, **GREEDY)
        assert gen.usage.cached_tokens == 0
