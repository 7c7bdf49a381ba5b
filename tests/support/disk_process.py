"""A process that uses a disk pool without pause, to be watched and killed: ``python -m tests.support.disk_process``.

Every value can be told from its key and a version, so that anyone can check what is read.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kitelib.fingerprint import store_key
from kitelib.stores.disk import DiskStore

__all__ = ["disk_bytes", "disk_process", "is_whole", "key_of", "value_of"]

NUM_KEYS = 200
_ROOT = Path(__file__).resolve().parents[2]


def key_of(number: int) -> str:
    """The key with that number."""
    return store_key("0123456789abcdef", "kv", hashlib.sha256(b"%d" % number).digest())


def value_of(key: str, version: int = 0, max_bytes: int = 60_000) -> bytes:
    """A value that belongs to the key; versions have different lengths."""
    seed = hashlib.sha256(b"%s %d" % (key.encode(), version)).digest()
    body = seed * (int.from_bytes(seed[:4], "big") % (max_bytes // len(seed)))
    return b"%d:%d:" % (version, max_bytes) + body


def is_whole(key: str, value: bytes) -> bool:
    """Whether it is exactly one of the key's values."""
    version, max_bytes, _ = value.split(b":", 2)
    return value == value_of(key, int(version), int(max_bytes))


def disk_bytes(folder: Path) -> int:
    """What `du` says: blocks of everything in a folder, and its own."""
    seen = {}
    for path in [folder, *folder.rglob("*")]:
        status = path.lstat()
        seen[status.st_ino] = status.st_blocks * 512
    return sum(seen.values())


@contextmanager
def disk_process(folder: Path, max_bytes: int, seed: int) -> Iterator[subprocess.Popen[str]]:
    """A running process that has opened the pool; killed at the end."""
    command = [sys.executable, "-m", "tests.support.disk_process", str(folder), str(max_bytes), str(seed)]
    process = subprocess.Popen(command, cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


async def _work(folder: str, max_bytes: int, seed: int) -> None:
    """Until its input ends; then says how many values it read, how many were wrong, and how many errors it had."""
    chance, store = random.Random(seed), DiskStore(folder, max_bytes)
    await store.warm()
    print("ready", flush=True)
    done = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    num_read = num_wrong = 0
    while not done.done():
        keys = [key_of(chance.randrange(NUM_KEYS)) for _ in range(chance.randrange(1, 6))]
        await store.put_many([(key, value_of(key, chance.randrange(3))) for key in keys])
        keys = [key_of(chance.randrange(NUM_KEYS)) for _ in range(4)]
        for key, value in zip(keys, await store.get_many(keys), strict=True):
            num_read += value is not None
            num_wrong += value is not None and not is_whole(key, value)
        if chance.random() < 0.1:
            await store.delete_many(keys[:2])
        if chance.random() < 0.02:
            await store.sweep()
    stats = await store.stats()
    await store.aclose()
    print(num_read, num_wrong, stats.errors, stats.evictions, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("max_bytes", type=int)
    parser.add_argument("seed", type=int)
    arguments = parser.parse_args()
    asyncio.run(_work(arguments.folder, arguments.max_bytes, arguments.seed))
    os._exit(0)  # the reader of the input may be waiting still
