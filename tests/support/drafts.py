"""Drafts that tests choose: all that is proposed goes to the model, and what is proposed may be anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kitelib.yoco.drafts import Asked, Proposal

__all__ = ["ChosenDrafts", "eager_drafts", "no_drafts", "propose"]

Guess = Callable[[Sequence[int], Sequence[int]], Sequence[int]]


@pytest.fixture
def eager_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is proposed is verified, as far as a step has room for it: what is tested is not whether it pays."""

    def allot(proposals: Sequence[Proposal | None], rows: int, cost: Any, most: int) -> list[int]:
        counts = []
        for proposal in proposals:
            count = 0 if proposal is None else min(most, len(proposal.token_ids))
            counts.append(count)
            most -= count
        return counts

    monkeypatch.setattr("kitelib.engine.drafting.allot", allot)
    monkeypatch.setattr("kitelib.engine.drafting.Governor.allowed", lambda self: True)


@pytest.fixture
def no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is verified. Whether drafts pay depends on how fast the machine is at the moment, so this is for tests that
    count steps."""
    monkeypatch.setattr("kitelib.engine.drafting.Governor.allowed", lambda self: False)


class ChosenDrafts:
    """In place of a `Drafter`: proposes what `guess(prompt, tokens so far)` says, however long that is."""

    def __init__(self, prompt: Sequence[int], guess: Guess) -> None:
        self._prompt, self._guess = list(prompt), guess
        self._tokens: list[int] = []
        self.counts: dict[str, list[int]] = {}

    def propose(self, most: int) -> Proposal | None:
        ids = tuple(self._guess(self._prompt, self._tokens))
        return Proposal(ids, (1.0,) * len(ids), "chosen") if ids else None

    def advance(self, token_id: int) -> None:
        self._tokens.append(token_id)

    def verified(self, proposal: Proposal, given: int, accepted: int) -> None:
        counts = self.counts.setdefault(proposal.source, [0, 0])
        counts[0] += given
        counts[1] += accepted


def propose(monkeypatch: pytest.MonkeyPatch, guess: Guess) -> None:
    """From now on every branch of every engine has its drafts from `guess`."""

    def drafter(self: Any, root: bytes, prompt: Sequence[int], asked: Asked, **options: Any) -> Any:
        return ChosenDrafts(prompt, guess)

    monkeypatch.setattr("kitelib.yoco.drafts.DraftLibrary.drafter", drafter)
