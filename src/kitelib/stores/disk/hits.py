"""Counts of hits in a disk pool: one small file per model and day, replaced whole under a lock that all processes take.

::

    kite hits 1
    = <root as hexadecimal digits, or "model"> <JSON>
    <count> <root>:<cf>

They are a record for people and tools. A line that can't be read is left out; nothing else depends on them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from kitelib.stores.disk.files import check_format, create_folder, is_missing, names_in, read_start
from kitelib.stores.disk.ledger import take_lock
from kitelib.stores.hits import HIT_DAYS, MODEL_FIELD, check_hits, check_model, is_described, is_member, most_hit

__all__ = ["add_hits", "hit_models", "read_hits"]

_HEADER: Final = "kite hits 1"
_NAME: Final = re.compile(r"([0-9a-z_.-]{1,64})@([0-9]{1,10})")
_MOST_MEMBERS: Final = 10_000  # of a model and day: 1.4 MB, read and written again in some 20 ms by the writing thread
_MOST_ROOTS: Final = 256
_MOST_FILES: Final = 64
_MOST_BYTES: Final = 8 * 2**20
_NOT_OURS: Final = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


def add_hits(folder: str, model: str, day: int, hits: Mapping[str, int], roots: Mapping[str, str]) -> None:
    """Adds to the counts of a day; as of `HitLedger`. Blocks.

    Raises:
        StoreError: an argument is not allowed, the folder holds something else, or is locked.
        OSError: the counts can't be written, but not for want of permission.
    """
    check_hits(model, day, hits, roots)
    try:
        create_folder(folder)
        os.makedirs(f"{folder}/hits", mode=0o700, exist_ok=True)
        with _locked(folder):
            _merge(folder, f"{model}@{day}", hits, roots)
            _remove_old(f"{folder}/hits", day)
    except OSError as error:
        if error.errno not in _NOT_OURS:
            raise


def read_hits(folder: str, model: str, days: Sequence[int], limit: int) -> tuple[dict[str, int], dict[str, str]]:
    """The units with the most hits on these days together; as of `HitLedger`. Blocks; takes no lock.

    Raises:
        StoreError: the model can't have that name, or the folder holds something else.
        OSError: the counts can't be read.
    """
    check_model(model)
    check_format(folder)
    found: dict[str, int] = {}
    texts: dict[str, str] = {}
    for day in sorted(days):
        counts, about = _read(f"{folder}/hits/{model}@{day}")
        for member, count in counts.items():
            found[member] = found.get(member, 0) + count
        texts |= about
    best = most_hit(found, limit)
    wanted = {MODEL_FIELD, *(member.partition(":")[0] for member in best)}
    return best, {name: text for name, text in texts.items() if name in wanted}


def hit_models(folder: str) -> list[str]:
    """Names of the models that have counts, sorted. Blocks.

    Raises:
        StoreError: the folder holds something else.
        OSError: it can't be read.
    """
    check_format(folder)
    return sorted({model for model, _, _ in _files(f"{folder}/hits")})


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
    descriptor = os.open(f"{folder}/hits/lock", flags, 0o600)
    try:
        take_lock(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


def _merge(folder: str, name: str, hits: Mapping[str, int], roots: Mapping[str, str]) -> None:
    path = f"{folder}/hits/{name}"
    counts, texts = _read(path)
    for member, count in hits.items():
        counts[member] = counts.get(member, 0) + count
    if len(counts) > _MOST_MEMBERS + _MOST_MEMBERS // 4:  # not at each new one, which would never get to a second hit
        counts = most_hit(counts, _MOST_MEMBERS)
    for root, text in roots.items():
        if root in texts or len(texts) < _MOST_ROOTS:
            texts[root] = text
    lines = [_HEADER, *(f"= {root} {text}" for root, text in texts.items())]
    lines += [f"{count} {member}" for member, count in counts.items()]
    try:
        with open(f"{path}.new", "wb") as file:  # one name: only who has the lock writes it
            file.write(("\n".join(lines) + "\n").encode("ascii"))
        os.replace(f"{path}.new", path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(f"{path}.new")
        raise


def _read(path: str) -> tuple[dict[str, int], dict[str, str]]:
    """Counts and descriptions in a file; none if there is none, or it is no such file."""
    try:
        lines = read_start(path, _MOST_BYTES).decode("ascii", "replace").split("\n")
    except OSError as error:
        if not is_missing(error):
            raise
        lines = []
    counts: dict[str, int] = {}
    texts: dict[str, str] = {}
    for line in lines[1:-1] if lines and lines[0] == _HEADER else []:
        first, _, rest = line.partition(" ")
        if first == "=":
            root, _, text = rest.partition(" ")
            if is_described(root, text):
                texts[root] = text
        elif first.isdecimal() and len(first) <= 16 and is_member(rest, int(first)):
            counts[rest] = int(first)
    return counts, texts


def _files(folder: str) -> list[tuple[str, int, str]]:
    """Model, day and name of each file of counts."""
    matches = [match for name in names_in(folder) if (match := _NAME.fullmatch(name))]
    return [(match[1], int(match[2]), match[0]) for match in matches]


def _remove_old(folder: str, today: int) -> None:
    """Removes what is over, and the oldest where there is too much of it."""
    files = sorted(_files(folder), key=lambda file: file[1])
    surplus = len(files) - _MOST_FILES
    for position, (_, day, name) in enumerate(files):
        if day <= today - HIT_DAYS or position < surplus:
            with contextlib.suppress(OSError):
                os.unlink(f"{folder}/{name}")
