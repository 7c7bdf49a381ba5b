"""`Bundle`: a mapped bundle file. Opening reads the header only; a unit's bytes are touched when it is used."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Any, Final

from kitelib.errors import BundleError, BundleNotFoundError, BundleSignatureError, ConfigError, FormatError
from kitelib.fingerprint import model_key, short, store_key
from kitelib.upcycle.bundle import signing, strict_json
from kitelib.upcycle.bundle.container import (
    HMAC_KEY,
    MAX_HEADER_BYTES,
    SIGNATURE_KEY,
    Header,
    MappedFile,
    read_header,
    seal_message,
)
from kitelib.upcycle.bundle.manifest import BundleUnit, Manifest
from kitelib.upcycle.bundle.manifest_json import manifest_of
from kitelib.upcycle.bundle.replacing import reason
from kitelib.upcycle.codec import codec_named
from kitelib.upcycle.unit import Expectation, RecyclableUnit

__all__ = ["Bundle"]

_HEX_DIGITS: Final = frozenset("0123456789abcdefABCDEF")


class Bundle:
    """A bundle of recyclable units in a memory-mapped file. Open it with `Bundle.open`; thread-safe.

    Units stay valid after `close`: the mapping lives as long as anything refers to it.

    Attributes:
        path: as given to `open`.
        manifest: what the bundle says about itself, checked for consistency.
        digest: SHA-256 over everything the header says, signature and HMAC left out; 64 hexadecimal digits. It names
            the content: copies of one bundle have the same, and signing does not change it.
        num_bytes: size of the file.
        signer: public key (64 hexadecimal digits) whose signature was found to be valid; None if it is unsigned, or
            nobody looked (no trusted keys were given).
        signed_by: public key that the signature claims to be of, not verified; None if there is no signature.
        has_hmac: whether there is an HMAC, valid or not.
        authenticated: whether signature or HMAC was found to be valid.
    """

    def __init__(self, path: str, file: MappedFile, header: Header, manifest: Manifest) -> None:
        """Use `open`."""
        self.path = path
        self.manifest = manifest
        self.digest = header.digest.hex()
        self.num_bytes = header.num_bytes
        self.signer: str | None = None
        self.signed_by = _claimed_signer(header.metadata.get(SIGNATURE_KEY))
        self.has_hmac = HMAC_KEY in header.metadata
        self.authenticated = False
        self._file = file
        self._index = {unit: index for index, unit in enumerate(manifest.units)}
        self._verified = bytearray(len(manifest.units))  # 1: the SHA-256 was right
        model = model_key(manifest.model.model_state)
        self._keys = {store_key(model, unit.kind, unit.cf): unit for unit in manifest.units}

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        require_signature: bool = False,
        trusted_keys: Sequence[str | bytes] | str | bytes = (),
        hmac_key: bytes | None = None,
        max_header_bytes: int = MAX_HEADER_BYTES,
    ) -> Bundle:
        """Maps a bundle and reads its header. Blocks for milliseconds.

        Args:
            path: the file.
            require_signature: refuse a bundle that none of `trusted_keys` has signed.
            trusted_keys: Ed25519 public keys: 64 hexadecimal digits, 32 bytes, or PEM text. With keys, a signature that
                is there must be valid and of one of them. A single text or bytes object is one key.
            hmac_key: `PoolConfig.hmac_key`: the bundle must carry a valid HMAC under it, or a trusted signature.
            max_header_bytes: longest header that is read; opening takes up to 16 times as much memory.

        Raises:
            BundleNotFoundError: there is no such file.
            BundleSignatureError: the policy above is not met.
            BundleError: it is no bundle, or damaged; nothing beyond the header's size was allocated.
            MissingExtraError: a signature is to be checked and `cryptography` is not installed.
            ConfigError: `require_signature` without `trusted_keys`, or a key that is none.
        """
        name = os.fsdecode(path)
        trusted_keys = [trusted_keys] if isinstance(trusted_keys, (str, bytes)) else trusted_keys
        if require_signature and not trusted_keys:
            raise ConfigError("require_signature needs trusted_keys: the Ed25519 public keys whose bundles are taken")
        for key in trusted_keys:  # a wrong one is an error whether the bundle is signed or not
            signing.parse_public_key(key)
        try:
            file = MappedFile(path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise BundleNotFoundError(f"there is no bundle {name!r}") from error
        except (OSError, ValueError, FormatError) as error:  # ValueError: a zero byte in the path
            raise BundleError(f"the bundle {name!r} can't be opened: {reason(error)}") from error
        try:
            header = read_header(file.file, max_header_bytes=max_header_bytes)
            bundle = cls(name, file, header, manifest_of(header))
            bundle._authenticate(header, require_signature, trusted_keys, hmac_key)
            file.map()
            header.forget()
        except BaseException as error:
            file.close()
            if isinstance(error, BundleError) or not isinstance(error, (FormatError, OSError, MemoryError)):
                raise
            why = "there is not enough memory" if isinstance(error, MemoryError) else reason(error)
            raise BundleError(f"the bundle {name!r} can't be used: {why}") from error
        return bundle

    def _authenticate(
        self, header: Header, require_signature: bool, trusted_keys: Sequence[str | bytes], hmac_key: bytes | None
    ) -> None:
        message = seal_message(header.digest)
        signature = header.metadata.get(SIGNATURE_KEY)
        if require_signature and signature is None:
            raise BundleSignatureError(f"the bundle {self.path!r} is not signed, and a signature is required")
        if trusted_keys and signature is not None:
            try:
                self.signer = signing.verify_signature(signature, message, trusted_keys)
            except BundleSignatureError as error:
                raise BundleSignatureError(f"the bundle {self.path!r} is refused: {error}") from error
        if hmac_key is not None and self.signer is None:
            given = header.metadata.get(HMAC_KEY)
            if given is None:
                raise BundleSignatureError(
                    f"the bundle {self.path!r} has neither an HMAC nor a trusted signature, and an HMAC key is set; "
                    "sign it, or make it with the key"
                )
            if not signing.check_hmac(hmac_key, message, _hmac_bytes(given)):
                raise BundleSignatureError(
                    f"the HMAC of the bundle {self.path!r} does not match: changed, or made under another key"
                )
        self.authenticated = self.signer is not None or hmac_key is not None

    @staticmethod
    async def build(engine: Any, prompts: Sequence[Any], path: str | os.PathLike[str], **options: Any) -> Any:
        """Computes prompts and writes what they leave behind to a new bundle; see `KiteEngine.build_bundle`."""
        return await engine.build_bundle(prompts, path, **options)

    @property
    def changed(self) -> bool:
        """Whether the file was found to be changed since it was opened; then no unit is read any more."""
        return self._file.changed

    @property
    def units(self) -> Sequence[BundleUnit]:
        """All units."""
        return self.manifest.units

    @property
    def keys(self) -> Mapping[str, BundleUnit]:
        """Store key (`kitelib.fingerprint.store_key`) -> unit."""
        return MappingProxyType(self._keys)

    def read(self, unit: BundleUnit, expected: Expectation | None = None, *, full: bool = False) -> RecyclableUnit:
        """A verified unit, copied from the mapped file.

        Checks: the file is still the one that was opened (size, modification time, inode), the CRC-32 at every use, the
        SHA-256 at the first use of an authenticated bundle and always if `full`, the fingerprint against the unit's own
        token ids, and all of `expected`.

        Raises:
            FormatError: any of it fails. Treat it as a miss.
        """
        index = self._index.get(unit)
        if index is None:
            raise FormatError(f"the unit {short(unit.cf)} is none of the bundle {self.path!r}")
        model_state = self.manifest.model.model_state
        if expected is not None:
            expected.check_identity(unit.kind, unit.cf, model_state, unit.data_bytes)
            expected.check_content(unit.token_ids, unit.layout)
        # A copy, checked after it was made: the file may be overwritten or cut off while the unit waits to be used.
        payload = bytes(self.stored(unit))
        if zlib.crc32(payload) != unit.crc32:
            raise FormatError(f"the payload of unit {short(unit.cf)} in {self.path!r} is damaged: its CRC-32 differs")
        if full or (self.authenticated and not self._verified[index]):
            if hashlib.sha256(payload).digest() != unit.sha256:
                raise FormatError(f"the payload of unit {short(unit.cf)} in {self.path!r} was changed: SHA-256 differs")
            self._verified[index] = 1
        return RecyclableUnit(
            kind=unit.kind,
            cf=unit.cf,
            parent=unit.parent,
            token_ids=unit.token_ids,
            model_state=model_state,
            epoch=unit.epoch,
            created_at=unit.created_at,
            layout=unit.layout,
            dtype=unit.dtype,
            shape=unit.shape,
            data=codec_named(unit.codec).decode(payload, unit.data_bytes, unit.dtype, unit.shape),
            codec=unit.codec,
        )

    def stored(self, unit: BundleUnit) -> memoryview:
        """A unit's payload as it lies in the file, read-only and not checked: for tools that move it.

        Raises:
            FormatError: the file was changed or closed.
        """
        return self._part(unit.start, unit.stop)

    def fileno(self) -> int:
        """Descriptor of the file, until `close`: for tools that copy it.

        Raises:
            FormatError: the file was changed or closed.
        """
        self._part(0, 0)
        return self._file.file

    def check(self, progress: Callable[[int], None] | None = None) -> list[tuple[BundleUnit, str]]:
        """Reads every unit in full; returns those that fail with the reason. `progress` is called with bytes done."""
        failures, done = [], 0
        for unit in self.manifest.units:
            try:
                self.read(unit, full=True)
            except FormatError as error:
                failures.append((unit, str(error)))
            done += unit.stop - unit.start
            if progress is not None:
                progress(done)
        return failures

    def close(self) -> None:
        """Gives the file back as soon as no unit of it is in use. Idempotent."""
        self._file.close()

    def __del__(self) -> None:
        # Freeing thousands of units is one long call unless it is done one by one, with other threads in between.
        leaving: list[Any] = [*self._keys, *self.manifest.units]
        del self._keys, self._index, self.manifest
        while leaving:
            leaving.pop()

    def _part(self, start: int, stop: int) -> memoryview:
        try:
            return self._file.part(start, stop)
        except FormatError as error:
            raise FormatError(f"the bundle {self.path!r} can't be read: {error}") from error

    def __enter__(self) -> Bundle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _claimed_signer(signature: str | None) -> str | None:
    if signature is None:
        return None
    try:
        plain = strict_json.parse(signature.encode("ascii"), SIGNATURE_KEY)
    except FormatError:
        return None
    claimed = plain.get("public_key") if isinstance(plain, dict) else None
    # It gets shown to people, so it must be nothing but digits.
    return claimed if isinstance(claimed, str) and len(claimed) == 64 and _HEX_DIGITS.issuperset(claimed) else None


def _hmac_bytes(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""
