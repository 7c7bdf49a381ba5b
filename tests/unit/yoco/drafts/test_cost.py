"""Times of steps by rows, and how many drafts they make worth verifying."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitelib.yoco.drafts import Proposal, StepCost, allot

MARGIN = 1.03


def cost_of(seconds: dict[int, float]) -> StepCost:
    cost = StepCost()
    for rows, each in seconds.items():
        cost.note(rows, each)
    return cost


def proposal(*chances: float) -> Proposal:
    return Proposal(tuple(range(len(chances))), chances, "answers")


def flat(rows: int) -> float:
    """Reading the weights takes longest: torch on a CPU."""
    return 1.0 + 0.02 * rows


def steep(rows: int) -> float:
    """Each row costs about the same: llama.cpp on a CPU."""
    return (1.0, 1.6, 2.1, 2.55)[rows - 1] if rows <= 4 else 2.55 + (rows - 4) * 0.4


def test_nothing_is_known_before_a_measurement() -> None:
    cost = StepCost()
    assert cost.estimate(1) is None
    assert cost.estimates(1, 4) == []
    assert allot([proposal(1.0, 1.0)], 1, cost, 8) == [0]


def test_between_measured_sizes_it_interpolates_and_below_it_takes_the_smallest() -> None:
    cost = cost_of({2: 1.0, 4: 2.0, 8: 3.0})
    assert cost.estimates(1, 7) == pytest.approx([1.0, 1.0, 1.5, 2.0, 2.25, 2.5, 2.75, 3.0])
    assert cost.estimate(6) == pytest.approx(2.5)


def test_beyond_the_largest_size_it_goes_on_as_before_but_not_for_nothing() -> None:
    assert cost_of({1: 1.0, 3: 2.0}).estimate(5) == pytest.approx(3.0)
    assert cost_of({1: 1.0, 4: 1.0}).estimate(8) == pytest.approx(1.5)
    assert cost_of({1: 1.0}).estimate(3) == pytest.approx(2.0)


def test_a_disturbed_measurement_changes_little() -> None:
    cost = StepCost()
    for seconds in (1.0, 1.1, 30.0, 1.0, 1.05):
        cost.note(1, seconds)
    assert cost.estimate(1) == pytest.approx(1.05)


def test_it_follows_when_steps_become_slower() -> None:
    cost = cost_of({1: 1.0})
    for _ in range(7):
        cost.note(1, 3.0)
    assert cost.estimate(1) == 3.0


@pytest.mark.parametrize(
    ("rows", "seconds"), [(0, 1.0), (-1, 1.0), (1, 0.0), (1, -1.0), (1, float("nan")), (1, float("inf"))]
)
def test_nonsense_is_ignored(rows: int, seconds: float) -> None:
    cost = StepCost()
    cost.note(rows, seconds)
    assert cost.estimate(1) is None


@given(st.lists(st.tuples(st.integers(1, 3000), st.floats(1e-6, 10.0)), min_size=1, max_size=40))
def test_more_rows_never_count_as_faster(measured: list[tuple[int, float]]) -> None:
    cost = StepCost()
    for rows, seconds in measured:
        cost.note(rows, seconds)
    estimates = cost.estimates(1, 3200)
    assert len(estimates) == 3201
    assert all(before <= after * (1 + 1e-9) for before, after in itertools.pairwise(estimates))
    slowest = max(seconds for _, seconds in measured)
    assert min(seconds for _, seconds in measured) * 0.999 <= estimates[0] <= slowest * 1.001
    assert cost.estimate(77) == estimates[76]


chances_of = st.lists(st.floats(0.01, 1.0), max_size=4).map(
    lambda rates: tuple(itertools.accumulate(rates, lambda a, b: a * b))
)


@given(
    st.lists(st.one_of(st.none(), chances_of.filter(bool)), min_size=1, max_size=3),
    st.lists(st.floats(0.0, 0.5), min_size=20, max_size=20),
    st.integers(0, 10),
)
def test_the_allotment_is_the_best_of_all(
    chances: list[tuple[float, ...] | None], increments: list[float], most: int
) -> None:
    cost = cost_of({rows + 1: 1.0 + sum(increments[:rows]) for rows in range(20)})
    proposals = [None if each is None else proposal(*each) for each in chances]
    branches = len(chances)

    def rate(given: tuple[int, ...]) -> float:
        gained = sum(sum((each or ())[:count]) for each, count in zip(chances, given, strict=True))
        seconds = cost.estimate(branches + sum(given))
        assert seconds is not None
        return (branches + gained) / seconds

    options = itertools.product(*(range(len(each or ()) + 1) for each in chances))
    best = max(rate(given) for given in options if sum(given) <= most)
    without = rate((0,) * branches)
    chosen = tuple(allot(proposals, branches, cost, most))
    assert sum(chosen) <= most
    if best > MARGIN * without * (1 + 1e-9):
        assert rate(chosen) == pytest.approx(best)
    else:
        assert rate(chosen) in (pytest.approx(without), pytest.approx(best))


def test_where_rows_are_almost_free_doubtful_drafts_pay_and_elsewhere_only_sure_ones() -> None:
    doubtful = proposal(0.4, 0.2, 0.1, 0.05)
    sure = proposal(*(0.98**count for count in range(1, 48)))
    torch = cost_of({rows: flat(rows) for rows in (1, 2, 4, 8, 16, 48)})
    llama = cost_of({rows: steep(rows) for rows in (1, 2, 3, 4, 8, 16, 48)})
    assert allot([doubtful], 1, torch, 47)[0] >= 3
    assert allot([doubtful], 1, llama, 47) == [0]
    assert allot([sure], 1, llama, 47)[0] > 10


def test_a_step_in_the_cost_is_jumped_when_it_pays_behind_it() -> None:
    seconds = {1: 1.0, **dict.fromkeys(range(2, 17), 2.0)}  # a kernel for one row, and one for sixteen
    assert allot([proposal(*([0.95] * 15))], 1, cost_of(seconds), 15) == [15]
    assert allot([proposal(0.95)], 1, cost_of(seconds), 15) == [0]


def test_what_the_step_prefills_does_not_make_drafts_cheap() -> None:
    """A long step is no reason to verify drafts that would not pay in a short one."""
    cost = cost_of({rows: 0.5 + 0.5 * rows for rows in (1, 2, 3, 4, 8, 300, 310)})
    doubtful = proposal(0.3, 0.2, 0.1)
    assert allot([doubtful], 1, cost, 8) == [0]
    assert allot([doubtful], 300, cost, 8) == [0]
    assert allot([proposal(0.99, 0.98, 0.97)], 300, cost, 8) == [3]


def test_sizes_far_beyond_any_measured_are_not_tried_at_once() -> None:
    sure = proposal(*([1.0] * 60))
    cost = cost_of({1: 1.0})
    first = allot([sure], 1, cost, 60)[0]
    assert 1 <= first <= 4
    cost.note(1 + first, 1.1)
    assert first < allot([sure], 1, cost, 60)[0] <= 2 * (1 + first)


def test_allotting_is_deterministic_and_even_between_equals() -> None:
    cost = cost_of({rows: flat(rows) for rows in range(1, 40)})
    proposals = [proposal(0.9, 0.5), None, proposal(0.9, 0.5)]
    found = allot(proposals, 3, cost, 3)
    assert found == allot(proposals, 3, cost, 3)
    assert found[1] == 0
    assert sorted(found) == [0, 1, 2]


def test_measurements_of_any_order_give_the_same_estimates() -> None:
    measured = [(rows, steep(rows)) for rows in range(1, 60)]
    shuffled = random.Random(2).sample(measured, len(measured))
    assert cost_of(dict(measured)).estimates(1, 120) == pytest.approx(cost_of(dict(shuffled)).estimates(1, 120))
