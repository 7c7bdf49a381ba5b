"""Bundles: recyclable units in one portable file, computed once and used wherever the same model runs without a network.

A bundle is a safetensors file (`container`) whose metadata says what its tensors are (`manifest`). `reader` maps it and
gives verified units, `writer` makes it, `signing` says who made it.
"""

from kitelib.upcycle.bundle.manifest import BundleRoot, BundleUnit, Manifest, ModelIdentity
from kitelib.upcycle.bundle.reader import Bundle
from kitelib.upcycle.bundle.writer import BundleSummary, BundleWriter

__all__ = ["Bundle", "BundleRoot", "BundleSummary", "BundleUnit", "BundleWriter", "Manifest", "ModelIdentity"]
