"""A step of the model: what becomes of branches, what is drawn where, and what is done beside a step."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kitelib.abc import OverlappingBackend, StepResult, StepWork, TokenDraw
from kitelib.engine.steps import Steps, extents
from kitelib.errors import BackendStepError

DRAW = TokenDraw(0.5, 0, 1.0, 0.0, 0.25)


class PlainBackend:
    """Computes where it is called; notes what happens."""

    def __init__(self, *, draws_tokens: bool = False) -> None:
        self.info = SimpleNamespace(draws_tokens=draws_tokens)
        self.events: list[str] = []
        self.work: list[StepWork] = []
        self.result = StepResult([])

    def step(self, work: list[StepWork]) -> StepResult:
        self.events.append("step")
        self.work = list(work)
        return self.result


class BesideBackend(PlainBackend):
    """Computes beside its caller; fails at the start, or at the end, if told so."""

    fails_at = ""

    def begin_step(self, work: list[StepWork]) -> Callable[[], StepResult]:
        self.events.append("begin")
        self.work = list(work)
        if self.fails_at == "begin":
            raise BackendStepError("at the start")

        def wait() -> StepResult:
            self.events.append("wait")
            if self.fails_at == "wait":
                raise BackendStepError("at the end")
            return self.result

        return wait


def _complete(kind: type) -> None:
    """Gives a fake the methods of the contract that no step calls."""
    for name in (
        *("tokenize", "detokenize", "render_chat", "create", "fork", "shareable", "release", "room", "truncate"),
        *("free_sequences", "export_blocks", "cut", "restore_blocks", "close"),
    ):
        setattr(kind, name, lambda *_: pytest.fail("no step needs this"))


_complete(PlainBackend)


def steps_on(backend: PlainBackend) -> Steps:
    return Steps(backend, lambda: backend.events.append("meanwhile"))  # type: ignore[arg-type]


def branch(tokens: int, computed: int, **changes: Any) -> Any:
    """A branch whose sequence is number 7."""
    run = SimpleNamespace(
        sequence=7, tokens=list(range(100, 100 + tokens)), computed=computed, remaining=tokens - computed
    )
    fields: dict[str, Any] = {
        "new_tokens": [],
        "constraint": None,
        "draft": (),
        "sampler": SimpleNamespace(draws=lambda count: (DRAW,) * count),
        **changes,
    }
    return SimpleNamespace(run=run, **fields)


def test_fakes_are_what_they_stand_for() -> None:
    assert isinstance(BesideBackend(), OverlappingBackend)
    assert not isinstance(PlainBackend(), OverlappingBackend)


def test_plain_backend_computes_alone() -> None:
    backend = PlainBackend()
    steps = steps_on(backend)
    assert not steps.overlap
    assert steps.run([(branch(5, 0), 5)]) is backend.result
    assert backend.events == ["step"]  # the scheduler does the rest afterwards


def test_housekeeping_runs_while_a_step_is_under_way() -> None:
    backend = BesideBackend()
    steps = steps_on(backend)
    assert steps.overlap
    assert steps.run([(branch(5, 0), 5)]) is backend.result
    assert backend.events == ["begin", "meanwhile", "wait"]


@pytest.mark.parametrize(
    ("fails_at", "message", "events"),
    [("begin", "at the start", ["begin"]), ("wait", "at the end", ["begin", "meanwhile", "wait"])],
)
def test_failures_come_out(fails_at: str, message: str, events: list[str]) -> None:
    backend = BesideBackend()
    backend.fails_at = fails_at
    with pytest.raises(BackendStepError, match=message):
        steps_on(backend).run([(branch(5, 0), 5)])
    assert backend.events == events


@pytest.mark.parametrize(("count", "logits"), [(3, False), (4, True)])
def test_logits_are_wanted_when_the_last_token_is_computed(count: int, logits: bool) -> None:
    backend = PlainBackend()
    steps_on(backend).run([(branch(10, 6), count)])
    (item,) = backend.work
    assert (item.sequence, item.start, item.logits, item.draws) == (7, 6, logits, ())
    assert list(item.token_ids) == list(range(106, 106 + count))


@pytest.mark.parametrize(
    ("draws_tokens", "changes", "drawn"),
    [
        (True, {"new_tokens": [1]}, True),
        (False, {"new_tokens": [1]}, False),  # it can't
        (True, {}, False),  # the logits after a prompt are kept
        (True, {"new_tokens": [1], "constraint": object()}, False),  # a mask is applied on the host
        (True, {"new_tokens": [1], "sampler": SimpleNamespace(draws=lambda count: ())}, False),  # so are penalties
    ],
)
def test_tokens_are_drawn_by_the_backend_where_nothing_needs_the_logits(
    draws_tokens: bool, changes: dict[str, Any], drawn: bool
) -> None:
    backend = PlainBackend(draws_tokens=draws_tokens)
    steps_on(backend).run([(branch(10, 9, **changes), 1)])
    (item,) = backend.work
    assert (item.draws, item.logits) == (((DRAW,), False) if drawn else ((), True))


def test_nothing_is_drawn_in_the_middle_of_a_run() -> None:
    """A preempted answer is computed again in pieces: random numbers are for new tokens only."""
    backend = PlainBackend(draws_tokens=True)
    drawn: list[int] = []
    sampler = SimpleNamespace(draws=lambda count: drawn.append(count) or (DRAW,) * count)
    steps_on(backend).run([(branch(10, 2, new_tokens=[1, 2], sampler=sampler), 5)])
    assert (drawn, backend.work[0].draws, backend.work[0].logits) == ([], (), False)


def test_extents_are_those_of_branches_with_a_sequence() -> None:
    without = branch(4, 0)
    without.run.sequence = None
    assert extents([(branch(9, 0), 3), (without, 2)]) == [(7, 3)]
