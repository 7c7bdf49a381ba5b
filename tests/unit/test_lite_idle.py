"""An idle engine costs little memory beside llama.cpp's own, and never wakes up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "support" / "idle_process.py"
MIB = 2**20
CELLS = 1024

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's procfs")


def measured(how: str, model: Path, cells: int, cache: Path, *disk: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), how, str(model), str(cells), *disk],
        env=os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_an_idle_engine_takes_at_most_60_mib_more_than_llama_cpp(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny_model("llama")
    kite = measured("kite", model, CELLS, tmp_path, str(tmp_path / "pool"))
    llama = measured("llama", model, kite["cells"], tmp_path)
    for kind in ("resident", "anonymous"):
        assert kite["memory"][kind] - llama["memory"][kind] < 60 * MIB, (kind, kite["memory"], llama["memory"])
        assert kite["memory after a request"][kind] - llama["memory"][kind] < 60 * MIB


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_an_idle_engine_never_wakes_up(tiny_model: Callable[..., Path], tmp_path: Path, tier: str) -> None:
    disk = [str(tmp_path / "pool")] if tier == "disk" else []
    found = measured("kite", tiny_model("llama"), CELLS, tmp_path, *disk)
    wakes = {name: after[0] - before[0] for name, (before, after) in found["switches"].items()}
    own = {name: count for name, count in wakes.items() if name.split()[0] == found["own"]}
    # The one thread that measures falls asleep once, for the time it measures.
    assert list(own.values()) == [1]
    assert not any(count for name, count in wakes.items() if name not in own), wakes
    assert len(wakes) >= 3
    assert found["timers"] == []
