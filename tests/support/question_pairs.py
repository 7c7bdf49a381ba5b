"""Pairs of questions that are the same or not, by kind; see tests/data/question_pairs.LICENCE.txt."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

__all__ = ["DIFFERENT", "SAME", "Pair", "pairs"]

_FILE = Path(__file__).parents[1] / "data" / "question_pairs.jsonl"


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two questions."""

    kind: str
    a: str
    b: str
    same: bool


@functools.cache
def _all() -> tuple[Pair, ...]:
    rows = map(json.loads, _FILE.read_text("utf-8").splitlines())
    return tuple(Pair(row["kind"], row["a"], row["b"], row["label"] == 1) for row in rows)


def pairs(kind: str) -> list[Pair]:
    """The pairs of one kind."""
    return [pair for pair in _all() if pair.kind == kind]


SAME = sorted({pair.kind for pair in _all() if pair.same})
DIFFERENT = sorted({pair.kind for pair in _all() if not pair.same})
