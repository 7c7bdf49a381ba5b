"""Writing bundles: units are spooled to a scratch file as they come, and chosen and written in one go at the end."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Final, Literal

from kitelib import __version__
from kitelib.errors import ConfigError, FormatError, InvalidRequestError
from kitelib.fingerprint import Fingerprint, model_key, short, store_key
from kitelib.upcycle.bundle import container, signing
from kitelib.upcycle.bundle.budget import Candidate, choose
from kitelib.upcycle.bundle.manifest import FORMAT_VERSION, BundleRoot, BundleUnit, Manifest, ModelIdentity
from kitelib.upcycle.bundle.manifest_json import (
    KINDS,
    is_plain,
    manifest_of,
    metadata_of,
    tensors_of,
    unit_entry,
    unit_fault,
)
from kitelib.upcycle.bundle.replacing import reason, target_of
from kitelib.upcycle.bundle.strict_json import dump
from kitelib.upcycle.codec import ITEM_BYTES, get_codec, is_lossless
from kitelib.upcycle.unit import Kind, RecyclableUnit

__all__ = ["MAX_HITS", "BundleSummary", "BundleWriter", "Compression", "says_rounded"]

Compression = Literal["none", "zstd", "entropy"]

_CODECS: Final[Mapping[str, Mapping[bool, tuple[str, str]]]] = {  # compression -> is it KV -> serializer, compression
    "none": {True: ("paged_kvcache_v2", "none"), False: ("raw", "none")},
    "zstd": {True: ("paged_kvcache_v2", "zstd"), False: ("raw", "zstd")},
    "entropy": {True: ("paged_kvcache_v2", "entropy"), False: ("raw", "none")},
}
_SEAL_BYTES: Final = 1024  # of a signature and an HMAC in the header, at most
MAX_HITS: Final = 1e15
"""Most hits of a unit."""


@dataclasses.dataclass(frozen=True, slots=True)
class BundleSummary:
    """What was written.

    Attributes:
        path: the file.
        digest: `Bundle.digest`.
        num_bytes: its size.
        header_bytes: how many of them are the header.
        data_bytes: bytes of all units' data, uncompressed.
        units: number of units by kind.
        tokens: tokens that its KV units cover.
        left_out: units that did not fit `max_bytes`.
        signer: public key that signed it, 64 hexadecimal digits, or None.
        numerics: those of its units, "standard" or "bitwise".
    """

    path: str
    digest: str
    num_bytes: int
    header_bytes: int
    data_bytes: int
    units: Mapping[str, int]
    tokens: int
    left_out: int
    signer: str | None = None
    numerics: str = "none"


class BundleWriter:
    """Collects units of one model and writes them as a bundle. A context manager; blocks, so use it in a thread.

    Memory stays small whatever the size: payloads wait in a scratch file beside the target, which has no name where the
    system can do that, so that nothing is left of it even if the process is killed.

    Args:
        path: the bundle to be, behind links; its folder must exist. It is replaced at once and only when it is complete,
            and keeps its permissions, owner and group.
        model: the units' model; units of others are refused.
        compression: "none" keeps data as it is, so that using it needs no decoding; "zstd" or "entropy" where smaller
            ("entropy" is for KV alone).
        epoch: freshness epoch of the pool that the units come from.
        labels: free-form texts by name.
        created_at: when it was made, seconds since 1970, UTC; None (default) is now.

    Raises:
        ConfigError: there can be no file at `path`, its folder can't be written, or a label is no text.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        model: ModelIdentity,
        *,
        compression: Compression = "none",
        epoch: int = 0,
        labels: Mapping[str, str] | None = None,
        created_at: float | None = None,
    ) -> None:
        if compression not in _CODECS:
            raise ConfigError(f"compression is {compression!r}; it must be one of {', '.join(_CODECS)}")
        self._path = os.fsdecode(path)
        self._model = model
        self._model_key = model_key(model.model_state)
        self._codecs = {is_kv: get_codec(*names) for is_kv, names in _CODECS[compression].items()}
        self._plain = {is_kv: get_codec(*names) for is_kv, names in _CODECS["none"].items()}
        self._epoch = epoch
        self._labels = dict(labels or {})
        self._created_at = time.time() if created_at is None else created_at
        self._units: dict[str, BundleUnit] = {}  # start and stop: where the payload lies in the scratch file
        self._hits: dict[str, float] = {}
        self._roots: list[BundleRoot] = []
        self._root_indices: dict[bytes, int] = {}
        _check_head(self._manifest(()))
        self._end = 0
        folder = os.path.dirname(target_of(path))
        try:
            self._scratch = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115, closed by `abandon`
        except OSError as error:
            raise ConfigError(
                f"the bundle {self._path!r} can't be written: its folder {folder!r} takes no files ({error.strerror}); "
                "choose one that can be written to"
            ) from error

    def add(self, unit: RecyclableUnit, root: BundleRoot, *, hits: float = 1.0) -> bool:
        """Takes a unit; False if it is there already, then only its hits grow.

        Raises:
            InvalidRequestError: it is of another model, an adapter, of a size that no unit has, or rounded without its
                root saying so; or `hits` is no number from 0.
            ConfigError: the scratch file can't be written.
        """
        if unit.model_state != self._model.model_state:
            raise InvalidRequestError(
                f"a unit is of model state {short(unit.model_state)}; the bundle is of {short(self._model.model_state)}"
            )
        if self._is_known(unit, root, hits):
            return False
        index = self._root_index(root)
        codec, payload = self._encode(unit)
        entry = BundleUnit(
            kind=unit.kind,
            cf=unit.cf,
            parent=unit.parent,
            token_ids=unit.token_ids.copy(),  # it may be a view of something large
            layout=unit.layout,
            dtype=unit.dtype,
            shape=tuple(unit.shape),
            codec=codec,
            data_bytes=len(unit.data),
            epoch=unit.epoch,
            created_at=float(unit.created_at),
            sha256=hashlib.sha256(payload).digest(),
            crc32=zlib.crc32(payload),
            root=index,
            hits=0.0,
            start=0,
            stop=0,
        )
        self._keep(entry, payload, hits)
        return True

    def add_stored(self, unit: BundleUnit, payload: bytes | memoryview, root: BundleRoot) -> bool:
        """As `add`, of another bundle's unit with its payload as it is stored there and with its hits. The caller has
        compared the models and verified the payload.

        Raises:
            InvalidRequestError, ConfigError: as `add`.
        """
        if self._is_known(unit, root, unit.hits):
            return False
        self._keep(dataclasses.replace(unit, root=self._root_index(root)), payload, unit.hits)
        return True

    def finish(
        self,
        *,
        max_bytes: int | None = None,
        sign_key: str | os.PathLike[str] | None = None,
        hmac_key: bytes | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> BundleSummary:
        """Writes the bundle.

        Args:
            max_bytes: most bytes of the file; what is worth most per byte is kept, see `kitelib.upcycle.bundle.budget`.
            sign_key: PEM file of an Ed25519 private key to sign with.
            hmac_key: `PoolConfig.hmac_key` to authenticate with.
            progress: called with bytes written and bytes in all.

        Raises:
            ConfigError: nothing fits, the key can't be read, or the file can't be written.
            MissingExtraError: signing without `cryptography`.
        """
        if self._scratch.closed:
            raise InvalidRequestError("this writer has finished or was abandoned; make another one")
        units = [dataclasses.replace(unit, hits=self._hits[key]) for key, unit in self._units.items()]
        if max_bytes is not None:
            seal_bytes = _SEAL_BYTES if sign_key is not None or hmac_key is not None else 0
            units = self._chosen(units, max_bytes - seal_bytes)
        if not units:
            what = "no unit was added" if not self._units else f"no unit fits into max_bytes={max_bytes}"
            raise ConfigError(f"the bundle {self._path!r} would be empty: {what}")
        # Widest elements first, so that every tensor is aligned to its elements; else in the order they came.
        units.sort(key=_alignment, reverse=True)
        manifest = self._manifest(units)
        metadata, tensors = metadata_of(manifest), tensors_of(units)
        digest = container.content_digest(metadata, tensors)
        message, signer = container.seal_message(digest), None
        if sign_key is not None:
            metadata[container.SIGNATURE_KEY] = signing.sign_message(sign_key, message)
            signer = signing.public_key_of(sign_key)
        if hmac_key is not None:
            metadata[container.HMAC_KEY] = signing.bundle_hmac(hmac_key, message).hex()
        try:
            header_bytes, num_bytes = container.write_file(
                self._path, metadata, tensors, self._chunks(units), check=_check_readable, progress=progress
            )
        except (OSError, FormatError) as error:
            raise ConfigError(f"the bundle {self._path!r} can't be written: {reason(error)}") from error
        self.abandon()
        return BundleSummary(
            path=self._path,
            digest=digest.hex(),
            num_bytes=num_bytes,
            header_bytes=header_bytes,
            data_bytes=sum(unit.data_bytes for unit in units),
            units=dict(collections.Counter(unit.kind for unit in units)),
            tokens=sum(len(unit.token_ids) for unit in units if unit.kind == "kv"),
            left_out=len(self._units) - len(units),
            signer=signer,
            numerics=manifest.numerics,
        )

    def abandon(self) -> None:
        """Removes the scratch file; nothing is written. Idempotent."""
        self._scratch.close()

    def __enter__(self) -> BundleWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abandon()

    def _encode(self, unit: RecyclableUnit) -> tuple[str, bytes | memoryview]:
        """Codec and payload: compressed if that is asked for and smaller."""
        codec, plain = self._codecs[unit.kind == "kv"], self._plain[unit.kind == "kv"]
        payload = codec.encode(unit.data, unit.dtype, unit.shape)
        if codec is not plain and len(payload) >= len(unit.data):
            codec, payload = plain, plain.encode(unit.data, unit.dtype, unit.shape)
        return codec.name, payload

    def _root_index(self, root: BundleRoot) -> int:
        index = self._root_indices.get(root.root)
        if index is None:
            _check_head(dataclasses.replace(self._manifest(()), roots=(root,)))
            index = self._root_indices[root.root] = len(self._roots)
            self._roots.append(root)
        return index

    def _manifest(self, units: Sequence[BundleUnit]) -> Manifest:
        """What the bundle says, with only the roots that its units use; those are numbered anew."""
        used = sorted({unit.root for unit in units})
        index = {old: new for new, old in enumerate(used)}
        return Manifest(
            version=FORMAT_VERSION,
            tool=f"kitelib {__version__}",
            created_at=self._created_at,
            epoch=self._epoch,
            model=self._model,
            roots=tuple(self._roots[old] for old in used),
            units=tuple(dataclasses.replace(unit, root=index[unit.root]) for unit in units),
            labels=self._labels,
        )

    def _chosen(self, units: list[BundleUnit], max_bytes: int) -> list[BundleUnit]:
        bare = dataclasses.replace(self._manifest(()), roots=tuple(self._roots))
        left = max_bytes - len(container.encode_header(metadata_of(bare), {})) - container.ALIGN
        offset_digits = len(str(self._end))
        keys = {(unit.kind, unit.cf): key for key, unit in zip(self._units, units, strict=True)}
        candidates = [
            Candidate(
                key=keys[unit.kind, unit.cf],
                parent=_parent_key(unit, keys),
                num_bytes=unit.stop - unit.start + _header_share(unit, offset_digits),
                saved_tokens=_saved_tokens(unit),
                hits=unit.hits,
            )
            for unit in units
        ]
        return [units[index] for index in choose(candidates, left)]

    def _chunks(self, units: Iterable[BundleUnit]) -> Iterator[bytes]:
        for unit in units:
            yield from container.read_chunks(self._scratch.fileno(), unit.start, unit.stop)

    def _is_known(self, unit: RecyclableUnit | BundleUnit, root: BundleRoot, hits: float) -> bool:
        """Whether the unit is there, and then counts its hits; refuses what a bundle can't hold."""
        if self._scratch.closed:
            raise InvalidRequestError("this writer has finished or was abandoned; make another one")
        if unit.kind not in KINDS:
            raise InvalidRequestError(f"a unit is of kind {unit.kind!r}; a bundle holds {', '.join(KINDS)}")
        data_bytes = unit.data_bytes if isinstance(unit, BundleUnit) else len(unit.data)
        if fault := unit_fault(self._model, unit.kind, unit.layout, len(unit.token_ids), data_bytes):
            raise InvalidRequestError(f"the {unit.kind} unit {short(unit.cf)} {fault}")
        if not is_lossless(unit.codec) and (unit.kind != "kv" or not says_rounded(root)):
            raise InvalidRequestError(
                f"the {unit.kind} unit {short(unit.cf)} was rounded by the codec {unit.codec!r}, and its root does not "
                "say so: in a bundle it would look exact"
            )
        if not 0 <= hits <= MAX_HITS:
            raise InvalidRequestError(f"hits is {hits}; it must be a number from 0 to {MAX_HITS:g}")
        key = store_key(self._model_key, unit.kind, unit.cf)
        if key in self._units:
            self._hits[key] += hits
        return key in self._units

    def _keep(self, unit: BundleUnit, payload: bytes | memoryview, hits: float) -> None:
        try:
            _write_all(self._scratch.fileno(), payload, self._end)
        except OSError as error:
            raise ConfigError(f"the bundle {self._path!r} can't be written: {reason(error)}") from error
        start, self._end = self._end, self._end + len(payload)
        key = store_key(self._model_key, unit.kind, unit.cf)
        self._units[key] = dataclasses.replace(unit, start=start, stop=self._end)
        self._hits[key] = hits


def says_rounded(root: BundleRoot) -> bool:
    """Whether the KV that starts there is known to be rounded."""
    return root.execution_path.get("kv_precision", "exact") != "exact"


def _check_head(manifest: Manifest) -> None:
    """A reader must take what a bundle says of itself, and the caller should hear so before the units are computed."""
    try:
        again = manifest_of(container.Header(metadata_of(manifest), {}, 0, 0, b""))
    except (FormatError, TypeError, ValueError) as error:
        raise ConfigError(f"a bundle can't say this: {error}") from error
    for name in ("epoch", "model", "roots", "labels", "created_at"):
        given, read = getattr(manifest, name), getattr(again, name)
        if given != read:  # JSON has text for the names of everything
            raise ConfigError(f"a bundle can't say this: {name} is {given!r:.500}, and would be read as {read!r:.500}")


def _check_readable(file: int) -> None:
    """What is about to be a bundle must be one for a reader."""
    manifest_of(container.read_header(file))


def _alignment(unit: BundleUnit) -> int:
    return ITEM_BYTES[unit.dtype] if is_plain(unit.codec) else 1


def _parent_key(unit: BundleUnit, keys: Mapping[tuple[Kind, Fingerprint], str]) -> str | None:
    """The KV that a unit goes on from; for what follows a prompt, the KV of its tail if that is there."""
    if unit.kind != "kv" and ("kv", unit.cf) in keys:
        return keys["kv", unit.cf]
    return keys.get(("kv", unit.parent))


def _saved_tokens(unit: BundleUnit) -> int:
    """Tokens that need no model step: those of KV, at least one for logits, and those that followed."""
    if unit.kind == "completion":
        return max(unit.data_bytes // 4 - 1, 1)
    return len(unit.token_ids) if unit.kind == "kv" else max(len(unit.token_ids), 1)


def _header_share(unit: BundleUnit, offset_digits: int) -> int:
    """Bytes that a unit takes in the header at most: two entries, each with a comma."""
    ((name, tensor),) = tensors_of([unit]).items()
    return len(dump(unit_entry(unit))) + container.entry_bytes(name, tensor) + 2 * offset_digits


def _write_all(file: int, payload: bytes | memoryview, start: int) -> None:
    view = memoryview(payload).cast("B")
    while view:
        written = os.pwrite(file, view, start)
        view, start = view[written:], start + written
