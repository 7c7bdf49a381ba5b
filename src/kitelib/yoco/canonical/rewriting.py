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
    """The tokens without fillers and breaks at both ends; none may be left.

    Nothing is taken off if only words that frame a question would be left: what looks like a filler is then what is asked
    about ("what does please mean", 请问是什么意思).
    """
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
    if end - start == len(tokens):
        return tokens
    left = tokens[start:end]
    return tokens if left and ends.frame.issuperset(token for token in left if token != BREAK) else left


def _head_size(tokens: list[str], start: int, end: int, ends: Ends) -> int:
    for phrase, condition in ends.head.phrases.get(tokens[start], ()):
        stop = start + len(phrase)
        if stop <= end and tokens[start:stop] == phrase:
            after = BREAK if stop == end else tokens[stop]
            if after == BREAK or after in ends.before[condition]:
                return len(phrase)
            if condition == "always" or (condition == "please" and after not in ends.not_before):
                return len(phrase)
            if condition == "please":
                return 0  # nor a shorter one, of which the rest is no word
    return 0


def _tail_size(tokens: list[str], start: int, end: int, ends: Ends) -> int:
    for phrase, condition in ends.tail.phrases.get(tokens[end - 1], ()):
        first = end - len(phrase)
        if first >= start and tokens[first:end] == phrase:
            before = BREAK if first == start else tokens[first - 1]
            if before == BREAK or (condition != "break" and before not in ends.not_after[condition]):
                return len(phrase)
    return 0
