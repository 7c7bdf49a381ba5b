"""Files of the disk tier: their names, their first bytes, and the marker that says which format a folder has.

A value's file is ``values/<shard>/<name>.ru``::

    magic "KITEDSK1" | key bytes u32 | reserved u32 | value bytes u64 | written at f64 | CRC-32 of all before and the key
    key, UTF-8
    value

all little-endian. The name is made from the key and the key stands inside, so a file tells what it is, and one that was
cut, renamed or exchanged for another shows it. Its time of change is when it was written, its time of access when it
was last used.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import struct
import urllib.parse
import zlib
from typing import Final, NamedTuple

from kitelib.errors import StoreError
from kitelib.upcycle.unit import MAX_DATA_BYTES

__all__ = [
    "FORMAT_TEXT",
    "MAX_KEY_BYTES",
    "MAX_VALUE_BYTES",
    "NUM_SHARDS",
    "STALE_ERRORS",
    "BadFileError",
    "FileHead",
    "check_format",
    "create_folder",
    "file_name",
    "header_bytes",
    "is_missing",
    "key_of_name",
    "make_header",
    "names_in",
    "open_for_reading",
    "read_head",
    "read_start",
    "read_value",
    "real_bytes",
    "shard_of",
    "shard_path",
]

FORMAT_TEXT: Final = b"kite disk pool 1\n"
"""Content of the file ``FORMAT``."""
NUM_SHARDS: Final = 64
"""Folders that the values are spread over; each holds about a thousand units of a full 20 GiB pool."""
MAX_VALUE_BYTES: Final = MAX_DATA_BYTES + 2**20
"""Longest value that is written or read: the largest unit, with its header and token ids."""
MAX_KEY_BYTES: Final = 4096
"""Longest key, UTF-8."""
STALE_ERRORS: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE})
"""A file or folder that is not there any more: a miss, no error."""

_MAGIC: Final = b"KITEDSK1"
_FIXED: Final = struct.Struct("<8sIIQd")
_CRC: Final = struct.Struct("<I")
_FIXED_BYTES: Final = _FIXED.size + _CRC.size
_HEAD_READ_BYTES: Final = 512  # the header of every key that `store_key` makes, and the head of its unit, in one read
_SUFFIX: Final = ".ru"
_MAX_NAME_BYTES: Final = 200
_SPECIAL: Final = re.compile(rb"[^0-9a-z_-]")
_NAME: Final = re.compile(r"(?:[0-9a-z_-]|%[0-9a-f]{2})*")
_HASHED: Final = re.compile(r"=[0-9a-f]{64}")
# Without O_NONBLOCK, opening a pipe that somebody put there would wait for ever; files don't mind it.
_READ_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | getattr(os, "O_NOFOLLOW", 0)
_NO_ACCESS_TIME: Final = getattr(os, "O_NOATIME", 0)  # the access time is ours to set


class BadFileError(Exception):
    """The file is not the whole value of the key that it was opened for."""


class FileHead(NamedTuple):
    """What the first bytes of a value's file say.

    Attributes:
        key: the key.
        num_bytes: length of the value.
        written_at: seconds since 1970.
        start: the first bytes of the value, as many as were asked for.
    """

    key: str
    num_bytes: int
    written_at: float
    start: bytes


def is_missing(error: OSError) -> bool:
    """Whether the error says that the file is not there (any more): a miss."""
    return error.errno in STALE_ERRORS


def names_in(folder: str) -> list[str]:
    """Names of what is in a folder; none if it is not there.

    Raises:
        OSError: it can't be read.
    """
    try:
        return os.listdir(folder)
    except OSError as error:
        if is_missing(error):
            return []
        raise


def real_bytes(status: os.stat_result) -> int:
    """Bytes that the file or folder takes in its file system."""
    return status.st_blocks * 512


def shard_of(key: str) -> int:
    """The shard of a key: an even spread over all keys, also where they share their first characters."""
    return zlib.crc32(key.encode("utf-8", "surrogatepass")) % NUM_SHARDS


def shard_path(folder: str, shard: int) -> str:
    """The folder of a shard."""
    return f"{folder}/values/{shard:02x}"


def file_name(key: str) -> str:
    """The name of a key's file: the key with all but ``0-9 a-z _ -`` escaped, so that file systems that don't tell
    upper from lower case can hold it; a digest of it if that gets too long."""
    raw = key.encode("utf-8", "surrogatepass")
    name = _SPECIAL.sub(_escape, raw).decode("ascii")
    if len(name) > _MAX_NAME_BYTES:
        name = "=" + hashlib.sha256(raw).hexdigest()
    return name + _SUFFIX


def _escape(found: re.Match[bytes]) -> bytes:
    return b"%%%02x" % found[0][0]


def key_of_name(name: str, shard: int) -> str | None:
    """The key whose file in that shard has this name; "" if only the file can tell; None if the name isn't ours."""
    stem = name[: -len(_SUFFIX)]
    if not name.endswith(_SUFFIX) or len(stem) > _MAX_NAME_BYTES:
        return None
    if _HASHED.fullmatch(stem):
        return ""
    if not stem or not _NAME.fullmatch(stem):
        return None
    try:
        key = urllib.parse.unquote_to_bytes(stem).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return None
    return key if shard_of(key) == shard and file_name(key) == name else None


def header_bytes(key: str) -> int:
    """Bytes before the value in a key's file."""
    return _FIXED_BYTES + len(key.encode("utf-8", "surrogatepass"))


def make_header(key: str, num_bytes: int, written_at: float) -> bytes:
    """The bytes before the value."""
    raw = key.encode("utf-8", "surrogatepass")
    fixed = _FIXED.pack(_MAGIC, len(raw), 0, num_bytes, written_at)
    return fixed + _CRC.pack(zlib.crc32(raw, zlib.crc32(fixed))) + raw


def open_for_reading(path: str) -> int:
    """A descriptor whose reads leave the access time alone, where the file is ours."""
    try:
        return os.open(path, _READ_FLAGS | _NO_ACCESS_TIME)
    except PermissionError:
        return os.open(path, _READ_FLAGS)


def read_start(path: str, num_bytes: int) -> bytes:
    """The first bytes of one of the pool's own files; b"" if there is an empty one, or a pipe, in its place.

    Raises:
        OSError: it can't be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # as above: waits for no pipe
    try:
        return os.read(descriptor, num_bytes)
    finally:
        os.close(descriptor)


def read_head(descriptor: int, file_bytes: int, wanted: int) -> FileHead:
    """Reads and checks the header, and the first `wanted` bytes of the value.

    Raises:
        BadFileError: no valid header, or its lengths are not those of the file.
        OSError: the file can't be read.
    """
    read = os.pread(descriptor, max(_HEAD_READ_BYTES, _FIXED_BYTES + wanted), 0)
    if len(read) < _FIXED_BYTES:
        raise BadFileError(f"the file has only {len(read)} bytes")
    magic, key_bytes, _, num_bytes, written_at = _FIXED.unpack_from(read)
    if magic != _MAGIC or key_bytes > MAX_KEY_BYTES or num_bytes > MAX_VALUE_BYTES:
        raise BadFileError("the header is not one of this format")
    start = _FIXED_BYTES + key_bytes
    if file_bytes != start + num_bytes:
        raise BadFileError(f"the file has {file_bytes} bytes, but its header says {start + num_bytes}")
    needed = start + min(wanted, num_bytes)
    if len(read) < needed:
        read = os.pread(descriptor, needed, 0)
    raw = read[_FIXED_BYTES:start]
    (crc,) = _CRC.unpack_from(read, _FIXED.size)
    if len(read) < needed or crc != zlib.crc32(raw, zlib.crc32(read[: _FIXED.size])):
        raise BadFileError("the header's checksum is wrong")
    try:
        key = raw.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise BadFileError("the key is not UTF-8") from error
    return FileHead(key, num_bytes, written_at, read[start:needed])


def read_value(descriptor: int, key: str, file_bytes: int, max_bytes: int) -> tuple[FileHead, bytes]:
    """Reads and checks the header, and the whole value of at most `max_bytes`, into one `bytes` without a second copy.

    Raises:
        BadFileError: it is not the whole value of that key.
        OSError: the file can't be read.
    """
    if file_bytes > max_bytes + _FIXED_BYTES + MAX_KEY_BYTES:  # before anything is allocated
        raise BadFileError(f"the file has {file_bytes} bytes, but a value has at most {max_bytes}")
    head = read_head(descriptor, file_bytes, 0)
    if head.key != key:
        raise BadFileError(f"the file holds the key {head.key!r}")
    offset = file_bytes - head.num_bytes
    value = os.pread(descriptor, head.num_bytes, offset)
    while len(value) < head.num_bytes:  # one read gives it all, unless a signal or a file system cuts it short
        more = os.pread(descriptor, head.num_bytes - len(value), offset + len(value))
        if not more:
            raise BadFileError(f"the file ends after {len(value)} of {head.num_bytes} bytes of the value")
        value += more
    return head, value


def check_format(folder: str) -> bool:
    """Whether the folder holds a pool of this format; False if there is nothing yet.

    Raises:
        StoreError: it holds something else.
        OSError: it can't be read.
    """
    try:
        found = read_start(f"{folder}/FORMAT", len(FORMAT_TEXT) + 80)
    except FileNotFoundError:
        found = b""
    if found == FORMAT_TEXT:
        return True
    if found:
        raise StoreError(
            f"the folder {folder!r} has the format {found[:40]!r}, but this release reads {FORMAT_TEXT.strip()!r}; "
            "give another folder, or delete this one if nothing else uses it"
        )
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return False
    # Another process may have made the pool since the first look, or be at it; a file system may be mounted here.
    others = [name for name in names if name not in {"FORMAT", "lost+found"} and not name.startswith("FORMAT.")]
    if "FORMAT" in names and os.path.getsize(f"{folder}/FORMAT"):
        return check_format(folder)
    if others:
        raise StoreError(
            f"the folder {folder!r} is not empty (it holds {min(others)!r}) and is no pool of kitelib; "
            "give an empty or a new folder"
        )
    return False


def create_folder(folder: str) -> None:
    """Makes the folder a pool: first the marker, at once and whole, then the folders below. Harmless if it is one.

    Raises:
        StoreError: it holds something else.
        OSError: it can't be written.
    """
    os.makedirs(folder, mode=0o700, exist_ok=True)  # prompts can be told from what is kept: for the owner only
    if not check_format(folder):
        partial = f"{folder}/FORMAT.{os.getpid()}.{os.urandom(4).hex()}"
        try:
            with open(partial, "xb") as file:
                file.write(FORMAT_TEXT)
                file.flush()
                os.fsync(file.fileno())  # an empty marker after a power cut would make the pool a foreign folder
            os.rename(partial, f"{folder}/FORMAT")
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            raise
    for name in ("values", "temp", "owners", "epochs"):
        os.makedirs(f"{folder}/{name}", mode=0o700, exist_ok=True)
