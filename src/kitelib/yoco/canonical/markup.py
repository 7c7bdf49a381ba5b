"""Normal form of long texts: for fingerprints of a text that may be laid out in any way."""

from __future__ import annotations

import hashlib
import re
from typing import Final

from kitelib.yoco.canonical.characters import fold_characters, has_han

__all__ = ["HEAD_CHARACTERS", "TAIL_CHARACTERS", "normalise"]

HEAD_CHARACTERS: Final = 512
TAIL_CHARACTERS: Final = 512
HAN_CHARACTERS: Final = 128  # of both in a text with Chinese characters, each of which is a word
"""A normal form longer than both is cut to its head and its tail; between them stands a digest of what was left out."""

# Bounded, so that a text of opening signs takes linear time.
_TAG: Final = re.compile(r"</?[a-zA-Z][^<>]{0,500}>")
_ENTITY: Final = re.compile(r"&(?:amp|lt|gt|quot|apos|nbsp|#39);")
_ENTITIES: Final = {"&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&apos;": "'", "&#39;": "'", "&nbsp;": " "}
_LINK: Final = re.compile(r"!?\[([^\[\]\n]{0,500})\]\([^()\s]{0,500}\)")
_LINE_START: Final = re.compile(
    r"^[ \t]{0,8}(?:#{1,6}[ \t]+|>[ \t]?|[*+-][ \t]+|```[\w+-]{0,20}[ \t]*$|[-*_=]{3,80}[ \t]*$)", re.MULTILINE
)
_EMPHASIS: Final = re.compile(r"(?<![\w*])(\*{1,3}|_{1,3}|~~|`{1,2})(?=\S)([^*_~`\n]{1,500})(?<=\S)\1(?![\w*])")


def normalise(text: str) -> str:
    """A text without HTML and Markdown marks, in one width and case, white space joined; long ones cut.

    Unlike a `signature` it keeps every word, number and punctuation mark. Deterministic; linear time.

    Args:
        text: any text, also one with lone surrogates.

    Returns:
        At most `HEAD_CHARACTERS` + `TAIL_CHARACTERS` characters and the mark of the cut: how many characters were left
        out, and the start of their SHA-256, which keeps texts apart that differ only there.
    """
    if "<" in text:
        text = _TAG.sub(" ", _without_comments(text))
    if "&" in text:
        text = _ENTITY.sub(lambda found: _ENTITIES[found[0]], text)
    if "[" in text:
        text = _LINK.sub(r"\1", text)
    text = _EMPHASIS.sub(r"\2", _LINE_START.sub("", text))
    text = " ".join(fold_characters(text).split())
    head, tail = (HEAD_CHARACTERS, TAIL_CHARACTERS) if not has_han(text) else (HAN_CHARACTERS, HAN_CHARACTERS)
    middle = text[head:-tail]
    if not middle:
        return text
    digest = hashlib.sha256(middle.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    return f"{text[:head]} … {len(middle)} {digest} … {text[-tail:]}"


def _without_comments(text: str) -> str:
    parts, start = [], 0
    while (begin := text.find("<!--", start)) >= 0 and (end := text.find("-->", begin + 4)) >= 0:
        parts.append(text[start:begin])
        start = end + 3
    return " ".join([*parts, text[start:]])
