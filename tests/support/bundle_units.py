"""A small bundle with everything in it that a bundle can have, and raw safetensors files that may be anything."""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kitelib.upcycle.bundle import BundleRoot, ModelIdentity
from kitelib.upcycle.unit import RecyclableUnit
from tests.support.units import INFO, LAYOUT, ROOT, chain_of, kv_unit, logits_unit

__all__ = ["BUNDLE_ROOT", "IDENTITY", "PROMPT", "header_of", "raw_file", "sample_units", "write_raw"]

PROMPT = (1, 2, 3, 4, 5, 6, 7, 8, 9, 1)
IDENTITY = dataclasses.replace(ModelIdentity.of(INFO), state_parts={"weights": "0123"})
BUNDLE_ROOT = BundleRoot(ROOT, {"layout": LAYOUT, "threads": 1, "flash": True}, "tenant", (bytes(32), 0.5))


def sample_units() -> list[RecyclableUnit]:
    """Two full blocks and the tail of a prompt in three dimensions, bfloat16 KV of another, logits, and what followed."""
    chain = chain_of(PROMPT)
    blocks = [kv_unit(PROMPT, start, min(start + 4, len(PROMPT))) for start in (0, 4, 8)]
    blocks = [dataclasses.replace(unit, shape=(3, len(unit.token_ids), 4)) for unit in blocks]
    wide = dataclasses.replace(kv_unit([9, 8, 7, 6], 0, 4), dtype="bfloat16", shape=(3, 4, 4))
    followed = np.array([1, 5, 6, 7], "<u4")
    completion = dataclasses.replace(
        logits_unit(PROMPT),
        kind="completion",
        cf=chain.end(),
        layout="kite.completion",
        dtype="uint32",
        shape=(4,),
        data=followed.view(np.uint8),
    )
    return [*blocks, wide, logits_unit(PROMPT), completion]


def raw_file(header: str | bytes | Mapping[str, Any], data: bytes = b"", *, length: int | None = None) -> bytes:
    """A safetensors file with any header; `length` is what it says of the header's length."""
    text = json.dumps(header) if isinstance(header, Mapping) else header
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def write_raw(path: Path, header: str | bytes | Mapping[str, Any], data: bytes = b"", **options: Any) -> Path:
    """`raw_file` on disk."""
    path.write_bytes(raw_file(header, data, **options))
    return path


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    """A file's header as it is, and the data after it."""
    blob = path.read_bytes()
    (length,) = struct.unpack_from("<Q", blob)
    return json.loads(blob[8 : 8 + length]), blob[8 + length :]
