"""Codecs that keep the data as it is or compress it with zstd, byte plane by byte plane. docs/format.md is the spec.

Splitting floats into byte planes puts sign and exponent, which repeat, apart from the mantissa, which is close to
noise: together they hardly compress, apart the first does (Collet and Kucherawy, RFC 8878, for zstd itself).
"""

from __future__ import annotations

import dataclasses
import itertools
import struct
import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt
import zstandard

from kitelib.errors import FormatError

__all__ = ["ITEM_BYTES", "Bytes", "PlainCodec", "PlaneCodec", "item_bytes", "pack_plane", "read_only", "unpack_plane"]

Bytes = npt.NDArray[np.uint8]

ITEM_BYTES: Final[Mapping[str, int]] = MappingProxyType(
    {
        "bfloat16": 2,
        "float16": 2,
        "float32": 4,
        "float64": 8,
        "float8_e4m3fn": 1,
        "float8_e5m2": 1,
        "int16": 2,
        "int32": 4,
        "int64": 8,
        "int8": 1,
        "uint16": 2,
        "uint32": 4,
        "uint64": 8,
        "uint8": 1,
    }
)
"""Bytes of one element of each element type that a unit may hold. Quantized blocks are "uint8"."""

_LEVEL: Final = 1  # the exponent plane gains nothing from higher levels but costs several times as much
_WORTH: Final = 0.95  # a plane is stored compressed only if that saves at least 5 %
_SMALL_WINDOW: Final = 2**20  # bytes; what any zstd frame may ask for
_PLANES_HEAD: Final = struct.Struct("<B7x")  # number of planes
_PLANE_HEAD: Final = struct.Struct("<B7xQ")  # method, stored bytes
_STORED: Final = 0
_ZSTD: Final = 1


# Element type and shape are part of the contract; not every codec needs them, hence ARG002 below.


@dataclasses.dataclass(frozen=True, slots=True)
class PlainCodec:
    """Stores the data as it is; decoding gives a view of the stored bytes, without a copy."""

    name: str

    def encode(self, data: Bytes, dtype: str, shape: tuple[int, ...]) -> bytes | memoryview:  # noqa: ARG002
        """A view of the data."""
        return data.data

    def decode(self, blob: bytes | memoryview, num_bytes: int, dtype: str, shape: tuple[int, ...]) -> Bytes:  # noqa: ARG002
        """A read-only view of the stored bytes."""
        if len(blob) != num_bytes:
            raise FormatError(f"{len(blob)} bytes are stored where {num_bytes} are needed")
        return read_only(np.frombuffer(blob, np.uint8))


@dataclasses.dataclass(frozen=True, slots=True)
class PlaneCodec:
    """Splits elements into byte planes if `split`, and compresses each plane that gets at least 5 % smaller."""

    name: str
    split: bool

    def encode(self, data: Bytes, dtype: str, shape: tuple[int, ...]) -> bytes | memoryview:  # noqa: ARG002
        """The plane table and the planes, byte 0 of the elements first."""
        num_planes = self._num_planes(dtype, len(data))
        heads, bodies = [], []
        for index in range(num_planes):
            plane = np.ascontiguousarray(data[index::num_planes])
            method, body = pack_plane(plane)
            heads.append((method, len(body)))
            bodies.append(body)
        return b"".join([_pack_table(heads), *bodies])

    def decode(self, blob: bytes | memoryview, num_bytes: int, dtype: str, shape: tuple[int, ...]) -> Bytes:  # noqa: ARG002
        """The data; read-only. Raises FormatError before it allocates anything for sizes that don't fit."""
        view = memoryview(blob).cast("B")
        num_planes = self._num_planes(dtype, num_bytes)
        start = _PLANES_HEAD.size + num_planes * _PLANE_HEAD.size
        if len(view) < start:
            raise FormatError(f"{len(view)} bytes are too few for a table of {num_planes} planes")
        heads = list(_PLANE_HEAD.iter_unpack(view[_PLANES_HEAD.size : start]))
        if view[:start] != _pack_table(heads):
            raise FormatError(f"the plane table does not describe {num_planes} planes")
        ends = list(itertools.accumulate((size for _, size in heads), initial=start))
        if ends[-1] != len(view):
            raise FormatError("the planes do not fill the stored bytes exactly")
        plane_bytes = num_bytes // num_planes
        planes = [(method, view[a:b]) for (method, _), (a, b) in zip(heads, itertools.pairwise(ends), strict=True)]
        for method, body in planes:
            _check_plane(method, body, plane_bytes)
        if num_planes == 1:
            return read_only(_decode_plane(*planes[0], plane_bytes))
        data = np.empty(num_bytes, np.uint8)
        for index, (method, body) in enumerate(planes):
            data[index::num_planes] = _decode_plane(method, body, plane_bytes)
        return read_only(data)

    def _num_planes(self, dtype: str, num_bytes: int) -> int:
        size = item_bytes(dtype, num_bytes)
        return size if self.split and "float" in dtype else 1


def item_bytes(dtype: str, num_bytes: int) -> int:
    """Bytes of one element.

    Raises:
        FormatError: there is no such element type, or `num_bytes` is not a multiple of it.
    """
    try:
        size = ITEM_BYTES[dtype]
    except KeyError:
        raise FormatError(f"the element type {dtype!r} is unknown; known: {', '.join(ITEM_BYTES)}") from None
    if num_bytes % size:
        raise FormatError(f"{num_bytes} bytes are not a whole number of {dtype} elements")
    return size


def _pack_table(heads: list[tuple[int, int]]) -> bytes:
    return _PLANES_HEAD.pack(len(heads)) + b"".join(_PLANE_HEAD.pack(method, size) for method, size in heads)


def pack_plane(plane: Bytes, *, compress: bool = True) -> tuple[int, bytes | memoryview]:
    """The method and the bytes of one plane."""
    body = _contexts.compressor().compress(plane.data) if compress and len(plane) else b""
    if compress and len(body) < _WORTH * len(plane):
        return _ZSTD, body
    return _STORED, plane.data


def unpack_plane(method: int, body: memoryview, num_bytes: int) -> Bytes:
    """The `num_bytes` bytes of one plane, perhaps a view of `body`. Raises FormatError unless it has exactly so many."""
    _check_plane(method, body, num_bytes)
    return _decode_plane(method, body, num_bytes)


def _check_plane(method: int, body: memoryview, num_bytes: int) -> None:
    """Refuses a plane by what it says about itself, so that nothing is allocated for one that can't be right."""
    if method == _STORED:
        if len(body) != num_bytes:
            raise FormatError(f"a plane has {len(body)} bytes where {num_bytes} are needed")
        return
    if method != _ZSTD:
        raise FormatError(f"a plane is stored by the unknown method {method}")
    try:
        frame = zstandard.get_frame_parameters(body)
    except zstandard.ZstdError as error:
        raise FormatError(f"a compressed plane is damaged: {error}") from error
    if frame.content_size != num_bytes or frame.dict_id:
        raise FormatError(f"a compressed plane does not hold the {num_bytes} bytes that are needed")
    if frame.window_size > max(num_bytes, _SMALL_WINDOW):
        raise FormatError(f"a compressed plane asks for a window of {frame.window_size} bytes")


def _decode_plane(method: int, body: memoryview, num_bytes: int) -> Bytes:
    if method == _STORED:
        return np.frombuffer(body, np.uint8)
    try:
        plain = _contexts.decompressor().decompress(body, max_output_size=num_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FormatError(f"a compressed plane is damaged: {error}") from error
    if len(plain) != num_bytes:
        raise FormatError(f"a compressed plane gives {len(plain)} bytes where {num_bytes} are needed")
    return np.frombuffer(plain, np.uint8)


def read_only(array: Bytes) -> Bytes:
    """The same array, from now on read-only."""
    array.flags.writeable = False
    return array


class _Contexts(threading.local):
    """One zstd context per thread: they are costly to make and not safe to share."""

    _compressor: zstandard.ZstdCompressor | None = None
    _decompressor: zstandard.ZstdDecompressor | None = None

    def compressor(self) -> zstandard.ZstdCompressor:
        if self._compressor is None:
            self._compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False, write_content_size=True)
        return self._compressor

    def decompressor(self) -> zstandard.ZstdDecompressor:
        if self._decompressor is None:
            self._decompressor = zstandard.ZstdDecompressor()
        return self._decompressor


_contexts = _Contexts()
