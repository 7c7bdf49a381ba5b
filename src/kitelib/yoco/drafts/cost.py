"""What a step costs by its number of rows, and how many draft tokens are worth their rows.

A step that verifies drafts has one row more per draft token. Whether that pays depends on the machine: where reading
the weights dominates, some rows more are free; where arithmetic does, each row costs about the same, and only drafts
that are likely to be right pay. So the time of a step is measured by its number of rows, and the drafts of a step are
chosen so that the expected tokens per second are highest.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Sequence
from typing import Final

from kitelib.yoco.drafts.proposal import Proposal

__all__ = ["StepCost", "allot"]

_KEPT: Final = 5  # measurements per size; their median is believed
_EXACT_ROWS: Final = 64  # sizes up to here are measured apart, larger ones in classes an eighth of an octave wide
_MARGIN: Final = 0.03  # of the decoded tokens: drafts have to promise so much more than none, since estimates err
_PROBE_ROWS: Final = 4  # rows more than any that were measured, if that is more than twice as many
_PRIOR_SLOPE: Final = 0.5  # of a step of one row, per row more, as long as only one size was measured


class StepCost:
    """Seconds of a step by its number of rows, from the last few measurements of each size.

    Between measured sizes the time is interpolated; a larger step never counts as faster than a smaller one: where
    measurements say so, they are averaged (isotonic regression by pooling neighbours, Ayer et al. 1955).

    Attributes:
        largest: most rows of a measured step; 0 before the first.
    """

    __slots__ = ("_rows", "_samples", "_seconds", "_usual", "largest")

    def __init__(self) -> None:
        self.largest = 0
        self._samples: dict[int, deque[tuple[int, float]]] = {}
        # per class: median seconds, number of measurements, and in a list the mean of their rows
        self._usual: dict[int, tuple[float, float, list[float]]] = {}
        self._rows: list[float] = []
        self._seconds: list[float] = []

    def note(self, rows: int, seconds: float) -> None:
        """Adds a measurement: a step with so many rows in all took so long. Nonsense (no rows, no time) is ignored."""
        if rows < 1 or not 0.0 < seconds < 1e6:
            return
        size = _size_class(rows)
        samples = self._samples.get(size)
        if samples is None:
            samples = self._samples[size] = deque(maxlen=_KEPT)
        samples.append((rows, seconds))
        number = len(samples)
        middle = sorted(each for _, each in samples)
        self._usual[size] = (
            0.5 * (middle[(number - 1) // 2] + middle[number // 2]),
            float(number),
            [sum(each for each, _ in samples) / number],
        )
        self.largest = max(self.largest, rows)
        self._rows = []

    def estimate(self, rows: int) -> float | None:
        """Seconds that a step with so many rows takes; None until something was measured."""
        found = self.estimates(rows, 0)
        return found[0] if found else None

    def estimates(self, rows: int, most: int) -> list[float]:
        """Estimates for each size from `rows` to `rows + most` rows; empty until something was measured."""
        if not self._samples:
            return []
        if not self._rows:
            self._fit()
        sizes, seconds = self._rows, self._seconds
        found: list[float] = []
        size, end = rows, rows + most
        after = bisect.bisect_right(sizes, size)
        while size <= end:
            if after == 0:
                until, start, base, slope = sizes[0], sizes[0], seconds[0], 0.0
            elif after < len(sizes):
                until, start, base = sizes[after], sizes[after - 1], seconds[after - 1]
                slope = (seconds[after] - base) / (until - start)
            else:
                until, start, base, slope = end + 1.0, sizes[-1], seconds[-1], self._slope()
            while size < until and size <= end:
                found.append(base + (size - start) * slope)
                size += 1
            after += 1
        return found

    def _slope(self) -> float:
        """Seconds per row beyond the largest size: what it was so far, and at least half of the average row."""
        sizes, seconds = self._rows, self._seconds
        if len(sizes) == 1:
            return _PRIOR_SLOPE * seconds[0] / sizes[0]
        so_far = (seconds[-1] - seconds[0]) / (sizes[-1] - sizes[0])
        return max(so_far, 0.5 * seconds[-1] / sizes[-1])

    def _fit(self) -> None:
        pools: list[tuple[float, float, list[float]]] = []  # seconds, weight, sizes
        for size in sorted(self._usual):
            seconds, weight, sizes = self._usual[size]
            while pools and pools[-1][0] >= seconds:
                other, other_weight, other_sizes = pools.pop()
                seconds = (other * other_weight + seconds * weight) / (other_weight + weight)
                weight += other_weight
                sizes = other_sizes + sizes
            pools.append((seconds, weight, sizes))
        self._rows = [size for _, _, sizes in pools for size in sizes]
        self._seconds = [seconds for seconds, _, sizes in pools for _ in sizes]


def allot(proposals: Sequence[Proposal | None], rows: int, cost: StepCost, most: int) -> list[int]:
    """How many tokens of each proposal the next step verifies, so that the expected tokens per second are highest.

    Args:
        proposals: one per decoding branch; None where nothing is proposed.
        rows: rows of the step without drafts; more than there are branches if it also prefills.
        cost: what steps take.
        most: most draft tokens of the step.

    Returns:
        One number per branch. All 0 unless drafts promise 3 % more than none; and until `cost` has a measurement.
    """
    given = [0] * len(proposals)
    branches = len(proposals)
    if most < 1 or not branches or cost.largest == 0:
        return given
    # Chances fall along a proposal and the sort is stable, so a prefix of the sorted list has a prefix of each proposal.
    gains = [
        (chance, branch)
        for branch, proposal in enumerate(proposals)
        if proposal is not None
        for chance in proposal.chances
    ]
    gains.sort(key=_first, reverse=True)
    most = min(most, len(gains), max(2 * cost.largest - rows, _PROBE_ROWS))
    if most < 1:
        return given
    seconds = cost.estimates(rows, most)
    alone = cost.estimate(branches)
    # What the step prefills counts as the tokens that its time would give if it only decoded.
    expected = branches * max(1.0, seconds[0] / alone) if alone else float(branches)
    best, best_rate = 0, (expected + _MARGIN * branches) / seconds[0]
    for count in range(1, most + 1):
        expected += gains[count - 1][0]
        rate = expected / seconds[count]
        if rate > best_rate:
            best, best_rate = count, rate
    for _, branch in gains[:best]:
        given[branch] += 1
    return given


def _first(gain: tuple[float, int]) -> float:
    return gain[0]


def _size_class(rows: int) -> int:
    if rows <= _EXACT_ROWS:
        return rows
    octave = rows.bit_length() - 4
    return (octave << 4) + (rows >> octave) + _EXACT_ROWS
