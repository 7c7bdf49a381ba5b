"""Loads the native library and binds its functions (csrc/include/kite.h). ctypes releases the GIL around each call."""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kitelib.errors import FormatError
from kitelib.native import attention, build

__all__ = ["ABI", "BEST", "KvShape", "NativeLibrary", "load_library", "native_library", "native_note"]

_log = logging.getLogger(__name__)

ABI: Final = 1
"""The `KITE_ABI` that these bindings are written for."""

BEST: Final = -1
"""The fastest kernel that the CPU has; 0 is the one that every CPU runs."""
_DAMAGED: Final = -2
_ALIGN: Final = 64
_KEPT_BYTES: Final = 2**23  # a thread keeps its work space between calls up to this size

Bytes = npt.NDArray[np.uint8]


class KvShape(NamedTuple):
    """Shape of a block of 16-bit floats; `mantissa_bits` is 10 for float16 and 7 for bfloat16."""

    segments: int
    tokens: int
    channels: int
    mantissa_bits: int


class _CShape(ctypes.Structure):
    _fields_ = (
        ("segments", ctypes.c_uint64),
        ("tokens", ctypes.c_uint64),
        ("channels", ctypes.c_uint64),
        ("kind", ctypes.c_int32),
        ("kernel", ctypes.c_int32),
    )


_ShapePointer = ctypes.POINTER(_CShape)
_SIGNATURES: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "kite_abi": (ctypes.c_uint32, ()),
    "kite_best_kernel": (ctypes.c_int32, ()),
    "kite_kv_encode_bound": (ctypes.c_uint64, (_ShapePointer,)),
    "kite_kv_encode_scratch": (ctypes.c_uint64, (_ShapePointer,)),
    "kite_kv_decode_scratch": (ctypes.c_uint64, (_ShapePointer,)),
    "kite_kv_encode": (
        ctypes.c_int64,
        (_ShapePointer, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64),
    ),
    "kite_kv_decode": (
        ctypes.c_int64,
        (_ShapePointer, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64),
    ),
    **attention.SIGNATURES,
}


class NativeLibrary:
    """The functions of one loaded library. Safe to use from any number of threads at once."""

    def __init__(self, path: Path) -> None:
        """Raises OSError or AttributeError if the file is no such library, ValueError if it is of another version."""
        self.path = path
        lib = ctypes.CDLL(str(path))
        lib.kite_abi.restype = ctypes.c_uint32
        if lib.kite_abi() != ABI:
            raise ValueError(f"it has version {lib.kite_abi()} where {ABI} is needed")
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(lib, name)
            function.restype, function.argtypes = result, arguments
        self._lib = lib
        self.attend: Any = lib.kite_attend
        """`kite_attend` as it is: takes an `attention.AttentionCall` and gives a status."""
        self.attend_scratch: Any = lib.kite_attend_scratch

    def kernels(self) -> tuple[int, ...]:
        """The kernels that this CPU runs, slowest first."""
        return tuple(range(self._lib.kite_best_kernel() + 1))

    def kv_encode(self, shape: KvShape, data: Bytes, kernel: int = BEST, *, head: bytes = b"") -> bytes | None:
        """`head` and the compressed body of `data`; None if the body would not be smaller than the data.

        Args:
            shape: every size at least 1; at most 2**30 elements.
            data: uint8, shape (num_elements * 2,), contiguous.
            kernel: which machine code to run; the bytes are the same.
            head: bytes to put in front, which saves the caller a copy.
        """
        self._check_bytes(shape, data)
        if data.ctypes.data % 2:
            data = data.copy()
        given = _c_shape(shape, kernel)
        space, scratch_bytes = self._lib.kite_kv_encode_bound(given), self._lib.kite_kv_encode_scratch(given)
        start = scratch_bytes + len(head)
        work = _work_space(start + space)
        scratch, body = work[:scratch_bytes], work[start : start + space]
        size = self._lib.kite_kv_encode(
            given, data.ctypes.data, body.ctypes.data, space, scratch.ctypes.data, scratch_bytes
        )
        if size < 0:
            raise ValueError(f"the native library refuses to encode {shape} with kernel {kernel}")
        if not size:
            return None
        work[scratch_bytes:start] = np.frombuffer(head, np.uint8)
        return work[scratch_bytes : start + size].tobytes()

    def kv_decode(self, shape: KvShape, body: bytes | memoryview, kernel: int = BEST) -> Bytes:
        """The bytes of the elements: uint8, shape (num_elements * 2,).

        Raises:
            FormatError: the body is damaged.
        """
        given = _c_shape(shape, kernel)
        scratch_bytes = self._lib.kite_kv_decode_scratch(given)
        if not scratch_bytes:
            raise ValueError(f"the native library can't decode {shape}")
        scratch = _work_space(scratch_bytes)
        stored = np.frombuffer(body, np.uint8)
        data = np.empty(shape.segments * shape.tokens * shape.channels, np.uint16)
        status = self._lib.kite_kv_decode(
            given, stored.ctypes.data, len(stored), data.ctypes.data, scratch.ctypes.data, scratch_bytes
        )
        if status == _DAMAGED:
            raise FormatError(f"the {len(stored)} compressed bytes are damaged")
        if status < 0:
            raise ValueError(f"the native library refuses to decode {shape} with kernel {kernel}")
        return data.view(np.uint8)

    @staticmethod
    def _check_bytes(shape: KvShape, data: Bytes) -> None:
        needed = 2 * shape.segments * shape.tokens * shape.channels
        if data.dtype != np.uint8 or data.shape != (needed,) or not data.flags.c_contiguous:
            raise ValueError(f"{shape} needs {needed} contiguous bytes; given are {data.dtype} of shape {data.shape}")


@functools.lru_cache(maxsize=1)
def _found() -> tuple[NativeLibrary | None, str]:
    notes = []
    for folder in (Path(build.__file__).resolve().parent, build.cache_folder()):
        library, note = load_library(folder / build.LIBRARY_NAME)
        if library is not None:
            return library, ""
        notes.append(note)
    note = next((note for note in notes if note), "the native part is not built")
    return None, f"{note}; codecs run slower. To build it: python -m kitelib.native.build"


def native_library() -> NativeLibrary | None:
    """The native library; None where it was not built or is of another version. Looked for once per process."""
    return _found()[0]


def native_note() -> str:
    """Why there is no native library and how to get it, for people; "" if there is one."""
    return _found()[1]


def load_library(path: Path) -> tuple[NativeLibrary | None, str]:
    """Loads one file; None and a note if it can't be used, None and "" if it is not there."""
    if not path.exists():
        return None, ""
    try:
        return NativeLibrary(path), ""
    except (OSError, AttributeError, ValueError) as error:
        note = f"the native library {path} is not used: {error}"
        _log.warning("%s", note)
        return None, note


def _c_shape(shape: KvShape, kernel: int) -> _CShape:
    return _CShape(shape.segments, shape.tokens, shape.channels, shape.mantissa_bits, kernel)


class _Work(threading.local):
    space: Bytes | None = None


_work = _Work()


def _work_space(num_bytes: int) -> Bytes:
    """Uninitialised bytes, aligned to 64, that belong to this thread until its next call."""
    space = _work.space
    if space is None or len(space) < num_bytes + _ALIGN:
        space = np.empty(num_bytes + _ALIGN, np.uint8)
        if num_bytes <= _KEPT_BYTES:
            _work.space = space
    offset = -space.ctypes.data % _ALIGN
    return space[offset : offset + num_bytes]
