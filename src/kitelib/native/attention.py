"""How ctypes sees the attention functions of the native library (csrc/include/kite.h)."""

from __future__ import annotations

import ctypes
from typing import Any, Final

__all__ = ["BFLOAT16", "FLOAT16", "FLOAT32", "SIGNATURES", "AttentionCall"]

BFLOAT16: Final = 7
FLOAT16: Final = 10
FLOAT32: Final = 23

_POINTERS = ("query", "key", "value", "out", "key_pages", "value_pages")
_STRIDES = (
    "query_row",
    "query_head",
    "key_row",
    "key_head",
    "value_row",
    "value_head",
    "key_block",
    "value_block",
)
_ARRAYS = ("slots", "row_starts", "contexts", "tables", "items", "scratch")
_SIZES = (
    "rows",
    "num_sequences",
    "num_items",
    "item_rows",
    "item_heads",
    "block_tokens",
    "query_heads",
    "kv_heads",
    "key_dim",
    "value_dim",
    "window",
    "kind",
    "kernel",
    "threads",
)


class AttentionCall(ctypes.Structure):
    """`kite_attention`: the arguments of one call."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _STRIDES),
        *((name, ctypes.c_void_p) for name in _ARRAYS),
        ("scratch_bytes", ctypes.c_uint64),
        ("run", ctypes.c_void_p),
        ("table_width", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in _SIZES),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


SIGNATURES: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "kite_attend_scratch": (ctypes.c_uint64, (ctypes.POINTER(AttentionCall),)),
    "kite_attend": (ctypes.c_int64, (ctypes.POINTER(AttentionCall),)),
}
"""Result and arguments of each function."""
