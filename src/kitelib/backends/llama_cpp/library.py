"""Loads the llama.cpp library: the one place that imports `llama_cpp`.

Four things are settled here, because they can't be settled later:

* **Spinning OpenMP threads.** Between two parallel regions the workers of an OpenMP runtime spin instead of
  sleeping. Alone on a machine that saves microseconds; next to any other busy thread it costs whole scheduler
  time slices per region (`tests/benchmarks/threads.py` measures it). The runtime reads its settings once, when it
  is loaded, so they are put into the C environment around the load and taken out again.
* **The log.** libllama has one log callback per process. Lines go to the logger ``kitelib.llama_cpp`` (warnings
  as INFO, errors as WARNING, the rest as DEBUG); the last errors of a thread are kept to explain a failed call.
* **Compute plug-ins.** Builds with separate backend libraries (``GGML_BACKEND_DL``, as packaged for Termux) load
  them from the folder of libllama.
* **Another libllama.** ``LLAMA_CPP_LIB_PATH`` names the folder of one; on Termux that of its package ``llama-cpp`` is
  found where the bindings were installed without their own. Whether it fits them is checked (`abi`).

Nothing happens at import; everything happens in the first `load_library()`.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import importlib
import importlib.util
import logging
import os
import pathlib
import re
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

from kitelib.backends.llama_cpp.abi import bind
from kitelib.errors import BackendError, MissingExtraError

__all__ = ["captured_errors", "load_library", "spin_note"]

_PURPOSE = "running a GGUF model"
# Settings per OpenMP runtime, and the variables with which a user may already have decided. OMP_WAIT_POLICY would do
# for both but says more than "do not spin", and every OpenMP runtime that loads in the same moment would read it.
_SPIN_SETTINGS = {
    "GOMP_SPINCOUNT": ("0", ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")),
    "KMP_BLOCKTIME": ("0", ("KMP_BLOCKTIME", "KMP_LIBRARY", "OMP_WAIT_POLICY")),
}
_OPENMP_FILE = re.compile(r"lib(?:gomp|omp|iomp5)\b[^/]*\.so[.\d]*$")
_OPENMP_NEEDED = re.compile(rb"\0(lib(?:gomp|omp|iomp5)\b[\w.+-]*\.so[.\d]*)(?=\0)")
_LIBRARY_FILE = "libllama.so"
_LEVEL_CONTINUE = 5
_LEVEL_WARN = 3
_LOG_LEVELS = {_LEVEL_WARN: logging.INFO, 4: logging.WARNING}

_lock = threading.Lock()


class _Library(NamedTuple):
    module: Any
    spin_note: str | None
    log_callback: Any  # referenced for as long as libllama may call it


def load_library() -> Any:
    """The low-level llama.cpp functions: what `llama_cpp.llama_cpp` has, made safe by `abi.bind`. The first call loads
    the library.

    The folder named by the environment variable ``LLAMA_CPP_LIB_PATH`` is used if set. Thread-safe.

    Raises:
        MissingExtraError: the package llama-cpp-python, or one that it needs, is not installed.
        BackendError: it is installed, but the library can't be loaded, or is of another release than the bindings.
    """
    with _lock:
        return _load().module


def spin_note() -> str | None:
    """Why OpenMP workers may spin in this process, as one sentence for people; None if they don't."""
    with _lock:
        return _load().spin_note


@functools.cache
def _load() -> _Library:
    before = _openmp_files()
    with _quiet_openmp_workers():
        module = bind(_import_bindings())
        callback = _route_log(module)
        module.llama_backend_init()
        _load_plugins(module)
        # Registers the backends, and with them the CPU one, which sets KMP_BLOCKTIME for the whole process if it is
        # absent. Here it is not, or it is taken out again below.
        module.llama_supports_gpu_offload()
        _read_openmp_settings(_openmp_files() - before)
    return _Library(module, _find_spin_note(module, before), callback)


def _import_bindings() -> Any:
    named = os.environ.get("LLAMA_CPP_LIB_PATH")
    folder = named or _termux_folder()
    try:
        with _library_from(folder):
            return importlib.import_module("llama_cpp.llama_cpp")
    except ModuleNotFoundError as error:
        missing = error.name or ""
        package = "llama-cpp-python" if missing.partition(".")[0] in ("", "llama_cpp") else missing
        raise MissingExtraError(package, "lite", _PURPOSE) from error
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        # AttributeError: a libllama that lacks a function the bindings name.
        where = "that llama-cpp-python installed"
        remedy = (
            "reinstall it so that it is built on this machine: "
            "pip install --force-reinstall --no-binary llama-cpp-python 'kitelib[lite]'"
        )
        if folder:
            where = f"from LLAMA_CPP_LIB_PATH={folder!r}" if named else f"of the package llama-cpp in {folder!r}"
            remedy = (
                "point LLAMA_CPP_LIB_PATH at a folder with libllama and libggml of the release that the bindings were "
                "made for, or install the release of llama-cpp-python that was made for this library"
            )
        raise BackendError(f"the llama.cpp library {where} can't be loaded: {error}; {remedy}") from error


def _termux_folder() -> str | None:
    """Where Termux's package llama-cpp has its libraries, if the bindings are there without their own."""
    prefix = pathlib.Path(os.environ.get("PREFIX") or ".")
    if "com.termux" not in prefix.parts and "TERMUX_VERSION" not in os.environ:
        return None
    folder = prefix / "lib"
    bindings = _bindings_folder()
    if bindings is None or (bindings / "lib" / _LIBRARY_FILE).exists() or not (folder / _LIBRARY_FILE).exists():
        return None
    return str(folder)


def _bindings_folder() -> pathlib.Path | None:
    spec = importlib.util.find_spec("llama_cpp")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return pathlib.Path(folders[0]) if folders else None


@contextlib.contextmanager
def _library_from(folder: str | None) -> Iterator[None]:
    """Has the bindings load their libraries from `folder`, if there is one, and load them on Android at all.

    Since Python 3.13 `sys.platform` is "android" there, for which the bindings know no file name. They come to their
    helper module already loaded, with a function that does.
    """
    name = "llama_cpp._ctypes_extensions"
    bindings = _bindings_folder() if "llama_cpp" not in sys.modules else None
    if bindings is None or (sys.platform != "android" and (folder is None or "LLAMA_CPP_LIB_PATH" in os.environ)):
        yield
        return

    def load_shared_library(base_name: str, base_path: pathlib.Path) -> ctypes.CDLL:
        path = pathlib.Path(folder or base_path) / f"lib{base_name}.so"
        if not path.exists():
            raise FileNotFoundError(f"there is no file {str(path)!r}")
        return ctypes.CDLL(str(path))

    spec = importlib.util.spec_from_file_location(name, bindings / "_ctypes_extensions.py")
    assert spec is not None
    assert spec.loader is not None
    module: types.ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.load_shared_library = load_shared_library  # type: ignore[attr-defined]
    sys.modules[name] = module
    try:
        yield
    except BaseException:
        del sys.modules[name]
        raise


# -- OpenMP ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _quiet_openmp_workers() -> Iterator[None]:
    """Puts the spin settings into the C environment, and puts it back exactly as it was.

    `os.environ` is left alone: the C environment is what OpenMP runtimes read. What the user has set stays.
    """
    if os.name != "posix":
        yield
        return
    getenv = ctypes.CDLL(None).getenv
    getenv.restype, getenv.argtypes = ctypes.c_char_p, [ctypes.c_char_p]
    before = {name: getenv(name.encode()) for name in _SPIN_SETTINGS}
    for name, (value, deciders) in _SPIN_SETTINGS.items():
        if all(getenv(decider.encode()) is None for decider in deciders):
            os.putenv(name, value)
    try:
        yield
    finally:
        for name, previous in before.items():
            if previous is None:
                os.unsetenv(name)
            else:
                os.putenv(name, previous)


def _openmp_files() -> frozenset[pathlib.Path]:
    """Paths of the OpenMP runtimes mapped into this process; empty where /proc does not tell."""
    try:
        maps = pathlib.Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return frozenset()
    # Fields: address, permissions, offset, device, inode, path (which may hold spaces).
    paths = {fields[5] for fields in (line.split(maxsplit=5) for line in maps.splitlines()) if len(fields) == 6}
    return frozenset(pathlib.Path(path) for path in paths if _OPENMP_FILE.search(path))


def _read_openmp_settings(files: frozenset[pathlib.Path]) -> None:
    """Makes freshly loaded LLVM or Intel runtimes read their settings now: they wait for the first use."""
    for path in files:
        if not path.name.startswith("libgomp"):
            ctypes.CDLL(str(path)).omp_get_max_threads()


def _find_spin_note(module: Any, before: frozenset[pathlib.Path]) -> str | None:
    """A sentence if ggml uses an OpenMP runtime that was there before us with its spinning default."""
    if not before or os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE":
        return None
    # Another copy under another soname, such as the one PyTorch ships under a hashed name, is a separate runtime.
    for needed in _needed_openmp(module):
        for path in before:
            variable = "GOMP_SPINCOUNT" if needed.startswith("libgomp") else "KMP_BLOCKTIME"
            if path.name.startswith(needed) and os.environ.get(variable) != "0":
                return (
                    f"{needed} was loaded before llama.cpp, so its worker threads keep spinning while they wait; on a "
                    f"busy machine steps become many times slower: set {variable}=0 before the process starts, or open "
                    "the engine before importing what loads it"
                )
    return None


def _needed_openmp(module: Any) -> set[str]:
    """Sonames of the OpenMP runtimes that the loaded ggml libraries are linked to."""
    folder = pathlib.Path(module._lib._name).parent
    needed: set[str] = set()
    for pattern in ("libggml.so", "libggml-base.so", "libggml-cpu*.so", "libllama.so"):
        for path in folder.glob(pattern):
            with contextlib.suppress(OSError):
                needed.update(name.decode() for name in _OPENMP_NEEDED.findall(path.read_bytes()))
    return needed


# -- compute plug-ins -----------------------------------------------------------------------------------------------


def _load_plugins(module: Any) -> None:
    """Loads backend plug-ins from libllama's folder if the build has none built in."""
    try:
        count = module._lib.ggml_backend_reg_count
        load_all = module._lib.ggml_backend_load_all_from_path
    except AttributeError:
        return  # a platform where a handle does not see the symbols of the libraries it depends on
    count.restype, count.argtypes = ctypes.c_size_t, []
    load_all.restype, load_all.argtypes = None, [ctypes.c_char_p]
    if count() == 0:
        load_all(os.fsencode(pathlib.Path(module._lib._name).parent))


# -- log ------------------------------------------------------------------------------------------------------------


class _ThreadLog(threading.local):
    """The unfinished line and the last errors of one thread: libllama logs on the thread that called it."""

    def __init__(self) -> None:
        self.level = 0
        self.text = ""
        self.errors: collections.deque[str] = collections.deque(maxlen=8)


_thread_log = _ThreadLog()


@contextlib.contextmanager
def captured_errors() -> Iterator[collections.deque[str]]:
    """Warnings and errors that libllama logs on this thread inside the block, the last 8, oldest first."""
    _thread_log.errors = collections.deque(maxlen=8)
    yield _thread_log.errors


def _route_log(module: Any) -> Any:
    """Installs our log callback and returns it; None if the application has installed one of its own before."""
    logger = logging.getLogger("kitelib.llama_cpp")
    logger.addHandler(logging.NullHandler())

    def on_log(level: int, text: bytes | None, _user_data: object) -> None:
        state = _thread_log
        if level != _LEVEL_CONTINUE:
            if state.text:
                _emit(logger, state)
            state.level = level
        state.text += (text or b"").decode("utf-8", "replace")
        if state.text.endswith("\n"):
            _emit(logger, state)

    if _application_logs(module):
        return None
    callback = module.llama_log_callback(on_log)
    module.llama_log_set(callback, ctypes.c_void_p(0))
    return callback


def _application_logs(module: Any) -> bool:
    """Whether the callback in place is neither the library's default nor the one the bindings install."""
    bindings_logger = sys.modules.get("llama_cpp._logger")
    if bindings_logger is None or not hasattr(module, "llama_log_get"):
        return False
    current, user_data = module.llama_log_callback(), ctypes.c_void_p()
    module.llama_log_get(ctypes.byref(current), ctypes.byref(user_data))
    ours = bindings_logger.llama_log_callback
    return ctypes.cast(current, ctypes.c_void_p).value != ctypes.cast(ours, ctypes.c_void_p).value


def _emit(logger: logging.Logger, state: _ThreadLog) -> None:
    line, state.text = state.text.rstrip(), ""
    if not line.strip(" ."):
        return  # progress dots
    serious = _LEVEL_WARN <= state.level < _LEVEL_CONTINUE
    if serious:
        state.errors.append(line)
    # Its warnings are mostly remarks on settings that are meant to be so; what matters is raised as an exception.
    logger.log(_LOG_LEVELS.get(state.level, logging.DEBUG), "%s", line)
