"""OpenMP settings around the first import of torch; in processes of their own, because they are made once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import kitelib
from kitelib.backends.torch_engine.threads import SPIN_COUNT

_HEAD = """
import ctypes, os, sys
getenv = ctypes.CDLL(None).getenv
getenv.restype, getenv.argtypes = ctypes.c_char_p, [ctypes.c_char_p]
from kitelib.backends.torch_engine.threads import prepare_torch
assert "torch" not in sys.modules
"""
_TORCH = """
import ctypes
getenv = ctypes.CDLL(None).getenv
getenv.restype, getenv.argtypes = ctypes.c_char_p, [ctypes.c_char_p]
print(getenv(b"GOMP_SPINCOUNT"))
threads = 7
def get_num_threads(): return threads
def set_num_threads(count): global threads; threads = count
class ones:
    def __init__(self, size): pass
    def mul_(self, factor): pass
"""
_OPEN = """
print(prepare_torch(2))
print(getenv(b"GOMP_SPINCOUNT"), "GOMP_SPINCOUNT" in os.environ)
import torch
print(torch.get_num_threads())
"""
Run = Callable[..., list[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a script with a stand-in for torch, which says what it finds when it is imported; gives what it prints."""
    (tmp_path / "torch.py").write_text(_TORCH)
    package = Path(kitelib.__file__).parents[1]

    def run(script: str, **variables: str) -> list[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP", "KMP", "OMP"))}
        environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{package}"
        done = subprocess.run(
            [sys.executable, "-c", _HEAD + script],
            env=environment | variables,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


def test_torch_is_imported_with_the_setting_and_the_environment_is_put_back(run: Run) -> None:
    assert run(_OPEN) == [str(SPIN_COUNT.encode()), "None", "None False", "2"]


def test_what_the_user_has_set_stays(run: Run) -> None:
    assert run(_OPEN, GOMP_SPINCOUNT="77") == ["b'77'", "None", "b'77' True", "2"]
    assert run(_OPEN, OMP_WAIT_POLICY="active")[0] == "None"


def test_it_says_so_if_torch_was_there_before(run: Run) -> None:
    early = "import torch\nprint(prepare_torch({}))\nprint(torch.get_num_threads())\n"
    _, note, threads = run(early.format(2))
    assert f"GOMP_SPINCOUNT={SPIN_COUNT}" in note
    assert threads == "2"
    assert run(early.format(2), GOMP_SPINCOUNT="0")[1] == "None"
    assert run(early.format(1))[1] == "None"  # one thread has nobody to wait for


def test_a_second_engine_may_want_other_threads(run: Run) -> None:
    assert run("print(prepare_torch(2), prepare_torch(1))\nimport torch\nprint(torch.get_num_threads())")[1:] == [
        "None None",
        "1",
    ]
