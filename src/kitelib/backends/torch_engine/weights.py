"""Safetensors folders: which files hold the weights, what their content's digest is, and reading them ahead."""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
import os
import pathlib
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kitelib.backends.digest import content_digest
from kitelib.errors import BackendError, ModelFormatError, ModelNotFoundError, UnsupportedOptionError

__all__ = ["files_digest", "read_ahead", "stored_dtype", "weight_files", "weights_digest"]

Progress = Callable[[float], None]

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
_READERS = 8
_CHUNK_BYTES = 16 << 20
_PROBE_BYTES = 4096
_REPORT_S = 0.1


def weight_files(folder: str | os.PathLike[str]) -> list[pathlib.Path]:
    """The safetensors files of a model folder, in name order.

    Raises:
        ModelNotFoundError: no such folder.
        ModelFormatError: no weights, a shard is missing or outside of the folder, or the index is damaged.
        UnsupportedOptionError: the weights are in another format, or it is the folder of an adapter.
    """
    root = pathlib.Path(folder)
    if not root.is_dir():
        raise ModelNotFoundError(f"no model folder at {str(root)!r}; check the path")
    if (root / "adapter_config.json").exists():
        raise UnsupportedOptionError(
            f"{str(root)!r} holds a LoRA adapter (adapter_config.json); open its base model and give this folder in "
            "adapters="
        )
    if (root / _SINGLE).is_file():
        return [root / _SINGLE]
    if not (root / _INDEX).is_file():
        _refuse_without_safetensors(root)
    names = sorted(_indexed_names(root / _INDEX))
    missing = [name for name in names if not (root / name).is_file()]
    if missing:
        raise ModelFormatError(
            f"{str(root)!r} lacks {len(missing)} of its {len(names)} weight files: {_some(missing)}; complete the download"
        )
    return [root / name for name in names]


def weights_digest(
    folder: str | os.PathLike[str], cache_dir: pathlib.Path | None = None, progress: Progress | None = None
) -> bytes:
    """`files_digest` of the weight files of a folder. Raises what `weight_files` and `files_digest` raise."""
    return files_digest(weight_files(folder), cache_dir, progress)


def files_digest(
    files: Sequence[pathlib.Path], cache_dir: pathlib.Path | None = None, progress: Progress | None = None
) -> bytes:
    """SHA-256 over the content of the files in the given order, 32 bytes.

    Files are read and hashed by several threads, about 1 GB per second each, and remembered one by one. Reading also
    brings them into the page cache, from which the weights are mapped afterwards.

    Args:
        files: weight files, at least one.
        cache_dir: where digests are remembered; None means the user's cache folder.
        progress: called with the fraction done, 0 to 1, on the calling thread; what it raises stops the reading and
            comes out of this call.

    Raises:
        ModelNotFoundError, ModelFormatError, BackendError: as of `content_digest`.
    """
    sizes = {file: _size(file) for file in files}
    results = _in_threads(
        files, sizes, lambda file, report: content_digest(file, cache_dir, report), progress or (lambda _: None)
    )
    digests = [results[file] for file in files]
    return digests[0] if len(digests) == 1 else hashlib.sha256(b"".join(digests)).digest()


def read_ahead(files: Sequence[pathlib.Path], progress: Progress | None = None) -> None:
    """Brings the files into the page cache by several threads. Takes no time for what is there already.

    It only saves time, so a file that can't be read is left to whoever needs it.
    """
    sizes = {file: _size(file) for file in files}
    _in_threads(files, sizes, _touch, progress or (lambda _: None))


def stored_dtype(file: pathlib.Path) -> str | None:
    """Type of the first floating-point tensor in a safetensors file, as torch calls it; None if there is none.

    Raises:
        ModelFormatError: not a safetensors file, or a damaged one.
    """
    names = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
    for entry in _header(file).values():
        kind = entry.get("dtype") if isinstance(entry, Mapping) else None
        if kind in names:
            return names[kind]
    return None


def _header(file: pathlib.Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 0 < length <= min(_MAX_HEADER_BYTES, _size(file)):
                raise ModelFormatError(f"{str(file)!r} is not a safetensors file, or is damaged; download it again")
            header = json.loads(stream.read(length))
    except OSError as error:
        raise BackendError(f"{str(file)!r} can't be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{str(file)!r} has a damaged header: {error}; download it again") from error
    if not isinstance(header, dict):
        raise ModelFormatError(f"{str(file)!r} has a damaged header; download it again")
    return header


def _indexed_names(index: pathlib.Path) -> set[str]:
    try:
        found = json.loads(index.read_bytes())["weight_map"]
        names = {str(name) for name in found.values()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelFormatError(f"{str(index)!r} is damaged ({error!r}); download it again") from error
    for name in names:
        # A file list comes from anywhere: it may name files of this folder only.
        if pathlib.PurePath(name).name != name or not name.endswith(".safetensors"):
            raise ModelFormatError(
                f"{str(index)!r} names the weight file {name!r}; only safetensors files of the same folder can be used"
            )
    if not names:
        raise ModelFormatError(f"{str(index)!r} names no weight files; download it again")
    return names


def _refuse_without_safetensors(root: pathlib.Path) -> None:
    if any((root / name).exists() for name in ("pytorch_model.bin", "pytorch_model.bin.index.json")):
        raise UnsupportedOptionError(
            f"{str(root)!r} holds weights as PyTorch pickles (.bin), which can run code when opened; convert them to "
            "safetensors"
        )
    gguf = sorted(path.name for path in root.glob("*.gguf"))
    if gguf:
        raise UnsupportedOptionError(f"{str(root)!r} holds GGUF files ({_some(gguf)}); give the path of one of them")
    raise ModelFormatError(f"{str(root)!r} has neither {_SINGLE} nor {_INDEX}; give a folder with safetensors weights")


def _some(names: Sequence[str], count: int = 4) -> str:
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")


def _size(file: pathlib.Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError as error:
        raise ModelNotFoundError(f"no file at {str(file)!r}; check the path") from error
    except OSError as error:
        raise BackendError(f"{str(file)!r} can't be read: {error}") from error


class _Stopped(Exception):  # noqa: N818 - no error: it ends the readers when the caller gave up
    pass


def _in_threads(
    files: Sequence[pathlib.Path],
    sizes: Mapping[pathlib.Path, int],
    work: Callable[[pathlib.Path, Progress], Any],
    progress: Progress,
) -> dict[pathlib.Path, Any]:
    """Runs ``work(file, report)`` for every file; progress is weighted by size and told on the calling thread."""
    done: dict[pathlib.Path, float] = dict.fromkeys(files, 0.0)
    total = max(sum(sizes.values()), 1)
    stopped, finished = threading.Event(), queue.SimpleQueue[Any]()

    def one(file: pathlib.Path) -> Any:
        def report(fraction: float) -> None:
            if stopped.is_set():
                raise _Stopped
            done[file] = fraction

        return work(file, report)

    with concurrent.futures.ThreadPoolExecutor(_READERS, thread_name_prefix="kite-read") as pool:
        tasks = {file: pool.submit(one, file) for file in files}
        for task in tasks.values():
            task.add_done_callback(finished.put)
        try:
            left = len(tasks)
            while left:
                with contextlib.suppress(queue.Empty):
                    finished.get(timeout=_REPORT_S).result()
                    left -= 1
                progress(min(1.0, sum(sizes[file] * done[file] for file in files) / total))
            progress(1.0)
            return {file: task.result() for file, task in tasks.items()}
        finally:
            stopped.set()
            for task in tasks.values():
                task.cancel()


def _touch(file: pathlib.Path, report: Progress) -> None:
    size, buffer = _size(file), bytearray(_CHUNK_BYTES)
    with contextlib.suppress(OSError), file.open("rb", buffering=0) as stream:
        for start in range(0, size, _CHUNK_BYTES):
            report(start / size)
            if not _resident(stream.fileno(), start, size):
                os.preadv(stream.fileno(), [buffer], start)


def _resident(handle: int, start: int, size: int) -> bool:
    """Whether a chunk of a file is in the page cache, told by its two ends."""
    if not hasattr(os, "RWF_NOWAIT"):
        return False
    end = min(start + _CHUNK_BYTES, size)
    try:
        return all(
            os.preadv(handle, [bytearray(_PROBE_BYTES)], at, os.RWF_NOWAIT) > 0
            for at in (start, max(start, end - _PROBE_BYTES))
        )
    except OSError:  # not there, or the file system can't tell
        return False
