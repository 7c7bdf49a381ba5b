"""The shared tiers that a `kite pool` command works on, opened and listed."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final

import anyio

from kitelib.abc import SharedStore, StoredItem, StoreStats
from kitelib.cli.pool_options import pool_choice
from kitelib.config import KiteConfig, PoolConfig
from kitelib.errors import ConfigError, FormatError, StoreError
from kitelib.upcycle.unit import HEAD_BYTES, MAX_DATA_BYTES, UnitHead, peek

__all__ = [
    "MAX_VALUE_BYTES",
    "Found",
    "Tier",
    "on_all_tiers",
    "open_tiers",
    "pool_config_of",
    "problems",
    "read_values",
    "scan",
    "tiers_of",
    "with_heads",
    "with_times",
]

_KEY: Final = re.compile(r"kite:\{([0-9a-f]{4})\}:([0-9a-f]{16}):(kv|logits|completion|lora):(\1[0-9a-f]{60})")
_HEADS_AT_ONCE: Final = 256
# A tool has more patience than a request: what is slow is not broken.
_CONNECT_S: Final = 5.0
_SILENCE_S: Final = 30.0
_NO_BOUND: Final = 2**60
_LONGER: Final = 4096

MAX_VALUE_BYTES: Final = MAX_DATA_BYTES + 2**20
"""Longest value that can be a unit: its data, not compressed, with header and token ids."""


@dataclasses.dataclass(slots=True)
class Tier:
    """One tier.

    Attributes:
        name: "disk", "redis", the name of a third-party store, "s3".
        store: None if it can't be used.
        problem: why it could not be used, or not wholly; "" if all is well.
        stats: what it said of itself at the end, if it could.
    """

    name: str
    store: SharedStore | None
    problem: str = ""
    stats: StoreStats | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """One stored value.

    Attributes:
        item: what the store says of it.
        model, kind, cf: the parts of its key; "" if it is not a unit's key.
        head: what its first bytes say, if they were read and are a unit's.
    """

    item: StoredItem
    model: str
    kind: str
    cf: str
    head: UnitHead | None = None

    @classmethod
    def of(cls, item: StoredItem) -> Found:
        """The value behind an item of a listing."""
        match = _KEY.fullmatch(item.key)
        return cls(item, match[2], match[3], match[4]) if match else cls(item, "", "", "")

    @property
    def written_at(self) -> float | None:
        """When it was written, seconds since 1970. A store that does not know (Redis) leaves it to the unit to say when
        it was made, which takes its head."""
        if self.item.written_at is not None:
            return self.item.written_at
        return None if self.head is None else self.head.created_at

    @property
    def used_at(self) -> float | None:
        """When it was last of use, seconds since 1970: read or, if it never was, written."""
        known = [time for time in (self.item.used_at, self.item.written_at) if time is not None]
        return max(known, default=None)


def open_tiers(args: argparse.Namespace) -> list[Tier]:
    """The shared tiers that the options name, fastest first; nothing is connected yet.

    Raises:
        ConfigError: no tier is named, or an option is wrong.
        MissingExtraError: a tier needs a package that is not installed.
    """
    return tiers_of(pool_config_of(args))


def pool_config_of(args: argparse.Namespace) -> PoolConfig:
    """The pool that the options name: a configuration file's, or single tiers. Raises ConfigError."""
    choice = pool_choice(args, default_disk=True)
    return choice.to_pool_config() if isinstance(choice, KiteConfig) else choice


def tiers_of(config: PoolConfig) -> list[Tier]:
    """As `open_tiers`, those of a configuration."""
    from kitelib.stores.registry import open_stores

    tiers = []
    if config.disk is not None and not os.path.isdir(config.disk):
        # Opening would make the folder, and a misspelt one would look like an empty pool.
        tiers.append(Tier("disk", None, f"there is no folder {config.disk!r}"))
        config = dataclasses.replace(config, disk=None)
    for name, store in open_stores(_patient(config)):
        if isinstance(store, SharedStore):
            tiers.append(Tier(name, store))
        else:
            tiers.append(Tier(name, None, "this kind of store has no listing"))
    if not tiers:
        raise ConfigError("no shared tier is named; give --disk, --redis, --s3, --store or a --config with one of them")
    return tiers


def _patient(config: PoolConfig) -> PoolConfig:
    """The same tiers for looking at them: no bound or time to live that opening or reading could enforce."""
    return dataclasses.replace(
        config,
        disk_bytes=_NO_BOUND,
        ttl_seconds=None,
        connect_timeout=max(config.connect_timeout, _CONNECT_S),
        socket_timeout=max(config.socket_timeout, _SILENCE_S),
    )


Work = Callable[[Tier, SharedStore], Awaitable[None]]


async def on_all_tiers(tiers: Sequence[Tier], work: Work) -> None:
    """Does the same on every tier that can be used, at the same time, and closes them. A tier that fails keeps its
    `Tier.problem` and stops no other."""
    try:
        async with anyio.create_task_group() as tasks:
            for tier in tiers:
                if tier.store is not None:
                    tasks.start_soon(_on_one, tier, tier.store, work)
    finally:
        for tier in tiers:
            if tier.store is not None:
                with contextlib.suppress(StoreError):
                    await tier.store.aclose()


async def _on_one(tier: Tier, store: SharedStore, work: Work) -> None:
    try:
        await work(tier, store)
        tier.stats = await store.stats()
    except StoreError as error:
        tier.problem = " ".join(str(error).split())
    else:
        if tier.stats.errors:
            tier.problem = f"incomplete: {tier.stats.errors} of its calls or keys failed"


def problems(tiers: Sequence[Tier]) -> list[str]:
    """One line per tier that could not be used, or not wholly."""
    return [f"{tier.name}: {tier.problem}" for tier in tiers if tier.problem]


async def scan(store: SharedStore) -> AsyncIterator[list[Found]]:
    """Everything in a store, in pages.

    Raises:
        StoreError: it can't be listed.
    """
    async for page in store.list_items():
        yield [Found.of(item) for item in page]


async def with_heads(store: SharedStore, found: Sequence[Found]) -> list[Found]:
    """The same values with their heads; without one where the value is gone or no unit.

    Raises:
        StoreError: none could be read.
    """
    read: list[Found] = []
    for start in range(0, len(found), _HEADS_AT_ONCE):
        part = found[start : start + _HEADS_AT_ONCE]
        heads = await store.get_heads([each.item.key for each in part], HEAD_BYTES)
        read += [dataclasses.replace(each, head=_head(raw)) for each, raw in zip(part, heads, strict=True)]
    return read


async def with_times(store: SharedStore, found: Sequence[Found]) -> list[Found]:
    """The same values, in any order, with the heads that it takes to know when each was written.

    Raises:
        StoreError: none of those could be read.
    """
    known = [each for each in found if each.item.written_at is not None]
    return known + await with_heads(store, [each for each in found if each.item.written_at is None])


async def read_values(store: SharedStore, found: Sequence[Found]) -> list[bytes | None]:
    """The values, in order, without a trace: reading them through `get_many` would make them look used.

    None is one that is gone, that its tier refuses, or that is too long for a unit.

    Raises:
        StoreError: none could be read.
    """
    sizes = [each.item.num_bytes for each in found if each.item.num_bytes <= MAX_VALUE_BYTES]
    values: list[bytes | None] = [None] * len(found)
    if not sizes:
        return values
    # A value that was replaced by a somewhat longer one since it was listed comes whole too.
    limit = max(sizes) + _LONGER
    heads = await store.get_heads([each.item.key for each in found], limit)
    return [value if value is not None and len(value) < limit else None for value in heads]


def _head(raw: Any) -> UnitHead | None:
    try:
        return None if raw is None else peek(raw)
    except FormatError:
        return None
