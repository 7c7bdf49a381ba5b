"""Timing on a device, and the one table that the benchmark prints."""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

__all__ = ["Report", "Row", "seconds", "wait_for"]


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        name: what was measured.
        value: the figure; None if it was not measured.
        unit: its unit.
        share: the figure as a part of `of`.
        of: what `share` relates to, or why there is no figure.
    """

    name: str
    value: float | None
    unit: str
    share: float | None = None
    of: str = ""


class Report:
    """Collects rows; knows how much time is left.

    Args:
        device: what is measured.
        tiny: sizes that only show that the code runs.
        time_limit_s: sections that would begin later are left out.
    """

    def __init__(self, device: torch.device, *, tiny: bool, time_limit_s: float) -> None:
        self.device = device
        self.tiny = tiny
        self.rows: list[Row] = []
        self.figures: dict[str, float] = {}
        self._end = time.monotonic() + time_limit_s
        self._progress = sys.stderr

    def time_left(self) -> float:
        """Seconds."""
        return self._end - time.monotonic()

    def add(self, name: str, value: float, unit: str, ceiling: tuple[float, str] | None = None) -> None:
        """One figure, with the ceiling (value, name) that it relates to."""
        share, of = (value / ceiling[0], ceiling[1]) if ceiling else (None, "")
        self.figures[name] = value
        self.rows.append(Row(name, value, unit, share, of))
        self._progress.write(f"{name}: {value:,.4g} {unit}\n")
        self._progress.flush()

    def leave_out(self, name: str, reason: str) -> None:
        """Says why something was not measured."""
        self.rows.append(Row(name, None, "", None, f"left out: {reason}"))
        self._progress.write(f"{name} is left out: {reason}\n")

    def section(self, name: str, function: Callable[[Report], None], *, needs_s: float = 0.0) -> None:
        """Runs one part; what fails is noted, and the other parts still run."""
        if self.time_left() < needs_s:
            self.leave_out(name, f"only {self.time_left():.0f} s of the time limit are left")
            return
        try:
            function(self)
        except Exception as error:  # noqa: BLE001 - one failing part must not hide the figures of the others
            import traceback

            traceback.print_exc(file=self._progress)
            self.leave_out(name, f"FAILED: {type(error).__name__}: {error}"[:300])

    @property
    def failed(self) -> list[str]:
        """Parts that failed."""
        return [row.name for row in self.rows if row.of.startswith("left out: FAILED")]

    def table(self) -> str:
        """All rows, for people."""
        width = max((len(row.name) for row in self.rows), default=0)
        lines = [f"{'':{width}}  {'figure':>12}  {'unit':10}  share"]
        for row in self.rows:
            value = "" if row.value is None else f"{row.value:,.4g}" if row.value < 100 else f"{row.value:,.0f}"
            share = "" if row.share is None else f"{row.share:.2f} of {row.of}"
            lines.append(f"{row.name:{width}}  {value:>12}  {row.unit:10}  {share or row.of}".rstrip())
        return "\n".join(lines)

    def write(self, path: Path, versions: dict[str, Any]) -> None:
        """The same as JSON."""
        rows = [dataclasses.asdict(row) for row in self.rows]
        path.write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n", encoding="utf-8")


def wait_for(device: torch.device) -> None:
    """Until the device has done everything."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(function: Callable[[], Any], device: torch.device, *, runs: int = 7, inner: int = 1) -> float:
    """Median time of one call, after two calls that don't count. On a GPU by its own clock."""
    for _ in range(2):
        function()
    wait_for(device)
    times = []
    for _ in range(runs):
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(inner):
                function()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1000 / inner)
        else:
            begin = time.perf_counter()
            for _ in range(inner):
                function()
            times.append((time.perf_counter() - begin) / inner)
    return statistics.median(times)
