"""From a text to tokens and back: what Unicode, width, case and punctuation do to a question.

A token is a run of letters, a number with the signs inside it, one Chinese character, a quotation with its marks, or
another sign. `BREAK` stands where punctuation separates clauses.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from typing import Final

from kitelib.yoco.canonical.tables import load

__all__ = ["BREAK", "HAN", "fold_characters", "has_han", "has_kana", "is_opaque", "join", "tokenize"]

BREAK: Final = ","

HAN: Final = "\u3005\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
"""Chinese characters, as a part of a regular expression's character class."""

_FIRST_HAN: Final = "\u3005"
_HAN_TOKEN: Final = re.compile(f"[{HAN}]")
# Their compatibility forms would turn 10² into 102, and 5½ into 51⁄2.
_POWERS: Final = re.compile(
    "[\u00b2\u00b3\u00b9\u2070-\u209c\u00bc-\u00be\u2150-\u215f\u2189\u2460-\u249b\u24ea-\u24ff\u2776-\u2793]"
)
_QUOTES: Final = frozenset("\"'《「『")
_KANA: Final = re.compile("[\u3041-\u3096\u30a1-\u30fa]")  # not ・, which is dropped
_LAID_OUT: Final = re.compile(r"`|://|\n[ \t]|[{}\\|]")


@functools.cache
def _replaced() -> tuple[re.Pattern[str], dict[int, str | None]]:
    """Invisible signs, quotation marks and dashes in other forms: what finds them, and what they become."""
    common = load("common")
    table: dict[int, str | None] = {int(code, 16): None for code in common["ignored"]}
    table.update({ord(sign): plain for sign, plain in common["quotes"].items()})
    return re.compile(f"[{re.escape(''.join(map(chr, table)))}]"), table


@functools.cache
def _pattern() -> re.Pattern[str]:
    """What a token is. Each alternative that starts with a quotation mark looks at most `longest_quote` characters
    ahead, and all others consume what they look at, so the time is linear in the text."""
    common = load("common")
    longest, breaks, dropped = common["longest_quote"], re.escape(common["breaks"]), re.escape(common["dropped"])
    letter = rf"(?:[a-z]|[^\x00-\x7f{HAN}\s{breaks}{dropped}])"
    inside = rf"[^\W_{HAN}]"  # beside it, a ' is an apostrophe
    quoted = "|".join(
        [
            rf'"[^"]{{1,{longest}}}"',
            rf"《[^《》]{{1,{longest}}}》",
            rf"「[^「」]{{1,{longest}}}」",
            rf"『[^『』]{{1,{longest}}}』",
            rf"(?<!{inside})'(?=\S)(?:[^']|(?<={inside})'(?={inside})){{1,{longest}}}'(?!{inside})",
        ]
    )
    number = r"(?<![a-z0-9])-(?=\.?\d)(?:\d+(?:[.,:/~-]\d+)*|\.\d+)|\d+(?:[.,:/~-]\d+)*|\.\d+"
    return re.compile(rf"[{HAN}]|{letter}+(?:'{letter}+)*|{quoted}|{number}|[{breaks}]|[^\s{dropped}]")


@functools.cache
def _breaks() -> frozenset[str]:
    return frozenset(load("common")["breaks"])


def is_opaque(text: str) -> bool:
    """Whether a text is laid out, or has code or addresses in it, so that case and space may mean something."""
    return _LAID_OUT.search(text) is not None


def fold_characters(text: str) -> str:
    """NFKC, case folded, without invisible signs, and quotation marks and dashes in one form each."""
    if text.isascii():
        return text.lower()
    if _POWERS.search(text):
        text = _POWERS.sub(_set_apart, text)
    replaced, table = _replaced()
    if replaced.search(text):
        text = text.translate(table)
    text = unicodedata.normalize("NFKC", text).casefold()
    if replaced.search(text):
        text = text.translate(table)
    # Case folding may undo what normalizing did, as for Greek with iota below.
    return unicodedata.normalize("NFKC", text)


def _set_apart(found: re.Match[str]) -> str:
    plain = unicodedata.normalize("NFKC", found[0])
    return found[0] if plain == found[0] else f" {plain}^ "


def tokenize(folded: str) -> list[str]:
    """The tokens of a text from `fold_characters`, without breaks at the ends and without two in a row."""
    found: list[str] = _pattern().findall(folded)
    breaks = _breaks()
    if breaks.isdisjoint(found) and _QUOTES.isdisjoint(folded):
        return found
    tokens: list[str] = []
    last = BREAK
    for token in found:
        if token in breaks:
            if last != BREAK:
                tokens.append(BREAK)
            last = BREAK
            continue
        last = " ".join(token.split()) if token[0] in _QUOTES else token
        tokens.append(last)
    if last == BREAK and tokens:
        tokens.pop()
    return tokens


def join(tokens: list[str]) -> str:
    """The text of tokens: a space between two that are not Chinese. `tokenize` gives the same tokens again."""
    parts = []
    before = True
    for token in tokens:
        han = token >= _FIRST_HAN and _is_han(token)
        parts.append(token if han or before else f" {token}")
        before = han
    return "".join(parts)


def has_han(text: str) -> bool:
    """Whether a text has Chinese characters."""
    return _HAN_TOKEN.search(text) is not None


def has_kana(text: str) -> bool:
    """Whether a text is Japanese, whose Chinese characters follow other rules."""
    return _KANA.search(text) is not None


def _is_han(token: str) -> bool:
    return "\u4e00" <= token <= "\u9fff" or _HAN_TOKEN.match(token) is not None
