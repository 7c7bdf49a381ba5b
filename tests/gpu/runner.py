"""Runs the GPU tests without pytest: ``python tests/gpu/runner.py [--device cpu] [-k WORD]``.

Tests are functions without arguments in ``test_gpu_*.py``; a failing one prints its error, and the rest still run.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["find_tests", "main"]

_HERE = Path(__file__).resolve().parent


def find_tests(word: str = "") -> list[tuple[str, Callable[[], None]]]:
    """Names and functions of the tests whose name contains `word`; what can't be imported is a failing test."""
    found: list[tuple[str, Callable[[], None]]] = []
    for path in sorted(_HERE.glob("test_gpu_*.py")):
        try:
            module = importlib.import_module(f"tests.gpu.{path.stem}")
        except ImportError as error:
            found.append((f"{path.stem}::import", _failing(error)))
            continue
        found.extend(
            (f"{path.stem}::{name}", function)
            for name, function in vars(module).items()
            if name.startswith("test_") and callable(function)
        )
    return [(name, function) for name, function in found if word in name]


def _failing(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns how many tests failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for a dry run of the tests themselves")
    parser.add_argument("-k", dest="word", default="", help="only tests whose name contains this")
    options = parser.parse_args(arguments)
    os.environ["KITE_GPU_DEVICE"] = options.device
    for folder in (_HERE.parents[1], _HERE.parents[1] / "src"):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    import torch

    if options.device != "cpu" and not torch.cuda.is_available():
        sys.stdout.write("GPU tests are skipped: torch.cuda.is_available() is False\n")
        return 0
    from tests.gpu.rig import Skipped

    failed, begin = [], time.monotonic()
    for name, function in find_tests(options.word):
        start = time.monotonic()
        try:
            function()
            state = "ok"
        except Skipped as reason:
            state = f"skipped: {reason}"
        except Exception:  # noqa: BLE001 - a test may fail in any way
            traceback.print_exc(file=sys.stdout)
            state = "FAILED"
            failed.append(name)
        sys.stdout.write(f"{time.monotonic() - start:7.1f} s  {name}  {state}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{len(failed)} GPU tests failed, in {time.monotonic() - begin:.0f} s\n")
    for name in failed:
        sys.stdout.write(f"  FAILED {name}\n")
    return len(failed)


if __name__ == "__main__":
    sys.exit(min(main(), 100))
