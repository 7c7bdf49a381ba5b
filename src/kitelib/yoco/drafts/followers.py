"""What predicts the next tokens of an answer: stored texts that are followed, counts of all answers, the prompt itself.

Each follower is told every token of the answer (`advance`), and what it predicted is compared with it, whether or not
the model was asked to verify it: that is how the rates of its kind are learned.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from kitelib.yoco.drafts.rates import Rates
from kitelib.yoco.drafts.suffix_automaton import SuffixAutomaton

__all__ = [
    "ANSWER_PRIORS",
    "LARGEST_TOKEN",
    "STORED_PRIORS",
    "AnswersFollower",
    "Follower",
    "PromptFollower",
    "StoredFollower",
    "Text",
    "as_text",
]

LARGEST_TOKEN: Final = 0x10FFFF
"""Largest token id that texts can hold; no vocabulary comes near it."""

Text = str
"""Token ids as code points: two bytes per token for most vocabularies, and searched at the speed of `str.find`."""

_CODE_POINTS: Final = "utf-32-le" if sys.byteorder == "little" else "utf-32-be"
_WORTH: Final = 0.02  # a proposal ends where the chance that it is right so far falls below
_FAR: Final = 16  # agreed tokens beyond which nothing changes
_SEARCHED: Final = 2**16  # tokens at the end of a prompt that are searched
_NEAR: Final = 8  # tokens before the cursor where the text is looked for first
_AGREED: Final = (0, 1, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 4, 4, 4, 4, 5)  # class by agreed tokens
_CLASSES: Final = 6
KIND_CELLS: Final = _CLASSES * 3
"""Cells of `Rates` that one kind of stored text has."""

_FRESH: Final = (0.5, 0.6, 0.7, 0.8, 0.88, 0.93)
_SLIPPED: Final = (0.25, 0.45, 0.6, 0.7, 0.78, 0.85)
_SLIPPED_OFTEN: Final = (0.15, 0.35, 0.5, 0.6, 0.7, 0.8)
_SURE: Final = (0.9, 0.93, 0.95, 0.96, 0.97, 0.98)
STORED_PRIORS: Final = (
    *(*_SURE, *_SLIPPED, *_SLIPPED_OFTEN),  # same prompt
    *(*_FRESH, *_SLIPPED, *_SLIPPED_OFTEN) * 6,  # conversation, canonical, three of neighbours, prompt
)
"""Rates of stored texts before anything was observed: per kind, by slips and by agreed tokens."""

_LENGTH_CLASS: Final = (0, 0, 1, 2, 3, 3, 4, 4, 4, 5)
_SHARE_CLASSES: Final = 8
ANSWER_PRIORS: Final = tuple(
    (0.35 + 0.13 * length) * (share + 0.5) / _SHARE_CLASSES for length in range(6) for share in range(_SHARE_CLASSES)
)
"""Rates of the automaton's predictions before anything was observed: by matched length and by share of the counts."""

Found = tuple[list[int], list[float], float]
"""Tokens, chances, and the sum of the chances."""


def as_text(token_ids: Iterable[int]) -> Text | None:
    """Token ids as a text; None if one of them is beyond `LARGEST_TOKEN`."""
    try:
        return array("I", token_ids).tobytes().decode(_CODE_POINTS, "surrogatepass")
    except (ValueError, OverflowError):
        return None


def _with_chances(ahead: list[int], rates: Rates, base: int, agreed: int) -> Found | None:
    """The tokens `ahead` as far as they are worth proposing, where the text agreed with so many tokens before.

    Args:
        ahead: the tokens.
        rates: how often texts are right.
        base: first of the cells of the text's kind and slips, one per class of agreed tokens.
        agreed: tokens in a row that were right.
    """
    values, chance, total = rates.values, 1.0, 0.0
    chances: list[float] = []
    for _ in ahead:
        chance *= values[base + _AGREED[agreed]]
        if chance < _WORTH:
            break
        chances.append(chance)
        total += chance
        if agreed < _FAR:
            agreed += 1
    return (ahead[: len(chances)], chances, total) if chances else None


class Follower(Protocol):
    """Predicts what comes next."""

    source: str

    def propose(self, most: int) -> Found | None:
        """At most `most` tokens; None if it predicts nothing."""

    def advance(self, token: int) -> None:
        """The next token of the answer."""


class StoredFollower:
    """Follows one text with a cursor; after a mismatch it looks for the answer's last tokens and goes on from there.

    Args:
        source: name of the source.
        text: the text that the answer may repeat.
        rates: the rates to learn and to use.
        kind: which of the kinds in `STORED_PRIORS` it is.
    """

    __slots__ = ("_agreed", "_base", "_last", "_lost_at", "_rates", "_slips", "at", "source", "text")

    def __init__(self, source: str, text: Text, rates: Rates, kind: int) -> None:
        self.source = source
        self.text = text
        self.at = 0  # of the token predicted next; -1 while there is none
        self._rates = rates
        self._base = kind * KIND_CELLS
        self._agreed = 0
        self._slips = 0
        self._lost_at = 0
        self._last = ""

    def propose(self, most: int) -> Found | None:
        """What the text goes on with at the cursor."""
        at, text = self.at, self.text
        if at < 0:
            return None
        ahead = list(map(ord, text[at : at + most]))
        return _with_chances(ahead, self._rates, self._base + self._slips * _CLASSES, self._agreed)

    def advance(self, token: int) -> None:
        """Moves the cursor, or looks for another place; notes whether the text was right."""
        at, text = self.at, self.text
        char = chr(token)
        if 0 <= at < len(text):
            hit = text[at] == char
            self._rates.note(self._base + self._slips * _CLASSES + _AGREED[self._agreed], hit)
            if hit:
                self.at = at + 1
                if self._agreed < _FAR:
                    self._agreed += 1
                self._last = (self._last + char)[-3:]
                return
            slipped = self._agreed > 0 or at == 0
            self._slips = min(self._slips + 1, 2)
        else:
            slipped = False
        self._last = (self._last + char)[-3:]
        self._align(at, slipped)

    def _align(self, at: int, slipped: bool) -> None:
        """Finds where the answer's last three or two tokens stand in the text, near the cursor first."""
        self._agreed = 0
        if at >= 0:
            self._lost_at = at
        last, text = self._last, self.text
        if len(last) >= 2 and text.find(last[-2:]) >= 0:
            near = max(0, self._lost_at - _NEAR)
            for wanted in (last, last[-2:]):
                found = text.find(wanted, near)
                if found < 0 and near:
                    found = text.find(wanted)
                if found >= 0:
                    self.at = found + len(wanted)
                    self._agreed = len(wanted) - 1
                    return
        # One other token in the place of one of the text's: it may go on behind it.
        self.at = at + 1 if slipped else -1


class AnswersFollower:
    """Predicts from all answers of the root: what followed the longest suffix of the answer that occurs in them."""

    __slots__ = ("_automaton", "_length", "_rates", "_state", "source")

    def __init__(self, automaton: SuffixAutomaton, rates: Rates) -> None:
        self.source = "answers"
        self._automaton = automaton
        self._rates = rates
        self._state, self._length = automaton.begin()

    def propose(self, most: int) -> Found | None:
        """The most frequent continuation, step by step."""
        automaton, values = self._automaton, self._rates.values
        best_tokens, best_states, counts = automaton.best_tokens, automaton.best_states, automaton.counts
        state, length = self._state, self._length
        chance, total = 1.0, 0.0
        tokens: list[int] = []
        chances: list[float] = []
        while state and len(tokens) < most:
            token = best_tokens[state]
            if token < 0:
                break
            target = best_states[state]
            share = (counts[target] * _SHARE_CLASSES) // (counts[state] + 1)
            length_class = _LENGTH_CLASS[length] if length < 10 else 5
            chance *= values[length_class * _SHARE_CLASSES + min(share, _SHARE_CLASSES - 1)]
            if chance < _WORTH:
                break
            tokens.append(token)
            chances.append(chance)
            total += chance
            state = target
            length += 1
        return (tokens, chances, total) if tokens else None

    def advance(self, token: int) -> None:
        """Matches one token more; notes whether the most frequent continuation was right."""
        automaton, state, length = self._automaton, self._state, self._length
        if state:
            predicted = automaton.best_tokens[state]
            if predicted >= 0:
                counts = automaton.counts
                share = (counts[automaton.best_states[state]] * _SHARE_CLASSES) // (counts[state] + 1)
                length_class = _LENGTH_CLASS[length] if length < 10 else 5
                cell = length_class * _SHARE_CLASSES + min(share, _SHARE_CLASSES - 1)
                self._rates.note(cell, predicted == token)
        self._state, self._length = automaton.advance(state, length, token)


class PromptFollower:
    """Predicts that the answer repeats what followed its last tokens in the prompt, or earlier in itself.

    That is prompt lookup (Saxena 2023). The answer's pairs of tokens are kept in a dict; the prompt is turned into a
    text when it is first needed, and searched only while nothing is followed.

    Args:
        prompt: gives the prompt as a text; None if it can't be one.
        rates: the rates to learn and to use.
        kind: which of the kinds in `STORED_PRIORS` it is.
    """

    __slots__ = (
        "_agreed",
        "_at",
        "_base",
        "_in_prompt",
        "_pairs",
        "_prompt",
        "_rates",
        "_said",
        "_searched",
        "_text",
        "source",
    )

    def __init__(self, prompt: Callable[[], Text | None], rates: Rates, kind: int) -> None:
        self.source = "prompt"
        self._prompt: Callable[[], Text | None] | None = prompt
        self._rates = rates
        self._base = kind * KIND_CELLS
        self._text: Text = ""
        self._said: list[int] = []
        self._pairs: dict[tuple[int, int], int] = {}  # -> where the answer went on after it
        self._at = -1  # of the token predicted next, in the prompt or in the answer
        self._in_prompt = False
        self._searched = False
        self._agreed = 0

    @property
    def follows(self) -> bool:
        """Whether there is something to propose without searching the prompt."""
        return self._at >= 0

    def propose(self, most: int) -> Found | None:
        """What followed the answer's last three or two tokens; looks for them in the prompt where needed."""
        if self._at < 0 and not self._searched:
            self._search()
        if self._at < 0:
            return None
        at = self._at
        if self._in_prompt:
            ahead = list(map(ord, self._text[at : at + most]))
        else:
            ahead = self._said[at : at + most]
            if len(ahead) < most:  # it repeats itself, and what it says now is what it repeats next
                ahead = (ahead * (most // len(ahead) + 1))[:most] if ahead else ahead
        if not ahead:
            return None
        return _with_chances(ahead, self._rates, self._base + self._in_prompt * _CLASSES, self._agreed)

    def advance(self, token: int) -> None:
        """Goes on with what is followed, or finds the answer's last two tokens earlier in it."""
        at, said = self._at, self._said
        if at >= 0:
            known = self._text if self._in_prompt else said
            hit = at < len(known) and known[at] == (chr(token) if self._in_prompt else token)
            if at < len(known):
                self._rates.note(self._base + self._in_prompt * _CLASSES + _AGREED[self._agreed], hit)
            self._at = at + 1 if hit else -1
            if hit and self._agreed < _FAR:
                self._agreed += 1
        said.append(token)
        self._searched = False
        if len(said) < 2:
            return
        pair = (said[-2], token)
        earlier = self._pairs.get(pair)
        self._pairs[pair] = len(said)
        if self._at < 0 and earlier is not None:
            self._at, self._in_prompt = earlier, False
            self._agreed = 3 if earlier > 2 and len(said) > 2 and said[earlier - 3] == said[-3] else 2

    def _search(self) -> None:
        self._searched = True
        if len(self._said) < 2:
            return
        if self._prompt is not None:
            self._text = (self._prompt() or "")[-_SEARCHED:]
            self._prompt = None
        last = "".join(map(chr, self._said[-3:]))
        found, count = self._text.rfind(last[-2:], 0, -1), 2
        if found >= 0 and len(last) > 2:
            longer = self._text.rfind(last, 0, -1)
            if longer >= 0:
                found, count = longer, 3
        if found >= 0:
            self._at, self._in_prompt, self._agreed = found + count, True, count
