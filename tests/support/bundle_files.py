"""Bundle files of a model that is never loaded, for tests of the commands that read and write them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kitelib.fingerprint import root_fingerprint
from kitelib.upcycle.bundle import BundleRoot, BundleWriter, ModelIdentity
from tests.support.units import BLOCK_TOKENS, INFO, kv_unit, units_of

__all__ = ["EXECUTION_PATH", "MODEL", "OLD_BUNDLE", "TOKENS", "bundle_file", "root_for"]

EXECUTION_PATH: Mapping[str, str | int | bool] = {
    "backend": "llama_cpp",
    "numerics": "standard",
    "attention": "plain",
}
MODEL = dataclasses.replace(ModelIdentity.of(INFO), state_parts={"weights": "0123abcd", "kv_type": "f16"})
TOKENS = tuple(range(1, 10))
OLD_BUNDLE = b"@\0\0\0\0\0\0\0" + b'{"__metadata__":{"kite.bundle":"old'
"""What begins like a bundle, which is enough to be replaced by one."""


def root_for(*, namespace: str | None = None, adapter: tuple[bytes, float] | None = None) -> BundleRoot:
    """A root as an engine of this model would compute it."""
    root = root_fingerprint(MODEL.model_state, EXECUTION_PATH, namespace, adapter=adapter)
    return BundleRoot(root, EXECUTION_PATH, namespace, adapter)


def bundle_file(
    path: Path, *, model: ModelIdentity = MODEL, tokens: Sequence[int] = TOKENS, hits: float = 1.0, **options: Any
) -> Path:
    """A bundle with the blocks, tail and logits of a prompt, and the first block of a tenant's with 7 hits; `options` are
    those of `BundleWriter` and its `finish`."""
    finish = {name: options.pop(name) for name in ("sign_key", "hmac_key") if name in options}
    own, tenant = root_for(), root_for(namespace="tenant")
    with BundleWriter(path, model, **options) as writer:
        for unit in units_of(tokens, root=own.root):
            writer.add(unit, own, hits=hits)
        writer.add(kv_unit(tokens, 0, BLOCK_TOKENS, root=tenant.root), tenant, hits=7)
        writer.finish(**finish)
    return path
