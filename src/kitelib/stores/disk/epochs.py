"""Epochs of a disk pool: one empty file per name and number, of which the greatest counts, so that no lost race and no
interrupted write can lower one."""

from __future__ import annotations

import contextlib
import os
import re
from typing import Final

from kitelib.errors import StoreError
from kitelib.stores.disk.files import create_folder, names_in

__all__ = ["read_epoch", "write_epoch"]

_MAX_EPOCH: Final = 2**63 - 1
_NAME: Final = re.compile(r"[0-9a-z_.-]{1,64}")


def read_epoch(folder: str, name: str) -> int:
    """The epoch of that name; 0 if there is none.

    Raises:
        StoreError: the name is not allowed.
        OSError: the folder can't be read.
    """
    return max(_numbers(folder, name), default=0)


def write_epoch(folder: str, name: str, epoch: int) -> int:
    """Makes the epoch at least `epoch`; returns what it is now.

    Raises:
        StoreError: the name or the number is not allowed, or the folder holds something else.
        OSError: the folder can't be written.
    """
    if isinstance(epoch, bool) or not isinstance(epoch, int) or not 0 <= epoch <= _MAX_EPOCH:
        raise StoreError(f"an epoch is {epoch!r}; give a whole number from 0 to 2**63 - 1")
    if epoch <= read_epoch(folder, name):
        return read_epoch(folder, name)
    create_folder(folder)
    os.close(os.open(f"{folder}/epochs/{name}@{epoch}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    _sync(f"{folder}/epochs")
    numbers = _numbers(folder, name)
    for lower in numbers:
        if lower < max(numbers):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{folder}/epochs/{name}@{lower}")
    return max(numbers)


def _numbers(folder: str, name: str) -> list[int]:
    if not _NAME.fullmatch(name):
        raise StoreError(f"an epoch's name is {name!r}; give 1 to 64 of the characters 0-9 a-z _ . -")
    digits = [each[len(name) + 1 :] for each in names_in(f"{folder}/epochs") if each.startswith(name + "@")]
    return [int(each) for each in digits if each.isdecimal() and len(each) <= 19]


def _sync(path: str) -> None:
    """An epoch must not go back after a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # some file systems can't sync a folder
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
