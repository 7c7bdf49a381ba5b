"""The sections of a configuration file: what each key means, its default, and what it may hold."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kitelib.config_file import check_bytes, check_choice, check_seconds, section, shown
from kitelib.errors import ConfigError

__all__ = [
    "LifecycleSection",
    "PoolSection",
    "UnitTypeSection",
    "default_disk_folder",
    "redis_tier",
    "unit_types",
]

# Per kind of unit: its serializers, and for each the compressions that it has. The first of each is the default.
_UNIT_TYPES: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "kv_cache": {
        "paged_kvcache_v2": ("auto", "zstd", "entropy", "none"),
        "int8_kv": ("auto", "zstd", "none"),
    },
    "mlp_activation": {"raw": ("none",), "fp16_quant": ("none",)},
}
_BACKENDS: Final = ["memory", "disk", "redis", "redis_cluster", "s3", "tiered"]
_REDIS_SCHEMES: Final = ("redis", "rediss", "redis+cluster", "rediss+cluster", "redis+sentinel", "rediss+sentinel")


def default_disk_folder() -> str:
    """Where the disk tier lives when nobody says: ``kite/pool`` in the user's cache folder, which ``XDG_CACHE_HOME``
    moves."""
    return str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kite" / "pool")


@dataclasses.dataclass(frozen=True, slots=True)
class UnitTypeSection:
    """One entry of ``ru_types``: the stored form of one kind of unit. It is the form in the tiers outside this
    process; the memory tier does not compress.

    Attributes:
        name: "kv_cache", or "mlp_activation": the last-position activations that a unit of kind `logits` keeps.
        serializer: for kv_cache "paged_kvcache_v2" (default, lossless) or "int8_kv" (8-bit integers: half the bytes,
            answers change slightly). For mlp_activation "raw" (default, lossless) or "fp16_quant" (half the bytes);
            an engine with ``numerics="bitwise"`` keeps them lossless whatever stands here.
        compression: for kv_cache "auto" (default: compress where that is faster than the tier), "zstd", "entropy" (not
            for int8_kv) or "none"; for mlp_activation only "none", since there is one such unit per prompt.
    """

    name: str
    serializer: str = ""
    compression: str = ""

    def __post_init__(self) -> None:
        check_choice("name", self.name, list(_UNIT_TYPES))
        serializers = _UNIT_TYPES[self.name]
        if self.serializer == "":
            object.__setattr__(self, "serializer", next(iter(serializers)))
        check_choice("serializer", self.serializer, list(serializers))
        compressions = serializers[self.serializer]
        if self.compression == "":
            object.__setattr__(self, "compression", compressions[0])
        check_choice("compression", self.compression, list(compressions))


@dataclasses.dataclass(frozen=True, slots=True)
class LifecycleSection:
    """``ru_pool.lifecycle``: how long units live.

    Attributes:
        ttl_seconds: seconds after which a unit counts as gone; default 3600; None (``null``) means never.
        freshness_check_interval: seconds between two looks at what other processes declared stale, and between two
            searches for units past their time; default 60. Whether a unit is too old to be used does not depend on
            it: that is looked at whenever the unit is asked for.
    """

    ttl_seconds: float | None = 3600
    freshness_check_interval: float = 60

    def __post_init__(self) -> None:
        if self.ttl_seconds is not None:
            check_seconds("ttl_seconds", self.ttl_seconds)
        check_seconds("freshness_check_interval", self.freshness_check_interval)


@dataclasses.dataclass(frozen=True, slots=True)
class PoolSection:
    """``ru_pool``: where units are kept. Every backend has the process's memory in front of it.

    Keys of a tier that the backend does not have are checked and then left alone, so that one file serves to try
    another backend.

    Attributes:
        backend: "memory" (default); "disk"; "redis"; "redis_cluster"; "s3"; or "tiered": the disk, then Redis if
            `redis_urls` is given, then S3 if `s3_url` is given.
        redis_urls: URLs of Redis; needed by "redis" (one URL) and "redis_cluster" (one or more nodes to begin with).
            ``redis://``, or ``rediss://`` for TLS; "redis" also takes ``redis+sentinel://``, "redis_cluster"
            ``redis+cluster://host:port,host:port``. For "tiered" one URL is a single server and several are a
            cluster. They may hold a password, so they are not shown.
        shard_key: "cf_hash_prefix_4": the first four digits of the fingerprint choose the slot.
        connect_timeout: seconds that opening a connection to Redis or S3 may take; default 0.5.
        socket_timeout: seconds that Redis or S3 may stay silent within a call; default 0.3.
        lifecycle: see `LifecycleSection`.
        memory_bytes: bound of the memory tier, bytes; None (default) means a quarter of what is available; 0 turns
            it off.
        disk_path: folder of the disk tier; None (default) is `default_disk_folder`. ``~`` is the user's home.
        disk_bytes: bound of the disk tier, bytes on the disk; default 20 GiB.
        s3_url: ``s3://bucket/prefix``; needed by "s3". Region, endpoint and credentials come from the usual
            ``AWS_...`` variables.
    """

    backend: str = "memory"
    redis_urls: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    shard_key: str = "cf_hash_prefix_4"
    connect_timeout: float = 0.5
    socket_timeout: float = 0.3
    lifecycle: LifecycleSection = LifecycleSection()
    memory_bytes: int | None = None
    disk_path: str | None = None
    disk_bytes: int = 20 * 2**30
    s3_url: str | None = None

    def __post_init__(self) -> None:
        check_choice("backend", self.backend, _BACKENDS)
        if isinstance(self.redis_urls, str) or not isinstance(self.redis_urls, Sequence):
            raise ConfigError(f"redis_urls is a {type(self.redis_urls).__name__}; give a list of redis:// URLs")
        object.__setattr__(self, "redis_urls", tuple(self.redis_urls))
        check_choice("shard_key", self.shard_key, ["cf_hash_prefix_4"])
        check_seconds("connect_timeout", self.connect_timeout)
        check_seconds("socket_timeout", self.socket_timeout)
        if self.memory_bytes is not None:
            check_bytes("memory_bytes", self.memory_bytes, least=0)
        if self.disk_path is not None and (not isinstance(self.disk_path, str) or not self.disk_path):
            raise ConfigError(f"disk_path is {shown(self.disk_path)}; give the path of a folder")
        check_bytes("disk_bytes", self.disk_bytes)
        if self.s3_url is not None and (not isinstance(self.s3_url, str) or not self.s3_url.startswith("s3://")):
            raise ConfigError(f"s3_url is {shown(self.s3_url)}; give one like s3://bucket/prefix")
        if self.backend == "s3" and self.s3_url is None:
            raise ConfigError("s3_url is not given, but the backend is 's3'; add one like s3://bucket/prefix")
        parts = [_RedisUrl.read(f"redis_urls[{index}]", url) for index, url in enumerate(self.redis_urls)]
        if self.backend in ("redis", "redis_cluster") and not parts:
            raise ConfigError(
                f"redis_urls is not given, but the backend is {self.backend!r}; add a list like [redis://host:6379]"
            )
        if self.backend in ("redis", "redis_cluster", "tiered"):
            _joined(self.backend, parts)

    @property
    def disk_folder(self) -> str:
        """The folder that the disk tier uses, if the backend has one."""
        return default_disk_folder() if self.disk_path is None else os.path.expanduser(self.disk_path)


def redis_tier(pool: PoolSection) -> str | None:
    """The one URL of the Redis tier that a section describes, as `PoolConfig.redis` takes it; None if it has none."""
    if pool.backend not in ("redis", "redis_cluster", "tiered"):
        return None
    return _joined(
        pool.backend, [_RedisUrl.read(f"redis_urls[{index}]", url) for index, url in enumerate(pool.redis_urls)]
    )


def unit_types(value: Any, place: str) -> tuple[UnitTypeSection, ...]:
    """The entries of ``ru_types``, out of the plain value in a file.

    Raises:
        ConfigError: it is no list of such entries.
    """
    if not isinstance(value, list):
        raise ConfigError(f"{place} is {shown(value)}; give a list of entries with name, serializer and compression")
    return tuple(
        section(UnitTypeSection, each, f"{place}[{index}]", required=("name",)) for index, each in enumerate(value)
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _RedisUrl:
    """A URL in its parts, as written: ``scheme://login@hosts/path?query``. Not shown, it may hold a password."""

    place: str
    scheme: str
    login: str = dataclasses.field(repr=False)
    hosts: str
    path: str
    query: str = dataclasses.field(repr=False)

    @classmethod
    def read(cls, place: str, url: Any) -> _RedisUrl:
        if not isinstance(url, str) or url.partition("://")[0] not in _REDIS_SCHEMES:
            kind = "another URL" if isinstance(url, str) else f"a {type(url).__name__}"
            raise ConfigError(f"{place} is {kind}; give one that starts with redis:// or rediss://")
        scheme, _, rest = url.partition("://")
        rest, _, query = rest.partition("?")
        # Not urllib's split: a list of hosts is none to it. The last @ ends the login, which is quoted.
        authority, _, path = rest.partition("/")
        login, _, hosts = authority.rpartition("@")
        if not all(hosts.split(",")):
            raise ConfigError(f"{place} names no host; give one like redis://host:6379")
        return cls(place, scheme, login, hosts, path.strip("/"), query)

    @property
    def kind(self) -> str:
        """What follows the + of the scheme: "cluster" or "sentinel"; "" is a single server."""
        return self.scheme.partition("+")[2]

    @property
    def url(self) -> str:
        login = f"{self.login}@" if self.login else ""
        path = f"/{self.path}" if self.path else ""
        query = f"?{self.query}" if self.query else ""
        return f"{self.scheme}://{login}{self.hosts}{path}{query}"


def _joined(backend: str, parts: Sequence[_RedisUrl]) -> str | None:
    """One URL out of those of a file."""
    if not parts:
        return None
    first = parts[0]
    for part in parts[1:]:
        if part.scheme != first.scheme:
            raise ConfigError(
                f"{part.place} starts with {part.scheme}:// and {first.place} with {first.scheme}://; "
                "all nodes are reached the same way, so give all the same"
            )
        if first.kind == "sentinel":
            raise ConfigError(f"{part.place} is a second sentinel URL; list all sentinels in one, separated by commas")
    if backend == "redis" and len(parts) > 1:
        raise ConfigError(
            f"redis_urls has {len(parts)} URLs, but the backend 'redis' is a single server; give one, or use the "
            "backend 'redis_cluster'"
        )
    if backend == "redis" and first.kind == "cluster":
        raise ConfigError(f"{first.place} is the URL of a cluster; use the backend 'redis_cluster' for it")
    if backend == "redis_cluster" and first.kind == "sentinel":
        raise ConfigError(f"{first.place} is the URL of sentinels; use the backend 'redis' for them")
    if backend == "redis_cluster" or len(parts) > 1:
        return _cluster(parts)
    return first.url


def _cluster(parts: Sequence[_RedisUrl]) -> str:
    """The URL of a cluster out of those of some of its nodes; what only one of them says, a login say, is for all."""
    found = {"login": "", "query": ""}
    for part in parts:
        if part.path not in ("", "0"):
            raise ConfigError(f"{part.place} names a database, but a cluster has only number 0; leave it out")
        for name, words in (("login", "user or password"), ("query", "options after the '?'")):
            value = getattr(part, name)
            if value and found[name] and value != found[name]:
                raise ConfigError(f"{part.place} has another {words} than the URL before it; a cluster has one")
            found[name] = value or found[name]
    tls = "rediss" if parts[0].scheme.startswith("rediss") else "redis"
    hosts = dict.fromkeys(host for part in parts for host in part.hosts.split(","))
    login = f"{found['login']}@" if found["login"] else ""
    query = f"?{found['query']}" if found["query"] else ""
    return f"{tls}+cluster://{login}{','.join(hosts)}{query}"
