"""Prompts with parts that vary: which of their first tokens are the same whatever stands in those parts.

A marked part is a name in double braces, ``{{question}}``; ``{{{{`` and ``}}}}`` stand for literal double braces. The
prompt is rendered with fillers that have different first characters, lengths and scripts, and what all renderings begin
with is cut back to a place that no tokenizer looks across: a special token, the space before a word, or punctuation
after a letter. Merges (byte pair encoding, Sennrich et al. 2016) stay within such pieces, so what follows the prefix
cannot change its tokens.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from kitelib.errors import InvalidRequestError

__all__ = ["FILLERS", "fill", "marked_parts", "stable_prefix"]

FILLERS: Final = (
    "Apples and pears",
    "zinc",
    "7",
    "12345 67",
    " x",
    "\nline\n\nother",
    "\t\t",
    "'s it",
    ".",
    "-->",
    '"quoted"',
    "_a",
    "(b)",
    "ß",
    "да, конечно",
    "你好，请打开车窗",
    "か",
    "مرحبا",
    "🙂🚗",
)
"""Texts that stand for what may be in a marked part; no two begin alike."""

_MARK: Final = re.compile(r"\{\{\{\{|\}\}\}\}|\{\{([^{}]*)\}\}")
_NAME: Final = re.compile(r"\s*[^\W\d][\w.\- ]*")


def marked_parts(value: Any) -> list[str]:
    """Names of the marked parts in a text, or in the contents of a list of messages, in order.

    Raises:
        InvalidRequestError: something else than a name stands in double braces.
    """
    return [name for text in _texts(value) for name in _names(text)]


def fill(value: Any, filler: str) -> Any:
    """The text or messages with `filler` in every marked part."""
    if isinstance(value, str):
        return _MARK.sub(lambda match: _replacement(match, filler), value)
    return [{**message, "content": _fill_content(message.get("content"), filler)} for message in value]


def stable_prefix(renderings: Iterable[Sequence[int]], piece: Callable[[int], bytes]) -> list[int]:
    """The first tokens of a prompt that do not depend on what varies; empty if there are none that say anything.

    Args:
        renderings: token ids of the prompt with different fillers, at least two.
        piece: bytes of a token; none of a special token.
    """
    common: list[int] | None = None
    for ids in renderings:
        common = list(ids) if common is None else common[: _common(common, ids)]
    if not common:
        return []
    pieces = [piece(token_id) for token_id in common]
    end = next((at for at in range(len(pieces), 0, -1) if _is_boundary(pieces, at)), 0)
    return common[:end] if any(pieces[:end]) else []


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    found: list[str] = []
    for message in value:
        content = message.get("content")
        parts = content if isinstance(content, list) else [content]
        texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
        found.extend(text for text in texts if isinstance(text, str))
    return found


def _names(text: str) -> list[str]:
    names = []
    for match in _MARK.finditer(text):
        if match[1] is None:
            continue
        if not _NAME.fullmatch(match[1]):
            raise InvalidRequestError(
                f"a template has {match[0][:60]!r}, which marks no varying part; write a name in double braces, such as "
                "{{question}}, and {{{{ or }}}} for literal double braces"
            )
        names.append(match[1].strip())
    return names


def _replacement(match: re.Match[str], filler: str) -> str:
    return match[0][:2] if match[1] is None else filler


def _fill_content(content: Any, filler: str) -> Any:
    if isinstance(content, str):
        return fill(content, filler)
    if not isinstance(content, list):
        return content
    return [
        {**part, "text": fill(part["text"], filler)}
        if isinstance(part, Mapping) and isinstance(part.get("text"), str)
        else fill(part, filler)
        if isinstance(part, str)
        else part
        for part in content
    ]


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    length = min(len(one), len(other))
    return next((at for at in range(length) if one[at] != other[at]), length)


def _is_boundary(pieces: Sequence[bytes], at: int) -> bool:
    """Whether tokens before index `at` are the same whatever follows those of `pieces`."""
    if not pieces[at - 1]:
        return True
    if at == len(pieces):
        return False
    if not pieces[at]:
        return True
    # Enough for a character before, and two after, which may be several tokens each.
    before = b"".join(pieces[max(0, at - 4) : at])
    after = b"".join(itertools.takewhile(bool, pieces[at : at + 8])).decode(errors="ignore")
    try:
        left = before[-_last_character(before) :].decode()
    except UnicodeDecodeError:  # half a character is no place to cut at
        return False
    if not after or left.isspace():
        return False
    if after[0] == " ":
        return len(after) > 1 and not after[1].isspace()
    return unicodedata.category(left)[0] == "L" and unicodedata.category(after[0])[0] in "PS"


def _last_character(text: bytes) -> int:
    """Bytes of the last character of UTF-8."""
    return next((size for size in range(1, min(4, len(text)) + 1) if text[-size] & 0xC0 != 0x80), 1)
