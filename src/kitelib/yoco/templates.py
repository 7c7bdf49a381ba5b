"""The text that prompts have in common, and what stands where they differ: something volatile, or data.

Prompts are compared piece by piece, a piece being a word, a space, a sign or a whole volatile part. Two are aligned as
in a patience diff (Bram Cohen, 2003; described in Bazaar's source): runs of pieces that occur once in both are anchors,
the longest increasing sequence of them holds, and matches grow from there. That takes O(n log n), whatever the texts.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from kitelib.yoco.volatile import Kind, Volatile, find_volatile

__all__ = ["Gap", "Piece", "Template", "TemplateBuilder", "common_template", "split_pieces"]

_EXAMPLES: Final = 3
_ANCHOR_PIECES: Final = (6, 3)  # long ones first: short ones between them match by chance less often
_MAX_PIECES: Final = 20_000  # of one prompt; what comes after counts as data
_LONGEST_WORD: Final = 24
_WORD: Final = re.compile(
    r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff]|[^\W_\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff]{1,24}"
    r"|[ \t]{1,16}|\s|_|[^\w\s]"
)


class Piece(NamedTuple):  # made by the million, so a tuple
    """A word, a Chinese or similar character, a sign, some space, or a whole volatile part.

    Attributes:
        text: what it is.
        start: where it begins, in characters.
        volatile: what it is a part of the prompt for; None for ordinary text.
    """

    text: str
    start: int
    volatile: Kind | None


@dataclasses.dataclass(frozen=True, slots=True)
class Gap:
    """A place where the prompts of a template differ.

    Attributes:
        start: where it begins in the first prompt, in characters.
        fixed_before, fixed_after: characters of text that all prompts have, before and after this place.
        kinds: of the volatile parts that stand there, in the order they were met; empty if there is none.
        volatile: whether nothing but volatile parts and what holds them together stands there in any prompt; else it
            holds data: text that is a prompt's own.
        examples: what stands there in some prompts, at most three.
    """

    start: int
    fixed_before: int
    fixed_after: int
    kinds: tuple[Kind, ...]
    volatile: bool
    examples: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Template:
    """What prompts have in common.

    Attributes:
        num_prompts: how many were compared.
        fixed_chars: characters that all of them have, in order.
        gaps: where they differ, in the order of the first prompt.
        expressions: template expressions that stand unfilled in the common text.
        constants: other volatile parts that are the same in all prompts, with common text behind them.
    """

    num_prompts: int
    fixed_chars: int
    gaps: tuple[Gap, ...]
    expressions: tuple[Volatile, ...]
    constants: tuple[Volatile, ...]

    @property
    def first_volatile(self) -> Gap | None:
        """The first gap that is volatile and has common text behind it: the one that costs reuse."""
        return next((gap for gap in self.gaps if gap.volatile and gap.fixed_after), None)


def common_template(prompts: Sequence[str]) -> Template:
    """What the prompts have in common, which is more the more alike they are; at least one prompt."""
    builder = TemplateBuilder(split_pieces(prompts[0]))
    for prompt in prompts[1:]:
        builder.add(split_pieces(prompt))
    return builder.template()


def split_pieces(text: str, parts: Sequence[Volatile] | None = None, *, max_pieces: int = _MAX_PIECES) -> list[Piece]:
    """The first `max_pieces` pieces of a prompt; `parts` are its volatile ones, if they are known already."""
    pieces: list[Piece] = []
    position = 0
    for part in find_volatile(text) if parts is None else parts:
        _split(text, position, part.start, max_pieces, pieces)
        pieces.append(Piece(part.text, part.start, part.kind))
        position = part.end
        if len(pieces) >= max_pieces:
            break
    else:
        _split(text, position, len(text), max_pieces, pieces)
    return pieces[:max_pieces]


def _split(text: str, start: int, end: int, max_pieces: int, pieces: list[Piece]) -> None:
    room = max_pieces - len(pieces)
    words = _WORD.findall(text, start, min(end, start + room * _LONGEST_WORD))[:room]
    # Every character belongs to a piece, so lengths give the places.
    starts = itertools.accumulate(map(len, words), initial=start)
    pieces += map(Piece._make, zip(words, starts, itertools.repeat(None)))


class TemplateBuilder:
    """Finds a template prompt by prompt, from their pieces. It keeps those of the first three prompts."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces
        self._words = [piece.text for piece in self._pieces]
        self._fixed = [True] * len(self._pieces)
        self._others: list[tuple[Sequence[Piece], dict[int, int]]] = []
        self.num_prompts = 1

    def add(self, pieces: Sequence[Piece]) -> None:
        """Takes the pieces of one more prompt in."""
        matched = _align(self._words, [piece.text for piece in pieces])
        self._fixed = [fixed and index in matched for index, fixed in enumerate(self._fixed)]
        if len(self._others) < _EXAMPLES - 1:
            self._others.append((pieces, matched))
        self.num_prompts += 1

    def template(self) -> Template:
        """What all prompts so far have in common."""
        runs = _fixed_runs(self._words, self._fixed)
        total = sum(self._length(start, end) for start, end in runs)
        gaps: list[Gap] = []
        before, position = 0, 0
        for start, end in [*runs, (len(self._pieces), len(self._pieces))]:
            gap = self._gap(position, start, before, total - before)
            if gap is not None:
                gaps.append(gap)
            before += self._length(start, end)
            position = end
        last = runs[-1][1] - 1 if runs else 0
        constants = tuple(part for index, part in self._common_parts() if index < last and part.kind != "template")
        return Template(self.num_prompts, total, tuple(gaps), self.expressions(), constants)

    def expressions(self) -> tuple[Volatile, ...]:
        """Template expressions that stand unfilled in what all prompts so far have in common."""
        return tuple(part for _, part in self._common_parts() if part.kind == "template")

    def _common_parts(self) -> Iterator[tuple[int, Volatile]]:
        """Volatile parts that all prompts have, with the index of their piece."""
        for index, (piece, fixed) in enumerate(zip(self._pieces, self._fixed, strict=True)):
            if fixed and piece.volatile is not None:
                yield index, Volatile(piece.start, piece.start + len(piece.text), piece.volatile, piece.text)

    def _length(self, start: int, end: int) -> int:
        return sum(map(len, self._words[start:end]))

    def _gap(self, start: int, end: int, before: int, after: int) -> Gap | None:
        """What stands between two fixed runs in the prompts at hand; None if that is nothing in any of them."""
        contents = [self._pieces[start:end]]
        for pieces, matched in self._others:
            first = matched[start - 1] + 1 if start else 0
            last = matched[end] if end < len(self._pieces) else len(pieces)
            contents.append(pieces[first:last])
        if not any(contents):
            return None
        kinds = dict.fromkeys(piece.volatile for content in contents for piece in content if piece.volatile)
        # Signs between volatile parts, as in "date, time", are no data; nor is a label that comes and goes with one.
        own = {"".join(piece.text for piece in content if not piece.volatile) for content in contents if content}
        data = len(own) > 1 and any(map(_has_letter, own))
        everywhere = all(any(piece.volatile for piece in content) for content in contents if content)
        at = self._pieces[start].start if start < len(self._pieces) else self._end_of_last()
        texts = dict.fromkeys("".join(piece.text for piece in content) for content in contents)
        return Gap(at, before, after, tuple(kinds), everywhere and not data, tuple(text for text in texts if text))

    def _end_of_last(self) -> int:
        return self._pieces[-1].start + len(self._pieces[-1].text) if self._pieces else 0


def _has_letter(text: str) -> bool:
    return any(character.isalnum() for character in text)


def _fixed_runs(words: Sequence[str], fixed: Sequence[bool]) -> list[tuple[int, int]]:
    """The runs of common pieces, as (start, end), without those between two gaps that say nothing by themselves."""
    runs: list[tuple[int, int]] = []
    start = None
    for index in range(len(words) + 1):
        if index < len(words) and fixed[index]:
            start = index if start is None else start
        elif start is not None:
            outer = start == 0 or index == len(words)
            if outer or any(map(_has_letter, words[start:index])):
                runs.append((start, index))
            start = None
    return runs


def _align(a: Sequence[str], b: Sequence[str]) -> dict[int, int]:
    """Indexes of pieces of `a` -> those of equal pieces of `b`, increasing in both."""
    matched: dict[int, int] = {}
    _align_range(a, b, (0, len(a), 0, len(b)), _ANCHOR_PIECES, matched)
    return matched


def _align_range(
    a: Sequence[str],
    b: Sequence[str],
    span: tuple[int, int, int, int],
    sizes: Sequence[int],
    matched: dict[int, int],
) -> None:
    """Aligns ``a[span[0]:span[1]]`` with ``b[span[2]:span[3]]``: both ends, then anchors of the first of `sizes`, then
    what is left between those with the next size."""
    at_a, last_a, at_b, last_b = span
    while at_a < last_a and at_b < last_b and a[at_a] == b[at_b]:
        matched[at_a] = at_b
        at_a, at_b = at_a + 1, at_b + 1
    while at_a < last_a and at_b < last_b and a[last_a - 1] == b[last_b - 1]:
        last_a, last_b = last_a - 1, last_b - 1
        matched[last_a] = last_b
    if not sizes or at_a == last_a or at_b == last_b:
        return
    unique_a, unique_b = _unique_runs(a, at_a, last_a, sizes[0]), _unique_runs(b, at_b, last_b, sizes[0])
    common = [(at, unique_b[run]) for run, at in unique_a.items() if at >= 0 and unique_b.get(run, -1) >= 0]
    for anchor_a, anchor_b in _longest_increasing(common):
        if anchor_a < at_a or anchor_b < at_b:
            continue  # inside the match that grew from the anchor before
        _align_range(a, b, (at_a, anchor_a, at_b, anchor_b), sizes[1:], matched)
        at_a, at_b = anchor_a, anchor_b
        while at_a < last_a and at_b < last_b and a[at_a] == b[at_b]:
            matched[at_a] = at_b
            at_a, at_b = at_a + 1, at_b + 1
    _align_range(a, b, (at_a, last_a, at_b, last_b), sizes[1:], matched)


def _longest_increasing(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The longest sequence of pairs, increasing in their first number already, that increases in the second too."""
    ends: list[int] = []  # per length, the smallest last number of a sequence of that length (Fredman, 1975)
    end_pairs: list[int] = []
    links: list[int] = []
    for index, (_, place) in enumerate(pairs):
        length = bisect.bisect_left(ends, place)
        if length == len(ends):
            ends.append(place)
            end_pairs.append(index)
        else:
            ends[length], end_pairs[length] = place, index
        links.append(end_pairs[length - 1] if length else -1)
    chain: list[tuple[int, int]] = []
    index = end_pairs[-1] if end_pairs else -1
    while index >= 0:
        chain.append(pairs[index])
        index = links[index]
    return chain[::-1]


def _unique_runs(words: Sequence[str], start: int, end: int, size: int) -> dict[tuple[str, ...], int]:
    """Run of `size` pieces -> where it is, in order; -1 if it is there more than once."""
    places: dict[tuple[str, ...], int] = {}
    for at in range(start, end - size + 1):
        run = tuple(words[at : at + size])
        places[run] = at if run not in places else -1
    return places
