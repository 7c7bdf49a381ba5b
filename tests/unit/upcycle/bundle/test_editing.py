"""Signing, merging and comparing bundles: nothing is lost, nothing damaged passes, and a refusal names the file."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib

import numpy as np
import pytest
from safetensors import safe_open

from kitelib import BundleError, BundleMismatchError, BundleNotFoundError, BundleSignatureError, ConfigError
from kitelib.upcycle.bundle import Bundle, BundleRoot, ModelIdentity, container
from kitelib.upcycle.bundle.container import read_chunks
from kitelib.upcycle.bundle.editing import UnitGroup, diff_bundles, merge_bundles, sign_bundle
from kitelib.upcycle.bundle.signing import new_key, public_key_of, sign_message
from kitelib.upcycle.unit import RecyclableUnit
from tests.support.bundle_units import BUNDLE_ROOT, IDENTITY, header_of, sample_units, write_raw
from tests.support.bundles import write_units
from tests.support.units import ROOT, kv_unit, units_of

HMAC_KEY = b"0123456789abcdef"
OTHER_ROOT = BundleRoot(b"o" * 32, {"layout": "test.kv"}, "another tenant")


@pytest.fixture
def key_file(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "signing.pem"
    path.write_bytes(new_key()[0])
    return path


def _make(
    path: pathlib.Path,
    units: list[RecyclableUnit] | None = None,
    *,
    model: ModelIdentity = IDENTITY,
    root: BundleRoot = BUNDLE_ROOT,
    **options: object,
) -> pathlib.Path:
    write_units(path, sample_units() if units is None else units, model, root, **options)  # type: ignore[arg-type]
    return path


def _content(path: pathlib.Path) -> dict[str, tuple[bytes, float, bytes]]:
    """Store key -> payload, hits, root of every unit, all of them verified."""
    with Bundle.open(path) as bundle:
        assert bundle.check() == []
        roots = bundle.manifest.roots
        return {
            key: (bytes(bundle.stored(unit)), unit.hits, bytes(roots[unit.root].root))
            for key, unit in bundle.keys.items()
        }


def _damage(path: pathlib.Path) -> None:
    blob = bytearray(path.read_bytes())
    blob[-1] ^= 1
    path.write_bytes(blob)


def _files(folder: pathlib.Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


# --- sign


def test_signing_changes_nothing_but_the_signature(tmp_path, key_file):
    path = _make(tmp_path / "a.kite", hmac_key=HMAC_KEY, labels={"car": "one"}, compression="zstd")
    before, content = Bundle.open(path), _content(path)
    with before:
        signer = sign_bundle(path, key_file, tmp_path / "signed.kite")
        assert signer == public_key_of(key_file)
        with Bundle.open(tmp_path / "signed.kite", require_signature=True, trusted_keys=[signer]) as signed:
            assert signed.signer == signer
            assert signed.digest == before.digest
            assert signed.manifest.labels == before.manifest.labels
            assert signed.manifest.created_at == before.manifest.created_at
        assert before.signed_by is None
    assert _content(tmp_path / "signed.kite") == content
    with Bundle.open(tmp_path / "signed.kite", hmac_key=HMAC_KEY) as signed:  # the HMAC is still good
        assert signed.authenticated
    with safe_open(tmp_path / "signed.kite", "numpy") as file:
        assert len(list(file.keys())) == len(content)


def test_signing_in_place_replaces_an_earlier_signature_and_keeps_open_bundles_alive(tmp_path, key_file):
    path = _make(tmp_path / "a.kite")
    first = sign_bundle(path, key_file)
    content = _content(path)
    other = tmp_path / "other.pem"
    other.write_bytes(new_key()[0])
    with Bundle.open(path, trusted_keys=[first]) as old:
        second = sign_bundle(path, other)
        assert second != first
        assert old.check() == []  # a process that has it mapped is not disturbed
    with pytest.raises(BundleSignatureError, match="none of the 1 trusted keys"):
        Bundle.open(path, trusted_keys=[first])
    with Bundle.open(path, require_signature=True, trusted_keys=[second]) as bundle:
        assert bundle.signer == second
    assert _content(path) == content
    assert _files(tmp_path) == {"a.kite", "signing.pem", "other.pem"}


def test_signing_through_a_link_signs_the_file_behind_it(tmp_path, key_file):
    path = _make(tmp_path / "a.kite")
    (tmp_path / "link.kite").symlink_to(path)
    signer = sign_bundle(tmp_path / "link.kite", key_file)
    assert (tmp_path / "link.kite").is_symlink()
    with Bundle.open(path) as bundle:
        assert bundle.signed_by == signer


def test_a_bundle_that_changes_while_it_is_signed_is_left_alone(tmp_path, key_file, monkeypatch):
    path = _make(tmp_path / "a.kite")
    other = _make(tmp_path / "other.kite", units_of([3] * 9)).read_bytes()

    def sign_late(key: pathlib.Path, message: bytes) -> str:
        path.write_bytes(other)  # in place, as no tool should
        return sign_message(key, message)

    monkeypatch.setattr("kitelib.upcycle.bundle.editing.sign_message", sign_late)
    with pytest.raises(BundleError, match=r"a\.kite' can't be (signed|read)"):
        sign_bundle(path, key_file)
    assert path.read_bytes() == other
    assert _files(tmp_path) == {"a.kite", "other.kite", "signing.pem"}


def test_a_bundle_that_changes_after_it_was_copied_is_left_alone(tmp_path, key_file, monkeypatch):
    path = _make(tmp_path / "a.kite")
    blob = path.read_bytes()

    def read_and_touch(file, start, stop):
        yield from read_chunks(file, start, stop)
        os.utime(path, ns=(1, 1))

    monkeypatch.setattr("kitelib.upcycle.bundle.editing.read_chunks", read_and_touch)
    with pytest.raises(BundleError, match="the file was changed"):
        sign_bundle(path, key_file)
    assert path.read_bytes() == blob


def test_a_copy_that_is_another_bundle_is_not_put_in_place(tmp_path, key_file, monkeypatch):
    path = _make(tmp_path / "a.kite")
    blob = path.read_bytes()
    real = container.read_header

    def relabelled(file):
        header = real(file)
        texts = {**header.metadata, "kite.bundle": header.metadata["kite.bundle"].replace('"epoch":0', '"epoch":1')}
        return dataclasses.replace(header, metadata=texts) if file == opened[0] else header

    opened = []
    real_fileno = Bundle.fileno
    monkeypatch.setattr(Bundle, "fileno", lambda self: opened.append(real_fileno(self)) or opened[-1])
    monkeypatch.setattr("kitelib.upcycle.bundle.editing.read_header", relabelled)
    with pytest.raises(BundleError, match="the signed copy is not the same bundle"):
        sign_bundle(path, key_file)
    assert path.read_bytes() == blob


def test_a_damaged_bundle_is_not_signed_and_stays_as_it_is(tmp_path, key_file):
    path = _make(tmp_path / "a.kite")
    _damage(path)
    blob = path.read_bytes()
    with pytest.raises(BundleError, match=r"a\.kite' is not signed: 1 of its 6 units can't be used"):
        sign_bundle(path, key_file)
    assert path.read_bytes() == blob
    assert _files(tmp_path) == {"a.kite", "signing.pem"}


def test_signing_names_what_is_missing_and_leaves_nothing_behind(tmp_path, key_file):
    with pytest.raises(BundleNotFoundError, match=r"none\.kite"):
        sign_bundle(tmp_path / "none.kite", key_file)
    path = _make(tmp_path / "a.kite")
    blob = path.read_bytes()
    with pytest.raises(ConfigError, match=r"no\.pem"):
        sign_bundle(path, tmp_path / "no.pem")
    with pytest.raises(ConfigError, match=r"missing/b\.kite' can't be written"):
        sign_bundle(path, key_file, tmp_path / "missing" / "b.kite")
    with pytest.raises(BundleError, match="no safetensors file|can't be used"):
        sign_bundle(key_file, key_file)
    assert path.read_bytes() == blob
    assert _files(tmp_path) == {"a.kite", "signing.pem"}


# --- merge


def test_merging_unites_units_roots_and_labels_and_adds_hits(tmp_path):
    prompt = [5, 5, 5, 5, 6, 6, 6, 6, 7]
    first = _make(tmp_path / "a.kite", labels={"car": "one", "of": "a"}, epoch=7)
    others = [*sample_units()[:2], *units_of(prompt)]
    second = _make(tmp_path / "b.kite", others, labels={"car": "two", "by": "b"}, epoch=5)
    foreign = _make(tmp_path / "c.kite", [kv_unit(prompt, 0, 4, root=OTHER_ROOT.root)], root=OTHER_ROOT, epoch=6)
    summary = merge_bundles([first, second, foreign], tmp_path / "m.kite", labels={"of": "all"})
    expected = {**_content(foreign), **_content(second), **_content(first)}
    both = _content(first).keys() & _content(second).keys()
    assert len(both) == 2
    found = _content(tmp_path / "m.kite")
    assert {key: (payload, root) for key, (payload, _, root) in found.items()} == {
        key: (payload, root) for key, (payload, _, root) in expected.items()
    }
    assert {key: hits for key, (_, hits, _) in found.items()} == {key: 2.0 if key in both else 1.0 for key in expected}
    assert {root for _, _, root in found.values()} == {ROOT, OTHER_ROOT.root}
    assert sum(summary.units.values()) == len(found)
    assert summary.left_out == 0
    with Bundle.open(tmp_path / "m.kite") as merged:
        assert merged.manifest.epoch == 5  # the lowest, so that it is refused wherever one of its parts is
        assert merged.manifest.labels == {"car": "one", "of": "all", "by": "b"}
        assert merged.manifest.model == IDENTITY
        assert sorted(merged.manifest.roots, key=lambda each: each.root) == [OTHER_ROOT, BUNDLE_ROOT]
        assert merged.digest == summary.digest


def test_payloads_are_copied_as_they_are_stored(tmp_path):
    prompt = [5] * 400
    plain = _make(tmp_path / "a.kite", units_of(prompt))
    packed = _make(tmp_path / "b.kite", [*units_of(prompt[:4] + [6] * 400)], compression="zstd")
    merge_bundles([packed, plain], tmp_path / "m.kite")
    codecs = {}
    for path in (plain, packed, tmp_path / "m.kite"):
        with Bundle.open(path) as bundle:
            codecs[path.name] = {key: (unit.codec, unit.sha256) for key, unit in bundle.keys.items()}
    assert codecs["m.kite"] == codecs["a.kite"] | codecs["b.kite"]
    assert {codec for codec, _ in codecs["m.kite"].values()} > {"paged_kvcache_v2/none"}


def test_the_first_payload_of_a_unit_is_taken(tmp_path):
    unit = kv_unit([1, 2, 3, 4], 0, 4)
    other = dataclasses.replace(unit, data=np.flip(unit.data).copy())
    first, second = _make(tmp_path / "a.kite", [unit]), _make(tmp_path / "b.kite", [other])
    merge_bundles([first, second], tmp_path / "m.kite")
    merge_bundles([second, first], tmp_path / "n.kite")
    ((payload, hits, _),) = _content(tmp_path / "m.kite").values()
    assert (payload, hits) == (unit.data.tobytes(), 2.0)
    ((payload, hits, _),) = _content(tmp_path / "n.kite").values()
    assert (payload, hits) == (other.data.tobytes(), 2.0)


def test_a_merged_bundle_can_replace_one_of_its_parts_be_signed_and_authenticated(tmp_path, key_file):
    first, second = _make(tmp_path / "a.kite"), _make(tmp_path / "b.kite", units_of([3] * 9))
    expected = _content(first) | _content(second)
    calls: list[tuple[int, int]] = []
    summary = merge_bundles(
        [first, second],
        first,
        sign_key=key_file,
        hmac_key=HMAC_KEY,
        progress=lambda done, total: calls.append((done, total)),
    )
    assert summary.signer == public_key_of(key_file)
    assert calls[-1] == (summary.num_bytes, summary.num_bytes)
    with Bundle.open(first, require_signature=True, trusted_keys=[public_key_of(key_file)]) as bundle:
        assert bundle.signer == summary.signer
    with Bundle.open(first, hmac_key=HMAC_KEY) as bundle:
        assert bundle.authenticated
    assert _content(first) == expected
    assert _files(tmp_path) == {"a.kite", "b.kite", "signing.pem"}


def test_a_merged_bundle_keeps_what_is_used_most_within_its_bytes(tmp_path):
    often, seldom = [1] * 40, [2] * 40
    both = _make(tmp_path / "a.kite", units_of(often) + units_of(seldom))
    again = _make(tmp_path / "b.kite", units_of(often))
    whole = merge_bundles([both, again], tmp_path / "m.kite")
    max_bytes = whole.num_bytes * 3 // 4
    summary = merge_bundles([both, again], tmp_path / "m.kite", max_bytes=max_bytes)
    assert summary.num_bytes <= max_bytes
    assert (tmp_path / "m.kite").stat().st_size == summary.num_bytes
    assert summary.left_out > 0
    assert {hits for _, hits, _ in _content(tmp_path / "m.kite").values()} == {1.0, 2.0}
    used = {key for key in _content(again) if ":kv:" in key}
    assert used <= _content(tmp_path / "m.kite").keys()


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"model_state": b"o" * 32, "state_parts": {"weights": "4567"}}, {"weights": ("4567", "0123")}),
        ({"block_tokens": 8, "block_bytes": 192}, {"block_tokens": ("8", str(IDENTITY.block_tokens))}),
        ({"layout": "other.kv"}, {"layout": ("other.kv", IDENTITY.layout)}),
    ],
)
def test_bundles_of_other_models_are_refused_with_the_file_and_the_fields(tmp_path, changes, fields):
    model = dataclasses.replace(IDENTITY, **changes)
    unit = dataclasses.replace(kv_unit([1, 2, 3, 4], 0, 4), model_state=model.model_state, layout=model.layout)
    first, other = _make(tmp_path / "a.kite"), _make(tmp_path / "b.kite", [unit], model=model)
    with pytest.raises(BundleMismatchError, match=r"b\.kite' can't be merged") as caught:
        merge_bundles([first, first, other], tmp_path / "m.kite")
    assert caught.value.differences == fields
    for name, pair in fields.items():
        assert f"{name} is {pair[0]} in the bundle and {pair[1]} in" in str(caught.value)
    assert not (tmp_path / "m.kite").exists()


def test_a_damaged_or_missing_part_is_named_and_nothing_is_written(tmp_path):
    first, second = _make(tmp_path / "a.kite"), _make(tmp_path / "b.kite", units_of([3] * 9))
    with pytest.raises(BundleNotFoundError, match=r"none\.kite"):
        merge_bundles([first, tmp_path / "none.kite"], tmp_path / "m.kite")
    _damage(second)
    with pytest.raises(BundleError, match=r"b\.kite' can't be merged"):
        merge_bundles([first, second], tmp_path / "m.kite")
    with pytest.raises(ConfigError, match="at least one path"):
        merge_bundles([], tmp_path / "m.kite")
    with pytest.raises(ConfigError, match=r"no\.pem"):
        merge_bundles([first], tmp_path / "m.kite", sign_key=tmp_path / "no.pem")
    assert _files(tmp_path) == {"a.kite", "b.kite"}


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        # Payload and checksums agree; only the fingerprint shows that it would be found by the wrong prompt.
        ("token_ids", [1, 2, 3, 5], "fingerprint"),
        ("hits", 1e300, "hits is 1e.300"),
        ("sha256", "00" * 32, "SHA-256 differs"),
    ],
)
def test_a_unit_that_says_something_wrong_is_not_merged(tmp_path, field, value, says):
    header, data = header_of(_make(tmp_path / "a.kite", [kv_unit([1, 2, 3, 4], 0, 4)]))
    (entry,) = json.loads(header["__metadata__"]["kite.units"])
    header["__metadata__"]["kite.units"] = json.dumps([entry | {field: value}])
    path = write_raw(tmp_path / "b.kite", header, data)
    Bundle.open(path).close()
    with pytest.raises(BundleError, match=rf"b\.kite' can't be merged.*{says}"):
        merge_bundles([tmp_path / "a.kite", path], tmp_path / "m.kite")
    assert not (tmp_path / "m.kite").exists()


def test_bundles_that_contradict_each_other_about_a_root_are_not_merged(tmp_path):
    first = _make(tmp_path / "a.kite")
    second = _make(tmp_path / "b.kite", root=dataclasses.replace(BUNDLE_ROOT, namespace="victim"))
    with pytest.raises(BundleError, match=r"b\.kite' says something else about the root"):
        merge_bundles([first, second], tmp_path / "m.kite")


def test_with_trusted_keys_every_part_must_be_signed(tmp_path, key_file):
    first, second = _make(tmp_path / "a.kite"), _make(tmp_path / "b.kite", units_of([3] * 9))
    trusted = [sign_bundle(first, key_file)]
    with pytest.raises(BundleSignatureError, match=r"b\.kite' is not signed"):
        merge_bundles([first, second], tmp_path / "m.kite", trusted_keys=trusted)
    sign_bundle(second, key_file)
    merge_bundles([first, second], tmp_path / "m.kite", trusted_keys=trusted)
    assert _content(tmp_path / "m.kite") == _content(first) | _content(second)
    with Bundle.open(tmp_path / "m.kite") as merged:
        assert merged.signed_by is None  # the parts' signatures are not of the whole


# --- diff


def test_equal_bundles_have_no_differences(tmp_path, key_file):
    path = _make(tmp_path / "a.kite")
    sign_bundle(path, key_file, tmp_path / "b.kite")
    diff = diff_bundles(path, tmp_path / "b.kite")
    assert diff.fields == {}
    assert diff.only_first == diff.only_second == diff.changed == UnitGroup((), 0, 0)
    assert len(diff.same.units) == len(sample_units())
    assert diff.same.tokens == 14  # two blocks and a tail of 10 tokens, and one other block
    assert diff.same.num_bytes == sum(len(unit.data) for unit in sample_units())


def test_units_are_told_apart_by_where_they_are_and_by_their_payload(tmp_path):
    shared, mine, theirs = (kv_unit([digit] * 4, 0, 4) for digit in (1, 2, 3))
    unit = kv_unit([4] * 4, 0, 4)
    other = dataclasses.replace(unit, data=(unit.data + 1).astype(np.uint8))
    first = _make(tmp_path / "a.kite", [shared, mine, unit])
    second = _make(tmp_path / "b.kite", [shared, theirs, *units_of([5, 5]), other])
    diff = diff_bundles(first, second)
    cfs = {name: [each.cf for each in getattr(diff, name).units] for name in ("only_first", "same", "changed")}
    assert cfs == {"only_first": [mine.cf], "same": [shared.cf], "changed": [unit.cf]}
    assert diff.changed.units[0].sha256 == hashlib.sha256(unit.data).digest()
    assert {each.cf for each in diff.only_second.units} == {theirs.cf, *(each.cf for each in units_of([5, 5]))}
    assert (diff.only_first.tokens, diff.only_first.num_bytes) == (4, len(mine.data))
    assert diff.only_second.tokens == 6
    back = diff_bundles(second, first)
    assert [each.cf for each in back.only_second.units] == [mine.cf]
    assert [each.sha256 for each in back.changed.units] == [hashlib.sha256(other.data).digest()]


def test_fields_of_the_manifests_are_told_apart(tmp_path):
    model = dataclasses.replace(IDENTITY, name="renamed", model_state=b"o" * 32, state_parts={"weights": "4567"})
    unit = dataclasses.replace(kv_unit([1] * 4, 0, 4, root=OTHER_ROOT.root), model_state=model.model_state)
    first = _make(tmp_path / "a.kite", labels={"car": "one", "x": "1"}, epoch=3)
    second = _make(tmp_path / "b.kite", [unit], model=model, root=OTHER_ROOT, labels={"car": "two", "y": "2"}, epoch=4)
    fields = dict(diff_bundles(first, second).fields)
    assert len(set(fields.pop("created_at"))) == 2
    assert fields.pop("roots") == (
        f"{'72' * 8} of namespace 'tenant' with adapter {'00' * 8} at scale 0.5",
        f"{'6f' * 8} of namespace 'another tenant'",
    )
    assert fields == {
        "weights": ("0123", "4567"),
        "name": ("test", "renamed"),
        "epoch": ("3", "4"),
        "label car": ("one", "two"),
        "label x": ("1", "none"),
        "label y": ("none", "2"),
    }


def test_a_bundle_that_can_not_be_used_is_named(tmp_path, key_file):
    path = _make(tmp_path / "a.kite")
    with pytest.raises(BundleError, match=r"signing\.pem"):
        diff_bundles(path, key_file)


def test_other_numerics_are_named_by_merge_and_diff(tmp_path):
    """Another layout comes with them, and would not tell anybody why."""
    standard = dataclasses.replace(BUNDLE_ROOT, execution_path={"numerics": "standard"}, root=ROOT)
    bitwise = dataclasses.replace(standard, execution_path={"numerics": "bitwise"})
    model = dataclasses.replace(IDENTITY, layout="other.kv")
    unit = dataclasses.replace(kv_unit([1, 2, 3, 4], 0, 4), layout=model.layout)
    first = _make(tmp_path / "a.kite", root=standard)
    other = _make(tmp_path / "b.kite", [unit], model=model, root=bitwise)
    with pytest.raises(
        BundleMismatchError, match="merged: numerics is bitwise in the bundle and standard in"
    ) as caught:
        merge_bundles([first, other], tmp_path / "m.kite")
    assert list(caught.value.differences) == ["numerics", "layout"]
    assert diff_bundles(first, other).fields["numerics"] == ("standard", "bitwise")
    assert "numerics" not in diff_bundles(first, first).fields
