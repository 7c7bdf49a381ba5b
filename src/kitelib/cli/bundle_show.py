"""`kite bundle inspect | diff`: what bundles say of themselves. Only headers are read, and nothing in them steers a terminal."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from kitelib.cli.bundle_options import clip, read_key_file, trusted_keys_of
from kitelib.cli.pool_filters import format_bytes, format_date
from kitelib.cli.table import counted, format_table
from kitelib.fingerprint import short
from kitelib.upcycle.bundle import Bundle, BundleRoot, BundleUnit, Manifest
from kitelib.upcycle.bundle.editing import BundleDiff, UnitGroup, diff_bundles

__all__ = ["run_diff", "run_inspect"]

_MAX_LISTED: Final = 50
"""Roots, labels and parts of a model state that are shown to people; a hostile file may have thousands."""
_NAME_WIDTH: Final = 24
_TEXT_WIDTH: Final = 80
_PATH_NAMES: Final = ("backend", "numerics", "attention")
"""What of a root's execution path is in the table."""
_MAKING: Final = ("created_at", "tool")
"""Fields that say how a bundle came about and not what it holds: no difference to `diff`."""


def run_inspect(args: argparse.Namespace) -> int:
    """Runs the subcommand; returns the exit code.

    Raises:
        KiteError: see `kitelib.cli.main` for what becomes of it.
    """
    keys = trusted_keys_of(args)
    hmac_key = read_key_file(args.hmac_key_file)
    with Bundle.open(args.file, require_signature=bool(keys), trusted_keys=keys, hmac_key=hmac_key) as bundle:
        if args.json:
            print(json.dumps(_fields(bundle, units=args.units)))
        else:
            print("\n\n".join(_sections(bundle, units=args.units)))
    return 0


def run_diff(args: argparse.Namespace) -> int:
    """Runs the subcommand; returns the exit code: 1 if the bundles hold different things.

    Raises:
        KiteError: see `kitelib.cli.main` for what becomes of it.
    """
    diff = diff_bundles(args.a, args.b)
    groups = {"only_a": diff.only_first, "only_b": diff.only_second, "changed": diff.changed, "same": diff.same}
    differ = bool(diff.fields.keys() - set(_MAKING)) or any(groups[name].units for name in groups if name != "same")
    if args.json:
        fields = {name: list(texts) for name, texts in diff.fields.items()}
        counts = {name: _group_fields(group) for name, group in groups.items()}
        print(json.dumps({"a": args.a, "b": args.b, "differ": differ, "fields": fields, **counts}))
    else:
        print("\n\n".join(_diff_sections(args.a, args.b, diff, differ=differ)))
    return 1 if differ else 0


def _header_bytes(bundle: Bundle) -> int:
    """Bytes before the first payload."""
    return min((unit.start for unit in bundle.units), default=bundle.num_bytes)


def _groups(units: Sequence[BundleUnit]) -> dict[str, list[BundleUnit]]:
    groups: dict[str, list[BundleUnit]] = {}
    for unit in units:
        groups.setdefault(unit.kind, []).append(unit)
    return dict(sorted(groups.items()))


def _codecs(units: Sequence[BundleUnit]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for unit in units:
        counts[unit.codec] = counts.get(unit.codec, 0) + 1
    return dict(sorted(counts.items()))


# JSON


def _fields(bundle: Bundle, *, units: bool) -> dict[str, Any]:
    manifest = bundle.manifest
    model = manifest.model
    fields: dict[str, Any] = {
        "path": bundle.path,
        "num_bytes": bundle.num_bytes,
        "header_bytes": _header_bytes(bundle),
        "version": manifest.version,
        "tool": manifest.tool,
        "created_at": manifest.created_at,
        "epoch": manifest.epoch,
        "digest": bundle.digest,
        "signature": {"public_key": bundle.signed_by, "verified": bundle.signer is not None},
        "hmac": bundle.has_hmac,
        "model": {field.name: _plain(getattr(model, field.name)) for field in dataclasses.fields(model)},
        "roots": [_root_fields(root) for root in manifest.roots],
        "kinds": {kind: _kind_fields(group) for kind, group in _groups(manifest.units).items()},
        "labels": dict(manifest.labels),
    }
    return {**fields, "units": [_unit_fields(unit) for unit in manifest.units]} if units else fields


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    return dict(value) if isinstance(value, Mapping) else value


def _root_fields(root: BundleRoot) -> dict[str, Any]:
    return {
        "root": root.root.hex(),
        "execution_path": dict(root.execution_path),
        "namespace": root.namespace,
        "adapter": None if root.adapter is None else {"digest": root.adapter[0].hex(), "scale": root.adapter[1]},
    }


def _kind_fields(units: Sequence[BundleUnit]) -> dict[str, Any]:
    return {
        "units": len(units),
        "tokens": sum(len(unit.token_ids) for unit in units),
        "bytes": sum(unit.stop - unit.start for unit in units),
        "data_bytes": sum(unit.data_bytes for unit in units),
        "codecs": _codecs(units),
    }


def _unit_fields(unit: BundleUnit) -> dict[str, Any]:
    return {
        "kind": unit.kind,
        "cf": unit.cf.hex(),
        "parent": unit.parent.hex(),
        "root": unit.root,
        "tokens": len(unit.token_ids),
        "bytes": unit.stop - unit.start,
        "data_bytes": unit.data_bytes,
        "codec": unit.codec,
        "layout": unit.layout,
        "dtype": unit.dtype,
        "shape": list(unit.shape),
        "hits": unit.hits,
        "epoch": unit.epoch,
        "created_at": unit.created_at,
        "sha256": unit.sha256.hex(),
    }


def _group_fields(group: UnitGroup) -> dict[str, Any]:
    return {
        "units": len(group.units),
        "tokens": group.tokens,
        "bytes": group.num_bytes,
        "cfs": [[unit.kind, unit.cf.hex()] for unit in group.units],
    }


# text


def _sections(bundle: Bundle, *, units: bool) -> Iterator[str]:
    manifest = bundle.manifest
    yield _facts(bundle)
    if manifest.roots:
        yield _roots_table(manifest)
    if manifest.units:
        yield _kinds_table(manifest.units)
    if manifest.labels:
        yield "labels\n" + _listed(manifest.labels)
    if units and manifest.units:
        yield _units_table(manifest.units)


def _facts(bundle: Bundle) -> str:
    manifest, model = bundle.manifest, bundle.manifest.model
    header = _header_bytes(bundle)
    facts = {
        "file": clip(bundle.path, 4 * _TEXT_WIDTH),
        "size": f"{format_bytes(bundle.num_bytes)}, of which {format_bytes(header)} header "
        f"({header / bundle.num_bytes:.1%})",
        "format": f"version {manifest.version}",
        "made": f"{format_date(manifest.created_at)} by {clip(manifest.tool, _TEXT_WIDTH)}",
        "epoch": str(manifest.epoch),
        "digest": bundle.digest,
        "signature": _signature(bundle),
        "serves": _served(manifest),
        "model": clip(model.name, _TEXT_WIDTH) or "-",
        "layout": clip(model.layout, _TEXT_WIDTH),
        "block": f"{counted(model.block_tokens, 'token')}, {format_bytes(model.block_bytes)}; "
        f"vocabulary {model.vocab_size:,}",
        "state": short(model.model_state),
    }
    lines = "\n".join(f"{name:<10} {text}" for name, text in facts.items())
    return f"{lines}\n{_listed(model.state_parts)}" if model.state_parts else lines


def _served(manifest: Manifest) -> str:
    names = [root.namespace for root in manifest.roots]
    known = ["no namespace"] * (None in names) + sorted({clip(name, _NAME_WIDTH) for name in names if name is not None})
    more = f" and {len(known) - _MAX_LISTED:,} more" if len(known) > _MAX_LISTED else ""
    return "requests of " + ", ".join(known[:_MAX_LISTED]) + more if known else "nobody"


def _signature(bundle: Bundle) -> str:
    parts = []
    if bundle.signer is not None:
        parts.append(f"valid, of the trusted key {bundle.signer}")
    elif bundle.signed_by is not None:
        parts.append(f"says it is of {clip(bundle.signed_by, 64)}; not checked: give --trusted-key")
    if bundle.has_hmac:
        parts.append("has an HMAC")
    return "; ".join(parts) or "none"


def _listed(texts: Mapping[str, str]) -> str:
    lines = [
        f"  {clip(name, _NAME_WIDTH)}: {clip(text, _TEXT_WIDTH)}" for name, text in list(texts.items())[:_MAX_LISTED]
    ]
    return "\n".join([*lines, *_more(len(texts))])


def _more(count: int) -> list[str]:
    return [f"  ... and {count - _MAX_LISTED:,} more; --json has all"] if count > _MAX_LISTED else []


def _roots_table(manifest: Manifest) -> str:
    counts = [0] * len(manifest.roots)
    for unit in manifest.units:
        counts[unit.root] += 1
    rows = [
        (
            str(index),
            short(root.root),
            *(clip(str(root.execution_path.get(name, "-")), _NAME_WIDTH) for name in _PATH_NAMES),
            "(own)" if root.namespace is None else clip(root.namespace, _NAME_WIDTH),
            "-" if root.adapter is None else f"{short(root.adapter[0])} x {root.adapter[1]:g}",
            f"{counts[index]:,}",
        )
        for index, root in enumerate(manifest.roots[:_MAX_LISTED])
    ]
    header = ("#", "root", *_PATH_NAMES, "namespace", "adapter", "units")
    return "\n".join([format_table(header, rows, left=tuple(range(1, 7))), *_more(len(manifest.roots))])


def _kinds_table(units: Sequence[BundleUnit]) -> str:
    rows = []
    for kind, group in _groups(units).items():
        fields = _kind_fields(group)
        codecs = ", ".join(f"{clip(codec, _NAME_WIDTH)} {count:,}" for codec, count in fields["codecs"].items())
        share = fields["bytes"] / fields["data_bytes"] if fields["data_bytes"] else 1.0
        rows.append(
            (
                kind,
                f"{fields['units']:,}",
                f"{fields['tokens']:,}",
                format_bytes(fields["bytes"]),
                format_bytes(fields["data_bytes"]),
                f"{share:.0%}",
                codecs,
            )
        )
    return format_table(("kind", "units", "tokens", "bytes", "of data", "share", "codecs"), rows, left=(0, 6))


def _units_table(units: Sequence[BundleUnit]) -> str:
    rows = [
        (
            unit.kind,
            short(unit.cf),
            str(len(unit.token_ids)),
            format_bytes(unit.stop - unit.start),
            f"{unit.hits:g}",
            clip(unit.codec, _NAME_WIDTH),
        )
        for unit in units
    ]
    return format_table(("kind", "cf", "tokens", "bytes", "hits", "codec"), rows, left=(0, 1, 5))


def _diff_sections(a: str, b: str, diff: BundleDiff, *, differ: bool) -> Iterator[str]:
    yield f"A  {clip(a, 4 * _TEXT_WIDTH)}\nB  {clip(b, 4 * _TEXT_WIDTH)}"
    if diff.fields:
        rows = [
            (clip(name, _NAME_WIDTH), *(clip(_field_text(name, text), _NAME_WIDTH * 2) for text in texts))
            for name, texts in list(diff.fields.items())[:_MAX_LISTED]
        ]
        yield "\n".join([format_table(("field", "A", "B"), rows, left=(0, 1, 2)), *_more(len(diff.fields))])
    groups = {
        "only in A": diff.only_first,
        "only in B": diff.only_second,
        "other payload": diff.changed,
        "the same": diff.same,
    }
    rows = [
        (
            name,
            ", ".join(f"{len(units):,} {kind}" for kind, units in _groups(group.units).items()) or "-",
            f"{group.tokens:,}",
            format_bytes(group.num_bytes),
        )
        for name, group in groups.items()
    ]
    yield format_table(("units", "kinds", "tokens", "bytes"), rows, left=(0, 1))
    yield "They differ." if differ else "They hold the same."


def _field_text(name: str, text: str) -> str:
    return format_date(float(text)) if name == "created_at" else text
