"""A circuit breaker: stops calling what keeps failing, and tries it again with one probe at a time.

States as in Nygard, "Release It!" (2nd ed., 2018), section "Circuit Breaker": closed (calls pass), open (calls don't),
half open (one call passes and decides).
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from typing import Literal

from kitelib.abc import Clock

__all__ = ["Breaker", "BreakerState"]

BreakerState = Literal["closed", "open", "half_open"]


class Breaker:
    """One per tier or node. Used on the event loop only.

    ::

        if breaker.allows():
            with breaker.watch():      # an exception inside counts as a failure, a cancellation does not
                ...

    Args:
        max_failures: failures in a row that open it.
        open_s: seconds before the first probe; doubles with every failed probe, up to `max_open_s`. Up to a fifth is
            added at random, so that the processes of a fleet don't probe at the same moment.
        clock: time source.

    Attributes:
        opened: how often it went from closed to open.
    """

    def __init__(
        self, max_failures: int = 3, open_s: float = 1.0, max_open_s: float = 30.0, clock: Clock | None = None
    ) -> None:
        self._max_failures = max_failures
        self._first_open_s = open_s
        self._max_open_s = max_open_s
        self._monotonic = time.monotonic if clock is None else clock.monotonic
        self._failures = 0
        self._open_s = open_s
        self._until: float | None = None
        self._probing = False
        self.opened = 0

    @property
    def state(self) -> BreakerState:
        """The state right now."""
        if self._until is None:
            return "closed"
        return "half_open" if self._probing or self._monotonic() >= self._until else "open"

    def allows(self) -> bool:
        """Whether a call may be made now; in the half-open state only while no other probe is under way."""
        return self._until is None or (not self._probing and self._monotonic() >= self._until)

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Counts how the call inside ends. A caller's own cancellation says nothing about the other side: let timeouts
        raise `TimeoutError` inside the block."""
        probe = self._until is not None
        self._probing = self._probing or probe
        try:
            yield
        except Exception:
            if probe or self._until is None:  # a call from before it opened says nothing new
                self.fail()
            raise
        else:
            if probe or self._until is None:
                self.succeed()
        finally:
            if probe:
                self._probing = False

    def succeed(self) -> None:
        """A call succeeded: closes."""
        self._failures, self._open_s, self._until = 0, self._first_open_s, None

    def fail(self) -> None:
        """A call failed: opens after enough of them in a row, or at once if it was a probe."""
        self._failures += 1
        if self._until is not None:
            self._open_s = min(2 * self._open_s, self._max_open_s)
        elif self._failures < self._max_failures:
            return
        else:
            self.opened += 1
        self._until = self._monotonic() + self._open_s * random.uniform(1.0, 1.2)  # noqa: S311 - no secret
