"""What fits a bundle: compared with every possible choice on small forests, and by its promises on larger ones."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import pytest

from kitelib import InvalidRequestError
from kitelib.upcycle.bundle.budget import Candidate, choose


def _value(candidates: list[Candidate], chosen: list[int]) -> float:
    return math.fsum(candidates[index].saved_tokens * candidates[index].hits for index in chosen)


def _bytes(candidates: list[Candidate], chosen: list[int]) -> int:
    return sum(candidates[index].num_bytes for index in chosen)


def _closed(candidates: list[Candidate], chosen: list[int]) -> bool:
    """Whether each chosen unit has its parent, if that is among the candidates."""
    everyone = {each.key for each in candidates}
    taken = {candidates[index].key for index in chosen}
    return all(candidates[index].parent in taken for index in chosen if candidates[index].parent in everyone)


def _best(candidates: list[Candidate], max_bytes: int) -> float:
    choices = itertools.product((False, True), repeat=len(candidates))
    found = 0.0
    for choice in choices:
        chosen = [index for index, taken in enumerate(choice) if taken]
        if _bytes(candidates, chosen) <= max_bytes and _closed(candidates, chosen):
            found = max(found, _value(candidates, chosen))
    return found


def _forest(generator: random.Random, size: int, *, falling: bool, one_size: bool = False) -> list[Candidate]:
    """Random trees in shuffled order; with `falling`, no unit is worth more per byte than its parent."""
    candidates: list[Candidate] = []
    for index in range(size):
        parent = generator.choice([None, *candidates])
        num_bytes = 8 if one_size else generator.randint(1, 20)
        density = generator.random() * 10
        if falling and parent is not None:
            density = min(density, parent.saved_tokens * parent.hits / parent.num_bytes)
        saved = generator.choice([1.0, 16.0])
        name = None if parent is None else parent.key
        candidates.append(Candidate(f"u{index}", name, num_bytes, saved, density * num_bytes / saved))
    generator.shuffle(candidates)
    return candidates


def test_a_chain_is_cut_at_its_end():
    chain = [Candidate(f"b{i}", f"b{i - 1}" if i else None, 10, 16, 5) for i in range(10)]
    assert choose(chain, 100) == list(range(10))
    assert choose(chain, 99) == list(range(9))
    assert choose(chain, 35) == [0, 1, 2]
    assert choose(chain, 9) == []
    assert choose(chain[::-1], 35) == [7, 8, 9]


def test_a_parent_of_little_value_is_taken_for_the_children_behind_it():
    candidates = [
        Candidate("rest", None, 50, 1, 60),
        Candidate("parent", None, 40, 1, 1),
        Candidate("child", "parent", 10, 1, 100),
        Candidate("grandchild", "child", 10, 1, 90),
    ]
    assert choose(candidates, 60) == [1, 2, 3]  # by its own value per byte, "rest" would have come first
    assert choose(candidates, 110) == [0, 1, 2, 3]
    assert choose(candidates, 59) == [1, 2]
    assert choose(candidates, 49) == [1]


def test_a_child_that_can_not_fit_does_not_pull_its_parent_in():
    candidates = [
        Candidate("parent", None, 40, 1, 1),
        Candidate("child", "parent", 30, 1, 1000),
        Candidate("rest", None, 50, 1, 50),
    ]
    assert choose(candidates, 69) == [2]
    assert choose(candidates, 70) == [0, 1]


def test_small_units_do_not_keep_the_one_valuable_unit_out():
    candidates = [Candidate("small", None, 1, 1, 2), Candidate("large", None, 100, 1, 100)]
    assert choose(candidates, 100) == [1]
    assert choose(candidates, 101) == [0, 1]


def test_a_parent_outside_the_candidates_is_no_condition():
    candidates = [Candidate("b5", "b4", 10, 16, 1), Candidate("b6", "b5", 10, 16, 1)]
    assert choose(candidates, 10) == [0]


def test_equal_units_keep_the_order_given():
    candidates = [Candidate(f"u{index}", None, 10, 16, 3) for index in range(10)]
    assert choose(candidates, 45) == [0, 1, 2, 3]
    zero = [dataclasses.replace(each, hits=0.0) for each in candidates]
    assert choose(zero, 45) == [0, 1, 2, 3]


def test_units_without_bytes_cost_nothing():
    candidates = [Candidate("a", None, 0, 1, 1), Candidate("b", "a", 10, 1, 1), Candidate("c", "b", 0, 1, 1)]
    assert choose(candidates, 0) == [0]
    assert choose(candidates, 10) == [0, 1, 2]
    assert choose(candidates, -1) == []
    assert choose([], 10) == []


def test_units_in_a_circle_are_never_taken():
    candidates = [
        Candidate("a", "b", 1, 1, 9),
        Candidate("b", "a", 1, 1, 9),
        Candidate("c", "c", 1, 1, 9),
        Candidate("d", "a", 1, 1, 9),
        Candidate("e", None, 1, 1, 1),
    ]
    assert choose(candidates, 100) == [4]


@pytest.mark.parametrize("field", ["num_bytes", "saved_tokens", "hits"])
@pytest.mark.parametrize("number", [-1, math.nan, math.inf])
def test_numbers_that_make_no_sense_are_named(field, number):
    candidate = dataclasses.replace(Candidate("x", None, 1, 1, 1), **{field: number})
    with pytest.raises(InvalidRequestError, match=f"{field} of the candidate 'x'"):
        choose([candidate], 10)


def test_one_key_twice_is_refused():
    with pytest.raises(InvalidRequestError, match="have the key 'x'"):
        choose([Candidate("x", None, 1, 1, 1)] * 2, 10)


@pytest.mark.parametrize("seed", range(60))
def test_half_of_the_best_choice_where_value_per_byte_falls(seed):
    generator = random.Random(seed)
    candidates = _forest(generator, generator.randint(1, 10), falling=True)
    for max_bytes in {generator.randint(0, 120) for _ in range(6)}:
        chosen = choose(candidates, max_bytes)
        assert _value(candidates, chosen) >= _best(candidates, max_bytes) / 2 * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(30))
def test_the_best_choice_where_value_per_byte_falls_and_sizes_are_equal(seed):
    generator = random.Random(seed)
    candidates = _forest(generator, generator.randint(1, 10), falling=True, one_size=True)
    for max_bytes in range(0, 90, 9):
        chosen = choose(candidates, max_bytes)
        assert _value(candidates, chosen) == pytest.approx(_best(candidates, max_bytes))


def test_close_to_the_best_choice_on_average_whatever_the_values():
    shares = []
    for seed in range(80):
        generator = random.Random(seed)
        candidates = _forest(generator, generator.randint(4, 10), falling=False)
        max_bytes = generator.randint(20, 100)
        best = _best(candidates, max_bytes)
        if best:
            shares.append(_value(candidates, choose(candidates, max_bytes)) / best)
    assert len(shares) > 70
    assert max(shares) <= 1 + 1e-9
    assert sum(shares) / len(shares) > 0.9


@pytest.mark.parametrize("falling", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_within_the_budget_closed_and_complete_if_all_fits(seed, falling):
    generator = random.Random(seed)
    candidates = _forest(generator, 400, falling=falling)
    total = sum(each.num_bytes for each in candidates)
    previous = 0.0
    for max_bytes in range(0, total, total // 25):
        chosen = choose(candidates, max_bytes)
        assert chosen == sorted(set(chosen))
        assert _bytes(candidates, chosen) <= max_bytes
        assert _closed(candidates, chosen)
        if falling:
            assert _value(candidates, chosen) >= previous * (1 - 1e-9)
            previous = _value(candidates, chosen)
    assert choose(candidates, total) == list(range(len(candidates)))


def test_a_long_chain_of_rising_value_and_a_wide_tree_are_handled():
    # The shapes that make the grouping deepest and widest; a quadratic method would not come to an end here.
    size = 20_000
    chain = [Candidate(f"b{i}", f"b{i - 1}" if i else None, 10, 1, float(i)) for i in range(size)]
    assert choose(chain, 10 * size) == list(range(size))
    # The last unit fits nowhere, and then neither does any group with it.
    assert choose(chain, 10 * size - 1) == list(range(size - 1))
    star = [Candidate("root", None, 10, 1, 0), *(Candidate(f"c{i}", "root", 10, 1, float(i)) for i in range(size))]
    assert choose(star, 40) == [0, size - 2, size - 1, size]
