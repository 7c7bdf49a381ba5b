"""What `check_backend` asks of a backend that verifies drafts (`kitelib.abc.ModelInfo.max_outputs` is not 0)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kitelib.abc import SequenceId, StepWork
from kitelib.errors import BackendError, BackendStepError
from kitelib.testing.bench import Bench, Logits

__all__ = ["DRAFT_PROMISES", "drafts_are_refused"]


def _one_by_one(bench: Bench, start: int, count: int) -> list[Logits]:
    """Logits after ``prompt[start]`` and each of the `count - 1` tokens that follow, each in a step of its own."""
    with bench.sequence(bench.prompt[:start]) as sequence:
        return [bench.extend(sequence, bench.prompt[: start + i + 1], start + i) for i in range(count)]


def _all_same(bench: Bench, ours: Sequence[Logits], theirs: Sequence[Logits]) -> bool:
    return all(bench.same(a, b) for a, b in zip(ours, theirs, strict=True))


def _most_drafts(bench: Bench) -> int:
    """As many drafts as can be checked beside two other outputs and a piece without."""
    info = bench.backend.info
    return max(1, min(bench.block, info.max_outputs - 3, info.max_step_tokens - 6))


def _logits_come_before_each_draft(bench: Bench) -> None:
    start, most = bench.block // 2, _most_drafts(bench)
    expected = _one_by_one(bench, start, most + 1)
    promise = "logits before a draft must be those of decoding one by one"
    for drafts in sorted({1, 2, most}):
        with bench.sequence(bench.prompt[:start]) as sequence:
            work = StepWork(sequence, bench.prompt[start : start + drafts + 1], start, True, drafts=drafts)
            (found,) = bench.verify(work)
            bench.require(_all_same(bench, found, expected[: drafts + 1]), promise)
    with bench.sequence() as whole:  # the end of a prompt, and drafts behind it
        work = StepWork(whole, bench.prompt[: start + 2], 0, True, drafts=1)
        (found,) = bench.verify(work)
        bench.require(_all_same(bench, found, expected[:2]), "drafts must be possible behind more than one token")
    with bench.sequence(bench.prompt[:start]) as sequence:
        step = bench.backend.step([StepWork(sequence, bench.prompt[start : start + 1], start, True)])
        bench.require(not step.draft_logits, "a step without drafts must have no draft_logits")


def _company_does_not_matter_to_drafts(bench: Bench) -> None:
    start, drafts = bench.block // 2, _most_drafts(bench)
    expected = _one_by_one(bench, start, drafts + 1)
    held = len(bench.other) - 1
    with (
        bench.sequence(bench.prompt[:start]) as sequence,
        bench.sequence(bench.other[:held]) as lone,
        bench.sequence() as piece,
    ):
        _, ours, theirs = bench.verify(
            StepWork(piece, bench.other[:3], 0, False),
            StepWork(sequence, bench.prompt[start : start + drafts + 1], start, True, drafts=drafts),
            StepWork(lone, bench.other[held:], held, True),
        )
        bench.require(_all_same(bench, ours, expected), "logits of drafts must not depend on what else is in the step")
        bench.require(
            bench.same(theirs[0], bench.fresh(bench.other)), "logits of others must not depend on drafts in the step"
        )
        found = bench.extend(piece, bench.other, 3)
        bench.require(bench.same(found, theirs[0]), "a prompt must go on beside drafts as it does alone")


def _go_on(bench: Bench, sequences: Sequence[tuple[SequenceId, list[int], int]], promise: str) -> None:
    """Each sequence holds so many of its tokens and gets the others; it must be as one that was computed alone."""
    for sequence, tokens, held in sequences:
        found = bench.extend(sequence, tokens, held)
        bench.require(bench.same(found, bench.fresh(tokens)), promise)
        if bench.backend.info.reuse_blocks:
            with bench.sequence(tokens) as fresh:
                theirs = bench.export(fresh, len(tokens))
            ours = bench.export(sequence, len(tokens))
            bench.require(bench.same_blocks(ours, theirs), "blocks must not tell that there were drafts")


def _what_is_taken_back_leaves_no_trace(bench: Bench) -> None:
    """Two sequences reject at other depths, over the border of a block and after it, several times in a row."""
    backend, promise = bench.backend, "a sequence must go on after a truncate as if there had been no drafts"
    with bench.sequence(bench.prompt[: bench.block - 2]) as first, bench.sequence(bench.other[:3]) as second:
        held = [bench.block - 2, 3]
        pairs = ((first, bench.prompt, bench.other), (second, bench.other, bench.prompt))
        for right in ((0, 2), (1, 0), (3, 1), (0, 0)):
            work = []
            for (sequence, own, wrong), start, count in zip(pairs, held, right, strict=True):
                tokens = [*own[start : start + 1 + count], *wrong[-(3 - count) :]][:4]
                work.append(StepWork(sequence, tokens, start, True, drafts=3))
            bench.verify(*work)
            for i, (sequence, own, _) in enumerate(pairs):
                held[i] += 1 + right[i]
                backend.truncate(sequence, held[i])
                if backend.info.reuse_blocks:
                    blocks = bench.export(sequence, len(own))
                    count = sum(each.num_tokens for each in blocks)
                    bench.require(count == held[i], "what was taken back must not be exported")
        _go_on(bench, [(each, own, count) for (each, own, _), count in zip(pairs, held, strict=True)], promise)


def _room_of_drafts_comes_back(bench: Bench) -> None:
    backend, start = bench.backend, bench.block - 1
    with bench.sequence(bench.prompt[:start]) as sequence:
        room = backend.room(), backend.room(sequence)
        for _ in range(3):
            drafts = _most_drafts(bench)
            tokens = bench.other[: drafts + 1]
            bench.verify(StepWork(sequence, tokens, start, True, drafts=drafts))
            bench.require(backend.room(sequence) <= room[1] - len(tokens), "drafts must take room until taken back")
            backend.truncate(sequence, start)
            after = backend.room(), backend.room(sequence)
            bench.require(after == room, "the room of drafts must come back with truncate")


def _forks_stay_when_drafts_go(bench: Bench) -> None:
    backend, start = bench.backend, bench.block + 1
    if not backend.info.reuse_blocks:
        return  # tokens are not shared
    tokens = [*bench.prompt[:start], bench.other[0], *bench.prompt[start:]]
    with bench.sequence(bench.prompt[: start - 1]) as source:
        bench.verify(StepWork(source, tokens[start - 1 : start + 3], start - 1, True, drafts=3))
        with bench.fork(source, start + 2) as fork, bench.fork(source, start) as other:
            backend.truncate(source, start)
            _go_on(bench, [(fork, tokens, start + 2)], "a fork must keep what its source takes back")
            bench.verify(StepWork(other, [bench.prompt[start], *bench.other[:2]], start, True, drafts=2))
            backend.truncate(other, start + 1)
            kept = [*bench.prompt[:start], bench.prompt[start], *bench.other[:1]]
            _go_on(bench, [(other, kept, start + 1)], "a fork must be taken back alone")
            _go_on(bench, [(source, bench.prompt, start)], "a source must keep what its fork takes back")
        with bench.fork(source, len(bench.prompt)) as fork:
            backend.truncate(fork, len(bench.prompt) - 1)
            longer = [*bench.prompt, *bench.other[:2]]
            _go_on(bench, [(source, longer, len(bench.prompt))], "a source must keep what its fork takes back")


def _bad_drafts_change_nothing(bench: Bench) -> None:
    backend, info, start = bench.backend, bench.backend.info, bench.block // 2
    with bench.sequence(bench.prompt[:start]) as sequence:
        room = backend.room()
        for count in (start + 1, -1):
            bench.require(
                bench.fails(BackendError, lambda count=count: backend.truncate(sequence, count)),  # type: ignore[misc]
                "truncate to more tokens than there are, or to less than none, must raise BackendError",
            )
        promises: dict[str, Callable[[], object]] = {
            "as many drafts as tokens must raise BackendStepError": lambda: backend.step(
                [StepWork(sequence, bench.other[:2], start, True, drafts=2)]
            ),
        }
        if info.max_outputs < min(info.max_step_tokens, len(bench.other) - 1):
            promises["more than max_outputs outputs must raise BackendStepError"] = lambda: backend.step(
                [StepWork(sequence, bench.other[: info.max_outputs + 1], start, True, drafts=info.max_outputs)]
            )
        for promise, call in promises.items():
            bench.require(bench.fails(BackendStepError, call), promise)
        bench.require(
            not bench.fails(BackendError, lambda: backend.truncate(sequence, start)),
            "truncate to all that a sequence holds must do nothing, also after one that failed",
        )
        bench.require(backend.room() == room, "what was refused must not take or give room")
        _go_on(bench, [(sequence, bench.prompt, start)], "what was refused must have changed nothing")


def drafts_are_refused(bench: Bench) -> None:
    """The promise of a backend that can't verify drafts."""
    start = len(bench.prompt) // 2
    with bench.sequence(bench.prompt[:start]) as sequence:
        work = [StepWork(sequence, bench.prompt[start : start + 2], start, True, drafts=1)]
        bench.require(
            bench.fails(BackendStepError, lambda: bench.backend.step(work)),
            "drafts must raise BackendStepError where info.max_outputs is 0",
        )
        _go_on(bench, [(sequence, bench.prompt, start)], "drafts that were refused must have changed nothing")


DRAFT_PROMISES: tuple[Callable[[Bench], None], ...] = (
    _logits_come_before_each_draft,
    _company_does_not_matter_to_drafts,
    _what_is_taken_back_leaves_no_trace,
    _room_of_drafts_comes_back,
    _forks_stay_when_drafts_go,
    _bad_drafts_change_nothing,
)
"""Promises of a backend that can verify drafts."""
