"""The threads that torch computes with, for native code that has none of its own."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

__all__ = ["parallel_function"]


@functools.lru_cache(maxsize=1)
def parallel_function() -> int | None:
    """Address of `GOMP_parallel` in the OpenMP runtime that torch has loaded; None where there is none to be found.

    A second runtime, or threads of our own, would compete with torch's workers, which spin for a while after work.
    """
    import torch

    home = str(Path(torch.__file__).resolve().parent.parent)
    for path in sorted(_loaded_libraries(), key=lambda path: (not path.startswith(home), path)):
        if Path(path).name.startswith(("libgomp", "libiomp", "libomp")):
            try:
                library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
                return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value
            except (OSError, AttributeError):
                continue
    return None


def _loaded_libraries() -> set[str]:
    """Files mapped into this process; nothing where the system doesn't say."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    return {fields[5] for fields in (line.split(maxsplit=5) for line in lines) if len(fields) == 6}
