"""The index of what is in the context, against a search through everything that is there."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from kitelib.abc import SequenceId
from kitelib.engine.request import Run
from kitelib.engine.residency import RecentPrompts, Residency
from kitelib.fingerprint import BlockChain

SIZE = 4
ROOTS = (b"a" * 32, b"b" * 32)


def make_run(tokens: Sequence[int], root: bytes = ROOTS[0], *, computed: int | None = None, shared: bool = True) -> Run:
    run = Run(list(tokens), BlockChain(root, SIZE, list(tokens)), shared, 0, sequence=SequenceId(1))
    run.computed = len(run.tokens) if computed is None else computed
    return run


def common(first: Sequence[int], second: Sequence[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def best_by_search(runs: Sequence[Run], root: bytes, tokens: Sequence[int], limit: int) -> int:
    lengths = [
        min(limit, run.computed, common(run.tokens, tokens)) for run in runs if run.shared and run.chain.root == root
    ]
    return max(lengths, default=0)


# Few tokens and few lengths, so that prefixes are shared often and end anywhere.
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_the_longest_shared_prefix_is_found(data: st.DataObject) -> None:
    residency = Residency(SIZE)
    runs: list[Run] = []
    for _ in range(data.draw(st.integers(0, 12))):
        tokens = data.draw(TOKENS)
        run = make_run(tokens, data.draw(st.sampled_from(ROOTS)), computed=0, shared=data.draw(st.booleans()))
        for computed in sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=3))):
            run.computed = computed
            residency.update(run)
        runs.append(run)
    for run in data.draw(st.lists(st.sampled_from(runs), unique_by=id)) if runs else []:
        residency.forget(run)
        runs.remove(run)
    root, wanted = data.draw(st.sampled_from(ROOTS)), data.draw(TOKENS)
    limit = data.draw(st.integers(0, len(wanted)))
    chain = BlockChain(root, SIZE, wanted)
    found = list(residency.candidates(chain, wanted, limit))
    assert max((length for _, length in found), default=0) == best_by_search(runs, root, wanted, limit)
    assert [length for _, length in found] == sorted((length for _, length in found), reverse=True)
    for run, length in found:
        assert run in runs
        assert run.shared
        assert run.chain.root == root
        assert run.tokens[:length] == wanted[:length]
        assert 0 < length <= min(limit, run.computed)
    resident = 0
    while resident < len(chain.fingerprints) and any(
        run.shared
        and run.chain.root == root
        and run.computed >= (resident + 1) * SIZE
        and run.tokens[: (resident + 1) * SIZE] == wanted[: (resident + 1) * SIZE]
        for run in runs
    ):
        resident += 1
    assert residency.resident_blocks(chain) == resident
    for run in runs:
        residency.forget(run)
    assert (residency._holders, residency._roots) == ({}, {})


def test_nothing_is_held_for_a_run_without_a_sequence() -> None:
    residency = Residency(SIZE)
    run = make_run([1] * 8)
    run.sequence = None
    residency.update(run)
    assert list(residency.candidates(run.chain, run.tokens, 8)) == []


def test_token_ids_are_compared_and_not_only_fingerprints() -> None:
    residency = Residency(SIZE)
    run = make_run([1] * 8)
    residency.update(run)
    run.tokens[2] = 9  # as if two prompts had the same fingerprint
    assert list(residency.candidates(BlockChain(ROOTS[0], SIZE, [1] * 8), [1] * 8, 8)) == []


def test_the_youngest_of_many_is_looked_at() -> None:
    residency = Residency(SIZE)
    runs = [make_run([1, 2, 3, 4, 100 + index, 7]) for index in range(200)]
    for run in runs:
        residency.update(run)
    wanted = [1, 2, 3, 4, 299, 7]
    best = next(residency.candidates(BlockChain(ROOTS[0], SIZE, wanted), wanted, 6))
    assert best == (runs[-1], 6)


def test_forgetting_twice_is_fine_and_a_run_may_come_back() -> None:
    residency = Residency(SIZE)
    run = make_run([1] * 9)
    residency.update(run)
    residency.forget(run)
    residency.forget(run)
    assert residency.resident_blocks(run.chain) == 0
    residency.update(run)
    assert residency.resident_blocks(run.chain) == 2


# Where a prompt leaves what was seen before


def divergence(known: Sequence[Sequence[int]], prompt: Sequence[int], root: bytes = ROOTS[0]) -> object:
    recent = RecentPrompts()
    for tokens in known:
        recent.add(BlockChain(ROOTS[0], SIZE), tokens)
    return recent.divergence(BlockChain(root, SIZE), prompt)


def test_divergence_is_from_the_longest_known_prompt() -> None:
    assert divergence([[1, 2, 3], [1, 2, 5, 6], [1]], [1, 2, 5, 7]) == (3, 6)


def test_no_divergence_where_nothing_is_shared_or_everything_known() -> None:
    assert divergence([], [1, 2]) is None
    assert divergence([[9, 2]], [1, 2]) is None
    assert divergence([[1, 2, 3]], [1, 2]) is None
    assert divergence([[1, 2, 9], [1, 2, 3]], [1, 2, 3]) is None


def test_a_known_prompt_that_ends_has_no_token_there() -> None:
    assert divergence([[1, 2]], [1, 2, 3]) == (2, None)


def test_tenants_are_not_told_of_each_other() -> None:
    assert divergence([[1, 2, 3]], [1, 2, 4], ROOTS[1]) is None


def test_only_the_last_prompts_are_remembered() -> None:
    recent = RecentPrompts(2)
    chain = BlockChain(ROOTS[0], SIZE)
    for first in (1, 2, 3):
        recent.add(chain, [first, 5])
    assert recent.divergence(chain, [1, 6]) is None
    assert recent.divergence(chain, [2, 6]) == (1, 5)


@settings(max_examples=200, deadline=None)
@given(st.lists(TOKENS, max_size=8), TOKENS, st.randoms(use_true_random=False))
def test_divergence_against_a_search(known: list[list[int]], prompt: list[int], order: random.Random) -> None:
    shared = [common(each, prompt) for each in known]
    best = max(shared, default=0)
    found = divergence(known, prompt)
    if best in (0, len(prompt)):
        assert found is None
        return
    assert isinstance(found, tuple)
    assert found[0] == best
    ends = {each[best] if len(each) > best else None for each, n in zip(known, shared, strict=True) if n == best}
    assert found[1] in (ends - {None} or ends)
