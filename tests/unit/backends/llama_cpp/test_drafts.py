"""Drafts in the cache of llama.cpp: whatever is guessed, taken back, moved, shared or restored, a sequence has the
logits and blocks of one that was decoded one token at a time, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kitelib.abc import SequenceId, StepWork
from kitelib.backends.llama_cpp import context as context_module
from kitelib.backends.llama_cpp.backend import LlamaCppBackend, LlamaCppOptions
from kitelib.errors import BackendError, BackendStepError

# Tokens that all texts begin with: the window of Gemma is 512, that of the small model with one is 64.
SHARED = {"smollm2_path": 5, "gemma_path": 505, "llama": 40, "gemma3": 58}


def load(path: Path, cache_dir: Path, **changes: Any) -> LlamaCppBackend:
    values = {"n_ctx": 768, "kv_tokens": 1536, "threads": 1, "max_sequences": 16, "block_tokens": 8}
    return LlamaCppBackend.load(path, LlamaCppOptions(**{**values, "cache_dir": cache_dir, **changes}))


class Text:
    """Fixed tokens, and the logits after each of the last ones, decoded one by one."""

    def __init__(self, backend: LlamaCppBackend, shared: int, own: int, seed: int, source: SequenceId | None) -> None:
        self.backend, self.first, self.source = backend, shared, source
        self.tokens = [*tokens(backend, shared, 0), *tokens(backend, own, seed)]
        self.logits = {}
        sequence = self.open()
        for position in range(shared, len(self.tokens)):
            (found,) = backend.step([StepWork(sequence, [self.tokens[position]], position, True)]).logits
            assert found is not None
            self.logits[position] = found.tobytes()
        self.blocks = self.export(sequence, len(self.tokens))
        backend.release(sequence)

    def open(self) -> SequenceId:
        """A sequence that holds what all texts begin with."""
        if self.source is not None:
            return self.backend.fork(self.source, self.first)
        sequence = self.backend.create()
        self.feed(sequence, 0, self.first)
        return sequence

    def feed(self, sequence: SequenceId, start: int, stop: int) -> None:
        """Computes positions start..stop in steps as large as allowed."""
        size = self.backend.info.max_step_tokens
        for first in range(start, stop, size):
            piece = self.tokens[first : min(first + size, stop)]
            self.backend.step([StepWork(sequence, piece, first, False)])

    def export(self, sequence: SequenceId, stop: int) -> list[bytes]:
        """Full blocks of the first tokens."""
        count = stop // self.backend.info.block_tokens
        return [payload.data.tobytes() for payload in self.backend.export_blocks(sequence, 0, count)]


def tokens(backend: LlamaCppBackend, count: int, seed: int) -> list[int]:
    vocab = backend.info.vocab_size
    return [int(token) for token in np.random.default_rng(seed).integers(vocab // 16, vocab // 2, count)]


class Reader:
    """A sequence that gets a text by drafts, some of them wrong, and compares all it is given."""

    def __init__(self, text: Text, sequence: SequenceId, held: int) -> None:
        self.text, self.sequence, self.held = text, sequence, held

    @property
    def left(self) -> int:
        """Tokens that it has not got yet."""
        return len(self.text.tokens) - self.held

    def ask(self, drafts: int, right: int) -> StepWork:
        """The next token and drafts, of which the first `right` are those of the text."""
        own = self.text.tokens
        drafts = max(0, min(drafts, self.left - 1))
        self.right = min(drafts, right)
        stop = self.held + 1 + self.right
        # Wrong ones: other tokens of the text, so never the one that belongs here.
        wrong = [token for token in own[: drafts + 8] if token != own[min(stop, len(own) - 1)]][: drafts - self.right]
        return StepWork(self.sequence, [*own[self.held : stop], *wrong], self.held, True, drafts=drafts)

    def take(self, item: StepWork, rows: Sequence[Any], last: Any) -> None:
        """Compares what holds, and takes the rest back."""
        assert len(rows) == item.drafts
        for i, row in enumerate([*rows, last][: self.right + 1]):
            assert row.tobytes() == self.text.logits[self.held + i], (self.held, i)
        self.held += self.right + 1
        if self.right < item.drafts:
            self.text.backend.truncate(self.sequence, self.held)


def advance(backend: LlamaCppBackend, readers: Sequence[Reader], asks: Sequence[tuple[int, int]]) -> None:
    work = [reader.ask(*ask) for reader, ask in zip(readers, asks, strict=True)]
    result = backend.step(work)
    for i, (reader, item) in enumerate(zip(readers, work, strict=True)):
        reader.take(item, result.draft_logits[i] if result.draft_logits else (), result.logits[i])


def finish(backend: LlamaCppBackend, readers: Sequence[Reader]) -> None:
    """The rest of each text at once, and its blocks."""
    for reader in readers:
        while reader.left:
            advance(backend, [reader], [(9, 9)])
        assert reader.text.export(reader.sequence, len(reader.text.tokens)) == reader.text.blocks
        backend.release(reader.sequence)
    left = 0 if readers[0].text.source is None else readers[0].text.first
    assert backend.used_tokens() == left
    assert backend._context._cells.next_cell == left


@pytest.fixture(scope="module", params=list(SHARED))
def texts(
    request: pytest.FixtureRequest, tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Text]]:
    real = request.param.endswith("path")
    path = request.getfixturevalue(request.param) if real else tiny_model(request.param)
    first = SHARED[request.param]
    # A text that comes back from blocks shares nothing: each may come to hold a copy of what all begin with.
    backend = load(path, tmp_path_factory.mktemp("cache"), kv_tokens=max(1536, 4 * first + 256))
    assert backend.info.numerics == "bitwise"
    source = Text(backend, first, 0, 1, None).open()
    yield [Text(backend, first, 26 if real else 60, seed, source) for seed in range(1, 4 if real else 7)]
    backend.close()


def open_readers(texts: list[Text]) -> list[Reader]:
    return [Reader(text, text.open(), text.first) for text in texts]


def assert_room_is_all_that_nobody_holds(backend: LlamaCppBackend) -> None:
    """Tails, graves and released sequences take no room from those that live."""
    context = backend._context
    held = {cell for record in context._sequences.values() for cell in record.cells}
    reserve = max(context.options.min_rows, context.options.row_multiple)
    assert backend.used_tokens() == len(held)
    assert backend.room() == backend.info.capacity_tokens - len(held) - reserve


@pytest.mark.parametrize("seed", range(2))
def test_any_guesses_of_several_sequences_change_nothing(texts: list[Text], seed: int) -> None:
    backend, rng = texts[0].backend, np.random.default_rng(seed)
    readers = open_readers(texts)
    turn = 0
    while any(reader.left for reader in readers):
        turn += 1
        active = [reader for reader in readers if reader.left and rng.random() < 0.8]
        if active:
            room = backend.info.max_step_tokens // len(active) - 1
            asks = [(int(rng.integers(0, min(7, room + 1))), int(rng.integers(0, 4))) for _ in active]
            advance(backend, active, asks)
        if turn % 5 == 2:
            backend._context.compact()
        if turn % 5 == 4:  # one of them goes on as a fork, another one from its blocks
            forked, restored = readers[turn % len(readers)], readers[(turn + 1) % len(readers)]
            fork = backend.fork(forked.sequence, forked.held)
            backend.release(forked.sequence)
            forked.sequence = fork
            held = restored.held // backend.info.block_tokens * backend.info.block_tokens
            payloads = backend.export_blocks(restored.sequence, 0, held // backend.info.block_tokens)
            backend.release(restored.sequence)
            assert_room_is_all_that_nobody_holds(backend)
            restored.sequence = backend.create()
            backend.restore_blocks(restored.sequence, 0, payloads)
            restored.text.feed(restored.sequence, held, restored.held)
    finish(backend, readers)


def test_holes_that_nobody_may_fill_stay_occupied(texts: list[Text]) -> None:
    backend = texts[0].backend
    readers = first, second, third = open_readers(texts[:3])
    advance(backend, [first, second], [(5, 0), (5, 4)])
    advance(backend, [second], [(0, 0)])  # all its cells lie above the holes that the first has left
    graves = dict(backend._context._cells.graveyard)
    assert len(graves) == 4
    assert backend._context.wasted_tokens == 4
    advance(backend, [third, second, first], [(3, 0), (3, 1), (3, 2)])
    backend.release(third.sequence)
    assert backend._context._cells.graveyard == graves
    backend._context.compact()
    assert (backend._context._cells.graveyard, backend._context.wasted_tokens) == ({}, 0)
    finish(backend, readers[:2])


def test_drafts_beside_a_prompt_and_a_lone_token(texts: list[Text]) -> None:
    backend = texts[0].backend
    guessing, lone, prompt = open_readers(texts[:3])
    work = [prompt.ask(0, 0), guessing.ask(5, 2), lone.ask(0, 0)]
    piece = texts[2].tokens[prompt.held : prompt.held + 20]
    work[0] = StepWork(prompt.sequence, piece, prompt.held, False)
    result = backend.step(work)
    assert result.logits[0] is None
    assert [len(rows) for rows in result.draft_logits] == [0, 5, 0]
    prompt.held += len(piece)
    guessing.take(work[1], result.draft_logits[1], result.logits[1])
    lone.take(work[2], (), result.logits[2])
    finish(backend, [guessing, lone, prompt])


def test_blocks_can_be_restored_where_drafts_were_taken_back(texts: list[Text]) -> None:
    backend, text = texts[0].backend, texts[0]
    size = backend.info.block_tokens
    held = (text.first // size + 1) * size
    sequence, other = text.open(), backend.create()
    text.feed(sequence, text.first, held)
    payloads = backend.export_blocks(sequence, 0, held // size)
    texts[1].feed(other, 0, 3)
    backend.step(
        [
            StepWork(sequence, text.tokens[:4], held, True, drafts=3),
            StepWork(other, texts[1].tokens[3:7], 3, True, drafts=3),
        ]
    )
    backend.truncate(sequence, held - size)  # further than a draft goes, to where a block ends
    backend.restore_blocks(sequence, held // size - 1, payloads[-1:])
    backend.release(other)
    finish(backend, [Reader(text, sequence, held)])


def test_a_step_that_fails_leaves_no_hole(texts: list[Text]) -> None:
    backend = texts[0].backend
    readers = open_readers(texts[:2])
    advance(backend, readers, [(4, 0), (4, 3)])
    tails = [len(backend._context._sequences[reader.sequence].tail) for reader in readers]
    assert tails == [4, 1]
    vocab = backend.info.vocab_size
    with pytest.raises(BackendStepError, match="status"):
        backend.step([StepWork(readers[0].sequence, [vocab] * 3, readers[0].held, True, drafts=2)])
    advance(backend, readers, [(2, 1), (2, 0)])
    finish(backend, readers)


@pytest.fixture(scope="module")
def crowd(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Text]]:
    backend = load(tiny_model("llama"), tmp_path_factory.mktemp("cache"))
    yield [Text(backend, 4 + seed, 70, seed, None) for seed in range(16)]
    backend.close()


def test_rejections_of_many_sequences_waste_hardly_any_memory(crowd: list[Text]) -> None:
    backend, rng = crowd[0].backend, np.random.default_rng(5)
    readers = open_readers(crowd)
    compactions, wasted, rejected = backend._context.compactions, [], 0
    while max(reader.left for reader in readers) > 12:
        active = [reader for reader in readers if reader.left > 12 and rng.random() < 0.9]
        asks = [(int(rng.integers(0, 4)), int(rng.integers(0, 3))) for _ in active]
        advance(backend, active, asks)
        rejected += sum(max(0, drafts - right) for drafts, right in asks)
        wasted.append(backend._context.wasted_tokens)
    assert rejected > 300
    assert max(wasted) < 0.05 * backend.used_tokens()
    assert backend._context.compactions == compactions
    finish(backend, readers)


def test_memory_of_drafts_comes_back_when_it_runs_short(crowd: list[Text]) -> None:
    """Tails and graves give way to live tokens: all the room that is told can be used."""
    backend, text = crowd[0].backend, crowd[0]
    first, second = (Reader(text, text.open(), text.first) for _ in range(2))
    filler = [crowd[1].tokens[0]] * 40
    for turn in range(12):
        advance(backend, [first, second], [(6, turn % 2), (6, 1 - turn % 2)])
        big = backend.create()
        while (room := min(backend.room(), 40)) > 0:
            backend.step([StepWork(big, filler[:room], backend._context.num_tokens(big), False)])
        assert backend.room() == 0
        backend.release(big)
    finish(backend, [first, second])


def test_what_breaks_the_contract_is_refused(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_model("llama")
    monkeypatch.setattr(context_module, "_OUTPUT_BYTES", 9 * 4 * 2048)
    backend = load(path, tmp_path, max_sequences=2)
    try:
        assert backend.info.max_outputs == 9
        sequence = backend.create()
        ids = tokens(backend, 30, 1)
        for drafts, message in ((3, "first can't be one"), (-1, "first can't be one"), (4, "first can't be one")):
            with pytest.raises(BackendStepError, match=message):
                backend.step([StepWork(sequence, ids[:3], 0, True, drafts=drafts)])
        with pytest.raises(BackendStepError, match="after 10 tokens; at most 9"):
            backend.step([StepWork(sequence, ids, 0, True, drafts=9)])
        rows = backend.step([StepWork(sequence, ids, 0, True, drafts=8)]).draft_logits[0]
        assert len(rows) == 8
        for count in (-1, 31):
            with pytest.raises(BackendError, match="holds 30 tokens"):
                backend.truncate(sequence, count)
    finally:
        backend.close()


@pytest.mark.parametrize("architecture", ["mamba", "lfm2"])
def test_a_state_that_can_not_be_taken_back_takes_no_drafts(
    tiny_model: Callable[..., Path], tmp_path: Path, architecture: str
) -> None:
    backend = load(tiny_model(architecture), tmp_path, max_sequences=2)
    try:
        assert backend.info.max_outputs == 0
        sequence = backend.create()
        with pytest.raises(BackendStepError, match="can't be taken back"):
            backend.step([StepWork(sequence, [5, 6], 0, True, drafts=1)])
        backend.step([StepWork(sequence, [5, 6], 0, True)])
        with pytest.raises(BackendError, match="can't be taken back"):
            backend.truncate(sequence, 1)
    finally:
        backend.close()
