"""What a bundle says about itself: plain dataclasses, and their JSON in the file's metadata."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from kitelib.abc import ModelInfo
from kitelib.fingerprint import Fingerprint
from kitelib.upcycle.unit import Kind

__all__ = ["FORMAT_VERSION", "BundleRoot", "BundleUnit", "Manifest", "ModelIdentity"]

FORMAT_VERSION: Final = 1


@dataclasses.dataclass(frozen=True, slots=True)
class ModelIdentity:
    """The model that computed a bundle's units.

    Attributes:
        name: for people.
        model_state: digest that units carry, 32 bytes.
        state_parts: what it is made of, see `ModelInfo.state_parts`.
        layout: id of the layout of its KV blocks.
        block_tokens: tokens in a full block.
        block_bytes: bytes of a full block's data.
        vocab_size: token ids.
    """

    name: str
    model_state: bytes
    state_parts: Mapping[str, str]
    layout: str
    block_tokens: int
    block_bytes: int
    vocab_size: int

    @classmethod
    def of(cls, info: ModelInfo) -> ModelIdentity:
        """Of a loaded model."""
        return cls(
            name=info.name,
            model_state=info.model_state,
            state_parts=dict(info.state_parts),
            layout=str(info.execution_path.get("layout", "none")),
            block_tokens=info.block_tokens,
            block_bytes=info.block_bytes,
            vocab_size=info.vocab_size,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class BundleRoot:
    """Where the fingerprints of some of a bundle's units start: how and for whom they were computed.

    Attributes:
        root: fingerprint of "nothing computed yet", 32 bytes; see `kitelib.fingerprint.root_fingerprint`.
        execution_path: names and values that entered it.
        namespace: the tenant; None is an engine's own namespace.
        adapter: content digest and scale of the LoRA adapter; None without one.
    """

    root: Fingerprint
    execution_path: Mapping[str, str | int | bool]
    namespace: str | None = None
    adapter: tuple[bytes, float] | None = None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class BundleUnit:
    """One recyclable unit of a bundle. Fields are those of `RecyclableUnit` where they have its names.

    Attributes:
        token_ids: uint32, shape (num_tokens,).
        codec: stored name of the codec of the payload.
        data_bytes: bytes that decoding gives.
        sha256: SHA-256 of the payload, 32 bytes.
        crc32: CRC-32 of the payload: checked at every use, where SHA-256 would cost as much as the rest.
        root: index in `Manifest.roots`.
        hits: how often it is expected to be used, or was used where it comes from; no unit, only for choosing.
        start, stop: where the payload lies in the file, bytes from its beginning.
    """

    kind: Kind
    cf: Fingerprint
    parent: Fingerprint
    token_ids: npt.NDArray[np.uint32]
    layout: str
    dtype: str
    shape: tuple[int, ...]
    codec: str
    data_bytes: int
    epoch: int
    created_at: float
    sha256: bytes
    crc32: int
    root: int
    hits: float
    start: int
    stop: int


@dataclasses.dataclass(frozen=True, slots=True)
class Manifest:
    """What a bundle holds.

    Attributes:
        version: format version.
        tool: who wrote it, e.g. "kitelib 0.1.0".
        created_at: seconds since 1970, UTC.
        epoch: freshness epoch of the pool it was made from; 0 for one that was computed for the bundle.
        model: the model that computed the units.
        roots: see `BundleRoot`.
        units: in the order of their payloads.
        labels: free-form texts by name.
    """

    version: int
    tool: str
    created_at: float
    epoch: int
    model: ModelIdentity
    roots: tuple[BundleRoot, ...]
    units: tuple[BundleUnit, ...]
    labels: Mapping[str, str]

    @property
    def numerics(self) -> str:
        """Those of its units: "standard", "bitwise", or whatever its roots say, in one text."""
        return ", ".join(sorted({str(root.execution_path.get("numerics", "none")) for root in self.roots})) or "none"
