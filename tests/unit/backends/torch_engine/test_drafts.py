"""Drafts are verified in one step: the logits and the KV of the same tokens one by one, whatever else the step computes,
and what was guessed wrong is taken back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kitelib.abc import SequenceId, StepResult, StepWork, TokenDraw
from kitelib.backends.torch_engine.backend import TorchBackend, TorchOptions
from kitelib.backends.torch_engine.device_runner import DeviceRunner
from kitelib.backends.torch_engine.graphed import decode_graphs
from kitelib.backends.torch_engine.graphs import DecodeBatch, PlainReplay
from kitelib.backends.torch_engine.packing import RowPlan
from kitelib.backends.torch_engine.runner import Runner
from kitelib.errors import BackendError, BackendStepError
from tests.support.answers import prompt_of
from tests.support.hf_folders import ARCHITECTURES
from tests.support.torch_parts import GREEDY_DRAW, Parts, compute, export_all, open_parts

VOCAB = 512
WINDOW = 32  # of the architectures that have one
# A text that ends inside a block, beyond any window, and what follows it.
TEXT, NEXT, WRONG = prompt_of(75, 11, VOCAB), prompt_of(9, 12, VOCAB), prompt_of(9, 13, VOCAB)
# Mixtures of experts, whose bits depend on company: an expert sees another number of rows.
MIXTURES = ("qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3")

Rows = npt.NDArray[np.float32]


def rows_of(result: StepResult, place: int = 0) -> Rows:
    """All logits of one item, (1 + drafts, vocabulary)."""
    last = result.logits[place]
    assert last is not None
    return np.stack([*(result.draft_logits[place] if result.draft_logits else ()), last])


@dataclasses.dataclass
class Model:
    """A loaded model, with what its tokens give one by one.

    Attributes:
        sequence: that holds TEXT and NEXT.
        logits: after the last token of TEXT, then after each of NEXT, (10, vocabulary).
        exact: numerics are bitwise.
    """

    backend: TorchBackend
    sequence: SequenceId
    logits: Rows
    exact: bool

    def equal(self, ours: Rows, theirs: Rows) -> bool:
        """The same bits, or nearly the same numbers where bits depend on company."""
        return ours.tobytes() == theirs.tobytes() if self.exact else np.abs(ours - theirs).max() < 1e-4

    def equal_kv(self, sequence: SequenceId, num_tokens: int) -> bool:
        """Whether a sequence of the first `num_tokens` tokens of TEXT and NEXT has their KV."""
        ours, theirs = (export_all(self.backend.runner, each, num_tokens) for each in (sequence, self.sequence))
        if self.exact:
            return ours == theirs
        return all(
            np.allclose(np.frombuffer(mine, np.float32), np.frombuffer(other, np.float32), atol=1e-4)
            for mine, other in zip(ours, theirs, strict=True)
        )


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(
    request: pytest.FixtureRequest, hf_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    options = TorchOptions(n_ctx=256, threads=1, cache_dir=tmp_path_factory.getbasetemp() / "drafts", compile=False)
    backend = TorchBackend.load(hf_model(request.param), options)
    sequence = backend.create()
    rows = [compute(backend, sequence, TEXT, piece=40)]
    rows += [compute(backend, sequence, [*TEXT, *NEXT][: count + 1], count) for count in range(75, 84)]
    exact = backend.info.numerics == "bitwise"
    assert exact == (request.param not in MIXTURES)
    yield Model(backend, sequence, np.stack(rows), exact)
    backend.close()


@pytest.mark.parametrize("piece", [2, 9])
def test_drafts_have_the_logits_and_the_kv_of_tokens_one_by_one(model: Model, piece: int) -> None:
    backend = model.backend
    sequence = backend.create()
    compute(backend, sequence, TEXT)
    found = []
    for first in range(0, 9, piece):
        part = NEXT[first : first + piece]
        result = backend.step([StepWork(sequence, part, 75 + first, True, drafts=len(part) - 1)])
        assert len(result.draft_logits) == (len(part) > 1)
        found.append(rows_of(result).copy())
    assert model.equal(np.concatenate(found), model.logits[1:])
    assert model.equal_kv(sequence, 84)
    backend.release(sequence)


@pytest.mark.parametrize("crowd", [0, 60])
def test_what_else_a_step_computes_does_not_matter(model: Model, crowd: int) -> None:
    """Sequences with one row, a prompt, and another one with drafts that are all wrong."""
    backend = model.backend
    room = backend.room()
    sequence, wrong, prompt = backend.create(), backend.create(), backend.create()
    compute(backend, sequence, TEXT)
    compute(backend, wrong, TEXT)
    singles = [backend.create() for _ in range(min(crowd, 4))]
    work = [StepWork(each, [7 + place], 0, True) for place, each in enumerate(singles)]
    work.append(StepWork(sequence, NEXT[:6], 75, True, drafts=5))
    work.append(StepWork(wrong, [NEXT[0], *WRONG[:4]], 75, True, drafts=4))
    if crowd:
        work.append(StepWork(prompt, prompt_of(crowd, 14, VOCAB), 0, False))
    result = backend.step(work)
    place = len(singles)
    assert model.equal(rows_of(result, place), model.logits[1:7])
    assert model.equal(rows_of(result, place + 1)[:1], model.logits[1:2])
    assert [len(rows) for rows in result.draft_logits] == [*[0] * place, 5, 4, *[0] * bool(crowd)]
    # The wrong ones are taken back, and the right ones follow.
    backend.truncate(wrong, 76)
    result = backend.step([StepWork(wrong, NEXT[1:5], 76, True, drafts=3)])
    assert model.equal(rows_of(result), model.logits[2:6])
    for each, tokens in ((sequence, 81), (wrong, 80)):
        assert model.equal_kv(each, tokens)
    for each in (sequence, wrong, prompt, *singles):
        backend.release(each)
    assert backend.room() == room


def test_a_prompt_may_end_in_drafts(model: Model) -> None:
    """As after a preemption: what is computed again and what is guessed go in one item."""
    sequence = model.backend.create()
    result = model.backend.step([StepWork(sequence, [*TEXT, *NEXT[:4]], 0, True, drafts=4)])
    assert model.equal(rows_of(result), model.logits[:5])
    model.backend.release(sequence)


def test_the_most_outputs_are_published_and_are_possible(model: Model) -> None:
    info = model.backend.info
    assert 16 <= info.max_outputs <= info.max_step_tokens
    sequence = model.backend.create()
    ids = prompt_of(info.max_outputs, 15, VOCAB)
    result = model.backend.step([StepWork(sequence, ids, 0, True, drafts=len(ids) - 1)])
    assert rows_of(result).shape == (info.max_outputs, VOCAB)
    model.backend.release(sequence)


# The contract


@pytest.fixture(scope="module")
def parts(hf_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Parts:
    return open_parts(hf_model("llama"), tmp_path_factory.mktemp("cache"))


DRAW = TokenDraw(**GREEDY_DRAW)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"drafts": 3}, "3 of the 3 tokens"),
        ({"drafts": -1}, "-1 of the 3"),
        ({"drafts": 4, "logits": False}, "4 of the 3"),
        ({"drafts": 1, "draws": (DRAW,)}, "1 drawn tokens after 1 drafts"),
        ({"draws": (DRAW, DRAW)}, "2 drawn tokens after 0"),
        ({"draws": (DRAW,), "logits": True}, "not for logits as well"),
    ],
)
@pytest.mark.parametrize("kind", [Runner, DeviceRunner])
def test_items_that_contradict_themselves_are_refused(
    parts: Parts, kind: Any, changes: dict[str, Any], match: str
) -> None:
    runner = parts.runner(kind)
    good, bad = runner.tables.create(None), runner.tables.create(None)
    item = StepWork(bad, [1, 2, 3], 0, not changes.get("draws"))
    with pytest.raises(BackendStepError, match=match):
        runner.step([StepWork(good, [4], 0, True), dataclasses.replace(item, **changes)])
    assert [runner.tables[each].num_tokens for each in (good, bad)] == [0, 0]
    assert runner.tables.free_blocks == runner.tables.num_blocks


def test_more_outputs_than_a_step_gives_are_refused(parts: Parts) -> None:
    runner = parts.runner(max_outputs=8)
    first, second = runner.tables.create(None), runner.tables.create(None)
    work = [StepWork(first, NEXT[:6], 0, True, drafts=5), StepWork(second, NEXT[:4], 0, True, drafts=2)]
    with pytest.raises(BackendStepError, match="after 8 tokens at most, not 9"):
        runner.step(work)
    assert runner.tables.free_blocks == runner.tables.num_blocks
    work[1] = StepWork(second, NEXT[:4], 0, True, drafts=1)
    assert [len(rows) for rows in runner.step(work).draft_logits] == [5, 1]
    assert parts.runner(rows=RowPlan(1, 64)).max_outputs == 64


def test_only_a_backend_that_can_draws(parts: Parts) -> None:
    runner = parts.runner()
    with pytest.raises(BackendStepError, match="only where draws_tokens says so"):
        runner.step([StepWork(runner.tables.create(None), [1], 0, False, (DRAW,))])


def test_drafts_of_a_piece_without_logits_are_only_computed(parts: Parts) -> None:
    runner = parts.runner()
    sequence = runner.tables.create(None)
    result = runner.step([StepWork(sequence, NEXT, 0, False, drafts=3)])
    assert (result.logits, [list(rows) for rows in result.draft_logits]) == ([None], [[]])
    assert runner.tables[sequence].num_tokens == 9


# Taking back


def test_truncating_into_a_shared_block_copies_it_before_anything_is_written(parts: Parts) -> None:
    runner = parts.runner()
    source = runner.tables.create(None)
    compute(runner, source, TEXT)
    fork = runner.tables.fork(source, 70)
    before = export_all(runner, fork, 70)
    for keep in (69, 66, 64, 33):  # within the shared partial block, at its start, and in a full one
        runner.truncate(source, keep)
        tokens = [*TEXT[:keep], *WRONG]
        ours = compute(runner, source, tokens, keep)
        assert export_all(runner, fork, 70) == before
        fresh = runner.tables.create(None)
        assert np.abs(compute(runner, fresh, tokens) - ours).max() < 1e-4
        for mine, theirs in zip(
            export_all(runner, source, len(tokens)), export_all(runner, fresh, len(tokens)), strict=True
        ):
            assert np.allclose(np.frombuffer(mine, np.float32), np.frombuffer(theirs, np.float32), atol=1e-5)
        runner.tables.release(fresh)
    # The fork is truncated, too, and goes its own way again.
    runner.truncate(fork, 40)
    ours = compute(runner, fork, TEXT, 40)
    fresh = runner.tables.create(None)
    assert np.abs(compute(runner, fresh, TEXT) - ours).max() < 1e-4
    for each in (source, fork, fresh):
        runner.tables.release(each)
    assert runner.tables.free_blocks == runner.tables.num_blocks


def test_truncated_tokens_are_gone_from_exports_and_room(parts: Parts) -> None:
    runner = parts.runner(num_blocks=6)
    sequence = runner.tables.create(None)
    compute(runner, sequence, TEXT)
    kept = export_all(runner, sequence, 50)
    runner.truncate(sequence, 50)
    assert [each.num_tokens for each in runner.export(sequence, 0, 9, None)] == [16, 16, 16, 2]
    assert runner.export(sequence, 4, 1, None) == []
    assert export_all(runner, sequence, 50) == kept
    assert (runner.tables.free_blocks, runner.tables.used_tokens()) == (2, 50)
    assert runner.tables.room(sequence, (), 0) == 46
    runner.truncate(sequence, 50)
    with pytest.raises(BackendError, match="holds 50 tokens, so it can't be taken back to 51"):
        runner.truncate(sequence, 51)
    with pytest.raises(BackendError, match="taken back to -1"):
        runner.truncate(sequence, -1)
    assert export_all(runner, sequence, 50) == kept
    runner.truncate(sequence, 0)
    assert runner.tables.free_blocks == 6
    compute(runner, sequence, TEXT)
    assert export_all(runner, sequence, 50) == kept


def test_truncating_restored_blocks(parts: Parts) -> None:
    """Blocks from the pool are cut as computed ones are, and what comes after them is right."""
    runner = parts.runner()
    source = runner.tables.create(None)
    compute(runner, source, TEXT)
    payloads = runner.export(source, 0, 5, 75)
    target = runner.tables.create(None)
    runner.restore(target, 0, payloads)
    runner.truncate(target, 60)
    result = runner.step([StepWork(target, TEXT[60:], 60, True, drafts=14)])
    runner.truncate(source, 60)
    wanted = compute(runner, source, TEXT, 60)
    assert np.abs(rows_of(result)[-1] - wanted).max() < 1e-4
    assert [each.data.tobytes() for each in runner.export(target, 0, 3, 48)] == [
        each.data.tobytes() for each in payloads[:3]
    ]


class _Waiting:
    """In place of a transfer's: notes who waits for restored blocks that are still on their way."""

    def __init__(self, transfer: Any) -> None:
        self._transfer, self.waits = transfer, 0

    def wait(self) -> None:
        self.waits += 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transfer, name)


def test_a_block_on_its_way_is_waited_for_before_it_is_copied(parts: Parts) -> None:
    """A restored block is truncated, shared, and copied by the next write: only once it has arrived."""
    runner = parts.runner()
    source = runner.tables.create(None)
    compute(runner, source, TEXT)
    payloads = runner.export(source, 0, 5, 75)
    runner.transfer = waiting = _Waiting(runner.transfer)
    target = runner.tables.create(None)
    runner.restore(target, 0, payloads)
    runner.truncate(target, 70)
    fork = runner.tables.fork(target, 70)
    assert waiting.waits == 0
    compute(runner, target, [*TEXT[:70], *WRONG], 70)
    assert waiting.waits == 1
    assert np.abs(compute(runner, fork, TEXT, 70) - compute(runner, runner.tables.create(None), TEXT)).max() < 1e-4


# Devices that draw


@pytest.fixture(params=["captured", "plain"])
def device(request: pytest.FixtureRequest, parts: Parts) -> DeviceRunner:
    runner: DeviceRunner = parts.runner(DeviceRunner, rows=RowPlan(1, 128))
    if request.param == "captured":
        runner.graphs = decode_graphs(
            parts.forward, runner.cache, runner.kernel, RowPlan(1, 128), max_rows=16, max_context=128, api=PlainReplay()
        )
    return runner


def _started(runner: DeviceRunner, lengths: Sequence[int]) -> list[SequenceId]:
    sequences = [runner.tables.create(None) for _ in lengths]
    for sequence, length in zip(sequences, lengths, strict=True):
        compute(runner, sequence, TEXT[:length])
    return sequences


def _expected(parts: Parts, tokens: Sequence[int], rows: int) -> Rows:
    """Logits of the last rows of a text."""
    runner = parts.runner()
    result = runner.step([StepWork(runner.tables.create(None), tokens, 0, True, drafts=rows - 1)])
    return rows_of(result).copy()


@pytest.mark.parametrize("prompt", [0, 11])
def test_drawn_tokens_and_logits_of_drafts(
    parts: Parts, device: DeviceRunner, prompt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Items that draw, with and without drafts, beside items whose logits are wanted; all in one pass."""
    first, second, third, fourth, fifth = _started(device, [20, 33, 48, 75, 5])
    warm = TokenDraw(0.9, 0, 1.0, 0.0, 0.37)
    work = [
        StepWork(first, NEXT[:4], 20, False, (DRAW,) * 4, drafts=3),
        StepWork(second, NEXT[:3], 33, True, drafts=2),
        StepWork(third, NEXT[:1], 48, False, (DRAW,)),
        StepWork(fourth, NEXT[:1], 75, True),
        StepWork(fifth, NEXT[:2], 5, False, (warm, warm), drafts=1),
    ]
    if prompt:
        work.append(StepWork(device.tables.create(None), TEXT[:prompt], 0, False))
    batches: list[DecodeBatch] = []
    if device.graphs is not None:
        run = device.graphs.run
        monkeypatch.setattr(device.graphs, "run", lambda batch: batches.append(batch) or run(batch))
    result = device.step(work)
    assert len(batches) == (device.graphs is not None and not prompt)
    if batches:
        assert batches[0].contexts.tolist() == [21, 22, 23, 24, 34, 35, 36, 49, 76, 6, 7]
    assert [len(tokens) for tokens in result.tokens[:5]] == [4, 0, 1, 0, 2]
    assert [len(rows) for rows in result.draft_logits[:5]] == [0, 2, 0, 0, 0]
    assert [row is None for row in result.logits[:5]] == [True, False, True, False, True]
    assert [result.logits[5], *result.tokens[5], *result.draft_logits[5]] == [None] if prompt else len(work) == 5
    wanted = _expected(parts, [*TEXT[:20], *NEXT[:4]], 4)
    assert list(result.tokens[0]) == wanted.argmax(-1).tolist()
    assert np.abs(rows_of(result, 1) - _expected(parts, [*TEXT[:33], *NEXT[:3]], 3)).max() < 1e-4
    assert list(result.tokens[2]) == _expected(parts, [*TEXT[:48], *NEXT[:1]], 1).argmax(-1).tolist()
    assert np.abs(rows_of(result, 3)[-1] - _expected(parts, [*TEXT, *NEXT[:1]], 1)[0]).max() < 1e-4
    for place in range(2):
        alone = device.tables.create(None)
        drawn = device.step([StepWork(alone, [*TEXT[:5], *NEXT[: place + 1]], 0, False, (warm,))]).tokens
        assert list(drawn[0]) == [result.tokens[4][place]]


def test_drafts_on_a_device_leave_the_kv_of_tokens_one_by_one(parts: Parts, device: DeviceRunner) -> None:
    """Through captured steps, whose rows are sequences of their own: over several steps, with what is taken back."""
    (sequence,) = _started(device, [60])
    device.step([StepWork(sequence, [TEXT[60], *WRONG[:5]], 60, False, (DRAW,) * 6, drafts=5)])
    device.truncate(sequence, 61)
    result = device.step([StepWork(sequence, TEXT[61:70], 61, True, drafts=8)])
    assert np.abs(rows_of(result) - _expected(parts, TEXT[:70], 9)).max() < 1e-4
    plain = parts.runner()
    fresh = plain.tables.create(None)
    compute(plain, fresh, TEXT[:70], piece=1)
    for mine, theirs in zip(export_all(device, sequence, 70), export_all(plain, fresh, 70), strict=True):
        assert np.allclose(np.frombuffer(mine, np.float32), np.frombuffer(theirs, np.float32), atol=1e-5)


def test_steps_too_large_for_a_graph_run_without(parts: Parts, device: DeviceRunner) -> None:
    """17 rows where graphs go up to 16."""
    (sequence,) = _started(device, [40])
    result = device.step([StepWork(sequence, TEXT[40:57], 40, True, drafts=16)])
    assert np.abs(rows_of(result) - _expected(parts, TEXT[:57], 17)).max() < 1e-4
