"""Who has which part of a run: few concurrent questions, each answered by a tier's leading run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

__all__ = ["LeadingRun", "covered", "locate"]

LeadingRun = Callable[[Sequence[str]], Awaitable[int]]
"""Asks one tier how many of the first keys exist; never raises."""

_MAX_ROUNDS: Final = 3  # questions to one tier: one finds a run without holes, each further one passes one hole
_UNKNOWN, _HAS, _LACKS = 0, 1, 2


async def locate(
    ask: Sequence[LeadingRun],
    keys: Sequence[str],
    *,
    late: frozenset[int] = frozenset(),
    budget_s: float | None = None,
    left_behind: Callable[[asyncio.Task[Any]], None],
) -> list[int]:
    """For each key of the leading run, the index of the first tier that has it; the run ends where no tier has a key.

    All tiers but the late ones are asked at once. It ends when the answers so far decide every key, without waiting for slower tiers;
    when nothing is left to ask; or when the budget is used up, and then who did not answer counts as having nothing.

    Args:
        ask: one per tier, fastest first.
        keys: the run.
        late: tiers that are only asked about what the others turned out not to have, since asking them is dear.
        budget_s: seconds to wait at most; None waits for the tiers' own timeouts.
        left_behind: takes questions whose answer nobody waits for; they end by themselves.
    """
    knowledge = [bytearray(len(keys)) for _ in ask]
    rounds = [0] * len(ask)
    deadline = None if budget_s is None else time.monotonic() + budget_s
    pending: dict[asyncio.Task[int], tuple[int, int]] = {}

    def question(tier: int) -> None:
        start = _unanswered(knowledge, tier) if rounds[tier] < _MAX_ROUNDS else None
        if start is not None:
            rounds[tier] += 1
            task = asyncio.get_running_loop().create_task(_asked(ask[tier], keys[start:]))
            pending[task] = tier, start

    def questions() -> None:
        busy = {tier for tier, _ in pending.values()}
        for tier in range(len(ask)):
            if tier not in busy and tier not in late:
                question(tier)
        if not pending:
            for tier in late:
                question(tier)

    questions()
    try:
        while pending and not _decided(knowledge, {tier for tier, _ in pending.values()}):
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            done, _ = await asyncio.wait(pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
            for task in done:
                tier, start = pending.pop(task)
                _note(knowledge[tier], start, task.result())
            questions()
    finally:
        for task in pending:
            left_behind(task)
    return covered(knowledge)


async def _asked(ask: LeadingRun, keys: Sequence[str]) -> int:
    return await ask(keys)


def _note(known: bytearray, start: int, count: int) -> None:
    known[start : start + count] = bytes([_HAS]) * count
    if start + count < len(known):
        known[start + count] = _LACKS


def covered(knowledge: Sequence[bytearray]) -> list[int]:
    """The first tier that has each key, up to the first key that none has."""
    owners = []
    for states in zip(*knowledge, strict=True):
        if _HAS not in states:
            break
        owners.append(states.index(_HAS))
    return owners


def _unanswered(knowledge: Sequence[bytearray], tier: int) -> int | None:
    """The first key of the next question to a tier; None if no answer of it is worth one.

    That is where the run ends so far. If the tier lacks that key, but has others, it is a key behind one of its holes
    that only slower tiers have.
    """
    known = knowledge[tier]
    behind: int | None = None
    for position, states in enumerate(zip(*knowledge, strict=True)):
        if _HAS not in states:
            if states[tier] == _UNKNOWN:
                return position
            break
        if behind is None and states[tier] == _UNKNOWN and _HAS not in states[:tier]:
            behind = position
    return behind if _HAS in known else None


def _decided(knowledge: Sequence[bytearray], asked: set[int]) -> bool:
    """Whether no answer that is still out can change the outcome."""
    for states in zip(*knowledge, strict=True):
        owner = states.index(_HAS) if _HAS in states else len(states)
        if any(states[tier] == _UNKNOWN for tier in asked if tier < owner):
            return False
        if owner == len(states):
            return True  # nobody has it, and nobody who could is asked: the run ends here
    return True
