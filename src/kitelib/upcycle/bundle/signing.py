"""Who made a bundle: Ed25519 signatures (RFC 8032, extra ``sign``) and, for a fleet with one shared secret, an HMAC.

What is signed is a message that `container` derives from a whole header, so a signature can't be moved to another
bundle. The public key in a signature only says which of the trusted keys to try; it is never trusted by itself.
"""

from __future__ import annotations

import hmac
import json
import os
import re
from collections.abc import Sequence
from typing import Any, Final

from kitelib.errors import BundleSignatureError, ConfigError, MissingExtraError
from kitelib.fingerprint import encode_fields

__all__ = [
    "bundle_hmac",
    "check_hmac",
    "new_key",
    "parse_public_key",
    "public_key_of",
    "sign_message",
    "verify_signature",
]

_ALGORITHM: Final = "ed25519"
_KEY_BYTES: Final = 32
_MAX_FILE_BYTES: Final = 2**16  # a key file has some 120 bytes; more is another file, given by mistake
_MAX_SIGNATURE_CHARS: Final = 1024  # the JSON text has some 270
_PUBLIC_KEY_FORMS: Final = "give an Ed25519 public key as 64 hexadecimal digits, 32 bytes, or PEM"
_HEX_KEY: Final = re.compile(r"[0-9a-fA-F]{64}")
_HEX_SIGNATURE: Final = re.compile(r"[0-9a-f]{128}")


def new_key() -> tuple[bytes, str]:
    """A new key pair: the private key as PEM (PKCS #8, not encrypted), the public key as 64 hexadecimal digits.

    Raises:
        MissingExtraError: `cryptography` is not installed.
    """
    ed25519, serialization = _cryptography("making a signing key")
    key = ed25519.Ed25519PrivateKey.generate()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return pem, key.public_key().public_bytes_raw().hex()


def public_key_of(key_file: str | os.PathLike[str]) -> str:
    """The public key, 64 hexadecimal digits, of a private key in a PEM file.

    Raises:
        ConfigError, MissingExtraError: as `sign_message`.
    """
    public: bytes = _private_key(key_file).public_key().public_bytes_raw()
    return public.hex()


def parse_public_key(key: str | bytes) -> bytes:
    """An Ed25519 public key as its 32 bytes.

    Args:
        key: 64 hexadecimal digits, the 32 bytes themselves, or PEM (text or bytes).

    Raises:
        ConfigError: it is none of these, or a private key.
        MissingExtraError: it is PEM, and `cryptography` is not installed.
    """
    if isinstance(key, bytes) and len(key) == _KEY_BYTES:
        return key
    text = key.decode("ascii", "replace") if isinstance(key, bytes) else key
    if not isinstance(text, str):
        raise ConfigError(f"a trusted key is of type {type(key).__name__}; {_PUBLIC_KEY_FORMS}")
    text = text.strip()
    if _HEX_KEY.fullmatch(text):
        return bytes.fromhex(text)
    if "PRIVATE KEY-----" in text:
        # Not quoted: the message may end up in a log.
        raise ConfigError(
            "a trusted key is a private key; keep it where bundles are signed, and give its public key "
            "(`kite bundle keygen --public KEY.pem` prints it)"
        )
    if "-----BEGIN " not in text:
        raise ConfigError(f"a trusted key is {_shortened(key)}; {_PUBLIC_KEY_FORMS}")
    ed25519, serialization = _cryptography("reading a public key from PEM")
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        public = serialization.load_pem_public_key(text.encode())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(
            f"a trusted key is {_shortened(key)}, which holds no public key; {_PUBLIC_KEY_FORMS}"
        ) from error
    if not isinstance(public, ed25519.Ed25519PublicKey):
        raise ConfigError(f"a trusted key is {_shortened(key)} of another kind than Ed25519; {_PUBLIC_KEY_FORMS}")
    raw: bytes = public.public_bytes_raw()
    return raw


def sign_message(key_file: str | os.PathLike[str], message: bytes) -> str:
    """A signature of `message` as the JSON text that a bundle carries.

    Args:
        key_file: PEM file of an Ed25519 private key, not encrypted; `new_key` makes one.

    Raises:
        ConfigError: the file can't be read, or holds no such key.
        MissingExtraError: `cryptography` is not installed.
    """
    key = _private_key(key_file)
    return json.dumps(
        {
            "algorithm": _ALGORITHM,
            "public_key": key.public_key().public_bytes_raw().hex(),
            "signature": key.sign(_signed(message)).hex(),
        }
    )


def verify_signature(signature_json: str, message: bytes, trusted_keys: Sequence[str | bytes]) -> str:
    """Checks a signature that `sign_message` made; returns the signer's public key, 64 hexadecimal digits.

    Args:
        signature_json: from a bundle, not trusted.
        message: what must have been signed.
        trusted_keys: as of `parse_public_key`; the signer must be one of them.

    Raises:
        BundleSignatureError: the text is no signature, of another algorithm, of another key, or of another message.
        ConfigError: a trusted key is none.
        MissingExtraError: `cryptography` is not installed.
    """
    trusted = {parse_public_key(key) for key in trusted_keys}
    public_key, signature = _parse_signature(signature_json)
    if public_key not in trusted:
        raise BundleSignatureError(
            f"the bundle is signed with the key {public_key.hex()}, which is none of the {len(trusted)} trusted keys"
        )
    ed25519, _ = _cryptography("checking a bundle's signature")
    from cryptography.exceptions import InvalidSignature

    try:
        # Bytes that are no point of the curve fail here or there, depending on the release.
        ed25519.Ed25519PublicKey.from_public_bytes(public_key).verify(signature, _signed(message))
    except (InvalidSignature, ValueError) as error:
        raise BundleSignatureError(
            f"the signature with the trusted key {public_key.hex()} does not match: the bundle was changed after it "
            "was signed, or the signature is of another bundle"
        ) from error
    return public_key.hex()


def bundle_hmac(hmac_key: bytes, message: bytes) -> bytes:
    """HMAC-SHA256 of a bundle's message, 32 bytes, under a key that is derived from `PoolConfig.hmac_key`: what
    authenticates a bundle authenticates no unit of a store, and the other way round.

    Raises:
        ConfigError: the key is empty.
    """
    if not hmac_key:
        raise ConfigError("hmac_key is empty; give at least 16 random bytes, or None for bundles without HMAC")
    derived = hmac.digest(hmac_key, encode_fields("kite.bundle.key"), "sha256")
    return hmac.digest(derived, message, "sha256")


def check_hmac(hmac_key: bytes, message: bytes, given: bytes) -> bool:
    """Whether `given` is the `bundle_hmac` of `message`, in constant time.

    Raises:
        ConfigError: the key is empty.
    """
    return hmac.compare_digest(bundle_hmac(hmac_key, message), given)


def _signed(message: bytes) -> bytes:
    """The bytes under the signature: named, so that a key that also signs other things can't be made to sign a bundle."""
    return encode_fields("kite.bundle.signature", message)


def _parse_signature(text: str) -> tuple[bytes, bytes]:
    if len(text) > _MAX_SIGNATURE_CHARS:
        raise BundleSignatureError(
            f"the bundle's signature has {len(text)} characters; one has {_MAX_SIGNATURE_CHARS} at most"
        )
    try:
        pairs: Any = json.loads(text, object_pairs_hook=list)
    except (ValueError, RecursionError) as error:
        raise BundleSignatureError(f"the bundle's signature is not JSON: {error}") from error
    if not isinstance(pairs, list) or not all(isinstance(pair, tuple) and isinstance(pair[1], str) for pair in pairs):
        raise BundleSignatureError("the bundle's signature is not a JSON object of texts")
    fields = dict(pairs)
    if len(pairs) != len(fields) or set(fields) != {"algorithm", "public_key", "signature"}:
        raise BundleSignatureError(
            "the bundle's signature must have the fields algorithm, public_key and signature, each once; "
            f"it has {', '.join(f'{name[:40]!a}' for name, _ in pairs[:8]) or 'none'}"
        )
    if fields["algorithm"] != _ALGORITHM:
        raise BundleSignatureError(
            f"the bundle is signed with the algorithm {fields['algorithm'][:40]!a}; this release knows {_ALGORITHM!r}"
        )
    if not _HEX_KEY.fullmatch(fields["public_key"]) or not _HEX_SIGNATURE.fullmatch(fields["signature"]):
        raise BundleSignatureError(
            "the bundle's signature must have a public key of 64 and a signature of 128 hexadecimal digits"
        )
    return bytes.fromhex(fields["public_key"]), bytes.fromhex(fields["signature"])


def _private_key(key_file: str | os.PathLike[str]) -> Any:
    ed25519, serialization = _cryptography("signing a bundle")
    from cryptography.exceptions import UnsupportedAlgorithm

    name = os.fspath(key_file)
    try:
        with open(key_file, "rb") as file:
            pem = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"the signing key {name!r} can't be read: {error.strerror or error}") from error
    remedy = "give a PEM file with an Ed25519 private key that is not encrypted"
    if len(pem) > _MAX_FILE_BYTES:
        raise ConfigError(f"the signing key {name!r} has more than {_MAX_FILE_BYTES} bytes, so it is no key; {remedy}")
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except TypeError as error:  # that is how the library says it
        raise ConfigError(f"the signing key {name!r} is encrypted; {remedy}") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"the signing key {name!r} holds no private key; {remedy}") from error
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise ConfigError(f"the signing key {name!r} is not of the kind Ed25519; {remedy}")
    return key


def _shortened(key: str | bytes) -> str:
    return repr(key) if len(key) <= 24 else f"{key[:24]!r}... ({len(key)} long)"


def _cryptography(purpose: str) -> tuple[Any, Any]:
    """The modules for keys and for their file formats."""
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise MissingExtraError("cryptography", "sign", purpose) from error
    return ed25519, serialization
