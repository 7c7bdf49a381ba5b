"""Made-up KV: channels of different size, K partly of one sign, as the codecs expect it of real models."""

from __future__ import annotations

import numpy as np

__all__ = ["MANTISSA_BITS", "as_bfloat16", "kv_like"]

MANTISSA_BITS = {"float16": 10, "bfloat16": 7}


def as_bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 rounded to bfloat16, ties to even; as uint16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def kv_like(shape: tuple[int, int, int], dtype: str, seed: int = 0, spread: float = 1.0) -> np.ndarray:
    """Elements of shape (segments, tokens, channels) as bytes. `spread` is that of the channels' sizes, in octaves."""
    rng = np.random.default_rng(seed)
    segments, _, channels = shape
    size = np.exp2(spread * rng.standard_normal((segments, 1, channels)))
    middle = rng.standard_normal((segments, 1, channels)) * (np.arange(segments) < segments // 2)[:, None, None]
    values = np.clip((middle + 0.7 * rng.standard_normal(shape)) * size, -6e4, 6e4).astype(np.float32)
    elements = as_bfloat16(values) if dtype == "bfloat16" else values.astype(np.float16).view(np.uint16)
    return elements.reshape(-1).view(np.uint8)
