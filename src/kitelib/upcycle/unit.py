"""The recyclable unit (RU) and its stored form, specified byte by byte in docs/format.md.

A stored unit describes itself, holds no code, and is safe to read from an untrusted source: every size is checked
before anything is allocated for it, and every failure is a `FormatError`, which callers treat as a miss. A matching
key alone never makes a unit usable: `unpack` compares it with what the caller is looking for.
"""

from __future__ import annotations

import dataclasses
import hmac
import math
import struct
import zlib
from typing import Any, Final, Literal, cast

import numpy as np
import numpy.typing as npt

from kitelib.abc import Codec
from kitelib.errors import FormatError
from kitelib.fingerprint import (
    FINGERPRINT_BYTES,
    Fingerprint,
    TokenIds,
    as_token_ids,
    block_fingerprint,
    end_fingerprint,
    short,
)
from kitelib.upcycle.codec import ITEM_BYTES, codec_named

__all__ = [
    "HEAD_BYTES",
    "MAX_DATA_BYTES",
    "MAX_TOKEN_IDS",
    "Expectation",
    "Kind",
    "RecyclableUnit",
    "UnitHead",
    "inspect",
    "pack",
    "peek",
    "unpack",
]

Kind = Literal["kv", "logits", "completion", "lora"]

MAX_DATA_BYTES: Final = 2**30
"""Most bytes of data one unit may hold."""
MAX_TOKEN_IDS: Final = 2**16
"""Most token ids one unit may cover."""

_MAGIC: Final = b"KITERU\r\n"  # the line end shows a transfer in text mode
_VERSION: Final = 1
_AUTHENTICATED: Final = 1  # flag
_ALIGN: Final = 64  # the payload starts at a multiple of it
_MAX_DIMS: Final = 8
_TAG_BYTES: Final = 32
# magic, version, flags, header bytes | kind, layout, dtype and codec length, dimensions, reserved | token ids,
# payload checksum | payload bytes, data bytes, epoch | created at | cf, parent, model state
_FIXED: Final = struct.Struct("<8sHHI 5B3s II QQQ d 32s32s32s")
HEAD_BYTES: Final = _FIXED.size
"""Bytes at the start of a stored unit that `peek` needs."""
_CRC: Final = struct.Struct("<I")
_KIND_CODES: Final[dict[str, int]] = {"kv": 1, "logits": 2, "completion": 3, "lora": 4}
_KINDS: Final[dict[int, Kind]] = {code: cast(Kind, kind) for kind, code in _KIND_CODES.items()}


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RecyclableUnit:
    """What one finished computation left behind.

    `cf` is the fingerprint of exactly the tokens in `token_ids` after `parent` (for "lora": of the adapter's
    content, with no tokens), so a unit can be checked against its own key.

    ============== ============================================== ==========================================
    kind           `token_ids`, `cf`                              `data`
    ============== ============================================== ==========================================
    ``kv``         a full block, `block_fingerprint`; or a        KV of those tokens, all layers
                   prompt's tail, `end_fingerprint`
    ``logits``     a prompt's tail, `end_fingerprint`             logits after the prompt's last token
    ``completion`` a prompt's tail, `end_fingerprint`             uint32 ids of the tokens that followed
    ``lora``       none                                           adapter weights
    ============== ============================================== ==========================================

    Attributes:
        kind: what `data` is.
        cf: fingerprint, 32 bytes.
        parent: fingerprint of the block before (or the root), 32 bytes.
        token_ids: uint32, shape (num_tokens,).
        model_state: digest of the model that computed it, 32 bytes.
        epoch: freshness epoch, 0 to 2**64 - 1.
        created_at: seconds since 1970, UTC.
        layout: id of the byte layout of `data`, ASCII.
        dtype: element type of `data`, one of `ITEM_BYTES`.
        shape: shape of the elements; the product times the element size is ``len(data)``.
        data: uint8, shape (num_bytes,); read-only and a view of the stored bytes when it comes from `unpack`.
        codec: name of the codec of the stored form it came from; "" if it came from none.

    Raises:
        FormatError: the fields do not agree with each other.
    """

    kind: Kind
    cf: Fingerprint
    parent: Fingerprint
    token_ids: npt.NDArray[np.uint32]
    model_state: bytes
    epoch: int
    created_at: float
    layout: str
    dtype: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]
    codec: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", as_token_ids(self.token_ids))
        _check_fields(self)
        _check_key(self)


@dataclasses.dataclass(frozen=True, slots=True)
class Expectation:
    """What a reader is looking for; a unit that differs in any of it is refused.

    Attributes:
        kind, cf, token_ids, model_state: as in `RecyclableUnit`.
        layout: the layout the reader can use; None accepts any.
        num_bytes: bytes of data the reader needs; None accepts any up to `max_bytes`.
        max_bytes: most bytes of data that make sense to the reader; more is not even decoded.
    """

    kind: Kind
    cf: Fingerprint
    token_ids: TokenIds
    model_state: bytes
    layout: str | None = None
    num_bytes: int | None = None
    max_bytes: int = MAX_DATA_BYTES

    def check_identity(self, kind: str, cf: bytes, model_state: bytes, data_bytes: int) -> None:
        """Compares what the beginning of a stored unit says.

        Raises:
            FormatError: it is another unit, or more of one than makes sense.
        """
        if kind != self.kind:
            raise FormatError(f"the unit is of kind {kind!r}, not {self.kind!r}")
        if cf != self.cf:
            raise FormatError(f"the unit is {short(cf)}, not {short(self.cf)}")
        if model_state != self.model_state:
            raise FormatError(f"the unit is of model state {short(model_state)}, not {short(self.model_state)}")
        if self.num_bytes is not None and data_bytes != self.num_bytes:
            raise FormatError(f"the unit holds {data_bytes} bytes of data, not {self.num_bytes}")
        if data_bytes > self.max_bytes:
            raise FormatError(f"the unit holds {data_bytes} bytes of data; at most {self.max_bytes} make sense here")

    def check_content(self, token_ids: npt.NDArray[np.uint32], layout: str) -> None:
        """Compares what it covers, and how its data is laid out.

        Raises:
            FormatError: it is something else.
        """
        if not np.array_equal(token_ids, as_token_ids(self.token_ids)):
            raise FormatError("the token ids differ from those looked for")
        if self.layout is not None and layout != self.layout:
            raise FormatError(f"the unit's layout is {layout!r}, not {self.layout!r}")


@dataclasses.dataclass(frozen=True, slots=True)
class UnitHead:
    """What the first bytes of a stored unit say, unchecked: enough to list, age and evict units, never to use one.

    Attributes:
        num_bytes: length of the whole stored unit.
        data_bytes: bytes of data that decoding gives.
        others: as in `RecyclableUnit`.
    """

    kind: Kind
    cf: Fingerprint
    parent: Fingerprint
    model_state: bytes
    epoch: int
    created_at: float
    num_tokens: int
    num_bytes: int
    data_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Header:
    """The fixed part of a stored unit, sizes checked; offsets in bytes from its start."""

    kind: Kind
    cf: Fingerprint
    parent: Fingerprint
    model_state: bytes
    epoch: int
    created_at: float
    num_token_ids: int
    num_dims: int
    name_bytes: tuple[int, int, int]
    header_bytes: int
    payload_bytes: int
    payload_crc: int
    data_bytes: int
    num_bytes: int
    authenticated: bool


def pack(unit: RecyclableUnit, codec: Codec, *, hmac_key: bytes | None = None) -> bytes:
    """The stored form of a unit.

    Args:
        codec: turns the data into the stored payload; its name goes into the header.
        hmac_key: if given, HMAC-SHA256 over everything is appended.

    Raises:
        FormatError: a bound of the format is exceeded.
    """
    payload = codec.encode(unit.data, unit.dtype, unit.shape)
    names = [_ascii(unit.layout, "layout"), _ascii(unit.dtype, "dtype"), _ascii(codec.name, "codec")]
    variable = b"".join([struct.pack(f"<{len(unit.shape)}Q", *unit.shape), unit.token_ids.tobytes(), *names])
    used = _FIXED.size + len(variable) + _CRC.size
    padding = bytes(-used % _ALIGN)
    fixed = _FIXED.pack(
        _MAGIC,
        _VERSION,
        _AUTHENTICATED if hmac_key is not None else 0,
        used + len(padding),
        _KIND_CODES[unit.kind],
        *map(len, names),
        len(unit.shape),
        bytes(3),
        len(unit.token_ids),
        zlib.crc32(payload),
        len(payload),
        len(unit.data),
        unit.epoch,
        unit.created_at,
        unit.cf,
        unit.parent,
        unit.model_state,
    )
    header = fixed + variable + padding
    parts: list[bytes | memoryview] = [header, _CRC.pack(zlib.crc32(header)), payload]
    if hmac_key is not None:
        parts.append(_authenticate(hmac_key, *parts))
    return b"".join(parts)


def unpack(blob: bytes | memoryview, *, expected: Expectation, hmac_key: bytes | None = None) -> RecyclableUnit:
    """Reads a stored unit and checks that it is undamaged and the one that is looked for.

    Without compression the result's data is a view of `blob`, which must not change afterwards.

    Args:
        expected: what the caller looks for; compared before the payload is touched.
        hmac_key: if given, the unit must carry a valid HMAC under this key. Without a key an HMAC is not looked at.

    Raises:
        FormatError: the bytes are not such a unit; the message says why. Treat it as a miss.
    """
    view, header = _open(blob, hmac_key)
    expected.check_identity(header.kind, header.cf, header.model_state, header.data_bytes)
    return _read(view, header, expected)


def inspect(blob: bytes | memoryview, *, hmac_key: bytes | None = None) -> RecyclableUnit:
    """Reads a stored unit for people and tools that only list or move units.

    The unit is checked against itself, but not against a prompt: what it holds must never be attached to a sequence.

    Raises:
        FormatError: as `unpack`.
    """
    view, header = _open(blob, hmac_key)
    return _read(view, header, None)


def peek(head: bytes | memoryview) -> UnitHead:
    """Reads the first `HEAD_BYTES` bytes of a stored unit; more may follow and are not looked at.

    Raises:
        FormatError: they are not the start of a unit.
    """
    header = _read_fixed(memoryview(head).cast("B"), whole=False)
    return UnitHead(
        kind=header.kind,
        cf=header.cf,
        parent=header.parent,
        model_state=header.model_state,
        epoch=header.epoch,
        created_at=header.created_at,
        num_tokens=header.num_token_ids,
        num_bytes=header.num_bytes,
        data_bytes=header.data_bytes,
    )


def _open(blob: bytes | memoryview, hmac_key: bytes | None) -> tuple[memoryview, _Header]:
    view = memoryview(blob).cast("B")
    header = _read_fixed(view)
    if hmac_key is not None:
        if not header.authenticated:
            raise FormatError("the unit carries no HMAC, but a key is set")
        end = len(view) - _TAG_BYTES
        if not hmac.compare_digest(_authenticate(hmac_key, view[:end]), view[end:]):
            raise FormatError("the HMAC does not match: changed, or written under another key")
    end = header.header_bytes - _CRC.size
    if _CRC.unpack_from(view, end)[0] != zlib.crc32(view[:end]):
        raise FormatError("the header's checksum does not match")
    return view, header


def _read_fixed(view: memoryview, *, whole: bool = True) -> _Header:
    if len(view) < _FIXED.size:
        raise FormatError(f"{len(view)} bytes are too few for a unit")
    magic, version, flags, header_bytes, kind_code, *sizes = _FIXED.unpack_from(view)
    layout_bytes, dtype_bytes, codec_bytes, num_dims, reserved, num_token_ids, payload_crc = sizes[:7]
    payload_bytes, data_bytes, epoch, created_at, cf, parent, model_state = sizes[7:]
    if magic != _MAGIC:
        raise FormatError("the magic number is not that of a unit")
    if version != _VERSION:
        raise FormatError(f"the format version is {version}; this release reads version {_VERSION}")
    if flags & ~_AUTHENTICATED or any(reserved):
        raise FormatError("reserved bits are set")
    kind = _KINDS.get(kind_code)
    if kind is None:
        raise FormatError(f"the kind {kind_code} is unknown")
    if num_token_ids > MAX_TOKEN_IDS or num_dims > _MAX_DIMS or data_bytes > MAX_DATA_BYTES:
        raise FormatError(
            f"{num_token_ids} token ids, {num_dims} dimensions and {data_bytes} bytes of data are more than the "
            f"{MAX_TOKEN_IDS}, {_MAX_DIMS} and {MAX_DATA_BYTES} that a unit may have"
        )
    variable = 8 * num_dims + 4 * num_token_ids + layout_bytes + dtype_bytes + codec_bytes
    used = _FIXED.size + variable + _CRC.size
    if header_bytes != used + -used % _ALIGN:
        raise FormatError(f"the header says {header_bytes} bytes, its fields need {used + -used % _ALIGN}")
    authenticated = bool(flags & _AUTHENTICATED)
    num_bytes = header_bytes + payload_bytes + (_TAG_BYTES if authenticated else 0)
    if whole and len(view) != num_bytes:
        raise FormatError(f"the unit has {len(view)} bytes, its header says {num_bytes}")
    return _Header(
        kind=kind,
        cf=Fingerprint(cf),
        parent=Fingerprint(parent),
        model_state=model_state,
        epoch=epoch,
        created_at=created_at,
        num_token_ids=num_token_ids,
        num_dims=num_dims,
        name_bytes=(layout_bytes, dtype_bytes, codec_bytes),
        header_bytes=header_bytes,
        payload_bytes=payload_bytes,
        payload_crc=payload_crc,
        data_bytes=data_bytes,
        num_bytes=num_bytes,
        authenticated=authenticated,
    )


def _read(view: memoryview, header: _Header, expected: Expectation | None) -> RecyclableUnit:
    shape = struct.unpack_from(f"<{header.num_dims}Q", view, _FIXED.size)
    offset = _FIXED.size + 8 * header.num_dims
    # A copy: the caller may keep the ids longer than the blob, and they are few.
    token_ids = np.frombuffer(bytes(view[offset : offset + 4 * header.num_token_ids]), "<u4")
    offset += 4 * header.num_token_ids
    names = []
    for size in header.name_bytes:
        names.append(_text(view[offset : offset + size]))
        offset += size
    if any(view[offset : header.header_bytes - _CRC.size]):
        raise FormatError("the header's padding is not zero")
    layout, dtype, codec_name = names
    if expected is not None:
        expected.check_content(token_ids, layout)
    _check_size(shape, dtype, header.data_bytes)
    codec = codec_named(codec_name)
    payload = view[header.header_bytes : header.header_bytes + header.payload_bytes]
    if zlib.crc32(payload) != header.payload_crc:
        raise FormatError("the payload's checksum does not match")
    return RecyclableUnit(
        kind=header.kind,
        cf=header.cf,
        parent=header.parent,
        token_ids=token_ids,
        model_state=header.model_state,
        epoch=header.epoch,
        created_at=header.created_at,
        layout=layout,
        dtype=dtype,
        shape=shape,
        data=codec.decode(payload, header.data_bytes, dtype, shape),
        codec=codec_name,
    )


def _check_fields(unit: RecyclableUnit) -> None:
    if unit.kind not in _KIND_CODES:
        raise FormatError(f"the kind is {unit.kind!r}; it must be one of {', '.join(_KIND_CODES)}")
    for name in ("cf", "parent", "model_state"):
        if len(getattr(unit, name)) != FINGERPRINT_BYTES:
            raise FormatError(f"{name} has {len(getattr(unit, name))} bytes; it must have {FINGERPRINT_BYTES}")
    if not 0 <= unit.epoch < 2**64 or not math.isfinite(unit.created_at):
        raise FormatError(f"the epoch is {unit.epoch} and the creation time {unit.created_at}; one is out of range")
    data: Any = unit.data
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
        raise FormatError("the data must be a one-dimensional, contiguous array of uint8")
    if len(unit.token_ids) > MAX_TOKEN_IDS or len(unit.data) > MAX_DATA_BYTES:
        raise FormatError(
            f"{len(unit.token_ids)} token ids and {len(unit.data)} bytes of data are more than the {MAX_TOKEN_IDS} "
            f"and {MAX_DATA_BYTES} that a unit may have"
        )
    _ascii(unit.layout, "layout")
    _check_size(unit.shape, unit.dtype, len(unit.data))


def _check_size(shape: tuple[int, ...], dtype: str, num_bytes: int) -> None:
    if dtype not in ITEM_BYTES:
        raise FormatError(f"the element type {dtype!r} is unknown; known: {', '.join(ITEM_BYTES)}")
    if len(shape) > _MAX_DIMS or any(size < 0 for size in shape) or math.prod(shape) * ITEM_BYTES[dtype] != num_bytes:
        raise FormatError(f"{dtype} of shape {shape} does not take {num_bytes} bytes")


def _check_key(unit: RecyclableUnit) -> None:
    """The fingerprint must be the one of exactly these tokens, or the value would be found under a foreign key."""
    if unit.kind == "lora":
        good = not len(unit.token_ids)
    else:
        # Only KV is cut into blocks; logits and completions belong to a whole prompt.
        good = unit.kind == "kv" and unit.cf == block_fingerprint(unit.parent, unit.token_ids)
        good = good or unit.cf == end_fingerprint(unit.parent, unit.token_ids)
    if not good:
        raise FormatError(f"the fingerprint {short(unit.cf)} is not that of the unit's own token ids")


def _authenticate(key: bytes, *parts: bytes | memoryview) -> bytes:
    code = hmac.new(key, digestmod="sha256")
    for part in parts:
        code.update(part)
    return code.digest()


def _ascii(name: str, what: str) -> bytes:
    if not 0 < len(name) <= 255 or not name.isascii():
        raise FormatError(f"the {what} is {name!r}; it must have 1 to 255 ASCII characters")
    return name.encode("ascii")


def _text(raw: memoryview) -> str:
    try:
        return str(raw, "ascii")
    except UnicodeDecodeError as error:
        raise FormatError("a name in the header is not ASCII") from error
