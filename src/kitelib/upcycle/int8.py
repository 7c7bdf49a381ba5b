"""``int8_kv``: KV as 8-bit integers, about half the bytes of 16-bit floats. Lossy, opt in; docs/format.md has the bytes.

K has channels that are large in every token, so each channel of K has its own scale over the unit's tokens; V has
none, so each token has one per 64 channels (Liu et al., "KIVI", 2024, found this split best). A scale is the largest
magnitude of its group, kept exactly in the element type: a value is ``q / 127 * scale`` with q from -127 to 127.
Units of fewer than 8 tokens store K like V, because scales per channel would take more room than they save.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kitelib.errors import FormatError
from kitelib.upcycle.planes import Bytes, item_bytes, pack_plane, read_only, unpack_plane

__all__ = ["Int8Codec", "from_float32", "to_float32"]

_GROUP: Final = 64  # channels that share a scale
_CHANNEL_TOKENS: Final = 8  # K has scales per channel from so many tokens on
_HEAD_BYTES: Final = 8  # method of the integers, 7 reserved
_STEPS: Final = np.float32(127)

Floats = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True, slots=True)
class Int8Codec:
    """Scales, then one integer per element; those as one zstd frame if `compress` and that saves at least 5 %."""

    name: str
    compress: bool

    def encode(self, data: Bytes, dtype: str, shape: tuple[int, ...]) -> bytes | memoryview:
        """The same bytes for the same data, on every machine.

        Raises:
            FormatError: the data is not of shape (segments, tokens, channels), its elements are no 16-bit floats, or
                one of them is not finite. Such units have to be stored exactly.
        """
        cube = _check_shape(dtype, shape, len(data))
        values = to_float32(data, dtype).reshape(cube)
        if not np.isfinite(values).all():
            raise FormatError("int8_kv can't hold values that are not finite; store this unit exactly")
        scales: list[Bytes] = []
        integers: list[Bytes] = []
        for part, per_channel in _parts(values):
            highest = np.abs(part).max(axis=1, keepdims=True) if per_channel else _group_highest(part)
            spread = highest if per_channel else np.repeat(highest, _GROUP, axis=2)[:, :, : cube[2]]
            share = np.divide(part, spread, out=np.zeros_like(part), where=spread > 0)
            scales.append(from_float32(highest, dtype))
            integers.append(np.rint(share * _STEPS).astype(np.int8).reshape(-1).view(np.uint8))
        method, body = pack_plane(np.concatenate(integers), compress=self.compress)
        return b"".join([_head(method), *(scale.data for scale in scales), body])

    def decode(self, blob: bytes | memoryview, num_bytes: int, dtype: str, shape: tuple[int, ...]) -> Bytes:
        """The restored elements; read-only. Raises FormatError for anything that no encoder wrote."""
        cube = _check_shape(dtype, shape, num_bytes)
        view = memoryview(blob).cast("B")
        parts = list(_parts(np.broadcast_to(np.float32(0), cube)))
        sizes = [math.prod(_scale_shape(part.shape, per_channel)) for part, per_channel in parts]
        start = _HEAD_BYTES + 2 * sum(sizes)
        if len(view) < start or view[:_HEAD_BYTES] != _head(view[0]):
            raise FormatError(f"{len(view)} bytes do not start with the scales of shape {cube}")
        scales = to_float32(np.frombuffer(view[_HEAD_BYTES:start], np.uint8), dtype)
        if not (np.isfinite(scales).all() and (scales >= 0).all()):
            raise FormatError("a scale is negative or not finite")
        integers = unpack_plane(view[0], view[start:], num_bytes // 2).view(np.int8).reshape(cube)
        if (integers == -128).any():
            raise FormatError("an integer is below -127")
        data, segment, at = np.empty(num_bytes // 2, np.uint16), 0, 0
        for (part, per_channel), size in zip(parts, sizes, strict=True):
            scale = scales[at : at + size].reshape(_scale_shape(part.shape, per_channel))
            spread = scale if per_channel else np.repeat(scale, _GROUP, axis=2)[:, :, : cube[2]]
            end = segment + len(part)
            restored = integers[segment:end].astype(np.float32) / _STEPS * spread
            row = cube[1] * cube[2]
            data[segment * row : end * row] = from_float32(restored, dtype).view(np.uint16)
            segment, at = end, at + size
        return read_only(data.view(np.uint8))


def to_float32(data: Bytes, dtype: str) -> Floats:
    """The elements of a float type as float32, exactly (float64: rounded)."""
    if dtype == "bfloat16":
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    names = {"float16": "<f2", "float32": "<f4", "float64": "<f8"}
    if dtype not in names:
        raise FormatError(f"{dtype} elements can't be read as numbers; only {', '.join(names)} and bfloat16 can")
    return data.view(names[dtype]).astype(np.float32)


def from_float32(values: Floats, dtype: str) -> Bytes:
    """float16 or bfloat16 elements as bytes: rounded to the nearest, ties to even."""
    if dtype == "float16":
        return np.ascontiguousarray(values.astype("<f2")).reshape(-1).view(np.uint8)
    bits = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & np.uint32(1))) >> 16
    return np.where(np.isnan(values.reshape(-1)), bits >> 16 | 0x40, rounded).astype("<u2").view(np.uint8)


def _check_shape(dtype: str, shape: tuple[int, ...], num_bytes: int) -> tuple[int, int, int]:
    item_bytes(dtype, num_bytes)
    if dtype not in {"float16", "bfloat16"}:
        raise FormatError(f"int8_kv is for float16 and bfloat16, not {dtype}; store this unit exactly")
    if len(shape) != 3 or min(shape) < 1 or math.prod(shape) * 2 != num_bytes:
        raise FormatError(
            f"int8_kv needs the shape (segments, tokens, channels) of its {num_bytes} bytes, and got {shape}; "
            "store this unit exactly"
        )
    return shape[0], shape[1], shape[2]


def _parts(values: npt.NDArray[Any]) -> tuple[tuple[npt.NDArray[Any], bool], ...]:
    """K and V, and whether each has its scales per channel."""
    half = len(values) // 2
    parts = ((values[:half], values.shape[1] >= _CHANNEL_TOKENS), (values[half:], False))
    return tuple(part for part in parts if len(part[0]))


def _scale_shape(shape: tuple[int, ...], per_channel: bool) -> tuple[int, int, int]:
    segments, tokens, channels = shape
    return (segments, 1, channels) if per_channel else (segments, tokens, -(-channels // _GROUP))


def _group_highest(part: Floats) -> Floats:
    """The highest magnitude of every `_GROUP` channels: float32, shape (segments, tokens, groups)."""
    starts = np.arange(0, part.shape[2], _GROUP)
    return np.maximum.reduceat(np.abs(part), starts, axis=2)


def _head(method: int) -> bytes:
    return bytes([method]) + bytes(_HEAD_BYTES - 1)
