"""kitelib as `pip install kitelib[lite]` leaves it: what belongs to it, and a copy without anything built."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement

import kitelib

__all__ = ["bare_copy", "modules_of_lite", "run_lite"]


def _distributions(name: str, extras: frozenset[str], seen: dict[str, frozenset[str]]) -> None:
    """Adds a distribution and all that it requires to `seen`, by normalized name, with the extras asked for."""
    key = re.sub(r"[-_.]+", "-", name).lower()
    if key in seen and extras <= seen[key]:
        return
    seen[key] = seen.get(key, frozenset()) | extras
    for line in importlib.metadata.requires(name) or []:
        wanted = Requirement(line)
        environments = [{"extra": extra} for extra in extras] or [{"extra": ""}]
        if wanted.marker is None or any(wanted.marker.evaluate(each) for each in environments):
            _distributions(wanted.name, frozenset(wanted.extras), seen)


def modules_of_lite() -> set[str]:
    """Top-level modules of all distributions that kitelib[lite] requires, directly or not."""
    seen: dict[str, frozenset[str]] = {}
    _distributions("kitelib", frozenset({"lite"}), seen)
    owners = importlib.metadata.packages_distributions()
    found = {
        module for module, names in owners.items() for name in names if re.sub(r"[-_.]+", "-", name).lower() in seen
    }
    return found | {"kitelib"}


def bare_copy(folder: Path) -> Path:
    """A folder to put on the path, with kitelib's Python files and nothing that a compiler made."""
    source = Path(kitelib.__file__).parent
    shutil.copytree(source, folder / "kitelib", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return folder


def run_lite(folder: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs code with the kitelib of `bare_copy`, and a cache folder of its own; the test's path is not inherited."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "LLAMA_CPP"))}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=env | {"PYTHONPATH": str(folder), "XDG_CACHE_HOME": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
