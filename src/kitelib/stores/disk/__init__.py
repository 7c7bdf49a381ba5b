"""The disk tier: one self-describing file per value in a folder that several processes share."""

from kitelib.stores.disk.store import DiskStore

__all__ = ["DiskStore"]
