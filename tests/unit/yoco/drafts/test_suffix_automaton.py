"""The suffix automaton against looking at every substring."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitelib.yoco.drafts.suffix_automaton import START, SuffixAutomaton

texts_of = st.lists(st.lists(st.integers(0, 3), max_size=24), min_size=1, max_size=7)


def occurs(text: Sequence[int], part: Sequence[int]) -> bool:
    whole = [START, *text]
    return any(whole[at : at + len(part)] == list(part) for at in range(len(whole) - len(part) + 1))


def texts_with(texts: Sequence[Sequence[int]], part: Sequence[int]) -> list[int]:
    return [index for index, text in enumerate(texts) if occurs(text, part)]


def longest_suffix(texts: Sequence[Sequence[int]], said: Sequence[int]) -> list[int]:
    whole = [START, *said]
    return next(whole[at:] for at in range(len(whole) + 1) if at == len(whole) or texts_with(texts, whole[at:]))


def automaton_of(texts: Sequence[Sequence[int]]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for text in texts:
        automaton.add(text)
    return automaton


@given(texts_of, st.lists(st.integers(0, 4), max_size=16))
def test_a_match_is_the_longest_suffix_that_occurs(texts: list[list[int]], said: list[int]) -> None:
    automaton = automaton_of(texts)
    state, length = automaton.begin()
    for count in range(len(said) + 1):
        if count:
            state, length = automaton.advance(state, length, said[count - 1])
        suffix = longest_suffix(texts, said[:count])
        assert length == len(suffix)
        assert automaton.counts[state] == len(texts_with(texts, suffix))


@given(texts_of, st.lists(st.integers(0, 3), max_size=8))
def test_the_best_continuation_is_in_most_texts_and_of_those_in_the_latest(
    texts: list[list[int]], said: list[int]
) -> None:
    automaton = automaton_of(texts)
    state, length = automaton.begin()
    for token in said:
        state, length = automaton.advance(state, length, token)
    suffix = longest_suffix(texts, said)
    if not suffix:
        return
    ranks = {}
    for token in range(4):
        found = texts_with(texts, [*suffix, token])
        if found:
            ranks[token] = (len(found), found[-1])
    best = automaton.best_tokens[state]
    if not ranks:
        assert best < 0
        return
    assert ranks[best] == max(ranks.values())
    assert automaton.counts[automaton.best_states[state]] == ranks[best][0]


@given(texts_of, st.lists(st.integers(0, 3), min_size=1, max_size=4))
def test_texts_with_a_substring_are_counted(texts: list[list[int]], part: list[int]) -> None:
    assert automaton_of(texts).find(part) == len(texts_with(texts, part))
    assert automaton_of(texts).find([START, *part]) == len(texts_with(texts, [START, *part]))


@given(texts_of, texts_of, st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_a_match_stays_right_while_texts_are_added(
    before: list[list[int]], later: list[list[int]], said: list[int]
) -> None:
    automaton = automaton_of(before)
    state, length = automaton.begin()
    texts = list(before)
    for index, token in enumerate(said):
        if index < len(later):
            automaton.add(later[index])
            texts.append(later[index])
        state, length = automaton.advance(state, length, token)
        suffix = [START, *said[: index + 1]][-length:] if length else []
        assert not suffix or automaton.counts[state] == len(texts_with(texts, suffix))
        assert length <= len(longest_suffix(texts, said[: index + 1]))
        assert length >= len(longest_suffix(before, said[: index + 1]))


def test_a_match_whose_state_was_split_is_that_of_the_shorter_substring() -> None:
    automaton = automaton_of([[0, 1, 2]])
    state, length = automaton.advance(*automaton.begin(), 1)
    automaton.add([3, 1, 2])  # 1 stands behind 3 as well from now on, and so does (1, 2)
    state, length = automaton.advance(state, length, 2)
    assert (length, automaton.counts[state]) == (2, 2)


@given(texts_of)
def test_a_text_may_come_in_pieces(texts: list[list[int]]) -> None:
    whole, pieces = automaton_of(texts), SuffixAutomaton()
    for text in texts:
        pieces.start()
        for token in text:
            pieces.extend([token])
    assert pieces.counts == whole.counts
    assert pieces.links == whole.links
    assert pieces.best_tokens == whole.best_tokens
    assert (pieces.num_tokens, pieces.num_texts) == (sum(map(len, texts)), len(texts))


def test_a_text_that_was_seen_before_adds_no_state() -> None:
    source = random.Random(1)
    texts = [[source.randrange(50) for _ in range(60)] for _ in range(20)]
    automaton = automaton_of(texts)
    states, num_bytes = len(automaton.lengths), automaton.num_bytes
    for text in texts:
        automaton.add(text)
    assert (len(automaton.lengths), automaton.num_bytes) == (states, num_bytes)
    assert automaton.find(texts[3]) == 2


def test_a_text_that_repeats_one_token_costs_no_more_than_its_length() -> None:
    automaton = SuffixAutomaton()
    automaton.add([7] * 20_000)
    assert len(automaton.lengths) <= 2 * 20_001
    assert automaton.find([7] * 15_000) == 1
    state, length = automaton.begin()
    for _ in range(30_000):  # longer than what was seen: the match stays at its end
        state, length = automaton.advance(state, length, 7)
    assert length == 20_000


def real_texts() -> list[list[int]]:
    """Answers that share phrases, as those of a model do."""
    source = random.Random(4)
    phrases = [[source.randrange(40_000) for _ in range(source.randrange(2, 12))] for _ in range(300)]
    return [[token for _ in range(8) for token in source.choice(phrases)] for _ in range(300)]


@pytest.mark.parametrize(
    "texts",
    [
        pytest.param(real_texts(), id="phrases"),
        pytest.param(
            [[random.Random(i).randrange(9) * 50 for i in range(j, j + 400)] for j in range(40)], id="few tokens"
        ),
        pytest.param([random.Random(i).sample(range(50_000), 50) for i in range(300)], id="random"),
        pytest.param([[5] * 2000], id="one token"),
    ],
)
def test_bytes_are_counted_about_as_they_are(texts: list[list[int]]) -> None:
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        automaton = SuffixAutomaton()
        for text in texts:
            automaton.add(int(str(token)) for token in text)  # numbers of their own, as a sampler makes them
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0.85 * held < automaton.num_bytes < 1.5 * held
