"""Freed memory goes back to the system when it is told to."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from kitelib.runtime import allocator
from kitelib.runtime.allocator import give_back_freed_memory, keep_freed_memory

PIECE = 2**16  # small enough to come from the heap, not from pages of its own


def anonymous_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library has no malloc_trim")
def test_freed_memory_goes_back() -> None:
    keep_freed_memory()
    pieces = [np.ones(PIECE, np.uint8) for _ in range(1000)]
    last = np.ones(PIECE, np.uint8)  # holds the heap's end, so that nothing before it goes back by itself
    held = anonymous_bytes()
    pieces.clear()
    give_back_freed_memory()
    assert held - anonymous_bytes() > 900 * PIECE
    assert last[0] == 1


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: object())
    give_back_freed_memory()
