"""In which form a unit is stored: exact or not, compressed or not, by where it goes."""

from __future__ import annotations

import contextlib
from typing import Final

from kitelib.abc import Codec
from kitelib.config import PoolConfig
from kitelib.errors import FormatError
from kitelib.native.library import native_library
from kitelib.stores.tier import Tier
from kitelib.upcycle.codec import get_codec, is_lossless
from kitelib.upcycle.unit import RecyclableUnit, pack

__all__ = ["StoredForms"]

# Compressing pays where a tier is slower than what is saved, divided by the time that decoding takes. With the entropy
# coder, at 1.2 GB/s, float16 loses a sixth and bfloat16 a third; with zstd, at about 0.5 GB/s, an eighth is lost.
_ENTROPY_BELOW: Final = {"float16": 200e6, "bfloat16": 420e6}  # bytes per second
_ZSTD_BELOW: Final = 60e6


class StoredForms:
    """Chooses codecs, and says which stored forms may be used.

    Attributes:
        bitwise: whether the model in use gives bitwise numerics, so that logits are never rounded.
    """

    def __init__(self, config: PoolConfig) -> None:
        self.bitwise = True
        self._codec = config.codec
        self._int8 = config.kv_precision == "int8"
        self._half_logits = config.logits_codec == "fp16_quant"

    def in_memory(self, unit: RecyclableUnit) -> bytes:
        """The stored form in process memory. Half-precision KV of natural text only shrinks by a sixth, so compressing
        for memory costs more than it gains; 8-bit integers halve it."""
        return _pack(unit, self._lossy(unit, "none"), get_codec("raw", "none"), None)

    def outside(self, unit: RecyclableUnit, tier: Tier, hmac_key: bytes | None) -> bytes:
        """The stored form in an outer tier: compressed if configured so, or if that makes reading from it faster."""
        exact = get_codec("raw", "none")
        if unit.kind == "kv":
            compression = self._for_speed(unit, tier) if self._codec == "auto" else self._codec
            exact = get_codec("paged_kvcache_v2", compression)
        return _pack(unit, self._lossy(unit, "zstd" if self._codec == "zstd" else "none"), exact, hmac_key)

    def accepts(self, unit: RecyclableUnit) -> bool:
        """Whether a unit's stored form is one that the configuration allows: rounded numbers only where asked for."""
        if is_lossless(unit.codec):
            return True
        if unit.kind == "kv":
            return self._int8
        return unit.kind == "logits" and self._half_logits and not self.bitwise

    def _lossy(self, unit: RecyclableUnit, compression: str) -> Codec | None:
        if unit.kind == "kv" and self._int8 and len(unit.shape) == 3:
            return get_codec("int8_kv", compression)
        if unit.kind == "logits" and self._half_logits and not self.bitwise:
            return get_codec("fp16_quant", compression)
        return None

    @staticmethod
    def _for_speed(unit: RecyclableUnit, tier: Tier) -> str:
        bytes_per_s = tier.cost.bytes_per_s
        if native_library() is not None and unit.dtype in _ENTROPY_BELOW:
            return "entropy" if bytes_per_s < _ENTROPY_BELOW[unit.dtype] else "none"
        return "zstd" if bytes_per_s < _ZSTD_BELOW else "none"


def _pack(unit: RecyclableUnit, lossy: Codec | None, exact: Codec, hmac_key: bytes | None) -> bytes:
    if lossy is not None:
        with contextlib.suppress(FormatError):  # values that the lossy form can't hold, such as infinity
            return pack(unit, lossy, hmac_key=hmac_key)
    return pack(unit, exact, hmac_key=hmac_key)
