"""A process that opens a GGUF model, does nothing, and tells what that costs: run as a script, prints JSON.

``idle_process.py HOW MODEL CELLS``: HOW is "llama" (libllama through the low-level bindings, without the Python package
around them), "bindings" (with it) or "kite" (an open `KiteEngine`; CELLS 0 takes its defaults). A folder as a fourth
argument is the disk tier.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import importlib.util
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

__all__ = ["context_switches", "resident_bytes"]

_IDLE_S = 3.0
_SETTLE_S = 1.0
_INTERVAL_S = 0.1  # after the last use one more round is made, then none
_KINDS = {"Rss": "resident", "Pss": "proportional", "Anonymous": "anonymous"}


def resident_bytes() -> dict[str, int]:
    """Bytes in memory after a collection, and after the allocator gave back what it could: all, with shared pages
    counted in proportion, and without those that are mapped from files."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = [line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]]
    return {_KINDS[name[:-1]]: int(size) * 1024 for name, size, *_ in lines if name[:-1] in _KINDS}


def context_switches() -> dict[str, tuple[int, ...]]:
    """Voluntary and forced context switches so far, by thread id and name: a thread that wakes up and sleeps again
    makes one of the first kind."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        fields = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines() if ":" in line)
        counts = tuple(int(fields[f"{kind}_ctxt_switches"]) for kind in ("voluntary", "nonvoluntary"))
        found[f"{task.name} {fields['Name'].strip()}"] = counts
    return found


def _low_level(package: bool) -> Any:
    """The module of the bindings; without `package` only that, and nothing of what `import llama_cpp` brings."""
    if not package:
        spec = importlib.util.find_spec("llama_cpp")
        assert spec is not None
        stub = types.ModuleType("llama_cpp")
        stub.__path__ = list(spec.submodule_search_locations or [])
        sys.modules["llama_cpp"] = stub
    return importlib.import_module("llama_cpp.llama_cpp")


def _bare(lib: Any, model: str, cells: int) -> dict[str, Any]:
    quiet = lib.llama_log_callback(lambda level, text, data: None)
    lib.llama_log_set(quiet, ctypes.c_void_p(0))
    lib.llama_backend_init()
    handle = lib.llama_model_load_from_file(os.fsencode(model), lib.llama_model_default_params())
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_threads, params.n_threads_batch, params.kv_unified = cells, 1, 1, True
    context = lib.llama_init_from_model(handle, params)
    assert context
    return {"memory": resident_bytes()}


async def _kite(model: str, cells: int, disk: str | None) -> dict[str, Any]:
    from kitelib import KiteEngine, PoolConfig

    sizes = {"n_ctx": cells // 2, "kv_tokens": cells} if cells else {}
    async with KiteEngine.open(
        model, threads=1, pool=PoolConfig(disk=disk, freshness_check_interval=_INTERVAL_S), **sizes
    ) as engine:
        opened = resident_bytes()
        await engine.generate("Say hello.", max_tokens=4)
        await engine.pool.settle()
        await asyncio.sleep(_SETTLE_S)
        before = context_switches()
        await asyncio.sleep(_IDLE_S)
        after = context_switches()
        waiting = getattr(asyncio.get_running_loop(), "_scheduled", [])
        timers = [str(timer) for timer in waiting if not timer.cancelled()]
        return {
            "memory": opened,
            "memory after a request": resident_bytes(),
            "cells": engine.stats()["blocks_total"] * engine.stats()["block_tokens"],
            "modules": sorted(sys.modules),
            "switches": {name: (before.get(name, (0, 0)), counts) for name, counts in after.items()},
            "timers": timers,
            "own": str(os.getpid()),
        }


def main() -> None:
    """Opens, measures, prints."""
    how, model, cells, *rest = sys.argv[1:]
    if how == "kite":
        found = asyncio.run(_kite(model, int(cells), rest[0] if rest else None))
    else:
        found = _bare(_low_level(how == "bindings"), model, int(cells))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
