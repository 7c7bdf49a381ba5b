"""``paged_kvcache_v2/entropy``: lossless compression of 16-bit floats of KV, specified in docs/format.md.

Of a float in a KV block, the lower mantissa bits are noise, but the exponent, the sign and the first mantissa bit are
not: a channel keeps its size, and in K often its sign, from token to token. Each element's upper bits are coded with
range asymmetric numeral systems (Duda, 2013; interleaved as in Giesen, 2014) under a context: the exponent that the
tokens before lead to expect in this channel of this unit, and how sure its sign is. A unit holds all its tables, so
it can be read alone.

The work is done in C where the native part is built. Without it units can still be read, slowly, and are written as
planes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Final

import numpy as np

from kitelib.errors import FormatError
from kitelib.native.library import KvShape, NativeLibrary, native_library
from kitelib.upcycle import entropy_numpy
from kitelib.upcycle.planes import Bytes, PlaneCodec, item_bytes, read_only

__all__ = ["EntropyCodec", "kv_shape"]

_HEAD_BYTES: Final = 8  # method, 7 reserved
_STORED: Final = 0
_PLANES: Final = 1
_ENTROPY: Final = 2
_MANTISSA_BITS: Final = {"float16": 10, "bfloat16": 7}
_MOST_ELEMENTS: Final = 2**30
_planes: Final = PlaneCodec("", split=True)


@dataclasses.dataclass(frozen=True, slots=True)
class EntropyCodec:
    """Stores a method and what it made of the data: as it is, planes, or the entropy coder's body.

    Attributes:
        name: the stored name.
        library: gives the native library, or None to do without.
    """

    name: str
    library: Callable[[], NativeLibrary | None] = native_library

    def encode(self, data: Bytes, dtype: str, shape: tuple[int, ...]) -> bytes | memoryview:
        """What the entropy coder gives, planes where it can't be used, or the data and 8 bytes if that is less."""
        item_bytes(dtype, len(data))
        given, library = kv_shape(len(data), dtype, shape), self.library()
        if given is not None and library is not None:
            blob = library.kv_encode(given, data, head=_head(_ENTROPY))
        else:
            blob = b"".join([_head(_PLANES), _planes.encode(data, dtype, shape)])
        if blob is None or len(blob) > len(data) + _HEAD_BYTES:
            return b"".join([_head(_STORED), data.data])
        return blob

    def decode(self, blob: bytes | memoryview, num_bytes: int, dtype: str, shape: tuple[int, ...]) -> Bytes:
        """The data; read-only. Raises FormatError for anything that no encoder wrote for this shape."""
        view = memoryview(blob).cast("B")
        method, body = view[:1], view[_HEAD_BYTES:]
        if len(view) < _HEAD_BYTES or view[:_HEAD_BYTES] != _head(method[0]):
            raise FormatError("the payload does not start with a method")
        item_bytes(dtype, num_bytes)
        if method[0] == _STORED:
            if len(body) != num_bytes:
                raise FormatError(f"{len(body)} bytes are stored where {num_bytes} are needed")
            return read_only(np.frombuffer(body, np.uint8))
        if method[0] == _PLANES:
            return _planes.decode(body, num_bytes, dtype, shape)
        given = kv_shape(num_bytes, dtype, shape) if method[0] == _ENTROPY else None
        if given is None:
            raise FormatError(f"{num_bytes} bytes of {dtype} can't be stored by method {method[0]}")
        library = self.library()
        return read_only(entropy_numpy.decode(given, body) if library is None else library.kv_decode(given, body))


def kv_shape(num_bytes: int, dtype: str, shape: tuple[int, ...]) -> KvShape | None:
    """The shape that the coder works on: flat data is one row; None if it is not for the coder.

    Raises:
        FormatError: the shape is not that of so many bytes.
    """
    mantissa_bits = _MANTISSA_BITS.get(dtype)
    if mantissa_bits is None or not 0 < num_bytes // 2 <= _MOST_ELEMENTS:
        return None
    if math.prod(shape) * 2 != num_bytes or min(shape) < 1:
        raise FormatError(f"{dtype} of shape {shape} does not take {num_bytes} bytes")
    segments, tokens, channels = shape if len(shape) == 3 else (1, 1, num_bytes // 2)
    return KvShape(segments, tokens, channels, mantissa_bits)


def _head(method: int) -> bytes:
    return bytes([method]) + bytes(_HEAD_BYTES - 1)
