"""What the outer tiers do to requests: cut off, throttled, and after a restart.

Run: ``python tests/benchmarks/pool_engine.py [--quick]``. Prints a table and JSON. SmolLM2-135M (Q4_1), one thread.

Each ratio compares two engines in one process that take turns, request by request, so that a slow minute of the machine
hits both. Prompts are random token ids, new in every pair, so nothing is reused but what a section puts into the tier.
A store that is "cut off" is one that refuses connections, or one that accepts them and never answers. The throttled one
waits 20 ms per call and gives 50 MB/s; it is filled by an engine before, so that everything is there to be loaded.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kitelib import KiteEngine, PoolConfig, ReusePolicy
from kitelib.cli.options import resolve_model
from kitelib.stores import pool as pool_module
from kitelib.stores.disk import DiskStore
from tests.support.gguf_files import write_model

PROMPT_TOKENS = 300
THROTTLE_LATENCY_S = 0.02
THROTTLE_BYTES_PER_S = 50e6
NO_ZERO_PREFILL = ReusePolicy(zero_prefill=False)


class Throttled:
    """A store that takes 20 ms per call and gives 50 MB/s; all calls share the line."""

    def __init__(self, inner: DiskStore) -> None:
        self._inner = inner
        self._line = asyncio.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def leading_run(self, keys: Sequence[str]) -> int:
        await asyncio.sleep(THROTTLE_LATENCY_S)
        return await self._inner.leading_run(keys)

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        await asyncio.sleep(THROTTLE_LATENCY_S)
        values = await self._inner.get_many(keys)
        async with self._line:
            await asyncio.sleep(sum(len(value) for value in values if value) / THROTTLE_BYTES_PER_S)
        return values


def prompt(rng: np.random.Generator, count: int, vocab_size: int = 40000) -> list[int]:
    """Random token ids."""
    return [int(token) for token in rng.integers(1000 if vocab_size > 4000 else 10, vocab_size, count)]


@contextlib.asynccontextmanager
async def engine(model: str, pool: PoolConfig, n_ctx: int = 1024) -> AsyncIterator[KiteEngine]:
    """An engine with one thread; its first steps are done."""
    async with KiteEngine.open(model, threads=1, n_ctx=n_ctx, pool=pool) as opened:
        await opened.generate([50] * 40, max_tokens=2, ignore_eos=True, reuse=ReusePolicy(mode="off"))
        yield opened


async def ttft(opened: KiteEngine, tokens: list[int]) -> tuple[float, Any]:
    """Seconds to the first token, and the report on reuse."""
    gen = await opened.generate(tokens, max_tokens=1, ignore_eos=True, reuse=NO_ZERO_PREFILL)
    return gen.timing.ttft_s, gen.reuse


@contextlib.asynccontextmanager
async def silent_server() -> AsyncIterator[int]:
    """The port of a server that takes connections and says nothing."""
    writers = []

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        while await reader.read(65536):
            pass

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for writer in writers:
            writer.close()


async def _pairs(
    plain: KiteEngine, tested: KiteEngine, count: int, tokens: int, vocab_size: int, known: Sequence[list[int]] = ()
) -> dict[str, Any]:
    """TTFTs of both in turn, on prompts that `plain` does not know."""
    rng = np.random.default_rng(count)
    first, second, reports = [], [], []
    for index in range(count):
        theirs = known[index] if known else prompt(rng, tokens, vocab_size)
        for position in (index % 2, 1 - index % 2):
            if position:
                seconds, report = await ttft(tested, theirs)
                second.append(seconds)
                reports.append(report)
            else:
                seconds, _ = await ttft(plain, theirs)
                first.append(seconds)
    return {
        "without_pool_s": statistics.median(first),
        "with_pool_s": statistics.median(second),
        "ratio": statistics.median(second) / statistics.median(first),
        "ratio_of_means": statistics.mean(second) / statistics.mean(first),
        "computed_tokens": statistics.median(report.computed_tokens for report in reports),
        "last_note": reports[-1].note,
    }


async def cut_off(model: str, count: int) -> dict[str, Any]:
    """A dead store costs a request next to nothing."""
    answers = {}
    async with engine(model, PoolConfig(memory_bytes=0)) as plain, silent_server() as silent:
        with contextlib.closing(__import__("socket").socket()) as probe:
            probe.bind(("127.0.0.1", 0))
            closed = probe.getsockname()[1]
        for name, port in (("refuses connections", closed), ("never answers", silent)):
            config = PoolConfig(memory_bytes=0, redis=f"redis://127.0.0.1:{port}/0")
            async with engine(model, config) as tested:
                answers[name] = await _pairs(plain, tested, count, PROMPT_TOKENS, 40000)
    return answers


async def throttled(model: str, count: int, tokens: int, vocab_size: int) -> dict[str, Any]:
    """A slow store never costs more than it saves."""
    rng = np.random.default_rng(11)
    known = [prompt(rng, tokens, vocab_size) for _ in range(count)]
    with tempfile.TemporaryDirectory() as folder:
        async with engine(model, PoolConfig(memory_bytes=0, disk=folder, drain_seconds=60), n_ctx=2048) as writer:
            for tokens_of in known:
                await writer.generate(tokens_of, max_tokens=1, ignore_eos=True)
        original = pool_module.open_stores
        pool_module.open_stores = lambda config: [("throttled", Throttled(DiskStore(folder, 2**32)))]
        try:
            async with engine(model, PoolConfig(memory_bytes=0), n_ctx=2048) as tested:
                pool_module.open_stores = original
                async with engine(model, PoolConfig(memory_bytes=0), n_ctx=2048) as plain:
                    return await _pairs(plain, tested, count, tokens, vocab_size, known)
        finally:
            pool_module.open_stores = original


async def restart(model: str, count: int) -> dict[str, Any]:
    """The first request after a restart, from the disk tier, against the same request computed."""
    cold, warm = [], []
    rng = np.random.default_rng(12)
    for _ in range(count):
        tokens = prompt(rng, PROMPT_TOKENS)
        with tempfile.TemporaryDirectory() as folder:
            config = PoolConfig(disk=folder, drain_seconds=60)
            async with KiteEngine.open(model, threads=1, n_ctx=1024, pool=config) as first:
                cold.append((await first.generate(tokens, max_tokens=1, ignore_eos=True)).timing.ttft_s)
            async with KiteEngine.open(model, threads=1, n_ctx=1024, pool=config) as second:
                gen = await second.generate(tokens, max_tokens=1, ignore_eos=True)
                warm.append(gen.timing.ttft_s)
    return {
        "computed_s": statistics.median(cold),
        "from_disk_s": statistics.median(warm),
        "ratio": statistics.median(warm) / statistics.median(cold),
    }


def run(*, quick: bool = False) -> dict[str, Any]:
    """Measures everything; seconds are medians."""
    model = resolve_model("smollm2")
    count = 3 if quick else 9
    with tempfile.TemporaryDirectory() as folder:
        tiny = str(write_model(Path(folder) / "tiny.gguf", "llama", seed=1))
        begun = time.time()
        return {
            "benchmark": "pool_engine",
            "pairs": count,
            "prompt_tokens": PROMPT_TOKENS,
            "cut off": asyncio.run(cut_off(model, count)),
            "throttled": {
                "SmolLM2-135M": asyncio.run(throttled(model, count, PROMPT_TOKENS, 40000)),
                "2 random layers": asyncio.run(throttled(tiny, 4 * count, 1500, 1800)),
            },
            "restart": asyncio.run(restart(model, count)),
            "threads": 1,
            "seconds": round(time.time() - begun),
            "cpus": len(os.sched_getaffinity(0)),
            "load_average": round(os.getloadavg()[0], 2),
            "python": platform.python_version(),
        }


def show(result: dict[str, Any]) -> None:
    """Prints the figures as a table: what, the figure, and what it should be."""
    rows = [
        (f"request with a store that {name}, to one without a pool", f"{each['ratio']:.3f}", "<= 1.02")
        for name, each in result["cut off"].items()
    ]
    rows += [
        (f"throttled store (50 MB/s, 20 ms), {name}, to recomputing", f"{each['ratio']:.3f}", "<= 1.05")
        for name, each in result["throttled"].items()
    ]
    restarted = result["restart"]
    rows.append(
        (
            f"first request after a restart ({restarted['from_disk_s'] * 1e3:.0f} ms), to computing it",
            f"{restarted['ratio']:.3f}",
            "",
        )
    )
    for what, figure, target in rows:
        print(f"{what:82} {figure:>8}  {target}")


def main() -> None:
    """Prints a table and JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few samples: does the benchmark itself work?")
    result = run(quick=parser.parse_args().quick)
    show(result)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
