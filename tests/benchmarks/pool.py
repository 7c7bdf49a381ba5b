"""Benchmark of the pool's tiers: ``python tests/benchmarks/pool.py [--quick] [--only NAME,...] [--json FILE]``.

Starts a Redis cluster of six processes on loopback, needs Debian's redis-server, and runs about 15 minutes. Every ratio
compares figures of the same run. Each section can also be run by itself: ``pool_redis.py``, ``pool_disk.py``,
``pool_codec.py``, ``pool_engine.py``; the trace replay is ``kite bench replay FILE``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_ROOT), str(_ROOT / "tests" / "benchmarks")]

import pool_codec  # noqa: E402 - found by the line above
import pool_disk  # noqa: E402
import pool_engine  # noqa: E402
import pool_redis  # noqa: E402

SECTIONS: dict[str, tuple[Any, dict[str, Any]]] = {  # module, and the options of its `run` for --quick
    "redis": (pool_redis, {"rounds": 1}),
    "disk": (pool_disk, {"repeats": 3}),
    "codec": (pool_codec, {"repeats": 2, "with_answers": False}),
    "engine": (pool_engine, {"quick": True}),
}


def main() -> None:
    """Runs the sections one after the other; prints each one's table, and at the end the JSON of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SECTIONS), metavar="NAME,...", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--quick", action="store_true", help="few samples: does the benchmark itself work?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to a file")
    options = parser.parse_args()
    names = options.only.split(",")
    for name in names:
        if name not in SECTIONS:
            parser.error(f"there is no section {name!r}; there are: {', '.join(SECTIONS)}")
    results: dict[str, Any] = {}
    for name in names:
        module, quick = SECTIONS[name]
        print(f"{name}: measuring ...", file=sys.stderr, flush=True)
        begun = time.monotonic()
        results[name] = module.run(**(quick if options.quick else {}))
        print(f"\n{name}")
        module.show(results[name])
        print(f"{name}: {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    text = json.dumps(results, indent=2)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
