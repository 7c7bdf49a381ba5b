"""How far a lossy codec moves the numbers."""

from __future__ import annotations

import numpy as np

from kitelib.abc import Codec
from kitelib.upcycle.int8 import to_float32
from kitelib.upcycle.planes import Bytes

__all__ = ["drift"]


def drift(codec: Codec, data: Bytes, dtype: str, shape: tuple[int, ...]) -> float:
    """Root mean square of the error that storing and restoring makes, relative to that of the values.

    0.0 exactly if every byte comes back. How much of it answers feel is another question: the benchmark
    tests/benchmarks/pool_codec.py measures that on a model.

    Args:
        codec: what to store with.
        data: uint8, shape (num_bytes,); elements of `dtype`, a float type, all finite.
        dtype, shape: of the elements.

    Raises:
        FormatError: the codec can't store such data, or its elements are no numbers.
    """
    restored = codec.decode(codec.encode(data, dtype, shape), len(data), dtype, shape)
    if np.array_equal(restored, data):
        return 0.0
    exact = to_float32(data, dtype).astype(np.float64)
    error = to_float32(restored, dtype).astype(np.float64) - exact
    return float(np.sqrt(np.sum(error**2) / max(np.sum(exact**2), np.finfo(np.float64).tiny)))
