"""Rewriting a list of tokens by tables: phrases for phrases, and fillers off both ends. Every step is linear."""

from __future__ import annotations

from kitelib.yoco.canonical.characters import BREAK
from kitelib.yoco.canonical.tables import Ends, Rules

__all__ = ["replace", "strip"]


def replace(tokens: list[str], rules: Rules) -> list[str]:
    """Each longest phrase of the rules, from the left, replaced by what stands for it."""
    if rules.keys().isdisjoint(tokens):
        return tokens
    result: list[str] = []
    position, end = 0, len(tokens)
    while position < end:
        token = tokens[position]
        for phrase, replacement in rules.get(token, ()):
            if tokens[position : position + len(phrase)] == phrase:
                result += replacement
                position += len(phrase)
                break
        else:
            result.append(token)
            position += 1
    return result


def strip(tokens: list[str], ends: Ends) -> list[str]:
    """The tokens without fillers and breaks at both ends; none may be left."""
    start, end = 0, len(tokens)
    while start < end:
        size = 1 if tokens[start] == BREAK else _head_size(tokens, start, end, ends)
        if not size:
            break
        start += size
    while start < end:
        size = 1 if tokens[end - 1] == BREAK else _tail_size(tokens, start, end, ends)
        if not size:
            break
        end -= size
    return tokens[start:end] if end - start < len(tokens) else tokens


def _head_size(tokens: list[str], start: int, end: int, ends: Ends) -> int:
    for phrase, condition in ends.head.phrases.get(tokens[start], ()):
        stop = start + len(phrase)
        if stop <= end and tokens[start:stop] == phrase:
            after = BREAK if stop == end else tokens[stop]
            if condition == "always" or after == BREAK or (condition == "starter" and after in ends.starters):
                return len(phrase)
    return 0


def _tail_size(tokens: list[str], start: int, end: int, ends: Ends) -> int:
    for phrase, condition in ends.tail.phrases.get(tokens[end - 1], ()):
        first = end - len(phrase)
        if first >= start and tokens[first:end] == phrase:
            before = BREAK if first == start else tokens[first - 1]
            if before == BREAK or (condition != "break" and before not in ends.not_after[condition]):
                return len(phrase)
    return 0
