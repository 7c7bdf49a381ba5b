"""The scripts of tests/gpu run from end to end on the CPU, so that a machine lent for an hour isn't spent on typos."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu import runner

_ROOT = Path(__file__).resolve().parents[3]


def test_every_part_of_the_benchmark_runs_on_the_cpu(tmp_path: Path) -> None:
    """With tiny sizes; what only CUDA can do says so, and nothing else is left out."""
    command = ["tests/gpu/bench.py", "--device", "cpu", "--tiny", "--json", str(tmp_path / "bench.json")]
    done = subprocess.run(
        [sys.executable, *command],
        check=False,
        cwd=_ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "bench.json").read_text())
    rows = {row["name"]: row for row in found["rows"]}
    left_out = sorted(name for name, row in rows.items() if row["value"] is None and "csrc/" not in row["of"])
    assert left_out == [
        "device to host, pinned",
        "host to device, pinned",
        "transformers compiled static cache, batch 1",
        "transformers compiled static cache, batch 64",
    ]
    for name in ("decode, batch 3 after 20 tokens", "first token after 200 tokens, restored"):
        assert rows[name]["value"] > 0
        assert name in done.stdout
    assert found["versions"]["torch"] == torch.__version__


def test_the_runner_runs_tests_and_tells_failures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here one that needs no model, and one that can't pass."""
    monkeypatch.setenv("KITE_GPU_DEVICE", "")  # the runner sets it; this puts it back
    assert runner.main(["--device", "cpu", "-k", "test_every_shape"]) == 0
    out = capsys.readouterr().out
    assert "test_gpu_attention::test_every_shape_agrees_with_the_reference  ok" in out
    assert "0 GPU tests failed" in out

    def fails() -> None:
        raise ValueError("as it must")

    monkeypatch.setattr(runner, "find_tests", lambda word: [(f"{word}::fails", fails)])
    assert runner.main(["--device", "cpu", "-k", "some"]) == 1
    out = capsys.readouterr().out
    assert "ValueError: as it must" in out
    assert "FAILED some::fails" in out


def test_the_runner_finds_every_test_file() -> None:
    """A file that it can't import is a failing test, not a missing one."""
    names = [name for name, _ in runner.find_tests()]
    files = {path.stem for path in (_ROOT / "tests" / "gpu").glob("test_gpu_*.py")}
    assert {name.partition("::")[0] for name in names} == files
    assert not any(name.endswith("::import") for name in names)
