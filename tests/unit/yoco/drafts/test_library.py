"""What the library keeps: bounded, tenants apart, new before old."""

from __future__ import annotations

import gc
import random
import sys
import tracemalloc
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitelib.fingerprint import BlockChain, end_fingerprint
from kitelib.yoco.drafts import Asked, DraftLibrary, SuffixAutomaton

ROOT, OTHER = b"r" * 32, b"o" * 32


def asked(number: int, *, dimensions: int = 0) -> Asked:
    vector = None
    if dimensions:
        vector = np.random.default_rng(number).standard_normal(dimensions).astype(np.float32)
        vector /= np.linalg.norm(vector)
    block, end = (f"{kind}{number}".encode().ljust(32) for kind in ("block", "end"))
    return Asked([block], end, f"sign{number}".encode().ljust(32), vector)


def work_off(library: DraftLibrary) -> None:
    assert not library.work(10**6)


def answer_of(number: int, length: int = 48) -> list[int]:
    source = random.Random(number)
    return [source.randrange(40_000) for _ in range(length)]


def proposed(
    library: DraftLibrary, root: bytes, of: Asked, said: Sequence[int] = ()
) -> tuple[str, tuple[int, ...]] | None:
    drafter = library.drafter(root, [], of)
    for token in said:
        drafter.advance(token)
    proposal = drafter.propose(4)
    return None if proposal is None else (proposal.source, proposal.token_ids)


def test_nothing_crosses_roots() -> None:
    library = DraftLibrary()
    for number in range(20):
        library.add(ROOT, asked(number, dimensions=8), [1, 2, 3, 4, number + 10])
    work_off(library)
    for said in ([], [1], [1, 2, 3]):
        assert proposed(library, ROOT, asked(3, dimensions=8), said) is not None
        assert proposed(library, OTHER, asked(3, dimensions=8), said) is None


def test_rates_learned_for_one_root_do_not_show_in_another() -> None:
    library = DraftLibrary()
    for root in (ROOT, OTHER):
        library.add(root, asked(1), answer_of(1))
    work_off(library)
    before = library.drafter(OTHER, [], asked(1)).propose(4)
    for number in range(2, 60):
        drafter = library.drafter(ROOT, [], asked(1))
        for token in answer_of(number):
            drafter.advance(token)
        drafter.propose(4)
    assert library.drafter(OTHER, [], asked(1)).propose(4) == before


def test_the_same_prompt_keeps_its_latest_answer() -> None:
    library = DraftLibrary()
    library.add(ROOT, asked(1), answer_of(1))
    library.add(ROOT, asked(1), answer_of(2))
    assert proposed(library, ROOT, asked(1)) == ("same prompt", tuple(answer_of(2)[:4]))
    assert library.stats()["completions"] == 1
    assert library.stats()["tokens"] == 48


def test_an_empty_answer_is_not_kept() -> None:
    library = DraftLibrary()
    library.add(ROOT, asked(1), [])
    assert library.stats() == {"completions": 0, "tokens": 0, "bytes": 0}


@pytest.mark.parametrize("dimensions", [0, 64])
def test_endless_adds_stay_within_bounds_and_the_latest_stay(dimensions: int) -> None:
    limit = 600_000
    library = DraftLibrary(limit)
    for number in range(1500):
        length = 3000 if number % 100 == 99 else 30
        library.add(ROOT, asked(number, dimensions=dimensions), answer_of(number, length))
        library.work(400)
        assert library.num_bytes <= limit
    assert library.num_bytes > limit // 4
    records = library._roots[ROOT].records
    assert 0 < len(records._tails) == len(records) < 1500
    latest = asked(1498, dimensions=dimensions)
    assert proposed(library, ROOT, latest) == ("same prompt", tuple(answer_of(1498, 30)[:4]))
    assert proposed(library, ROOT, asked(0, dimensions=dimensions)) in (None, ("answers", ()))
    # Phrases of the latest answers are known without their prompts, and so are those of the generation before.
    assert proposed(library, ROOT, asked(9999), answer_of(1497, 30)[5:10]) == (
        "answers",
        tuple(answer_of(1497, 30)[10:14]),
    )


def test_the_root_used_least_recently_goes_first() -> None:
    library = DraftLibrary(400_000)
    roots = [bytes([number]) * 32 for number in range(100)]
    for root in roots:
        library.add(root, asked(1), answer_of(1))
        library.drafter(roots[0], [], asked(1))  # used all the time
        work_off(library)
        assert library.num_bytes <= 400_000
    left = list(library._roots)
    assert roots[0] in left
    assert 5 < len(left) < 100
    assert left[:-1] == roots[-len(left) + 1 :]
    assert proposed(library, roots[1], asked(1)) is None


def test_asking_alone_does_not_grow_without_bound() -> None:
    library = DraftLibrary(200_000)
    for number in range(500):
        library.drafter(number.to_bytes(32, "big"), [1, 2], asked(1))
        assert library.num_bytes <= 200_000


@pytest.mark.parametrize("max_bytes", [0, 1000, 20_000])
def test_a_library_too_small_for_anything_keeps_nothing_and_still_drafts(max_bytes: int) -> None:
    library = DraftLibrary(max_bytes)
    for number in range(30):
        library.add(ROOT, asked(number), answer_of(number, 200))
        assert library.num_bytes <= max_bytes
        work_off(library)
        assert library.num_bytes <= max_bytes
    drafter = library.drafter(ROOT, [5, 6, 7, 8, 9], asked(99))
    for token in (5, 6, 7):
        drafter.advance(token)
    proposal = drafter.propose(2)
    assert proposal is not None
    assert proposal.token_ids[0] == 8


@pytest.mark.parametrize("dimensions", [0, 128])
def test_bytes_are_counted_about_as_they_are(dimensions: int) -> None:
    asks = [asked(number, dimensions=dimensions) for number in range(600)]
    texts = [answer_of(number) for number in range(600)]
    gc.collect()
    tracemalloc.start()
    try:
        library = DraftLibrary()
        before = tracemalloc.get_traced_memory()[0]
        for each, text in zip(asks, texts, strict=True):
            fields = (
                [bytes(bytearray(each.fingerprints[0]))],
                bytes(bytearray(each.end)),
                bytes(bytearray(each.signature or b"")),
            )
            library.add(ROOT, Asked(*fields, each.vector), [int(str(token)) for token in text])
        work_off(library)
        gc.collect()
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0.85 * held < library.num_bytes < 1.5 * held


def test_adding_and_asking_leave_the_automaton_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def record(self: SuffixAutomaton, token_ids: Iterable[int]) -> None:
        calls.append(len(list(token_ids)))

    monkeypatch.setattr(SuffixAutomaton, "extend", record)
    library = DraftLibrary()
    for number in range(50):
        library.add(ROOT, asked(number), answer_of(number))
        library.drafter(ROOT, [], asked(number))
    assert calls == []
    while library.work(30):
        assert calls[-1] <= 30
    assert sum(calls) == 50 * 48


answers_of_roots = st.lists(
    st.tuples(st.sampled_from([ROOT, OTHER]), st.lists(st.integers(0, 4), min_size=1, max_size=12)), max_size=12
)


@given(answers_of_roots, st.lists(st.integers(1, 20), max_size=30))
def test_work_in_any_pieces_gives_the_same_automata(answers: list[tuple[bytes, list[int]]], pieces: list[int]) -> None:
    at_once, in_pieces = DraftLibrary(), DraftLibrary()
    for number, (root, answer) in enumerate(answers):
        for library in (at_once, in_pieces):
            library.add(root, asked(number), answer)
    work_off(at_once)
    left = sum(len(answer) for _, answer in answers)
    for piece in pieces:
        left = max(left - piece, 0)
        assert in_pieces.work(piece) == (left > 0)
    work_off(in_pieces)
    assert in_pieces.num_bytes == at_once.num_bytes
    assert list(in_pieces._roots) == list(at_once._roots)
    for root, kept in in_pieces._roots.items():
        ours, theirs = kept.automaton, at_once._roots[root].automaton
        for name in SuffixAutomaton.__slots__:
            assert getattr(ours, name) == getattr(theirs, name), name


def test_of_what_waits_the_latest_is_kept() -> None:
    library = DraftLibrary(1_000_000)
    waiting = 0
    for number in range(3000):
        library.add(ROOT, asked(number), answer_of(number, 30))
        if number % 3 == 0:
            library.work(7)
        assert library.num_bytes <= 1_000_000
        kept = library._roots[ROOT]
        assert kept.pending_bytes == sum(sys.getsizeof(text) + 16 for text in kept.pending) <= 5_000
        waiting = max(waiting, len(kept.pending))
    assert waiting > 20
    assert library.work(10)
    work_off(library)
    assert kept.pending_bytes == 0
    assert kept.automaton.find(answer_of(2999, 30)) == 1
    assert kept.automaton.find(answer_of(2000, 30)) == 0
    assert kept.automaton.num_tokens < 15_000


def test_roots_take_turns() -> None:
    library = DraftLibrary()
    for number in range(100):
        library.add(ROOT, asked(number), answer_of(number, 20))
    library.add(OTHER, asked(1), answer_of(999, 20))
    library.work(40)
    assert library._roots[OTHER].automaton.find(answer_of(999, 20)) == 1
    work_off(library)
    assert library._roots[ROOT].automaton.num_texts == 100


def test_what_waits_is_gone_with_its_root() -> None:
    library = DraftLibrary(30_000)
    for number in range(60):
        library.add(number.to_bytes(32, "big"), asked(number), answer_of(number, 12))
        assert library.num_bytes <= 30_000
    assert 1 < len(library._roots) < 60
    work_off(library)
    assert library.num_bytes == sum(kept.num_bytes for kept in library._roots.values()) <= 30_000
    library.add(ROOT, asked(1), answer_of(1, 12))
    library.clear()
    assert not library.work(1)
    assert library.num_bytes == 0


def counted_ends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []

    def end(previous: bytes, tail_token_ids: Sequence[int]) -> bytes:
        calls.append(len(tail_token_ids))
        return end_fingerprint(previous, tail_token_ids)

    monkeypatch.setattr("kitelib.yoco.drafts.records.end_fingerprint", end)
    return calls


def chained(tokens: Sequence[int]) -> Asked:
    chain = BlockChain(ROOT, 16, tokens)
    return Asked(chain.fingerprints, chain.end(), None, None, 16, len(chain.tail))


@pytest.mark.parametrize(
    ("tails", "most"), [pytest.param([1], 8, id="one end per block"), pytest.param(range(1, 16), 16, id="many ends")]
)
def test_earlier_turns_are_looked_for_in_few_places(
    monkeypatch: pytest.MonkeyPatch, tails: Sequence[int], most: int
) -> None:
    """Earlier prompts end behind each block of this one, and none of them is its beginning."""
    library, prompt = DraftLibrary(), answer_of(0, 3200)
    for block in range(1, 200):
        for tail in tails:
            library.add(ROOT, chained([*prompt[: 16 * block], *[50_000] * tail]), [1, 2, 3])
    calls = counted_ends(monkeypatch)
    asking = chained(prompt)
    for _ in range(8):  # its choices
        assert library.drafter(ROOT, prompt, asking)._stored == []
    assert 0 < len(calls) <= most


def test_the_prompt_itself_is_not_taken_for_the_turn_before() -> None:
    library, prompt = DraftLibrary(), answer_of(0, 40)
    library.add(ROOT, chained(prompt[:35]), answer_of(1))
    library.add(ROOT, chained(prompt), answer_of(2))
    library.add(ROOT, chained([*prompt, 1]), answer_of(3))
    found = library.drafter(ROOT, prompt, chained(prompt))._stored
    assert [(each.source, ord(each.text[0])) for each in found] == [
        ("same prompt", answer_of(2)[0]),
        ("conversation", answer_of(1)[0]),
    ]


def test_choices_look_up_once_until_something_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    library, prompt = DraftLibrary(), answer_of(0, 100)
    library.add(ROOT, chained(prompt[:50]), answer_of(1))
    calls, asking = counted_ends(monkeypatch), chained(prompt)

    def found() -> list[int]:
        return [ord(follower.text[0]) for follower in library.drafter(ROOT, prompt, asking)._stored]

    assert [found() for _ in range(4)] == [[answer_of(1)[0]]] * 4
    assert calls == [2]
    library.add(ROOT, chained(prompt[:60]), answer_of(2))
    assert [found() for _ in range(4)] == [[answer_of(2)[0]]] * 4
    assert calls == [2, 12]
    library.clear()
    assert found() == []


def test_a_drafter_goes_on_when_its_root_is_gone() -> None:
    library = DraftLibrary()
    library.add(ROOT, asked(1), answer_of(1))
    drafter = library.drafter(ROOT, [], asked(1))
    library.clear()
    assert library.stats() == {"completions": 0, "tokens": 0, "bytes": 0}
    for token in answer_of(1)[:10]:
        drafter.advance(token)
    proposal = drafter.propose(4)
    assert proposal is not None
    assert proposal.token_ids == tuple(answer_of(1)[10:14])
    assert proposed(library, ROOT, asked(1)) is None


def test_neighbours_below_the_threshold_are_left_out_and_the_nearest_come_first() -> None:
    library = DraftLibrary()
    for number, vector in enumerate([(1.0, 0.0), (0.8, 0.6), (0.6, 0.8), (0.0, 1.0), (-1.0, 0.0)]):
        library.add(ROOT, Asked([], bytes([number]), None, np.asarray(vector, dtype=np.float32)), [number + 1] * 5)
    drafter = library.drafter(ROOT, [], Asked([], b"new", None, np.asarray((1.0, 0.0), dtype=np.float32)))
    assert [ord(follower.text[0]) for follower in drafter._stored] == [1, 2, 3]
    other = Asked([], b"new", None, np.ones(7, dtype=np.float32))  # from another encoder
    assert library.drafter(ROOT, [], other)._stored == []


def test_neighbours_whose_answer_is_gone_are_not_found() -> None:
    library = DraftLibrary(300_000)
    for number in range(600):
        library.add(ROOT, asked(number, dimensions=32), answer_of(number))
    drafter = library.drafter(ROOT, [], Asked([], b"new", None, asked(0, dimensions=32).vector))
    assert answer_of(0)[0] not in [ord(follower.text[0]) for follower in drafter._stored]
    latest = library.drafter(ROOT, [], Asked([], b"new", None, asked(599, dimensions=32).vector))
    assert ord(latest._stored[0].text[0]) == answer_of(599)[0]
