"""Chinese numerals up to 9999, where they are written in full."""

from __future__ import annotations

from typing import Final

__all__ = ["NUMERALS", "numeral_value"]

_DIGITS: Final = "零一二三四五六七八九"
_PLACES: Final = {"千": 1000, "百": 100, "十": 10}
_LONGEST: Final = 8  # 九千九百九十九 has seven signs, 一千零一十 the same

NUMERALS: Final = frozenset({*_DIGITS, *_PLACES, "两", "〇", "万", "亿"})
"""Characters of numerals; those with 万 or 亿 are recognised but not read."""


def numeral_value(text: str) -> int | None:
    """The number that a numeral stands for; None unless it is written in full: 一百五 may be 150 or 105, 三四 is a guess.

    Args:
        text: characters of `NUMERALS`.
    """
    if len(text) > _LONGEST:
        return None
    plain = text.replace("两", "二").replace("〇", "零")
    value, digit = 0, 1
    for sign in plain:
        if sign in _PLACES:
            value += digit * _PLACES[sign]
            digit = 1
        elif sign in _DIGITS:
            digit = _DIGITS.index(sign)
        else:
            return None
    if plain[-1] not in _PLACES:
        value += digit
    written = _written(value)
    return value if plain in (written, written.removeprefix("一") if 10 <= value < 20 else written) else None


def _written(value: int) -> str:
    """The numeral of 0 to 9999 in full: one 零 for a gap, none at the end."""
    if value == 0:
        return "零"
    parts: list[str] = []
    for place, size in (*_PLACES.items(), ("", 1)):
        digit = value // size % 10
        if digit:
            parts.append(_DIGITS[digit] + place)
        elif parts and parts[-1] != "零":
            parts.append("零")
    return "".join(parts).removesuffix("零")
