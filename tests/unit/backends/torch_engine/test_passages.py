"""KV moved between sequences of a runner: the right tokens to the right slots, nobody else's KV touched, all or nothing; and
the tokens that are computed again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kitelib.abc import StepWork
from kitelib.backends.torch_engine.device_runner import DeviceRunner
from kitelib.backends.torch_engine.packing import RowPlan
from kitelib.backends.torch_engine.passages import PassageKV
from kitelib.errors import BackendError, BackendStepError
from tests.support.answers import prompt_of
from tests.support.hf_folders import reference_model
from tests.support.torch_parts import Parts, compute, export_all, open_parts

VOCAB = 512
PREFIX, PASSAGE, QUESTION = prompt_of(37, 1, VOCAB), prompt_of(50, 2, VOCAB), prompt_of(9, 3, VOCAB)
START, END = len(PREFIX), len(PREFIX) + len(PASSAGE)


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
def parts(request: pytest.FixtureRequest, hf_model: Callable[..., Path], tmp_path_factory: Any) -> Parts:
    return open_parts(hf_model(request.param), tmp_path_factory.mktemp("cache"))


@pytest.fixture
def runner(parts: Parts) -> Any:
    return parts.runner(num_blocks=40)


def segments_of(runner: Any, sequence: Any, first: int, count: int) -> list[np.ndarray]:
    """K of every layer, then V: (tokens, heads, channels) each."""
    table, size = runner.tables[sequence], runner.tables.block_tokens
    places = np.arange(first, first + count)
    cache, at = runner.cache, (table.blocks[places // size], places % size)
    layers = range(len(cache.layers))
    return [pages(layer)[at].float().numpy() for pages in (cache.keys, cache.values) for layer in layers]


def append(passages: PassageKV, sequence: Any, source: Any, first: int, count: int) -> None:
    """Moves tokens of the passage to the end of a sequence, and computes nothing."""
    assert passages.splice(sequence, [0] * max(0, count), [(source, first, count, 0)], 0.0) == 0


def blend(passages: PassageKV, sequence: Any, share: float, first: int = START, passage: list[int] = PASSAGE) -> int:
    """Computes again what differs most of a passage that a sequence ends with."""
    with torch.inference_mode():
        return passages._compute(sequence, first, passage, np.zeros(len(passage), np.bool_), share)


def spliced(runner: Any) -> tuple[PassageKV, Any, Any]:
    """The passage alone, and its KV after the prefix."""
    passages, alone, sequence = PassageKV(runner, 2048), runner.tables.create(None), runner.tables.create(None)
    compute(runner, alone, PASSAGE)
    compute(runner, sequence, PREFIX)
    append(passages, sequence, alone, 0, len(PASSAGE))
    return passages, alone, sequence


def test_first_layer_is_what_is_computed_there(runner: Any) -> None:
    """Its KV depends on the token and the position only; in later layers what the tokens saw is missing."""
    _, alone, sequence = spliced(runner)
    fresh = runner.tables.create(None)
    compute(runner, fresh, [*PREFIX, *PASSAGE])
    ours, theirs = (segments_of(runner, each, START, len(PASSAGE)) for each in (sequence, fresh))
    layers = len(runner.cache.layers)
    for segment in (0, layers):
        assert np.abs(ours[segment] - theirs[segment]).max() < 1e-4
    assert np.abs(ours[layers + 1] - theirs[layers + 1]).max() > 0.1
    # Values stay as they are.
    before = segments_of(runner, alone, 0, len(PASSAGE))
    assert all(np.array_equal(ours[i], before[i]) for i in range(layers, 2 * layers))


def test_pieces_from_any_token_on_are_the_whole(runner: Any) -> None:
    passages, alone, whole = spliced(runner)
    pieces = runner.tables.create(None)
    compute(runner, pieces, PREFIX)
    for first, last in ((0, 1), (1, 17), (17, 18), (18, 50)):
        append(passages, pieces, alone, first, last - first)
    assert export_all(runner, pieces, END) == export_all(runner, whole, END)
    # Tokens that are computed first, as the head of a passage is: the rest goes to the same places.
    head = runner.tables.create(None)
    compute(runner, head, [*PREFIX, *PASSAGE[:16]])
    append(passages, head, alone, 16, len(PASSAGE) - 16)
    rest = [segments_of(runner, each, START + 16, len(PASSAGE) - 16) for each in (head, whole)]
    assert all(np.array_equal(*pair) for pair in zip(*rest, strict=True))


def test_source_and_those_who_share_blocks_keep_their_kv(runner: Any) -> None:
    passages, alone, _ = spliced(runner)
    held = runner.tables.create(None)
    compute(runner, held, [*PREFIX, *QUESTION])
    fork = runner.tables.fork(held, START)  # ends inside a block that `held` goes on in
    kv = export_all(runner, held, START + len(QUESTION)), export_all(runner, alone, len(PASSAGE))
    copies = runner.tables.copies
    append(passages, fork, alone, 0, len(PASSAGE))
    assert runner.tables.copies == copies + 1
    assert kv == (export_all(runner, held, START + len(QUESTION)), export_all(runner, alone, len(PASSAGE)))
    # The source may be freed at once.
    wanted = export_all(runner, fork, END)
    runner.tables.release(alone)
    compute(runner, runner.tables.create(None), prompt_of(60, 9, VOCAB))
    assert export_all(runner, fork, END) == wanted


def test_to_the_front(runner: Any) -> None:
    """A passage that was computed after a first token, moved to where nothing is before it."""
    passages, alone, target = PassageKV(runner, 2048), runner.tables.create(None), runner.tables.create(None)
    compute(runner, alone, [7, *PASSAGE])
    append(passages, target, alone, 1, len(PASSAGE))
    first = runner.tables.create(None)
    compute(runner, first, PASSAGE)
    ours, theirs = (segments_of(runner, each, 0, len(PASSAGE)) for each in (target, first))
    assert np.abs(ours[0] - theirs[0]).max() < 1e-4


@pytest.mark.parametrize(("first", "count"), [(0, 51), (50, 1), (0, 0), (-1, 5), (40, 11)])
def test_tokens_that_are_not_there_change_nothing(runner: Any, first: int, count: int) -> None:
    passages, alone, sequence = spliced(runner)
    before, free = export_all(runner, sequence, END), runner.tables.free_blocks
    with pytest.raises(BackendError, match="50 tokens"):
        append(passages, sequence, alone, first, count)
    assert (export_all(runner, sequence, END), runner.tables.free_blocks) == (before, free)


def test_no_room_changes_nothing(parts: Parts) -> None:
    runner = parts.runner(num_blocks=9)
    passages, alone, sequence = PassageKV(runner, 2048), runner.tables.create(None), runner.tables.create(None)
    compute(runner, alone, PASSAGE)
    compute(runner, sequence, [*PREFIX, *PREFIX])
    with pytest.raises(BackendError, match="free blocks"):
        append(passages, sequence, alone, 0, len(PASSAGE))
    assert runner.tables[sequence].num_tokens == 2 * START
    assert runner.tables.free_blocks == 0


def test_copy_that_fails_gives_the_room_back(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    passages, alone, sequence = spliced(runner)
    free = runner.tables.free_blocks

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(runner.transfer, "wait", fail)
    with pytest.raises(BackendError, match="out of memory"):
        append(passages, sequence, alone, 0, len(PASSAGE))
    assert (runner.tables[sequence].num_tokens, runner.tables.free_blocks) == (END, free)


# Computing the rest


@pytest.mark.parametrize("rows", [RowPlan(1, 256), RowPlan(1, 8), RowPlan(16, 16, 16)])
def test_what_is_not_moved_is_computed_in_its_place(parts: Parts, rows: RowPlan) -> None:
    """Heads and texts between, after everything moved is there: the same as computing and moving in turn."""
    runner = parts.runner(num_blocks=60, rows=rows)
    passages, other = PassageKV(runner, 2048), prompt_of(33, 8, VOCAB)
    alone, second, turns, once = (runner.tables.create(None) for _ in range(4))
    compute(runner, alone, PASSAGE, piece=8)
    compute(runner, second, other, piece=8)
    text = [*PREFIX, *PASSAGE, *QUESTION, *other]
    for sequence in (turns, once):
        compute(runner, sequence, PREFIX, piece=8)
    compute(runner, turns, text[: START + 5], START, piece=8)
    append(passages, turns, alone, 5, len(PASSAGE) - 5)
    middle = END + len(QUESTION)
    compute(runner, turns, text[: middle + 3], END, piece=8)
    append(passages, turns, second, 3, len(other) - 3)
    moves = [(alone, 5, len(PASSAGE) - 5, 5), (second, 3, len(other) - 3, middle + 3 - START)]
    assert passages.splice(once, text[START:], moves, 0.0) == 0
    ours, theirs = (segments_of(runner, each, 0, len(text)) for each in (once, turns))
    assert max(np.abs(a - b).max() for a, b in zip(ours, theirs, strict=True)) < 1e-4


def test_on_a_runner_whose_steps_run_beside_the_thread(parts: Parts) -> None:
    runner = parts.runner(DeviceRunner, num_blocks=40)
    _, _, sequence = spliced(runner)
    plain = spliced(parts.runner(num_blocks=40))
    ours, theirs = segments_of(runner, sequence, 0, END), segments_of(plain[0]._runner, plain[2], 0, END)
    assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_nothing_moved_is_a_plain_prefill(runner: Any) -> None:
    passages, sequence, fresh = PassageKV(runner, 2048), runner.tables.create(None), runner.tables.create(None)
    assert passages.splice(sequence, PASSAGE, [], 0.5) == 0
    compute(runner, fresh, PASSAGE)
    ours, theirs = (segments_of(runner, each, 0, len(PASSAGE)) for each in (sequence, fresh))
    assert max(np.abs(a - b).max() for a, b in zip(ours, theirs, strict=True)) < 1e-4


@pytest.mark.parametrize("rows", [RowPlan(1, 256), RowPlan(1, 16), RowPlan(16, 32, 16)])
def test_all_tokens_again_are_a_plain_prefill(parts: Parts, rows: RowPlan) -> None:
    runner = parts.runner(num_blocks=40, rows=rows)
    passages, alone, sequence, fresh = PassageKV(runner, 2048), *(runner.tables.create(None) for _ in range(3))
    compute(runner, alone, PASSAGE, piece=16)
    compute(runner, sequence, PREFIX, piece=16)
    append(passages, sequence, alone, 0, len(PASSAGE))
    assert blend(passages, sequence, 1.0) == len(PASSAGE)
    wanted = compute(runner, fresh, [*PREFIX, *PASSAGE, *QUESTION], piece=16)
    ours, theirs = (segments_of(runner, each, 0, END) for each in (sequence, fresh))
    assert max(np.abs(a - b).max() for a, b in zip(ours, theirs, strict=True)) < 1e-4
    found = compute(runner, sequence, [*PREFIX, *PASSAGE, *QUESTION], END, piece=16)
    assert np.abs(found - wanted).max() < 1e-3


def test_tokens_that_differ_most_are_computed_again_and_no_others(runner: Any) -> None:
    passages, _, sequence = spliced(runner)
    fresh = runner.tables.create(None)
    compute(runner, fresh, [*PREFIX, *PASSAGE])
    table, layers = runner.tables[sequence], len(runner.cache.layers)
    # As it should be everywhere, but for three tokens of the second layer.
    spoiled = [3, 20, 41]
    places, size = np.arange(START, END), runner.tables.block_tokens
    for pages in (*map(runner.cache.keys, range(layers)), *map(runner.cache.values, range(layers))):
        right = pages[runner.tables[fresh].blocks[places // size], places % size]
        pages[table.blocks[places // size], places % size] = right
    pages = runner.cache.values(1)
    for place in spoiled:
        pages[table.blocks[(START + place) // size], (START + place) % size] += 1.0
    before = segments_of(runner, sequence, 0, END)
    assert blend(passages, sequence, 3 / len(PASSAGE)) == 3
    after, right = segments_of(runner, sequence, 0, END), segments_of(runner, fresh, 0, END)
    assert max(np.abs(a - b).max() for a, b in zip(after, right, strict=True)) < 1e-4
    others = [place for place in range(END) if place - START not in spoiled]
    for segment in range(2 * layers):
        if segment not in (0, layers):  # measuring writes the first layer's KV, which is the same but for roundings
            assert np.array_equal(after[segment][others], before[segment][others])


def test_share_rounds_up_and_zero_does_nothing(runner: Any) -> None:
    passages, _, sequence = spliced(runner)
    before = export_all(runner, sequence, END)
    assert blend(passages, sequence, 0.0) == 0
    assert export_all(runner, sequence, END) == before
    assert blend(passages, sequence, 0.001) == 1
    assert runner.tables[sequence].num_tokens == END


def test_blending_brings_the_answer_nearer(parts: Parts) -> None:
    """Over several texts, the distance of the logits to those of a plain prefill falls with the share."""
    distances = {0.0: 0.0, 0.3: 0.0, 0.8: 0.0}
    for seed in range(4):
        passage, question = prompt_of(50, 40 + seed, VOCAB), prompt_of(9, 50 + seed, VOCAB)
        text = [*PREFIX, *passage, *question]
        for share in distances:
            runner = parts.runner(num_blocks=40)
            passages, alone, sequence, fresh = PassageKV(runner, 2048), *(runner.tables.create(None) for _ in range(3))
            compute(runner, alone, passage)
            compute(runner, sequence, PREFIX)
            append(passages, sequence, alone, 0, len(passage))
            blend(passages, sequence, share, passage=passage)
            found, wanted = compute(runner, sequence, text, END), compute(runner, fresh, text)
            distances[share] += float(np.abs(found - wanted).mean())
    assert distances[0.8] < distances[0.3] < distances[0.0]


def test_steps_of_others_keep_their_bits(runner: Any) -> None:
    """The self-check, appending and blending leave nothing behind in the runner."""
    text = [*PREFIX, *QUESTION]
    plain = runner.tables.create(None)
    wanted = compute(runner, plain, text), export_all(runner, plain, len(text))
    passages, _, sequence = spliced(runner)
    blend(passages, sequence, 0.2)
    again = runner.tables.create(None)
    assert np.array_equal(compute(runner, again, text), wanted[0])
    assert export_all(runner, again, len(text)) == wanted[1]
    assert export_all(runner, plain, len(text)) == wanted[1]


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_model_that_fails_changes_nothing(runner: Any, monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    passages, alone, sequence = spliced(runner)
    before, free = export_all(runner, sequence, END), runner.tables.free_blocks

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(runner, "run", fail)
    with pytest.raises(BackendStepError, match="no memory"):
        passages.splice(sequence, [*PASSAGE, 5], [(alone, 0, len(PASSAGE), 0)], share)
    monkeypatch.undo()
    assert (export_all(runner, sequence, END), runner.tables.free_blocks) == (before, free)
    runner.step([StepWork(sequence, QUESTION, END, True)])


def test_adapter_is_applied_while_blending(hf_model: Callable[..., Path], tmp_path: Path) -> None:
    from kitelib.backends.torch_engine.lora import AdapterSet
    from kitelib.config import AdapterConfig
    from tests.support.peft_folders import write_adapter

    folder = hf_model("llama")
    parts = open_parts(folder, tmp_path / "cache")
    write_adapter(tmp_path / "tone", reference_model(folder), seed=4)
    adapters = AdapterSet(
        parts.forward.model, {"tone": AdapterConfig(str(tmp_path / "tone"))}, torch.float32, torch.device("cpu"), None
    )
    runner = parts.runner(num_blocks=40, adapters=adapters)
    passages, alone, sequence, fresh = PassageKV(runner, 2048), *(runner.tables.create("tone") for _ in range(3))
    compute(runner, alone, PASSAGE)
    compute(runner, sequence, PREFIX)
    append(passages, sequence, alone, 0, len(PASSAGE))
    blend(passages, sequence, 1.0)
    compute(runner, fresh, [*PREFIX, *PASSAGE])
    ours, theirs = (segments_of(runner, each, 0, END) for each in (sequence, fresh))
    assert max(np.abs(a - b).max() for a, b in zip(ours, theirs, strict=True)) < 1e-4
    adapters.close()
