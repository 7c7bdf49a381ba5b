"""File systems that go wrong as real ones do: small ones that fill up, and folders that may not be used."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__ = ["NOBODY", "mounted", "remounted", "unprivileged"]

NOBODY = 65534


@contextlib.contextmanager
def mounted(folder: Path, num_bytes: int) -> Iterator[Path]:
    """A small file system of its own in a new folder; skips the test where that is not allowed."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
    made = subprocess.run(command, check=False, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"file systems can't be mounted here: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def remounted(folder: Path, option: str) -> None:
    """Makes a file system of `mounted` read-only ("ro") or writable again ("rw")."""
    subprocess.run(["mount", "-o", f"remount,{option}", str(folder)], check=True)


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """Permissions mean nothing to root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
