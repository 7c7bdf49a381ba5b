"""The completions of one root, found by prompt, by the prompt's last full block, by signature and by likeness."""

from __future__ import annotations

import dataclasses
import sys
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kitelib.fingerprint import end_fingerprint

__all__ = ["Records"]

_RECORD_BYTES: Final = 700  # a record beside its text and its vector: three digests, and entries of four dicts
_NEIGHBOURS: Final = 3
_LEAST_LIKENESS: Final = 0.5
_ROWS: Final = 256  # of one matrix of vectors: a larger one would take milliseconds to grow
_MOST_BLOCKS: Final = 8  # full blocks at which earlier prompts are looked for
_MOST_ENDS: Final = 16  # ends of earlier prompts that are looked for: each is a digest

Vector = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True, slots=True)
class _Record:
    block: bytes | None
    tail_tokens: int
    signature: bytes | None
    row: int  # of its vector; -1 if it has none
    text: str
    num_bytes: int


class Records:
    """One completion per prompt; the oldest go first.

    Attributes:
        num_bytes: bytes held, estimated.
        num_tokens: tokens of all completions.
        version: another number after each change.
    """

    __slots__ = (
        "_free",
        "_owners",
        "_records",
        "_signatures",
        "_tails",
        "_vectors",
        "num_bytes",
        "num_tokens",
        "version",
    )

    def __init__(self) -> None:
        self.version = 0
        self.num_bytes = 0
        self.num_tokens = 0
        self._records: OrderedDict[bytes, _Record] = OrderedDict()  # by the prompt's end
        # last full block of prompts -> number of tokens after it -> of how many prompts
        self._tails: dict[bytes, dict[int, int]] = {}
        self._signatures: dict[bytes, bytes] = {}
        self._vectors: list[Vector] = []  # each of shape (_ROWS, dimensions)
        self._owners: list[bytes | None] = []  # per row, the prompt's end
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._records)

    def add(
        self,
        end: bytes,
        block: bytes | None,
        tail_tokens: int,
        signature: bytes | None,
        vector: Vector | None,
        text: str,
    ) -> None:
        """Keeps a completion as the latest, in the place of one of the same prompt.

        Args:
            end: identifies the prompt.
            block: its last full block; None if it has none.
            tail_tokens: its tokens after that.
            signature: of its question.
            vector: of its question.
            text: the completion.
        """
        self._drop(end)
        self.version += 1
        row = self._place(end, vector)
        num_bytes = _RECORD_BYTES + sys.getsizeof(text) + (4 * len(vector) if row >= 0 and vector is not None else 0)
        self._records[end] = _Record(block, tail_tokens, signature, row, text, num_bytes)
        if block is not None:
            tails = self._tails.setdefault(block, {})
            tails[tail_tokens] = tails.get(tail_tokens, 0) + 1
        if signature is not None:
            self._signatures[signature] = end
        self.num_bytes += num_bytes
        self.num_tokens += len(text)

    def shrink(self, max_bytes: int) -> None:
        """Drops the oldest until no more than `max_bytes` are held."""
        while self._records and self.num_bytes > max_bytes:
            self._drop(next(iter(self._records)))

    def of_prompt(self, end: bytes) -> str | None:
        """The completion of exactly this prompt."""
        return self._text(end)

    def of_beginning(self, fingerprints: Sequence[bytes], block_tokens: int, prompt: Sequence[int]) -> str | None:
        """The completion of the longest other prompt that this one begins with: the turn before, in a conversation.

        At most 16 ends are looked for, behind the last 8 blocks where other prompts end.

        Args:
            fingerprints: of the prompt's full blocks.
            block_tokens: tokens of one.
            prompt: its token ids.
        """
        blocks, ends = _MOST_BLOCKS, _MOST_ENDS
        for count in range(len(fingerprints), 0, -1):
            block = fingerprints[count - 1]
            tails = self._tails.get(block)
            if tails is None:
                continue
            start = count * block_tokens
            for tail_tokens in sorted(tails, reverse=True):
                if start + tail_tokens >= len(prompt):
                    continue
                text = self._text(end_fingerprint(block, prompt[start : start + tail_tokens]))
                if text is not None:
                    return text
                ends -= 1
                if not ends:
                    return None
            blocks -= 1
            if not blocks:
                return None
        return None

    def of_signature(self, signature: bytes | None) -> str | None:
        """The latest completion of a question with this signature."""
        return self._text(self._signatures.get(signature)) if signature is not None else None

    def near(self, vector: Vector | None) -> list[tuple[float, str]]:
        """Likeness (dot product) and completion of the few questions that are most alike, the nearest first."""
        if vector is None or not self._fits(vector) or not self._owners:
            return []
        # Not BLAS: its threads cost more than so small a product.
        parts = [np.einsum("ij,j->i", vectors, vector) for vectors in self._vectors]
        likeness = np.concatenate(parts)[: len(self._owners)]
        count = min(_NEIGHBOURS, len(likeness))
        nearest = np.argpartition(-likeness, count - 1)[:count]
        found = []
        for row in sorted(nearest.tolist(), key=lambda row: (-likeness[row], row)):
            text = self._text(self._owners[row])
            if text is not None and likeness[row] >= _LEAST_LIKENESS:
                found.append((float(likeness[row]), text))
        return found

    def _text(self, end: bytes | None) -> str | None:
        record = self._records.get(end) if end is not None else None
        return record.text if record is not None else None

    def _drop(self, end: bytes) -> None:
        record = self._records.pop(end, None)
        if record is None:
            return
        self.version += 1
        if record.block is not None:
            tails = self._tails[record.block]
            tails[record.tail_tokens] -= 1
            if not tails[record.tail_tokens]:
                del tails[record.tail_tokens]
            if not tails:
                del self._tails[record.block]
        if record.signature is not None and self._signatures.get(record.signature) == end:
            del self._signatures[record.signature]
        if record.row >= 0:
            self._vectors[record.row // _ROWS][record.row % _ROWS] = 0.0
            self._owners[record.row] = None
            self._free.append(record.row)
        self.num_bytes -= record.num_bytes
        self.num_tokens -= len(record.text)

    def _place(self, end: bytes, vector: Vector | None) -> int:
        """Keeps a vector; returns its row, or -1 if there is none, or if it doesn't fit to those that are there."""
        if vector is None or not self._fits(vector):
            return -1
        if self._free:
            row = self._free.pop()
            self._owners[row] = end
        else:
            row = len(self._owners)
            self._owners.append(end)
        if row == _ROWS * len(self._vectors):
            self._vectors.append(np.zeros((_ROWS, len(vector)), dtype=np.float32))
        self._vectors[row // _ROWS][row % _ROWS] = vector
        return row

    def _fits(self, vector: Vector) -> bool:
        return not self._vectors or vector.shape == self._vectors[0].shape[1:]
