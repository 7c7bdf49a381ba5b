"""Wall time and CPU time of the same stretch of work."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence

__all__ = ["Span", "Stopwatch", "median_span"]


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """Seconds on the clock, and seconds of CPU that all threads of this process used meanwhile.

    CPU time tells whether a difference is work or other processes on the same cores: they take wall time only.
    """

    wall_s: float
    cpu_s: float


class Stopwatch:
    """Starts when it is made."""

    def __init__(self) -> None:
        self._cpu = time.process_time()
        self._wall = time.perf_counter()

    def span(self) -> Span:
        """From the start to now."""
        return Span(time.perf_counter() - self._wall, time.process_time() - self._cpu)


def median_span(spans: Sequence[Span]) -> Span:
    """Both medians, each by itself."""
    return Span(statistics.median(s.wall_s for s in spans), statistics.median(s.cpu_s for s in spans))
