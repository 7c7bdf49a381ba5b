"""Cuts texts so that llama.cpp's byte-pair pre-tokenizers can't overflow the stack.

Many of them split a text with `std::regex`, which recurses once per matched character (about 300 bytes of stack each)
and ends the process past a few thousand to some ten thousand characters without a break, depending on the thread's
stack. Base64, long separators or unspaced text from a user are enough. So runs without white space are cut where the
pre-tokenizers cut anyway, if there is such a place, and anywhere if there is none.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

__all__ = ["MAX_RUN_CHARS", "cut_long_runs"]

MAX_RUN_CHARS = 1024
_RUN = re.compile(r"\S+|\s+")
# The texts of special tokens begin with one of the openers and hold none of the marks, so none is cut in two.
_SPECIAL_OPENERS = frozenset("<[{")
_MARKS = frozenset(",.;:!?，。、；：！？…") | _SPECIAL_OPENERS
_CALM_CHARS = 24


def cut_long_runs(text: str) -> list[str]:
    """`text` in pieces, in order, in which no run of white space or of other characters passes `MAX_RUN_CHARS`.

    Tokens of the pieces, joined, are those of the whole text, unless a run has no letter or digit followed by a mark
    for half of `MAX_RUN_CHARS`; then they may differ from it at the cut, the text they stand for does not.
    """
    if len(text) <= MAX_RUN_CHARS:
        return [text]
    cuts = [0, *_cuts(text), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(cuts)]


def _cuts(text: str) -> Iterator[int]:
    for run in _RUN.finditer(text):
        start, end = run.span()
        while end - start > MAX_RUN_CHARS:
            start = _best_cut(text, start + MAX_RUN_CHARS // 2, start + MAX_RUN_CHARS)
            yield start


def _best_cut(text: str, low: int, high: int) -> int:
    """Where to cut, in (low, high]: before a mark that follows a letter, else outside of what looks special."""
    window = range(high, low, -1)
    for at in window:
        if text[at] in _MARKS and text[at - 1].isalnum():
            return at
    for at in window:
        if text[at] in _SPECIAL_OPENERS or text[at - _CALM_CHARS : at + _CALM_CHARS].isalnum():
            return at
    return high
