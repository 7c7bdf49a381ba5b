"""Upcycling on the model's thread: cuts runs into units and hands them to the recycler, a few blocks at a time."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kitelib.abc import Backend, BlockPayload
from kitelib.engine.request import Request, Run
from kitelib.fingerprint import Fingerprint
from kitelib.stores.pool import RUPool
from kitelib.stores.wanted import Wanted
from kitelib.upcycle.recycler import Recycler
from kitelib.upcycle.unit import Expectation, RecyclableUnit
from kitelib.yoco.completions import Completions
from kitelib.yoco.planner import LOGITS_LAYOUT, Planner

__all__ = ["Saver"]

Post = Callable[[Callable[[], None]], None]
_LEAST_GUESS = 4  # tokens; a guess of fewer saves no step


class Saver:
    """Keeps track of runs with unsaved blocks. Used on the model's thread only."""

    def __init__(self, backend: Backend, pool: RUPool, recycler: Recycler, planner: Planner, post: Post) -> None:
        self._backend = backend
        self._pool = pool
        self._recycler = recycler
        self._planner = planner
        self._post = post
        self._completions = Completions(pool, backend.info)
        self._pending: OrderedDict[Run, None] = OrderedDict()

    def note(self, run: Run, *, tail: bool) -> None:
        """The run has something worth keeping; `tail` keeps its last partial block too."""
        if not self._keeps(run) or run.sequence is None or not self._pool.enabled:
            return
        if tail and run.computed % self._backend.info.block_tokens and run.computed not in run.tail_ends:
            run.tail_ends.append(run.computed)
        self._pending[run] = None

    def forget(self, run: Run) -> None:
        """The run is gone, or must not be saved."""
        self._pending.pop(run, None)
        run.tail_ends.clear()

    def is_pending(self, run: Run) -> bool:
        """Whether the run has something left to save."""
        return run in self._pending

    @property
    def pending(self) -> bool:
        """Whether anything is left to save."""
        return bool(self._pending)

    def save_some(self, max_blocks: int) -> None:
        """Saves up to `max_blocks` blocks of the run that has waited longest."""
        if self._pending:
            run = next(iter(self._pending))
            self.save(run, max_blocks)

    def save(self, run: Run, max_blocks: int | None = None) -> None:
        """Saves a run, or its next `max_blocks` blocks."""
        size = self._backend.info.block_tokens
        first = run.saved // size
        full = min(run.computed // size, len(run.chain.fingerprints))
        last = full if max_blocks is None else min(full, first + max_blocks)
        while first < last:
            # What the pool already has (another run shares it, or it came from there) is not copied again.
            first = self._skip(run, first, last, known=True)
            stop = self._skip(run, first, last, known=False)
            if first < stop:
                self._save_blocks(run, first, stop)
            first = stop
        run.saved = max(run.saved, last * size)
        if last == full:
            for end in run.tail_ends:
                if end <= run.computed:
                    self._save_tail(run, end)
            self.forget(run)

    def _skip(self, run: Run, first: int, last: int, *, known: bool) -> int:
        """The first block from `first` on that the pool does not have (or has, if not `known`); `last` if none."""
        while first < last and self._has(self._planner.expect_block(run.chain, first, run.tokens)) == known:
            first += 1
        return first

    def save_logits(self, request: Request, run: Run, logits: npt.NDArray[np.float32]) -> None:
        """Keeps the logits after the prompt's last token."""
        if not self._keeps(run):
            return
        expected = self._planner.expect_logits(request.chain)
        if self._has(expected):
            return
        if not self._recycler.reserve(logits.nbytes, 1):
            return
        data = logits.copy().view(np.uint8)
        payload = BlockPayload(len(request.chain.tail), data, "float32", (len(logits),), LOGITS_LAYOUT)
        parent = request.chain.last
        self._submit(run, [self._unit(expected, parent, payload, run)], logits.nbytes)

    def save_completion(self, request: Request) -> None:
        """Keeps what the finished request was told: as an answer if it asked for that, and as a guess."""
        first = request.branches[0]
        run = first.run
        if not run.shared or not run.kept or not first.new_tokens:
            return
        if request.answer is not None and len(request.answer.token_ids) >= len(first.new_tokens):
            return  # it is from there
        ended = first.finish_reason == "stop" and not first.text.stopped
        keys: list[bytes | None] = [None] if request.asked is not None and len(first.new_tokens) >= _LEAST_GUESS else []
        if request.sampling is not None:
            keys.append(request.sampling)
        num_bytes = 4 * len(first.new_tokens)
        for key in keys:
            if self._recycler.reserve(num_bytes, 1):
                unit = self._completions.unit(request.chain, key, first.new_tokens, ended=ended, epoch=run.epoch)
                self._submit(run, [unit], num_bytes)

    def _keeps(self, run: Run) -> bool:
        return run.shared and run.kept and self._backend.info.reuse_blocks

    def _has(self, expected: Expectation) -> bool:
        return self._pool.contains(Wanted.of(expected))

    def _save_blocks(self, run: Run, first: int, last: int) -> None:
        reserved = (last - first) * self._backend.info.block_bytes
        if not self._recycler.reserve(reserved, last - first):
            return
        assert run.sequence is not None
        units = []
        for offset, payload in enumerate(self._backend.export_blocks(run.sequence, first, last - first)):
            index = first + offset
            expected = self._planner.expect_block(run.chain, index, run.tokens)
            units.append(self._unit(expected, self._planner.before(run.chain, index), payload, run))
        self._submit(run, units, reserved)

    def _save_tail(self, run: Run, end: int) -> None:
        size = self._backend.info.block_tokens
        block = end // size
        expected = self._planner.expect_tail(run.chain, block, run.tokens[block * size : end])
        if self._has(expected):
            return
        reserved = self._backend.info.block_bytes
        if not self._recycler.reserve(reserved, 1):
            return
        assert run.sequence is not None
        payloads = self._backend.export_blocks(run.sequence, block, 1, end)
        parent = self._planner.before(run.chain, block)
        self._submit(run, [self._unit(expected, parent, payload, run) for payload in payloads], reserved)

    def _unit(self, expected: Expectation, parent: Fingerprint, payload: BlockPayload, run: Run) -> RecyclableUnit:
        return RecyclableUnit(
            kind=expected.kind,
            cf=expected.cf,
            parent=parent,
            token_ids=np.array(expected.token_ids, np.uint32),
            model_state=expected.model_state,
            epoch=run.epoch,
            created_at=time.time(),
            layout=payload.layout,
            dtype=payload.dtype,
            shape=payload.shape,
            data=payload.data,
        )

    def _submit(self, run: Run, units: Sequence[RecyclableUnit], reserved: int) -> None:
        root = run.chain.root
        self._post(lambda: self._recycler.submit(units, reserved, run.epoch, root))
