"""What a tier costs is learned from what its reads took, and never believed to better than it varies."""

from __future__ import annotations

import random

import pytest

from kitelib.errors import ConfigError
from kitelib.stores.cost import TierCost

KIB, MIB = 2**10, 2**20


def learned(
    latency_s: float, bytes_per_s: float, sizes: list[int], *, noise: float = 0.0, count: int = 400
) -> TierCost:
    cost = TierCost(5e-3, 100e6)
    chance = random.Random(7)
    for _ in range(count):
        size = chance.choice(sizes)
        cost.note_read(size, (latency_s + size / bytes_per_s) * (1 + chance.uniform(-noise, noise)))
    return cost


def test_before_anything_was_measured_the_prior_counts_pessimistically() -> None:
    cost = TierCost(0.01, 1e6)
    assert not cost.measured
    assert cost.read_seconds(0) == pytest.approx(0.015)
    assert cost.read_seconds(10**6) == pytest.approx(1.515)
    assert cost.lookup_seconds() == pytest.approx(0.01)


@pytest.mark.parametrize(("latency_s", "bytes_per_s"), [(0.0001, 3e9), (0.02, 50e6), (0.001, 200e6), (0.2, 1e6)])
def test_latency_and_bandwidth_are_told_apart_by_small_and_big_reads(latency_s: float, bytes_per_s: float) -> None:
    cost = learned(latency_s, bytes_per_s, [KIB, 16 * KIB, MIB, 32 * MIB], noise=0.05)
    assert cost.latency_s == pytest.approx(latency_s, rel=0.25)
    assert cost.bytes_per_s == pytest.approx(bytes_per_s, rel=0.25)


def test_reads_of_one_size_are_foretold_whatever_their_parts_are() -> None:
    cost = learned(0.002, 80e6, [MIB], noise=0.0)
    assert cost.read_seconds(MIB) == pytest.approx(0.002 + MIB / 80e6, rel=0.02)


def test_the_first_read_replaces_the_prior() -> None:
    cost = TierCost(5e-3, 100e6)
    cost.note_read(MIB, 1.0)
    assert cost.measured
    assert 1.0 <= cost.read_seconds(MIB) <= 1.6
    fast = TierCost(5e-3, 100e6)
    for _ in range(3):
        fast.note_read(MIB, 0.001)
    assert fast.read_seconds(MIB) < 0.005


def test_an_erratic_tier_is_estimated_as_slower_than_its_mean() -> None:
    steady = learned(0.01, 100e6, [MIB], noise=0.02)
    erratic = learned(0.01, 100e6, [MIB], noise=0.9)
    mean = 0.01 + MIB / 100e6
    assert steady.read_seconds(MIB) < 1.1 * mean
    assert erratic.read_seconds(MIB) > 1.2 * mean


def test_deviations_are_kept_per_size() -> None:
    cost = TierCost(5e-3, 100e6)
    chance = random.Random(3)
    for _ in range(300):
        cost.note_read(KIB, 0.01)
        cost.note_read(16 * MIB, 0.01 + 16 * MIB / 100e6 * chance.choice([0.4, 1.6]))
    assert cost.read_seconds(KIB) < 0.013
    assert cost.read_seconds(16 * MIB) > 1.25 * (0.01 + 16 * MIB / 100e6)


def test_a_tier_that_gets_slow_is_noticed_within_a_few_reads() -> None:
    """B29: costs are measured all the time, not once."""
    cost = learned(0.001, 1e9, [MIB])
    for _ in range(8):
        cost.note_read(MIB, 0.2)
    assert cost.read_seconds(MIB) > 0.1
    for _ in range(60):
        cost.note_read(MIB, 0.002)
    assert cost.read_seconds(MIB) < 0.02


def test_more_bytes_never_cost_less() -> None:
    cost = TierCost(5e-3, 100e6)
    chance = random.Random(11)
    for _ in range(500):
        cost.note_read(chance.choice([0, KIB, MIB]), chance.uniform(0, 0.1))
        seconds = [cost.read_seconds(size) - cost.read_seconds(0) for size in (0, KIB, 64 * KIB, MIB, 64 * MIB)]
        assert min(seconds) >= 0


def test_odd_measurements_leave_a_usable_estimate() -> None:
    cost = TierCost(5e-3, 100e6)
    for num_bytes, seconds in ((0, 0.0), (0, -1.0), (2**40, 0.0), (1, 1e6), (MIB, 1e-9), (0, 3600.0)):
        cost.note_read(num_bytes, seconds)
        cost.note_lookup(seconds)
        assert 0 < cost.read_seconds(MIB) < 1e9
        assert 0 < cost.lookup_seconds() < 1e9


def test_lookups_are_averaged_apart_from_reads() -> None:
    cost = TierCost(5e-3, 100e6)
    for _ in range(50):
        cost.note_lookup(0.0005)
    assert cost.lookup_seconds() == pytest.approx(0.0005, rel=0.1)
    assert not cost.measured


def test_a_prior_that_is_no_positive_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="prior latency is 0"):
        TierCost(0, 1)
