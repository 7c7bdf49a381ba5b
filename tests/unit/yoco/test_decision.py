"""Load or recompute: a request waits only for what is quick, overlaps what gains, and leaves alone what is slow."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitelib.stores.tiered import Span
from kitelib.yoco.decision import Costs, decide, patience

FAST: Any = object()
SLOW: Any = object()


def counts(spans: tuple[Span, ...]) -> list[int]:
    return [span.count for span in spans]


def test_what_fits_into_the_patience_is_waited_for() -> None:
    verdict = decide([Span(FAST, 0, 10)], [Costs(0.001, 0.001)], compute_block_s=0.1, patience_s=0.03)
    assert (counts(verdict.wait), verdict.overlap, verdict.skip) == ([10], (), ())


def test_what_takes_longer_is_loaded_while_the_request_computes() -> None:
    verdict = decide([Span(FAST, 0, 10)], [Costs(0.02, 0.02)], compute_block_s=0.1, patience_s=0.03)
    assert (verdict.wait, counts(verdict.overlap), verdict.skip) == ((), [10], ())


def test_b29_a_store_that_is_slower_than_computing_is_left_alone() -> None:
    """B29: hits of a slow tier made requests slower than recomputing."""
    verdict = decide([Span(SLOW, 0, 10)], [Costs(0.5, 1.0)], compute_block_s=0.1, patience_s=10.0)
    assert (verdict.wait, verdict.overlap, counts(verdict.skip)) == ((), (), [10])


def test_b29_the_first_part_of_a_run_is_used_when_only_that_pays() -> None:
    """B29: a partial load is better than none."""
    spans = [Span(FAST, 0, 10), Span(SLOW, 10, 20)]
    verdict = decide(spans, [Costs(0.001, 0.001), Costs(9.0, 2.0)], compute_block_s=0.1, patience_s=0.05)
    assert (counts(verdict.wait), verdict.overlap, counts(verdict.skip)) == ([10], (), [20])


def test_a_slow_tier_behind_a_fast_one_does_not_spoil_the_overlap() -> None:
    spans = [Span(FAST, 0, 20), Span(SLOW, 20, 5)]
    verdict = decide(spans, [Costs(0.05, 0.05), Costs(500.0, 10.0)], compute_block_s=0.1, patience_s=0.01)
    assert (verdict.wait, counts(verdict.overlap), counts(verdict.skip)) == ((), [20], [5])


def test_nothing_found_means_nothing_to_do() -> None:
    assert decide([], [], 0.1, 1.0) == decide([], [], 0.0, 0.0)


@given(
    st.lists(st.tuples(st.integers(1, 50), st.floats(0, 5), st.floats(0, 1)), max_size=4),
    st.floats(1e-4, 1),
    st.floats(0, 2),
)
def test_every_span_has_one_fate_in_order_and_waiting_stays_within_the_patience(
    rows: list[tuple[int, float, float]], compute: float, left: float
) -> None:
    spans, costs, first = [], [], 0
    for count, latency, block in rows:
        spans.append(Span(FAST, first, count))
        costs.append(Costs(latency, block))
        first += count
    verdict = decide(spans, costs, compute, left)
    assert [*verdict.wait, *verdict.overlap, *verdict.skip] == spans
    waited = sum(cost.seconds(span.count) for span, cost in zip(verdict.wait, costs, strict=False))
    assert waited <= left + 1e-9
    assert all(cost.seconds(span.count) < span.count * compute for span, cost in zip(verdict.wait, costs, strict=False))


@pytest.mark.parametrize("compute_s", [0.0, 0.1, 4.0])
def test_patience_is_a_small_share_of_what_computing_takes(compute_s: float) -> None:
    assert patience(compute_s, measured=True) <= max(0.005, 0.05 * compute_s)
    assert patience(compute_s, measured=False) >= patience(compute_s, measured=True)
