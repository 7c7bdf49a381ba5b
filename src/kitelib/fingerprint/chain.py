"""Fingerprints along a prompt, and the keys under which stores hold what they identify.

::

    cf[i]  = SHA-256(cf[i-1], token ids of block i)           one per full block, cf[-1] = root
    cf_end = SHA-256(cf[last full block], tail token ids)     the whole prompt

This is the only key builder: memory, disk, Redis, S3, bundles and connectors all use it.
"""

from __future__ import annotations

import hashlib
import operator
import re
import struct
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kitelib.errors import InvalidRequestError
from kitelib.fingerprint.identity import FINGERPRINT_BYTES, Fingerprint, encode_fields

__all__ = [
    "BlockChain",
    "TokenIds",
    "as_token_ids",
    "block_fingerprint",
    "block_fingerprints",
    "end_fingerprint",
    "model_key",
    "store_key",
]

TokenIds = Sequence[int] | npt.NDArray[np.integer]
"""Token ids in any form a caller may have them."""

_TOKEN_BYTES: Final = 4  # uint32, little-endian
_MAX_TOKEN_ID: Final = 2**32 - 1
_BLOCK_TAG: Final = encode_fields("kite.cf.block")
_END_TAG: Final = encode_fields("kite.cf.end")
_PREVIOUS_HEAD: Final = encode_fields(bytes(FINGERPRINT_BYTES))[:-FINGERPRINT_BYTES]
_IDS_HEAD: Final = struct.Struct("<cQ")
_MODEL_KEY: Final = re.compile(r"[0-9a-f]{16}")
_KINDS: Final = frozenset({"kv", "logits", "completion", "lora"})


def as_token_ids(token_ids: TokenIds) -> npt.NDArray[np.uint32]:
    """The ids as a uint32 array of shape (num_tokens,), little-endian and C-contiguous; a view where possible.

    Raises:
        InvalidRequestError: not a flat list of whole numbers from 0 to 2**32 - 1.
    """
    try:
        array = np.asarray(token_ids)
    except (ValueError, OverflowError) as error:
        raise InvalidRequestError(f"token ids must be a flat list of whole numbers: {error}") from error
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidRequestError(
            f"token ids have type {array.dtype} and shape {array.shape}; give a flat list of whole numbers"
        )
    if array.size and array.dtype != np.uint32 and (array.min() < 0 or array.max() > _MAX_TOKEN_ID):
        bad = array[(array < 0) | (array > _MAX_TOKEN_ID)][0]
        raise InvalidRequestError(f"a token id is {bad}; token ids go from 0 to 2**32 - 1")
    return np.ascontiguousarray(array, dtype="<u4")


def block_fingerprints(root: bytes, token_ids: TokenIds, block_tokens: int) -> list[Fingerprint]:
    """Fingerprints of the full blocks of a prompt, in order; tokens past the last full block are left out.

    Args:
        root: fingerprint to start from: `root_fingerprint`, or the last full block's to go on after it.
        token_ids: the tokens that follow `root`.
        block_tokens: tokens in one block, at least 1.
    """
    if block_tokens < 1:
        raise InvalidRequestError(f"block_tokens is {block_tokens}; give at least 1")
    _check_fingerprint(root)
    raw = as_token_ids(token_ids).tobytes()
    step = block_tokens * _TOKEN_BYTES
    # Same bytes as encode_fields(tag, previous, block_tokens, ids); what never changes is encoded once.
    before, after = _BLOCK_TAG + _PREVIOUS_HEAD, _ids_head(block_tokens)
    sha256, previous, found = hashlib.sha256, root, []
    for offset in range(0, len(raw) - step + 1, step):
        previous = sha256(before + previous + after + raw[offset : offset + step]).digest()
        found.append(Fingerprint(previous))
    return found


def block_fingerprint(previous: bytes, token_ids: TokenIds) -> Fingerprint:
    """Fingerprint of the one full block `token_ids`, given that of the block before it (or the root)."""
    return _link(_BLOCK_TAG, previous, token_ids)


def end_fingerprint(previous: bytes, tail_token_ids: TokenIds) -> Fingerprint:
    """Fingerprint of a whole prompt: what was computed at its last position, and its KV past the last full block.

    Args:
        previous: fingerprint of the prompt's last full block, or the root if it has none.
        tail_token_ids: the tokens after that block; fewer than a block, may be none.
    """
    return _link(_END_TAG, previous, tail_token_ids)


class BlockChain:
    """Fingerprints of a sequence that grows token by token.

    Attributes:
        root: fingerprint the chain started from.
        block_tokens: tokens in one block.
        fingerprints: one per full block so far.
        tail: token ids after the last full block; always fewer than `block_tokens`.
    """

    __slots__ = ("block_tokens", "fingerprints", "root", "tail")

    def __init__(self, root: bytes, block_tokens: int, token_ids: TokenIds = ()) -> None:
        _check_fingerprint(root)
        ids = as_token_ids(token_ids)
        self.root = Fingerprint(root)
        self.block_tokens = block_tokens
        self.fingerprints: list[Fingerprint] = block_fingerprints(root, ids, block_tokens)
        self.tail: list[int] = ids[len(self.fingerprints) * block_tokens :].tolist()

    def append(self, token_id: int) -> Fingerprint | None:
        """Adds one token; returns the fingerprint of the block that it completed, if it did."""
        if not 0 <= token_id <= _MAX_TOKEN_ID:
            raise InvalidRequestError(f"a token id is {token_id}; token ids go from 0 to 2**32 - 1")
        self.tail.append(operator.index(token_id))
        if len(self.tail) < self.block_tokens:
            return None
        fingerprint = block_fingerprint(self.last, self.tail)
        self.fingerprints.append(fingerprint)
        self.tail.clear()
        return fingerprint

    def extend(self, token_ids: Iterable[int]) -> None:
        """Adds tokens one after the other."""
        for token_id in token_ids:
            self.append(token_id)

    def copy(self) -> BlockChain:
        """An independent chain with the same tokens, for a forked sequence."""
        twin = BlockChain(self.root, self.block_tokens)
        twin.fingerprints, twin.tail = self.fingerprints.copy(), self.tail.copy()
        return twin

    @property
    def last(self) -> Fingerprint:
        """Fingerprint of the last full block, or the root: what the next block or the end goes on from."""
        return self.fingerprints[-1] if self.fingerprints else self.root

    @property
    def num_tokens(self) -> int:
        """Tokens in the chain."""
        return len(self.fingerprints) * self.block_tokens + len(self.tail)

    def end(self) -> Fingerprint:
        """`end_fingerprint` of all tokens so far."""
        return end_fingerprint(self.last, self.tail)


def model_key(model_state: bytes) -> str:
    """The model's part of a store key: the first 16 hexadecimal digits of the model state."""
    if len(model_state) != FINGERPRINT_BYTES:
        raise InvalidRequestError(f"model_state has {len(model_state)} bytes; give a digest of {FINGERPRINT_BYTES}")
    return model_state[:8].hex()


def store_key(model: str, kind: str, cf: bytes) -> str:
    """Key of one recyclable unit in every store: ``kite:{<cf[:4]>}:<model>:<kind>:<cf>``.

    The braces are part of the key: Redis Cluster chooses the slot from what stands between them. The full
    fingerprint is the identity; the model's part only lets an operator find or drop one model's units.

    Args:
        model: `model_key` of the model state; a display name is refused, since two models may share one.
        kind: "kv", "logits", "completion" or "lora".
        cf: the fingerprint, 32 bytes.
    """
    if not _MODEL_KEY.fullmatch(model):
        raise InvalidRequestError(f"a store key was asked for model {model!r}; give model_key(model_state)")
    if kind not in _KINDS:
        raise InvalidRequestError(f"a store key was asked for kind {kind!r}; it must be one of {sorted(_KINDS)}")
    _check_fingerprint(cf)
    digits = cf.hex()
    return f"kite:{{{digits[:4]}}}:{model}:{kind}:{digits}"


def _link(tag: bytes, previous: bytes, token_ids: TokenIds) -> Fingerprint:
    _check_fingerprint(previous)
    ids = as_token_ids(token_ids)
    return Fingerprint(hashlib.sha256(tag + _PREVIOUS_HEAD + previous + _ids_head(len(ids)) + ids.tobytes()).digest())


def _ids_head(num_tokens: int) -> bytes:
    return encode_fields(num_tokens) + _IDS_HEAD.pack(b"b", num_tokens * _TOKEN_BYTES)


def _check_fingerprint(fingerprint: bytes) -> None:
    if len(fingerprint) != FINGERPRINT_BYTES:
        raise InvalidRequestError(f"a fingerprint has {len(fingerprint)} bytes; it must have {FINGERPRINT_BYTES}")
