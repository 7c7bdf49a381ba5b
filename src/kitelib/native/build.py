"""Compiles the native part: ``python -m kitelib.native.build``. Takes seconds and needs any C11 compiler.

With ``--cuda`` the part for NVIDIA GPUs too, which needs the CUDA toolkit's nvcc, but no GPU. The result goes next to this file or, where that folder can't be written, into the user's cache folder. It runs on any
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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

__all__ = [
    "CUDA_LIBRARY_NAME",
    "LIBRARY_NAME",
    "BuildError",
    "build",
    "build_cuda",
    "cache_folder",
    "compile_cuda_library",
    "compile_library",
    "find_nvcc",
    "is_current",
    "source_folder",
]

LIBRARY_NAME: Final = "_kite.so"
CUDA_LIBRARY_NAME: Final = "_kite_cuda.so"
_HERE: Final = Path(__file__).parent  # as it is: importing must not ask the file system, it may happen on an event loop
# Without -ffp-contract=off some compilers fuse multiply and add, and then machines give different bytes.
_FLAGS: Final = ("-std=c11", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off")
_CUDA_FLAGS: Final = (
    *("-std=c++17", "-O3", "-shared", "-Xcompiler", "-fPIC,-fvisibility=hidden", "-fmad=false", "-cudart", "static"),
    *("-gencode", "arch=compute_80,code=sm_80", "-gencode", "arch=compute_90,code=sm_90"),
    *("-gencode", "arch=compute_90,code=compute_90"),  # newer GPUs compile this when they load it
)
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

    def make(fresh: Path, sources: Path, define: str) -> None:
        compile_library(fresh, sorted((sources / "src").glob("*.c")), [define])

    return _build(folder, LIBRARY_NAME, force, make)


def build_cuda(folder: Path | None = None, *, force: bool = False) -> tuple[Path, bool]:
    """Makes the library for NVIDIA GPUs; otherwise like `build`. Takes half a minute.

    Raises:
        BuildError: there is no nvcc, or it failed; what was there before is still there.
    """

    def make(fresh: Path, sources: Path, define: str) -> None:
        compile_cuda_library(fresh, [sources / "cuda" / "pages.cu"], [define])

    return _build(folder, CUDA_LIBRARY_NAME, force, make)


def _build(folder: Path | None, name: str, force: bool, make: Callable[[Path, Path, str], None]) -> tuple[Path, bool]:
    if folder is None:
        folder = _HERE if os.access(_HERE, os.W_OK) else cache_folder()
    target = folder / name
    if not force and is_current(target):
        return target, False
    sources = source_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".kite-", dir=folder) as work:
            fresh = Path(work) / name
            make(fresh, sources, f'-DKITE_SOURCES="{_digest(sources, name)}"')
            _check_loads(fresh, "kite_cuda_abi" if name == CUDA_LIBRARY_NAME else "kite_abi")
            fresh.replace(target)  # a process that has the old file open keeps it
    except OSError as error:
        raise BuildError(f"{target} could not be written: {error}") from error
    return target, True


def compile_library(target: Path, files: Sequence[Path], options: Sequence[str] = ()) -> None:
    """Runs the compiler that ``CC`` names, else cc, gcc or clang.

    Raises:
        BuildError: there is none, or it failed.
    """
    compiler = [*_compiler(), *_FLAGS, *options]
    with tempfile.TemporaryDirectory(prefix="kite-") as work, ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [str(Path(work) / f"{path.stem}.o") for path in files]
        commands = [[*compiler, "-c", str(path), "-o", made] for path, made in zip(files, objects, strict=True)]
        list(pool.map(_run, commands))
        _run([*compiler, "-shared", *objects, "-o", str(target)])


def compile_cuda_library(target: Path, files: Sequence[Path], options: Sequence[str] = ()) -> None:
    """Runs the nvcc that `find_nvcc` finds.

    Raises:
        BuildError: there is none, or it failed.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise BuildError(
            "nvcc was not found, neither in $CUDA_HOME/bin nor on PATH nor in /usr/local/cuda/bin. It is part of the "
            "CUDA toolkit; name the toolkit's folder in CUDA_HOME. Without it GPUs work too, but copy blocks more slowly"
        )
    _run([nvcc, *_CUDA_FLAGS, *options, *map(str, files), "-o", str(target)])


def find_nvcc() -> str | None:
    """The CUDA compiler: that of ``CUDA_HOME`` if this is set, else the one on PATH or in /usr/local/cuda."""
    home = os.environ.get("CUDA_HOME")
    if home:
        return shutil.which("nvcc", path=str(Path(home) / "bin"))
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def _run(command: list[str]) -> None:
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
        return _MARK + _digest(source_folder(), library.name).encode() in library.read_bytes()
    except (OSError, BuildError):
        return False


def _digest(sources: Path, name: str) -> str:
    cuda = name == CUDA_LIBRARY_NAME
    patterns = ("include/*", "cuda/*", "src/pages_math.h") if cuda else ("include/*", "src/*")
    digest = hashlib.sha256(" ".join(_CUDA_FLAGS if cuda else _FLAGS).encode())
    for path in sorted(path for pattern in patterns for path in sources.glob(pattern)):
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


def _check_loads(library: Path, function: str) -> None:
    """In a process of its own: what can't be loaded must not take this one with it."""
    code = f"import ctypes, sys; ctypes.CDLL(sys.argv[1]).{function}()"
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
    parser.add_argument("--cuda", action="store_true", help="make the part for NVIDIA GPUs too")
    options = parser.parse_args()
    made = [("The native part", build)]
    if options.cuda:
        made.append(("The part for NVIDIA GPUs", build_cuda))
    failed = False
    for what, function in made:
        try:
            path, fresh = function(options.folder, force=options.force)
        except BuildError as error:
            sys.stderr.write(f"{what} was not built: {error}\n")
            failed = True
        else:
            sys.stdout.write(f"{path} {'is built' if fresh else 'is up to date'}.\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
