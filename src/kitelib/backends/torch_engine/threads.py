"""Settles how torch's OpenMP threads behave inside somebody else's process, around the first import of torch.

Between two parallel regions the workers of an OpenMP runtime spin for a while instead of sleeping. A forward pass is
hundreds of short regions, so on idle cores that spares hundreds of wake-ups per step. With more busy threads than
cores it is a disaster: the thread that should work waits for one that spins, by default for whole scheduler time
slices, and a step takes seconds. A runtime reads its settings once, when it is loaded.

`SPIN_COUNT` is the compromise: see the figures beside it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["SPIN_COUNT", "prepare_torch"]

SPIN_COUNT = "2000"
"""Turns that an idle worker spins before it sleeps, about 100 microseconds: longer than most gaps within a pass.

Milliseconds of a decode step of 16 sequences (SmolLM2-135M, 2 threads on 2 cores, median of 30), compiled and not:
alone 24 and 57 with 1000, 21 with 2000, 20 and 52 with 3000, 20 and 36 with 20000, 20 and 38 with the
default; beside one busy process 39 and 57 with 0, 52 and 62 with 1000, 66 with 2000, 83 with 3000, 132 and 151 with
20000, 312 and 455 with the default. One thread takes 50 in either case.
"""
# GNU's runtime is what torch ships on Linux; LLVM's and Intel's (conda, macOS) count in milliseconds. With more threads
# than cores, as when two threads of a program compute, GNU's spins 100 turns only, unless the policy says "active": then
# 1000. (The same step from a second thread takes 59 ms without it, 25 with it.)
_SETTINGS = {
    "GOMP_SPINCOUNT": (SPIN_COUNT, ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")),
    "OMP_WAIT_POLICY": ("ACTIVE", ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME", "KMP_LIBRARY")),
    "KMP_BLOCKTIME": ("0", ("KMP_BLOCKTIME", "KMP_LIBRARY", "OMP_WAIT_POLICY")),
}
_lock = threading.Lock()
_loaded_by_us = threading.Event()


def prepare_torch(threads: int) -> str | None:
    """Imports torch with our OpenMP settings, and sets how many threads it computes with.

    The number is that of the process: other users of torch in it compute with as many from now on. Settings of the
    user's (``GOMP_SPINCOUNT``, ``KMP_BLOCKTIME``, ``OMP_WAIT_POLICY``) stay, and the environment is put back.

    Args:
        threads: for one operation, 1 or more.

    Returns:
        One sentence for people if the workers may spin for long because torch was imported before; else None.

    Raises:
        ModuleNotFoundError: torch is not installed.
    """
    with _lock:
        if "torch" not in sys.modules:
            with _spin_settings():
                torch: Any = importlib.import_module("torch")
                torch.set_num_threads(threads)
                _start_workers(torch)
            _loaded_by_us.set()
        torch = importlib.import_module("torch")
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
    if _loaded_by_us.is_set() or threads == 1 or _user_decided():
        return None
    return (
        "torch was imported before the engine was opened, so its OpenMP threads spin while they wait; beside other busy "
        f"threads steps become many times slower: set GOMP_SPINCOUNT={SPIN_COUNT} before the process starts, or open the "
        "engine before importing torch"
    )


def _start_workers(torch: Any) -> None:
    """One parallel operation: runtimes of LLVM and Intel read their settings at the first."""
    torch.ones(1 << 16).mul_(2.0)


def _user_decided() -> bool:
    return any(os.environ.get(name) for _, deciders in _SETTINGS.values() for name in deciders)


@contextlib.contextmanager
def _spin_settings() -> Iterator[None]:
    """Puts the settings into the C environment, which is what the runtimes read, and puts it back as it was."""
    if os.name != "posix":
        yield
        return
    getenv = ctypes.CDLL(None).getenv
    getenv.restype, getenv.argtypes = ctypes.c_char_p, [ctypes.c_char_p]
    before = {name: getenv(name.encode()) for name in _SETTINGS}
    undecided = [
        name for name, (_, deciders) in _SETTINGS.items() if all(getenv(each.encode()) is None for each in deciders)
    ]
    for name in undecided:
        os.putenv(name, _SETTINGS[name][0])
    try:
        yield
    finally:
        for name, previous in before.items():
            if previous is None:
                os.unsetenv(name)
            else:
                os.putenv(name, previous)
