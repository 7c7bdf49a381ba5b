"""Steps over the paged cache: the model's logits, all or nothing, copy-on-write with real KV, blocks out and in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kitelib.abc import StepWork
from kitelib.backends.torch_engine.packing import RowPlan
from kitelib.errors import BackendError, BackendStepError
from tests.support.answers import prompt_of
from tests.support.hf_folders import reference_model
from tests.support.torch_parts import Parts, compute, export_all, open_parts

VOCAB = 512
TOKENS = prompt_of(70, 1, VOCAB)
OTHER = prompt_of(40, 2, VOCAB)


@pytest.fixture(scope="module")
def parts(hf_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Parts:
    return open_parts(hf_model("llama"), tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def reference(hf_model: Callable[..., Path]) -> np.ndarray:
    """Logits after each of TOKENS, (70, vocabulary)."""
    with torch.inference_mode():
        return reference_model(hf_model("llama"))(torch.tensor([TOKENS])).logits[0].numpy()


@pytest.mark.parametrize("piece", [1, 7, 16, 70])
@pytest.mark.parametrize("rows", [RowPlan(1, 256), RowPlan(16, 128, 16)])
def test_logits_are_the_models(parts: Parts, reference: np.ndarray, piece: int, rows: RowPlan) -> None:
    runner = parts.runner(rows=rows)
    sequence = runner.tables.create(None)
    for first in range(0, len(TOKENS), piece):
        part = TOKENS[first : first + piece]
        (logits,) = runner.step([StepWork(sequence, part, first, True)]).logits
        assert (logits.dtype, logits.shape) == (np.float32, (VOCAB,))
        assert np.abs(logits - reference[first + len(part) - 1]).max() < 1e-4


def test_logits_come_for_those_who_asked(parts: Parts, reference: np.ndarray) -> None:
    runner = parts.runner(rows=RowPlan(16, 256))
    work, wanted = [], []
    for count, logits in ((5, True), (3, False), (20, True), (1, False), (70, True)):
        work.append(StepWork(runner.tables.create(None), TOKENS[:count], 0, logits))
        wanted.append(reference[count - 1] if logits else None)
    result = runner.step(work)
    assert len(result.tokens) == 0
    for ours, theirs in zip(result.logits, wanted, strict=True):
        assert (ours is None) == (theirs is None)
        assert theirs is None or np.abs(ours - theirs).max() < 1e-4


def test_blocks_freed_and_taken_in_any_order_hold_the_right_kv(parts: Parts) -> None:
    """The same prompt over scattered blocks."""
    runner = parts.runner()
    first = runner.tables.create(None)
    wanted = compute(runner, first, TOKENS), export_all(runner, first, len(TOKENS))
    runner.tables.release(first)
    for seed in range(3):
        np.random.default_rng(seed).shuffle(runner.tables._free)
        sequence = runner.tables.create(None)
        assert np.array_equal(compute(runner, sequence, TOKENS), wanted[0])
        assert export_all(runner, sequence, len(TOKENS)) == wanted[1]
        runner.tables.release(sequence)


# Refusals


@contextmanager
def nothing_changes(runner: Any, sequence: Any, match: str) -> Iterator[None]:
    """The block raises BackendStepError, and leaves the sequence and the room as they were."""
    tokens, free = runner.tables[sequence].num_tokens, runner.tables.free_blocks
    kv = export_all(runner, sequence, tokens)
    with pytest.raises(BackendStepError, match=match):
        yield
    assert (runner.tables[sequence].num_tokens, runner.tables.free_blocks) == (tokens, free)
    assert export_all(runner, sequence, tokens) == kv


@pytest.fixture
def held(parts: Parts) -> tuple[Any, Any]:
    """A small runner, and a sequence of 20 tokens on it."""
    runner = parts.runner(num_blocks=5, rows=RowPlan(1, 64))
    sequence = runner.tables.create(None)
    compute(runner, sequence, TOKENS[:20])
    return runner, sequence


@pytest.mark.parametrize(
    ("tokens", "start", "match"),
    [
        ([1], 19, "holds 20 tokens, so position 19 can't follow"),
        ([1], 21, "position 21"),
        ([], 20, "at least one"),
        ([1] * 65, 20, "1 to 64 tokens"),
        ([VOCAB], 20, f"outside 0 to {VOCAB - 1}"),
        ([-1], 20, "outside 0"),
        ([3, VOCAB + 7, 3], 20, "outside 0"),
    ],
)
def test_bad_work_is_refused_and_changes_nothing(held: Any, tokens: list[int], start: int, match: str) -> None:
    runner, sequence = held
    with nothing_changes(runner, sequence, match):
        runner.step([StepWork(sequence, tokens, start, True)])
    compute(runner, sequence, TOKENS[:30], 20)


def test_step_that_does_not_fit_takes_nothing(held: Any) -> None:
    runner, sequence = held
    other = runner.tables.create(None)
    with nothing_changes(runner, sequence, "free blocks"):
        # The first item would fit.
        runner.step([StepWork(sequence, [1] * 20, 20, True), StepWork(other, [1] * 44, 0, True)])
    assert runner.tables[other].num_tokens == 0


def test_nobody_comes_twice_and_an_empty_step_is_none(held: Any) -> None:
    runner, sequence = held
    with nothing_changes(runner, sequence, "twice"):
        runner.step([StepWork(sequence, [1], 20, True), StepWork(sequence, [2], 21, True)])
    with nothing_changes(runner, sequence, "not 0"):
        runner.step([])


def test_adapters_do_not_share_a_step(held: Any) -> None:
    runner, sequence = held
    with nothing_changes(runner, sequence, "one adapter"):
        runner.step([StepWork(sequence, [1], 20, True), StepWork(runner.tables.create("tone"), [2], 0, True)])


@pytest.mark.parametrize(("error", "raised"), [(RuntimeError, BackendStepError), (KeyError, KeyError)])
def test_model_that_fails_leaves_everything_as_it_was(
    held: Any, monkeypatch: pytest.MonkeyPatch, error: type[Exception], raised: type[Exception]
) -> None:
    runner, sequence = held
    fork = runner.tables.fork(sequence, 18)
    wanted = export_all(runner, sequence, 20)

    def fail(*_: Any) -> Any:
        raise error("broken")

    with monkeypatch.context() as patch:
        patch.setattr(runner._forward, "logits", fail)
        with pytest.raises(raised, match="broken"):
            runner.step([StepWork(sequence, [1], 20, True), StepWork(fork, [2], 18, True)])
    assert (runner.tables[sequence].num_tokens, runner.tables[fork].num_tokens) == (20, 18)
    assert export_all(runner, sequence, 20) == wanted
    fresh = runner.tables.create(None)
    assert np.array_equal(compute(runner, sequence, TOKENS[:25], 20), compute(runner, fresh, TOKENS[:25]))


# Forks


@pytest.mark.parametrize("count", [1, 15, 16, 17, 31, 32, 39])
def test_fork_and_source_part_without_touching_each_other(parts: Parts, count: int) -> None:
    runner = parts.runner()
    source = runner.tables.create(None)
    compute(runner, source, TOKENS[:40])
    before = export_all(runner, source, 40)
    fork = runner.tables.fork(source, count)
    astray = [*TOKENS[:count], *OTHER[:20]]
    work = [StepWork(fork, OTHER[:20], count, True), StepWork(source, TOKENS[40:45], 40, True)]
    ours = [logits.copy() for logits in runner.step(work).logits]
    assert export_all(runner, source, 40) == before
    for sequence, tokens, logits in ((fork, astray, ours[0]), (source, TOKENS[:45], ours[1])):
        fresh = runner.tables.create(None)
        assert np.abs(compute(runner, fresh, tokens) - logits).max() < 1e-4
        for mine, theirs in zip(
            export_all(runner, sequence, len(tokens)), export_all(runner, fresh, len(tokens)), strict=True
        ):
            assert np.allclose(np.frombuffer(mine, np.float32), np.frombuffer(theirs, np.float32), atol=1e-5)
        runner.tables.release(fresh)
    for sequence in (fork, source):
        runner.tables.release(sequence)
    assert runner.tables.free_blocks == runner.tables.num_blocks


# Blocks


def test_restored_blocks_are_the_same_and_go_on_the_same(parts: Parts) -> None:
    runner = parts.runner()
    source = runner.tables.create(None)
    compute(runner, source, TOKENS[:45])
    payloads = runner.export(source, 0, 3, 45)
    assert [payload.num_tokens for payload in payloads] == [16, 16, 13]
    target = runner.tables.create(None)
    runner.restore(target, 0, payloads[:1])
    runner.restore(target, 1, payloads[1:])
    runner.restore(runner.tables.create(None), 0, [])
    assert export_all(runner, target, 45) == export_all(runner, source, 45)
    ours, theirs = (compute(runner, each, TOKENS[:60], 45) for each in (target, source))
    assert np.array_equal(ours, theirs)


def test_export_gives_what_is_there(parts: Parts) -> None:
    runner = parts.runner()
    sequence = runner.tables.create(None)
    compute(runner, sequence, TOKENS[:40])
    assert [each.num_tokens for each in runner.export(sequence, 1, 5, None)] == [16, 8]
    assert [each.num_tokens for each in runner.export(sequence, 0, 2, 20)] == [16, 4]
    assert runner.export(sequence, 3, 1, None) == []
    assert runner.export(sequence, 0, 0, None) == []
    assert runner.export(sequence, 2, 1, 32) == []


def test_bad_restores_change_nothing(held: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, sequence = held
    full = runner.export(sequence, 0, 1, None)[0]
    tail = runner.export(sequence, 1, 1, None)[0]
    target, free = runner.tables.create(None), runner.tables.free_blocks
    for first, payloads, match in (
        (1, [full], "can't follow a sequence of 0"),
        (0, [tail, full], "4 tokens where 16"),
        (0, [dataclasses.replace(full, layout="other")], "other"),
        (0, [full] * 5, "free blocks"),
    ):
        with pytest.raises(BackendError, match=match):
            runner.restore(target, first, payloads)
        assert (runner.tables[target].num_tokens, runner.tables.free_blocks) == (0, free)

    def fail(*_: Any) -> None:
        raise RuntimeError("the copy broke")

    monkeypatch.setattr(runner.transfer, "restore", fail)
    with pytest.raises(BackendError, match="the copy broke"):
        runner.restore(target, 0, [full])
    assert (runner.tables[target].num_tokens, runner.tables.free_blocks) == (0, free)


def test_compiled_program_is_taken_where_there_is_one(parts: Parts) -> None:
    class Compiled:
        asked: list[int] = []  # noqa: RUF012 - one instance

        def ready(self, rows: int) -> Any:
            self.asked.append(rows)
            return (lambda ids, positions, select: torch.full((len(select), VOCAB), 7.0)) if rows == 1 else None

    runner = parts.runner(compiled=Compiled())
    sequence = runner.tables.create(None)
    assert not (compute(runner, sequence, TOKENS[:10]) == 7.0).any()
    assert (compute(runner, sequence, TOKENS[:11], 10) == 7.0).all()
    assert Compiled.asked == [10, 1]
