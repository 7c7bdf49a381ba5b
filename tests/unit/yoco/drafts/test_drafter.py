"""What a drafter proposes: sources, cursors that find back, chances, and prompts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitelib.fingerprint import BlockChain
from kitelib.yoco.drafts import Asked, Drafter, DraftLibrary, Proposal

ROOT = b"r" * 32
ANSWER = [100 + 7 * index for index in range(40)]


def asked(
    end: str = "end", *blocks: str, signature: bytes | None = None, vector: Sequence[float] | None = None
) -> Asked:
    unit = None
    if vector is not None:
        unit = np.asarray(vector, dtype=np.float32)
        unit /= np.linalg.norm(unit)
    return Asked([name.encode() for name in blocks], end.encode(), signature, unit)


def add(library: DraftLibrary, of: Asked, answer: Sequence[int]) -> None:
    """Keeps an answer, and takes it in at once."""
    library.add(ROOT, of, answer)
    assert not library.work(10**6)


def drafter_with(answer: Sequence[int], prompt: Sequence[int] = ()) -> Drafter:
    library = DraftLibrary()
    add(library, asked(), answer)
    return library.drafter(ROOT, prompt, asked())


def say(drafter: Drafter, token_ids: Sequence[int]) -> None:
    for token in token_ids:
        drafter.advance(token)


def tokens_per_step(drafter: Drafter, answer: Sequence[int], most: int) -> float:
    """Decodes `answer` with every proposal verified."""
    said, steps = 0, 0
    while said < len(answer):
        proposal = drafter.propose(most)
        accepted = 0
        if proposal is not None:
            while (
                accepted < len(proposal.token_ids)
                and said + accepted < len(answer)
                and proposal.token_ids[accepted] == answer[said + accepted]
            ):
                accepted += 1
            drafter.verified(proposal, len(proposal.token_ids), accepted)
        say(drafter, answer[said : said + accepted + 1])
        said += accepted + 1
        steps += 1
    return len(answer) / steps


def followed(text: Sequence[int], said: Sequence[int]) -> list[int]:
    """What follows from the stored `text` alone, without what an answer says about itself."""
    drafter = DraftLibrary().drafter(ROOT, [], asked(), known=text)
    say(drafter, said)
    drafter.propose(1)
    found = drafter._stored[0].propose(4)
    return [] if found is None else found[0]


def check(proposal: Proposal | None, most: int) -> None:
    if proposal is None:
        return
    assert 1 <= len(proposal.token_ids) == len(proposal.chances) <= most
    assert all(0.0 <= chance <= 1.0 for chance in proposal.chances)
    assert all(before >= after for before, after in itertools.pairwise(proposal.chances))
    assert proposal.source in ("same prompt", "conversation", "canonical", "neighbour", "answers", "prompt")


def test_without_anything_seen_nothing_is_proposed() -> None:
    drafter = DraftLibrary().drafter(ROOT, [1, 2, 3], asked())
    assert drafter.propose(8) is None
    drafter.advance(9)
    assert drafter.propose(8) is None


def test_the_same_prompt_gives_its_answer_to_the_end_and_then_nothing() -> None:
    drafter = drafter_with(ANSWER)
    proposal = drafter.propose(50)
    assert proposal is not None
    assert proposal.source == "same prompt"
    assert list(proposal.token_ids) == ANSWER
    say(drafter, ANSWER[:-1])
    last = drafter.propose(50)
    assert last is not None
    assert list(last.token_ids) == ANSWER[-1:]
    say(drafter, ANSWER[-1:])
    assert drafter.propose(50) is None


def test_a_known_completion_is_followed_without_any_record() -> None:
    drafter = DraftLibrary().drafter(ROOT, [1], asked(), known=ANSWER)
    proposal = drafter.propose(5)
    assert proposal is not None
    assert (proposal.source, list(proposal.token_ids)) == ("same prompt", ANSWER[:5])


def test_proposing_changes_nothing() -> None:
    drafter = drafter_with(ANSWER, prompt=ANSWER)
    say(drafter, ANSWER[:3])
    assert drafter.propose(8) == drafter.propose(8)
    say(drafter, [9])
    assert drafter.propose(8) == drafter.propose(8)


@pytest.mark.parametrize("most", [0, -1])
def test_no_room_means_no_proposal(most: int) -> None:
    assert drafter_with(ANSWER).propose(most) is None


@pytest.mark.parametrize(
    ("said", "after"),
    [
        pytest.param([*ANSWER[:10], 1, *ANSWER[11:13]], 13, id="another token in its place"),
        pytest.param([*ANSWER[:10], 1, 2, 3, *ANSWER[10:12]], 12, id="put in"),
        pytest.param([*ANSWER[:10], *ANSWER[20:22]], 22, id="left out"),
        pytest.param([*ANSWER[:30], *ANSWER[5:7]], 7, id="gone back"),
        pytest.param([1, 2, 3, 4, *ANSWER[3:5]], 5, id="begun otherwise"),
    ],
)
def test_after_a_mismatch_it_finds_its_place_again(said: list[int], after: int) -> None:
    assert followed(ANSWER, said) == ANSWER[after : after + 4]


def test_one_other_token_leaves_what_follows_it() -> None:
    assert followed(ANSWER, [*ANSWER[:10], 1]) == ANSWER[11:15]


def test_of_two_places_the_one_near_the_cursor_is_taken() -> None:
    text = [1, 2, 50, *range(200, 220), 1, 2, 60, 61, 62]
    assert followed(text, [*text[:20], 9, 1, 2]) == [60, 61, 62]
    assert followed(text, [9, 9, 1, 2]) == [50, 200, 201, 202]


def test_a_text_that_never_agrees_is_not_proposed() -> None:
    assert followed(ANSWER, [1, 2, 3, 4]) == []


def test_each_source_is_found_by_what_it_needs() -> None:
    library = DraftLibrary()
    texts = {name: [number * 100 + index for index in range(20)] for number, name in enumerate("abcd", 1)}
    add(library, asked("a", "x", "y"), texts["a"])
    add(library, asked("b", "p", "q", signature=b"same"), texts["b"])
    add(library, asked("c", "z", vector=[1.0, 0.1, 0.0]), texts["c"])
    add(library, asked("d", "z2", vector=[0.0, 0.0, 1.0]), texts["d"])

    def first(of: Asked, said: Sequence[int]) -> tuple[str, list[int]]:
        drafter = library.drafter(ROOT, [], of)
        say(drafter, said)
        drafter.propose(1)
        by_source = {follower.source: follower.propose(3) for follower in drafter._stored}
        assert len(by_source) == 1
        ((source, found),) = by_source.items()
        assert found is not None
        return source, found[0]

    assert first(asked("a", "x", "y"), []) == ("same prompt", texts["a"][:3])
    assert first(asked("other", "u", signature=b"same"), []) == ("canonical", texts["b"][:3])
    assert first(asked("other", "v", vector=[1.0, 0.0, 0.0]), []) == ("neighbour", texts["c"][:3])
    assert first(asked("other", "v", vector=[1.0, 0.0, 0.0]), texts["c"][:5]) == ("neighbour", texts["c"][5:8])


def chained(tokens: Sequence[int]) -> Asked:
    chain = BlockChain(ROOT, 4, tokens)
    return Asked(chain.fingerprints, chain.end(), block_tokens=4, tail_tokens=len(chain.tail))


@pytest.mark.parametrize("tail", range(4))
def test_the_turn_before_is_the_longest_prompt_that_this_one_begins_with(tail: int) -> None:
    system, turn, now = list(range(8)), list(range(20, 28 + tail)), list(range(40, 45))
    library = DraftLibrary()
    add(library, chained(system), [1] * 5)
    add(library, chained([*system, *turn]), ANSWER)
    add(library, chained([*system, *turn[:-1], 99]), [2] * 5)  # parts from it in its last token
    add(library, chained([*system, 77]), [3] * 5)  # only the system prompt is the same
    add(library, chained([*system, *turn, *now, 50]), [4] * 5)  # goes on longer
    prompt = [*system, *turn, *now]
    (before,) = library.drafter(ROOT, prompt, chained(prompt))._stored
    assert (before.source, [ord(char) for char in before.text]) == ("conversation", ANSWER)


def test_a_question_behind_the_same_system_prompt_is_no_turn_before() -> None:
    library = DraftLibrary()
    add(library, chained([*range(8), 30]), ANSWER)
    assert library.drafter(ROOT, [*range(8), 31], chained([*range(8), 31]))._stored == []


def test_phrases_of_all_answers_are_proposed_with_the_most_frequent_continuation() -> None:
    library = DraftLibrary()
    for number in range(12):
        add(library, asked(str(number)), [number, 50, 51, 52, 53 + (number % 4 == 0)])
    drafter = library.drafter(ROOT, [], asked("new"))
    say(drafter, [900, 50, 51])
    proposal = drafter.propose(4)
    assert proposal is not None
    assert (proposal.source, proposal.token_ids[:2]) == ("answers", (52, 53))


def test_the_beginning_most_answers_have_is_proposed_at_the_beginning() -> None:
    library = DraftLibrary()
    for number in range(12):
        add(library, asked(str(number)), [70, 71, 72, 1000 + number])
    proposal = library.drafter(ROOT, [], asked("new")).propose(3)
    assert proposal is not None
    assert (proposal.source, proposal.token_ids) == ("answers", (70, 71, 72))


def test_what_stands_in_the_prompt_is_proposed_and_what_was_said_before() -> None:
    prompt = random.Random(1).sample(range(1000, 40_000), 4000)
    drafter = DraftLibrary().drafter(ROOT, prompt, asked())
    say(drafter, [5, *prompt[2000:2003]])
    proposal = drafter.propose(6)
    assert proposal is not None
    assert proposal.source == "prompt"
    assert list(proposal.token_ids) == prompt[2003 : 2003 + len(proposal.token_ids)]
    say(drafter, prompt[2003:2010])  # it follows
    again = drafter.propose(6)
    assert again is not None
    assert list(again.token_ids) == prompt[2010 : 2010 + len(again.token_ids)]
    say(drafter, [6, 7, 8, 9, 10, 11, 6, 7])
    earlier = drafter.propose(3)
    assert earlier is not None
    assert list(earlier.token_ids) == [8, 9, 10][: len(earlier.token_ids)]


def test_of_a_prompt_the_latest_place_is_taken() -> None:
    drafter = DraftLibrary().drafter(ROOT, [1, 2, 30, 31, 1, 2, 40, 41, 5], asked())
    say(drafter, [1, 2])
    proposal = drafter.propose(2)
    assert proposal is not None
    assert proposal.token_ids[0] == 40


def test_a_repeated_question_takes_few_steps() -> None:
    assert tokens_per_step(drafter_with(ANSWER), ANSWER, most=8) > 6
    varied = [*ANSWER[:12], 1, *ANSWER[13:25], 2, 3, *ANSWER[25:]]
    assert tokens_per_step(drafter_with(ANSWER), varied, most=8) > 3


def test_counts_are_per_source() -> None:
    drafter = drafter_with(ANSWER)
    proposal = drafter.propose(8)
    assert proposal is not None
    drafter.verified(proposal, 0, 0)
    assert drafter.counts == {}
    drafter.verified(proposal, 5, 3)
    drafter.verified(proposal, 2, 2)
    assert drafter.counts == {"same prompt": [7, 5]}


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_chances_become_what_really_happens(share: float) -> None:
    """Requests repeat a stored answer's tokens with a fixed probability each."""
    library, source = DraftLibrary(), random.Random(7)
    add(library, asked("seen"), ANSWER)
    expected = hits = 0.0
    for request in range(1500):
        drafter = library.drafter(ROOT, [], asked("seen"))
        for index, token in enumerate(ANSWER[:30]):
            same = source.random() < share
            proposal = drafter.propose(1)
            if request >= 200 and proposal is not None and proposal.token_ids == (token,):
                expected += proposal.chances[0]
                hits += same
            drafter.advance(token if same else 50_000 + request * 40 + index)
    assert expected / hits == pytest.approx(1.0, abs=0.12)


def test_greedy_and_sampled_answers_are_learned_apart() -> None:
    library = DraftLibrary()
    add(library, asked("seen"), ANSWER)
    before = library.drafter(ROOT, [], asked("seen")).propose(1)
    for request in range(30):
        drafter = library.drafter(ROOT, [], asked("seen"), sampled=True)
        say(drafter, [60_000 + request * 50 + i for i in range(40)])
        drafter.propose(1)
    sampled = library.drafter(ROOT, [], asked("seen"), sampled=True).propose(1)
    assert before is not None
    assert library.drafter(ROOT, [], asked("seen")).propose(1) == before
    assert sampled is None or sampled.chances[0] < before.chances[0] - 0.2


tokens_of = st.lists(
    st.sampled_from([0, 1, 2, 3, 55295, 55296, 57343, 65535, 65536, 2**20, 0x10FFFF, 2**31, 2**32 - 1]), max_size=30
)


@given(st.lists(tokens_of, max_size=5), tokens_of, tokens_of, st.integers(1, 9))
def test_hostile_tokens_break_nothing(answers: list[list[int]], prompt: list[int], said: list[int], most: int) -> None:
    library = DraftLibrary()
    for number, answer in enumerate(answers):
        add(library, asked(str(number), "block"), answer)
    drafter = library.drafter(ROOT, prompt, asked("0", "block", "more"), known=said[::-1])
    for token in said:
        proposal = drafter.propose(most)
        check(proposal, most)
        if proposal is not None:
            assert set(proposal.token_ids) <= {*prompt, *said, *itertools.chain(*answers)}
            drafter.verified(proposal, len(proposal.token_ids), int(proposal.token_ids[0] == token))
        drafter.advance(token)


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=30), min_size=1, max_size=6), st.integers(1, 70))
def test_proposals_are_well_formed_and_the_same_again(answers: list[list[int]], most: int) -> None:
    def all_proposals() -> list[Proposal | None]:
        library, found = DraftLibrary(), []
        for number, answer in enumerate(answers):
            drafter = library.drafter(ROOT, answer[:7], asked(str(number % 3), "block", signature=b"s"))
            for token in answer:
                found.append(drafter.propose(most))
                check(found[-1], most)
                drafter.advance(token)
            library.add(ROOT, asked(str(number % 3), "block", signature=b"s"), answer)
            library.work(7)
        return found

    assert all_proposals() == all_proposals()


def test_one_token_again_and_again_is_followed() -> None:
    drafter = drafter_with([7] * 500)
    assert tokens_per_step(drafter, [7] * 500, most=32) > 20
    assert tokens_per_step(DraftLibrary().drafter(ROOT, [7] * 4000, asked()), [7] * 300, most=16) > 4
