"""Computation fingerprints (CF): what YOCO (You Only Compute Once) recognizes a finished computation by.

`identity` says what a computation depends on, `chain` names each block of a prompt. The lowest layer.
"""

from kitelib.fingerprint.chain import (
    BlockChain,
    TokenIds,
    as_token_ids,
    block_fingerprint,
    block_fingerprints,
    end_fingerprint,
    model_key,
    store_key,
)
from kitelib.fingerprint.identity import (
    FINGERPRINT_BYTES,
    Fingerprint,
    derived_fingerprint,
    encode_fields,
    root_fingerprint,
    short,
)

__all__ = [
    "FINGERPRINT_BYTES",
    "BlockChain",
    "Fingerprint",
    "TokenIds",
    "as_token_ids",
    "block_fingerprint",
    "block_fingerprints",
    "derived_fingerprint",
    "encode_fields",
    "end_fingerprint",
    "model_key",
    "root_fingerprint",
    "short",
    "store_key",
]
