"""Safetensors files: read strictly and mapped, written as a stream and at once.

The format is https://github.com/huggingface/safetensors: a u64 length n, n bytes of JSON that name each tensor's type,
shape and place, and the tensors' bytes without gaps. This reader takes files from anybody: nothing is allocated but
the header, whose length is bounded, and nothing is believed that the file's size or a type and shape do not bear out.
"""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
import math
import mmap
import os
import stat
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kitelib.errors import ConfigError, FormatError
from kitelib.upcycle.bundle import strict_json
from kitelib.upcycle.bundle.replacing import replaced, target_of

__all__ = [
    "ALIGN",
    "HMAC_KEY",
    "MAX_HEADER_BYTES",
    "SIGNATURE_KEY",
    "Header",
    "MappedFile",
    "Tensor",
    "content_digest",
    "encode_header",
    "entry_bytes",
    "read_chunks",
    "read_header",
    "seal_message",
    "write_file",
]

MAX_HEADER_BYTES: Final = 2**24
"""Most bytes of a header that is read, if the caller does not say otherwise: 16 MiB, some 20000 tensors."""
SIGNATURE_KEY: Final = "kite.signature"
"""Metadata that the content digest leaves out, because it is made from it."""
HMAC_KEY: Final = "kite.hmac"
"""The other one."""

ALIGN: Final = 64
"""The data of a file that is written begins at a multiple of it."""

_LENGTH: Final = struct.Struct("<Q")
_METADATA: Final = "__metadata__"
_ENTRY_FIELDS: Final = frozenset({"dtype", "shape", "data_offsets"})
_ITEM_BYTES: Final[Mapping[str, int]] = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8"), 1),
}
_NO_METADATA: Final = "it has no metadata; a bundle says there what its tensors are"
_MAX_DIMS: Final = 8
_COPY_BYTES: Final = 2**20


class Tensor(NamedTuple):
    """One tensor of a file.

    Attributes:
        dtype: element type as safetensors names it, such as "F16".
        shape: elements per dimension.
        start, stop: where its bytes lie, from the beginning of the data.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclasses.dataclass(frozen=True, slots=True)
class Header:
    """What a file says about itself.

    Attributes:
        metadata: texts by name.
        tensors: by name, in the order of their bytes.
        data_start: where the tensors' bytes begin in the file.
        num_bytes: size of the file.
        digest: `content_digest`, 32 bytes.
    """

    metadata: Mapping[str, str]
    tensors: dict[str, Tensor]
    data_start: int
    num_bytes: int
    digest: bytes

    def forget(self) -> None:
        """Frees the tensors one by one, so that other threads run in between."""
        while self.tensors:
            self.tensors.popitem()


def content_digest(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> bytes:
    """SHA-256 over the canonical JSON of all that a header says, but for the signature and the HMAC; 32 bytes."""
    covered = {name: text for name, text in metadata.items() if name not in (SIGNATURE_KEY, HMAC_KEY)}
    content = [("metadata", _metadata_pieces(covered)), ("tensors", strict_json.object_pieces(_entries(tensors)))]
    digest = hashlib.sha256()
    for piece in strict_json.object_pieces(content):
        digest.update(piece.encode("ascii"))
    return digest.digest()


def seal_message(digest: bytes) -> bytes:
    """What signature and HMAC are made of, given the `content_digest`."""
    return b"kite.bundle\0" + digest


def encode_header(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> bytearray:
    """The file up to its data: length and JSON, padded with spaces to a multiple of 64 bytes."""
    entries = heapq.merge([(_METADATA, _metadata_pieces(metadata))], _entries(tensors), key=itemgetter(0))
    header = bytearray(_LENGTH.size)
    for piece in strict_json.object_pieces(entries):
        header += piece.encode("ascii")
    header += b" " * (-len(header) % ALIGN)
    _LENGTH.pack_into(header, 0, len(header) - _LENGTH.size)
    return header


def entry_bytes(name: str, tensor: Tensor) -> int:
    """Bytes that a tensor takes in a header, with the comma after it."""
    return len(strict_json.dump({name: _entry(tensor)})) - len("{}") + len(",")


def read_header(file: int, *, max_header_bytes: int = MAX_HEADER_BYTES) -> Header:
    """Reads and checks the header of an open file, and nothing else of it.

    Args:
        file: descriptor of a regular file.

    Raises:
        FormatError: it is no safetensors file, is cut off, or says something that can't be.
        OSError: it can't be read.
    """
    num_bytes = os.fstat(file).st_size
    head = _read_exactly(file, 0, _LENGTH.size)
    (header_bytes,) = _LENGTH.unpack(head)
    # First, since the length that a file of another kind seems to state says nothing to anybody.
    if num_bytes > _LENGTH.size and _read_exactly(file, _LENGTH.size, 1) != b"{":
        raise FormatError("it is no bundle, but a file of another kind: its header does not begin with '{'")
    if header_bytes > max_header_bytes:
        raise FormatError(f"the header says that it has {header_bytes} bytes; at most {max_header_bytes} are read")
    data_start = _LENGTH.size + header_bytes
    if data_start > num_bytes:
        raise FormatError(f"the file has {num_bytes} bytes, its header alone says {data_start}")
    if header_bytes == 0:
        raise FormatError("it is no bundle: its header is empty, and does not begin with '{'")
    tensors, metadata = {}, None
    pieces = read_chunks(file, _LENGTH.size, data_start)
    for name, plain in strict_json.members(pieces, header_bytes, "the header", large=_METADATA):
        if name == _METADATA:
            metadata = _metadata(plain)
        else:
            tensors[name] = _tensor(name, plain)
    if metadata is None:
        raise FormatError(_NO_METADATA)
    tensors = _in_order(tensors)
    _check_layout(tensors, num_bytes - data_start)
    return Header(metadata, tensors, data_start, num_bytes, content_digest(metadata, tensors))


class MappedFile:
    """A file mapped read-only, of which parts are given only while it is what it was. Thread-safe.

    Attributes:
        file: its descriptor, until `close`.
        changed: size, modification time or inode were found to be different; stays so.

    Raises:
        FormatError: it is no regular file.
        OSError: it can't be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        # Opening a pipe would wait for a writer; a regular file does not care.
        self.file = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        self.changed = False
        self._data: npt.NDArray[np.uint8] | None = None
        self._lock = threading.Lock()
        # Also where nobody closes it: a bundle that is unloaded is let go of by its last user.
        self._close_file = weakref.finalize(self, os.close, self.file)
        try:
            self._stamp = _stamp(self.file)
        except (FormatError, OSError):
            self.close()
            raise

    def map(self) -> None:
        """Maps the whole file, which must not be empty.

        Raises:
            FormatError: it is not what it was when it was opened.
            OSError: it can't be mapped.
        """
        mapping = mmap.mmap(self.file, 0, access=mmap.ACCESS_READ)
        if len(mapping) != self._stamp[0] or _stamp(self.file) != self._stamp:
            raise FormatError("the file was changed while it was opened")
        self._data = np.frombuffer(mapping, np.uint8)

    def part(self, start: int, stop: int) -> memoryview:
        """Bytes of the mapped file, read-only and not copied; they keep the mapping.

        Raises:
            FormatError: the file is closed, or was changed since it was opened.
        """
        with self._lock:
            # Pages past the end of a file that was cut off can't be touched: the process would be killed (SIGBUS).
            return self._checked()[start:stop].data

    def fileno(self) -> int:
        """The descriptor.

        Raises:
            FormatError: as `part`.
        """
        with self._lock:
            self._checked()
            return self.file

    def _checked(self) -> npt.NDArray[np.uint8]:
        if self._data is None:
            raise FormatError("it is closed")
        if not self.changed:
            try:
                self.changed = _stamp(self.file) != self._stamp
            except OSError:  # a network file system that lost the file
                self.changed = True
        if self.changed:
            raise FormatError("the file was changed since it was opened; open it again")
        return self._data

    def close(self) -> None:
        """Closes the descriptor and lets go of the mapping, which ends when no view of it is left. Idempotent."""
        with self._lock:
            self._close_file()
            self._data = None


def write_file(
    path: str | os.PathLike[str],
    metadata: Mapping[str, str],
    tensors: Mapping[str, Tensor],
    chunks: Iterable[bytes | memoryview],
    *,
    check: Callable[[int], None] = lambda _: None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[int, int]:
    """Writes a file beside its place, to disk, and then puts it there at once; an error or a cancellation leaves nothing.

    Args:
        path: where it goes, as of `target_of`.
        tensors: in the order of their bytes, without gaps.
        chunks: the bytes of all tensors, in any pieces.
        check: called with the descriptor of the complete file before it is put in place; raises to prevent that.
        progress: called with bytes written and bytes in all.

    Returns:
        Bytes of the header, and of the file.

    Raises:
        FormatError: the chunks have more or fewer bytes than the tensors.
        ConfigError: there can be no file, or the header is longer than readers take.
        OSError: it can't be written.
    """
    header = encode_header(metadata, tensors)
    if len(header) > MAX_HEADER_BYTES:
        raise ConfigError(
            f"{len(tensors)} units need a header of {len(header)} bytes, and readers take {MAX_HEADER_BYTES}; take fewer "
            "prompts, several bundles, or larger blocks (block_tokens), or let max_bytes choose"
        )
    total = len(header) + max((tensor.stop for tensor in tensors.values()), default=0)
    with replaced(target_of(path)) as file:
        written = file.write(header)
        for chunk in chunks:
            written += file.write(chunk)
            if progress is not None:
                progress(written, total)
        if written != total:
            raise FormatError(f"{written} bytes were written where the header says {total}")
        file.flush()
        check(file.fileno())
    return len(header), total


def read_chunks(file: int, start: int, stop: int) -> Iterator[bytes]:
    """The bytes of a part of an open file, in pieces of 1 MiB.

    Raises:
        FormatError: the file ends before.
        OSError: it can't be read.
    """
    for at in range(start, stop, _COPY_BYTES):
        yield _read_exactly(file, at, min(_COPY_BYTES, stop - at))


def _read_exactly(file: int, start: int, count: int) -> bytes:
    parts = []
    while count:
        part = os.pread(file, count, start)
        if not part:
            raise FormatError(f"the file ends at byte {start}, {count} bytes too early")
        parts.append(part)
        start, count = start + len(part), count - len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _stamp(file: int) -> tuple[int, int, int]:
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        raise FormatError("it is no regular file")
    return status.st_size, status.st_mtime_ns, status.st_ino


def _entry(tensor: Tensor) -> dict[str, Any]:
    return {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (tensor.start, tensor.stop)}


def _entries(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, list[str]]]:
    """Members for `object_pieces`."""
    return ((name, [strict_json.dump(_entry(tensors[name]))]) for name in sorted(tensors))


def _metadata_pieces(metadata: Mapping[str, str]) -> Iterator[str]:
    return strict_json.object_pieces((name, strict_json.text_pieces(metadata[name])) for name in sorted(metadata))


def _in_order(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in the order of their bytes. numpy sorts many of them ten times as fast as `sorted`."""
    names = list(tensors)
    starts, stops = (
        np.fromiter((tensor[field] for tensor in tensors.values()), np.int64, len(names)) for field in (2, 3)
    )
    return {names[at]: tensors[names[at]] for at in np.lexsort((stops, starts)).tolist()}


def _metadata(plain: Any) -> dict[str, str]:
    if not isinstance(plain, dict):
        raise FormatError(_NO_METADATA)
    for name, text in plain.items():
        if type(text) is not str or not text.isascii() or not name.isascii():
            raise FormatError(f"the metadata {name[:200]!a} is not an ASCII text")
    return plain


def _tensor(name: str, plain: Any) -> Tensor:
    if not isinstance(plain, dict) or plain.keys() != _ENTRY_FIELDS or not name.isascii():
        raise FormatError(f"the tensor {name[:200]!a} does not have exactly the fields dtype, shape and data_offsets")
    dtype, shape, offsets = plain["dtype"], plain["shape"], plain["data_offsets"]
    size = _ITEM_BYTES.get(dtype) if type(dtype) is str else None
    if size is None:
        raise FormatError(f"the tensor {name[:200]!r} has the element type {dtype!a:.200}")
    if not _is_sizes(shape) or len(shape) > _MAX_DIMS:
        raise FormatError(f"the tensor {name[:200]!r} has the shape {shape!a:.200}")
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[1] - offsets[0] != math.prod(shape) * size:
        raise FormatError(f"the tensor {name[:200]!r}, {dtype} of shape {shape!a:.200}, lies at {offsets!a:.200}")
    return Tensor(sys.intern(dtype), tuple(shape), *offsets)


def _is_sizes(plain: Any) -> bool:
    # Exactly int: True is an int to isinstance.
    if not isinstance(plain, list) or not set(map(type, plain)) <= {int}:
        return False
    return min(plain, default=0) >= 0 and max(plain, default=0) < 2**63


def _check_layout(tensors: Mapping[str, Tensor], data_bytes: int) -> None:
    """The tensors must fill the data exactly, in the order given."""
    end = 0
    for name, tensor in tensors.items():
        if tensor.start != end:
            raise FormatError(f"the tensor {name[:200]!r} begins at byte {tensor.start} of the data, not at {end}")
        end = tensor.stop
    if end != data_bytes:
        raise FormatError(f"the tensors take {end} bytes, the file has {data_bytes} for them")
