"""LoRA adapters as recyclable units: what an adapter is, the digest that names it, and its stored form.

An adapter is a factor per adapted module and one safetensors file with the two matrices of each. Its digest covers
exactly that, so a copy from anywhere (a folder, a tier, another machine) can be checked before it is used::

    digest = SHA-256( text "kite.adapter", mapping module -> float factor, bytes SHA-256 of the safetensors file )
    data   = u32 number of bytes n | n bytes of JSON {"scales": {module: factor}} | safetensors file
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import struct
import time
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from kitelib.errors import FormatError
from kitelib.fingerprint import FINGERPRINT_BYTES, Fingerprint, encode_fields, short
from kitelib.upcycle.unit import MAX_DATA_BYTES, Expectation, RecyclableUnit

__all__ = [
    "ADAPTER_LAYOUT",
    "ANY_MODEL",
    "AdapterContent",
    "RawTensor",
    "adapter_digest",
    "adapter_unit",
    "content_of",
    "expect_adapter",
    "fits_a_unit",
    "tensors_of",
]

ADAPTER_LAYOUT: Final = "lora_v1"
"""Layout of an adapter's unit."""
ANY_MODEL: Final = hashlib.sha256(encode_fields("kite.adapter.any_model")).digest()
"""Model state of units whose content depends on no model: an adapter is the same whatever it is applied to, and is
looked for before the model is loaded."""

_SIZE: Final = struct.Struct("<I")
_MAX_SCALES_BYTES: Final = 2**24
_NO_PARENT: Final = Fingerprint(bytes(FINGERPRINT_BYTES))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AdapterContent:
    """An adapter, apart from where it came from and what it is called.

    Attributes:
        scales: module -> factor of its product (``lora_alpha`` and rank worked in; the caller's own scale is not).
        weights: a safetensors file, whole.
        digest: `adapter_digest` of both, 32 bytes.
    """

    scales: Mapping[str, float]
    weights: bytes | memoryview
    digest: bytes


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RawTensor:
    """One tensor of a safetensors file.

    Attributes:
        dtype: element type as the file names it, such as ``F32`` or ``BF16``.
        shape: elements per dimension.
        data: uint8, shape (num_bytes,); read-only.
    """

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray[Any, np.dtype[np.uint8]]


def adapter_digest(scales: Mapping[str, float], weights_sha256: bytes) -> bytes:
    """The digest of an adapter's content, 32 bytes; no path, name or time enters it.

    Args:
        scales: module -> factor.
        weights_sha256: SHA-256 of the safetensors file, 32 bytes.
    """
    plain = {module: float(scale) for module, scale in scales.items()}
    return hashlib.sha256(encode_fields("kite.adapter", plain, bytes(weights_sha256))).digest()


def expect_adapter(digest: bytes, model_state: bytes = ANY_MODEL) -> Expectation:
    """What a reader of the pool looks for. The fingerprint is the digest itself."""
    return Expectation("lora", Fingerprint(digest), (), model_state, layout=ADAPTER_LAYOUT)


def fits_a_unit(content: AdapterContent) -> bool:
    """Whether the format's bound leaves room for the adapter."""
    return _SIZE.size + len(_head(content.scales)) + len(content.weights) <= MAX_DATA_BYTES


def adapter_unit(content: AdapterContent, model_state: bytes = ANY_MODEL, *, epoch: int = 0) -> RecyclableUnit:
    """The unit that holds an adapter. Copies the weights once.

    Args:
        content: the adapter; its digest becomes the fingerprint.
        model_state: the model whose units it is kept among.
        epoch: freshness epoch.

    Raises:
        FormatError: the adapter is larger than a unit may be.
    """
    head = _head(content.scales)
    data = b"".join((_SIZE.pack(len(head)), head, content.weights))
    return RecyclableUnit(
        kind="lora",
        cf=Fingerprint(content.digest),
        parent=_NO_PARENT,
        token_ids=np.empty(0, np.uint32),
        model_state=model_state,
        epoch=epoch,
        created_at=time.time(),
        layout=ADAPTER_LAYOUT,
        dtype="uint8",
        shape=(len(data),),
        data=np.frombuffer(data, np.uint8),
    )


def content_of(unit: RecyclableUnit) -> AdapterContent:
    """The adapter in a unit, after checking that it is the one that the unit's fingerprint names. Hashes the weights.

    The weights are a view of the unit's data.

    Raises:
        FormatError: the unit holds something else, is damaged, or its content is not what its fingerprint says.
    """
    if unit.kind != "lora" or unit.layout != ADAPTER_LAYOUT or unit.dtype != "uint8":
        raise FormatError(
            f"a unit of kind {unit.kind!r}, layout {unit.layout!r} and type {unit.dtype!r} is no adapter of layout "
            f"{ADAPTER_LAYOUT!r}"
        )
    view = unit.data.data
    if len(view) < _SIZE.size:
        raise FormatError(f"{len(view)} bytes are too few for an adapter")
    (num_bytes,) = _SIZE.unpack_from(view)
    end = _SIZE.size + num_bytes
    if num_bytes > _MAX_SCALES_BYTES or end > len(view):
        raise FormatError(f"the adapter's factors take {num_bytes} bytes of {len(view)}; that can't be")
    scales = _scales(bytes(view[_SIZE.size : end]))
    weights = view[end:]
    digest = adapter_digest(scales, hashlib.sha256(weights).digest())
    if digest != unit.cf:
        raise FormatError(f"the adapter's content is {short(digest)}, not {short(unit.cf)} as its fingerprint says")
    return AdapterContent(scales, weights, digest)


def tensors_of(content: AdapterContent) -> dict[str, RawTensor]:
    """The tensors by name. Sizes and offsets are checked; nothing in the bytes is executed.

    Raises:
        FormatError: the weights are no safetensors file.
    """
    from safetensors import SafetensorError, deserialize

    try:
        found = deserialize(bytes(content.weights))  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise FormatError(f"the adapter's weights are no safetensors file: {error}") from error
    return {
        name: RawTensor(each["dtype"], tuple(each["shape"]), np.frombuffer(each["data"], np.uint8))
        for name, each in found
    }


def _head(scales: Mapping[str, float]) -> bytes:
    return json.dumps({"scales": dict(sorted(scales.items()))}, ensure_ascii=True).encode("ascii")


def _scales(text: bytes) -> dict[str, float]:
    try:
        plain = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"the adapter's factors are not JSON: {error}") from error
    scales = plain.get("scales") if isinstance(plain, dict) else None
    if not isinstance(scales, dict) or not scales:
        raise FormatError("the adapter has no factors")
    for module, scale in scales.items():
        if not isinstance(scale, float) or not math.isfinite(scale):
            raise FormatError(f"the adapter's factor of {module[:200]!r} is {scale!r}, not a finite number")
    return scales
