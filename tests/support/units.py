"""A small model's facts and units, for tests of the pool that need no model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kitelib.abc import ModelInfo
from kitelib.fingerprint import BlockChain, block_fingerprint, end_fingerprint
from kitelib.upcycle.unit import RecyclableUnit

__all__ = ["BLOCK_TOKENS", "INFO", "LAYOUT", "ROOT", "TOKEN_BYTES", "chain_of", "kv_unit", "logits_unit", "units_of"]

BLOCK_TOKENS = 4
TOKEN_BYTES = 24
LAYOUT = "test.kv"
ROOT = b"r" * 32
INFO = ModelInfo(
    name="test",
    architecture="llama",
    context_tokens=64,
    capacity_tokens=256,
    max_sequences=4,
    max_step_tokens=16,
    vocab_size=10,
    end_token_ids=frozenset({0}),
    block_tokens=BLOCK_TOKENS,
    block_bytes=BLOCK_TOKENS * TOKEN_BYTES,
    model_state=b"m" * 32,
    execution_path={"layout": LAYOUT},
    numerics="bitwise",
    reuse_blocks=True,
    resident_idle_tokens=64,
)


def chain_of(tokens: Sequence[int], root: bytes = ROOT) -> BlockChain:
    """Fingerprints of a prompt."""
    return BlockChain(root, BLOCK_TOKENS, list(tokens))


def kv_unit(tokens: Sequence[int], start: int, stop: int, *, root: bytes = ROOT, epoch: int = 0) -> RecyclableUnit:
    """The unit of tokens ``start`` to ``stop`` of a prompt; its bytes tell which tokens it is of."""
    chain = chain_of(tokens, root)
    block = start // BLOCK_TOKENS
    parent = chain.fingerprints[block - 1] if block else chain.root
    ids = list(tokens[start:stop])
    data = np.repeat(np.array(ids, np.uint8), TOKEN_BYTES)
    return RecyclableUnit(
        kind="kv",
        cf=block_fingerprint(parent, ids) if len(ids) == BLOCK_TOKENS else end_fingerprint(parent, ids),
        parent=parent,
        token_ids=np.array(ids, np.uint32),
        model_state=INFO.model_state,
        epoch=epoch,
        created_at=1.0,
        layout=LAYOUT,
        dtype="float16",
        shape=(len(data) // 2,),
        data=data,
    )


def logits_unit(tokens: Sequence[int], *, root: bytes = ROOT, epoch: int = 0) -> RecyclableUnit:
    """The logits after a prompt."""
    chain = chain_of(tokens, root)
    logits = np.arange(INFO.vocab_size, dtype=np.float32) + sum(tokens)
    return RecyclableUnit(
        kind="logits",
        cf=chain.end(),
        parent=chain.last,
        token_ids=np.array(chain.tail, np.uint32),
        model_state=INFO.model_state,
        epoch=epoch,
        created_at=1.0,
        layout="kite.logits",
        dtype="float32",
        shape=(INFO.vocab_size,),
        data=logits.view(np.uint8),
    )


def units_of(tokens: Sequence[int], *, root: bytes = ROOT, epoch: int = 0) -> list[RecyclableUnit]:
    """All full blocks of a prompt, its tail if it has one, and its logits."""
    bounds = range(0, len(tokens), BLOCK_TOKENS)
    blocks = [
        kv_unit(tokens, start, min(start + BLOCK_TOKENS, len(tokens)), root=root, epoch=epoch) for start in bounds
    ]
    return [*blocks, logits_unit(tokens, root=root, epoch=epoch)]
