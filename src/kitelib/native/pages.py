"""ctypes bindings of the pages library (csrc/include/kite_pages.h): blocks of a paged KV cache to one piece and back.

ctypes releases the GIL around each call. The header defines the packed forms and the checksum.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kitelib.native import library

__all__ = [
    "BAD_ARGUMENT",
    "DAMAGED",
    "FORMS",
    "ITEM",
    "KINDS",
    "NOT_FINITE",
    "PAGES_ABI",
    "RESULT",
    "PageLayout",
    "PagesLibrary",
    "Segment",
    "load_pages_library",
    "pages_library",
    "pages_note",
]

PAGES_ABI: Final = 1
"""The `KITE_PAGES_ABI` that these bindings are written for."""

FORMS: Final = {"raw": 0, "planes": 1, "int8": 2, "fp8": 3}
"""Packed forms; the last two are lossy."""
KINDS: Final = {"bfloat16": 7, "float16": 10}
"""Element types that the lossy forms take, and their numbers of mantissa bits."""

BAD_ARGUMENT: Final = -1
DAMAGED: Final = -2
NOT_FINITE: Final = -3

ITEM: Final = np.dtype(
    [("block", "u8"), ("first", "u4"), ("tokens", "u4"), ("packed", "u8"), ("packed_bytes", "u8")], align=True
)
"""An item: tokens first .. first + tokens - 1 of a block; address and size of their packed form."""
RESULT: Final = np.dtype([("checksum", "u8"), ("status", "i8")], align=True)
"""What packing or unpacking an item gave; status is 0, `NOT_FINITE` or `DAMAGED`."""

Bytes = npt.NDArray[np.uint8]


class Segment(NamedTuple):
    """Where one piece of every token is: address of block 0, bytes from a block to the next, bytes of a token."""

    base: int
    block_stride: int
    token_bytes: int


class _CSegment(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_uint64),
        ("block_stride", ctypes.c_uint64),
        ("token_bytes", ctypes.c_uint64),
        ("before", ctypes.c_uint64),
    )


class _CLayout(ctypes.Structure):
    _fields_ = (
        ("segments", ctypes.POINTER(_CSegment)),
        ("num_segments", ctypes.c_uint64),
        ("num_blocks", ctypes.c_uint64),
        ("block_tokens", ctypes.c_uint32),
        ("item_bytes", ctypes.c_uint32),
        ("kind", ctypes.c_int32),
        ("form", ctypes.c_int32),
    )


class PageLayout:
    """Where the pages of a cache are and in which form they are packed; immutable. Keeps no memory alive.

    Args:
        segments: pieces of a token in their packed order: K of every layer, then V of every layer.
        num_blocks: blocks of the cache.
        block_tokens: tokens of a block.
        item_bytes: bytes of an element.
        kind: a value of `KINDS` for the lossy forms, else 0.
        form: a value of `FORMS`.
    """

    def __init__(
        self, segments: Sequence[Segment], num_blocks: int, block_tokens: int, item_bytes: int, kind: int, form: int
    ) -> None:
        self._segments = (_CSegment * len(segments))()
        before = 0
        for c_segment, segment in zip(self._segments, segments, strict=True):
            c_segment.base, c_segment.block_stride, c_segment.token_bytes = segment
            c_segment.before = before
            before += segment.token_bytes
        self.token_bytes = before
        self.form = form
        self.c_layout = _CLayout(
            ctypes.cast(self._segments, ctypes.POINTER(_CSegment)),
            len(segments),
            num_blocks,
            block_tokens,
            item_bytes,
            kind,
            form,
        )


_LayoutPointer = ctypes.POINTER(_CLayout)
_MOVE: Final = (
    ctypes.c_int64,
    (_LayoutPointer, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32),
)
_SIGNATURES: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "kite_page_bytes": (ctypes.c_uint64, (_LayoutPointer, ctypes.c_uint32)),
    "kite_pack_pages": _MOVE,
    "kite_unpack_pages": _MOVE,
    "kite_checksum": (ctypes.c_uint64, (ctypes.c_void_p, ctypes.c_uint64)),
}


class PagesLibrary:
    """The functions of one loaded library. Safe to use from any number of threads at once."""

    def __init__(self, path: Path) -> None:
        """Raises OSError or AttributeError if the file is no such library, ValueError if it is of another version."""
        self.path = path
        lib = ctypes.CDLL(str(path))
        lib.kite_pages_abi.restype = ctypes.c_uint32
        if lib.kite_pages_abi() != PAGES_ABI:
            raise ValueError(f"its pages part has version {lib.kite_pages_abi()} where {PAGES_ABI} is needed")
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(lib, name)
            function.restype, function.argtypes = result, arguments
        self._lib = lib

    def page_bytes(self, layout: PageLayout, tokens: int) -> int:
        """Bytes of `tokens` packed tokens of one block.

        Raises:
            ValueError: the layout or the number makes no sense.
        """
        num_bytes: int = self._lib.kite_page_bytes(layout.c_layout, max(tokens, 0))
        if not num_bytes:
            raise ValueError(f"a block can't be packed: {tokens} tokens, {_describe(layout)}")
        return num_bytes

    def move(
        self,
        layout: PageLayout,
        items: npt.NDArray[np.void],
        results: npt.NDArray[np.void] | None = None,
        *,
        unpack: bool = False,
        runner: int | None = None,
        threads: int = 1,
    ) -> int:
        """Packs every item, or unpacks it. The caller keeps all memory alive and is alone in writing to it.

        Args:
            items: dtype `ITEM`, one dimension.
            results: dtype `RESULT`, one per item, or None if nobody wants checksums.
            runner: address of a function like GOMP_parallel, on whose threads to run; None: on the calling thread.
            threads: most threads to use.

        Returns:
            0, or `NOT_FINITE` or `DAMAGED` if an item had that status.

        Raises:
            ValueError: items don't fit the layout; nothing was read or written.
        """
        if items.dtype != ITEM or items.ndim != 1 or not items.flags.c_contiguous:
            raise ValueError(f"items are {items.dtype} of shape {items.shape}; needed are contiguous {ITEM} in a row")
        if results is not None and (results.dtype != RESULT or results.shape != items.shape):
            raise ValueError(f"results are {results.dtype} of shape {results.shape} for {len(items)} items")
        function = self._lib.kite_unpack_pages if unpack else self._lib.kite_pack_pages
        status: int = function(
            layout.c_layout,
            items.ctypes.data,
            len(items),
            None if results is None else results.ctypes.data,
            runner,
            max(threads, 1),
        )
        if status == BAD_ARGUMENT:
            raise ValueError(f"{len(items)} items do not fit the cache: {_describe(layout)}")
        return status

    def checksum(self, data: Bytes) -> int:
        """The 64-bit checksum of contiguous bytes."""
        if data.dtype != np.uint8 or not data.flags.c_contiguous:
            raise ValueError(f"a checksum needs contiguous bytes, not {data.dtype}")
        result: int = self._lib.kite_checksum(data.ctypes.data, data.size)
        return result


def _describe(layout: PageLayout) -> str:
    given = layout.c_layout
    form = next((name for name, number in FORMS.items() if number == given.form), given.form)
    return (
        f"{given.num_segments} segments with {layout.token_bytes} bytes per token in all, {given.num_blocks} blocks of "
        f"{given.block_tokens} tokens, elements of {given.item_bytes} bytes, form {form}"
    )


@functools.lru_cache(maxsize=1)
def _found() -> tuple[PagesLibrary | None, str]:
    native = library.native_library()
    if native is None:
        return None, library.native_note()
    return load_pages_library(native.path)


def pages_library() -> PagesLibrary | None:
    """The library; None where it was not built or is of another version. Looked for once per process."""
    return _found()[0]


def pages_note() -> str:
    """Why there is no library and how to get it, for people; "" if there is one."""
    return _found()[1]


def load_pages_library(path: Path) -> tuple[PagesLibrary | None, str]:
    """Loads one file; None and a note if it can't be used."""
    try:
        return PagesLibrary(path), ""
    except (OSError, AttributeError, ValueError) as error:
        return None, f"pages are packed more slowly, because {path} is not used: {error}. To build it: make upcycle_ext"
