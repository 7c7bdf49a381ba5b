"""Canonical bytes of typed values, and the fingerprint that every block fingerprint of an engine starts from.

Every field is written as a type tag, a length and a body, so that no two different lists of fields have the same
bytes: the text "1" is not the number 1, and ("ab", "c") is not ("a", "bc"). Nothing here depends on the process, its
environment, a file's path or a display name.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final, NewType

from kitelib.errors import ConfigError, InvalidRequestError

__all__ = [
    "FINGERPRINT_BYTES",
    "Fingerprint",
    "derived_fingerprint",
    "encode_fields",
    "root_fingerprint",
    "short",
]

Fingerprint = NewType("Fingerprint", bytes)
"""A computation fingerprint (CF): 32 bytes, SHA-256."""

FINGERPRINT_BYTES: Final = 32

_HEAD = struct.Struct("<cQ")  # type tag, number of bytes that follow
_FLOAT = struct.Struct("<d")


def encode_fields(*fields: Any) -> bytes:
    """The canonical bytes of the fields: equal for equal values, different for different ones.

    A field is a str, bytes, int, bool, None, float, or a sequence or mapping (with str keys, in any order) of those.
    Floats count by their bits, so 0.0 and -0.0 differ, and 1 and 1.0 differ by type.

    Raises:
        InvalidRequestError: a field is of another type; the message names it.
    """
    return b"".join(map(_encode, fields))


def root_fingerprint(
    model_state: bytes,
    execution_path: Mapping[str, str | int | bool],
    namespace: str | None,
    *,
    namespace_secret: bytes | None = None,
    adapter: tuple[bytes, float] | None = None,
) -> Fingerprint:
    """Fingerprint of "nothing computed yet" for one model, one way to compute and one tenant.

    Args:
        model_state: digest of the weights' content and of all that shapes the numbers, 32 bytes.
        execution_path: what else can move a bit: library version, kernels, numerics; see `ModelInfo`.
        namespace: the tenant; None is the engine's own.
        namespace_secret: if given, the tenant enters as HMAC-SHA256 under this secret, so that nobody who only
            knows a tenant's name can compute that tenant's keys.
        adapter: digest of the LoRA adapter's content and the scale it is applied with; None without adapter.

    Raises:
        InvalidRequestError: the model state is not 32 bytes, or a value in `execution_path` has another type.
        ConfigError: the secret is empty.
    """
    if len(model_state) != FINGERPRINT_BYTES:
        raise InvalidRequestError(f"model_state has {len(model_state)} bytes; give a digest of {FINGERPRINT_BYTES}")
    if namespace_secret is None:
        tenant: list[Any] = ["plain", namespace]
    elif not namespace_secret:
        raise ConfigError("namespace_secret is empty; give random bytes, or None for plain namespaces")
    else:
        tenant = ["hmac-sha256", hmac.digest(namespace_secret, encode_fields("kite.namespace", namespace), "sha256")]
    adapter_field = None if adapter is None else [bytes(adapter[0]), float(adapter[1])]
    fields = encode_fields("kite.cf.root", bytes(model_state), execution_path, tenant, adapter_field)
    return Fingerprint(hashlib.sha256(fields).digest())


def derived_fingerprint(parent: bytes, what: str, *fields: Any) -> Fingerprint:
    """Fingerprint of something else that belongs to `parent` and that no chain of blocks leads to: `what` names it,
    `fields` say which one.

    Raises:
        InvalidRequestError: a field has a type that `encode_fields` does not know.
    """
    return Fingerprint(hashlib.sha256(encode_fields("kite.cf.derived", bytes(parent), what, *fields)).digest())


def short(fingerprint: bytes) -> str:
    """The first 16 hexadecimal digits: for people; keys and comparisons use all 32 bytes."""
    return fingerprint[:8].hex()


def _encode(value: Any) -> bytes:
    # bool before int: True is an int in Python, but "flag on" and "count 1" are different fields.
    if value is None:
        return _HEAD.pack(b"n", 0)
    if isinstance(value, bool):
        return _HEAD.pack(b"?", 1) + (b"\x01" if value else b"\x00")
    if isinstance(value, str):
        # surrogatepass: a lone surrogate is a legal str; refusing it here would turn a prompt quirk into an error.
        return _tagged(b"s", str.encode(value, "utf-8", "surrogatepass"))
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _tagged(b"b", bytes(value))
    if isinstance(value, int):
        # One more bit than the magnitude, for the sign; the shortest form is the only form.
        return _tagged(b"i", int(value).to_bytes((value + (value < 0)).bit_length() // 8 + 1, "little", signed=True))
    if isinstance(value, float):
        return _tagged(b"f", _FLOAT.pack(value))
    if isinstance(value, Mapping):
        return _tagged(b"m", _encode_mapping(value))
    if isinstance(value, Sequence):
        return _tagged(b"l", encode_fields(*value))
    raise InvalidRequestError(
        f"a fingerprint field is {value!r} of type {type(value).__name__}; "
        "use str, bytes, int, bool, None, float, or a sequence or mapping of those"
    )


def _encode_mapping(value: Mapping[Any, Any]) -> bytes:
    for key in value:
        if not isinstance(key, str):
            raise InvalidRequestError(f"a fingerprint mapping has the key {key!r}; keys must be str")
    return b"".join(_encode(key) + _encode(value[key]) for key in sorted(value))


def _tagged(tag: bytes, body: bytes) -> bytes:
    return _HEAD.pack(tag, len(body)) + body
