"""English: what is the same question at each level, by the tables."""

from __future__ import annotations

import functools
from typing import Any, Final

from kitelib.yoco.canonical.characters import BREAK, tokenize
from kitelib.yoco.canonical.rewriting import replace, strip
from kitelib.yoco.canonical.tables import Rules, ends_of, load, rules_of

__all__ = ["English", "english"]

_LEAST_WEAK: Final = 2  # words that other languages write alike must be two
_LEAST_PLURAL: Final = 4
_HISSING: Final = ("sses", "xes", "ches", "shes", "zes")


class English:
    """The English rules, compiled from their table."""

    def __init__(self, table: Any) -> None:
        structural = table["structural"]
        self._strong = frozenset(table["markers"]["strong"])
        self._weak = frozenset(table["markers"]["weak"])
        self._phrases: Rules = rules_of({**table["words"], **table["phrases"]}, tokenize)
        self._numbers = table["numbers"]
        self._beside_numbers = frozenset(table["number_neighbours"]) | self._numbers.keys()
        self._ends = ends_of(table, {}, tokenize)
        self._more_ends = ends_of(table, {"starter": structural["head"]}, tokenize)
        kept = {phrase: phrase for phrase in structural["kept_phrases"]}
        self._forms: Rules = rules_of({**structural["phrases"], **kept}, tokenize)
        self._articles = frozenset(structural["articles"])
        self._kept_after = frozenset(structural["kept_after_article"])
        self._kept_before_the = frozenset(structural["kept_before_the"])
        self._kept_after_the = frozenset(structural["kept_after_the"])
        self._kept_before = frozenset(structural["kept_before_article"])
        self._kept_plurals = frozenset(structural["kept_plurals"])

    def is_used_in(self, tokens: list[str]) -> bool:
        """Whether the words are English ones, rather than those of another language with the same letters."""
        return not self._strong.isdisjoint(tokens) or len(self._weak.intersection(tokens)) >= _LEAST_WEAK

    def canonical(self, tokens: list[str], english: bool) -> list[str]:
        """T1: contractions, spelling, fillers; number words where the text is English."""
        tokens = replace(tokens, self._phrases)
        if english and not self._numbers.keys().isdisjoint(tokens):
            tokens = self._digits(tokens)
        return strip(tokens, self._ends)

    def structural(self, tokens: list[str]) -> list[str]:
        """T2, of English text after T1: forms of asking, articles, plural -s."""
        tokens = replace(tokens, self._forms)
        if not self._articles.isdisjoint(tokens):
            tokens = self._without_articles(tokens)
        tokens = [
            self._singular(token) if token[-1] == "s" and len(token) >= _LEAST_PLURAL else token for token in tokens
        ]
        return strip(tokens, self._more_ends)

    def _digits(self, tokens: list[str]) -> list[str]:
        """A number word alone becomes digits; beside another number it may be a part of it."""
        padded = [BREAK, *tokens, BREAK]
        return [
            word
            if word not in self._numbers or self._beside_number(before) or self._beside_number(after)
            else self._numbers[word]
            for before, word, after in zip(padded, tokens, padded[2:], strict=False)
        ]

    def _beside_number(self, token: str) -> bool:
        return token in self._beside_numbers or token[-1].isdigit()

    def _without_articles(self, tokens: list[str]) -> list[str]:
        # "measurement a", "plan a": with other single letters about, an a may be one of them.
        letters = any(len(word) == 1 and "b" <= word <= "z" and word != "i" for word in tokens)
        padded = [BREAK, *tokens, BREAK]
        return [
            word
            for before, word, after in zip(padded, tokens, padded[2:], strict=False)
            if word not in self._articles or self._needs_article(word, before, after, letters)
        ]

    def _needs_article(self, word: str, before: str, after: str, letters: bool) -> bool:
        if word == "the":
            return not after[0].isalnum() or after in self._kept_after_the or before in self._kept_before_the
        plain = after.isalpha() or after[:2].isalpha()  # also "top-up"
        return (word == "a" and letters) or not plain or after in self._kept_after or before in self._kept_before

    def _singular(self, word: str) -> str:
        last = word.rpartition("-")[2]
        if (
            last in self._kept_plurals
            or len(last) < _LEAST_PLURAL
            or not last.isalpha()
            or word.endswith(("ss", "us", "is", "os"))
        ):
            return word
        if word.endswith("ies"):
            return f"{word[:-3]}y" if len(word) > 4 else word[:-1]
        return word[:-2] if word.endswith(_HISSING) else word[:-1]


@functools.cache
def english() -> English:
    """The rules, compiled when first needed."""
    return English(load("en"))
