"""`kite bundle keygen`, `sign` and `merge`: new bundles from bundles, and the keys for them."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import signal
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kitelib.upcycle.bundle import Bundle
from tests.support.bundle_files import MODEL, TOKENS, bundle_file

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return bundle_file(tmp_path / "cockpit.kite", labels={"fleet": "cockpit"})


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Another prompt: four blocks, a tail and logits, of which the first two blocks and the tenant's are in both."""
    return bundle_file(tmp_path / "other.kite", tokens=[*TOKENS[:8], 1, 1, 1, 1, 2, 2, 2, 2, 3], labels={"part": "2"})


@pytest.fixture
def key(kite_here: Run, tmp_path: Path) -> tuple[Path, str]:
    """A private key's file, and the public key."""
    file = tmp_path / "key.pem"
    code, out, _ = kite_here("bundle", "keygen", file)
    assert code == 0
    return file, out.strip()


def files_in(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir()}


# keygen


def test_keygen_writes_a_key_that_only_the_owner_reads(kite_here: Run, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        code, out, err = kite_here("bundle", "keygen", tmp_path / "fleet.pem")
    finally:
        os.umask(before)
    assert code == 0
    assert len(bytes.fromhex(out.strip())) == 32
    assert out.count("\n") == 1
    assert "secret" in err
    file = tmp_path / "fleet.pem"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.read_text().startswith("-----BEGIN PRIVATE KEY-----\n")


def test_keygen_makes_another_key_each_time(kite_here: Run, tmp_path: Path) -> None:
    assert kite_here("bundle", "keygen", tmp_path / "a")[1] != kite_here("bundle", "keygen", tmp_path / "b")[1]


def test_keygen_overwrites_nothing(kite_here: Run, key: tuple[Path, str]) -> None:
    before = key[0].read_bytes()
    code, out, err = kite_here("bundle", "keygen", key[0])
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "never overwritten" in err
    assert key[0].read_bytes() == before


def test_keygen_shows_the_public_key_of_a_key_that_is_there(
    kite_here: Run, key: tuple[Path, str], tmp_path: Path
) -> None:
    before = key[0].read_bytes()
    assert kite_here("bundle", "keygen", "--public", key[0]) == (0, f"{key[1]}\n", "")
    assert key[0].read_bytes() == before
    code, out, err = kite_here("bundle", "keygen", "--public", tmp_path / "none.pem")
    assert (code, out) == (2, "")
    assert "none.pem' can't be read: No such file" in err
    assert not (tmp_path / "none.pem").exists()


def test_keygen_follows_no_link(kite_here: Run, tmp_path: Path) -> None:
    """A link that somebody has laid where the key goes does not move it to a place that others read."""
    (tmp_path / "link.pem").symlink_to(tmp_path / "elsewhere")
    assert kite_here("bundle", "keygen", tmp_path / "link.pem")[0] == 2
    assert not (tmp_path / "elsewhere").exists()


def test_keygen_into_a_folder_that_is_not_there(kite_here: Run, tmp_path: Path) -> None:
    code, out, err = kite_here("bundle", "keygen", tmp_path / "none" / "key.pem")
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_half_a_key_is_not_left_behind(kite_here: Run, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, before[1]))
        code, out, _ = kite_here("bundle", "keygen", tmp_path / "key.pem")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert (code, out) == (2, "")
    assert not (tmp_path / "key.pem").exists()
    assert kite_here("bundle", "keygen", tmp_path / "key.pem")[0] == 0


@pytest.mark.parametrize("command", [["keygen", "NEW"], ["sign", "BUNDLE", "--key", "KEY"]])
def test_without_its_package_signing_names_the_extra(
    kite_here: Run, bundle: Path, key: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    for name in ("serialization", "asymmetric"):
        monkeypatch.setitem(sys.modules, f"cryptography.hazmat.primitives.{name}", None)
    monkeypatch.delattr("cryptography.hazmat.primitives.serialization", raising=False)
    places = {"NEW": bundle.parent / "new.pem", "BUNDLE": bundle, "KEY": key[0]}
    code, out, err = kite_here("bundle", *(places.get(each, each) for each in command))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "pip install 'kitelib[sign]'" in err
    assert not (bundle.parent / "new.pem").exists()


# sign


def test_sign_in_place_keeps_units_and_digest(kite_here: Run, bundle: Path, key: tuple[Path, str]) -> None:
    with Bundle.open(bundle) as opened:
        digest, units = opened.digest, [opened.read(unit).cf for unit in opened.units]
    before = files_in(bundle.parent)
    code, out, err = kite_here("bundle", "sign", bundle, "--key", key[0])
    assert (code, err, out.count("\n")) == (0, "", 1)
    assert key[1] in out
    with Bundle.open(bundle, require_signature=True, trusted_keys=[key[1]]) as signed:
        assert (signed.digest, signed.signer) == (digest, key[1])
        assert [signed.read(unit, full=True).cf for unit in signed.units] == units
    assert files_in(bundle.parent) == before


def test_sign_to_another_file_leaves_the_first(kite_here: Run, bundle: Path, key: tuple[Path, str]) -> None:
    before = bundle.read_bytes()
    out = bundle.parent / "signed.kite"
    assert kite_here("bundle", "sign", bundle, "--key", key[0], "-o", out)[0] == 0
    assert bundle.read_bytes() == before
    assert kite_here("bundle", "inspect", out, "--trusted-key", key[1])[0] == 0


def test_signing_again_replaces_the_signature(
    kite_here: Run, bundle: Path, key: tuple[Path, str], tmp_path: Path
) -> None:
    second = kite_here("bundle", "keygen", tmp_path / "second.pem")[1].strip()
    assert kite_here("bundle", "sign", bundle, "--key", key[0])[0] == 0
    assert kite_here("bundle", "sign", bundle, "--key", tmp_path / "second.pem")[0] == 0
    assert kite_here("bundle", "inspect", bundle, "--trusted-key", second)[0] == 0
    assert kite_here("bundle", "inspect", bundle, "--trusted-key", key[1])[0] == 1


def test_the_output_of_keygen_is_a_file_of_a_trusted_key(
    kite_here: Run, bundle: Path, key: tuple[Path, str], tmp_path: Path
) -> None:
    (tmp_path / "fleet.pub").write_text(f"{key[1]}\n")
    assert kite_here("bundle", "sign", bundle, "--key", key[0])[0] == 0
    assert kite_here("bundle", "inspect", bundle, "--trusted-key", tmp_path / "fleet.pub")[0] == 0


def test_a_private_key_is_never_a_trusted_one(kite_here: Run, bundle: Path, key: tuple[Path, str]) -> None:
    code, out, err = kite_here("bundle", "inspect", bundle, "--trusted-key", key[0])
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "private key" in err
    assert key[0].read_text().splitlines()[1] not in err


@pytest.mark.parametrize("raw", [None, b"", b"no key at all"])
def test_a_key_that_is_none_is_a_wrong_option(kite_here: Run, bundle: Path, tmp_path: Path, raw: bytes | None) -> None:
    if raw is not None:
        (tmp_path / "bad.pem").write_bytes(raw)
    before = bundle.read_bytes()
    code, out, err = kite_here("bundle", "sign", bundle, "--key", tmp_path / "bad.pem")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert bundle.read_bytes() == before


def test_a_damaged_bundle_is_not_signed(kite_here: Run, bundle: Path, key: tuple[Path, str]) -> None:
    """A signature would say that the damage is meant."""
    raw = bytearray(bundle.read_bytes())
    raw[-1] ^= 1
    bundle.write_bytes(raw)
    code, out, err = kite_here("bundle", "sign", bundle, "--key", key[0])
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert bundle.read_bytes() == bytes(raw)


# merge


def test_merge_has_the_units_of_all_each_once(kite_here: Run, bundle: Path, other: Path) -> None:
    out = bundle.parent / "all.kite"
    code, said, err = kite_here("bundle", "merge", bundle, other, "-o", out)
    assert (code, err) == (0, "")
    with Bundle.open(bundle) as a, Bundle.open(other) as b, Bundle.open(out) as merged:
        assert merged.keys.keys() == a.keys.keys() | b.keys.keys()
        assert len(merged.keys) < len(a.keys) + len(b.keys)
        assert merged.check() == []
        assert dict(merged.manifest.labels) == {"fleet": "cockpit", "part": "2"}
        assert merged.digest in said
        hits = {unit.cf: unit.hits for unit in merged.units}
        assert max(hits.values()) == 14  # the tenant's block, 7 in each
    assert "2 logits" in said


def test_that_a_merge_loses_signatures_is_said(
    kite_here: Run, bundle: Path, other: Path, key: tuple[Path, str]
) -> None:
    assert kite_here("bundle", "sign", other, "--key", key[0])[0] == 0
    merge = ["bundle", "merge", bundle, other, "-o", other]
    code, out, err = kite_here(*merge, "--sign-key", key[0])
    assert (code, err) == (0, "")
    assert f"signed by  {key[1]}" in out
    code, out, err = kite_here(*merge)
    assert code == 0
    assert "signed by  nobody" in out
    assert err == f"Parts were signed, and {other} is not: sign it with `kite bundle sign`, or give --sign-key.\n"


def test_merge_as_json(kite_here: Run, bundle: Path, other: Path) -> None:
    out = bundle.parent / "all.kite"
    code, said, _ = kite_here("bundle", "merge", bundle, other, "-o", out, "--json", "--label", "fleet=all")
    summary = json.loads(said)
    assert (code, said.count("\n")) == (0, 1)
    assert summary["num_bytes"] == out.stat().st_size
    assert summary["path"] == str(out)
    assert (summary["left_out"], summary["signer"]) == (0, None)
    with Bundle.open(out) as merged:
        assert summary["digest"] == merged.digest
        assert sum(summary["units"].values()) == len(merged.units)
        assert merged.manifest.labels["fleet"] == "all"


def test_a_merged_bundle_is_signed_and_sealed_if_asked(
    kite_here: Run, bundle: Path, other: Path, key: tuple[Path, str], tmp_path: Path
) -> None:
    out = tmp_path / "all.kite"
    (tmp_path / "hmac.key").write_bytes(b"k" * 32)
    command = ["bundle", "merge", bundle, other, "-o", out]
    assert kite_here(*command, "--sign-key", key[0], "--hmac-key-file", tmp_path / "hmac.key")[0] == 0
    with Bundle.open(out, require_signature=True, trusted_keys=[key[1]]) as merged:
        assert merged.signer == key[1]
    with Bundle.open(out, hmac_key=b"k" * 32) as merged:
        assert merged.authenticated
    # What the parts were signed with is gone.
    assert kite_here("bundle", "sign", bundle, "--key", key[0])[0] == 0
    assert kite_here(*command)[0] == 0
    with Bundle.open(out) as merged:
        assert merged.signed_by is None


def test_merge_takes_parts_of_trusted_signers_only_if_asked(
    kite_here: Run, bundle: Path, other: Path, key: tuple[Path, str]
) -> None:
    command = ["bundle", "merge", bundle, other, "-o", bundle.parent / "all.kite", "--trusted-key", key[1]]
    assert kite_here("bundle", "sign", bundle, "--key", key[0])[0] == 0
    code, out, err = kite_here(*command)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "other.kite" in err
    assert kite_here("bundle", "sign", other, "--key", key[0])[0] == 0
    assert kite_here(*command)[0] == 0


def test_merge_keeps_within_the_bytes_given(kite_here: Run, bundle: Path, other: Path) -> None:
    out = bundle.parent / "all.kite"
    assert kite_here("bundle", "merge", bundle, other, "-o", out)[0] == 0
    bound = out.stat().st_size - 500
    code, said, _ = kite_here("bundle", "merge", bundle, other, "-o", out, "--max-bytes", bound, "--json")
    summary = json.loads(said)
    assert code == 0
    assert out.stat().st_size == summary["num_bytes"] <= bound
    assert summary["left_out"] > 0
    with Bundle.open(out) as merged:
        assert merged.check() == []


def test_merge_into_less_than_anything_is_a_wrong_option(kite_here: Run, bundle: Path, other: Path) -> None:
    before = files_in(bundle.parent)
    code, out, err = kite_here("bundle", "merge", bundle, other, "-o", bundle.parent / "all.kite", "--max-bytes", "100")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert files_in(bundle.parent) == before


def test_bundles_of_other_models_do_not_merge(kite_here: Run, bundle: Path, tmp_path: Path) -> None:
    foreign = bundle_file(tmp_path / "foreign.kite", model=dataclasses.replace(MODEL, block_tokens=8, block_bytes=192))
    before = files_in(tmp_path)
    code, out, err = kite_here("bundle", "merge", bundle, foreign, "-o", tmp_path / "all.kite")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "foreign.kite" in err
    assert files_in(tmp_path) == before


def test_a_damaged_part_stops_the_merge(kite_here: Run, bundle: Path, other: Path) -> None:
    raw = bytearray(other.read_bytes())
    raw[-1] ^= 1
    other.write_bytes(raw)
    before = files_in(bundle.parent)
    code, out, err = kite_here("bundle", "merge", bundle, other, "-o", bundle.parent / "all.kite")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "other.kite" in err
    assert files_in(bundle.parent) == before


def test_one_bundle_is_no_merge(kite_here: Run, bundle: Path) -> None:
    code, out, err = kite_here("bundle", "merge", bundle, "-o", bundle.parent / "all.kite")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "two or more" in err
