"""The guard over drafts, in simulated time."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest

from kitelib.yoco.drafts import Governor, StepCost


@dataclasses.dataclass
class Decoder:
    """One branch that decodes with four drafts a step whenever it may; its time is what `seconds` says."""

    seconds: Callable[[int], float]
    noise: float = 0.0
    spent_s: float = 0.0
    tokens: int = 0
    drafted_steps: int = 0

    def __post_init__(self) -> None:
        self.cost = StepCost()
        self.governor = Governor(self.cost)
        self.random = random.Random(3)
        for rows in (1, 5):
            self.cost.note(rows, self.seconds(rows))

    def run(self, steps: int, acceptance: float, overhead_s: float = 0.0) -> float:
        """Returns how many times faster than without drafts these steps were."""
        spent, tokens = self.spent_s, self.tokens
        for _ in range(steps):
            drafted = 4 if self.governor.allowed() else 0
            accepted = 0
            while accepted < drafted and self.random.random() < acceptance:
                accepted += 1
            exact = self.seconds(1 + drafted)
            measured = exact * (1.0 + self.noise * self.random.random())
            self.cost.note(1 + drafted, measured)
            if drafted:
                self.governor.note(rows=1, drafted=drafted, accepted=accepted, seconds=measured, overhead_s=overhead_s)
                self.drafted_steps += 1
            self.spent_s += exact + (overhead_s if drafted else 0.0)
            self.tokens += 1 + accepted
        return (self.tokens - tokens) * self.seconds(1) / (self.spent_s - spent)


def steep(rows: int) -> float:
    return 0.01 * (0.5 + 0.5 * rows)


def flat(rows: int) -> float:
    return 0.01 * (1.0 + 0.02 * (rows - 1))


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_drafts_that_are_always_wrong_cost_next_to_nothing(noise: float) -> None:
    decoder = Decoder(steep, noise)
    decoder.run(100, 0.0)
    assert decoder.drafted_steps <= 5
    assert decoder.run(5000, 0.0) > 0.99
    assert decoder.governor.paused > 4500


@pytest.mark.parametrize("acceptance", [0.1, 0.3, 0.5, 0.6])
def test_doubtful_drafts_never_cost_more_than_a_percent(acceptance: float) -> None:
    assert Decoder(steep, 0.2).run(8000, acceptance) > 0.99


def test_drafts_that_pay_are_not_paused() -> None:
    decoder = Decoder(flat, 0.3)
    assert decoder.run(2000, 0.7) > 2.0
    assert decoder.governor.paused == 0
    assert decoder.drafted_steps > 1900


def test_it_comes_back_when_drafts_become_right() -> None:
    decoder = Decoder(steep)
    decoder.run(3000, 0.0)
    before = decoder.drafted_steps
    decoder.run(2000, 1.0)
    assert decoder.drafted_steps - before > 1000


def test_it_stops_soon_when_drafts_become_wrong() -> None:
    decoder = Decoder(steep)
    assert decoder.run(2000, 1.0) > 1.5
    before = decoder.drafted_steps
    decoder.run(500, 0.0)
    assert decoder.drafted_steps - before < 12


def test_time_spent_on_proposing_counts() -> None:
    assert Decoder(flat).run(3000, 0.5, overhead_s=0.015) < 1.0
    decoder = Decoder(flat)
    decoder.run(3000, 0.5, overhead_s=0.015)
    assert decoder.governor.paused > 2000


def test_proposing_in_vain_is_paused_when_it_takes_long() -> None:
    def allowed(overhead_s: float) -> int:
        cost = StepCost()
        cost.note(1, 0.01)
        governor, count = Governor(cost), 0
        for _ in range(2000):
            if governor.allowed():
                count += 1
                governor.note(rows=1, drafted=0, accepted=0, seconds=0.01, overhead_s=overhead_s)
        return count

    assert allowed(0.00002) == 2000
    assert allowed(0.001) < 200


def test_one_disturbed_step_pauses_nothing() -> None:
    decoder = Decoder(flat)
    decoder.run(100, 0.9)
    decoder.governor.note(rows=1, drafted=4, accepted=0, seconds=50.0)
    assert decoder.governor.allowed()


def test_steps_without_drafts_are_measured_now_and_then() -> None:
    decoder = Decoder(flat)
    decoder.run(1000, 0.9)
    assert 10 <= 1000 - decoder.drafted_steps <= 20


def test_beside_a_prefill_an_accepted_token_is_worth_what_it_takes_to_decode() -> None:
    cost = StepCost()
    for rows in (1, 5, 300, 304):
        cost.note(rows, flat(rows))
    governor = Governor(cost)
    before = governor.balance_s
    for _ in range(3):
        governor.note(rows=300, drafted=4, accepted=2, seconds=flat(304), branches=1)
    assert governor.balance_s > before


def test_it_learns_nothing_without_a_time_to_compare_with() -> None:
    governor = Governor(StepCost())
    governor.note(rows=1, drafted=4, accepted=0, seconds=1.0)
    assert governor.balance_s == 0.0
    assert governor.allowed()


def test_what_is_done_for_drafts_beside_steps_counts() -> None:
    decoder = Decoder(flat)
    decoder.run(200, acceptance=1.0)
    governor = decoder.governor
    assert governor.balance_s == pytest.approx(8 * flat(1))
    governor.note(rows=1, drafted=0, accepted=0, seconds=flat(1), overhead_s=flat(1))
    assert governor.balance_s == pytest.approx(7 * flat(1))
    for _ in range(8):
        governor.note(rows=1, drafted=0, accepted=0, seconds=flat(1), overhead_s=flat(1))
    assert not governor.allowed()
