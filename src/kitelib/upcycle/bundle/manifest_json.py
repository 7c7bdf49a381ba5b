"""A bundle's manifest <-> the texts in its metadata, field by field as docs/format.md says.

Nothing here is believed because it is there: every field has a type and a bound, and what a unit says must agree with
the tensor that holds it. No field names a file, a host or code.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, cast

from kitelib.errors import FormatError
from kitelib.fingerprint import Fingerprint
from kitelib.upcycle.bundle import json_fields
from kitelib.upcycle.bundle.container import HMAC_KEY, SIGNATURE_KEY, Header, Tensor
from kitelib.upcycle.bundle.manifest import FORMAT_VERSION, BundleRoot, BundleUnit, Manifest, ModelIdentity
from kitelib.upcycle.bundle.strict_json import dump, elements, parse
from kitelib.upcycle.codec import ITEM_BYTES, codec_named
from kitelib.upcycle.unit import MAX_DATA_BYTES, MAX_TOKEN_IDS, Kind

__all__ = [
    "BUNDLE_KEY",
    "KINDS",
    "UNITS_KEY",
    "is_plain",
    "manifest_of",
    "metadata_of",
    "model_of",
    "root_of",
    "tensor_name",
    "tensors_of",
    "unit_entry",
    "unit_fault",
]

BUNDLE_KEY: Final = "kite.bundle"
"""Metadata: the manifest but for its units."""
UNITS_KEY: Final = "kite.units"
"""Metadata: the units."""

KINDS: Final = ("kv", "logits", "completion")
"""Kinds of units that a bundle holds."""
_PLAIN_CODECS: Final = ("raw/none", "paged_kvcache_v2/none")
_PLAIN_TYPES: Final[Mapping[str, str]] = {
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    **{
        f"{sign}int{bits}": f"{sign.upper()}I{bits}".replace("UI", "U")
        for sign in ("", "u")
        for bits in (8, 16, 32, 64)
    },
}
_BUNDLE_FIELDS: Final = frozenset({"version", "tool", "created_at", "epoch", "model", "roots", "labels"})
_MODEL_FIELDS: Final = frozenset(
    {"name", "model_state", "state_parts", "layout", "block_tokens", "block_bytes", "vocab_size"}
)
_ROOT_FIELDS: Final = frozenset({"root", "execution_path", "namespace", "adapter"})
_ADAPTER_FIELDS: Final = frozenset({"digest", "scale"})
_UNIT_FIELDS: Final = frozenset(
    {
        *("kind", "cf", "parent", "token_ids", "layout", "dtype", "shape", "codec", "data_bytes"),
        *("epoch", "created_at", "sha256", "crc32", "root", "hits"),
    }
)
_MAX_ROOTS: Final = 4096
_UNITS_AT_ONCE: Final = 256
_MAX_COMPLETION_BYTES: Final = 4 * (MAX_TOKEN_IDS + 1)


def tensor_name(kind: str, cf: bytes) -> str:
    """Name of a unit's tensor."""
    return f"{kind}.{cf.hex()}"


def is_plain(codec: str) -> bool:
    """Whether payloads of this codec are the data as it is."""
    return codec in _PLAIN_CODECS


def tensors_of(units: Iterable[BundleUnit]) -> dict[str, Tensor]:
    """The tensors of units that lie in this order without gaps; of their `start` and `stop` only the length counts."""
    tensors, at = {}, 0
    for unit in units:
        dtype, shape = _stored_form(unit.codec, unit.dtype, unit.shape, unit.stop - unit.start)
        tensors[tensor_name(unit.kind, unit.cf)] = Tensor(dtype, shape, at, at + unit.stop - unit.start)
        at += unit.stop - unit.start
    return tensors


def metadata_of(manifest: Manifest) -> dict[str, str]:
    """The metadata that says what `manifest_of` reads."""
    model = manifest.model
    head = {
        "version": manifest.version,
        "tool": manifest.tool,
        "created_at": manifest.created_at,
        "epoch": manifest.epoch,
        "model": {
            "name": model.name,
            "model_state": model.model_state.hex(),
            "state_parts": dict(model.state_parts),
            "layout": model.layout,
            "block_tokens": model.block_tokens,
            "block_bytes": model.block_bytes,
            "vocab_size": model.vocab_size,
        },
        "roots": [_root_entry(root) for root in manifest.roots],
        "labels": dict(manifest.labels),
    }
    return {BUNDLE_KEY: dump(head), UNITS_KEY: f"[{','.join(map(unit_entry, manifest.units))}]"}


def unit_entry(unit: BundleUnit) -> str:
    """One entry of the list of units, as JSON."""
    return dump(
        {
            "kind": unit.kind,
            "cf": unit.cf.hex(),
            "parent": unit.parent.hex(),
            "token_ids": unit.token_ids.tolist(),
            "layout": unit.layout,
            "dtype": unit.dtype,
            "shape": unit.shape,
            "codec": unit.codec,
            "data_bytes": unit.data_bytes,
            "epoch": unit.epoch,
            "created_at": unit.created_at,
            "sha256": unit.sha256.hex(),
            "crc32": unit.crc32,
            "root": unit.root,
            "hits": unit.hits,
        }
    )


def manifest_of(header: Header) -> Manifest:
    """The manifest in a file's metadata, checked against itself and against the file's tensors.

    A unit's fingerprint is not computed again here: that is done when it is used.

    Raises:
        FormatError: something is missing, unknown, of another type, out of bounds, or does not agree.
    """
    texts = header.metadata
    if BUNDLE_KEY not in texts or UNITS_KEY not in texts:
        raise FormatError(f"it is a safetensors file, but no bundle: its metadata has no {BUNDLE_KEY} and {UNITS_KEY}")
    if unknown := texts.keys() - {BUNDLE_KEY, UNITS_KEY, SIGNATURE_KEY, HMAC_KEY}:
        raise FormatError(f"its metadata has {min(unknown)[:200]!r}, which no bundle has")
    head = parse(texts[BUNDLE_KEY].encode("ascii"), BUNDLE_KEY)
    version = head.get("version") if isinstance(head, dict) else None
    if version != FORMAT_VERSION:  # before the fields: another version may have others
        raise FormatError(f"the format version is {version!a:.200}; this release reads version {FORMAT_VERSION}")
    json_fields.check_fields(head, _BUNDLE_FIELDS, BUNDLE_KEY)
    plain_roots = json_fields.typed(head["roots"], list, "roots")
    if len(plain_roots) > _MAX_ROOTS:
        raise FormatError(f"there are {len(plain_roots)} roots; at most {_MAX_ROOTS} may be")
    roots, model = tuple(map(root_of, plain_roots)), model_of(head["model"])
    return Manifest(
        version=FORMAT_VERSION,
        tool=json_fields.text(head["tool"], "tool"),
        created_at=json_fields.number(head["created_at"], "created_at"),
        epoch=json_fields.whole(head["epoch"], "epoch", 0, 2**64 - 1),
        model=model,
        roots=roots,
        units=_units(header, model, len(roots)),
        labels=json_fields.texts(head["labels"], "labels"),
    )


def _root_entry(root: BundleRoot) -> dict[str, Any]:
    adapter = None if root.adapter is None else {"digest": root.adapter[0].hex(), "scale": float(root.adapter[1])}
    return {
        "root": root.root.hex(),
        "execution_path": dict(root.execution_path),
        "namespace": root.namespace,
        "adapter": adapter,
    }


def root_of(plain: Any) -> BundleRoot:
    """A root as `metadata_of` writes it. Raises FormatError."""
    json_fields.check_fields(plain, _ROOT_FIELDS, "a root")
    path = json_fields.typed(plain["execution_path"], dict, "execution_path")
    if len(path) > json_fields.MAX_NAMES:
        raise FormatError(f"an execution path has {len(path)} values; at most {json_fields.MAX_NAMES} may be")
    for name, value in path.items():
        json_fields.text(name, "a name in execution_path")
        if type(value) is str:
            json_fields.text(value, "a value in execution_path")
        elif type(value) is int:
            json_fields.whole(value, "a value in execution_path", -(2**63), 2**63 - 1)
        elif type(value) is not bool:
            raise FormatError(f"a value in execution_path is {value!a:.200}, no text, whole number, true or false")
    adapter = plain["adapter"]
    if adapter is not None:
        json_fields.check_fields(adapter, _ADAPTER_FIELDS, "an adapter")
        adapter = (
            json_fields.digest(adapter["digest"], "an adapter's digest"),
            json_fields.number(adapter["scale"], "scale"),
        )
    namespace = None if plain["namespace"] is None else json_fields.text(plain["namespace"], "namespace")
    return BundleRoot(Fingerprint(json_fields.digest(plain["root"], "root")), path, namespace, adapter)


def model_of(plain: Any) -> ModelIdentity:
    """A model as `metadata_of` writes it. Raises FormatError."""
    json_fields.check_fields(plain, _MODEL_FIELDS, "model")
    return ModelIdentity(
        name=json_fields.text(plain["name"], "name"),
        model_state=json_fields.digest(plain["model_state"], "model_state"),
        state_parts=json_fields.texts(plain["state_parts"], "state_parts"),
        layout=json_fields.layout(plain["layout"]),
        block_tokens=json_fields.whole(plain["block_tokens"], "block_tokens", 1, MAX_TOKEN_IDS),
        block_bytes=json_fields.whole(plain["block_bytes"], "block_bytes", 0, MAX_DATA_BYTES),
        vocab_size=json_fields.whole(plain["vocab_size"], "vocab_size", 1, 2**32),
    )


def _units(header: Header, model: ModelIdentity, num_roots: int) -> tuple[BundleUnit, ...]:
    """The units in the order of their tensors. Read some at a time: what is parsed takes more than what is kept."""
    entries = elements(header.metadata[UNITS_KEY], UNITS_KEY)
    units: dict[str, BundleUnit] = {}
    count = 0
    while some := list(itertools.islice(entries, _UNITS_AT_ONCE)):
        count += len(some)
        units.update((tensor_name(unit.kind, unit.cf), unit) for unit in _some_units(some, header, model, num_roots))
    if len(units) != count:
        raise FormatError(f"{UNITS_KEY} has {count} units, of which {len(units)} are different ones")
    if units.keys() != header.tensors.keys():
        raise FormatError(_unpaired(min(units.keys() ^ header.tensors.keys())))
    return tuple(units[name] for name in header.tensors)


def _some_units(entries: Sequence[Any], header: Header, model: ModelIdentity, num_roots: int) -> Iterator[BundleUnit]:
    for entry in entries:
        json_fields.check_fields(entry, _UNIT_FIELDS, "a unit")
    column = {name: [entry[name] for entry in entries] for name in _UNIT_FIELDS}
    kinds = json_fields.names(column["kind"], "kind", _check_kind)
    cfs = json_fields.digests(column["cf"], "cf")
    parents = json_fields.digests(column["parent"], "parent")
    sha256s = json_fields.digests(column["sha256"], "sha256")
    ids = json_fields.token_ids(column["token_ids"])
    layouts = json_fields.names(column["layout"], "layout", json_fields.layout)
    dtypes = json_fields.names(column["dtype"], "dtype", _check_dtype)
    codecs = json_fields.names(column["codec"], "codec", codec_named)
    shapes = json_fields.shapes(column["shape"])
    data_bytes = json_fields.wholes(column["data_bytes"], "data_bytes", 0, MAX_DATA_BYTES)
    epochs = json_fields.wholes(column["epoch"], "epoch", 0, 2**64 - 1)
    crc32s = json_fields.wholes(column["crc32"], "crc32", 0, 2**32 - 1)
    roots = json_fields.wholes(column["root"], "root", 0, num_roots - 1)
    times = json_fields.numbers(column["created_at"], "created_at")
    hits = json_fields.numbers(column["hits"], "hits", lowest=0.0)
    for at, (kind, cf) in enumerate(zip(kinds, cfs, strict=True)):
        name = tensor_name(kind, cf)
        tensor = header.tensors.get(name)
        if tensor is None:
            raise FormatError(_unpaired(name))
        _check_form(name, tensor, codecs[at], dtypes[at], shapes[at], data_bytes[at])
        if fault := unit_fault(model, kind, layouts[at], len(ids[at]), data_bytes[at]):
            raise FormatError(f"the unit {name} {fault}")
        yield BundleUnit(
            kind=cast(Kind, kind),
            cf=Fingerprint(cf),
            parent=Fingerprint(parents[at]),
            token_ids=ids[at],
            layout=layouts[at],
            dtype=dtypes[at],
            shape=shapes[at],
            codec=codecs[at],
            data_bytes=data_bytes[at],
            epoch=epochs[at],
            created_at=times[at],
            sha256=sha256s[at],
            crc32=crc32s[at],
            root=roots[at],
            hits=hits[at],
            start=header.data_start + tensor.start,
            stop=header.data_start + tensor.stop,
        )


def unit_fault(model: ModelIdentity, kind: str, layout: str, num_tokens: int, data_bytes: int) -> str | None:
    """Why no unit of this model can be like that, or None: what nobody could use is not even decoded."""
    if kind == "kv":
        if layout != model.layout:
            return f"has the layout {layout!r}, not the model's {model.layout!r}"
        if not 0 < num_tokens <= model.block_tokens:
            return f"has {num_tokens} tokens; a block of the model has 1 to {model.block_tokens}"
        if data_bytes * model.block_tokens != model.block_bytes * num_tokens:
            return f"has {data_bytes} bytes for {num_tokens} tokens; {model.block_tokens} take {model.block_bytes}"
    elif num_tokens >= model.block_tokens:
        return f"comes after {num_tokens} tokens of a block of {model.block_tokens}"
    elif kind == "logits" and data_bytes != 4 * model.vocab_size:
        return f"has {data_bytes} bytes; logits of a vocabulary of {model.vocab_size} take {4 * model.vocab_size}"
    elif kind == "completion" and data_bytes > _MAX_COMPLETION_BYTES:
        return f"has {data_bytes} bytes; a completion has at most {_MAX_COMPLETION_BYTES}"
    return None


def _unpaired(name: str) -> str:
    return f"{name[:200]!r} is not both a unit and a tensor"


def _check_form(name: str, tensor: Tensor, codec: str, dtype: str, shape: tuple[int, ...], data_bytes: int) -> None:
    """A unit's type and shape must be its data's size, and its tensor what its codec makes of them."""
    if math.prod(shape) * ITEM_BYTES[dtype] != data_bytes:
        raise FormatError(f"the unit {name}: {dtype} of shape {shape} does not take {data_bytes} bytes")
    stored = _stored_form(codec, dtype, shape, tensor.stop - tensor.start)
    if (tensor.dtype, tensor.shape) != stored:
        raise FormatError(
            f"the unit {name}: the tensor is {tensor.dtype} of shape {tensor.shape}; it must be {stored[0]} of {stored[1]}"
        )


def _stored_form(codec: str, dtype: str, shape: tuple[int, ...], num_bytes: int) -> tuple[str, tuple[int, ...]]:
    """Element type and shape of a unit's tensor: the unit's own where a tool can make sense of them."""
    if is_plain(codec):
        return _PLAIN_TYPES[dtype], shape
    return "U8", (num_bytes,)


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise FormatError(f"a unit is of kind {kind!a:.200}; it must be one of {', '.join(KINDS)}")


def _check_dtype(dtype: str) -> None:
    if dtype not in ITEM_BYTES:
        raise FormatError(f"the element type {dtype!a:.200} is unknown; known: {', '.join(ITEM_BYTES)}")
