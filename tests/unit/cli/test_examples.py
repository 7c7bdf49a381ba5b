"""The programs in examples/ run as they are."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.py"))


def run(path: Path) -> str:
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_there_are_examples():
    assert {path.stem for path in EXAMPLES} >= {"conversation", "generate_and_stream", "restart", "support_bot"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs_and_reuses(path: Path):
    counts = re.findall(r"(\d+) of (\d+) prompt tokens (reused|computed)", run(path))
    assert counts
    for count, total, what in counts[1:]:
        reused = int(count) if what == "reused" else int(total) - int(count)
        assert reused > 0
