"""What the checks of a backend stand on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from kitelib.abc import Backend, BlockPayload, SequenceId, StepWork
from kitelib.errors import BackendStepError, KiteError

__all__ = ["Bench", "Logits"]

Logits = npt.NDArray[np.float32]
# Of the largest logit, where numerics are only standard: a few units in the last place of bfloat16.
_TOLERANCE = 0.03


class Bench:
    """A backend with what every check needs: prompts, and steps that keep to its limits.

    Attributes:
        backend: what is checked.
        block: tokens of a block.
        exact: whether numerics are bitwise.
        prompt: two blocks of tokens, half of one, and one token: every kind of piece that a prompt can have.
        other: as many other ones.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.block: int = backend.info.block_tokens
        self.exact = backend.info.numerics == "bitwise"
        rng = np.random.default_rng(7)
        low, high = backend.info.vocab_size // 16, backend.info.vocab_size - backend.info.vocab_size // 16
        count = 2 * self.block + self.block // 2 + 1
        self.prompt, self.other = ([int(token) for token in rng.integers(low, high, count)] for _ in range(2))

    @staticmethod
    def require(good: bool, promise: str) -> None:
        """Raises AssertionError with the promise unless it is kept."""
        if not good:
            raise AssertionError(promise)

    @contextmanager
    def sequence(self, tokens: Sequence[int] = ()) -> Iterator[SequenceId]:
        """A sequence that holds `tokens`; released at the end."""
        sequence = self.backend.create()
        try:
            if tokens:
                self.extend(sequence, tokens)
            yield sequence
        finally:
            self.backend.release(sequence)

    @contextmanager
    def fork(self, source: SequenceId, num_tokens: int) -> Iterator[SequenceId]:
        """A fork; released at the end."""
        sequence = self.backend.fork(source, num_tokens)
        try:
            yield sequence
        finally:
            self.backend.release(sequence)

    def extend(self, sequence: SequenceId, tokens: Sequence[int], start: int = 0, piece: int = 2**31) -> Logits:
        """Computes ``tokens[start:]``, at most `piece` at a time; a copy of the logits after the last one."""
        piece = min(piece, self.backend.info.max_step_tokens)
        found: Logits | None = None
        for first in range(start, len(tokens), piece):
            part = tokens[first : first + piece]
            work = StepWork(sequence, part, first, first + len(part) == len(tokens))
            (found,) = self.backend.step([work]).logits
        if found is None:
            raise AssertionError("logits must come after a step's last token where they are asked for")
        return np.array(found, np.float32)

    def fresh(self, tokens: Sequence[int]) -> Logits:
        """Logits after `tokens`, computed alone."""
        with self.sequence() as sequence:
            return self.extend(sequence, tokens)

    def export(self, sequence: SequenceId, num_tokens: int) -> list[BlockPayload]:
        """Payloads of the first tokens of a sequence."""
        return self.backend.export_blocks(sequence, 0, -(-num_tokens // self.block), num_tokens)

    def same(self, ours: Logits, theirs: Logits) -> bool:
        """Whether logits agree: every bit if numerics are bitwise, else up to a tolerance."""
        if self.exact:
            return bool(np.array_equal(ours, theirs))
        return bool(np.allclose(ours, theirs, rtol=0, atol=_TOLERANCE * float(np.abs(theirs).max())))

    def same_blocks(self, ours: Sequence[BlockPayload], theirs: Sequence[BlockPayload]) -> bool:
        """Whether the payloads agree: every byte if numerics are bitwise, else all but their bytes."""

        def shape(each: BlockPayload) -> tuple[object, ...]:
            data = each.data.tobytes() if self.exact else len(each.data)
            return each.num_tokens, each.layout, each.dtype, each.shape, data

        return [shape(each) for each in ours] == [shape(each) for each in theirs]

    def verify(self, *work: StepWork) -> list[list[Logits]]:
        """One step; per item, copies of the logits before each of its drafts and after its last token."""
        result = self.backend.step(work)
        found = []
        for place, (item, last) in enumerate(zip(work, result.logits, strict=True)):
            rows = list(result.draft_logits[place]) if result.draft_logits else []
            self.require(len(rows) == (item.drafts if item.logits else 0), "there must be logits before each draft")
            self.require((last is not None) == item.logits, "logits must come after the last draft, too")
            found.append([np.array(row, np.float32) for row in [*rows, last] if row is not None])
        return found

    def fails(self, kind: type[KiteError], call: Callable[[], object]) -> bool:
        """Whether the call raises this kind of error."""
        try:
            call()
        except kind:
            return True
        return False

    def step_fails(self, sequence: SequenceId, tokens: Sequence[int], start: int) -> bool:
        """Whether a step with this one item raises BackendStepError."""
        work = [StepWork(sequence, tokens, start, True)]
        return self.fails(BackendStepError, lambda: self.backend.step(work))
