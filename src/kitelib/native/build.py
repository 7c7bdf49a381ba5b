"""Compiles the native part: ``python -m kitelib.native.build``. Takes seconds and needs any C11 compiler.

The result goes next to this file or, where that folder can't be written, into the user's cache folder. It runs on any
CPU of its kind: faster instructions are chosen at run time. Standard library only, and importable before anything is
installed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

__all__ = ["LIBRARY_NAME", "BuildError", "build", "cache_folder", "compile_library", "is_current", "source_folder"]

LIBRARY_NAME: Final = "_kite.so"
_HERE: Final = Path(__file__).parent  # as it is: importing must not ask the file system, it may happen on an event loop
_FLAGS: Final = ("-std=c11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden")
_MARK: Final = b"kite sources "  # followed by their digest, in the library
_TIMEOUT_S: Final = 300.0


class BuildError(Exception):
    """There is no compiler, or it failed; the message says which and what it printed."""


def source_folder() -> Path:
    """The folder with the C sources: inside an installed package, or at the root of the repository.

    Raises:
        BuildError: there is none.
    """
    for folder in (_HERE / "csrc", _HERE.parents[2] / "csrc"):
        if (folder / "include" / "kite.h").is_file():
            return folder
    raise BuildError(f"the C sources are missing: neither {_HERE / 'csrc'} nor {_HERE.parents[2] / 'csrc'} has them")


def cache_folder() -> Path:
    """``${XDG_CACHE_HOME:-~/.cache}/kite/native``; not created."""
    root = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not root.is_absolute():
        root = Path("~/.cache").expanduser()
    return root / "kite" / "native"


def build(folder: Path | None = None, *, force: bool = False) -> tuple[Path, bool]:
    """Makes the library if it is missing or older than its sources.

    Args:
        folder: where to put it; None means next to this file, or the cache folder if that can't be written.
        force: compile even if it is up to date.

    Returns:
        The library, and whether it was compiled now.

    Raises:
        BuildError: it could not be built; what was there before is still there.
    """
    if folder is None:
        folder = _HERE if os.access(_HERE, os.W_OK) else cache_folder()
    target = folder / LIBRARY_NAME
    if not force and is_current(target):
        return target, False
    sources = source_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".kite-", dir=folder) as work:
            fresh = Path(work) / LIBRARY_NAME
            compile_library(fresh, sorted((sources / "src").glob("*.c")), [f'-DKITE_SOURCES="{_digest(sources)}"'])
            _check_loads(fresh)
            fresh.replace(target)  # a process that has the old file open keeps it
    except OSError as error:
        raise BuildError(f"{target} could not be written: {error}") from error
    return target, True


def compile_library(target: Path, files: Sequence[Path], options: Sequence[str] = ()) -> None:
    """Runs the compiler that ``CC`` names, else cc, gcc or clang.

    Raises:
        BuildError: there is none, or it failed.
    """
    command = [*_compiler(), *_FLAGS, *options, *map(str, files), "-o", str(target)]
    try:
        done = subprocess.run(  # noqa: S603 - the user's own compiler, no shell
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{shlex.join(command[:1])} did not run: {error}") from error
    if done.returncode:
        raise BuildError(f"the compiler failed with status {done.returncode}: {shlex.join(command)}\n{done.stderr}")


def is_current(library: Path) -> bool:
    """Whether a library is there and was made of the sources that are there now."""
    try:
        return _MARK + _digest(source_folder()).encode() in library.read_bytes()
    except (OSError, BuildError):
        return False


def _digest(sources: Path) -> str:
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    for path in sorted(path for folder in ("include", "src") for path in (sources / folder).iterdir()):
        content = path.read_bytes()
        digest.update(f"\n{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:32]


def _compiler() -> list[str]:
    named = shlex.split(os.environ.get("CC", ""))
    if named:
        return named
    for name in ("cc", "gcc", "clang"):
        if path := shutil.which(name):
            return [path]
    raise BuildError(
        "no C compiler was found. On Debian or Ubuntu: apt-get install gcc. Or name one in the environment "
        "variable CC. Without it everything works, only slower."
    )


def _check_loads(library: Path) -> None:
    """In a process of its own: what can't be loaded must not take this one with it."""
    code = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).kite_abi()"
    done = subprocess.run(  # noqa: S603 - this Python
        [sys.executable, "-c", code, str(library)], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    if done.returncode:
        raise BuildError(f"the compiled library can't be loaded (status {done.returncode}): {done.stderr.strip()}")


def main() -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m kitelib.native.build", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", type=Path, help="where to put the library")
    parser.add_argument("--force", action="store_true", help="compile even if it is up to date")
    options = parser.parse_args()
    try:
        path, fresh = build(options.folder, force=options.force)
    except BuildError as error:
        sys.stderr.write(f"The native part was not built: {error}\n")
        return 1
    sys.stdout.write(f"{path} {'is built' if fresh else 'is up to date'}.\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
