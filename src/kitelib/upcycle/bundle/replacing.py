"""Replacing a file at once: another one is written beside it, to disk, and takes its name when it is complete."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from typing import IO, Final

from kitelib.errors import ConfigError

__all__ = ["reason", "replaced", "target_of"]

_NEW_MODE: Final = 0o644  # less the umask
_PERMISSIONS: Final = 0o777
_GROUP: Final = 0o070
_LENGTH_BYTES: Final = 8
_MOST_HEADER_BYTES: Final = 2**24  # that are looked through for the name of a bundle's metadata
_MARK: Final = b'"kite.bundle"'


def target_of(path: str | os.PathLike[str]) -> str:
    """The file that is to be written, behind all links; it need not exist, its folder must.

    Raises:
        ConfigError: no file can be there, or what is there is no regular file (a device that would be gone, a folder), or
            a file that is neither a bundle nor empty: a model or a key that was named by mistake stays.
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
    if status is not None and status.st_size and not _is_bundle(target, name):
        raise ConfigError(f"{name!r} exists and is no bundle; give another name, or remove it")
    return target


def reason(error: BaseException) -> str:
    """What an error says, without the number and the name that Python adds to those of the system."""
    return getattr(error, "strerror", None) or str(error)


def _is_bundle(target: str, name: str) -> bool:
    """Whether a file has the header of a bundle, damaged or not, and whichever tool wrote it."""
    try:
        with open(target, "rb") as file:
            header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            return header_bytes <= _MOST_HEADER_BYTES and _MARK in file.read(header_bytes)
    except OSError as error:
        raise ConfigError(
            f"{name!r} exists and can't be read ({error.strerror}), so it may be no bundle; give another name, or remove it"
        ) from error


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
