"""What a reader of the pool looks for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

from kitelib.fingerprint import model_key, store_key
from kitelib.upcycle.unit import Expectation

__all__ = ["Wanted", "leading_pairs"]

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """One unit to look for: its key, what it must be, and the root of its namespace (b"" for the engine's own)."""

    key: str
    expected: Expectation
    root: bytes = b""

    @classmethod
    def of(cls, expected: Expectation, root: bytes = b"") -> Wanted:
        """The request for a unit, keyed by its own identity."""
        return cls(store_key(model_key(expected.model_state), expected.kind, expected.cf), expected, root)


def leading_pairs(wanted: Sequence[Wanted], values: Sequence[T | None]) -> list[tuple[Wanted, T]]:
    """Units and their stored values, up to the first miss."""
    pairs = []
    for each, value in zip(wanted, values, strict=True):
        if value is None:
            break
        pairs.append((each, value))
    return pairs
