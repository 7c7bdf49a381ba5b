"""Whether a libllama fits the Python bindings, and calls that stay safe if its structures have grown.

The bindings declare llama.cpp's structures by hand, for the release they were made with. A libllama from elsewhere
(``LLAMA_CPP_LIB_PATH``, a package of the system) may be of another release, and the C interface carries no version.
Two things keep that from corrupting memory:

* **Room.** Structures that are returned and passed by value get spare bytes behind their last known field. What a
  newer library appends then comes back to it as it left it, with its own defaults.
* **Known defaults.** A field that was added, removed or moved before the end shifts those behind it, and the default
  parameters, read through the bindings' declaration, stop making sense: a pointer is not NULL, a flag is not what it
  has always been, a count is out of any range. Then the library is refused.

A function that the bindings name and the library lacks fails when the bindings are imported.
"""

from __future__ import annotations

import ctypes
import math
import pathlib
import sys
import types
from collections.abc import Iterator
from typing import Any, Final

from kitelib.errors import BackendError

__all__ = ["bind"]

_ROOM: Final = {"llama_model_params": 512, "llama_context_params": 512, "llama_batch": 64}  # bytes
_FLAGS: Final = {
    "vocab_only": False,
    "use_mmap": True,
    "use_mlock": False,
    "check_tensors": False,
    "use_extra_bufts": True,
    "no_host": False,
    "no_alloc": False,
    "embeddings": False,
    "offload_kqv": True,
    "no_perf": True,
    "op_offload": True,
    "swa_full": True,
    "kv_unified": False,
}
# Wide enough for a default that a later release chooses differently, too narrow for the bits of a neighbour.
_RANGES: Final = {
    "n_ctx": (32, 2**20),
    "n_batch": (32, 2**20),
    "n_ubatch": (32, 2**20),
    "n_seq_max": (1, 4096),
    "n_threads": (1, 4096),
    "n_threads_batch": (1, 4096),
    "flash_attn_type": (-1, 1),
    "type_k": (0, 255),
    "type_v": (0, 255),
    "main_gpu": (0, 64),
    "split_mode": (0, 8),
}
_ANY_INTEGER: Final = (-1, 2**20)
_LEAST_FLOAT, _MOST_FLOAT = 1e-3, 1e9
_SHOWN: Final = 3


def bind(module: Any) -> Any:
    """The bindings' functions, with room in the structures that they pass by value.

    Args:
        module: `llama_cpp.llama_cpp`, imported. It is left as it is, for others in this process.

    Raises:
        BackendError: the library is not the one that came with the bindings, and its structures differ.
    """
    functions = types.SimpleNamespace(**vars(module))
    model, context, batch = (_with_room(getattr(module, name), room) for name, room in _ROOM.items())
    for name, arguments, result in (
        ("llama_model_default_params", [], model),
        ("llama_model_load_from_file", [ctypes.c_char_p, model], None),
        ("llama_context_default_params", [], context),
        ("llama_init_from_model", [module.llama_model_p_ctypes, context], None),
        ("llama_batch_init", [ctypes.c_int32] * 3, batch),
        ("llama_decode", [module.llama_context_p_ctypes, batch], None),
        ("llama_batch_free", [batch], None),
    ):
        function = module._lib[name]  # by index: a function object of its own
        function.argtypes = arguments
        function.restype = getattr(module, name).restype if result is None else result
        setattr(functions, name, function)
    if not _is_own(module):
        differences = [*_wrong_defaults(functions), *_wrong_batch(functions)]
        if differences:
            raise BackendError(_explain(module, differences))
    return functions


def _with_room(structure: Any, num_bytes: int) -> Any:
    return type(structure.__name__, (structure,), {"_fields_": [("_room", ctypes.c_uint8 * num_bytes)]})


def _is_own(module: Any) -> bool:
    """Whether the library lies in the folder of the bindings: then the two were built together."""
    return pathlib.Path(module.__file__).resolve().parent in pathlib.Path(module._lib._name).resolve().parents


def _wrong_defaults(functions: Any) -> Iterator[str]:
    """What can't be true of the default parameters, one phrase per field."""
    for get in (functions.llama_model_default_params, functions.llama_context_default_params):
        params = get()
        base: Any = type(params).__base__
        for name, kind in base._fields_:
            wanted = _violation(params, name, kind, getattr(base, name))
            if wanted:
                yield f"{base.__name__}.{name} {wanted}"


def _violation(params: Any, name: str, kind: Any, field: Any) -> str:
    """Why a default can't be one; "" if it can."""
    if kind is ctypes.c_bool:
        byte = bytes(params)[field.offset]
        wanted = _FLAGS.get(name)
        if byte > 1 or (wanted is not None and byte != wanted):
            return f"is {byte} by default" + ("" if wanted is None else f", not {int(wanted)}")
        return ""
    if kind is ctypes.c_float:
        value = float(getattr(params, name))
        known = value == 0 or (math.isfinite(value) and _LEAST_FLOAT <= abs(value) <= _MOST_FLOAT)
        return "" if known else f"is {value:g} by default"
    if issubclass(kind, ctypes._SimpleCData) and kind is not ctypes.c_void_p:
        value = getattr(params, name)
        least, most = _RANGES.get(name, _ANY_INTEGER)
        return "" if least <= value <= most else f"is {value} by default, not {least} to {most}"
    pointer = bytes(params)[field.offset : field.offset + field.size]
    return "is not NULL by default" if any(pointer) else ""


def _wrong_batch(functions: Any) -> Iterator[str]:
    batch = functions.llama_batch_init(4, 0, 2)
    base: Any = type(batch).__base__
    absent = {"embd"}
    if batch.n_tokens != 0:
        yield f"{base.__name__}.n_tokens is {batch.n_tokens} in a new batch, not 0"
    for name, kind in base._fields_:
        if kind is not ctypes.c_int32 and bool(getattr(batch, name)) == (name in absent):
            yield f"{base.__name__}.{name} is {'not ' if name in absent else ''}NULL in a new batch"
    functions.llama_batch_free(batch)  # whole, as the library made it


def _explain(module: Any, differences: list[str]) -> str:
    version = getattr(sys.modules.get("llama_cpp"), "__version__", "of an unknown version")
    shown = ", ".join(differences[:_SHOWN])
    more = f" and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
    return (
        f"the llama.cpp library {module._lib._name!r}{_build_of(module)} has other structures than the bindings, "
        f"llama-cpp-python {version}: {shown}{more}; install the release of llama-cpp-python that was made for it "
        "(CMAKE_ARGS=-DLLAMA_BUILD=OFF pip install llama-cpp-python==VERSION builds no library), or let "
        "LLAMA_CPP_LIB_PATH name a folder with a library that fits"
    )


def _build_of(module: Any) -> str:
    """Version and commit of ggml as the library tells them, in brackets; "" for one that does not."""
    told = []
    for name in ("ggml_version", "ggml_commit"):
        try:
            function = module._lib[name]
        except AttributeError:
            continue
        function.restype, function.argtypes = ctypes.c_char_p, []
        told.append((function() or b"").decode("utf-8", "replace"))
    return f" (ggml {', '.join(filter(None, told))})" if any(told) else ""
