"""Parts of a prompt that differ from call to call: clocks, random ids, counters, template expressions.

A cached prefix ends at the first token that differs, so one timestamp at the front of a prompt makes everything behind
it new in every call. This finds such parts by their form, in one pass for each form. Every repetition in the patterns is
bounded, so the time is linear in the text, whatever the text is.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Literal

__all__ = ["KINDS", "Kind", "Volatile", "find_volatile", "move_to_end"]

Kind = Literal[
    "timestamp", "date", "time", "epoch", "uuid", "request id", "random id", "nonce", "counter", "address", "template"
]

KINDS: Final[dict[Kind, str]] = {
    "timestamp": "a date with a time of day",
    "date": "a date",
    "time": "a time of day",
    "epoch": "a time counted in seconds or less since 1970",
    "uuid": "a UUID",
    "request id": "an id of a request, session, trace or message",
    "random id": "a random id",
    "nonce": "a nonce, salt or seed",
    "counter": "a running number",
    "address": "an IP address",
    "template": "a template expression that was not filled in",
}
"""What each kind is, for people."""


@dataclasses.dataclass(frozen=True, slots=True)
class Volatile:
    """A part of a text that is likely to be another one in the next call.

    Attributes:
        start, end: where it is, in characters; `end` is exclusive.
        kind: one of `KINDS`.
        text: the part itself, without a label such as "Session-ID:" in front of it.
    """

    start: int
    end: int
    kind: Kind
    text: str


def find_volatile(text: str) -> list[Volatile]:
    """The volatile parts of `text`, in order, none overlapping another.

    Found are forms, not meanings: the date in "I ordered it on 2026-03-01" is found too. Whether a part really changes
    is seen by comparing prompts, as `kitelib.yoco.templates` does. Dates are found from the year 2000 to 2099, since
    no prompt was made before.
    """
    found = list(_found(text))
    # Of several at one place the first and longest wins: the date inside a timestamp is no finding of its own.
    found.sort(key=lambda each: (each.start, -each.end, _RANK[each.kind]))
    kept: list[Volatile] = []
    for each in found:
        if not kept or each.start >= kept[-1].end:
            kept.append(each)
    return kept


def move_to_end(text: str, parts: Iterable[Volatile]) -> str:
    """`text` without the parts, and the parts on a line of their own behind it: what a cache would like to get."""
    rest, moved, position = [], [], 0
    for part in parts:
        rest.append(text[position : part.start])
        moved.append(part.text)
        position = part.end
    if not moved:
        return text
    return "".join(rest) + text[position:] + "\n" + " ".join(moved)


# -- forms ----------------------------------------------------------------------------------------------------------

_MONTH: Final = (
    r"(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?|"
    r"nov(?:ember)?|dec(?:ember)?)\b\.?"
)
_WEEKDAY: Final = r"\b(?:mon(?:day)?|tue(?:s(?:day)?)?|wed(?:nesday)?|thu(?:r(?:s(?:day)?)?)?|fri(?:day)?|sat(?:urday)?|sun(?:day)?)\b"
_YEAR: Final = r"20\d\d"
_DAY: Final = r"(?:0?[1-9]|[12]\d|3[01])"
_ORDINAL: Final = _DAY + r"(?:st|nd|rd|th)?"
_SHORT_CLOCK: Final = r"(?:[01]?\d|2[0-3])[:：][0-5]\d"
_ZONE: Final = (
    r"(?:[ ]?(?:z|utc|gmt|ces?t|bst|ist|jst|[ecmp][sd]t)(?![a-z])(?:[ ]?[+-]\d{1,2}(?::?\d\d)?)?"
    r"|[ ]?[+-](?:0\d|1[0-4]):?[0-5]\d(?!\d))"
)
_HALF: Final = r"(?:[ ]?[ap]\.?m\b\.?)"
_CLOCK: Final = rf"{_SHORT_CLOCK}(?:[:：][0-5]\d(?:[.,]\d{{1,9}})?)?{_HALF}?{_ZONE}?"
_CHINESE_CLOCK: Final = (
    r"(?:(?:上午|下午|中午|晚上|凌晨|早上)[ ]?)?"
    r"(?:[01]?\d|2[0-3])(?:[点點时時][ ]?(?:[0-5]?\d分?)?(?:[ ]?[0-5]?\d秒)?|[:：][0-5]\d(?:[:：][0-5]\d)?)"
)
_NUMERAL: Final = "[〇零一二三四五六七八九十]"
_CHINESE_DATE: Final = (
    rf"(?:{_YEAR}[ ]?年[ ]?\d{{1,2}}[ ]?月[ ]?\d{{1,2}}[ ]?[日号號]"
    rf"|{_YEAR}년[ ]?\d{{1,2}}월[ ]?\d{{1,2}}일)"
    r"(?:[ ]?[(（]?(?:星期|周|週|礼拜)[一二三四五六日天][)）]?)?"
)
_DATE: Final = (
    rf"(?:(?<!\d){_YEAR}(?P<sep>[-/.])(?:0?[1-9]|1[0-2])(?P=sep){_DAY}(?![\d.]\d|\d)"
    rf"|(?<![\d./-])\d{{1,2}}(?P<sep2>[-/.])\d{{1,2}}(?P=sep2){_YEAR}(?!\d)"
    rf"|(?:{_WEEKDAY},?[ ](?:the[ ])?)?(?<!\d){_ORDINAL}(?:[ ]of)?[ -]{_MONTH},?[ -]{_YEAR}(?!\d)"
    rf"|(?:{_WEEKDAY},?[ ])?\b{_MONTH}[ ]{_ORDINAL}(?!\d),?[ ]{_YEAR}(?!\d)"
    rf"|{_WEEKDAY},?[ ](?:the[ ])?(?:{_ORDINAL}(?:[ ]of)?[ ]{_MONTH}|{_MONTH}[ ]{_ORDINAL}(?!\d)))"
)
_AT: Final = r"(?:t|,?[ ]{1,2}(?:at[ ])?|[ ]?[-|,/][ ]?)"
_NOT_IN_WORD: Final = r"(?<![a-z0-9_])"

# All but _RANDOM are given the text in lower case: ignoring case makes `re` several times slower.
# The clock in C's ctime stands between day and year: Mon Nov 30 09:14:25 UTC 2026.
_DATES: Final = re.compile(
    rf"(?P<ctime>{_WEEKDAY}[ ]{_MONTH}[ ]{{1,2}}{_DAY}[ ]{_CLOCK}[ ]{_YEAR}(?!\d))"
    rf"|(?<!\d)20\d\d(?:0\d|1[0-2])[0-3]\d(?P<compact>t[0-2]\d[0-5]\d[0-5]\d(?:\.\d{{1,9}})?z?)"
    rf"|{_DATE}(?P<clock>{_AT}{_CLOCK})?"
)
_CHINESE_DATES: Final = re.compile(rf"{_CHINESE_DATE}(?P<clock>[ ,，]?{_CHINESE_CLOCK})?")
_CHINESE_NUMERALS: Final = re.compile(rf"{_NUMERAL}{{4}}年{_NUMERAL}{{1,2}}月{_NUMERAL}{{1,3}}[日号號]")
_TIMES: Final = re.compile(
    rf"(?<![\w:.])(?:{_SHORT_CLOCK}[:：][0-5]\d(?:[.,]\d{{1,9}})?{_HALF}?{_ZONE}?|{_SHORT_CLOCK}{_HALF}?(?!-){_ZONE})(?![\d:])"
)
# Values too common to be found by themselves count behind words that say what they are.
_NOW: Final = re.compile(
    r"(?:today(?:'s|’s)?(?:[ ](?:date|day))?|(?:current|present|local)[ _-]?(?:date|time|datetime|day|month|year)s?"
    r"|the[ ]time(?:[ ]now)?|it[ ]is[ ]now|right[ ]now|as[ ]of|now|今天|现在|目前|当前(?:日期|时间))"
    r"(?:[ ]?(?:is|are|=|是)|[ ]?[:：])?[ ]{0,2}(?:the[ ])?"
    rf"(?P<value>{_SHORT_CLOCK}{_HALF}?|{_CHINESE_CLOCK}|(?:{_MONTH}[ ])?{_YEAR}(?:-(?:0[1-9]|1[0-2]))?\b"
    rf"|{_MONTH}[ ]{_ORDINAL}\b|{_ORDINAL}(?:[ ]of)?[ ]{_MONTH}|\d{{1,2}}{_HALF}|{_WEEKDAY}"
    r"|(?:星期|周|週|礼拜)[一二三四五六日天]|\d{1,2}月\d{1,2}[日号])"
)
_EPOCH: Final = re.compile(r"(?<![\w.+#-])1[5-9]\d{8}(?:\d{3}|\d{6}|\d{9}|\.\d{1,9})?(?![\w-]|[.,]\d)")
_UUID: Final = re.compile(rf"{_NOT_IN_WORD}[0-9a-f]{{8}}(?:-[0-9a-f]{{4}}){{3}}-[0-9a-f]{{12}}(?![a-z0-9_])")
_LABELLED: Final = re.compile(
    rf"{_NOT_IN_WORD}(?:x[-_])?(?:request|session|trace|span|correlation|transaction|conversation|message|thread|run|call|"
    r"chat|job|invocation|event|turn|req|sess|conv|msg)(?P<id>[ _-]?(?:id|ids|identifier|uuid|guid|key|token)(?![a-z]))?"
    r"[\"'`*]{0,2}(?:(?P<sign>[ ]?[:=#][ ]?)|[ ](?:is[ ])?)[\"'`<]?(?P<value>[a-z0-9][\w.:/+-]{2,126}[a-z0-9=])"
)
_PREFIXED: Final = re.compile(
    rf"{_NOT_IN_WORD}(?P<value>(?:request|req|session|sess|trace|span|message|msg|run|thread|call|toolu|conversation|conv|"
    r"chatcmpl|cmpl|resp|txn|evt|job)[_-][a-z0-9_-]{6,80})(?![a-z0-9])"
)
_NONCE: Final = re.compile(
    r"(?:nonce|salt|random[ _-]?seed|seed|cache[ _-]?bust(?:er)?)[\"'`]?[ ]?[:=][ ]?[\"'`]?"
    r"(?P<value>[\w.+/=-]{2,128})"
)
_COUNTER: Final = re.compile(
    rf"{_NOT_IN_WORD}(?:request|message|call|attempt|retry|query|turn|session|conversation|job|run|iteration|invocation)"
    r"(?:[ ]?(?:\#|no\.?|nr\.?|number|count|counter)[ ]?[:=]?[ ]?|[ ]?[#:][ ]?\#?)(?P<value>\d{1,12})\b(?![.:/-]\d)"
)
_IP4: Final = re.compile(
    r"(?<![\w.-])(?:25[0-5]|2[0-4]\d|1?\d?\d)(?:\.(?:25[0-5]|2[0-4]\d|1?\d?\d)){3}(?::\d{2,5})?(?![\w-]|\.\d)"
)
_IP6: Final = re.compile(
    r"(?<![\w:.])(?:(?:[0-9a-f]{1,4}:){7}[0-9a-f]{1,4}|(?:[0-9a-f]{1,4}:){1,6}(?::[0-9a-f]{1,4}){1,6})(?![\w:])"
)
_RANDOM: Final = re.compile(r"(?<![A-Za-z0-9_/+=.\\-])[A-Za-z0-9_+-]{16,256}={0,2}(?![A-Za-z0-9_/+=\\])")
_PRINTF: Final = r"(?<![^\s:=(\[\"'])%(?:\([a-z_]\w{0,60}\))?[sdif](?![\w%])"
_EXPRESSION: Final = re.compile(
    r"\{\{[^{}\n]{1,200}\}\}|\{%[^{}\n]{1,200}%\}|<%=?[^<>\n]{1,200}%>|\$\{[^{}\n]{1,100}\}|" + _PRINTF
)
# Single braces are everywhere, in code as in JSON: they count around names of what changes from call to call.
_PLACEHOLDER: Final = re.compile(
    r"(?<![{$\w])\{(?:[a-z]{1,20}[_.-]){0,3}(?:date|time|datetime|timestamp|now|today|uuid|guid|nonce|random|session|"
    r"request|trace|ip)(?:[_.-](?:id|utc|iso|str|string|time|date))?(?:\(\))?(?:[:!][^{}\n]{0,40})?\}(?!\})"
)


def _found(text: str) -> Iterator[Volatile]:
    lower = text.lower()
    if len(lower) != len(text):  # this one character becomes two
        lower = text.replace("İ", "i").lower()
    for pattern, kind, check in _ANYWHERE:
        yield from _matches(pattern, kind, check, text, lower, 0, len(text))
    for start, end in _windows(text):
        for pattern, kind, check in _NEAR_DIGITS:
            yield from _matches(pattern, kind, check, text, lower, start, end)
        for match in _RANDOM.finditer(text, start, end):
            if _looks_random(match[0]):
                yield Volatile(match.start(), match.end(), "random id", match[0])


def _windows(text: str) -> Iterator[tuple[int, int]]:
    """Stretches around digits, as (start, end): most kinds hold a digit, and most of most prompts is far from any."""
    start = end = -1
    for match in _DIGITS.finditer(text):
        if start < 0:
            start = max(0, match.start() - _AROUND)
        elif match.start() - _AROUND > end:
            yield start, end
            start = match.start() - _AROUND
        end = match.end() + _AROUND
    if start >= 0:
        yield start, min(end, len(text))


def _matches(
    pattern: re.Pattern[str], kind: Kind | None, check: _Check | None, text: str, lower: str, start: int, end: int
) -> Iterator[Volatile]:
    group = "value" if "value" in pattern.groupindex else 0
    for match in pattern.finditer(lower, start, end):
        found = kind if check is None else check(match)
        if found is not None:
            first, last = match.span(group)
            yield Volatile(first, last, found, text[first:last])


def _date_or_timestamp(match: re.Match[str]) -> Kind:
    groups = match.groupdict()
    return "timestamp" if any(groups.get(name) for name in ("clock", "ctime", "compact")) else "date"


def _date_or_time(match: re.Match[str]) -> Kind | None:
    if _inside_word(match):
        return None
    return "time" if _CLOCK_MARK.search(match["value"]) else "date"


def _nonce(match: re.Match[str]) -> Kind | None:
    return None if _inside_word(match) else "nonce"


def _inside_word(match: re.Match[str]) -> bool:
    """Whether a match begins in the middle of a word of Latin letters."""
    before = match.string[match.start() - 1 : match.start()]
    return before.isascii() and (before.isalnum() or before == "_") and match[0][0].isascii()


def _labelled(match: re.Match[str]) -> Kind | None:
    value = match["value"]
    if match["id"] is None and not (len(value) > 5 and re.search("[a-z]", value) and match["sign"]):
        return None  # "Session: afternoon", "message 2024"
    return "request id" if _DIGITS.search(value) else None


def _prefixed(match: re.Match[str]) -> Kind | None:
    tail = re.split("[_-]", match["value"], maxsplit=1)[1]
    digits = sum(character.isdigit() for character in tail)
    if (tail.isdigit() and digits >= 6) or (digits >= 2 and any(character.isalpha() for character in tail)):
        return "request id"
    return None


def _address(match: re.Match[str]) -> Kind | None:
    if "::" in match[0] or match[0].count(":") > 1:
        groups = [group for group in match[0].split(":") if group]
        return "address" if len(groups) > 2 and _DIGITS.search(match[0]) else None
    before = match.string[max(0, match.start() - 9) : match.start()].rstrip()
    if match[0].startswith(("127.", "0.", "255.")) or before.endswith(("version", "release", " v")):
        return None
    return "address"


def _looks_random(token: str) -> bool:
    """Whether a long token is drawn rather than written: words have long runs of letters of one case, drawn ones not."""
    digits = sum(character.isdigit() for character in token)
    if digits == len(token) or digits < 2:
        return False
    if _HEX.fullmatch(token):
        return digits < len(token) - 1
    if _ULID.fullmatch(token):
        return digits > 2
    runs = _RUN.findall(token)
    kinds = {run[0].islower() + 2 * run[0].isdigit() for run in runs}
    if len(token) < 20 or len(kinds) < 2 or max(map(len, runs)) > 6:
        return False
    # One case and digits need more changes, to tell them from "model-v2-2024".
    return len(runs) * (4 if len(kinds) == 3 else 3) >= len(token) and sum(run[0].isdigit() for run in runs) >= 2


_Check = Callable[[re.Match[str]], "Kind | None"]
_Form = tuple[re.Pattern[str], "Kind | None", "_Check | None"]

_HEX: Final = re.compile(r"[0-9a-f]{16,}|[0-9A-F]{16,}")
_ULID: Final = re.compile(r"[0-7][0-9A-HJKMNP-TV-Z]{25}")
_RUN: Final = re.compile(r"[a-z]+|[A-Z]+|\d+")
_CLOCK_MARK: Final = re.compile(r"[:：点點时時]|[ap]\.?m\b")
_DIGITS: Final = re.compile(r"[0-9]+")
_AROUND: Final = 256  # characters; no pattern below matches more before or after its nearest digits

_ANYWHERE: Final[tuple[_Form, ...]] = (
    (_NOW, None, _date_or_time),
    (_NONCE, None, _nonce),
    (_EXPRESSION, "template", None),
    (_PLACEHOLDER, "template", None),
    (_CHINESE_NUMERALS, "date", None),
)
_NEAR_DIGITS: Final[tuple[_Form, ...]] = (
    (_DATES, None, _date_or_timestamp),
    (_CHINESE_DATES, None, _date_or_timestamp),
    (_TIMES, "time", None),
    (_EPOCH, "epoch", None),
    (_UUID, "uuid", None),
    (_LABELLED, None, _labelled),
    (_PREFIXED, None, _prefixed),
    (_COUNTER, "counter", None),
    (_IP4, None, _address),
    (_IP6, None, _address),
)
_RANK: Final = {kind: rank for rank, kind in enumerate(KINDS)}
