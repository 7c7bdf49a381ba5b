"""The torch engine's benchmark on the CPU: KITE, transformers and vLLM in one run; prints a table, writes JSON.

.venv/bin/python tests/benchmarks/torch_cpu.py --threads 2 --json torch.json
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import importlib
import os
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Coroutine
from importlib import metadata
from pathlib import Path
from typing import Any

from lite_report import Report, _cpu_name, median, progress
from torch_rig import Rig, Sizes, compile_first
from torch_rivals import (
    Contestant,
    Kite,
    TransformersBatch,
    TransformersContinuous,
    Vllm,
    default_vllm_python,
)
from torch_step import decode_steps

from kitelib.backends.torch_engine.threads import prepare_torch


async def throughput(rig: Rig) -> None:
    """Requests put at once: generated tokens over the time until the last one is done."""
    sizes, report, name = rig.sizes, rig.report, "throughput"
    async with contextlib.AsyncExitStack() as stack:
        present: list[Contestant] = [TransformersBatch(rig.model), TransformersContinuous(rig.model)]
        standard = await stack.enter_async_context(Kite.open(rig.folder, rig.threads, "standard"))
        bitwise = await stack.enter_async_context(Kite.open(rig.folder, rig.threads, "bitwise"))
        present.extend((standard, bitwise))
        if (vllm := start_vllm(rig, name, stack)) is not None:
            present.append(vllm)
        rates: dict[str, list[float]] = {}
        for number in range(-1, sizes.rounds):  # the first round warms up
            for contestant in list(present):
                try:
                    seconds = await contestant.answer(rig.prompts(), sizes.new_tokens)
                except Exception as error:  # noqa: BLE001 - one that fails is a line of the table
                    report.missing(name, contestant.name, repr(error)[:120])
                    present.remove(contestant)
                    continue
                await asyncio.sleep(0.3)  # write-behind must not be charged to whoever comes next
                if number >= 0:
                    rates.setdefault(contestant.name, []).append(sizes.num_requests * sizes.new_tokens / seconds)
        for who, samples in rates.items():
            report.add(name, who, samples, "tok/s")
        rivals = {who: median(samples) for who, samples in rates.items() if not who.startswith("KITE")}
        best = max(rivals, key=lambda who: rivals[who])
        for numerics in ("standard", "bitwise"):
            ratio = median(rates[f"KITE, {numerics}"]) / rivals[best]
            if numerics == "standard":
                report.judge(name, f"KITE, {numerics}, over the best rival", ratio, 1.2, at_least=True, note=best)
            else:
                report.factor(name, f"KITE, {numerics}, over the best rival", ratio, best)


async def ttft(rig: Rig) -> None:
    """Time to the first token of a long prompt: new, put again, and with the last tokens new."""
    report, name, length = rig.report, f"TTFT of {rig.sizes.long_tokens} tokens", rig.sizes.long_tokens
    async with contextlib.AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(Kite.open(rig.folder, rig.threads, numerics))
            for numerics in ("standard", "bitwise")
        ]
        vllm = start_vllm(rig, name, stack)
        times: dict[str, list[float]] = {}
        cached: dict[str, int] = {}

        async def measure(kind: str, prompt: list[int]) -> None:
            for engine in engines:
                seconds, found = await engine.first_token(prompt)
                times.setdefault(f"{engine.name}, {kind}", []).append(seconds)
                cached[f"{engine.name}, {kind}"] = found
                await asyncio.sleep(0.3)
            if vllm is not None:
                times.setdefault(f"{vllm.name}, {kind}", []).append(await vllm.answer([prompt], 1))

        for number in range(-1, rig.sizes.rounds):
            prompt = rig.prompt(length)
            await measure("cold", prompt)
            await measure("warm: the same prompt", prompt)
            await measure("warm: a new question of 31 tokens", [*prompt[: length - 31], *rig.prompt(31)])
            if number < 0:
                times.clear()
        for who in sorted(times):
            note = f"{cached[who]} tokens not computed" if who in cached else ""
            report.add(name, who, times[who], note=note)
        for numerics in ("standard", "bitwise"):
            for kind, bound in (("warm: the same prompt", 0.25), ("warm: a new question of 31 tokens", None)):
                if vllm is not None:
                    ratio = median(times[f"KITE, {numerics}, {kind}"]) / median(times[f"{vllm.name}, {kind}"])
                    report.judge(name, f"KITE, {numerics}, to vLLM, {kind}", ratio, bound or 1.0)


async def steps(rig: Rig) -> None:
    """See `decode_steps`."""
    await asyncio.to_thread(decode_steps, rig)


SECTIONS: dict[str, Callable[[Rig], Coroutine[Any, Any, None]]] = {
    "throughput": throughput,
    "ttft": ttft,
    "steps": steps,
}


def start_vllm(rig: Rig, section: str, stack: contextlib.AsyncExitStack) -> Vllm | None:
    """vLLM's process; None, with a line in the table, if it is not there."""
    if not rig.vllm.exists():
        rig.report.missing(section, Vllm.name, f"not installed: no {rig.vllm}; give --vllm-python")
        return None
    log = Path(tempfile.gettempdir()) / f"kite-bench-vllm-{os.getpid()}.log"
    progress("starting vLLM")
    try:
        vllm = Vllm(rig.vllm, rig.folder, rig.threads, rig.sizes.num_requests, log)
    except (OSError, RuntimeError) as error:
        rig.report.missing(section, Vllm.name, str(error))
        return None
    stack.callback(vllm.close)
    return vllm


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    note = prepare_torch(options.threads)
    report = Report(options.threads)
    with tempfile.TemporaryDirectory() as made:
        folder = options.model or make_folder(Path(made))
        rig = Rig(
            str(folder),
            options.threads,
            Sizes.quick() if options.quick else Sizes(),
            reference(folder),
            report,
            options.vllm_python,
        )
        host = describe(rig, note)
        failed = False
        if not options.no_compile:
            compile_first(rig, options.section_timeout)
        for name in options.only:
            progress(f"{name}, {options.threads} thread(s)")
            failed |= not run_section(name, rig, options.section_timeout)
            if options.json:
                report.write(options.json, host)
    print(f"\nmodel {host['model']}, {host['cpu']} with {host['cores']} cores, load {host['load_average']}")
    print(f"versions {host['versions']}, {options.threads} thread(s), {note or 'OpenMP settings by KITE'}")
    print(f"{rig.sizes}; medians, contestants take turns")
    print(report.table())
    return int(failed)


def run_section(name: str, rig: Rig, timeout_s: float) -> bool:
    """Runs one section; whatever goes wrong in it is a line of the table and leaves the others alone."""
    try:
        asyncio.run(asyncio.wait_for(SECTIONS[name](rig), timeout_s))
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        rig.report.missing(name, "section failed", repr(error)[:120])
        return False
    finally:
        gc.collect()
    return True


def parse(arguments: list[str] | None) -> argparse.Namespace:
    def names(text: str) -> list[str]:
        if unknown := [name for name in text.split(",") if name not in SECTIONS]:
            raise argparse.ArgumentTypeError(f"unknown section {unknown[0]!r}; there are {', '.join(SECTIONS)}")
        return text.split(",")

    parser = argparse.ArgumentParser(description="Benchmark of the torch engine on the CPU against its rivals.")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1), help="default: 2")
    parser.add_argument("--only", type=names, default=list(SECTIONS), metavar="NAME[,NAME]", help=", ".join(SECTIONS))
    parser.add_argument("--quick", action="store_true", help="few samples: checks the benchmark, not the engine")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures with their samples")
    parser.add_argument("--section-timeout", type=float, default=1800.0, metavar="SECONDS")
    parser.add_argument(
        "--model", type=Path, metavar="FOLDER", help="default: SmolLM2-135M in bfloat16, made from GGUF"
    )
    parser.add_argument("--no-compile", action="store_true", help="don't wait for the compiled program first")
    parser.add_argument(
        "--vllm-python",
        type=Path,
        default=default_vllm_python(),
        metavar="PATH",
        help="Python of an environment with vLLM's CPU build (default: $VLLM_PYTHON or ~/.cache/kite/vllm-venv)",
    )
    return parser.parse_args(arguments)


def support() -> Any:
    """The tests' module that makes model folders."""
    root = str(Path(__file__).resolve().parents[2])
    if root not in sys.path:
        sys.path.append(root)
    return importlib.import_module("tests.support.hf_folders")


def make_folder(place: Path) -> Path:
    """SmolLM2 as a folder."""
    progress("writing the model folder")
    found: Path = support().smollm2_folder(place / "smollm2-135m-instruct")
    return found


def reference(folder: Path) -> Any:
    """The model as transformers alone runs it."""
    return support().reference_model(folder, attention="sdpa")


def describe(rig: Rig, note: str | None) -> dict[str, Any]:
    """Facts without which the figures say little."""
    versions = {}
    for package in ("kitelib", "torch", "transformers"):
        versions[package] = metadata.version(package)
    return {
        "model": Path(rig.folder).name,
        "dtype": str(rig.model.dtype),
        "threads": rig.threads,
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "versions": versions,
        "openmp": note or "set by kitelib.backends.torch_engine.threads",
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


if __name__ == "__main__":
    sys.exit(main())
