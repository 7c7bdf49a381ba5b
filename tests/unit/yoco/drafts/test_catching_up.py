"""A drafter takes in what was said only when it is asked, and then knows the same."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kitelib.yoco.drafts import Asked, Drafter, DraftLibrary, Proposal, SuffixAutomaton
from kitelib.yoco.drafts.rates import Rates

ROOT = b"r" * 32
VECTOR = np.asarray((1.0, 0.0), dtype=np.float32)


def distinct(number: int, length: int = 300) -> list[int]:
    return random.Random(number).sample(range(1000, 50_000), length)


def library_with(*answers: Sequence[int]) -> DraftLibrary:
    library = DraftLibrary()
    for number, answer in enumerate(answers):
        library.add(ROOT, Asked([], b"%d" % number, b"sign%d" % (number % 2), VECTOR), answer)
    assert not library.work(10**6)
    return library


def say(drafter: Drafter, token_ids: Sequence[int]) -> None:
    for token in token_ids:
        drafter.advance(token)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The cells of all predictions that are learned from."""
    cells: list[int] = []
    note = Rates.note

    def record(self: Rates, cell: int, hit: bool) -> None:
        cells.append(cell)
        note(self, cell, hit)

    monkeypatch.setattr(Rates, "note", record)
    return cells


texts = st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=40), max_size=5)
said = st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=64), min_size=1, max_size=5)


@given(texts, texts, said, st.integers(1, 12))
@example([[1]], [[0]] * 5, [[0] * 19], 1)  # answers turn out to have nothing in common
def test_it_proposes_the_same_as_if_it_had_followed_each_token(
    answers: list[list[int]], known: list[list[int]], parts: list[list[int]], most: int
) -> None:
    def proposals(at_once: bool) -> tuple[list[Proposal | None], list[float]]:
        library, found = library_with(*answers), []
        for text in [[], *known]:
            asking = Asked([], b"0", b"sign1", VECTOR)
            drafter = library.drafter(ROOT, [1, 2, 3, 4, 5, 1, 3, 5], asking, known=text)
            for part in parts:
                found.append(drafter.propose(most))
                for token in part:
                    drafter.advance(token)
                    if at_once:
                        drafter._catch_up()
            found.append(drafter.propose(most))
        stored, common = library._roots[ROOT].rates_of(False)
        return found, [*stored.values, *common.values]

    assert proposals(at_once=True) == proposals(at_once=False)


def test_saying_alone_does_nothing(noted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    answer = distinct(1)
    drafter = library_with(answer, answer[::-1]).drafter(ROOT, answer, Asked([], b"0", b"sign1", VECTOR))
    with monkeypatch.context() as patched:
        patched.setattr(SuffixAutomaton, "advance", None)  # whoever calls it fails
        say(drafter, answer[:40])
    assert noted == []
    proposal = drafter.propose(4)
    assert proposal is not None
    assert list(proposal.token_ids) == answer[40:44]
    assert len(noted) > 40


@pytest.mark.parametrize(
    ("spoken", "after"),
    [
        pytest.param(slice(0, 150), 150, id="from the beginning"),
        pytest.param(slice(200, 290), 290, id="from elsewhere"),
    ],
)
def test_of_much_it_learns_nothing_and_finds_its_place(noted: list[int], spoken: slice, after: int) -> None:
    answer = distinct(1)
    drafter = library_with(answer).drafter(ROOT, [], Asked([], b"0"))
    say(drafter, answer[spoken])
    proposal = drafter.propose(4)
    assert noted == []
    assert proposal is not None
    assert list(proposal.token_ids) == answer[after : after + len(proposal.token_ids)]
    say(drafter, answer[after : after + 3])
    again = drafter.propose(4)
    assert noted
    assert again is not None
    assert list(again.token_ids) == answer[after + 3 : after + 3 + len(again.token_ids)]


def test_after_much_it_knows_the_place_behind_other_words() -> None:
    answer = distinct(1)
    varied = [*answer[:60], 1, 2, 3, *answer[60:120]]
    drafter = library_with(answer).drafter(ROOT, [], Asked([], b"0"))
    say(drafter, varied)
    drafter.propose(1)
    found = drafter._stored[0].propose(4)
    assert found is not None
    assert found[0] == answer[120:124]


def test_after_much_the_place_near_where_it_should_be_is_taken() -> None:
    answer = distinct(1)
    answer[3:6] = answer[97:100]
    drafter = library_with(answer).drafter(ROOT, [], Asked([], b"0"))
    say(drafter, [*answer[:50], 1, *answer[51:100]])
    drafter.propose(1)
    found = drafter._stored[0].propose(4)
    assert found is not None
    assert found[0] == answer[100:104]


def test_after_much_it_knows_what_answers_have_in_common_and_what_was_said_before() -> None:
    phrase = [7, 8, 9, 10, 11, 12]
    library = library_with(*([number, *phrase] for number in range(100, 112)))
    drafter = library.drafter(ROOT, [], Asked([], b"new"))
    say(drafter, [*distinct(2, 90), *phrase[:3]])
    proposal = drafter.propose(3)
    assert proposal is not None
    assert (proposal.source, list(proposal.token_ids)) == ("answers", phrase[3:])
    repeated = DraftLibrary().drafter(ROOT, [], Asked([], b"new"))
    text = distinct(3, 100)
    say(repeated, [*text, *text[50:53]])
    again = repeated.propose(3)
    assert again is not None
    assert again.token_ids[0] == text[53]


def test_answers_without_anything_in_common_are_followed_in_a_sample_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    phrase = list(range(100, 140))
    alone = [[2000 + number, phrase[5], 555] for number in range(20)]  # what follows without what stood before
    library = library_with(*([number, *phrase] for number in range(10)), *alone)
    for number in range(40):
        drafter = library.drafter(ROOT, [], Asked([], b"new"))
        say(drafter, distinct(number, 31))
        drafter.propose(1)
    calls = []
    advance = SuffixAutomaton.advance

    def record(self: SuffixAutomaton, state: int, length: int, token: int) -> tuple[int, int]:
        calls.append(token)
        return advance(self, state, length, token)

    monkeypatch.setattr(SuffixAutomaton, "advance", record)
    drafters = [library.drafter(ROOT, [], Asked([], b"new")) for _ in range(8)]
    followed = []
    for drafter in drafters:
        calls.clear()
        say(drafter, [99, *phrase[:5]])
        proposal = drafter.propose(2)
        followed.append(bool(calls))
        assert (proposal is not None) == bool(calls)
    assert followed.count(True) == 1
    # The sample finds that answers are alike again, and the others follow from then on, from what they said last.
    tried = drafters[followed.index(True)]
    for token in phrase[5:30]:
        tried.advance(token)
        tried.propose(1)
    for drafter in drafters:
        if drafter is not tried:
            drafter.advance(phrase[5])
            proposal = drafter.propose(2)
            assert proposal is not None
            assert (proposal.source, list(proposal.token_ids)) == ("answers", phrase[6:8])
