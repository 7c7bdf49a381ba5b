"""Tokens of a text: the same again from the text that they make, in time that grows with the text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kitelib.yoco.canonical import LEVELS, normalise, signature
from kitelib.yoco.canonical.characters import fold_characters, is_opaque, join, one_space, tokenize


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("What's 4.5% of 1,000?", ["what's", "4.5%", "of", "1,000"]),
        ("5pm - 7pm", ["5pm", "-", "7pm"]),
        ("50-100元的", ["50-100", "元", "的"]),
        ("-5, .5 and -.5", ["-5", ",", ".5", "and", "-.5"]),
        ("covid-19 top-up", ["covid-19", "top-up"]),
        ("听过《Jay  Chou》吗？", ["听", "过", "《jay chou》", "吗"]),
        ("say “Don’t Stop” now", ["say", '"don\'t stop"', "now"]),
        ("my friend's 'a's' card", ["my", "friend's", "'a's'", "card"]),
        ('an "open one', ["an", '"open', "one"]),
        ("6' or 5' and 6\" or 5\"", ["6'", "or", "5'", "and", '6"', "or", '5"']),
        ('("a b")?', ["(", '"a b"', ")"]),
        ("ab?! cd...", ["ab", ",", "cd"]),
        ("x?! n! 5?! 5? ...", ["x?!", "n!", "5?!", "5"]),
        ("x != 1 , y ! : z", ["x", "!=", "1", ",", "y", "!", ":", "z"]),
        ("c++? (b)? 5%? u.s.? a+?", ["c++", ",", "(b)", ",", "5%", ",", "u.s", ",", "a+?"]),
        ("3. 5 3. five 三.五 三、五", ["3.", "5", "3", ",", "five", "三", ".", "五", "三", ",", "五"]),
        ("好!吗 好!x 好,x 好?x", ["好", ",", "吗", "好", "!x", "好", ",", "x", "好", "?x"]),
        ("a\n\nb\u2028c", ["a", ",", "b", ",", "c"]),
        ("10² ½ ①", ["10", "2^", "1⁄2^", "1^"]),
        ("snake_case", ["snake_case"]),
        ("naïve ÄÖ, Maße!", ["naïve", "äö", ",", "maße"]),
        ("", []),
        (" \n ", []),
        ("…", []),
    ],
)
def test_tokens(text: str, tokens: list[str]) -> None:
    found = tokenize(one_space(fold_characters(text)))
    assert found == tokens
    assert tokenize(join(found)) == found


@pytest.mark.parametrize(
    ("text", "opaque"),
    [("a `b`", True), ("see https://x.org", True), ("a\n  b", True), ("f{x}", True), ("a\nb", False), ("what?", False)],
)
def test_code_addresses_and_layouts_are_left_alone(text: str, opaque: bool) -> None:
    assert is_opaque(text) == opaque
    if opaque:
        assert signature(f" {text}\n", "structural") == text


HOSTILE: dict[str, Callable[[int], str]] = {
    "letters": lambda n: "a" * n,
    "quotes": lambda n: '"' * n,
    "open quotes": lambda n: '" a' * (n // 3),
    "apostrophes": lambda n: "'" * n,
    "spaced apostrophes": lambda n: " 'a" * (n // 3),
    "titles": lambda n: "《" * n,
    "digits": lambda n: "1-" * (n // 2),
    "dots": lambda n: ". " * (n // 2),
    "articles": lambda n: "a the " * (n // 6),
    "greetings": lambda n: "hello please " * (n // 13),
    "thanks": lambda n: "x" + " thanks" * (n // 7),
    "yes or no": lambda n: "能不" * (n // 2),
    "numerals": lambda n: "十一百" * (n // 3),
    "particles": lambda n: "x" + "啊呢" * (n // 2),
    "how do i": lambda n: "how do " * (n // 7),
    "accents": lambda n: "e" + "\u0301" * n,
    "brackets": lambda n: "[" * n,
    "links": lambda n: "[a](" * (n // 4),
    "tags": lambda n: "<a " * (n // 3),
    "comments": lambda n: "<!--" * (n // 4),
    "stars": lambda n: "*a" * (n // 2),
    "ampersands": lambda n: "&amp" * (n // 4),
    "newlines": lambda n: "\n#" * (n // 2),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("form", [*LEVELS, "normalise"])
def test_hostile_texts_take_work_that_grows_with_their_length(name: str, form: Any, steps: Callable[..., int]) -> None:
    """Work is counted in lines of Python that run, so a step that is quadratic in Python shows; the regular expressions
    are bounded by construction, and 100,000 characters would not end if one were not."""
    make = HOSTILE[name]

    def run(text: str) -> str:
        return normalise(text) if form == "normalise" else signature(text, form)

    small, large = steps(lambda: run(make(2_000))), steps(lambda: run(make(20_000)))
    assert large <= 12 * small + 2_000
    assert isinstance(run(make(100_000)), str)


@pytest.fixture
def steps() -> Callable[[Callable[[], object]], int]:
    """Counts the lines that run while a function does."""
    import sys

    def count(function: Callable[[], object]) -> int:
        lines = 0

        def trace(_frame: Any, event: str, _argument: Any) -> Any:
            nonlocal lines
            lines += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            function()
        finally:
            sys.settrace(before)
        return lines

    return count
