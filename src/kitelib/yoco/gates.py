"""Gates: signs that two questions that look alike are different ones.

A gate that differs is a reason not to ask the model whether two questions are the same; that all gates agree is no
proof that they are. The tables are general lists of words, in English and Chinese.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any, Final

from kitelib.yoco.canonical import signature
from kitelib.yoco.canonical.characters import HAN, QUOTES, fold_characters, join, tokenize
from kitelib.yoco.canonical.numerals import NUMERALS, numeral_value
from kitelib.yoco.canonical.tables import load

__all__ = ["GATES", "differing_gates"]

GATES: Final = ("numbers", "dates", "negation", "antonyms", "entities", "question word", "pronouns", "order", "signs")
"""Names of the gates, in the order in which they are reported."""

_LONGEST: Final = 4000  # characters of a question that are looked at; whatever is longer is no question
_HAN_RUN: Final = re.compile(f"[{HAN}]")
_LATIN: Final = re.compile(r"[a-z]+(?:'[a-z]+)*")
_NUMBER: Final = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")
_QUOTED: Final = re.compile(r'[《「『"]([^《》「」『』"]{1,200})[》」』"]')
_NAME: Final = re.compile(r"(?<=[\w,;:] )[A-Z][\w'-]*")
_WORD: Final = re.compile(r"[A-Za-z][\w'-]*")
_ID: Final = re.compile(r"\b(?=[a-z-]{0,40}\d)(?=\d{0,40}[a-z])[a-z0-9]+(?:-[a-z0-9]+)*\b")
# Signs that belong to the words beside them, or set them apart: top-up, mcdonald's, (visa), one - two, 1,000, 0.5, 马丁·路德.
_OF_WORDS: Final = re.compile(
    r"(?<=[^\W\d_]{2})(?:-(?=[^\W\d_])|[)\]']| -+ (?=[^\W\d_]{2}))|(?<=[^\W\d_])'(?=[^\W\d_])|[(\[](?=[^\W\d_]{2})"
    r"|(?<=[a-z]{2})-(?=\d)|(?<=\d)[.,](?=\d)|(?<!\d) ,| ,(?! \d)|[《》「」『』]|(?<=[^\W\d_])[·・](?=[^\W\d_]{2})"
)
_SIGN: Final = re.compile(r"[^\w\s]|_")
_SIGN_CATEGORIES: Final = frozenset({"Sm", "Sc", "Sk", "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po"})  # no marks, no emoji
_MOST_CAPITALS: Final = 0.5  # of all words; a text with more of them is a headline


def differing_gates(a: str, b: str) -> list[str]:
    """Names of the gates that say that two questions are different, in the order of `GATES`; empty if all agree.

    Symmetric, deterministic, total on any text; linear time, of which only the first 4,000 characters count.

    ================= ======================================================================================
    gate              differs where
    ================= ======================================================================================
    ``numbers``       the values differ, also those written as words ("one" and 一 alone are not counted)
    ``dates``         days, months, parts of a day or seasons differ
    ``negation``      one is negated more often than the other
    ``antonyms``      one has a word where the other has its opposite, or the same word with un-, dis- and so on
    ``entities``      titles, names, Latin words inside Chinese, ids, or members of one group of things differ
    ``question word`` one asks who where the other asks when, and so on
    ``pronouns``      one speaks of me where the other speaks of you, and so on
    ``order``         both have the same words or the same names, in another order
    ``signs``         operators, units' marks and signs of names differ: ``-x`` and ``x``, 6' and 6", ``.net`` and ``net``
    ================= ======================================================================================
    """
    first, second = _Question(a[:_LONGEST]), _Question(b[:_LONGEST])
    checks: dict[str, Callable[[_Question, _Question], bool]] = {
        "numbers": lambda x, y: x.numbers != y.numbers,
        "dates": lambda x, y: x.dates != y.dates,
        "negation": lambda x, y: x.negations != y.negations,
        "antonyms": _antonyms,
        "entities": _entities,
        "question word": lambda x, y: x.question_words != y.question_words,
        "pronouns": lambda x, y: bool(set(x.pronouns) - set(y.pronouns)) and bool(set(y.pronouns) - set(x.pronouns)),
        "order": _order,
        "signs": lambda x, y: x.signs != y.signs,
    }
    return [gate for gate in GATES if checks[gate](first, second)]


class _Question:
    """What the gates look at, computed as they ask for it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.folded = fold_characters(text)
        self.canonical = signature(text, "canonical")
        # Yes/no forms are folded and fillers are gone, so that 能不能 is no negation and "can you tell me" no pronoun.
        self.structural = signature(text, "structural")

    @functools.cached_property
    def words(self) -> list[str]:
        return _LATIN.findall(self.canonical)

    @functools.cached_property
    def tokens(self) -> list[str]:
        return tokenize(self.structural)

    @functools.cached_property
    def chinese(self) -> bool:
        return _HAN_RUN.search(self.folded) is not None

    @functools.cached_property
    def numbers(self) -> Counter[str]:
        words = _tables("en")["numbers"]
        found = [_value(number) for number in _NUMBER.findall(self.folded)]
        found += [str(words[word]) for word in _LATIN.findall(self.folded) if word in words]
        return Counter([*found, *_numerals(self.folded)]) if self.chinese else Counter(found)

    @functools.cached_property
    def dates(self) -> set[str]:
        return set(_found("en", "dates", self.canonical)) | set(_found("zh", "dates", self.structural))

    @functools.cached_property
    def negations(self) -> int:
        count = sum(word in _word_set("negation") for word in self.words)
        if self.chinese:
            plain = _pattern("zh", "not_negation").sub(" ", self.structural)
            count += len(_pattern("zh", "negation").findall(plain))
        return count

    @functools.cached_property
    def names(self) -> list[str]:
        """Names in the order in which they stand."""
        return [*_found("en", "names", self.canonical), *_found("zh", "names", self.structural)]

    @functools.cached_property
    def titles(self) -> set[str]:
        return {" ".join(title.split()) for title in _QUOTED.findall(self.folded)}

    @functools.cached_property
    def latin(self) -> set[str]:
        """Latin words inside Chinese, and ids anywhere."""
        words = set(_LATIN.findall(self.folded)) if self.chinese else set()
        return words | set(_ID.findall(self.folded))

    @functools.cached_property
    def capitalised(self) -> set[str]:
        """Names that only their capital tells, in a text that is not written in capitals."""
        words = _WORD.findall(self.text)
        if sum(word[0].isupper() for word in words) > _MOST_CAPITALS * len(words):
            return set()
        found = {name.casefold() for name in _NAME.findall(self.text)}
        return {name.removesuffix("'s") for name in found if name.split("'")[0] not in _tables("en")["pronouns"]}

    @functools.cached_property
    def signs(self) -> Counter[str]:
        """Signs outside quotations that are operators, units, or parts of names."""
        if not _SIGN.search(self.canonical):
            return Counter()
        plain = join([token for token in tokenize(self.canonical) if len(token) == 1 or token[0] not in QUOTES])
        return Counter(sign for sign in _OF_WORDS.sub("", plain) if _is_sign(sign))

    @functools.cached_property
    def question_words(self) -> set[str]:
        table = _tables("en")
        words = _LATIN.findall(self.structural)
        found = set()
        for word, after in zip(words, [*words[1:], ""], strict=False):
            kind = table["question_words"].get(word)
            if kind is not None:
                found.add(f"how {after}" if kind == "how" and after in table["amounts"] else kind)
        kinds = _tables("zh")["question_words"]
        return found | {kinds[word] for word in _found("zh", "question_words", self.structural)}

    @functools.cached_property
    def pronouns(self) -> list[str]:
        english, chinese = _tables("en")["pronouns"], _tables("zh")["pronouns"]
        found = [english[word] for word in _LATIN.findall(self.structural) if word in english]
        return found + [chinese[word] for word in _found("zh", "pronouns", self.structural)]


def _antonyms(a: _Question, b: _Question) -> bool:
    if _swapped(a, b, "opposites"):
        return True
    only_a, only_b = set(a.words) - set(b.words), set(b.words) - set(a.words)
    prefixes = _tables("en")["prefixes"]
    return any(
        prefix + word in others
        for some, others in ((only_a, only_b), (only_b, only_a))
        for word in some
        for prefix in prefixes
    )


def _entities(a: _Question, b: _Question) -> bool:
    if a.titles != b.titles or a.latin != b.latin or set(a.names) != set(b.names):
        return True
    # A name may be written without its capital on the other side.
    if any(name not in b.folded for name in a.capitalised) or any(name not in a.folded for name in b.capitalised):
        return True
    return _swapped(a, b, "contrasts")


def _order(a: _Question, b: _Question) -> bool:
    if a.tokens != b.tokens and sorted(a.tokens) == sorted(b.tokens):
        return True
    for some, others in ((a.names, b.names), (a.pronouns, b.pronouns)):
        if some != others and sorted(some) == sorted(others):
            return True
    return False


def _swapped(a: _Question, b: _Question, name: str) -> bool:
    """Whether one question has more of a group's member and the other has more of another member."""
    english = _more(Counter(a.words), Counter(b.words))
    if any(_two_signs(english.get(word, 0) for word in group) for group in _tables("en")[name]):
        return True
    if not (a.chinese and b.chinese):
        return False
    return any(
        _two_signs(a.structural.count(word) - b.structural.count(word) for word in group)
        for group in _tables("zh")[name]
    )


def _more(a: Counter[str], b: Counter[str]) -> Mapping[str, int]:
    return {word: a[word] - b[word] for word in a.keys() | b.keys()}


def _two_signs(numbers: Iterable[int]) -> bool:
    signs = {number > 0 for number in numbers if number}
    return len(signs) > 1


def _value(number: str) -> str:
    value = Decimal(number.replace(",", ""))
    return str(value.normalize()) if len(number) <= 28 else number.lstrip("0")


def _numerals(folded: str) -> Iterator[str]:
    """Values of Chinese numerals of two signs and more, and of single ones before a measure word; 一 is no number."""
    measures = _measures()
    for found in _numeral_runs().finditer(folded):
        run, after = found[0], folded[found.end() : found.end() + 1]
        value = numeral_value(run)
        if run != "一" and (after in measures or len(run) > 1):
            yield run if value is None else str(value)


def _is_sign(sign: str) -> bool:
    return sign == "°" or unicodedata.category(sign) in _SIGN_CATEGORIES


def _found(language: str, name: str, text: str) -> list[str]:
    found: list[str] = _pattern(language, name).findall(text)
    return found


@functools.cache
def _pattern(language: str, name: str) -> re.Pattern[str]:
    """Finds the words of a table, longest first; in English as whole words. Entries are regular expressions of words."""
    words = "|".join(sorted(_tables(language)[name], key=len, reverse=True))
    return re.compile(words if language == "zh" else rf"\b(?:{words})\b")


@functools.cache
def _word_set(name: str) -> frozenset[str]:
    return frozenset(_tables("en")[name])


@functools.cache
def _measures() -> frozenset[str]:
    return frozenset(load("zh")["structural"]["measures"])


@functools.cache
def _numeral_runs() -> re.Pattern[str]:
    return re.compile(f"[{''.join(sorted(NUMERALS))}]+")


def _tables(language: str) -> Any:
    return load("gates")[language]
