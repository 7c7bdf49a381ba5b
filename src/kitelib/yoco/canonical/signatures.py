"""The signature of a question: a canonical text, equal for two texts only if they ask the same.

Two levels, as data and rules measured on public sets of question pairs: "canonical" folds how a question is written,
"structural" also how it is asked. What tells questions apart (pronouns, numbers, negation, order, titles) stays.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Final, Literal

from kitelib.errors import InvalidRequestError
from kitelib.yoco.canonical.characters import (
    BREAK,
    QUOTES,
    fold_characters,
    has_han,
    has_kana,
    is_opaque,
    join,
    one_space,
    tokenize,
)
from kitelib.yoco.canonical.chinese import chinese
from kitelib.yoco.canonical.english import english
from kitelib.yoco.canonical.numerals import NUMERALS
from kitelib.yoco.canonical.tables import load

__all__ = ["LEVELS", "Level", "signature"]

Level = Literal["canonical", "structural"]

LEVELS: Final = ("canonical", "structural")
_LATIN: Final = re.compile("[a-z]")
_SIGN: Final = re.compile(r"[^\w\s]")
_LONE: Final = frozenset("ia")  # words of one letter
_ROUNDS: Final = 6  # what a rule leaves may be another's phrase; questions need one or two


def signature(text: str, level: Level) -> str:
    """The canonical text of a question: equal for two questions if, by this level's rules, they ask the same.

    Deterministic in every process and on every machine, total on any text, and idempotent: the signature of a
    signature is itself. Takes tens of microseconds for a question, and time linear in the length of the text.

    Args:
        text: what the user asks.
        level: "canonical" folds case, width, punctuation, greetings and fillers, contractions, spelling variants;
            "structural" also forms of asking, articles, plural -s, and what Chinese may leave out. See
            docs/matching.md.

    Returns:
        The signature. A text of which nothing would be left (only greetings or punctuation) and a text with code, an
        address or a layout are their own signatures, apart from case and width of the former.

    Raises:
        InvalidRequestError: no such level.
    """
    if level not in LEVELS:
        raise InvalidRequestError(f"the level is {level!r}; it must be one of {', '.join(LEVELS)}")
    text = text.strip()
    if is_opaque(text):
        return text
    folded = one_space(fold_characters(text))
    whole = tokenize(folded)
    latin = _LATIN.search(folded) is not None
    steps = _Steps(
        structural=level == "structural",
        chinese=has_han(folded) and not has_kana(folded),
        latin=latin,
        # Asked without fillers, so that one that is left out changes nothing else.
        english=latin and english().is_used_in(english().canonical(whole, english=False)),
    )
    tokens = steps.settle(whole)
    if BREAK in tokens:
        tokens = steps.without_breaks(tokens)
    # Of a greeting nothing is left: it is its own signature, and no question's, since theirs are not emptied.
    tokens = tokens or whole
    found = join(tokens)
    if _SIGN.search(found) and tokenize(found) != tokens:
        return folded  # what was left out brought signs together that stood apart
    return found or folded or text


@dataclasses.dataclass(frozen=True, slots=True)
class _Steps:
    """What is applied to the tokens of one text."""

    structural: bool
    chinese: bool
    latin: bool
    english: bool

    def once(self, tokens: list[str]) -> list[str]:
        if self.latin:
            tokens = english().canonical(tokens, self.english)
        if self.chinese:
            tokens = chinese().canonical(tokens)
        if self.structural:
            if self.english:
                tokens = english().structural(tokens)
            if self.chinese:
                tokens = chinese().structural(tokens)
        return tokens

    def settle(self, tokens: list[str]) -> list[str]:
        """Applies the steps until nothing changes; no tokens if that takes too long, which no question does."""
        for _ in range(_ROUNDS):
            before, tokens = tokens, self.once(tokens)
            if tokens == before:
                return tokens
        return []

    def without_breaks(self, tokens: list[str]) -> list[str]:
        """Without breaks, unless they keep apart what the rules would fold together: then the signature would not be
        its own. Whether they do must not depend on words that a first pass took out, so it is asked for English too."""
        plain = _without_breaks(tokens)
        if self.once(plain) != plain:
            return tokens
        if self.english or not self.latin:
            return plain
        also = dataclasses.replace(self, english=True)
        return plain if also.once(plain) == _without_breaks(also.once(tokens)) else tokens


@functools.cache
def _kept_after() -> frozenset[str]:
    return frozenset(load("common")["breaks_kept_after"])


def _without_breaks(tokens: list[str]) -> list[str]:
    """Without breaks, except beside a negation and beside what may be a list of values: 不，可以 is not 不可以, and
    "3, 5" is not "3 5"."""
    kept = _kept_after()
    return [
        token
        for before, token, after in zip([BREAK, *tokens], tokens, [*tokens[1:], BREAK], strict=False)
        if token != BREAK
        or before in kept
        or after in kept
        or not (_is_word(before) and _is_word(after))
        or (before in NUMERALS and after in NUMERALS)
    ]


def _is_word(token: str) -> bool:
    """Whether a token is a word or a quotation, and not a value, a lone letter or a sign."""
    if len(token) == 1:
        return token in _LONE or has_han(token)
    return token[0] in QUOTES or (token[:2].isalpha() and token[-2:].isalpha())
