"""Numpy views of a `llama_batch`, so that a row costs no Python call per field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["BatchRows"]


class BatchRows:
    """The rows of a batch. Valid as long as the batch, which must have room for two sequence ids a row."""

    def __init__(self, batch: Any, size: int) -> None:
        self.token = np.ctypeslib.as_array(batch.token, (size,))
        self.position = np.ctypeslib.as_array(batch.pos, (size,))
        self.num_slots = np.ctypeslib.as_array(batch.n_seq_id, (size,))
        self.logits = np.ctypeslib.as_array(batch.logits, (size,))
        self.slots = [np.ctypeslib.as_array(batch.seq_id[i], (2,)) for i in range(size)]

    def fill(self, rows: Sequence[int], token_ids: Sequence[int], start: int, slots: tuple[int, ...]) -> None:
        """Puts consecutive tokens of one sequence, from position `start` on, into these rows; none asks for logits."""
        where = slice(rows.start, rows.stop) if isinstance(rows, range) else rows
        self.token[where] = token_ids
        self.position[where] = range(start, start + len(token_ids))
        self.num_slots[where] = len(slots)
        self.logits[where] = 0
        for row in rows:
            self.slots[row][: len(slots)] = slots
