"""Prompts of parts: what may be a part, how they become tokens, and where steps end at passages."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kitelib import InvalidRequestError, Passage
from kitelib.engine.calls import _checked_ids
from kitelib.engine.passages import Parts, Span, Splice, Splices, is_parted, tokenize_parts
from kitelib.engine.splicing import cut_at_splice
from kitelib.fingerprint import BlockChain, Fingerprint
from tests.support.backends import BackendKit

ROOT = Fingerprint(bytes(32))


class Letters:
    """A tokenizer with a token per character, which puts some before a text and some behind it."""

    def __init__(self, lead: tuple[int, ...] = (), trail: tuple[int, ...] = ()) -> None:
        self._lead, self._trail = lead, trail
        self.info = dataclasses.make_dataclass("Info", ["vocab_size"])(256)

    def tokenize(self, text: str, *, add_special: bool) -> list[int]:
        ids = list(text.encode())
        return [*self._lead, *ids, *self._trail] if add_special else ids


def parts_of(prompt: Any, backend: Any = None) -> Parts:
    return tokenize_parts(prompt, backend or Letters(), _checked_ids)


@pytest.mark.parametrize("content", [b"text", 7, None, object(), {1, 2}])
def test_passage_of_something_else_is_refused(content: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"Passage\.content"):
        Passage(content)


@pytest.mark.parametrize("head_tokens", [-1, 1.5, True, None, "16"])
def test_bad_head_is_refused(head_tokens: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"Passage\.head_tokens"):
        Passage("text", head_tokens)


def test_passages_are_values() -> None:
    assert Passage([1, 2]) == Passage((1, 2))
    assert len({Passage([1, 2]), Passage((1, 2)), Passage("x"), Passage("x", 3)}) == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        Passage("x").head_tokens = 2  # type: ignore[misc]


def test_a_list_with_a_passage_is_a_list_of_parts() -> None:
    assert is_parted(["a", Passage("b")])
    assert is_parted((Passage("b"),))
    assert not any(map(is_parted, (["a", "b"], [1, 2], "text", [], None)))


def test_parts_are_tokenized_apart_and_know_their_places() -> None:
    found = parts_of(["ab", Passage("cdef", 2), [7, 8], Passage([9, 10, 11]), "", "z"])
    assert found.token_ids == [*b"abcdef", 7, 8, 9, 10, 11, *b"z"]
    assert found.spans == (Span(2, 6, 2), Span(8, 11, 3))  # a head is never longer than its passage
    assert found.lead == ()


def test_what_comes_before_a_text_comes_once_and_what_comes_after_never() -> None:
    backend = Letters(lead=(1, 2), trail=(3,))
    assert parts_of(["ab", Passage("c"), "d"], backend) == Parts([1, 2, *b"abcd"], (Span(4, 5, 1),), (1, 2))
    assert parts_of([Passage("c"), "d"], backend).token_ids == [1, 2, *b"cd"]
    assert parts_of([[5], Passage("c")], backend) == Parts([5, *b"c"], (Span(1, 2, 1),), (1, 2))


@pytest.mark.parametrize("part", [3, None, b"x", {"text": "x"}])
def test_bad_part_is_named(part: Any) -> None:
    with pytest.raises(InvalidRequestError, match="part 1 of the prompt"):
        parts_of([Passage("x"), part])


@pytest.mark.parametrize("ids", [[1, 256], [1.5], [-1]])
def test_bad_token_ids_are_refused(ids: list[Any]) -> None:
    with pytest.raises(InvalidRequestError):
        parts_of([Passage(ids)])


def test_tokens_are_those_of_the_texts(kit: BackendKit) -> None:
    """On every backend, with its real tokenizer."""
    with_special = kit.load(kit.text(), n_ctx=256)
    try:
        first, middle, last = "You answer.\n", "The river <b>Aa</b> is 83 km long.", "\nHow long?"
        found = parts_of([first, Passage(middle), last], with_special)
        texts = [with_special.tokenize(text, add_special=False) for text in (middle, last)]
        head = with_special.tokenize(first, add_special=True)
        assert found.token_ids == [*head, *texts[0], *texts[1]]
        assert found.spans == (Span(len(head), len(head) + len(texts[0]), min(16, len(texts[0]))),)
    finally:
        with_special.close()


def branch_at(computed: int, *spans: Span, failed: bool = False) -> Any:
    chain = BlockChain(ROOT, 16)
    items = tuple(Splice(span, [], 0, chain) for span in spans)
    splices = Splices(chain, items, chain, 0.0, failed=failed)
    request = dataclasses.make_dataclass("R", ["splices"])(splices if spans else None)
    run = dataclasses.make_dataclass("Run", ["computed"])(computed)
    return dataclasses.make_dataclass("Branch", ["request", "run"])(request, run)


@pytest.mark.parametrize(
    ("computed", "count", "expected"),
    [
        (0, 10, 10),
        (0, 100, 20),  # up to the first passage
        (20, 100, 16),  # it could not be moved: its head, then it is tried again
        (36, 500, 64),  # no luck: on, up to the next one
        (60, 500, 40),
        (100, 500, 500),
        (120, 7, 7),
    ],
)
def test_steps_end_where_passages_begin(computed: int, count: int, expected: int) -> None:
    assert cut_at_splice(branch_at(computed, Span(20, 70, 16), Span(100, 150, 0)), count) == expected


def test_steps_of_others_are_not_cut() -> None:
    assert cut_at_splice(branch_at(0), 100) == 100
    assert cut_at_splice(branch_at(0, Span(20, 70, 16), failed=True), 100) == 100
