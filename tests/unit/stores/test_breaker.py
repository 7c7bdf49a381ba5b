"""The breaker opens after failures in a row, probes once at a time, and closes when a probe succeeds."""

from __future__ import annotations

import asyncio

import pytest

from kitelib.stores.breaker import Breaker
from tests.support.shared_memory import HandClock


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


def make(clock: HandClock, **options: float) -> Breaker:
    return Breaker(max_failures=3, open_s=1.0, max_open_s=8.0, clock=clock, **options)


def fail(breaker: Breaker) -> None:
    with pytest.raises(OSError, match="down"), breaker.watch():
        raise OSError("down")


def succeed(breaker: Breaker) -> None:
    with breaker.watch():
        pass


def opened(clock: HandClock) -> Breaker:
    breaker = make(clock)
    for _ in range(3):
        fail(breaker)
    return breaker


def test_it_opens_after_failures_in_a_row_only(clock: HandClock) -> None:
    breaker = make(clock)
    for _ in range(5):
        fail(breaker)
        fail(breaker)
        succeed(breaker)
    assert (breaker.state, breaker.opened, breaker.allows()) == ("closed", 0, True)
    for _ in range(3):
        fail(breaker)
    assert (breaker.state, breaker.opened, breaker.allows()) == ("open", 1, False)


def test_after_its_time_one_probe_passes_and_closes_it(clock: HandClock) -> None:
    breaker = opened(clock)
    clock.advance(1.21)  # the time and all that chance may add
    assert breaker.state == "half_open"
    assert breaker.allows()
    with breaker.watch():
        assert not breaker.allows()  # a second call has to wait for the probe's verdict
        assert breaker.state == "half_open"
    assert (breaker.state, breaker.allows()) == ("closed", True)
    fail(breaker)
    fail(breaker)
    assert breaker.allows()  # the count starts anew


def test_failed_probes_wait_twice_as_long_each_time_up_to_a_bound(clock: HandClock) -> None:
    breaker = opened(clock)
    for wait in (1, 2, 4, 8, 8, 8):
        clock.advance(wait * 0.99)
        assert breaker.state == "open"
        clock.advance(wait * 0.22)
        assert breaker.state == "half_open"
        fail(breaker)
        assert breaker.state == "open"
    assert breaker.opened == 1  # it never was closed in between
    clock.advance(9.7)
    succeed(breaker)
    for _ in range(3):
        fail(breaker)
    clock.advance(1.21)
    assert breaker.state == "half_open"  # after a success, the waiting starts from the beginning


def test_two_breakers_do_not_probe_at_the_same_moment(clock: HandClock) -> None:
    breakers = [opened(clock) for _ in range(200)]
    clock.advance(1.1)
    half = sum(breaker.state == "half_open" for breaker in breakers)
    assert 0 < half < 200


async def test_a_cancelled_probe_says_nothing_and_lets_the_next_one_try(clock: HandClock) -> None:
    """B12: cancelling a caller neither closes nor blocks the breaker."""
    breaker = opened(clock)
    clock.advance(1.21)

    async def probe() -> None:
        with breaker.watch():
            await asyncio.sleep(3600)

    task = asyncio.create_task(probe())
    await asyncio.sleep(0)
    assert not breaker.allows()
    task.cancel()
    await asyncio.wait([task])
    assert (breaker.state, breaker.allows()) == ("half_open", True)


def test_a_cancelled_call_is_no_failure(clock: HandClock) -> None:
    breaker = make(clock)
    for _ in range(10):
        with pytest.raises(asyncio.CancelledError), breaker.watch():
            raise asyncio.CancelledError
    assert breaker.state == "closed"


def test_calls_from_before_it_opened_do_not_decide_a_probe(clock: HandClock) -> None:
    breaker = make(clock)
    early_failure, late_failure, late_success = breaker.watch(), breaker.watch(), breaker.watch()
    for call in (early_failure, late_failure, late_success):
        call.__enter__()
    for _ in range(3):
        fail(breaker)
    assert early_failure.__exit__(OSError, OSError("late"), None) is False
    clock.advance(1.21)
    assert breaker.state == "half_open"  # not put off by what was under way before
    with breaker.watch():  # the probe
        late_success.__exit__(None, None, None)
        assert breaker.state == "half_open"
        assert late_failure.__exit__(OSError, OSError("late"), None) is False
        assert not breaker.allows()
    assert breaker.state == "closed"
