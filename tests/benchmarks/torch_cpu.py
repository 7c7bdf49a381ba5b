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
import subprocess
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
    VLLM,
    Contestant,
    Served,
    TransformersBatch,
    TransformersContinuous,
    default_vllm_python,
    kite,
    vllm,
)
from torch_step import decode_steps

from kitelib.backends.torch_engine.threads import prepare_torch


async def throughput(rig: Rig) -> None:
    """Requests put at once: generated tokens over the time until the last one is done."""
    sizes, report, name = rig.sizes, rig.report, "throughput"
    with contextlib.ExitStack() as stack:
        present: list[Contestant] = [TransformersBatch(rig.model), TransformersContinuous(rig.model)]
        present += start_served(rig, name, stack)
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
    with contextlib.ExitStack() as stack:
        present = start_served(rig, name, stack)
        times: dict[str, list[float]] = {}
        cached: dict[str, int] = {}

        async def measure(kind: str, prompt: list[int]) -> None:
            for each in present:
                times.setdefault(f"{each.name}, {kind}", []).append(await each.answer([prompt], 1))
                cached[f"{each.name}, {kind}"] = each.cached
                await asyncio.sleep(0.3)

        for number in range(-1, rig.sizes.rounds):
            prompt = rig.prompt(length)
            await measure("cold", prompt)
            await measure("warm: the same prompt", prompt)
            await measure("warm: a new question of 31 tokens", [*prompt[: length - 31], *rig.prompt(31)])
            if number < 0:
                times.clear()
        for who in sorted(times):
            note = f"{cached[who]} tokens not computed" if who.startswith("KITE") else ""
            report.add(name, who, times[who], note=note)
        for numerics in ("standard", "bitwise"):
            for kind, bound in (("warm: the same prompt", 0.25), ("warm: a new question of 31 tokens", None)):
                if f"{VLLM}, {kind}" in times:
                    ratio = median(times[f"KITE, {numerics}, {kind}"]) / median(times[f"{VLLM}, {kind}"])
                    report.judge(name, f"KITE, {numerics}, to vLLM, {kind}", ratio, bound or 1.0)


async def steps(rig: Rig) -> None:
    """See `decode_steps`."""
    await asyncio.to_thread(decode_steps, rig)


SECTIONS: dict[str, Callable[[Rig], Coroutine[Any, Any, None]]] = {
    "throughput": throughput,
    "ttft": ttft,
    "steps": steps,
}


def start_served(rig: Rig, section: str, stack: contextlib.ExitStack) -> list[Served]:
    """The contestants that have processes of their own; whoever does not start is a line of the table."""
    found: list[Served] = []

    def start(name: str, make: Callable[[Path], Served]) -> None:
        progress(f"starting {name}")
        log = Path(tempfile.gettempdir()) / f"kite-bench-{name.rsplit(maxsplit=1)[-1]}-{os.getpid()}.log"
        try:
            found.append(make(log))
            stack.callback(found[-1].close)
        except (OSError, RuntimeError) as error:
            rig.report.missing(section, name, str(error))

    for numerics in ("standard", "bitwise"):
        start(f"KITE, {numerics}", lambda log, numerics=numerics: kite(rig.folder, rig.threads, numerics, log))
    if rig.vllm.exists():
        start(VLLM, lambda log: vllm(rig.vllm, rig.folder, rig.threads, rig.sizes.num_requests, log))
    else:
        rig.report.missing(section, VLLM, f"not installed: no {rig.vllm}; give --vllm-python")
    return found


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if "steps" in options.only and len(options.only) > 1:
        return run_apart(options)
    note = prepare(options)
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


def prepare(options: argparse.Namespace) -> str | None:
    """Loads torch: with KITE's OpenMP settings where KITE computes in this process, else with its own."""
    if options.only == ["steps"]:
        return prepare_torch(options.threads)
    torch: Any = importlib.import_module("torch")
    torch.set_num_threads(options.threads)
    return "transformers with torch's own OpenMP settings"


def run_apart(options: argparse.Namespace) -> int:
    """The steps, for which KITE computes in the benchmark's process, after the rest, in a process of their own."""
    given = [each for each in sys.argv[1:] if each != "--only" and each != ",".join(options.only)]
    status = 0
    for names in (",".join(name for name in options.only if name != "steps"), "steps"):
        command = [sys.executable, __file__, *given, "--only", names]
        if options.json:
            command += ["--json", str(options.json.with_stem(f"{options.json.stem}-{names.replace(',', '-')}"))]
        status |= subprocess.run(command, check=False).returncode
    return status


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
