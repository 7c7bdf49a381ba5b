"""Keys that authenticate stored units: one per namespace, so that a tenant's key opens nothing of another's."""

from __future__ import annotations

import hmac

from kitelib.errors import ConfigError
from kitelib.fingerprint import encode_fields

__all__ = ["unit_key"]


def unit_key(hmac_key: bytes | None, namespace: str | None, namespace_secret: bytes | None = None) -> bytes | None:
    """The key of one namespace's units, 32 bytes: HMAC-SHA256 of the namespace under `hmac_key`; None without one.

    Args:
        hmac_key: `PoolConfig.hmac_key`.
        namespace: `ReusePolicy.namespace`; None is the engine's own.
        namespace_secret: `PoolConfig.namespace_secret`; enters the key if given, as it enters the fingerprints.

    Raises:
        ConfigError: `hmac_key` is empty.
    """
    if hmac_key is None:
        return None
    if not hmac_key:
        raise ConfigError("hmac_key is empty; give at least 16 random bytes, or None for units without HMAC")
    return hmac.digest(hmac_key, encode_fields("kite.unit.key", namespace, namespace_secret), "sha256")
