"""The Redis tier: one key per value, on one server, behind Sentinel, or on a cluster."""

from kitelib.stores.redis.store import RedisStore

__all__ = ["RedisStore"]
