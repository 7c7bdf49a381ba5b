"""`kite bundle inspect` and `diff`: what they say about real bundles, to people and to scripts, whoever made them."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kitelib.fingerprint import root_fingerprint
from kitelib.upcycle.bundle import Bundle, BundleRoot, BundleWriter
from kitelib.upcycle.bundle.container import SIGNATURE_KEY, read_header, write_file
from kitelib.upcycle.bundle.signing import new_key
from tests.support.bundle_files import EXECUTION_PATH, MODEL, TOKENS, bundle_file, root_for
from tests.support.units import BLOCK_TOKENS, kv_unit, units_of

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return bundle_file(tmp_path / "cockpit.kite", labels={"fleet": "cockpit", "version": "7"})


@pytest.fixture
def key(tmp_path: Path) -> tuple[Path, str]:
    """A private key's file, and the public key."""
    pem, public = new_key()
    file = tmp_path / "key.pem"
    file.write_bytes(pem)
    return file, public


def facts(out: str) -> dict[str, str]:
    """The first section of the output: names and texts."""
    return {line[:10].strip(): line[11:] for line in out.partition("\n\n")[0].splitlines()}


# inspect


def test_inspect_says_what_the_bundle_holds(kite_here: Run, bundle: Path) -> None:
    code, out, err = kite_here("bundle", "inspect", bundle)
    assert (code, err) == (0, "")
    with Bundle.open(bundle) as opened:
        digest = opened.digest
    shown = facts(out)
    assert (shown["file"], shown["digest"], shown["signature"]) == (str(bundle), digest, "none")
    assert shown["model"] == "test"
    assert shown["state"] == "6d" * 8
    assert shown["block"] == "4 tokens, 96 B; vocabulary 10"
    assert "by kitelib " in shown["made"]
    assert "weights: 0123abcd" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["kv", "4", "13", "312", "B", "312", "B", "100%", "paged_kvcache_v2/none", "4"] in rows
    assert ["logits", "1", "1", "40", "B", "40", "B", "100%", "raw/none", "1"] in rows
    assert [row[2:5] + row[5:] for row in rows if row[:1] in (["0"], ["1"])] == [
        ["llama_cpp", "standard", "plain", "(own)", "-", "4"],
        ["llama_cpp", "standard", "plain", "tenant", "-", "1"],
    ]
    assert "  fleet: cockpit" in out.splitlines()


def test_inspect_as_json_is_one_line_with_the_same(kite_here: Run, bundle: Path) -> None:
    code, out, err = kite_here("bundle", "inspect", bundle, "--json")
    assert (code, err, out.count("\n")) == (0, "", 1)
    said = json.loads(out)
    assert said["num_bytes"] == bundle.stat().st_size
    assert said["header_bytes"] == said["num_bytes"] - 352
    assert said["model"]["model_state"] == "6d" * 32
    assert said["model"]["state_parts"] == {"weights": "0123abcd", "kv_type": "f16"}
    assert [root["namespace"] for root in said["roots"]] == [None, "tenant"]
    assert said["roots"][0]["execution_path"] == EXECUTION_PATH
    assert said["kinds"]["kv"] == {
        "units": 4,
        "tokens": 13,
        "bytes": 312,
        "data_bytes": 312,
        "codecs": {"paged_kvcache_v2/none": 4},
    }
    assert said["labels"] == {"fleet": "cockpit", "version": "7"}
    assert (said["signature"], said["hmac"]) == ({"public_key": None, "verified": False}, False)
    assert "units" not in said


def test_inspect_lists_units_if_asked(kite_here: Run, bundle: Path) -> None:
    first = kv_unit(TOKENS, 0, BLOCK_TOKENS, root=root_for().root)
    tenants = kv_unit(TOKENS, 0, BLOCK_TOKENS, root=root_for(namespace="tenant").root)
    out = kite_here("bundle", "inspect", bundle, "--units")[1]
    rows = [line.split() for line in out.splitlines()]
    assert ["kv", first.cf.hex()[:16], "4", "96", "B", "1", "paged_kvcache_v2/none"] in rows
    assert ["kv", tenants.cf.hex()[:16], "4", "96", "B", "7", "paged_kvcache_v2/none"] in rows
    said = json.loads(kite_here("bundle", "inspect", bundle, "--units", "--json")[1])
    assert len(said["units"]) == 5
    (unit,) = [each for each in said["units"] if each["cf"] == first.cf.hex()]
    assert (unit["kind"], unit["tokens"], unit["dtype"], unit["shape"]) == ("kv", 4, "float16", [48])
    assert unit["parent"] == root_for().root.hex()


def test_inspect_touches_no_payload(kite_here: Run, bundle: Path) -> None:
    """Damage in a payload is for `verify` to find: reading gigabytes to say what a file is takes too long."""
    before = kite_here("bundle", "inspect", bundle, "--json", "--units")
    raw = bytearray(bundle.read_bytes())
    raw[-352:] = bytes(352)
    bundle.write_bytes(raw)
    assert kite_here("bundle", "inspect", bundle, "--json", "--units") == before


def test_compression_is_shown(kite_here: Run, tmp_path: Path) -> None:
    own = root_for()
    tokens = [5] * (64 * BLOCK_TOKENS)
    with BundleWriter(tmp_path / "small.kite", MODEL, compression="zstd") as writer:
        for unit in units_of(tokens, root=own.root):
            writer.add(unit, own)
        writer.finish()
    said = json.loads(kite_here("bundle", "inspect", tmp_path / "small.kite", "--json")[1])["kinds"]["kv"]
    assert said["bytes"] < said["data_bytes"] == 64 * BLOCK_TOKENS * 24
    assert set(said["codecs"]) == {"paged_kvcache_v2/zstd"}
    row = next(
        line for line in kite_here("bundle", "inspect", tmp_path / "small.kite")[1].splitlines() if line[:2] == "kv"
    )
    assert f"{said['bytes'] / said['data_bytes']:.0%}" in row.split()


def test_a_signature_is_shown_and_not_believed(kite_here: Run, tmp_path: Path, key: tuple[Path, str]) -> None:
    signed = bundle_file(tmp_path / "signed.kite", sign_key=key[0])
    out = kite_here("bundle", "inspect", signed)[1]
    assert facts(out)["signature"] == f"says it is of {key[1]}; not checked: give --trusted-key"
    said = json.loads(kite_here("bundle", "inspect", signed, "--json")[1])
    assert said["signature"] == {"public_key": key[1], "verified": False}


def test_a_trusted_signature_is_checked(kite_here: Run, tmp_path: Path, key: tuple[Path, str]) -> None:
    signed = bundle_file(tmp_path / "signed.kite", sign_key=key[0])
    code, out, _ = kite_here("bundle", "inspect", signed, "--trusted-key", key[1])
    assert (code, facts(out)["signature"]) == (0, f"valid, of the trusted key {key[1]}")
    said = json.loads(kite_here("bundle", "inspect", signed, "--json", "--trusted-key", key[1])[1])
    assert said["signature"] == {"public_key": key[1], "verified": True}
    code, out, err = kite_here("bundle", "inspect", signed, "--trusted-key", new_key()[1])
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert key[1] in err


def test_with_a_trusted_key_an_unsigned_bundle_is_refused(kite_here: Run, bundle: Path) -> None:
    code, out, err = kite_here("bundle", "inspect", bundle, "--trusted-key", new_key()[1])
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "sign" in err


@pytest.mark.parametrize("text", ["0123", "zz" * 32, "no-such-file.pem"])
def test_a_trusted_key_that_is_none_is_a_wrong_option(kite_here: Run, bundle: Path, text: str) -> None:
    code, out, err = kite_here("bundle", "inspect", bundle, "--trusted-key", text)
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_an_hmac_is_shown_and_checked_with_its_key(kite_here: Run, tmp_path: Path, bundle: Path) -> None:
    (tmp_path / "hmac.key").write_bytes(b"k" * 32)
    (tmp_path / "other.key").write_bytes(b"o" * 32)
    sealed = bundle_file(tmp_path / "sealed.kite", hmac_key=b"k" * 32)
    code, out, _ = kite_here("bundle", "inspect", sealed)
    assert (code, facts(out)["signature"]) == (0, "has an HMAC")
    assert kite_here("bundle", "inspect", sealed, "--hmac-key-file", tmp_path / "hmac.key")[0] == 0
    assert kite_here("bundle", "inspect", sealed, "--hmac-key-file", tmp_path / "other.key")[0] == 1
    assert kite_here("bundle", "inspect", bundle, "--hmac-key-file", tmp_path / "hmac.key")[0] == 1
    assert kite_here("bundle", "inspect", bundle, "--hmac-key-file", tmp_path / "none.key")[0] == 2


@pytest.mark.parametrize("raw", [b"", b"GGUF\x03\x00\x00\x00", os.urandom(512), b"\xff" * 64])
@pytest.mark.parametrize("command", ["inspect", "diff"])
def test_what_is_no_bundle_is_one_sentence(
    kite_here: Run, tmp_path: Path, bundle: Path, command: str, raw: bytes
) -> None:
    file = tmp_path / "other.kite"
    file.write_bytes(raw)
    code, out, err = kite_here("bundle", command, file, *([bundle] if command == "diff" else []))
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "other.kite" in err


def test_nothing_of_a_hostile_file_steers_the_terminal(kite_here: Run, tmp_path: Path) -> None:
    """Names, labels and paths are anybody's; they come out without control characters and in bounded lines."""
    evil = "\x1b]0;owned\x07\x1b[2J\r\n\x9b31m\u202e" + "x" * 3000
    model = dataclasses.replace(MODEL, name=evil, state_parts={evil: evil, **{f"part{n}": evil for n in range(90)}})
    path = {"backend": evil, evil: evil}
    root = BundleRoot(root_fingerprint(model.model_state, path, evil), path, namespace=evil)
    labels = {evil: evil, **{f"{n}{evil}": "" for n in range(90)}}
    with BundleWriter(tmp_path / "evil.kite", model, labels=labels) as writer:
        writer.add(kv_unit(TOKENS, 0, BLOCK_TOKENS, root=root.root), root)
        writer.finish()
    for options in ((), ("--units",), ("--json",), ("--json", "--units")):
        code, out, err = kite_here("bundle", "inspect", tmp_path / "evil.kite", *options)
        assert (code, err) == (0, "")
        assert all(character.isprintable() or character == "\n" for character in out)
        if "--json" in options:
            assert json.loads(out)["model"]["name"] == evil
        else:
            assert max(map(len, out.splitlines())) < 400
            assert len(out.splitlines()) < 140
            assert "... and 41 more" in out


def test_nothing_of_a_hostile_signature_steers_the_terminal(kite_here: Run, tmp_path: Path, bundle: Path) -> None:
    evil = "\x1b]0;owned\x07".ljust(64, "\x9b")
    with open(bundle, "rb") as file:
        header = read_header(file.fileno())
        signature = json.dumps({"algorithm": "ed25519", "public_key": evil, "signature": "00" * 64})
        payload = file.read()[header.data_start :]
        write_file(tmp_path / "evil.kite", {**header.metadata, SIGNATURE_KEY: signature}, header.tensors, [payload])
    for command in (["inspect"], ["inspect", "--json"], ["verify"], ["inspect", "--trusted-key", "00" * 32]):
        code, out, err = kite_here("bundle", *command, tmp_path / "evil.kite")
        assert code == (1 if "--trusted-key" in command else 0)
        assert all(character.isprintable() or character == "\n" for character in out + err)


# diff


def test_a_bundle_and_its_signed_copy_hold_the_same(
    kite_here: Run, tmp_path: Path, bundle: Path, key: tuple[Path, str]
) -> None:
    assert kite_here("bundle", "sign", bundle, "--key", key[0], "-o", tmp_path / "signed.kite")[0] == 0
    code, out, err = kite_here("bundle", "diff", bundle, tmp_path / "signed.kite")
    assert (code, err) == (0, "")
    assert out.endswith("They hold the same.\n")
    said = json.loads(kite_here("bundle", "diff", bundle, tmp_path / "signed.kite", "--json")[1])
    assert (said["differ"], said["fields"], said["same"]["units"]) == (False, {}, 5)


def test_when_it_was_made_is_no_difference(kite_here: Run, tmp_path: Path, bundle: Path) -> None:
    with Bundle.open(bundle) as opened:
        made_at = opened.manifest.created_at
    while (now := time.time()) <= made_at:
        time.sleep(0.001)
    again = bundle_file(tmp_path / "again.kite", labels={"fleet": "cockpit", "version": "7"})
    assert now > made_at
    code, out, _ = kite_here("bundle", "diff", bundle, again)
    assert code == 0
    assert any(line.startswith("created_at") and line.count("UTC") == 2 for line in out.splitlines())


def test_diff_says_what_only_one_has(kite_here: Run, tmp_path: Path, bundle: Path) -> None:
    longer = bundle_file(
        tmp_path / "new.kite", tokens=[*TOKENS, 1, 2, 3, 4], labels={"fleet": "cockpit", "version": "8"}
    )
    code, out, err = kite_here("bundle", "diff", bundle, longer)
    assert (code, err) == (1, "")
    rows = [line.split() for line in out.splitlines()]
    assert ["label", "version", "7", "8"] in rows
    # A's tail and logits are gone; B has a third block, another tail and other logits.
    assert ["only", "in", "A", "1", "kv,", "1", "logits", "1", "64", "B"] in rows
    assert ["only", "in", "B", "2", "kv,", "1", "logits", "5", "160", "B"] in rows
    assert ["the", "same", "3", "kv", "12", "288", "B"] in rows
    assert out.endswith("They differ.\n")
    code, out, _ = kite_here("bundle", "diff", bundle, longer, "--json")
    said = json.loads(out)
    assert (code, out.count("\n"), said["differ"]) == (1, 1, True)
    assert said["fields"]["label version"] == ["7", "8"]
    assert {name: said[name]["units"] for name in ("only_a", "only_b", "changed", "same")} == {
        "only_a": 2,
        "only_b": 3,
        "changed": 0,
        "same": 3,
    }
    assert ["kv", kv_unit(TOKENS, 8, 9, root=root_for().root).cf.hex()] in said["only_a"]["cfs"]


def test_a_label_alone_is_a_difference(kite_here: Run, tmp_path: Path, bundle: Path) -> None:
    other = bundle_file(tmp_path / "other.kite", labels={"fleet": "cockpit"})
    assert kite_here("bundle", "diff", bundle, other)[0] == 1


def test_another_payload_under_the_same_fingerprint_is_a_difference(
    kite_here: Run, tmp_path: Path, bundle: Path
) -> None:
    own = root_for()
    with BundleWriter(tmp_path / "other.kite", MODEL) as writer:
        for unit in units_of(TOKENS, root=own.root):
            writer.add(dataclasses.replace(unit, data=unit.data[::-1].copy()), own)
        writer.finish()
    said = json.loads(kite_here("bundle", "diff", bundle, tmp_path / "other.kite", "--json")[1])
    assert (said["changed"]["units"], said["same"]["units"], said["only_a"]["units"]) == (3, 1, 1)


def test_diff_of_hostile_files_steers_no_terminal(kite_here: Run, tmp_path: Path, bundle: Path) -> None:
    evil = "\x1b]0;owned\x07\r\n\u202e" + "x" * 3000
    model = dataclasses.replace(MODEL, name=evil, layout="test.kv")
    bad = bundle_file(tmp_path / "bad.kite", model=model, labels={f"{n}{evil}": evil for n in range(90)})
    code, out, _ = kite_here("bundle", "diff", bundle, bad)
    assert code == 1
    assert all(character.isprintable() or character == "\n" for character in out)
    assert max(map(len, out.splitlines())) < 400
    assert len(out.splitlines()) < 80


def test_inspect_says_whose_requests_it_serves(kite_here: Run, bundle: Path) -> None:
    assert "serves     requests of no namespace, tenant\n" in kite_here("bundle", "inspect", bundle)[1]
