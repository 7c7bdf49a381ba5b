"""What somebody who has no trusted key can do to a sealed bundle: all of it is refused where a seal is required."""

from __future__ import annotations

import hashlib
import json
import pathlib
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from kitelib import BundleError, BundleSignatureError
from kitelib.errors import ConfigError, FormatError
from kitelib.upcycle.bundle import Bundle
from kitelib.upcycle.bundle.container import HMAC_KEY, SIGNATURE_KEY
from kitelib.upcycle.bundle.editing import merge_bundles, sign_bundle
from kitelib.upcycle.bundle.manifest_json import BUNDLE_KEY, UNITS_KEY
from kitelib.upcycle.bundle.signing import new_key, public_key_of
from tests.support.bundle_files import bundle_file
from tests.support.bundle_units import BUNDLE_ROOT, IDENTITY, header_of, sample_units, write_raw
from tests.support.bundles import write_units
from tests.support.units import units_of

Forge = Callable[[dict[str, Any], bytearray], None]
"""Changes a file's header and data in place."""
SECRET = b"0123456789abcdef"


@pytest.fixture
def key_file(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "signing.pem"
    path.write_bytes(new_key()[0])
    return path


@pytest.fixture
def signed(tmp_path: pathlib.Path, key_file: pathlib.Path) -> pathlib.Path:
    """A bundle with a signature and an HMAC."""
    options: dict[str, Any] = {"labels": {"car": "one"}, "epoch": 3, "sign_key": key_file, "hmac_key": SECRET}
    write_units(tmp_path / "signed.kite", sample_units(), IDENTITY, BUNDLE_ROOT, **options)
    return tmp_path / "signed.kite"


def _texts(header: dict[str, Any]) -> dict[str, str]:
    texts: dict[str, str] = header["__metadata__"]
    return texts


def _change(header: dict[str, Any], key: str, change: Callable[[Any], object]) -> None:
    plain = json.loads(_texts(header)[key])
    change(plain)
    _texts(header)[key] = json.dumps(plain, sort_keys=True, separators=(",", ":"))


def _change_labels(header: dict[str, Any], data: bytearray) -> None:
    _change(header, BUNDLE_KEY, lambda plain: plain["labels"].update(car="two"))


def _change_epoch(header: dict[str, Any], data: bytearray) -> None:
    _change(header, BUNDLE_KEY, lambda plain: plain.update(epoch=9))


def _change_unit_epoch(header: dict[str, Any], data: bytearray) -> None:
    _change(header, UNITS_KEY, lambda plain: plain[0].update(epoch=9))


def _change_namespace(header: dict[str, Any], data: bytearray) -> None:
    _change(header, BUNDLE_KEY, lambda plain: plain["roots"][0].update(namespace="victim"))


def _change_tokens(header: dict[str, Any], data: bytearray) -> None:
    _change(header, UNITS_KEY, lambda plain: plain[0]["token_ids"].reverse())


def _leave_a_unit_out(header: dict[str, Any], data: bytearray) -> None:
    last = max((name for name in header if name != "__metadata__"), key=lambda name: header[name]["data_offsets"][1])
    del data[header.pop(last)["data_offsets"][0] :]
    _change(header, UNITS_KEY, lambda plain: plain.remove(next(u for u in plain if last.endswith(u["cf"]))))


def _change_payload_and_checksums(header: dict[str, Any], data: bytearray) -> None:
    entry = json.loads(_texts(header)[UNITS_KEY])[0]
    start, stop = header[f"{entry['kind']}.{entry['cf']}"]["data_offsets"]
    data[start] ^= 1
    payload = bytes(data[start:stop])
    sums = {"sha256": hashlib.sha256(payload).hexdigest(), "crc32": zlib.crc32(payload)}
    _change(header, UNITS_KEY, lambda plain: plain[0].update(sums))


def _claim_another_element_type(header: dict[str, Any], data: bytearray) -> None:
    _change(header, UNITS_KEY, lambda plain: [u.update(dtype="bfloat16") for u in plain if u["dtype"] == "float16"])
    for name, tensor in header.items():
        if name != "__metadata__" and tensor["dtype"] == "F16":
            tensor["dtype"] = "BF16"


FORGERIES = [
    _change_labels,
    _change_epoch,
    _change_unit_epoch,
    _change_namespace,
    _change_tokens,
    _leave_a_unit_out,
    _change_payload_and_checksums,
    _claim_another_element_type,
]


def _forged(path: pathlib.Path, forge: Forge) -> pathlib.Path:
    header, raw = header_of(path)
    data = bytearray(raw)
    forge(header, data)
    return write_raw(path.with_name("forged.kite"), header, bytes(data))


def test_a_rewritten_header_that_says_the_same_is_still_signed(signed, key_file):
    # So that the forgeries below are refused for what they change, and not for how this file writes headers.
    rewritten = _forged(signed, lambda header, data: None)
    with Bundle.open(rewritten, require_signature=True, trusted_keys=[public_key_of(key_file)]) as bundle:
        assert bundle.check() == []
    with Bundle.open(rewritten, hmac_key=SECRET) as bundle:
        assert bundle.authenticated


@pytest.mark.parametrize("forge", FORGERIES)
def test_a_signed_bundle_that_was_changed_is_refused(signed, key_file, forge):
    path = _forged(signed, forge)
    for require in (True, False):  # a signature that is there must be right, required or not
        with pytest.raises(BundleSignatureError, match=r"forged\.kite.* does not match"):
            Bundle.open(path, require_signature=require, trusted_keys=[public_key_of(key_file)])
    with pytest.raises(BundleSignatureError, match="HMAC of the bundle .* does not match"):
        Bundle.open(path, hmac_key=SECRET)
    with Bundle.open(path) as bundle:  # it is the seal alone that shows it: as a bundle it is well-formed
        assert bundle.signed_by == public_key_of(key_file)
        assert not bundle.authenticated


def test_seals_of_another_bundle_are_refused(signed, key_file, tmp_path):
    write_units(tmp_path / "other.kite", units_of([7] * 9), IDENTITY, BUNDLE_ROOT)

    def replay(header: dict[str, Any], data: bytearray) -> None:
        seals = _texts(header_of(signed)[0])
        _texts(header).update({name: seals[name] for name in (SIGNATURE_KEY, HMAC_KEY)})

    path = _forged(tmp_path / "other.kite", replay)
    with pytest.raises(BundleSignatureError, match="the signature is of another bundle"):
        Bundle.open(path, require_signature=True, trusted_keys=[public_key_of(key_file)])
    with pytest.raises(BundleSignatureError, match="HMAC of the bundle .* does not match"):
        Bundle.open(path, hmac_key=SECRET)


def test_a_bundle_signed_again_by_somebody_else_is_refused(signed, key_file, tmp_path):
    path = _forged(signed, _change_payload_and_checksums)
    other = tmp_path / "other.pem"
    other.write_bytes(new_key()[0])
    signer = sign_bundle(path, other)
    with pytest.raises(BundleSignatureError, match=f"{signer}, which is none of the 1 trusted keys"):
        Bundle.open(path, require_signature=True, trusted_keys=[public_key_of(key_file)])
    with pytest.raises(BundleSignatureError, match="HMAC of the bundle .* does not match"):
        Bundle.open(path, hmac_key=SECRET)

    def claim(header: dict[str, Any], data: bytearray) -> None:
        fields = json.loads(_texts(header)[SIGNATURE_KEY])
        _texts(header)[SIGNATURE_KEY] = json.dumps(fields | {"public_key": public_key_of(key_file)})

    with pytest.raises(BundleSignatureError, match="does not match"):
        Bundle.open(_forged(path, claim), trusted_keys=[public_key_of(key_file)])


def test_a_bundle_whose_seals_were_taken_off_is_refused_where_they_are_required(signed, key_file):
    def strip(header: dict[str, Any], data: bytearray) -> None:
        del _texts(header)[SIGNATURE_KEY], _texts(header)[HMAC_KEY]

    path = _forged(signed, strip)
    with pytest.raises(BundleSignatureError, match="is not signed, and a signature is required"):
        Bundle.open(path, require_signature=True, trusted_keys=[public_key_of(key_file)])
    with pytest.raises(BundleSignatureError, match="neither an HMAC nor a trusted signature"):
        Bundle.open(path, hmac_key=SECRET)


@pytest.mark.parametrize("seal", ["", "null", "{}", "[]", "x" * 5000, "\u00e9"])
def test_broken_seals_are_refused_and_not_taken_for_missing_ones(signed, key_file, seal):
    def spoil(header: dict[str, Any], data: bytearray) -> None:
        _texts(header).update({SIGNATURE_KEY: seal, HMAC_KEY: seal})

    path = _forged(signed, spoil)
    # A text that is not ASCII is no bundle's; any other one is no seal.
    wanted = BundleSignatureError if seal.isascii() else BundleError
    for options in ({"trusted_keys": [public_key_of(key_file)]}, {"hmac_key": SECRET}):
        with pytest.raises(wanted):
            Bundle.open(path, **options)


@pytest.mark.parametrize("keep_crc", [False, True])
def test_a_payload_that_was_changed_in_a_signed_bundle_is_never_given(signed, key_file, keep_crc):
    def spoil(header: dict[str, Any], data: bytearray) -> None:
        # The CRC-32 polynomial itself, least significant bit first: added anywhere, it leaves every CRC-32 as it is.
        pattern = ((0xEDB88320 << 1) | 1).to_bytes(5, "little") if keep_crc else b"\1"
        for place, byte in enumerate(pattern, start=4):
            data[place] ^= byte

    path = _forged(signed, spoil)
    for options in ({"trusted_keys": [public_key_of(key_file)]}, {"hmac_key": SECRET}):
        with Bundle.open(path, **options) as bundle:
            unit = bundle.units[0]
            assert (zlib.crc32(bundle.stored(unit)) == unit.crc32) == keep_crc
            for _ in range(2):
                with pytest.raises(FormatError, match="SHA-256 differs" if keep_crc else "CRC-32 differs"):
                    bundle.read(unit)
            assert [each for each, _ in bundle.check()] == [unit]


def test_a_wrong_trusted_key_is_noticed_without_a_signature(tmp_path):
    path = bundle_file(tmp_path / "unsigned.kite")
    Bundle.open(path).close()
    with pytest.raises(ConfigError, match="a trusted key is 'no key'"):
        Bundle.open(path, trusted_keys=["no key"])


def test_a_merged_bundle_may_need_parts_that_carry_the_hmac(tmp_path):
    """An HMAC vouches for everything in a bundle, so for what came from elsewhere too."""
    own = bundle_file(tmp_path / "own.kite", hmac_key=b"k" * 16)
    foreign, out = bundle_file(tmp_path / "foreign.kite"), tmp_path / "all.kite"
    with pytest.raises(BundleSignatureError, match="neither an HMAC nor a trusted signature"):
        merge_bundles([own, foreign], out, hmac_key=b"k" * 16, trusted_hmac_key=b"k" * 16)
    assert not out.exists()
    pem, public = new_key()
    (tmp_path / "key.pem").write_bytes(pem)
    sign_bundle(foreign, tmp_path / "key.pem")
    merge_bundles([own, foreign], out, hmac_key=b"k" * 16, trusted_hmac_key=b"k" * 16, trusted_keys=[public])
    with Bundle.open(out, hmac_key=b"k" * 16) as bundle:
        assert bundle.authenticated
