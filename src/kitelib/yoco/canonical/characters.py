"""From a text to tokens and back: what Unicode, width, case and sentence punctuation do to a question.

A token is one Chinese character, a quotation with its marks, or a run of whatever else stands between white space: a
word, a number, `c++`, `x!=1`. Signs inside a run and at its start stay. Only sentence punctuation right after a word, and
some of it after a number, is taken off its end; `BREAK` stands for it, since it may separate clauses.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from typing import Final

from kitelib.yoco.canonical.numerals import NUMERALS
from kitelib.yoco.canonical.tables import load

__all__ = [
    "BREAK",
    "HAN",
    "QUOTES",
    "fold_characters",
    "has_han",
    "has_kana",
    "is_opaque",
    "join",
    "one_space",
    "tokenize",
]

BREAK: Final = ","

HAN: Final = "\u3005\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
"""Chinese characters, as a part of a regular expression's character class."""

_FIRST_HAN: Final = "\u3005"
_HAN_TOKEN: Final = re.compile(f"[{HAN}]")
# Their compatibility forms would turn 10² into 102, and 5½ into 51⁄2.
_POWERS: Final = re.compile(
    "[\u00aa\u00b2\u00b3\u00b9\u00ba\u2070-\u209c\u00bc-\u00be\u2150-\u215f\u2189\u2460-\u249b\u24ea-\u24ff\u2776-\u2793]"
)
QUOTES: Final = frozenset("\"'《「『")
"""Signs that a quotation starts with."""

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
    """What a token is, a run with the punctuation at its end. Each alternative that starts with a quotation mark looks at
    most `longest_quote` characters ahead, and all others consume what they look at, so the time is linear in the text."""
    common = load("common")
    longest, breaks = common["longest_quote"], re.escape(common["breaks"])
    inside = rf"[^\W_{HAN}]"  # beside it, a ' is an apostrophe or a unit, and a " is a unit
    quoted = "|".join(
        [
            rf'(?<!{inside})"[^"\n]{{1,{longest}}}"',
            rf"《[^《》\n]{{1,{longest}}}》",
            rf"「[^「」\n]{{1,{longest}}}」",
            rf"『[^『』\n]{{1,{longest}}}』",
            rf"(?<!{inside})'(?=\S)(?:[^'\n]|(?<={inside})'(?={inside})){{1,{longest}}}'(?!{inside})",
        ]
    )
    # After a Chinese character, white space is not needed; 什么是.net and 什么是!x have no punctuation.
    after_han = rf"[{breaks}]+(?=[\s{HAN}\"'《「『(【]|\Z)|[,;、。]+(?={inside})"
    numerals = "".join(sorted(NUMERALS))
    after_han = rf"(?!(?<=[{numerals}])\.[{numerals}])(?:{after_han})"  # 三.五
    run = rf"(?:[^\s{HAN}\"'《「『]|(?!{quoted})[\"'《「『])+"
    return re.compile(rf"[{HAN}](?:{after_han})?|{quoted}|{run}|\n")


@functools.cache
def _breaks() -> frozenset[str]:
    return frozenset(load("common")["breaks"])


@functools.cache
def _soft() -> frozenset[str]:
    return frozenset(load("common")["soft_breaks"])


def is_opaque(text: str) -> bool:
    """Whether a text is laid out, or has code or addresses in it, so that case and space may mean something."""
    return _LAID_OUT.search(text) is not None


def fold_characters(text: str) -> str:
    """NFKC, in lower case, without invisible signs, and quotation marks and dashes in one form each.

    Lower case and not `str.casefold`, for which Maße is Masse.
    """
    if text.isascii():
        return text.lower()
    if _POWERS.search(text):
        text = _POWERS.sub(_set_apart, text)
    replaced, table = _replaced()
    if replaced.search(text):
        text = text.translate(table)
    text = unicodedata.normalize("NFKC", text).lower()
    if replaced.search(text):
        text = text.translate(table)
    # Lower case may undo what normalizing did.
    return unicodedata.normalize("NFKC", text)


def _set_apart(found: re.Match[str]) -> str:
    plain = unicodedata.normalize("NFKC", found[0])
    return found[0] if plain == found[0] else f" {plain}^ "


def one_space(folded: str) -> str:
    """The text with single spaces, and a newline only between lines that are not empty."""
    lines = folded.splitlines()
    if len(lines) < 2:
        return " ".join(folded.split())
    return "\n".join(filter(None, (" ".join(line.split()) for line in lines)))


def tokenize(folded: str) -> list[str]:
    """The tokens of a text from `one_space`, without breaks at the ends and without two in a row."""
    found: list[str] = _pattern().findall(folded)
    breaks = _breaks()
    tokens: list[str] = []
    for position, token in enumerate(found):
        if token[-1] not in breaks:
            tokens.append(token)
            continue
        after = found[position + 1] if position + 1 < len(found) else ""
        if token.startswith(".") and tokens and tokens[-1] in NUMERALS and after[:1] in NUMERALS:
            tokens.append(token)  # 三.五
            continue
        body, is_break = _punctuated(token, after)
        if body:
            tokens.append(body)
        if is_break and tokens and tokens[-1] != BREAK:
            tokens.append(BREAK)
    if tokens[-1:] == [BREAK]:
        tokens.pop()
    return tokens


def _punctuated(token: str, after: str) -> tuple[str, bool]:
    """A token that ends with punctuation: what stays of it, and whether the rest is a break. What may be an operator, a
    decimal point or part of a name stays: 5!, .5, x != 1, U.S."""
    body = token.rstrip("".join(_breaks()))
    run = token[len(body) :]
    soft = _soft().issuperset(run)
    if not body:
        return ("", True) if soft else (token, False)
    last = body[-1]
    if _is_han(last) or (_is_letter(last) and _is_letter(body[-2:-1].replace("'", body[-3:-2]))):
        whole = body
    elif last.isdigit():
        whole = body if soft and not ("." in run and after[:1].isdigit()) else ""
    elif _is_letter(last):
        whole = body if soft else ""
    else:
        asked = last in load("common")["asked_after"] or body.endswith("++")
        whole = body if asked and set(run) == {"?"} else ""
    return (whole, True) if whole else (token, False)


def _is_letter(sign: str) -> bool:
    return sign.isalpha() or (sign > "\x7f" and unicodedata.category(sign)[0] in "MC")


def join(tokens: list[str]) -> str:
    """The text of tokens: a space before those that are not Chinese and do not follow a Chinese one, and before breaks.

    `tokenize` gives the same tokens again if none was changed or left out; else it may see another quotation or run.
    """
    parts = []
    before = True
    for token in tokens:
        han = token >= _FIRST_HAN and _is_han(token)
        parts.append(token if han or (before and token != BREAK) else f" {token}")
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
