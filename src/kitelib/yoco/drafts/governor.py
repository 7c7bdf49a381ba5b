"""The guard that keeps drafts from costing more than they give."""

from __future__ import annotations

from typing import Final

from kitelib.yoco.drafts.cost import StepCost

__all__ = ["Governor"]

_ALLOWANCE: Final = 0.005  # of a step's time is earned per step that could have had drafts: what they may lose
_FIRST_STEPS: Final = 3.0  # steps whose time may be lost before anything was gained
_MOST_STEPS: Final = 8.0  # steps whose time is kept of what was gained
_WORST_STEPS: Final = 4.0  # steps whose time one step may lose at most: a measurement may have been disturbed
_REFRESH: Final = 64  # every so many steps with drafts one goes without, to measure what that takes now


class Governor:
    """Allows drafts as long as they gain more time than they cost, with a small allowance for finding that out.

    It keeps an account in seconds. A step with drafts pays in what its accepted tokens would have taken without
    drafts, and takes out what it takes longer than a step without; every step pays in half a percent of its time.
    Drafts are allowed while the account is not overdrawn. So decoding is never slower than without drafts by much more
    than half a percent; drafts that don't pay are paused at once, for the longer the more they lost, and then tried
    again; and what was gained before is soon used up when drafts stop being right.

    Args:
        cost: what steps take; has the times of steps with and without drafts, and is told each step before `note`.

    Attributes:
        balance_s: the account.
        paused: steps that were not allowed to have drafts, so far.
    """

    __slots__ = ("_cost", "_since_refresh", "_step_s", "balance_s", "paused")

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self._step_s = 0.0
        self._since_refresh = 0
        self.balance_s = 0.0
        self.paused = 0

    def allowed(self) -> bool:
        """Whether the next step may have drafts; to be asked once per step that could have some."""
        self.balance_s = min(self.balance_s + _ALLOWANCE * self._step_s, _MOST_STEPS * self._step_s)
        if self.balance_s < 0.0:
            self.paused += 1
            return False
        if self._since_refresh >= _REFRESH:
            self._since_refresh = 0
            return False
        return True

    def note(
        self,
        *,
        rows: int,
        drafted: int,
        accepted: int,
        seconds: float,
        overhead_s: float = 0.0,
        branches: int | None = None,
    ) -> None:
        """Takes in what a step with drafts took and gave; or, with `drafted` 0, that drafts took time for nothing.

        Args:
            rows: rows of the step without its draft tokens.
            drafted: its draft tokens, of all branches together.
            accepted: how many of them were accepted.
            seconds: what the step took.
            overhead_s: what proposing and choosing drafts took, and all else that is done for them.
            branches: rows that decode; None means that all do. It matters for what an accepted token is worth: its
                part of a step that only decodes.
        """
        if not drafted and self._step_s:
            self.balance_s += max(-overhead_s, -_WORST_STEPS * self._step_s)
            return
        decoding = rows if branches is None else branches
        without, alone = self._cost.estimate(rows), self._cost.estimate(decoding)
        expected = self._cost.estimate(rows + drafted)
        if without is None or alone is None or expected is None or decoding < 1:
            return
        if not self._step_s:
            self.balance_s += _FIRST_STEPS * alone
        self._step_s = alone
        change = -overhead_s
        if drafted:
            self._since_refresh += 1
            # Times of steps are scattered by what else the machine does: the usual time counts as much as this one.
            taken = 0.5 * (expected + min(seconds, 2.0 * expected))
            change += accepted * alone / decoding - (taken - without)
        self.balance_s += max(change, -_WORST_STEPS * alone)
        self.balance_s = min(self.balance_s, _MOST_STEPS * alone)
