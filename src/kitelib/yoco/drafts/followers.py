"""What predicts the next tokens of an answer: stored texts that are followed, counts of all answers, the prompt itself.

Each follower is told every token of the answer (`advance`), and what it predicted is compared with it, whether or not
the model was asked to verify it: that is how the rates of its kind are learned. Where much was said since, it goes over
it without learning (`skip`).
"""

from __future__ import annotations

import itertools
import sys
from array import array
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from kitelib.yoco.drafts.rates import Rates
from kitelib.yoco.drafts.suffix_automaton import SuffixAutomaton

__all__ = [
    "ANSWER_PRIORS",
    "STORED_PRIORS",
    "AnswersFollower",
    "Follower",
    "PromptFollower",
    "StoredFollower",
    "Text",
    "as_text",
]

Text = str
"""Token ids as code points: two bytes per token for most vocabularies, and searched at the speed of `str.find`. No
vocabulary comes near the largest, 0x10FFFF."""

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
_USEFUL: Final = 6 * _SHARE_CLASSES  # the cell of all tokens, also of those that were not predicted
_POOR: Final = 0.05  # share of tokens that were predicted right, below which answers have too little in common
_RECENT: Final = 16  # tokens from which the automaton is followed again
ANSWER_PRIORS: Final = (
    *(
        (0.35 + 0.13 * length) * (share + 0.5) / _SHARE_CLASSES
        for length in range(6)
        for share in range(_SHARE_CLASSES)
    ),
    0.5,
)
"""Rates of the automaton's predictions before anything was observed: by matched length and by share of the counts; and
of all tokens together."""

Found = tuple[list[int], list[float], float]
"""Tokens, chances, and the sum of the chances."""


def as_text(token_ids: Iterable[int]) -> Text | None:
    """Token ids as a text; None if one of them is no code point."""
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

    def advance(self, text: Text) -> None:
        """The next tokens of the answer, at least one."""

    def skip(self, text: Text) -> None:
        """The same, without learning from it."""


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

    def advance(self, text: Text) -> None:
        """Moves the cursor, or looks for another place; notes whether the stored text was right."""
        stored, rates, base = self.text, self._rates, self._base
        at, agreed, last = self.at, self._agreed, self._last
        for char in text:
            last = (last + char)[-3:]
            slipped = False
            if 0 <= at < len(stored):
                hit = stored[at] == char
                rates.note(base + self._slips * _CLASSES + _AGREED[agreed], hit)
                if hit:
                    at += 1
                    if agreed < _FAR:
                        agreed += 1
                    continue
                slipped = agreed > 0 or at == 0
                self._slips = min(self._slips + 1, 2)
            if at >= 0:
                self._lost_at = at
            at, agreed = self._align(last, at, slipped)
        self.at, self._agreed, self._last = at, agreed, last

    def skip(self, text: Text) -> None:
        """Goes on behind `text` if the stored text has it here, or looks for where its end stands."""
        self._last = text[-3:]
        if self.at >= 0 and self.text.startswith(text, self.at):
            self.at += len(text)
            self._agreed = _FAR
            return
        self._lost_at = min(max(self.at, self._lost_at) + len(text), len(self.text))
        self.at, self._agreed = self._align(self._last, -1, False)

    def _align(self, last: Text, at: int, slipped: bool) -> tuple[int, int]:
        """Finds where the answer's last three or two tokens stand in the text, near the cursor first.

        Returns:
            The cursor, and how many tokens agree before it.
        """
        text = self.text
        if len(last) >= 2 and text.find(last[-2:]) >= 0:
            near = max(0, self._lost_at - _NEAR)
            for wanted in (last, last[-2:]):
                found = text.find(wanted, near)
                if found < 0 and near:
                    found = text.find(wanted)
                if found >= 0:
                    return found + len(wanted), len(wanted) - 1
        # One other token in the place of one of the text's: it may go on behind it.
        return (at + 1 if slipped else -1), 0


class AnswersFollower:
    """Predicts from all answers of the root: what followed the longest suffix of the answer that occurs in them.

    Args:
        automaton: of the answers.
        rates: the rates to learn and to use.
        tries: whether to follow also while hardly anything that is said was predicted. Otherwise that costs nothing,
            until those that try find that answers have something in common again.
    """

    __slots__ = ("_automaton", "_length", "_rates", "_recent", "_state", "_tries", "source")

    def __init__(self, automaton: SuffixAutomaton, rates: Rates, tries: bool) -> None:
        self.source = "answers"
        self._automaton = automaton
        self._rates = rates
        self._tries = tries
        self._recent: Text = ""  # what was said last, if it is not followed
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

    def advance(self, text: Text) -> None:
        """Matches the tokens; notes whether the most frequent continuations were right."""
        rates, automaton, state, length = self._rates, self._automaton, self._state, self._length
        counts, best_tokens, best_states = automaton.counts, automaton.best_tokens, automaton.best_states
        for index, token in enumerate(map(ord, text)):
            if not self._tries and rates.values[_USEFUL] < _POOR:
                self._recent = (self._recent + text[index:])[-_RECENT:]
                state = length = 0
                break
            if self._recent:
                state, length = self._match()
            hit = False
            if state:
                predicted = best_tokens[state]
                if predicted >= 0:
                    hit = predicted == token
                    share = (counts[best_states[state]] * _SHARE_CLASSES) // (counts[state] + 1)
                    length_class = _LENGTH_CLASS[length] if length < 10 else 5
                    rates.note(length_class * _SHARE_CLASSES + min(share, _SHARE_CLASSES - 1), hit)
            rates.note(_USEFUL, hit)
            state, length = automaton.advance(state, length, token)
        self._state, self._length = state, length

    def skip(self, text: Text) -> None:
        """Matches the last of the tokens alone."""
        self._recent = text[-_RECENT:]
        self._state = self._length = 0
        if self._tries or self._rates.values[_USEFUL] >= _POOR:
            self._state, self._length = self._match()

    def _match(self) -> tuple[int, int]:
        """State and length after what was said last."""
        state, length = 0, 0
        for token in map(ord, self._recent):
            state, length = self._automaton.advance(state, length, token)
        self._recent = ""
        return state, length


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

    def advance(self, text: Text) -> None:
        """Goes on with what is followed, or finds the answer's last two tokens earlier in it."""
        said, pairs = self._said, self._pairs
        self._searched = False
        for token in map(ord, text):
            at = self._at
            if at >= 0:
                known: Text | list[int] = self._text if self._in_prompt else said
                hit = at < len(known) and known[at] == (chr(token) if self._in_prompt else token)
                if at < len(known):
                    self._rates.note(self._base + self._in_prompt * _CLASSES + _AGREED[self._agreed], hit)
                self._at = at + 1 if hit else -1
                if hit and self._agreed < _FAR:
                    self._agreed += 1
            said.append(token)
            if len(said) < 2:
                continue
            pair = (said[-2], token)
            earlier = pairs.get(pair)
            pairs[pair] = len(said)
            if self._at < 0 and earlier is not None:
                self._at, self._in_prompt = earlier, False
                self._agreed = 3 if earlier > 2 and len(said) > 2 and said[earlier - 3] == said[-3] else 2

    def skip(self, text: Text) -> None:
        """Notes the pairs of tokens, and finds the last one earlier in the answer."""
        said = self._said
        before = max(len(said) - 1, 0)
        said.extend(map(ord, text[:-1]))
        self._pairs.update(zip(itertools.pairwise(said[before:]), itertools.count(before + 2)))
        self._at = -1
        self.advance(text[-1])

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
