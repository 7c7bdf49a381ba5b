"""ctypes bindings of csrc/cuda/kite_cuda.h: pages are packed on an NVIDIA GPU. What doesn't fit is a note, not a crash."""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from pathlib import Path
from typing import Any, Final

import numpy.typing as npt

from kitelib.errors import BackendError
from kitelib.native import build
from kitelib.native.pages import BAD_ARGUMENT, ITEM, PageLayout

__all__ = ["CUDA_ABI", "CudaLayout", "CudaLibrary", "CudaPages", "cuda_pages", "load_cuda_library"]

_log = logging.getLogger(__name__)

CUDA_ABI: Final = 1
"""The `KITE_CUDA_ABI` that these bindings are written for."""

_Pointer = ctypes.c_void_p
_MOVE: Final = (ctypes.c_int32, (_Pointer, _Pointer, _Pointer, ctypes.c_uint64, _Pointer, _Pointer))


class _Versions(ctypes.Structure):
    _fields_ = (
        ("driver", ctypes.c_int32),
        ("runtime", ctypes.c_int32),
        ("num_devices", ctypes.c_int32),
        ("status", ctypes.c_int32),
    )


_SIGNATURES: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "kite_cuda_version": (_Versions, ()),
    "kite_cuda_error": (ctypes.c_char_p, (ctypes.c_int32,)),
    "kite_cuda_probe": (ctypes.c_int32, (ctypes.c_int32, ctypes.POINTER(ctypes.c_int32))),
    "kite_cuda_create": (ctypes.c_int32, (ctypes.c_int32, ctypes.POINTER(_Pointer))),
    "kite_cuda_destroy": (None, (_Pointer,)),
    "kite_cuda_stream": (_Pointer, (_Pointer,)),
    "kite_cuda_wait": (ctypes.c_int32, (_Pointer, _Pointer)),
    "kite_cuda_layout_create": (ctypes.c_int32, (_Pointer, _Pointer, ctypes.POINTER(_Pointer))),
    "kite_cuda_layout_destroy": (None, (_Pointer,)),
    "kite_cuda_pack": _MOVE,
    "kite_cuda_unpack": _MOVE,
    "kite_cuda_copy": (ctypes.c_int32, (_Pointer, _Pointer, _Pointer, ctypes.c_uint64, _Pointer)),
    "kite_cuda_event_create": (ctypes.c_int32, (_Pointer, ctypes.POINTER(_Pointer))),
    "kite_cuda_event_destroy": (None, (_Pointer,)),
    "kite_cuda_event_record": (ctypes.c_int32, (_Pointer, _Pointer, _Pointer)),
    "kite_cuda_event_wait": (ctypes.c_int32, (_Pointer, _Pointer, _Pointer)),
    "kite_cuda_event_query": (ctypes.c_int32, (_Pointer,)),
    "kite_cuda_event_sync": (ctypes.c_int32, (_Pointer,)),
}


class CudaLibrary:
    """The functions of the loaded library. Loading it needs neither a GPU nor a driver."""

    def __init__(self, path: Path) -> None:
        """Raises OSError or AttributeError if the file is no such library, ValueError if it is of another version."""
        self.path = path
        lib = ctypes.CDLL(str(path))
        lib.kite_cuda_abi.restype = ctypes.c_uint32
        if lib.kite_cuda_abi() != CUDA_ABI:
            raise ValueError(f"it has version {lib.kite_cuda_abi()} where {CUDA_ABI} is needed")
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(lib, name)
            function.restype, function.argtypes = result, arguments
        self.functions = lib

    def problem(self, device: int) -> str:
        """Why a device can't be used, for people; "" if it can."""
        found = self.functions.kite_cuda_version()
        needed = f"the library was built with CUDA {_version(found.runtime)}"
        if not found.driver:
            return f"no device: there is no NVIDIA driver ({needed})"
        if found.driver // 1000 < found.runtime // 1000:
            return (
                f"the NVIDIA driver supports CUDA up to {_version(found.driver)}, but {needed}; update the driver, or "
                "build with an older CUDA: make upcycle_ext CUDA_HOME=..."
            )
        if found.status or not 0 <= device < found.num_devices:
            reason = self.error(found.status) if found.status else f"{found.num_devices} devices were found"
            return f"no device {device}: {reason} (driver for CUDA {_version(found.driver)}, {needed})"
        capability = ctypes.c_int32()
        status = self.functions.kite_cuda_probe(device, capability)
        if status:
            return (
                f"device {device} has compute capability {capability.value / 10:.1f}, and the library does not run on "
                f"it: {self.error(status)}; build it again on this machine: make upcycle_ext"
            )
        return ""

    def error(self, status: int) -> str:
        """A status in words."""
        text: bytes = self.functions.kite_cuda_error(status)
        return text.decode(errors="replace")


class CudaPages:
    """Packs and unpacks on one device. Any thread; work on one stream is done in order.

    Lives until the process ends: at exit the driver may be gone before Python's objects are.
    """

    def __init__(self, library: CudaLibrary, device: int) -> None:
        """Raises BackendError if the device can't be used."""
        self._library = library
        self._handle = _Pointer()
        self._check(library.functions.kite_cuda_create(device, self._handle), f"opening device {device}")

    @property
    def stream(self) -> int:
        """The context's own stream, a cudaStream_t."""
        return int(self._library.functions.kite_cuda_stream(self._handle) or 0)

    def layout(self, layout: PageLayout) -> CudaLayout:
        """A layout, whose addresses are the device's, copied to the device.

        Raises:
            ValueError: it makes no sense.
        """
        handle = _Pointer()
        status = self._library.functions.kite_cuda_layout_create(self._handle, ctypes.byref(layout.c_layout), handle)
        if status == BAD_ARGUMENT:
            raise ValueError("the layout of the cache makes no sense")
        self._check(status, "copying the layout of the cache")
        return CudaLayout(self._library, handle)

    def move(
        self, layout: CudaLayout, items: npt.NDArray[Any], results: int = 0, *, unpack: bool = False, stream: int = 0
    ) -> None:
        """Enqueues packing or unpacking of every item.

        Args:
            items: dtype `ITEM`, with addresses of the device; not needed afterwards.
            results: address, on the device, of one `RESULT` per item, or 0.
            stream: a cudaStream_t; 0 is the context's own.

        Raises:
            ValueError: the items don't fit the layout.
            BackendError: CUDA refused.
        """
        if items.dtype != ITEM or items.ndim != 1 or not items.flags.c_contiguous:
            raise ValueError(f"items are {items.dtype} of shape {items.shape}; needed are contiguous {ITEM} in a row")
        functions = self._library.functions
        function = functions.kite_cuda_unpack if unpack else functions.kite_cuda_pack
        status = function(self._handle, layout.handle, items.ctypes.data, len(items), results or None, stream or None)
        if status == BAD_ARGUMENT:
            raise ValueError(f"{len(items)} items do not fit the cache")
        self._check(status, "unpacking blocks" if unpack else "packing blocks")

    def _check(self, status: int, what: str) -> None:
        if status:
            raise BackendError(f"{what} failed with CUDA error {status}: {self._library.error(status)}")


class CudaLayout:
    """A layout on a device; freed with this object."""

    def __init__(self, library: CudaLibrary, handle: ctypes.c_void_p) -> None:
        self._library = library
        self.handle = handle

    def __del__(self) -> None:
        self._library.functions.kite_cuda_layout_destroy(self.handle)


def load_cuda_library(path: Path) -> tuple[CudaLibrary | None, str]:
    """Loads one file; None and a note if it can't be used."""
    if not path.exists():
        return None, "the CUDA part is not built; to build it: make upcycle_ext"
    try:
        return CudaLibrary(path), ""
    except (OSError, AttributeError, ValueError) as error:
        return None, f"{path} is not used: {error}; to build it: make upcycle_ext"


@functools.lru_cache(maxsize=1)
def _found() -> tuple[CudaLibrary | None, str]:
    note = ""
    for folder in (Path(build.__file__).resolve().parent, build.cache_folder()):
        library, new_note = load_cuda_library(folder / build.CUDA_LIBRARY_NAME)
        if library is not None:
            return library, ""
        note = note or new_note
    return None, note


_lock = threading.Lock()
_contexts: dict[int, tuple[CudaPages | None, str]] = {}


def cuda_pages(device: int = 0) -> tuple[CudaPages | None, str]:
    """What packs on a device, and ""; or None, and why PyTorch's own operations have to do. Asked once per device."""
    with _lock:
        if device not in _contexts:
            library, note = _found()
            if library is not None:
                note = library.problem(device)
            try:
                made = CudaPages(library, device) if library is not None and not note else None
            except BackendError as error:
                made, note = None, str(error)
            if note:
                note = f"{note}; blocks are packed by PyTorch instead"
                _log.warning("%s", note)
            _contexts[device] = (made, note)
        return _contexts[device]


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
