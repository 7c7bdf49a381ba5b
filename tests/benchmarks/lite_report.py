"""Measurements as records: medians, ratios, the table and the JSON file."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

__all__ = ["Figure", "Report", "describe_host", "median", "progress"]

Verdict = Literal["met", "missed", "info", "n/a"]


def median(samples: Sequence[float]) -> float:
    return statistics.median(samples) if samples else float("nan")


def progress(text: str) -> None:
    """One line on stderr, so that a long run shows what it does and stdout stays the table."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table.

    Attributes:
        section: name of the benchmark section.
        what: what was measured.
        threads: threads the model ran on.
        value: the figure, in `unit`; None if it was not measured.
        unit: "s", "x" (a ratio), "tok/s", "GB/s", "steps", "ms".
        target: bound that the figure must keep, in words; "" if it has none.
        verdict: "met", "missed", "info" (no target) or "n/a" (not measured; `note` says why).
        samples: raw samples behind `value`, in `unit` or seconds.
        note: one sentence.
    """

    section: str
    what: str
    threads: int
    value: float | None
    unit: str
    target: str = ""
    verdict: Verdict = "info"
    samples: tuple[float, ...] = ()
    note: str = ""


class Report:
    """Collects figures while a run goes on.

    Args:
        threads: threads of the figures added from now on; assign to change.
    """

    def __init__(self, threads: int = 1) -> None:
        self.threads = threads
        self.figures: list[Figure] = []

    def add(self, section: str, what: str, samples: Sequence[float], unit: str = "s", note: str = "") -> float:
        """Adds the median of `samples` and returns it."""
        value = median(samples)
        self._append(Figure(section, what, self.threads, value, unit, samples=tuple(samples), note=note))
        return value

    def judge(
        self,
        section: str,
        what: str,
        value: float,
        bound: float,
        unit: str = "x",
        *,
        at_least: bool = False,
        note: str = "",
    ) -> None:
        """Adds a figure that has a target."""
        good = value >= bound if at_least else value <= bound
        target = f"{'>=' if at_least else '<='} {bound:g}"
        verdict: Verdict = "met" if good else "missed"
        self._append(Figure(section, what, self.threads, value, unit, target, verdict, note=note))

    def factor(self, section: str, what: str, value: float, note: str = "") -> None:
        """Adds a factor over a peer; KITE has to be ahead, that is above 1."""
        verdict: Verdict = "met" if value > 1.0 else "missed"
        self._append(Figure(section, what, self.threads, value, "x", "> 1", verdict, note=note))

    def missing(self, section: str, what: str, why: str) -> None:
        self._append(Figure(section, what, self.threads, None, "", verdict="n/a", note=why))

    def _append(self, figure: Figure) -> None:
        self.figures.append(figure)
        progress("  " + _line(figure))

    def table(self) -> str:
        lines: list[str] = []
        section = ""
        for figure in self.figures:
            if (title := f"{figure.section} ({_threads(figure.threads)})") != section:
                section = title
                lines += ["", section]
            lines.append("  " + _line(figure))
        met, missed = (sum(f.verdict == verdict for f in self.figures) for verdict in ("met", "missed"))
        return "\n".join([*lines, "", f"targets met: {met}, missed: {missed}"])

    def write(self, path: Path, host: dict[str, Any]) -> None:
        figures = [dataclasses.asdict(figure) for figure in self.figures]
        path.write_text(json.dumps({"host": host, "figures": figures}, indent=1) + "\n")


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


_FORMATS: dict[str, Callable[[float], str]] = {
    "s": lambda v: f"{v * 1e3:.1f} ms" if v < 1 else f"{v:.2f} s",
    "x": lambda v: f"{v:.3f} x" if v < 10 else f"{v:.1f} x",
    "ms": lambda v: f"{v:.1f} ms",
    "steps": lambda v: f"{v:g} steps",
}


def _line(figure: Figure) -> str:
    shown = "n/a"
    if figure.value is not None:
        shape = _FORMATS.get(figure.unit)
        shown = shape(figure.value) if shape else f"{figure.value:.1f} {figure.unit}"
    judged = f"{figure.target:>8} {figure.verdict:<6}" if figure.target else " " * 15
    return f"{figure.what:<72} {shown:>12} {judged} {figure.note}".rstrip()


def describe_host(model: str, flags: dict[str, Any]) -> dict[str, Any]:
    """Facts without which the figures say little."""
    versions = {}
    for package in ("kitelib", "llama_cpp_python", "numpy", "zstandard"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "model": Path(model).name,
        "model_bytes": Path(model).stat().st_size,
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions,
        "llama_cpp_system": _system_info(),
        "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "unset"),
        "flags": flags,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _system_info() -> str:
    library: Any = importlib.import_module("llama_cpp")
    return str(library.llama_print_system_info().decode())
