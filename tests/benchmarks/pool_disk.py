"""Read bandwidth of the disk tier against ``cat`` of the same files, from a warm page cache.

Run: ``python tests/benchmarks/pool_disk.py [--folder DIR] [--repeats 15]``. Prints a table and JSON.

``cat files > /dev/null`` copies nothing out of the kernel twice: it reads into one small buffer that stays in the
processor's cache. ``cat files | cat > /dev/null`` moves the bytes through a pipe to another process, which is what a
program that takes its data from ``cat`` gets. The time of ``cat /dev/null`` (starting a process) is taken off the first
one, since the store starts none. The store gives every value as its own ``bytes`` object, checked for length and key.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from kitelib.fingerprint import store_key
from kitelib.stores.disk import DiskStore

VALUE_BYTES = 370_000
NUM_VALUES = 96
RUN_VALUES = 32


def run(*, folder: Path | None = None, repeats: int = 15) -> dict[str, Any]:
    """Measures everything in turn; seconds are medians, bandwidths are bytes of values per second of the median."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        seconds = asyncio.run(_measure(Path(scratch), repeats))
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    num_bytes = VALUE_BYTES * NUM_VALUES
    cat_s = max(medians["cat"] - medians["start of cat"], 1e-9)
    return {
        "benchmark": "pool_disk",
        "value_bytes": VALUE_BYTES,
        "values": NUM_VALUES,
        "repeats": repeats,
        "seconds": {name: round(value, 6) for name, value in medians.items()},
        "read_gb_per_s": {
            "store": num_bytes / medians["store"] / 1e9,
            f"store, runs of {RUN_VALUES}": num_bytes / medians[f"store, runs of {RUN_VALUES}"] / 1e9,
            "cat": num_bytes / cat_s / 1e9,
            "cat | cat": num_bytes / medians["cat | cat"] / 1e9,
        },
        "write_gb_per_s": num_bytes / medians["store, writing"] / 1e9,
        "leading_run_ms": 1e3 * medians["leading run"],
        "store_to_cat": cat_s / medians["store"],
        "store_runs_to_cat": cat_s / medians[f"store, runs of {RUN_VALUES}"],
        "store_to_cat_pipe": medians["cat | cat"] / medians["store"],
        "cpus": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cat": subprocess.run(["cat", "--version"], check=True, capture_output=True, text=True).stdout.split("\n")[0],
    }


async def _measure(scratch: Path, repeats: int) -> dict[str, list[float]]:
    store = DiskStore(scratch / "pool", 2 * VALUE_BYTES * NUM_VALUES)
    keys = [store_key("0" * 16, "kv", hashlib.sha256(b"%d" % number).digest()) for number in range(NUM_VALUES)]
    items = [(key, os.urandom(VALUE_BYTES)) for key in keys]
    await store.put_many(items)
    files = [str(path) for path in (scratch / "pool" / "values").glob("*/*.ru")]
    assert len(files) == NUM_VALUES

    async def read_all() -> None:
        assert None not in await store.get_many(keys)

    async def read_runs() -> None:
        for first in range(0, NUM_VALUES, RUN_VALUES):
            assert None not in await store.get_many(keys[first : first + RUN_VALUES])

    async def find() -> None:
        assert await store.leading_run(keys[:RUN_VALUES]) == RUN_VALUES

    ways: dict[str, Callable[[], Awaitable[object]]] = {
        "store": read_all,
        "cat": lambda: _cat(["cat", *files]),
        f"store, runs of {RUN_VALUES}": read_runs,
        "cat | cat": lambda: _cat(["sh", "-c", 'cat "$@" | cat', "cat", *files]),
        "start of cat": lambda: _cat(["cat", "/dev/null"]),
        "leading run": find,
        "store, writing": lambda: store.put_many(items),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats + 1):
        for name, way in ways.items():
            if name == "store, writing":
                await store.delete_many(keys)  # units are new when they are written; replacing a file costs more
            start = time.perf_counter()
            await way()
            seconds[name].append(time.perf_counter() - start)
    await store.aclose()
    return {name: each[1:] for name, each in seconds.items()}  # the first round only warms up


async def _cat(command: list[str]) -> None:
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to put the files; default the system's temporary folder")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    report = run(folder=options.folder, repeats=options.repeats)
    show(report)
    print(json.dumps(report))


def show(report: dict[str, Any]) -> None:
    """Prints the figures as a table."""
    for name, value in report["read_gb_per_s"].items():
        print(f"reading, {name:20} {value:6.2f} GB/s")
    print(f"writing, {'store':20} {report['write_gb_per_s']:6.2f} GB/s")
    print(f"leading run of {RUN_VALUES}: {report['leading_run_ms']:.2f} ms")
    print(
        f"store : cat              {report['store_to_cat']:.2f} (in runs of {RUN_VALUES}: {report['store_runs_to_cat']:.2f})"
    )
    print(f"store : cat | cat        {report['store_to_cat_pipe']:.2f}")


if __name__ == "__main__":
    main()
