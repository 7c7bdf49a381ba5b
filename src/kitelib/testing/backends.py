"""`check_backend` proves that a backend keeps the contract of `kitelib.abc.Backend`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from kitelib.abc import Backend, BlockPayload, StepWork
from kitelib.errors import BackendError, FormatError
from kitelib.testing.bench import Bench
from kitelib.testing.drafts import DRAFT_PROMISES, drafts_are_refused

__all__ = ["check_backend"]


def check_backend(make_backend: Callable[[], Backend]) -> None:
    """Checks that a backend keeps the contract of `kitelib.abc.Backend`. Computes a few hundred tokens.

    Args:
        make_backend: gives a loaded backend with nothing in its memory, room for 16 blocks in all and for 8 in one
            sequence, and at least 4 sequences. Called once; the backend is closed.

    Raises:
        AssertionError: a promise is broken; the message says which one.
    """
    backend = make_backend()
    try:
        bench = Bench(backend)
        bench.require(isinstance(backend, Backend), "the backend must have all methods of kitelib.abc.Backend")
        promises: tuple[Callable[[Bench], None], ...] = (
            _info_is_consistent,
            _logits_come_where_asked,
            _pieces_and_company_do_not_matter,
            _sequences_do_not_mix,
            _room_and_sequences_come_back,
            _bad_steps_change_nothing,
        )
        if backend.info.reuse_blocks:
            promises += (
                _forks_share_and_part,
                _sources_may_go_first,
                _blocks_come_out_in_full,
                _restored_equals_computed,
                _bad_restores_change_nothing,
            )
        else:
            promises += (_without_blocks_nothing_comes_out,)
        promises += DRAFT_PROMISES if backend.info.max_outputs else (drafts_are_refused,)
        for promise in promises:
            room, sequences = backend.room(), backend.free_sequences()
            promise(bench)
            bench.require(
                (backend.room(), backend.free_sequences()) == (room, sequences),
                f"all room must come back when every sequence is released ({promise.__name__.strip('_')})",
            )
    finally:
        backend.close()
        backend.close()  # a second time must be fine


def _info_is_consistent(bench: Bench) -> None:
    info = bench.backend.info
    bench.require(len(info.model_state) == 32, "info.model_state must be a digest of 32 bytes")
    bench.require(info.capacity_tokens >= info.context_tokens >= 8 * info.block_tokens, "a sequence must hold 8 blocks")
    bench.require(0 <= info.max_outputs <= info.max_step_tokens, "max_outputs can't be more than max_step_tokens")
    bench.require(info.max_step_tokens >= 1 and info.max_sequences >= 4, "four sequences must fit at once")
    bench.require(bench.backend.room() <= info.capacity_tokens, "room() can't be more than info.capacity_tokens")
    bench.require(bench.backend.room() >= 16 * info.block_tokens, "an empty memory must have room for 16 blocks")
    ids = bench.backend.tokenize("reuse equals fresh", add_special=False)
    bench.require(all(0 <= token < info.vocab_size for token in ids), "token ids must lie in the vocabulary")
    bench.require(b"equals" in bench.backend.detokenize(ids), "detokenize must give the text of the tokens back")


def _logits_come_where_asked(bench: Bench) -> None:
    with bench.sequence() as first, bench.sequence() as second:
        work = [StepWork(first, bench.prompt[:3], 0, False), StepWork(second, bench.other[:2], 0, True)]
        logits = bench.backend.step(work).logits
        bench.require(len(logits) == 2 and logits[0] is None, "logits that nobody asked for must be None")
        found = logits[1]
        if found is None:
            raise AssertionError("logits must be there where they are asked for")
        bench.require(
            found.dtype == np.float32 and found.shape == (bench.backend.info.vocab_size,),
            "logits must be float32 of shape (vocab_size,)",
        )
        bench.require(bool(np.isfinite(found).all()) and float(np.ptp(found)) > 0, "logits must be finite and differ")


def _pieces_and_company_do_not_matter(bench: Bench) -> None:
    expected = bench.fresh(bench.prompt)
    promise = "logits must not depend on how a prompt is cut into steps"
    for piece in (bench.block, bench.block // 2 + 1):
        with bench.sequence() as sequence:
            bench.require(bench.same(bench.extend(sequence, bench.prompt, 0, piece), expected), promise)
    count = len(bench.prompt)
    with bench.sequence(bench.prompt[:-1]) as sequence, bench.sequence(bench.other[:-1]) as neighbour:
        work = [
            StepWork(neighbour, bench.other[-1:], count - 1, True),
            StepWork(sequence, bench.prompt[-1:], count - 1, True),
        ]
        theirs, ours = bench.backend.step(work).logits
        if ours is None or theirs is None:
            raise AssertionError("every work item that asks for logits must get its own")
        bench.require(bench.same(ours, expected), "logits must not depend on what else is in the step")
        bench.require(not bench.same(ours, theirs), "work items must get their own logits, in order")


def _sequences_do_not_mix(bench: Bench) -> None:
    expected = bench.fresh(bench.prompt)
    with bench.sequence(bench.other) as neighbour, bench.sequence(bench.prompt[:-1]) as sequence:
        found = bench.extend(sequence, bench.prompt, len(bench.prompt) - 1)
        bench.require(bench.same(found, expected), "a sequence must see its own tokens only")
        bench.require(neighbour != sequence, "live sequences must have different ids")
    # Near the end, since a recurrent model may forget what was long ago.
    changed = [*bench.prompt[:-2], bench.other[0], bench.prompt[-1]]
    bench.require(not bench.same(bench.fresh(changed), expected), "logits must depend on the tokens before the last")


def _room_and_sequences_come_back(bench: Bench) -> None:
    backend = bench.backend
    room, free = backend.room(), backend.free_sequences()
    for _ in range(3):
        for count in (len(bench.prompt), 1):
            with bench.sequence(bench.prompt[:count]), bench.sequence(bench.other[:count]):
                bench.require(
                    room - backend.room() >= 2 * count, "room() must fall by at least the tokens that are held"
                )
                bench.require(free - backend.free_sequences() >= 2, "free_sequences() must fall by the sequences made")
    sequences = [backend.create() for _ in range(min(4, free))]
    bench.require(len(set(sequences)) == len(sequences), "live sequences must have different ids")
    for sequence in sequences:
        backend.release(sequence)


def _bad_steps_change_nothing(bench: Bench) -> None:
    backend, info = bench.backend, bench.backend.info
    half = len(bench.prompt) // 2
    with bench.sequence(bench.prompt[:half]) as sequence:
        room = backend.room(), backend.room(sequence)
        for start in (half - 1, half + 1, 0):
            bench.require(
                bench.step_fails(sequence, bench.prompt[:2], start),
                "a step that does not start where its sequence ends must raise BackendStepError",
            )
        too_many = [bench.prompt[0]] * (info.max_step_tokens + 1)
        bench.require(
            bench.step_fails(sequence, too_many, half), "more than max_step_tokens tokens must raise BackendStepError"
        )
        bench.require(
            bench.step_fails(sequence, [info.vocab_size], half), "an unknown token id must raise BackendStepError"
        )
        after = backend.room(), backend.room(sequence)
        bench.require(after == room, "a step that failed must not take room")
        found = bench.extend(sequence, bench.prompt, half)
        bench.require(bench.same(found, bench.fresh(bench.prompt)), "a step that failed must have processed nothing")


def _forks_share_and_part(bench: Bench) -> None:
    backend, total = bench.backend, len(bench.prompt)
    expected = bench.fresh(bench.prompt)
    with bench.sequence(bench.prompt) as source:
        bench.require(not backend.shareable(source, total + 1), "more tokens than there are can't be shareable")
        bench.require(
            bench.fails(BackendError, lambda: backend.fork(source, total + 1)),
            "fork of more tokens than there are must raise BackendError",
        )
        for count in (1, bench.block, bench.block + 1, total - 1):
            bench.require(backend.shareable(source, count), "a short sequence must be shareable at every length")
            room = backend.room()
            with bench.fork(source, count) as fork, bench.fork(source, count) as astray:
                bench.require(backend.room() == room, "fork must not copy: what is shared takes no room")
                bench.extend(astray, [*bench.prompt[:count], *bench.other[:3]], count)
                found = bench.extend(fork, bench.prompt, count)
                bench.require(bench.same(found, expected), "a fork must go on as its source did")
        with bench.fork(source, 0) as fork:
            bench.require(
                bench.same(bench.extend(fork, bench.prompt), expected), "a fork of nothing must be an empty sequence"
            )
        longer = [*bench.prompt, *bench.other[:2]]
        found = bench.extend(source, longer, total)
        bench.require(bench.same(found, bench.fresh(longer)), "what forks do must not reach their source")


def _sources_may_go_first(bench: Bench) -> None:
    backend, total = bench.backend, len(bench.prompt)
    expected = bench.fresh(bench.prompt)
    source = backend.create()
    bench.extend(source, bench.prompt)
    with bench.fork(source, total - 1) as fork:
        backend.release(source)
        with bench.sequence(bench.other):  # takes the memory that became free
            found = bench.extend(fork, bench.prompt, total - 1)
            bench.require(bench.same(found, expected), "release of the source must leave what a fork shares")


def _blocks_come_out_in_full(bench: Bench) -> None:
    backend, size, total = bench.backend, bench.block, len(bench.prompt)
    with bench.sequence(bench.prompt) as sequence:
        payloads = bench.export(sequence, total)
        counts = [payload.num_tokens for payload in payloads]
        bench.require(counts == [size, size, total - 2 * size], "export_blocks must give full blocks, then the rest")
        bench.require(
            all(len(each.data) * size == backend.info.block_bytes * each.num_tokens for each in payloads),
            "a full block must have info.block_bytes bytes, a shorter one its share",
        )
        for each in payloads:
            bench.require(
                each.data.dtype == np.uint8 and each.data.ndim == 1 and bool(each.data.flags.c_contiguous),
                "a payload's data must be a contiguous uint8 array",
            )
        second = backend.export_blocks(sequence, 1, 1)
        bench.require(bench.same_blocks(second, payloads[1:2]), "export_blocks must start at the block it is asked for")
        cut = backend.export_blocks(sequence, 1, 1, 2 * size - 1)
        bench.require([each.num_tokens for each in cut] == [size - 1], "export_blocks must cut the last block at `end`")
        short = backend.cut(payloads[1], size - 1)
        bench.require(bench.same_blocks([short], cut), "cut must give what export_blocks gives with an `end`")
        for count in (0, size + 1):
            bench.require(
                bench.fails(FormatError, lambda count=count: backend.cut(payloads[1], count)),  # type: ignore[misc]
                "cut to no token, or to more than there are, must raise FormatError",
            )
        beyond = backend.export_blocks(sequence, 2, 5)
        bench.require(bench.same_blocks(beyond, payloads[2:]), "export_blocks must stop where the sequence ends")
        bench.require(backend.export_blocks(sequence, 3, 1) == [], "a block that is not there must give no payload")
        # Payloads are copies: what happens to the sequence later must not reach them.
        before = [each.data.tobytes() for each in payloads]
    with bench.sequence(bench.other):
        bench.require([each.data.tobytes() for each in payloads] == before, "payloads must own their bytes")


def _restored_equals_computed(bench: Bench) -> None:
    backend, size, total = bench.backend, bench.block, len(bench.prompt)
    expected = bench.fresh(bench.prompt)
    with bench.sequence(bench.prompt) as sequence:
        payloads = bench.export(sequence, total)
    for last in range(1, len(payloads) + 1):
        held = min(last * size, total - 1)
        parts = payloads[:last]
        if last * size >= total:
            with bench.sequence(bench.prompt) as sequence:
                parts[-1:] = backend.export_blocks(sequence, last - 1, 1, held)
        for split in range(last):
            with bench.sequence(bench.other) as neighbour, bench.sequence() as sequence:
                room = backend.room()
                backend.restore_blocks(sequence, 0, parts[:split])
                backend.restore_blocks(sequence, split, parts[split:])
                bench.require(room - backend.room() >= held, "room() must fall by at least the tokens restored")
                back = bench.export(sequence, held)
                bench.require(_same_bytes(back, parts), "restored blocks must come out byte for byte as they went in")
                found = bench.extend(sequence, bench.prompt, held)
                bench.require(bench.same(found, expected), "a restored sequence must go on as the computed one did")
                bench.require(
                    bench.same_blocks(bench.export(sequence, total), payloads),
                    "blocks computed after a restore must be those of a computed sequence",
                )
                longer = [*bench.other, *bench.prompt[:1]]
                theirs = bench.extend(neighbour, longer, len(bench.other))
                bench.require(bench.same(theirs, bench.fresh(longer)), "a restore must not reach other sequences")


def _same_bytes(ours: Sequence[BlockPayload], theirs: Sequence[BlockPayload]) -> bool:
    pairs = itertools.zip_longest(ours, theirs)
    return all(a is not None and b is not None and a.data.tobytes() == b.data.tobytes() for a, b in pairs)


def _bad_restores_change_nothing(bench: Bench) -> None:
    backend, size = bench.backend, bench.block
    with bench.sequence(bench.prompt) as sequence:
        payloads = bench.export(sequence, 2 * size)
    good = payloads[1]
    bad = (
        BlockPayload(size, good.data, good.dtype, good.shape, "nobody's layout"),
        BlockPayload(size, good.data[:-2].copy(), good.dtype, good.shape, good.layout),
        BlockPayload(size - 1, good.data, good.dtype, good.shape, good.layout),
    )
    with bench.sequence() as sequence:
        backend.restore_blocks(sequence, 0, payloads[:1])
        room = backend.room()
        for first in (0, 2):
            bench.require(
                bench.fails(BackendError, lambda first=first: backend.restore_blocks(sequence, first, [good])),  # type: ignore[misc]
                "blocks that don't follow what the sequence holds must raise BackendError",
            )
        for each in bad:
            bench.require(
                bench.fails(BackendError, lambda each=each: backend.restore_blocks(sequence, 1, [good, each])),  # type: ignore[misc]
                "a payload of another layout or size must raise BackendError, and none of its call may stay",
            )
        bench.require(backend.room() == room, "a restore that failed must not take room")
        backend.restore_blocks(sequence, 1, [])
        found = bench.extend(sequence, bench.prompt, size)
        bench.require(bench.same(found, bench.fresh(bench.prompt)), "a restore that failed must have restored nothing")


def _without_blocks_nothing_comes_out(bench: Bench) -> None:
    with bench.sequence(bench.prompt) as sequence:
        bench.require(
            bench.backend.export_blocks(sequence, 0, 2) == [],
            "a backend with info.reuse_blocks=False must export no blocks",
        )
        bench.require(
            not bench.backend.shareable(sequence, bench.block),
            "a backend with info.reuse_blocks=False must not offer tokens for sharing",
        )
