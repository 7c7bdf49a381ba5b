"""What the halves of the connector tell each other. Everything here is pickled by vLLM between its processes."""

from __future__ import annotations

import dataclasses

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata

__all__ = ["BlockRun", "LayoutMessage", "StepMessage"]


@dataclasses.dataclass(frozen=True, slots=True)
class BlockRun:
    """Consecutive full blocks of one request.

    Attributes:
        request_id: vLLM's.
        root: fingerprint that the request's blocks start from, 32 bytes.
        namespace: the request's `cache_salt`.
        parent: fingerprint of the block before the first one, or the root.
        cfs: fingerprint of each block, in order.
        token_ids: uint32, little-endian, of all blocks.
        block_ids: where each block lies in the engine's KV cache.
        compute_s: seconds that computing the blocks would take; only of loads.
    """

    request_id: str
    root: bytes
    namespace: str | None
    parent: bytes
    cfs: tuple[bytes, ...]
    token_ids: bytes
    block_ids: tuple[int, ...]
    compute_s: float = 0.0


@dataclasses.dataclass(slots=True)
class StepMessage(KVConnectorMetadata):  # type: ignore[misc]
    """From the scheduler to the workers, once per step.

    Attributes:
        model_state: digest of the whole model, 32 bytes.
        loads, saves: what to bring into the KV cache, and what of it to keep.
        resets: how often the cache was reset since the start.
        computes: whether the model computes anything in this step.
    """

    model_state: bytes
    loads: list[BlockRun]
    saves: list[BlockRun]
    resets: int
    computes: bool


@dataclasses.dataclass(frozen=True, slots=True)
class LayoutMessage(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """From a worker to the scheduler, once at the start.

    Attributes:
        layout: id of the layout in which the worker keeps a block.
        block_bytes: bytes of a block, all layers of the worker.
    """

    layout: str
    block_bytes: int
