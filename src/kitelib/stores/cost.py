"""What reading from a tier costs: measured, exponentially weighted, and never believed to better than it varies."""

from __future__ import annotations

from typing import Final

from kitelib.errors import ConfigError

__all__ = ["TierCost"]

_GAIN: Final = 1 / 8  # of a new measurement, as for the round trip time in RFC 6298
_DEVIATION_GAIN: Final = 1 / 4  # likewise
_LEAST_FACTOR: Final = 1 / 8  # one measurement lowers an estimate at most to this part of it
_MOST_FACTOR: Final = 64.0
_LEAST_SECONDS: Final = 1e-7
_SIZE_STEP_BITS: Final = 2  # deviations are kept per class of sizes, each four times the one before


class _Average:
    """Mean and mean deviation of a positive quantity: SRTT and RTTVAR of RFC 6298, section 2."""

    __slots__ = ("deviation", "mean", "measured")

    def __init__(self, prior: float) -> None:
        self.mean = prior
        self.deviation = 0.0
        self.measured = False

    def note(self, value: float) -> None:
        if self.measured:
            self.deviation += _DEVIATION_GAIN * (abs(value - self.mean) - self.deviation)
            self.mean += _GAIN * (value - self.mean)
        else:
            self.mean, self.deviation, self.measured = value, value / 2, True


class TierCost:
    """Seconds that a lookup or a read of one tier takes, estimated from those before.

    A read of n bytes is taken to last ``latency + n / bandwidth``. Each measured read moves both numbers so that an
    eighth of the error (all of it the first time) disappears, each in proportion to how much it contributes:
    normalized least mean squares (Nagumo and Noda 1967) on the logarithms, so a small read teaches the latency and a
    big one the bandwidth. To each part comes the mean deviation seen with reads of about that size (classes a factor
    of four wide; for the latency, the smallest ones), as in RFC 6298: the estimate is pessimistic where the tier is
    erratic.

    Args:
        prior_latency_s: seconds per read that are assumed before anything was measured.
        prior_bytes_per_s: bytes per second that are assumed before anything was measured.

    Attributes:
        measured: whether any read was seen yet.
    """

    def __init__(self, prior_latency_s: float, prior_bytes_per_s: float) -> None:
        if not (prior_latency_s > 0 and prior_bytes_per_s > 0):
            raise ConfigError(
                f"the prior latency is {prior_latency_s} s and the prior bandwidth {prior_bytes_per_s} bytes/s; give positive numbers"
            )
        self.measured = False
        self._latency_s = prior_latency_s
        self._s_per_byte = 1 / prior_bytes_per_s
        self._lookup = _Average(prior_latency_s)
        self._deviations: dict[int, float] = {}  # size class -> mean of |error| / prediction

    @property
    def latency_s(self) -> float:
        """Estimated seconds of a read of no bytes."""
        return self._latency_s

    @property
    def bytes_per_s(self) -> float:
        """Estimated bytes per second while a value is on its way."""
        return 1 / self._s_per_byte

    def note_lookup(self, seconds: float) -> None:
        """A lookup took that long."""
        self._lookup.note(max(seconds, _LEAST_SECONDS))

    def note_read(self, num_bytes: int, seconds: float) -> None:
        """A read of that many bytes, all its values together, took that long."""
        seconds = max(seconds, _LEAST_SECONDS)
        latency, transfer = self._latency_s, num_bytes * self._s_per_byte
        predicted = latency + transfer
        error = seconds - predicted
        size = _size_class(num_bytes)
        if size in self._deviations:
            self._deviations[size] += _DEVIATION_GAIN * (abs(error) / predicted - self._deviations[size])
        else:
            self._deviations[size] = 0.5 if not self.measured else abs(error) / predicted
        step = (_GAIN if self.measured else 1.0) * error / (latency * latency + transfer * transfer)
        self._latency_s = max(latency * _clamped(1 + step * latency), _LEAST_SECONDS)
        self._s_per_byte *= _clamped(1 + step * transfer)
        self.measured = True

    def lookup_seconds(self) -> float:
        """What a lookup takes, pessimistic by its deviation."""
        return self._lookup.mean + self._lookup.deviation

    def read_seconds(self, num_bytes: int) -> float:
        """What a read of that many stored bytes takes, pessimistic by its deviation; checking and decoding them
        comes on top."""
        latency = self._latency_s * (1 + self._deviation(0))
        return latency + num_bytes * self._s_per_byte * (1 + self._deviation(num_bytes))

    def _deviation(self, num_bytes: int) -> float:
        if not self._deviations:
            return 0.5  # RFC 6298: half of the value while there is no second one
        size = _size_class(num_bytes)
        return self._deviations[min(self._deviations, key=lambda known: abs(known - size))]


def _size_class(num_bytes: int) -> int:
    return max(0, num_bytes).bit_length() // _SIZE_STEP_BITS


def _clamped(factor: float) -> float:
    return min(max(factor, _LEAST_FACTOR), _MOST_FACTOR)
