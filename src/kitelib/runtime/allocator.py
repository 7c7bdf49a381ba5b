"""What the C library does with memory that was freed."""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Final

import numpy as np

__all__ = ["give_back_freed_memory", "keep_freed_memory"]

_BLOCK_BYTES: Final = 2**25 - 2**16  # glibc learns from blocks of less than 32 MiB only


@functools.cache
def keep_freed_memory() -> None:
    """Makes glibc keep up to 64 MiB of freed memory for the whole process, from the first call on. Any thread.

    glibc gives big freed blocks back to the system, and then every page of the next one costs a fault and is cleared:
    reading runs of units takes up to twice as long. Freeing one block of this size raises its thresholds (mallopt(3),
    "M_MMAP_THRESHOLD"). The block is never touched, so this takes no memory, and microseconds. With another C library
    nothing happens.
    """
    np.empty(_BLOCK_BYTES, np.uint8)  # `bytes` would clear it, for 15 ms, if the process has such a block free


def give_back_freed_memory() -> None:
    """Returns freed memory of the whole process to the system, which else stays with the process and its pages in
    memory. Any thread; milliseconds. Does nothing where the C library has no such call (`malloc_trim` is glibc's)."""
    if os.name != "posix":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
