"""Makes the environment `.venv` at the root and installs kitelib into it: `python3 tools/setup_venv.py EXTRA...`.

`make demo` and `make test` call it. It may be run again at any time and then only does what is missing.
Standard library only, and it also starts on Pythons that are too old, to say so.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

from progress import run_logged, say

_ROOT = Path(__file__).resolve().parent.parent
_VENV = _ROOT / ".venv"
_PYTHON = _VENV / "bin" / "python"
_TORCH = "torch==2.13.0"  # what the torch engine is tested with; dependencies alone would take any from 2.11 on
_TORCH_EXTRAS = {"dev", "torch"}


def main(extras: list[str]) -> None:
    """Brings `.venv` up to date with the given extras of pyproject.toml."""
    if sys.version_info < (3, 10):  # noqa: UP036 - the message is the point
        raise SystemExit(
            f"kitelib needs Python 3.10 or newer; {sys.executable} is {sys.version.split()[0]}.\n"
            "Install a newer one and name it: make demo PYTHON=python3.12"
        )
    say(f"Preparing {_VENV} (the first time takes minutes, later seconds).")
    say("1/4  Python environment")
    _make_venv()
    say("2/4  llama.cpp, built for this CPU")
    _check([str(_PYTHON), str(_ROOT / "tools" / "build_llama_cpp.py")])
    say("3/4  kitelib's native part: a few seconds")
    _check([str(_PYTHON), str(_ROOT / "tools" / "build_native.py")])
    say(f"4/4  kitelib and its packages ({', '.join(extras)}): about a minute the first time, for downloads")
    # A torch that is there stays: on a machine with a GPU it is the one that fits its driver.
    if _TORCH_EXTRAS.intersection(extras) and not _runs("import importlib.metadata as m; m.version('torch')"):
        say(f"  {_TORCH} first: it is large")
        _install(_TORCH)
    _install("-e", f"{_ROOT}[{','.join(extras)}]")
    say("Ready.\n")


def _install(*what: str) -> None:
    command = [str(_PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off", *what]
    if run_logged(command, _VENV / "install.log") != 0:
        raise SystemExit("Installing failed. Is the network there? Run the same command again to go on.")


def _make_venv() -> None:
    if _runs("import sys, pip; sys.exit(sys.version_info < (3, 10))"):
        say("  already there")
        return
    # Debian and Ubuntu ship the module venv in python3, but not what it needs to install pip.
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        raise SystemExit(
            "  Python can't make environments here: the package python3-venv is missing.\n"
            "  On Debian or Ubuntu: sudo apt-get install python3-venv    Then run the same command again."
        )
    if _VENV.exists():
        # Only an environment that lost its Python is replaced; anything else is somebody's.
        if not (_VENV / "pyvenv.cfg").exists() or _runs("pass"):
            raise SystemExit(f"  {_VENV} exists but has no pip, or a Python before 3.10. Remove it and run this again.")
        say("  its Python is gone; making it anew")
        shutil.rmtree(_VENV)
    say(f"  making it with {sys.executable} ({sys.version.split()[0]}): a few seconds")
    _check([sys.executable, "-m", "venv", str(_VENV)])


def _runs(code: str) -> bool:
    """Whether the environment's Python exists and runs `code` successfully."""
    if not _PYTHON.exists():
        return False
    return subprocess.run([str(_PYTHON), "-c", code], capture_output=True, check=False).returncode == 0


def _check(command: list[str]) -> None:
    code = subprocess.run(command, check=False).returncode
    if code != 0:
        raise SystemExit(code)


if __name__ == "__main__":
    main(sys.argv[1:] or ["demo"])
