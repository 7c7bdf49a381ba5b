"""The Redis tier in a cluster of six processes on loopback: lookups, and read bandwidth beside redis-benchmark.

Run: ``python tests/benchmarks/pool_redis.py [--rounds 5]``. Prints a table and JSON.

Bandwidth is that of `RedisStore.get_many` on a run of 32 values, one or two calls at a time, against
``redis-benchmark -t get`` with the same value size and the same number of connections (one per primary and call), taken
in turns in the same run; the ratio is the median over the rounds. redis-benchmark reads one key per server over and
over, in as many threads as there are primaries, and looks at nothing; the store reads 32 different values on the event
loop and hands them over. Lookup is `leading_run` of the 32 keys, all present.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).absolute().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from kitelib.stores.redis import RedisStore  # noqa: E402
from tests.support.redis_servers import RedisCluster  # noqa: E402

RUN = 32
SIZES = (370_000, 262_144)
PRIMARIES = 3
LOOKUPS = 2000


def run(rounds: int = 5) -> dict[str, Any]:
    """Starts a cluster, measures, stops it; the report as plain data."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        cluster = RedisCluster(Path(folder), node_timeout_ms=5000)
        stack.callback(cluster.stop)
        cluster.start()
        return {
            "benchmark": "pool_redis",
            "cells": asyncio.run(_bandwidth(cluster, rounds)),
            "lookup": asyncio.run(_lookup(cluster)),
            "cpus": len(os.sched_getaffinity(0)),
            "load_average": round(os.getloadavg()[0], 2),
            "python": platform.python_version(),
            "redis_py": importlib.metadata.version("redis"),
            "hiredis": importlib.metadata.version("hiredis"),
            "redis_server": subprocess.check_output(["redis-server", "--version"], text=True).split()[2],
        }


async def _bandwidth(cluster: RedisCluster, rounds: int) -> list[dict[str, Any]]:
    cells = []
    store = RedisStore(cluster.url)
    for size in SIZES:
        await store.put_many([(_key(index), os.urandom(size)) for index in range(RUN)])
        _redis_benchmark(cluster, "set", size, connections=PRIMARIES, requests=300)
        for calls in (1, 2):
            ours, peer = [], []
            for _ in range(rounds):
                ours.append(await _read(store, size, calls))
                peer.append(_redis_benchmark(cluster, "get", size, connections=calls * PRIMARIES, requests=12_000))
            cells.append(
                {
                    "value_bytes": size,
                    "calls_at_once": calls,
                    "connections": calls * PRIMARIES,
                    "store_mb_s": round(statistics.median(ours)),
                    "redis_benchmark_mb_s": round(statistics.median(peer)),
                    "ratio": round(statistics.median(a / b for a, b in zip(ours, peer, strict=True)), 3),
                }
            )
            print(f"measured {size} bytes, {calls} at once", file=sys.stderr)
    await store.aclose()
    return cells


async def _read(store: RedisStore, size: int, calls: int, seconds: float = 1.2) -> float:
    """Megabytes per second of `get_many`."""
    keys = [_key(index) for index in range(RUN)]

    async def reader() -> int:
        count = 0
        while time.perf_counter() < end:
            values = await store.get_many(keys)
            assert all(value is not None and len(value) == size for value in values)
            count += 1
        return count

    await store.get_many(keys)
    begin = time.perf_counter()
    end = begin + seconds
    runs = sum(await asyncio.gather(*(reader() for _ in range(calls))))
    return runs * RUN * size / (time.perf_counter() - begin) / 1e6


def _redis_benchmark(cluster: RedisCluster, test: str, size: int, *, connections: int, requests: int) -> float:
    """Megabytes per second of ``redis-benchmark -t get``."""
    command = ["redis-benchmark", "-p", str(cluster.nodes[0].port), "--cluster", "-t", test, "-d", str(size), "--csv"]
    command += ["-c", str(connections), "-n", str(requests)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    row = next(line for line in output.splitlines() if line.startswith(f'"{test.upper()}"'))
    return float(row.split(",")[1].strip('"')) * size / 1e6


async def _lookup(cluster: RedisCluster) -> dict[str, Any]:
    store = RedisStore(cluster.url)
    keys = [_key(index) for index in range(RUN)]
    await store.put_many([(key, b"x" * 1000) for key in keys])
    times = []
    for _ in range(LOOKUPS):
        begin = time.perf_counter()
        assert await store.leading_run(keys) == RUN
        times.append(1000 * (time.perf_counter() - begin))
    await store.aclose()
    percentiles = statistics.quantiles(times, n=100)
    return {"keys": RUN, "calls": LOOKUPS, "p50_ms": round(percentiles[49], 3), "p99_ms": round(percentiles[98], 3)}


def _key(number: int) -> str:
    digits = f"{number * 40503 % 65536:04x}{number:060x}"
    return f"kite:{{{digits[:4]}}}:0123456789abcdef:kv:{digits}"


def main() -> None:
    """Prints the report as a table and as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="times that the store and redis-benchmark take turns")
    report = run(parser.parse_args().rounds)
    show(report)
    print(json.dumps(report))


def show(report: dict[str, Any]) -> None:
    """Prints the figures as a table."""
    print(f"{'value bytes':>11}  {'connections':>11}  {'store MB/s':>10}  {'redis-benchmark MB/s':>20}  {'ratio':>5}")
    for cell in report["cells"]:
        print(
            f"{cell['value_bytes']:>11}  {cell['connections']:>11}  {cell['store_mb_s']:>10}  "
            f"{cell['redis_benchmark_mb_s']:>20}  {cell['ratio']:>5}"
        )
    lookup = report["lookup"]
    print(f"lookup of {lookup['keys']} keys: P50 {lookup['p50_ms']} ms, P99 {lookup['p99_ms']} ms")


if __name__ == "__main__":
    main()
