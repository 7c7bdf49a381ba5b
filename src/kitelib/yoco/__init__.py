"""YOCO = You Only Compute Once: what is already known is looked up, and only the rest is computed."""

from kitelib.yoco.fingerprints import compute_computation_fingerprint

__all__ = ["compute_computation_fingerprint"]
