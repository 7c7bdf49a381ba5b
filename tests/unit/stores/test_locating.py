"""Each key of a run goes to the fastest tier that has it, with few questions and no waiting for slow tiers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import anyio
from hypothesis import given, settings
from hypothesis import strategies as st

from kitelib.stores.locating import locate


class Asked:
    """A tier that has some keys; counts the questions."""

    def __init__(self, has: Sequence[str], gate: asyncio.Event | None = None) -> None:
        self.has = set(has)
        self.gate = gate
        self.questions: list[list[str]] = []

    async def __call__(self, keys: Sequence[str]) -> int:
        self.questions.append(list(keys))
        await (asyncio.sleep(0) if self.gate is None else self.gate.wait())
        return next((index for index, key in enumerate(keys) if key not in self.has), len(keys))


KEYS = [f"{index:02}" for index in range(40)]
left: list[asyncio.Task[Any]] = []


async def owners(*tiers: Asked, late: frozenset[int] = frozenset(), budget_s: float | None = None) -> str:
    found = await locate(tiers, KEYS, late=late, budget_s=budget_s, left_behind=left.append)
    return "".join(map(str, found))


async def test_one_tier_is_asked_once() -> None:
    tier = Asked(KEYS[:7])
    assert await owners(tier) == "0" * 7
    assert len(tier.questions) == 1


async def test_nobody_is_asked_twice_about_a_run_that_nobody_has() -> None:
    fast, slow = Asked([]), Asked(KEYS[1:])
    assert await owners(fast, slow) == ""
    assert (len(fast.questions), len(slow.questions)) == (1, 1)


async def test_a_slower_tier_goes_on_where_a_faster_one_ends() -> None:
    assert await owners(Asked(KEYS[:4]), Asked(KEYS[:9])) == "000011111"


async def test_a_hole_in_the_faster_tier_is_filled_and_passed() -> None:
    fast, slow = Asked(KEYS[:4] + KEYS[5:]), Asked(KEYS)
    assert await owners(fast, slow) == "0000" + "1" + "0" * 35
    assert len(fast.questions) == 2


async def test_a_run_that_is_spread_over_two_tiers_is_found_whole() -> None:
    fast, slow = Asked(KEYS[10:]), Asked(KEYS[:10])
    assert await owners(fast, slow) == "1" * 10 + "0" * 30


async def test_many_holes_cost_no_more_than_a_few_questions() -> None:
    fast, slow = Asked(KEYS[::2]), Asked(KEYS)
    found = await owners(fast, slow)
    assert len(found) == 40
    assert len(fast.questions) <= 3


async def test_slower_tiers_are_not_waited_for_when_a_faster_one_has_it_all() -> None:
    gate = asyncio.Event()  # never opens
    slow = Asked(KEYS, gate)
    with anyio.fail_after(5):
        assert await owners(Asked(KEYS), slow) == "0" * 40
    gate.set()
    await asyncio.wait([left.pop()])


async def test_after_its_budget_it_ends_with_what_is_known() -> None:
    """B29: looking costs a request no more than it may wait."""
    gate = asyncio.Event()
    slow = Asked(KEYS, gate)
    with anyio.fail_after(5):
        assert await owners(Asked(KEYS[:3]), slow, budget_s=0.02) == "000"
    assert not left[-1].done()  # not cancelled either: what it says is still measured
    gate.set()
    await asyncio.wait([left.pop()])


async def test_late_tiers_are_only_asked_for_the_rest() -> None:
    archive = Asked(KEYS[:20])
    assert await owners(Asked(KEYS[:5]), Asked(KEYS[:8]), archive, late=frozenset({2})) == "0" * 5 + "1" * 3 + "2" * 12
    assert archive.questions == [KEYS[8:]]
    archive.questions.clear()
    assert await owners(Asked(KEYS), archive, late=frozenset({1})) == "0" * 40
    assert archive.questions == []
    assert await owners(archive, late=frozenset({0})) == "0" * 20


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sets(st.integers(0, 11)), min_size=1, max_size=3), st.booleans(), st.integers(0, 10**6))
def test_what_is_found_is_really_there(has: list[set[int]], late: bool, seed: int) -> None:
    """Against brute force: never a key its owner lacks; a run that is whole in the union is found from the first key
    on, at least as far as the best single tier has it."""
    keys = [str(index) for index in range(12)]
    chance = random.Random(seed)

    class Slow(Asked):
        async def __call__(self, keys: Sequence[str]) -> int:
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
            return await super().__call__(keys)

    tiers = [Slow([str(index) for index in each]) for each in has]
    found = asyncio.run(
        locate(
            tiers, keys, late=frozenset({len(has) - 1}) if late else frozenset(), left_behind=lambda task: task.cancel()
        )
    )
    for position, owner in enumerate(found):
        assert keys[position] in tiers[owner].has
    best = max(next((i for i in range(12) if i not in each), 12) for each in has)
    assert len(found) >= best
    for owner in range(found[0] if found else 0):
        assert 0 not in has[owner]  # no faster tier has the first one
    assert all(len(tier.questions) <= 3 for tier in tiers)
