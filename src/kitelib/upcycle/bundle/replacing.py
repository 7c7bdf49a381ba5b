"""Replacing a file at once: another one is written beside it, to disk, and takes its name when it is complete."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from typing import IO, Final

from kitelib.errors import ConfigError

__all__ = ["replaced", "target_of"]

_NEW_MODE: Final = 0o644  # less the umask
_PERMISSIONS: Final = 0o777
_GROUP: Final = 0o070


def target_of(path: str | os.PathLike[str]) -> str:
    """The file that is to be written, behind all links; it need not exist, its folder must.

    Raises:
        ConfigError: no file can be there, or what is there is no regular file (a device that would be gone, a folder).
    """
    name = os.fsdecode(path)
    if not os.path.basename(name) or "\0" in name:
        raise ConfigError(f"the bundle can't be written to {name!r}, which names no file; give the path of a file")
    try:
        target = os.path.realpath(name)
        status = _status(target)
        folder = os.path.dirname(target)
        if status is None and not os.path.isdir(folder):
            raise ConfigError(f"the bundle {name!r} can't be written: there is no folder {folder!r}; make it first")
    except OSError as error:  # a link to itself, a name that is too long
        raise ConfigError(f"the bundle {name!r} can't be written: {error.strerror}; give another path") from error
    if status is not None and not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{name!r} is no regular file, so no bundle may take its place; give the path of a file")
    return target


@contextlib.contextmanager
def replaced(target: str) -> Iterator[IO[bytes]]:
    """A new file, which is on disk and in the place of `target` at the end; an error or a cancellation leaves nothing.

    It gets the permissions, owner and group of what was there, as far as that may be done: who was kept from reading the
    old one is kept from the new one, from its first byte on. Without a file there it gets mode 0644 less the umask.

    Raises:
        OSError: it can't be written.
    """
    folder, name = os.path.split(target)
    old = _status(target)
    temporary = os.path.join(folder, f".{name[:200]}.{secrets.token_hex(8)}.tmp")
    # os.open and not tempfile: the kernel takes the umask into account, which can't be asked for without changing it.
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    file = os.fdopen(os.open(temporary, flags, _NEW_MODE if old is None else stat.S_IRUSR | stat.S_IWUSR), "w+b")
    try:
        with file:
            if old is not None:
                _let_in_the_same(file.fileno(), old)
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
    _sync_folder(folder)


def _let_in_the_same(file: int, old: os.stat_result) -> None:
    mode = stat.S_IMODE(old.st_mode) & _PERMISSIONS
    for owner, group in ((-1, old.st_gid), (old.st_uid, -1)):
        with contextlib.suppress(OSError):  # only root may give files away
            os.fchown(file, owner, group)
    if os.fstat(file).st_gid != old.st_gid:
        mode &= ~_GROUP  # it would be another group's
    os.fchmod(file, mode)


def _status(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def _sync_folder(folder: str) -> None:
    """The name survives a power cut too; file systems that can't sync folders do without."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
