"""Stand-ins for libraries that a machine lent for the GPU tests may lack and that these tests never call.

kitelib and the test helpers import them at module level: zstandard for compressed blocks, gguf for another kind of model.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["stand_in"]

_NAMES = {"zstandard": ("ZstdError", "ZstdCompressor", "ZstdDecompressor"), "gguf": ("GGUFValueType", "GGUFReader")}


@contextmanager
def stand_in(*names: str) -> Iterator[None]:
    """While it is entered, those of the named libraries that are not installed can be imported, though not used.

    Afterwards they are absent again: other libraries ask whether they are there.
    """
    added = [name for name in names if name not in sys.modules and importlib.util.find_spec(name) is None]
    for name in added:
        module = types.ModuleType(name)
        for attribute in _NAMES[name]:
            setattr(module, attribute, type(attribute, (Exception,), {}))
        sys.modules[name] = module
    try:
        yield
    finally:
        for name in added:
            del sys.modules[name]
