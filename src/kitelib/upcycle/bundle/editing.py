"""Bundles from bundles: signing one that exists, merging several, and telling two apart. All of it blocks."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence

from kitelib.errors import BundleError, BundleMismatchError, ConfigError, FormatError, InvalidRequestError
from kitelib.fingerprint import short
from kitelib.upcycle.bundle.compatibility import differences_text, identity_differences
from kitelib.upcycle.bundle.container import SIGNATURE_KEY, read_chunks, read_header, seal_message, write_file
from kitelib.upcycle.bundle.manifest import BundleRoot, BundleUnit, Manifest
from kitelib.upcycle.bundle.reader import Bundle
from kitelib.upcycle.bundle.replacing import reason, target_of
from kitelib.upcycle.bundle.signing import public_key_of, sign_message
from kitelib.upcycle.bundle.writer import BundleSummary, BundleWriter

__all__ = ["BundleDiff", "UnitGroup", "diff_bundles", "merge_bundles", "sign_bundle"]


@dataclasses.dataclass(frozen=True, slots=True)
class UnitGroup:
    """Some units of a bundle.

    Attributes:
        units: in the order of their payloads.
        tokens: tokens that the KV units among them cover.
        num_bytes: bytes of their payloads.
    """

    units: tuple[BundleUnit, ...]
    tokens: int
    num_bytes: int

    @classmethod
    def of(cls, units: Iterable[BundleUnit]) -> UnitGroup:
        """These units."""
        units = tuple(units)
        tokens = sum(len(unit.token_ids) for unit in units if unit.kind == "kv")
        return cls(units, tokens, sum(unit.stop - unit.start for unit in units))


@dataclasses.dataclass(frozen=True, slots=True)
class BundleDiff:
    """How two bundles differ.

    Attributes:
        fields: name of each field of the manifests that differs -> (the first's, the second's), as text.
        only_first, only_second: units that the other one lacks.
        same: units that both have with the same payload.
        changed: units of the first one that the second has with another payload: computed by other kernels, or stored
            with another codec.
    """

    fields: Mapping[str, tuple[str, str]]
    only_first: UnitGroup
    only_second: UnitGroup
    same: UnitGroup
    changed: UnitGroup


def sign_bundle(
    path: str | os.PathLike[str], key_file: str | os.PathLike[str], out: str | os.PathLike[str] | None = None
) -> str:
    """Signs a bundle; returns the public key, 64 hexadecimal digits. An earlier signature is replaced, an HMAC kept.

    Every unit is verified first, since a signature vouches for all of them. The file is replaced at once when the new
    one is complete; engines that have it loaded keep the old one. What was there stays in place if anything fails.

    Args:
        path: the bundle.
        key_file: PEM file of an Ed25519 private key.
        out: where the signed bundle goes; None replaces `path`.

    Raises:
        BundleError: it can't be used, a unit is damaged, or it changes meanwhile.
        ConfigError: the key can't be read, or `out` can't be written.
        MissingExtraError: `cryptography` is not installed.
    """
    signer = public_key_of(key_file)
    target = path if out is None else out
    if out is not None:
        target_of(out)
    with Bundle.open(path) as bundle:
        if failures := bundle.check():
            raise BundleError(
                f"the bundle {bundle.path!r} is not signed: {len(failures)} of its {len(bundle.units)} units can't be "
                f"used; {failures[0][1]}"
            )
        try:
            header = read_header(bundle.fileno())
            signature = sign_message(key_file, seal_message(header.digest))
            write_file(
                target,
                {**header.metadata, SIGNATURE_KEY: signature},
                header.tensors,
                read_chunks(bundle.fileno(), header.data_start, header.num_bytes),
                check=lambda file: _check_copy(bundle, file),
            )
        except FormatError as error:
            raise BundleError(f"the bundle {bundle.path!r} can't be signed: {error}") from error
        except OSError as error:
            raise ConfigError(f"the bundle {os.fsdecode(target)!r} can't be written: {reason(error)}") from error
    return signer


def merge_bundles(
    paths: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    max_bytes: int | None = None,
    sign_key: str | os.PathLike[str] | None = None,
    hmac_key: bytes | None = None,
    trusted_keys: Sequence[str | bytes] = (),
    trusted_hmac_key: bytes | None = None,
    labels: Mapping[str, str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> BundleSummary:
    """Writes the units of several bundles of one model to a new one.

    Each unit is verified and copied as it is stored. Of a unit that several have, the first one's payload is taken and
    the hits are added. The epoch is the lowest one: a merged bundle must not outlive an invalidation that one of its
    parts would not have outlived.

    Args:
        paths: the bundles; `out` may be one of them.
        out: the bundle to be.
        max_bytes, sign_key, hmac_key, progress: as of `BundleWriter.finish`.
        trusted_keys: if given, each bundle must be signed with one of them. Give them with `sign_key`, which vouches
            for whatever the bundles hold.
        trusted_hmac_key: if given, each bundle must have the HMAC under it, or a signature of a trusted key. Give it
            with `hmac_key`, for the same reason.
        labels: texts by name, besides those of the bundles; where a name is there twice, this one's or else the first
            bundle's is taken.

    Raises:
        BundleMismatchError: a bundle is of another model state, layout or block size than the first one.
        BundleError: a bundle can't be used, or a unit is damaged; the message names the file.
        ConfigError: no paths, or as `BundleWriter.finish`.
        MissingExtraError: as `BundleWriter.finish`.
    """
    if not paths:
        raise ConfigError("there is no bundle to merge; give at least one path")
    if sign_key is not None:
        public_key_of(sign_key)  # a wrong key is known now, not when everything was read
    with contextlib.ExitStack() as stack:
        bundles = [
            stack.enter_context(
                Bundle.open(
                    path,
                    require_signature=bool(trusted_keys) and trusted_hmac_key is None,
                    trusted_keys=trusted_keys,
                    hmac_key=trusted_hmac_key,
                )
            )
            for path in paths
        ]
        _check_same_model(bundles)
        known = {name: text for bundle in reversed(bundles) for name, text in bundle.manifest.labels.items()}
        writer = stack.enter_context(
            BundleWriter(
                out,
                bundles[0].manifest.model,
                epoch=min(bundle.manifest.epoch for bundle in bundles),
                labels=known | dict(labels or {}),
            )
        )
        roots: dict[bytes, BundleRoot] = {}
        for bundle in bundles:
            _add_units(writer, bundle, roots)
        return writer.finish(max_bytes=max_bytes, sign_key=sign_key, hmac_key=hmac_key, progress=progress)


def diff_bundles(first: str | os.PathLike[str], second: str | os.PathLike[str]) -> BundleDiff:
    """How two bundles differ, by their headers alone: payloads are compared by the SHA-256 that the headers state.

    Raises:
        BundleError: one can't be used.
    """
    with Bundle.open(first) as one, Bundle.open(second) as other:
        # Units with one key and other models have nothing in common.
        theirs = {key: (unit.codec, unit.sha256) for key, unit in other.keys.items()}
        mine = one.keys
        return BundleDiff(
            fields=_manifest_differences(one.manifest, other.manifest),
            only_first=UnitGroup.of(unit for key, unit in mine.items() if key not in theirs),
            only_second=UnitGroup.of(unit for key, unit in other.keys.items() if key not in mine),
            same=UnitGroup.of(unit for key, unit in mine.items() if theirs.get(key) == (unit.codec, unit.sha256)),
            changed=UnitGroup.of(
                unit
                for key, unit in mine.items()
                if theirs.get(key, (unit.codec, unit.sha256)) != (unit.codec, unit.sha256)
            ),
        )


def _check_copy(bundle: Bundle, copy: int) -> None:
    """A reader must take the copy for the same bundle, and the bundle must still be what was verified."""
    if read_header(copy).digest.hex() != bundle.digest:
        raise FormatError("the signed copy is not the same bundle")
    bundle.fileno()


def _check_same_model(bundles: Sequence[Bundle]) -> None:
    first, *others = bundles
    for other in others:
        if differences := identity_differences(other.manifest.model, first.manifest.model):
            differences = _numerics_differences(other.manifest, first.manifest) | differences
            what = differences_text(differences, f"in {first.path!r}")
            raise BundleMismatchError(
                f"the bundle {other.path!r} can't be merged: {what}; merge bundles of one model, KV layout and block size",
                differences,
            )


def _add_units(writer: BundleWriter, bundle: Bundle, roots: dict[bytes, BundleRoot]) -> None:
    """Adds all units of a bundle; `roots` has what the bundles before said about each root."""
    for root in bundle.manifest.roots:
        if roots.setdefault(root.root, root) != root:
            raise BundleError(
                f"the bundle {bundle.path!r} says something else about the root {short(root.root)} than those before "
                "it, so one of them was changed; leave it out"
            )
    for unit in bundle.units:
        try:
            bundle.read(unit, full=True)
            writer.add_stored(unit, bundle.stored(unit), bundle.manifest.roots[unit.root])
        except (FormatError, InvalidRequestError) as error:
            raise BundleError(f"the bundle {bundle.path!r} can't be merged: {error}") from error


def _numerics_differences(first: Manifest, second: Manifest) -> dict[str, tuple[str, str]]:
    """Of what comes with other numerics, such as another layout, they are the reason."""
    return {"numerics": (first.numerics, second.numerics)} if first.numerics != second.numerics else {}


def _manifest_differences(first: Manifest, second: Manifest) -> dict[str, tuple[str, str]]:
    found = _numerics_differences(first, second) | identity_differences(first.model, second.model)
    if first.model.name != second.model.name:
        found["name"] = (first.model.name, second.model.name)
    for name in ("version", "tool", "created_at", "epoch"):
        if getattr(first, name) != getattr(second, name):
            found[name] = (str(getattr(first, name)), str(getattr(second, name)))
    both = [{root.root: _root_text(root) for root in manifest.roots} for manifest in (first, second)]
    if both[0] != both[1]:
        found["roots"] = (", ".join(both[0].values()) or "none", ", ".join(both[1].values()) or "none")
    for name in dict.fromkeys([*first.labels, *second.labels]):
        texts = first.labels.get(name, "none"), second.labels.get(name, "none")
        if first.labels.get(name) != second.labels.get(name):
            found[f"label {name}"] = texts
    return found


def _root_text(root: BundleRoot) -> str:
    whose = "" if root.namespace is None else f" of namespace {root.namespace!r}"
    adapter = "" if root.adapter is None else f" with adapter {short(root.adapter[0])} at scale {root.adapter[1]:g}"
    return f"{short(root.root)}{whose}{adapter}"
