"""Keys that authenticate stored units: one per namespace, so that a tenant's key opens nothing of another's."""

from __future__ import annotations

import hmac
import secrets
from collections import OrderedDict
from typing import Final

from kitelib.errors import ConfigError
from kitelib.fingerprint import encode_fields

__all__ = ["KeyRing", "unit_key"]

_MAX_ROOTS: Final = 65536


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


class KeyRing:
    """The keys of the namespaces in use, by the root that their fingerprints start from; the last 65,536 of them.

    A root that nobody told of gets a key of its own that nothing else has: what it authenticates is refused later, and
    never trusted. Adding belongs to the event loop; asking is for any thread.

    Args:
        hmac_key, namespace_secret: as of `unit_key`.

    Attributes:
        own: the key of the engine's own namespace.
    """

    def __init__(self, hmac_key: bytes | None, namespace_secret: bytes | None) -> None:
        self.own = unit_key(hmac_key, None, namespace_secret)
        self._hmac_key = hmac_key
        self._secret = namespace_secret
        self._keys: OrderedDict[bytes, bytes | None] = OrderedDict()

    def add(self, root: bytes, namespace: str | None) -> None:
        """Units that start at `root` are of that namespace."""
        if self._hmac_key is None:
            return
        if root not in self._keys:
            self._keys[root] = unit_key(self._hmac_key, namespace, self._secret)
        self._keys.move_to_end(root)
        if len(self._keys) > _MAX_ROOTS:
            self._keys.popitem(last=False)

    def of(self, root: bytes) -> bytes | None:
        """The key of the units that start at `root` (b"": of the engine's own namespace); None if no key is set."""
        if self._hmac_key is None or not root:
            return self.own
        return self._keys.get(root) or secrets.token_bytes(32)
