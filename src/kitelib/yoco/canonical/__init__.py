"""Canonical text: two questions with the same signature are the same question, worded differently.

Decides by equality, with tables and without any model; see docs/matching.md for what is folded and what never is.
"""

from kitelib.yoco.canonical.markup import normalise
from kitelib.yoco.canonical.signatures import LEVELS, Level, signature
from kitelib.yoco.canonical.tables import tables_digest

__all__ = ["LEVELS", "Level", "normalise", "signature", "tables_digest"]
