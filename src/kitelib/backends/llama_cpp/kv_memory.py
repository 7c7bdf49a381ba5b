"""The KV cache of a llama.cpp context, slot by slot: copying, forgetting, and states through the scratch slot.

Slots are the library's sequence ids. With two slots per sequence (see context.py), `slot` stands for itself and the
one that follows it.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from kitelib.errors import BackendError

__all__ = ["SCRATCH", "KvMemory"]

SCRATCH = 0
"""Slot of what is on its way in or out, and of padding rows; empty between calls."""


class KvMemory:
    """Operations on the cache of one context.

    Args:
        lib: the library.
        handle: its context.
        stride: slots of each sequence, 1 or 2.
    """

    def __init__(self, lib: Any, handle: Any, stride: int) -> None:
        self._lib = lib
        self._handle = handle
        self._memory = lib.llama_get_memory(handle)
        self.stride = stride

    def slots_of(self, slot: int) -> tuple[int, ...]:
        """The slots of a sequence."""
        return (slot, slot + 1) if self.stride == 2 else (slot,)

    def first_position(self, slot: int) -> int:
        """The lowest position that the slot holds; -1 if none."""
        return int(self._lib.llama_memory_seq_pos_min(self._memory, slot))

    def share(self, source: int, target: int, start: int, stop: int) -> None:
        """Positions start..stop of slot `source` also belong to the sequence of `target`."""
        for slot in self.slots_of(target):
            self._lib.llama_memory_seq_cp(self._memory, source, slot, start, stop)

    def forget(self, slot: int, start: int = -1, stop: int = -1) -> None:
        """Positions start..stop don't belong to this sequence any more; -1 stands for the first and the last one."""
        for each in self.slots_of(slot):
            self._lib.llama_memory_seq_rm(self._memory, each, start, stop)

    def clear_scratch(self) -> None:
        """Empties the scratch slot."""
        self._lib.llama_memory_seq_rm(self._memory, SCRATCH, -1, -1)

    def read(self, slot: int, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """The state blob of positions start..stop of a slot.

        Raises:
            BackendError: the library gave no state.
        """
        self._lib.llama_memory_seq_cp(self._memory, slot, SCRATCH, start, stop)
        try:
            size = int(self._lib.llama_state_seq_get_size(self._handle, SCRATCH))
            blob = np.empty(size, np.uint8)
            pointer = blob.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
            if int(self._lib.llama_state_seq_get_data(self._handle, pointer, size, SCRATCH)) != size:
                raise BackendError("llama.cpp could not write the state of a sequence")
            return blob
        finally:
            self.clear_scratch()

    def write_scratch(self, blob: npt.NDArray[np.uint8]) -> None:
        """Puts a state blob into the scratch slot, in the lowest free cells.

        Raises:
            BackendError: the library refused it; scratch is empty.
        """
        # SAFETY: `blob` outlives the call; the library copies it.
        pointer = blob.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        if int(self._lib.llama_state_seq_set_data(self._handle, pointer, len(blob), SCRATCH)) != len(blob):
            self.clear_scratch()
            raise BackendError("llama.cpp refused the state of a sequence")
