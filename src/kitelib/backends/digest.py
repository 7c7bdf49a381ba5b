"""Digest of a file's content, computed once per file and remembered."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import tempfile
import time
from collections.abc import Callable

from kitelib.errors import BackendError, ModelFormatError, ModelNotFoundError

__all__ = ["content_digest", "default_cache_dir", "file_state"]

_CHUNK_BYTES = 1 << 20
_SETTLED_NS = 2_000_000_000
"""A file younger than this may change again without its time stamp moving (FAT keeps 2 s), so it is not remembered."""


def default_cache_dir() -> pathlib.Path:
    """``${XDG_CACHE_HOME:-~/.cache}/kite/digests``; not created."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG base directory specification: relative paths are to be ignored.
    root = pathlib.Path(base)
    if not root.is_absolute():
        root = pathlib.Path("~/.cache").expanduser()
    return root / "kite" / "digests"


def content_digest(
    path: str | os.PathLike[str],
    cache_dir: pathlib.Path | None = None,
    progress: Callable[[float], None] | None = None,
) -> bytes:
    """SHA-256 of the file's content, 32 bytes. Blocks for about 1 s per GB when it is not remembered.

    The digest is remembered under the file's real path and used again while size, modification time, change time
    and inode stay the same. A cache that can't be read, written or understood only costs time.

    Args:
        path: the file.
        cache_dir: folder of remembered digests; None means `default_cache_dir()`.
        progress: called with the fraction done, 0 to 1, on the calling thread.

    Raises:
        ModelNotFoundError: no such file.
        ModelFormatError: the file kept changing while it was read.
        BackendError: the file can't be read.
    """
    real = os.path.realpath(path)
    folder = default_cache_dir() if cache_dir is None else cache_dir
    entry = folder / f"{hashlib.sha256(os.fsencode(real)).hexdigest()[:32]}.json"
    try:
        state = file_state(real)
        remembered = _remembered(entry, real, state)
        if remembered is not None:
            if progress is not None:
                progress(1.0)
            return remembered
        digest = _hash(real, state["size"], progress)
        if file_state(real) != state:
            raise ModelFormatError(f"{real!r} changed while it was read; open it when it is complete")
    except FileNotFoundError as error:
        raise ModelNotFoundError(f"no file at {real!r}; check the path") from error
    except OSError as error:
        raise BackendError(f"{real!r} can't be read: {error}") from error
    age_ns = time.time_ns() - max(state["mtime_ns"], state["ctime_ns"])
    if age_ns >= _SETTLED_NS:
        _remember(entry, real, state, digest)
    return digest


def file_state(path: str | os.PathLike[str]) -> dict[str, int]:
    """What stays the same while a file does. The change time catches edits that put the modification time back."""
    status = pathlib.Path(path).stat()
    return {
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,
        "inode": status.st_ino,
    }


def _hash(path: str, size: int, progress: Callable[[float], None] | None) -> bytes:
    digest, done = hashlib.sha256(), 0
    buffer = bytearray(_CHUNK_BYTES)
    view = memoryview(buffer)
    with pathlib.Path(path).open("rb", buffering=0) as file:
        # Up to the size it had: a file that is still being written has no end.
        while done < size and (count := file.readinto(buffer)):
            digest.update(view[:count])
            done += count
            if progress is not None:
                progress(min(1.0, done / max(size, 1)))
    return digest.digest()


def _remembered(entry: pathlib.Path, real: str, state: dict[str, int]) -> bytes | None:
    try:
        found = json.loads(entry.read_bytes())
        if found == {"path": real, **state, "sha256": found["sha256"]}:
            digest = bytes.fromhex(found["sha256"])
            return digest if len(digest) == hashlib.sha256().digest_size else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        pass  # absent or damaged: hash again
    return None


def _remember(entry: pathlib.Path, real: str, state: dict[str, int], digest: bytes) -> None:
    text = json.dumps({"path": real, **state, "sha256": digest.hex()})
    with contextlib.suppress(OSError):
        # Both levels for this user alone: compiled programs lie beside the digests.
        entry.parent.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        entry.parent.mkdir(exist_ok=True, mode=0o700)
        handle, name = tempfile.mkstemp(dir=entry.parent, prefix=entry.stem, suffix=".tmp")
        temporary = pathlib.Path(name)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            temporary.replace(entry)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
