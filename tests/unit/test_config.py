"""`KiteConfig`: what a configuration file may say, what is told about mistakes in it, and what it does to an engine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml

from kitelib import ConfigError, KiteConfig, KiteEngine, PoolConfig, ReusePolicy
from kitelib.config import LifecycleSection, PoolSection, UnitTypeSection

FULL = """\
ru_slicing: {llama: 16, qwen: 32, phi: 8}
ru_types:
  - {name: kv_cache, serializer: paged_kvcache_v2, compression: zstd}
  - {name: mlp_activation, serializer: fp16_quant}
ru_pool:
  backend: redis_cluster            # memory | disk | redis | redis_cluster | s3 | tiered
  redis_urls: ["redis://node1:6379"]
  shard_key: cf_hash_prefix_4
  connect_timeout: 0.5
  socket_timeout: 0.3
  lifecycle: {ttl_seconds: 3600, freshness_check_interval: 60}
"""

Parse = Callable[[str], KiteConfig]


@pytest.fixture
def parse(tmp_path: Path) -> Parse:
    def from_text(text: str) -> KiteConfig:
        path = tmp_path / "upcycle_config.yaml"
        path.write_text(text, encoding="utf-8")
        return KiteConfig.from_yaml(path)

    return from_text


@pytest.mark.parametrize("name", ["neighbours", "zero_prefill", "completions", "drafts"])
@pytest.mark.parametrize("value", ["off", "no", 0, None])
def test_switches_of_a_policy_are_switches(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        ReusePolicy(**{name: value})


def test_near_questions_are_part_of_the_semantic_mode() -> None:
    with pytest.raises(ConfigError, match="mode='semantic'"):
        ReusePolicy(neighbours=True)
    assert ReusePolicy(mode="semantic", neighbours=True).neighbours


def test_the_documented_file_says_what_it_says(parse: Parse) -> None:
    assert parse(FULL) == KiteConfig(
        ru_slicing={"llama": 16, "qwen": 32, "phi": 8},
        ru_types=(
            UnitTypeSection("kv_cache", "paged_kvcache_v2", "zstd"),
            UnitTypeSection("mlp_activation", "fp16_quant", "none"),
        ),
        ru_pool=PoolSection(
            backend="redis_cluster",
            redis_urls=("redis://node1:6379",),
            shard_key="cf_hash_prefix_4",
            connect_timeout=0.5,
            socket_timeout=0.3,
            lifecycle=LifecycleSection(ttl_seconds=3600, freshness_check_interval=60),
        ),
    )


def test_what_is_left_out_is_as_documented_but_in_memory_and_lossless(parse: Parse) -> None:
    documented = yaml.safe_load(FULL)
    documented["ru_pool"] |= {"backend": "memory", "redis_urls": []}
    documented["ru_types"] = [{"name": "kv_cache", "serializer": "paged_kvcache_v2"}, {"name": "mlp_activation"}]
    assert KiteConfig() == parse(yaml.safe_dump(documented))
    pool = KiteConfig().to_pool_config()
    assert (pool.codec, pool.kv_precision, pool.logits_codec) == ("auto", "exact", "raw")


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "{}", "ru_pool:\nru_types:\nru_slicing:\n", "ru_pool: {lifecycle: }"]
)
def test_nothing_said_is_the_default(parse: Parse, text: str) -> None:
    assert parse(text) == KiteConfig()


# Every backend as a pool


def test_the_documented_file_as_a_pool(parse: Parse) -> None:
    assert parse(FULL).to_pool_config() == PoolConfig(
        redis="redis+cluster://node1:6379",
        ttl_seconds=3600,
        connect_timeout=0.5,
        socket_timeout=0.3,
        freshness_check_interval=60,
        codec="zstd",
        kv_precision="exact",
        logits_codec="fp16_quant",
    )


def pool_of(parse: Parse, pool: str) -> PoolConfig:
    return parse(f"ru_pool: {{{pool}, lifecycle: {{ttl_seconds: null}}}}").to_pool_config()


def test_an_empty_folder_name_is_no_disk_tier() -> None:
    with pytest.raises(ConfigError, match=r"PoolConfig\.disk is empty"):
        PoolConfig(disk="")


def test_a_pool_in_memory(parse: Parse) -> None:
    assert pool_of(parse, "backend: memory") == PoolConfig()
    assert pool_of(parse, "memory_bytes: 0") == PoolConfig(memory_bytes=0)


def test_the_lite_bound_on_units(parse: Parse) -> None:
    config = parse("yoco_lite_cache_size: 1000")
    assert config.yoco_lite_cache_size == 1000
    assert config.to_pool_config() == PoolConfig(ttl_seconds=3600, yoco_lite_cache_size=1000)
    assert parse("yoco_lite_cache_size: null").to_pool_config().yoco_lite_cache_size is None
    assert PoolConfig().yoco_lite_cache_size is None


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "true", "many", "[1000]"])
def test_a_bound_on_units_is_a_whole_number(parse: Parse, value: str) -> None:
    with pytest.raises(ConfigError, match=r"yoco_lite_cache_size is .*; give a whole number"):
        parse(f"yoco_lite_cache_size: {value}")
    with pytest.raises(ConfigError, match=r"PoolConfig\.yoco_lite_cache_size is .*; give a whole number"):
        PoolConfig(yoco_lite_cache_size=yaml.safe_load(value))


def test_keys_of_other_tiers_are_left_alone(parse: Parse) -> None:
    others = "redis_urls: [redis://a, redis://b], s3_url: s3://bucket, disk_path: /pool"
    assert pool_of(parse, f"backend: memory, {others}") == PoolConfig()
    assert pool_of(parse, f"backend: disk, {others}") == PoolConfig(disk="/pool")


def test_a_pool_on_disk(parse: Parse, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pool_of(parse, "backend: disk, disk_path: /pool, disk_bytes: 1000000") == PoolConfig(
        disk="/pool", disk_bytes=1_000_000
    )
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert pool_of(parse, "backend: disk, disk_path: ~/pool").disk == "/home/ada/pool"
    assert pool_of(parse, "backend: disk").disk == "/home/ada/.cache/kite/pool"
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/ada")
    assert pool_of(parse, "backend: disk").disk == "/var/cache/ada/kite/pool"


@pytest.mark.parametrize(
    ("urls", "joined"),
    [
        ("redis, redis_urls: [redis://a]", "redis://a"),
        ("redis, redis_urls: ['rediss://ada:pw@a:6380/2?x=1']", "rediss://ada:pw@a:6380/2?x=1"),
        ("redis, redis_urls: ['redis+sentinel://:pw@a:1,b:2/main/0']", "redis+sentinel://:pw@a:1,b:2/main/0"),
        ("redis_cluster, redis_urls: [redis://a]", "redis+cluster://a"),
        ("redis_cluster, redis_urls: [redis://a:1, redis://b:2]", "redis+cluster://a:1,b:2"),
        ("redis_cluster, redis_urls: [rediss://a:1/0, rediss://b:2/]", "rediss+cluster://a:1,b:2"),
        ("redis_cluster, redis_urls: ['redis://a:1', 'redis://a:1', 'redis://[::1]:2']", "redis+cluster://a:1,[::1]:2"),
        ("redis_cluster, redis_urls: ['redis://ada:p%40w@a', redis://b]", "redis+cluster://ada:p%40w@a,b"),
        ("redis_cluster, redis_urls: [redis://a, 'redis://:pw@b?x=1']", "redis+cluster://:pw@a,b?x=1"),
        ("redis_cluster, redis_urls: ['rediss+cluster://:pw@a:1,b:2']", "rediss+cluster://:pw@a:1,b:2"),
        ("tiered, redis_urls: [redis://a]", "redis://a"),
        ("tiered, redis_urls: [redis://a, redis://b]", "redis+cluster://a,b"),
        ("tiered, redis_urls: ['redis+cluster://a']", "redis+cluster://a"),
        ("tiered", None),
    ],
)
def test_redis_urls_become_one(parse: Parse, urls: str, joined: str | None) -> None:
    assert pool_of(parse, f"backend: {urls}").redis == joined


def test_a_pool_of_all_tiers(parse: Parse) -> None:
    text = "backend: tiered, disk_path: /pool, redis_urls: [redis://a], s3_url: s3://bucket/kite, connect_timeout: 2"
    assert pool_of(parse, text) == PoolConfig(disk="/pool", redis="redis://a", s3="s3://bucket/kite", connect_timeout=2)


def test_a_pool_on_s3(parse: Parse) -> None:
    assert pool_of(parse, "backend: s3, s3_url: s3://bucket/kite, socket_timeout: 3") == PoolConfig(
        s3="s3://bucket/kite", socket_timeout=3
    )


@pytest.mark.parametrize(
    ("types", "codec", "precision", "logits"),
    [
        ("[]", "auto", "exact", "raw"),
        ("[{name: kv_cache, compression: none}]", "none", "exact", "raw"),
        ("[{name: kv_cache, compression: entropy}]", "entropy", "exact", "raw"),
        ("[{name: kv_cache, serializer: int8_kv}]", "auto", "int8", "raw"),
        ("[{name: mlp_activation, serializer: fp16_quant}]", "auto", "exact", "fp16_quant"),
        ("[{name: mlp_activation}]", "auto", "exact", "raw"),
    ],
)
def test_ru_types_set_the_stored_form(parse: Parse, types: str, codec: str, precision: str, logits: str) -> None:
    pool = parse(f"ru_types: {types}").to_pool_config()
    assert (pool.codec, pool.kv_precision, pool.logits_codec) == (codec, precision, logits)


def test_block_tokens_for_takes_the_longest_prefix(parse: Parse) -> None:
    config = parse("ru_slicing: {qwen: 32, qwen3: 64, llama: 8}")
    assert [config.block_tokens_for(name) for name in ("qwen2", "qwen3", "qwen3moe", "llama", "phi3", "")] == [
        32, 64, 64, 8, None, None,
    ]  # fmt: skip


MISTAKES = [
    (
        "ru_polo: {}",
        r"the file has the unknown key 'ru_polo'; did you mean 'ru_pool'\? There are: ru_slicing, ru_types",
    ),
    ("ru_polo:", "the file has the unknown key 'ru_polo'"),
    ("1: 2", "the file has the unknown key 1; did you mean"),
    ("[1]", r"the file is \[1\]; give a mapping with the keys ru_slicing, ru_types, ru_pool"),
    ("hello", "the file is 'hello'; give a mapping"),
    ("ru_pool: [1]", r"ru_pool is \[1\]; give a mapping with the keys backend"),
    ("ru_pool: {conect_timeout: 1}", "ru_pool has the unknown key 'conect_timeout'; did you mean 'connect_timeout'"),
    ("ru_pool: {lifecycle: {ttl: 1}}", "ru_pool.lifecycle has the unknown key 'ttl'; did you mean 'ttl_seconds'"),
    ("ru_pool: {lifecycle: 3}", "ru_pool.lifecycle is 3; give a mapping"),
    ("ru_pool: {lifecycle: {ttl_seconds: 1h}}", "ru_pool.lifecycle.ttl_seconds is '1h'; give a positive number"),
    ("ru_pool: {lifecycle: {freshness_check_interval: 0}}", "ru_pool.lifecycle.freshness_check_interval is 0; give"),
    ("ru_pool: {connect_timeout: yes}", "ru_pool.connect_timeout is True; give a positive number of seconds"),
    ("ru_pool: {socket_timeout: .inf}", "ru_pool.socket_timeout is inf; give a positive number of seconds"),
    ("ru_pool: {socket_timeout: null}", "ru_pool.socket_timeout is None; give a positive number of seconds"),
    ("ru_pool: {backend: mem}", r"ru_pool.backend is 'mem'; did you mean 'memory'\? There are: memory, disk, redis"),
    ("ru_pool: {backend: [memory]}", r"ru_pool.backend is \['memory'\]; did you mean 'memory'"),
    ("ru_pool: {shard_key: cf}", "ru_pool.shard_key is 'cf'; did you mean 'cf_hash_prefix_4'"),
    ("ru_pool: {redis_urls: redis://a}", "ru_pool.redis_urls is a str; give a list of redis:// URLs"),
    ("ru_pool: {redis_urls: [redis://a, 7]}", r"ru_pool.redis_urls\[1\] is a int; give one that starts with redis://"),
    ("ru_pool: {backend: redis}", r"ru_pool.redis_urls is not given, but the backend is 'redis'; add a list"),
    (
        "ru_pool: {backend: redis_cluster, redis_urls: []}",
        "ru_pool.redis_urls is not given, but the backend is 'redis_c",
    ),
    ("ru_pool: {backend: s3}", "ru_pool.s3_url is not given, but the backend is 's3'; add one like s3://bucket/prefix"),
    ("ru_pool: {s3_url: https://bucket}", "ru_pool.s3_url is 'https://bucket'; give one like s3://bucket/prefix"),
    ("ru_pool: {disk_path: 7}", "ru_pool.disk_path is 7; give the path of a folder"),
    ("ru_pool: {disk_bytes: 20G}", "ru_pool.disk_bytes is '20G'; give a positive number of bytes"),
    ("ru_pool: {disk_bytes: 0}", "ru_pool.disk_bytes is 0; give a positive number of bytes"),
    ("ru_pool: {memory_bytes: -1}", "ru_pool.memory_bytes is -1; give 0 or a number of bytes"),
    ("ru_pool: {redis_urls: ['redis://']}", r"ru_pool.redis_urls\[0\] names no host; give one like redis://host:6379"),
    (
        "ru_pool: {backend: redis, redis_urls: [redis://a, redis://b]}",
        "ru_pool.redis_urls has 2 URLs, but the backend 'redis' is a single server; give one, or use the backend",
    ),
    (
        "ru_pool: {backend: redis, redis_urls: ['redis+cluster://a']}",
        r"ru_pool.redis_urls\[0\] is the URL of a cluster; use the backend 'redis_cluster'",
    ),
    (
        "ru_pool: {backend: redis_cluster, redis_urls: ['redis+sentinel://a/main']}",
        r"ru_pool.redis_urls\[0\] is the URL of sentinels; use the backend 'redis'",
    ),
    (
        "ru_pool: {backend: redis_cluster, redis_urls: [redis://a, rediss://b]}",
        r"ru_pool.redis_urls\[1\] starts with rediss:// and redis_urls\[0\] with redis://; all nodes",
    ),
    (
        "ru_pool: {backend: redis_cluster, redis_urls: ['redis://:a@a', 'redis://:b@b']}",
        r"ru_pool.redis_urls\[1\] has another user or password than the URL before it; a cluster has one",
    ),
    (
        "ru_pool: {backend: redis_cluster, redis_urls: [redis://a/3]}",
        r"ru_pool.redis_urls\[0\] names a database, but a cluster has only number 0",
    ),
    ("ru_slicing: 16", "ru_slicing is 16; give a mapping"),
    ("ru_slicing: {llama: 0}", "ru_slicing.llama is 0; give a whole number of tokens from 1 to 256"),
    ("ru_slicing: {llama: '16'}", "ru_slicing.llama is '16'; give a whole number"),
    ("ru_slicing: {llama: 257}", "ru_slicing.llama is 257; give a whole number"),
    ("ru_slicing: {3: 16}", "ru_slicing has the key 3; give the start of an architecture's name"),
    ("ru_types: {name: kv_cache}", r"ru_types is \{'name': 'kv_cache'\}; give a list of entries"),
    ("ru_types: [{serializer: int8_kv}]", r"ru_types\[0\] has no 'name'; add it"),
    ("ru_types: [{name: kv}]", r"ru_types\[0\].name is 'kv'; did you mean 'kv_cache'"),
    (
        "ru_types: [{name: kv_cache, codec: x}]",
        r"ru_types\[0\] has the unknown key 'codec'; did you mean 'compression'",
    ),
    ("ru_types: [{name: kv_cache, serializer: fp16_quant}]", r"ru_types\[0\].serializer is 'fp16_quant'; did you mean"),
    (
        "ru_types: [{name: kv_cache, compression: gzip}]",
        r"ru_types\[0\].compression is 'gzip'; .*There are: auto, zstd, entropy, none",
    ),
    (
        "ru_types: [{name: mlp_activation, serializer: fp16_quant, compression: zstd}]",
        r"ru_types\[0\].compression is 'zstd'; did you mean 'none'",
    ),
    (
        "ru_types: [{name: kv_cache, serializer: int8_kv, compression: entropy}]",
        r"ru_types\[0\].compression is 'entropy'; did you mean .*There are: auto, zstd, none",
    ),
    ("ru_types: [{name: kv_cache}, {name: kv_cache}]", r"ru_types\[1\].name is 'kv_cache' again"),
]


@pytest.mark.parametrize(("text", "message"), MISTAKES)
def test_a_mistake_is_told_with_file_place_value_and_remedy(parse: Parse, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"upcycle_config.yaml: {message}"):
        parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ru_pool:\n  backend: memory\n bad: 1\n", "line 3, column 2: .*; correct the YAML there"),
        ("ru_pool: {backend: memory", "line 1, column 26: "),
        ("ru_pool: !!python/object/apply:os.getcwd []", "line 1, column 10: could not determine a constructor"),
        ("a: 1\n---\nb: 2\n", "line 2, column 1: but found another document"),
        ("ru_pool: \x00", "is no valid YAML: .*unacceptable character"),
        ("ru_pool: 2020-13-45", "is no valid YAML: .*month must be in 1..12"),
        ("[" * 5000, "is no valid YAML: .*recursion"),
    ],
)
def test_broken_yaml_is_a_config_error(parse: Parse, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"upcycle_config.yaml:? {message}"):
        parse(text)


def test_a_huge_value_out_of_a_small_file_makes_a_short_message(parse: Parse) -> None:
    lines = ["ru_slicing:", "  a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"  a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    lines += ["ru_types: *a11", "ru_pool: {redis_urls: *a11}"]
    with pytest.raises(ConfigError, match=r"ru_types\[0\] is ") as caught:
        parse("\n".join(lines))
    assert len(str(caught.value)) < 5_000


def test_a_file_that_cannot_be_read_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no configuration file at '.*none.yaml'; check the path"):
        KiteConfig.from_yaml(str(tmp_path / "none.yaml"))
    with pytest.raises(ConfigError, match="can't be read: Is a directory"):
        KiteConfig.from_yaml(tmp_path)


@pytest.mark.parametrize(
    "pool",
    [
        "{redis_urls: ['http://:hunter2@node1']}",
        "{backend: redis_cluster, redis_urls: ['redis://:hunter2@a/1']}",
        "{backend: redis_cluster, redis_urls: ['redis://:hunter2@a', 'redis://:other@b']}",
        "{backend: redis, redis_urls: ['redis://ada:hunter2@a', 'redis://b']}",
        "{backend: redis, redis_urls: ['redis+cluster://:hunter2@a']}",
        "{redis_urls: ['redis://:hunter2@']}",
        "{redis_urls: redis://:hunter2@node1}",
        "{s3_url: 'https://ada:hunter2@node1'}",
        "{disk_path: 'redis://:hunter2@node1', backend: 'redis://:hunter2@node1'}",
        "['redis://:hunter2@node1']",
        "'redis://ada:%s@node1'" % ("x" * 60 + "hunter2"),
    ],
)
def test_a_password_is_in_no_message(parse: Parse, pool: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(f"ru_pool: {pool}")
    assert "hunter2" not in str(caught.value)


def test_a_password_is_in_no_repr(parse: Parse) -> None:
    config = parse("ru_pool: {backend: redis, redis_urls: ['redis://:hunter2@node1']}")
    assert "hunter2" not in repr(config)
    assert "hunter2" not in repr(config.to_pool_config())
    assert "hunter2" in str(config.to_pool_config().redis)


def test_a_config_made_in_code_is_checked_too() -> None:
    with pytest.raises(ConfigError, match="ru_slicing.llama is 0"):
        KiteConfig(ru_slicing={"llama": 0})
    with pytest.raises(ConfigError, match="PoolConfig.ttl_seconds is -1"):
        PoolConfig(ttl_seconds=-1)
    with pytest.raises(ConfigError, match=r"PoolConfig.disk_bytes is '20G'; give a positive number of bytes"):
        PoolConfig(disk_bytes="20G")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r'PoolConfig.codec is "entropy", which 8-bit integers'):
        PoolConfig(codec="entropy", kv_precision="int8")
    assert PoolConfig(disk=Path("/pool")).disk == "/pool"  # type: ignore[arg-type]
    table = {"llama": 16}
    config = KiteConfig(ru_slicing=table)
    table["llama"] = 0
    assert config.block_tokens_for("llama") == 16


def test_yaml_is_only_loaded_for_a_file() -> None:
    code = "import sys, kitelib.config; print('yaml' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


# What it does to an engine


@pytest.fixture
def open_with(tiny_model: Callable[..., Path], tmp_path: Path) -> Callable[..., Any]:
    def opening(config: KiteConfig, **options: Any) -> Any:
        model = tiny_model("llama")
        return KiteEngine.open(
            model, config=config, n_ctx=256, threads=1, max_sequences=2, cache_dir=tmp_path, **options
        )

    return opening


async def test_ru_slicing_sets_the_block_size(open_with: Callable[..., Any]) -> None:
    async with open_with(KiteConfig(ru_slicing={"llama": 8})) as engine:
        assert engine.stats()["block_tokens"] == 8
    async with open_with(KiteConfig(ru_slicing={"qwen": 8})) as engine:
        assert engine.stats()["block_tokens"] == 16
    async with open_with(KiteConfig(ru_slicing={"llama": 8}), block_tokens=32) as engine:
        assert engine.stats()["block_tokens"] == 32


async def test_units_past_their_time_are_gone_from_the_pool(open_with: Callable[..., Any]) -> None:
    prompt = list(range(10, 50))
    for ttl_seconds, kept in ((None, True), (0.01, False)):
        config = KiteConfig(ru_pool=PoolSection(lifecycle=LifecycleSection(ttl_seconds=ttl_seconds)))
        async with open_with(config) as engine:
            await engine.preheat([prompt])
            assert engine.stats()["recycler"]["registered"] > 0
            await anyio.sleep(0.05)
            memory = engine.pool.memory
            assert any(map(memory.contains, memory.keys())) is kept


def test_a_pool_from_both_places_is_refused(open_with: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="pool= and config= are both given"):
        open_with(KiteConfig(), pool=PoolConfig())
