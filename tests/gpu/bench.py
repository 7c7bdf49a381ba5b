"""What the torch engine reaches on a GPU: ``python tests/gpu/bench.py [--json FILE]``; 3 to 4 minutes on one H200.

Prints one table. ``--device cpu --tiny`` runs every part with sizes that only show that the code works.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

for _folder in (Path(__file__).resolve().parents[2], Path(__file__).resolve().parents[2] / "src"):
    if str(_folder) not in sys.path:
        sys.path.insert(0, str(_folder))

__all__ = ["main"]


def _versions(device: Any) -> dict[str, str]:
    import importlib.metadata

    import torch

    import kitelib

    found = {"kitelib": kitelib.__version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    for name in ("triton", "transformers", "numpy"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    found["cuda"] = str(torch.version.cuda)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["device"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, capability "
        found["device"] += f"{properties.major}.{properties.minor}, {properties.multi_processor_count} multiprocessors"
    else:
        found["device"] = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns 1 if a part failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="only show that everything runs")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds after which no further part begins")
    parser.add_argument("--only", default="", help="comma-separated parts: copies, pages, transfer, attention, model")
    options = parser.parse_args(arguments)
    import torch

    from tests.gpu import bench_memory, bench_pages
    from tests.gpu.bench_report import Report

    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.stdout.write("The benchmark is skipped: torch.cuda.is_available() is False\n")
        return 0
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    report = Report(device, tiny=options.tiny, time_limit_s=options.limit)
    parts: dict[str, Callable[[Report], None]] = {
        "copies": bench_memory.copies,
        "pages": bench_pages.pages,
        "transfer": bench_memory.transfer,
        "attention": bench_memory.attention,
        "model": _model,
    }
    chosen = {"copies", *options.only.split(",")} if options.only else set(parts)
    for name, part in parts.items():
        if name in chosen:
            report.section(name, part)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    versions = _versions(device)
    sys.stdout.write("".join(f"{name:13} {value}\n" for name, value in versions.items()))
    sys.stdout.write(f"\n{report.table()}\n")
    if options.json is not None:
        report.write(options.json, versions)
    return 1 if report.failed else 0


def _model(report: Any) -> None:
    from tests.gpu.bench_model import EightB

    model = EightB(report)
    report.section("decode", model.decode, needs_s=60.0 if not report.tiny else 0.0)
    report.section("verify", model.verify, needs_s=10.0 if not report.tiny else 0.0)
    report.section("first token", model.first_token, needs_s=30.0 if not report.tiny else 0.0)
    model.free_cache()
    for batch in model.batches:
        part = f"transformers eager static cache, batch {batch}"
        report.section(
            part, lambda _, b=batch: model.rival(report, b, compiled=False), needs_s=0 if report.tiny else 20
        )
    for batch in (64, 1):
        part = f"transformers compiled static cache, batch {batch}"
        if report.device.type != "cuda":
            report.leave_out(part, "compiling takes a minute, and generate does it on CUDA only")
        else:
            report.section(part, lambda _, b=batch: model.rival(report, b, compiled=True), needs_s=90)


if __name__ == "__main__":
    sys.exit(main())
