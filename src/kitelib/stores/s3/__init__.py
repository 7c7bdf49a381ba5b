"""The S3 tier: one object per value, in any store that speaks S3's API."""

from kitelib.stores.s3.store import S3Store

__all__ = ["S3Store"]
