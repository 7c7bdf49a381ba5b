"""Restored, forked, moved and differently cut sequences hold the same bytes of KV and give the same logits."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kitelib.abc import BlockPayload, SequenceId, StepWork
from tests.support.answers import prompt_of
from tests.support.backends import BackendKit

LENGTHS = (1, 15, 16, 17, 31, 32, 33, 512, 1000)
SHORT = LENGTHS[:-2]
PROMPT = prompt_of(LENGTHS[-1], seed=0)
OTHER = prompt_of(LENGTHS[-1], seed=1)
BLOCK = 16


@dataclasses.dataclass(frozen=True)
class Fresh:
    """A prompt computed alone in an empty context."""

    blocks: list[BlockPayload]
    logits: npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def options(kite_cache: Path) -> dict[str, Any]:
    return {"n_ctx": 1024, "kv_tokens": 2560, "cache_dir": kite_cache}


@pytest.fixture(scope="module")
def backend(kit: BackendKit, options: dict[str, Any]) -> Iterator[Any]:
    backend = kit.load(kit.real(), **options)
    assert (backend.info.numerics, backend.info.block_tokens) == ("bitwise", BLOCK)
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def fresh(kit: BackendKit, options: dict[str, Any]) -> dict[int, Fresh]:
    """The reference for each length, from a backend that does nothing else."""
    backend = kit.load(kit.real(), **options)
    try:
        found = {}
        for length in LENGTHS:
            assert backend.used_tokens() == 0
            sequence = backend.create()
            logits = extend(backend, sequence, PROMPT[:length])
            found[length] = Fresh(export(backend, sequence, length), logits)
            backend.release(sequence)
        return found
    finally:
        backend.close()


def extend(backend: Any, sequence: SequenceId, tokens: Sequence[int], start: int = 0) -> npt.NDArray[np.float32]:
    """Computes `tokens[start:]` in the largest steps; the logits after the last one."""
    logits = None
    while start < len(tokens):
        piece = tokens[start : start + backend.info.max_step_tokens]
        last = start + len(piece) == len(tokens)
        logits = backend.step([StepWork(sequence, piece, start, last)]).logits[0]
        start += len(piece)
    assert logits is not None
    return logits.copy()


def export(backend: Any, sequence: SequenceId, length: int) -> list[BlockPayload]:
    payloads = backend.export_blocks(sequence, 0, -(-length // BLOCK), length)
    assert sum(payload.num_tokens for payload in payloads) == length
    return payloads


def check(backend: Any, sequence: SequenceId, logits: npt.NDArray[np.float32], fresh: Fresh) -> None:
    assert np.array_equal(logits.view(np.uint32), fresh.logits.view(np.uint32))
    length = sum(payload.num_tokens for payload in fresh.blocks)
    for index, (ours, theirs) in enumerate(zip(export(backend, sequence, length), fresh.blocks, strict=True)):
        assert ours.data.tobytes() == theirs.data.tobytes(), f"block {index} of {length} tokens differs"


def test_references_are_not_trivially_equal(fresh: dict[int, Fresh]) -> None:
    logits = [each.logits for each in fresh.values()]
    assert all(np.isfinite(each).all() and each.std() > 0 for each in logits)
    assert len({each.tobytes() for each in logits}) == len(LENGTHS)
    blocks = fresh[1000].blocks
    assert len({block.data.tobytes() for block in blocks}) == len(blocks) == 63


@pytest.mark.parametrize("length", LENGTHS)
def test_restored_blocks_give_the_same_bits(backend: Any, fresh: dict[int, Fresh], length: int) -> None:
    """All full blocks before the last token come from another length's sequence, as they would from a pool."""
    blocks = fresh[1000].blocks[: (length - 1) // BLOCK]
    sequence = backend.create()
    backend.restore_blocks(sequence, 0, blocks)
    check(backend, sequence, extend(backend, sequence, PROMPT[:length], len(blocks) * BLOCK), fresh[length])
    backend.release(sequence)


@pytest.mark.parametrize("length", [length for length in LENGTHS if length > 1])
def test_a_restored_tail_gives_the_same_bits(backend: Any, fresh: dict[int, Fresh], length: int) -> None:
    """All but the last token is restored, the last piece inside a block; in two calls, as after a partial hit."""
    source = backend.create()
    backend.restore_blocks(source, 0, fresh[length].blocks)
    payloads = backend.export_blocks(source, 0, len(fresh[length].blocks), length - 1)
    backend.release(source)
    middle = len(payloads) // 2
    sequence = backend.create()
    backend.restore_blocks(sequence, 0, payloads[:middle])
    backend.restore_blocks(sequence, middle, payloads[middle:])
    check(backend, sequence, extend(backend, sequence, PROMPT[:length], length - 1), fresh[length])
    backend.release(sequence)


@pytest.mark.parametrize("length", LENGTHS)
def test_forks_give_the_same_bits(backend: Any, fresh: dict[int, Fresh], length: int) -> None:
    """Forks at several places, while the source and the forks of it go other ways."""
    source = backend.create()
    backend.restore_blocks(source, 0, fresh[length].blocks)
    extend(backend, source, PROMPT[:length] + OTHER[:3], length)
    for count in sorted({0, 1, length // 2, length - 17, length - 1} & set(range(length))):
        if length - count > 40 and length not in SHORT:
            continue  # long recomputations prove nothing that short ones don't
        fork = backend.fork(source, count)
        astray = backend.fork(source, count)
        extend(backend, astray, PROMPT[:count] + OTHER[:2], count)
        check(backend, fork, extend(backend, fork, PROMPT[:length], count), fresh[length])
        backend.release(astray)
        backend.release(fork)
    backend.release(source)
    assert backend.used_tokens() == 0


def test_any_cut_in_any_company_gives_the_same_bits(backend: Any, fresh: dict[int, Fresh]) -> None:
    """B14: the shape of the batch moves no bit. One pass over the longest prompt in pieces of random sizes, beside other sequences that come and go."""
    rng = random.Random(5)
    sequence, neighbour = backend.create(), backend.create()
    held = 0
    start = 0
    for stop in LENGTHS:
        logits = None
        while start < stop:
            # Small pieces cost most of the time; the long part gets few of them.
            sizes = (1, 2, 3, 7, 15, 16, 17, 31, 40, 48) if start < 200 else (29, 40, 47, 50)
            size = min(stop - start, rng.choice(sizes))
            beside = OTHER[held : held + rng.randrange(0, 12)]
            work = [StepWork(sequence, PROMPT[start : start + size], start, start + size == stop)]
            if beside:
                work.insert(rng.randrange(2), StepWork(neighbour, beside, held, rng.random() < 0.5))
            result = backend.step(work)
            logits = result.logits[[each.sequence for each in work].index(sequence)]
            start += size
            held += len(beside)
            if held > 100:
                backend.release(neighbour)
                neighbour, held = backend.create(), 0
        assert logits is not None
        check(backend, sequence, logits, fresh[stop])
    backend.release(neighbour)
    backend.release(sequence)


def test_moving_sequences_keeps_their_bits(kit: BackendKit, backend: Any, fresh: dict[int, Fresh]) -> None:
    """Holes are made below shared and unshared sequences until the context of llama.cpp has to compact; blocks of the
    torch backend scatter."""
    before = backend._context.compactions if kit.name == "llama_cpp" else 0
    kept: list[tuple[SequenceId, int]] = []
    rng = random.Random(9)
    for turn in range(24):
        length = rng.choice(LENGTHS)
        count = (length - 1) // BLOCK * BLOCK
        hole = backend.create()
        backend.restore_blocks(hole, 0, fresh[512].blocks[: rng.randrange(1, 20)])
        if kept and turn % 3 == 0 and kept[0][1] >= count:
            sequence = backend.fork(kept[0][0], count)
        else:
            sequence = backend.create()
            backend.restore_blocks(sequence, 0, fresh[1000].blocks[: count // BLOCK])
        extend(backend, sequence, PROMPT[:length], count)
        kept.append((sequence, length))
        backend.release(hole)
        while len(kept) > 3 or (kept and backend.room() < 1400):
            backend.release(kept.pop(rng.randrange(len(kept)))[0])
    if kit.name == "llama_cpp":
        backend._context.compact()
        assert backend._context.compactions > before
    for sequence, length in kept:
        for ours, theirs in zip(export(backend, sequence, length), fresh[length].blocks, strict=True):
            assert ours.data.tobytes() == theirs.data.tobytes()
        if length > 1:
            fork = backend.fork(sequence, length - 1)
            check(backend, fork, extend(backend, fork, PROMPT[:length], length - 1), fresh[length])
            backend.release(fork)
        backend.release(sequence)
    assert backend.used_tokens() == 0
