"""Chinese: what is the same question at each level, by the tables. A token is one character."""

from __future__ import annotations

import functools
from typing import Any, Final

from kitelib.yoco.canonical.characters import BREAK, tokenize
from kitelib.yoco.canonical.numerals import NUMERALS, numeral_value
from kitelib.yoco.canonical.rewriting import replace, strip
from kitelib.yoco.canonical.tables import Rules, ends_of, load, rules_of

__all__ = ["Chinese", "chinese"]

_ASKING: Final = "吗"
_NEGATIVE: Final = frozenset("不没否")  # in every yes/no form


class Chinese:
    """The Chinese rules, compiled from their table."""

    def __init__(self, table: Any) -> None:
        structural = table["structural"]
        self._phrases: Rules = rules_of(table["phrases"], tokenize)
        self._ends = ends_of(table, {}, tokenize)
        self._particles = frozenset(table["particles"])
        self._long_particles = frozenset(table["long_particles"])
        self._long_min: int = table["long_particle_min"]
        self._kept_before_me = frozenset(table["kept_before_me"])
        self._more_ends = ends_of(table, {"always": structural["head"]}, tokenize)
        self._wishes = {wish: frozenset(kept) for wish, kept in structural["wishes"].items()}
        self._doubled = frozenset(structural["doubled"])
        self._yes_no: Rules = rules_of(structural["yes_no"], tokenize)
        self._yes_no_kept_before = frozenset(structural["yes_no_kept_before"])
        self._able: Rules = rules_of(structural["able"], tokenize)
        self._de_words = frozenset(structural["de_words"])
        self._de_kept_before = frozenset(structural["de_kept_before"])
        self._de_kept_after = frozenset(structural["de_kept_after"])
        self._shi_before = frozenset(structural["shi_before"])
        self._shi_kept_after = frozenset(structural["shi_kept_after"])
        self._bit_kept_after = frozenset(structural["bit_kept_after"])
        self._measures = frozenset(structural["measures"])
        self._not_before_numeral = frozenset(structural["not_before_numeral"])
        self._one_kept_before = frozenset(structural["one_kept_before"])

    def canonical(self, tokens: list[str]) -> list[str]:
        """T1: question words, spelling, particles and fillers at the ends."""
        tokens = replace(tokens, self._phrases)
        tokens = strip(tokens, self._ends)
        tokens = self._without_particles(tokens)
        return self._final_ma(tokens) if "么" in tokens else tokens

    def structural(self, tokens: list[str]) -> list[str]:
        """T2, after T1: yes/no forms, what may be left out, numerals, leading wishes."""
        tokens = strip(self._without_wish(strip(tokens, self._more_ends)), self._more_ends)
        clauses = _clauses(tokens)
        result: list[str] = []
        for clause in clauses:
            if result:
                result.append(BREAK)
            result += self._clause(clause)
        if not NUMERALS.isdisjoint(result):
            result = self._digits(result)
        return result

    def _clause(self, tokens: list[str]) -> list[str]:
        if not _NEGATIVE.isdisjoint(tokens):
            tokens = self._yes_no_form(tokens)
        if tokens[-1:] == [_ASKING]:
            tokens = replace(tokens, self._able)
        if "下" in tokens:
            tokens = self._without_a_bit(tokens)
        if "的" in tokens:
            tokens = self._without_de(tokens)
        return self._without_shi(tokens) if "是" in tokens else tokens

    def _without_particles(self, tokens: list[str]) -> list[str]:
        """Without sentence-final particles: those that only colour the tone at every clause's end, 呢 only after what
        is a question without it (你呢 is not 你)."""
        end = len(tokens)
        while end > 1 and (
            tokens[end - 1] in self._particles or (tokens[end - 1] in self._long_particles and end > self._long_min)
        ):
            end -= 1
        return tokens[:end] if end < len(tokens) else tokens

    def _final_ma(self, tokens: list[str]) -> list[str]:
        """么 as another way to write 吗: at a clause's end, but not in 什么, 怎么, 这么."""
        padded = [*tokens, BREAK]
        return [
            _ASKING
            if sign == "么"
            and position
            and tokens[position - 1] not in self._kept_before_me
            and (padded[position + 1] == BREAK or padded[position + 1] in self._particles)
            else sign
            for position, sign in enumerate(tokens)
        ]

    def _without_wish(self, tokens: list[str]) -> list[str]:
        wish = "".join(tokens[:2])
        kept = self._wishes.get(wish)
        if kept is None or len(tokens) < 4 or tokens[2] in kept or tokens[2] == BREAK:
            return tokens
        return tokens[2:]

    def _yes_no_form(self, tokens: list[str]) -> list[str]:
        """能不能.., 有没有.., 是否..: as 能..吗, 有..吗, 是..吗."""
        result: list[str] = []
        position, end = 0, len(tokens)
        while position < end:
            left_out, meant = self._asked_at(tokens, position)
            if left_out:
                result += meant
                position += left_out
            else:
                result.append(tokens[position])
                position += 1
        if len(result) == end:
            return tokens
        while result and (result[-1] in self._long_particles or result[-1] in self._particles):
            result.pop()
        return result if result[-1:] == [_ASKING] else [*result, _ASKING]

    def _asked_at(self, tokens: list[str], position: int) -> tuple[int, list[str]]:
        """How many tokens of a yes/no form there are at a position, and what they mean; 0 if there is none. Of 能不能
        the first two go, so that 需不需要 becomes 需要."""
        sign = tokens[position]
        if position and tokens[position - 1] in self._yes_no_kept_before:
            return 0, []
        if sign in self._doubled and tokens[position + 1 : position + 3] == ["没" if sign == "有" else "不", sign]:
            return 2, []
        for form, meant in self._yes_no.get(sign, ()):
            if tokens[position : position + len(form)] == form:
                return len(form), meant
        return 0, []

    def _without_a_bit(self, tokens: list[str]) -> list[str]:
        """Without 一下, which only softens a verb; not 一下子."""
        result: list[str] = []
        for position, sign in enumerate(tokens):
            result.append(sign)
            if (
                sign == "下"
                and position > 1
                and tokens[position - 1] == "一"
                and tokens[position - 2] not in self._bit_kept_after
                and tokens[position + 1 : position + 2] != ["子"]
            ):
                del result[-2:]
        return result

    def _without_de(self, tokens: list[str]) -> list[str]:
        """Without 的 between two nouns, as far as the neighbours tell: 手机的价格, but not 买的东西."""
        return [sign for position, sign in enumerate(tokens) if sign != "的" or self._needs_de(tokens, position)]

    def _needs_de(self, tokens: list[str], position: int) -> bool:
        if not 0 < position < len(tokens) - 1:
            return True
        before, after = tokens[position - 1], tokens[position + 1]
        return (
            before in self._de_kept_after
            or after in self._de_kept_before
            or f"{before}的" in self._de_words
            or f"的{after}" in self._de_words
        )

    def _without_shi(self, tokens: list[str]) -> list[str]:
        """Without 是 before a question word: 地址是什么, 地址什么."""
        return [
            sign
            for position, sign in enumerate(tokens)
            if sign != "是"
            or not 0 < position < len(tokens) - 1
            or tokens[position + 1] not in self._shi_before
            or tokens[position - 1] in self._shi_kept_after
        ]

    def _digits(self, tokens: list[str]) -> list[str]:
        """Numerals before a measure word, as digits: 三天, 十五个."""
        result: list[str] = []
        position, end = 0, len(tokens)
        while position < end:
            if tokens[position] not in NUMERALS:
                result.append(tokens[position])
                position += 1
                continue
            stop = position
            while stop < end and tokens[stop] in NUMERALS:
                stop += 1
            result += self._number(tokens, position, stop)
            position = stop
        return result

    def _number(self, tokens: list[str], start: int, stop: int) -> list[str]:
        run = tokens[start:stop]
        before = tokens[start - 1] if start else BREAK
        after = tokens[stop] if stop < len(tokens) else BREAK
        if (
            after not in self._measures
            or before in self._not_before_numeral
            or before[-1].isdigit()
            or (run == ["一"] and after in self._one_kept_before)
            or (run == ["十"] and after == "分")  # "very"
        ):
            return run
        value = numeral_value("".join(run))
        return run if value is None else [str(value)]


def _clauses(tokens: list[str]) -> list[list[str]]:
    if BREAK not in tokens:
        return [tokens]
    clauses: list[list[str]] = [[]]
    for token in tokens:
        if token == BREAK:
            clauses.append([])
        else:
            clauses[-1].append(token)
    return clauses


@functools.cache
def chinese() -> Chinese:
    """The rules, compiled when first needed."""
    return Chinese(load("zh"))
