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
_FIRST_ROWS: Final = 64

Vector = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True, slots=True)
class _Record:
    block: bytes | None
    signature: bytes | None
    row: int  # of its vector; -1 if it has none
    text: str
    num_bytes: int


class Records:
    """One completion per prompt; the oldest go first.

    Attributes:
        num_bytes: bytes held, estimated.
        num_tokens: tokens of all completions.
    """

    __slots__ = ("_blocks", "_free", "_owners", "_records", "_signatures", "_vectors", "num_bytes", "num_tokens")

    def __init__(self) -> None:
        self.num_bytes = 0
        self.num_tokens = 0
        self._records: OrderedDict[bytes, _Record] = OrderedDict()  # by the prompt's end
        self._blocks: dict[bytes, int] = {}  # last full blocks of prompts, and of how many
        self._signatures: dict[bytes, bytes] = {}
        self._vectors: Vector | None = None  # shape (rows, dimensions)
        self._owners: list[bytes | None] = []  # per row, the prompt's end
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._records)

    def add(self, end: bytes, block: bytes | None, signature: bytes | None, vector: Vector | None, text: str) -> None:
        """Keeps a completion as the latest, in the place of one of the same prompt."""
        self._drop(end)
        row = self._place(end, vector)
        num_bytes = _RECORD_BYTES + sys.getsizeof(text) + (4 * len(vector) if row >= 0 and vector is not None else 0)
        self._records[end] = _Record(block, signature, row, text, num_bytes)
        if block is not None:
            self._blocks[block] = self._blocks.get(block, 0) + 1
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

        Args:
            fingerprints: of the prompt's full blocks.
            block_tokens: tokens of one.
            prompt: its token ids.
        """
        for count in range(len(fingerprints), 0, -1):
            block = fingerprints[count - 1]
            if self._blocks.get(block):
                start = count * block_tokens
                for stop in range(min(start + block_tokens, len(prompt)) - 1, start - 1, -1):
                    text = self._text(end_fingerprint(block, prompt[start:stop]))
                    if text is not None:
                        return text
        return None

    def of_signature(self, signature: bytes | None) -> str | None:
        """The latest completion of a question with this signature."""
        return self._text(self._signatures.get(signature)) if signature is not None else None

    def near(self, vector: Vector | None) -> list[tuple[float, str]]:
        """Likeness (dot product) and completion of the few questions that are most alike, the nearest first."""
        vectors = self._vectors
        if vector is None or vectors is None or vector.shape != vectors.shape[1:]:
            return []
        # Not BLAS: its threads cost more than so small a product.
        likeness = np.einsum("ij,j->i", vectors[: len(self._owners)], vector)
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
        if record.block is not None:
            self._blocks[record.block] -= 1
            if not self._blocks[record.block]:
                del self._blocks[record.block]
        if record.signature is not None and self._signatures.get(record.signature) == end:
            del self._signatures[record.signature]
        if record.row >= 0 and self._vectors is not None:
            self._vectors[record.row] = 0.0
            self._owners[record.row] = None
            self._free.append(record.row)
        self.num_bytes -= record.num_bytes
        self.num_tokens -= len(record.text)

    def _place(self, end: bytes, vector: Vector | None) -> int:
        """Puts a vector into the matrix; -1 if there is none, or if it doesn't fit to those that are there."""
        if vector is None:
            return -1
        if self._vectors is None:
            self._vectors = np.zeros((_FIRST_ROWS, len(vector)), dtype=np.float32)
        if vector.shape != self._vectors.shape[1:]:
            return -1
        if self._free:
            row = self._free.pop()
            self._owners[row] = end
        else:
            row = len(self._owners)
            self._owners.append(end)
        if row == len(self._vectors):
            self._vectors = np.concatenate((self._vectors, np.zeros_like(self._vectors)))
        self._vectors[row] = vector
        return row
