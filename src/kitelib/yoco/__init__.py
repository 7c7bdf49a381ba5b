"""YOCO = You Only Compute Once: what is already known is looked up, and only the rest is computed."""

from kitelib.yoco.fingerprints import FingerprintParts, compute_computation_fingerprint, fingerprint_parts

__all__ = ["FingerprintParts", "compute_computation_fingerprint", "fingerprint_parts"]
