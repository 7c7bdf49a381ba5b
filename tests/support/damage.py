"""Spoiling what tiers hold behind their back: bits, lengths, and values that stand under keys of others."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from pathlib import Path

import redis

from kitelib.stores.disk.files import header_bytes, key_of_name, make_header
from tests.support.redis_servers import RedisServer

__all__ = ["spoil_disk", "spoil_redis", "spoilt", "value_files"]


def spoilt(chance: random.Random, value: bytes, other: bytes) -> bytes:
    """What is not `value` any more: a flipped bit, a cut, an addition, zeros, another value whole or in part."""
    bad = other  # as often as all else together: the one thing that a checksum alone would let pass
    kind = chance.randrange(11)
    if kind == 1 and value:
        position = chance.randrange(len(value))
        bad = value[:position] + bytes([value[position] ^ 1 << chance.randrange(8)]) + value[position + 1 :]
    elif kind == 2 and value:
        bad = value[: chance.randrange(len(value))]
    elif kind == 3:
        bad = value + other[: chance.randrange(1, 100)]
    elif kind == 4:
        bad = bytes(len(value))
    elif kind == 5:
        bad = other[: len(value) // 2] + value[len(value) // 2 :]
    return bad if bad != value else value + b"\0"


def value_files(pool: Path) -> list[Path]:
    """The files of a disk tier, one per value."""
    return sorted(pool.glob("values/*/*.ru"))


def spoil_disk(chance: random.Random, pool: Path, share: float = 1.0) -> int:
    """Spoils files of a disk tier in place, the header included or with a valid header around a wrong value; returns
    how many."""
    files = [path for path in value_files(pool) if chance.random() < share]
    count = 0
    for path in files:
        other = chance.choice(files)
        with contextlib.suppress(OSError):  # the tier evicts and replaces meanwhile, and the disk may be full
            if chance.random() < 0.3:
                path.write_bytes(spoilt(chance, path.read_bytes(), other.read_bytes()))
            else:
                _forge(path, lambda mine, others: spoilt(chance, mine, others), other)
            count += 1
    return count


def _forge(path: Path, change: Callable[[bytes, bytes], bytes], other: Path) -> None:
    """Gives a file another value with the header that this value would have."""
    keys = [key_of_name(each.name, int(each.parent.name, 16)) for each in (path, other)]
    assert all(keys), keys
    mine, others = (each.read_bytes()[header_bytes(key) :] for each, key in zip((path, other), keys, strict=True))
    value = change(mine, others)
    path.write_bytes(make_header(keys[0], len(value), time.time()) + value)


def spoil_redis(chance: random.Random, node: RedisServer, share: float = 1.0) -> int:
    """Spoils values of one Redis server under their keys; returns how many."""
    count = 0
    with contextlib.suppress(redis.RedisError, OSError):
        keys = [key for key in node.call("KEYS", "kite:*") if chance.random() < share]
        for key in keys:
            value, other = node.call("GET", key), node.call("GET", chance.choice(keys))
            if value is not None and other is not None:
                count += bool(node.call("SET", key, spoilt(chance, value, other), "EX", 3600, "XX"))
    return count
