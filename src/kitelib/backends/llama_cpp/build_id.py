"""Which llama.cpp this is: results can differ in bits from one build to the next."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

from kitelib.fingerprint import encode_fields

__all__ = ["library_digest"]


@functools.cache
def _digest(folder: Path) -> bytes:
    fields: list[Any] = []
    for file in sorted(folder.glob("*")):
        if file.is_file() and not file.is_symlink() and ("ggml" in file.name or "llama" in file.name):
            fields += [file.name, hashlib.sha256(file.read_bytes()).digest()]
    return hashlib.sha256(encode_fields("kite.llama_cpp.build", *fields)).digest()


def library_digest(lib: Any) -> bytes:
    """Digest over the content of the loaded shared libraries, 32 bytes."""
    return _digest(Path(lib._lib._name).resolve().parent)
