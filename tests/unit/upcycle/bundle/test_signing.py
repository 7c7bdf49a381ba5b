"""Signatures and HMACs of bundles: what is accepted, what is refused, and what the refusal says."""

from __future__ import annotations

import hashlib
import hmac
import json
import pathlib
import subprocess
import sys

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, x25519

from kitelib import BundleSignatureError, ConfigError, MissingExtraError
from kitelib.fingerprint import encode_fields
from kitelib.stores.keys import unit_key
from kitelib.upcycle.bundle.signing import (
    bundle_hmac,
    check_hmac,
    new_key,
    parse_public_key,
    public_key_of,
    sign_message,
    verify_signature,
)

MESSAGE = b"all that the header says"


@pytest.fixture
def key_file(tmp_path: pathlib.Path) -> pathlib.Path:
    pem, _ = new_key()
    path = tmp_path / "signing.pem"
    path.write_bytes(pem)
    return path


def test_what_a_trusted_key_signed_is_accepted_in_every_form_of_the_key(key_file):
    public = public_key_of(key_file)
    signature = sign_message(key_file, MESSAGE)
    loaded = ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(public))
    pem = loaded.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    forms: list[str | bytes] = [
        public,
        public.upper(),
        public.encode(),
        f"  {public}\n",
        bytes.fromhex(public),
        pem,
        pem.decode(),
    ]
    for form in forms:
        assert parse_public_key(form) == bytes.fromhex(public)
        assert verify_signature(signature, MESSAGE, [new_key()[1], form]) == public


def test_a_new_key_is_new_and_its_pem_is_what_other_tools_read():
    (first_pem, first), (second_pem, second) = new_key(), new_key()
    assert first != second
    assert first_pem != second_pem
    loaded = serialization.load_pem_private_key(first_pem, None)
    assert isinstance(loaded, ed25519.Ed25519PrivateKey)
    assert loaded.public_key().public_bytes_raw().hex() == first
    assert first_pem.startswith(b"-----BEGIN PRIVATE KEY-----\n")


def test_the_signature_is_plain_ed25519_over_a_named_message(key_file):
    # So that a verifier can be written without kitelib.
    fields = json.loads(sign_message(key_file, MESSAGE))
    assert set(fields) == {"algorithm", "public_key", "signature"}
    public = ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(fields["public_key"]))
    public.verify(bytes.fromhex(fields["signature"]), encode_fields("kite.bundle.signature", MESSAGE))


def test_a_signature_of_the_bare_message_is_none(key_file):
    # A key that signs other things as well must not be usable to make a bundle's signature from one of those.
    private = serialization.load_pem_private_key(key_file.read_bytes(), None)
    assert isinstance(private, ed25519.Ed25519PrivateKey)
    forged = json.dumps(
        {
            "algorithm": "ed25519",
            "public_key": public_key_of(key_file),
            "signature": private.sign(MESSAGE).hex(),
        }
    )
    with pytest.raises(BundleSignatureError, match="does not match"):
        verify_signature(forged, MESSAGE, [public_key_of(key_file)])


@pytest.mark.parametrize("message", [b"", MESSAGE[:-1], MESSAGE + b"\0", MESSAGE.upper()])
def test_a_signature_of_another_message_is_refused(key_file, message):
    with pytest.raises(BundleSignatureError, match="does not match"):
        verify_signature(sign_message(key_file, message), MESSAGE, [public_key_of(key_file)])


def test_a_key_that_is_not_trusted_is_named(key_file):
    signature = sign_message(key_file, MESSAGE)
    for trusted in ([], [new_key()[1]]):
        with pytest.raises(BundleSignatureError, match=public_key_of(key_file)):
            verify_signature(signature, MESSAGE, trusted)


def test_a_foreign_signature_under_a_trusted_key_is_refused(key_file, tmp_path):
    other = tmp_path / "other.pem"
    other.write_bytes(new_key()[0])
    fields = json.loads(sign_message(other, MESSAGE))
    fields["public_key"] = public_key_of(key_file)
    with pytest.raises(BundleSignatureError, match="does not match"):
        verify_signature(json.dumps(fields), MESSAGE, [public_key_of(key_file)])


def test_every_changed_digit_of_a_signature_is_refused(key_file):
    fields = json.loads(sign_message(key_file, MESSAGE))
    signature = fields["signature"]
    for place in range(0, len(signature), 5):
        digit = "0" if signature[place] != "0" else "1"
        fields["signature"] = signature[:place] + digit + signature[place + 1 :]
        with pytest.raises(BundleSignatureError, match="does not match"):
            verify_signature(json.dumps(fields), MESSAGE, [fields["public_key"]])


def _with(**changes: object) -> str:
    fields: dict[str, object] = {"algorithm": "ed25519", "public_key": "a" * 64, "signature": "b" * 128}
    fields |= changes
    return json.dumps({name: value for name, value in fields.items() if value is not ...})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[" * 1000, "not JSON"),
        ("null", "object of texts"),
        ("[]", "it has none"),
        ('["algorithm"]', "object of texts"),
        (_with(signature=...), "it has 'algorithm', 'public_key'"),
        (_with(more="x"), "each once"),
        (_with()[:-1] + ', "algorithm": "ed25519"}', "each once"),
        (_with(algorithm="none"), "the algorithm 'none'"),
        (_with(algorithm="Ed25519"), "the algorithm 'Ed25519'"),
        (_with(algorithm=None), "object of texts"),
        (_with(algorithm={}), "object of texts"),
        (_with(signature=1), "object of texts"),
        (_with(public_key="a" * 63), "64 and a signature of 128"),
        (_with(public_key="g" * 64), "64 and a signature of 128"),
        (_with(public_key="a" * 64 + "\n"), "64 and a signature of 128"),
        (_with(algorithm="\x1b[2J" + "a" * 500), r"algorithm '\\x1b\[2Ja{36}'; this"),
        (json.dumps({"\x1b[2J" + "a" * 500: "b"}), r"it has '\\x1b\[2Ja{36}'$"),
        (_with(signature="b" * 126), "64 and a signature of 128"),
        (_with(signature="b" * 2000), "characters"),
    ],
)
def test_what_is_no_signature_is_refused_with_the_reason(text, says):
    with pytest.raises(BundleSignatureError, match=says):
        verify_signature(text, MESSAGE, ["a" * 64])


def test_a_trusted_key_that_is_no_point_of_the_curve_accepts_nothing():
    public = "02" + "00" * 31  # y = 2: x squared would be no square
    with pytest.raises(BundleSignatureError, match="does not match"):
        verify_signature(_with(public_key=public), MESSAGE, [public])


def test_a_private_key_is_no_trusted_key_and_is_not_shown(key_file):
    pem = key_file.read_text()
    for form in (pem, pem.encode()):
        with pytest.raises(ConfigError, match="is a private key") as caught:
            parse_public_key(form)
        assert pem.splitlines()[1] not in str(caught.value)


@pytest.mark.parametrize("key", ["", "ab", "a" * 63, "z" * 64, b"", b"\xff" * 31, b"\xff" * 33, "trusted.pem", 7, None])
def test_what_is_no_public_key_is_named(key):
    with pytest.raises(ConfigError, match="64 hexadecimal digits, 32 bytes, or PEM"):
        parse_public_key(key)


def test_public_keys_of_other_kinds_and_broken_pem_are_refused():
    encoding, form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    for other in (
        x25519.X25519PrivateKey.generate().public_key(),
        ec.generate_private_key(ec.SECP256R1()).public_key(),
    ):
        with pytest.raises(ConfigError, match="another kind than Ed25519"):
            parse_public_key(other.public_bytes(encoding, form))
    for text in (
        "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----",
        "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----",
        "-----BEGIN PUBLIC KEY-----",
    ):
        with pytest.raises(ConfigError, match="no public key"):
            parse_public_key(text)


def test_a_long_wrong_key_is_shortened_in_the_message():
    with pytest.raises(ConfigError) as caught:
        parse_public_key("x" * 10_000)
    assert len(str(caught.value)) < 200


def test_key_files_that_do_not_work_are_named(tmp_path):
    private = ed25519.Ed25519PrivateKey.generate()
    pkcs8 = serialization.PrivateFormat.PKCS8
    pem = serialization.Encoding.PEM
    encrypted = private.private_bytes(pem, pkcs8, serialization.BestAvailableEncryption(b"secret"))
    other = ec.generate_private_key(ec.SECP256R1()).private_bytes(pem, pkcs8, serialization.NoEncryption())
    public = private.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    cases = {
        "encrypted.pem": (encrypted, "is encrypted"),
        "ec.pem": (other, "not of the kind Ed25519"),
        "public.pem": (public, "holds no private key"),
        "text.pem": (b"hello", "holds no private key"),
        "empty.pem": (b"", "holds no private key"),
        "big.pem": (bytes(2**17), "so it is no key"),
    }
    for name, (content, says) in cases.items():
        (tmp_path / name).write_bytes(content)
        for use in (lambda path: sign_message(path, MESSAGE), public_key_of):
            with pytest.raises(ConfigError, match=says) as caught:
                use(tmp_path / name)
            assert name in str(caught.value)
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        sign_message(tmp_path / "missing.pem", MESSAGE)
    with pytest.raises(ConfigError, match="can't be read"):
        sign_message(tmp_path, MESSAGE)


def test_the_hmac_is_under_a_key_of_its_own():
    key = b"0123456789abcdef"
    derived = hmac.digest(key, encode_fields("kite.bundle.key"), "sha256")
    found = bundle_hmac(key, MESSAGE)
    assert found == hmac.new(derived, MESSAGE, hashlib.sha256).digest()
    unit = unit_key(key, None)
    assert unit is not None
    assert found not in (hmac.digest(key, MESSAGE, "sha256"), hmac.digest(unit, MESSAGE, "sha256"))


def test_the_hmac_is_checked():
    key = b"0123456789abcdef"
    given = bundle_hmac(key, MESSAGE)
    assert check_hmac(key, MESSAGE, given)
    assert not check_hmac(key, MESSAGE + b"x", given)
    assert not check_hmac(key + b"x", MESSAGE, given)
    assert not check_hmac(key, MESSAGE, given[:-1])
    assert not check_hmac(key, MESSAGE, b"")
    with pytest.raises(ConfigError, match="hmac_key is empty"):
        check_hmac(b"", MESSAGE, given)


def test_without_cryptography_only_what_needs_it_fails_and_names_the_extra(key_file, monkeypatch):
    public, signature = public_key_of(key_file), sign_message(key_file, MESSAGE)
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives", None)
    pem = "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----"
    for use in (
        new_key,
        lambda: public_key_of(key_file),
        lambda: sign_message(key_file, MESSAGE),
        lambda: verify_signature(signature, MESSAGE, [public]),
        lambda: parse_public_key(pem),
    ):
        with pytest.raises(MissingExtraError, match=r"kitelib\[sign\]") as caught:
            use()
        assert caught.value.extra == "sign"
    assert parse_public_key(public) == bytes.fromhex(public)
    with pytest.raises(BundleSignatureError, match="none of the 1 trusted"):
        verify_signature(signature, MESSAGE, [new_public := "ab" * 32])
    assert new_public != public
    assert check_hmac(b"0123456789abcdef", MESSAGE, bundle_hmac(b"0123456789abcdef", MESSAGE))


def test_importing_it_does_not_import_cryptography():
    code = "import sys, kitelib.upcycle.bundle.signing; sys.exit('cryptography' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
