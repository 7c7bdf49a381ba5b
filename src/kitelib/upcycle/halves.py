"""``fp16_quant``: float32 logits stored as float16. Lossy: sampling from them can differ, so it is opt in."""

from __future__ import annotations

import dataclasses
from typing import Final

import numpy as np

from kitelib.errors import FormatError
from kitelib.upcycle.planes import Bytes, PlaneCodec, item_bytes, read_only

__all__ = ["HalvesCodec"]

_LARGEST: Final = np.float32(65504)  # of float16; infinities stay what they are
_planes: Final = PlaneCodec("", split=True)


@dataclasses.dataclass(frozen=True, slots=True)
class HalvesCodec:
    """float32 rounded to the nearest float16, ties to even; finite values that are too large become the largest."""

    name: str
    compress: bool

    def encode(self, data: Bytes, dtype: str, shape: tuple[int, ...]) -> bytes | memoryview:
        """Half the bytes, or planes of them. Raises FormatError for other element types than float32."""
        _check_dtype(dtype, len(data))
        values = data.view("<f4")
        values = np.where(np.isinf(values), values, np.clip(values, -_LARGEST, _LARGEST))
        halves = values.astype("<f2").view(np.uint8)
        return _planes.encode(halves, "float16", shape) if self.compress else halves.data

    def decode(self, blob: bytes | memoryview, num_bytes: int, dtype: str, shape: tuple[int, ...]) -> Bytes:
        """float32 again; read-only."""
        _check_dtype(dtype, num_bytes)
        halves = np.frombuffer(blob, np.uint8)
        if self.compress:
            halves = _planes.decode(blob, num_bytes // 2, "float16", shape)
        if len(halves) != num_bytes // 2:
            raise FormatError(f"{len(halves)} bytes are stored where {num_bytes // 2} are needed")
        return read_only(halves.view("<f2").astype("<f4").view(np.uint8))


def _check_dtype(dtype: str, num_bytes: int) -> None:
    item_bytes(dtype, num_bytes)
    if dtype != "float32":
        raise FormatError(f"fp16_quant is for float32, not {dtype}; store it with another serializer")
