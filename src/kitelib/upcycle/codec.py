"""Codecs: the data of a recyclable unit <-> the bytes that are stored. Byte for byte in docs/format.md.

================================ ========= =========================================================================
stored name                      lossless  stored bytes
================================ ========= =========================================================================
``raw/none``                     yes       the data as it is
``raw/zstd``                     yes       one plane, compressed if that pays
``paged_kvcache_v2/none``        yes       the data as it is
``paged_kvcache_v2/zstd``        yes       one plane per byte of the element, each compressed if that pays
``paged_kvcache_v2/entropy``     yes       16-bit floats under a model of KV (`kitelib.upcycle.entropy`)
``int8_kv/none``                 no        8-bit integers and scales (`kitelib.upcycle.int8`)
``int8_kv/zstd``                 no        the same, compressed if that pays
``fp16_quant/none``              no        float32 as float16 (`kitelib.upcycle.halves`)
``fp16_quant/zstd``              no        the same, one plane per byte, each compressed if that pays
================================ ========= =========================================================================

A lossy codec is never chosen for anybody: whoever names it asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kitelib.abc import Codec
from kitelib.errors import ConfigError, FormatError
from kitelib.upcycle.entropy import EntropyCodec
from kitelib.upcycle.halves import HalvesCodec
from kitelib.upcycle.int8 import Int8Codec
from kitelib.upcycle.planes import ITEM_BYTES, PlainCodec, PlaneCodec

__all__ = ["ITEM_BYTES", "codec_named", "get_codec", "is_lossless"]

_CODECS: Final[Mapping[str, Codec]] = {
    codec.name: codec
    for codec in (
        PlainCodec("raw/none"),
        PlaneCodec("raw/zstd", split=False),
        PlainCodec("paged_kvcache_v2/none"),
        PlaneCodec("paged_kvcache_v2/zstd", split=True),
        EntropyCodec("paged_kvcache_v2/entropy"),
        Int8Codec("int8_kv/none", compress=False),
        Int8Codec("int8_kv/zstd", compress=True),
        HalvesCodec("fp16_quant/none", compress=False),
        HalvesCodec("fp16_quant/zstd", compress=True),
    )
}
_LOSSY: Final = ("int8_kv", "fp16_quant")


def get_codec(name: str, compression: str = "none") -> Codec:
    """The codec of a serializer and a compression, as `ru_types` of the configuration names them.

    Raises:
        ConfigError: there is no such pair.
    """
    codec = _CODECS.get(f"{name}/{compression}")
    if codec is None:
        pairs = ", ".join(_CODECS)
        raise ConfigError(f"there is no serializer {name!r} with compression {compression!r}; there are: {pairs}")
    return codec


def codec_named(stored_name: str) -> Codec:
    """The codec that a stored unit names.

    Raises:
        FormatError: this version has no such codec.
    """
    codec = _CODECS.get(stored_name)
    if codec is None:
        raise FormatError(f"the codec {stored_name!r} is unknown; known: {', '.join(_CODECS)}")
    return codec


def is_lossless(stored_name: str) -> bool:
    """Whether decoding gives exactly the bytes that were encoded."""
    return stored_name.partition("/")[0] not in _LOSSY
