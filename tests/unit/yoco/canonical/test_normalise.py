"""Normal form of long texts: without markup, one width and case, cut in the middle."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitelib.yoco.canonical import normalise
from kitelib.yoco.canonical.markup import HAN_CHARACTERS, HEAD_CHARACTERS, TAIL_CHARACTERS


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("<p>Hello <b>World</b></p>", "hello world"),
        ("a<br/>b<!-- no\nmore -->c", "a b c"),
        ("Ｆｕｌｌ　ｗｉｄｔｈ", "full width"),
        ("# Title\n\nSome **bold** and _italic_ and `code`", "title some bold and italic and code"),
        ("see [the page](http://x.org/a) and ![image](b.png)", "see the page and image"),
        ("> quote\n- item\n* other\n---\nend", "quote item other end"),
        ("```python\nx = 1\n```", "x = 1"),
        ("a &lt; b &amp;&nbsp;c", "a < b & c"),
        ("1 < 2 and 3 > 2", "1 < 2 and 3 > 2"),
        ("2 * 3 * 4, snake_case_name, a*b*c", "2 * 3 * 4, snake_case_name, a*b*c"),
        ("price: 5.00, 10²", "price: 5.00, 10 2^"),
        ("", ""),
        ("\ud800", "\ud800"),
    ],
)
def test_marks_go_and_words_stay(text: str, plain: str) -> None:
    assert normalise(text) == plain


def test_long_chinese_texts_are_cut_shorter() -> None:
    text = "怎么还款" * 300
    cut = normalise(text)
    assert cut.startswith(text[:HAN_CHARACTERS] + " … ")
    assert cut.endswith(" … " + text[-HAN_CHARACTERS:])
    assert normalise("怎" + text) != cut
    assert normalise(text[: 2 * HAN_CHARACTERS]) == text[: 2 * HAN_CHARACTERS]


def test_long_texts_keep_head_tail_and_length() -> None:
    limit = HEAD_CHARACTERS + TAIL_CHARACTERS
    text = "a" * HEAD_CHARACTERS + "b" * TAIL_CHARACTERS
    assert normalise(text) == text
    longer = "a" * HEAD_CHARACTERS + "x" * 1000 + "b" * TAIL_CHARACTERS
    cut = normalise(longer)
    digest = hashlib.sha256(b"x" * 1000).hexdigest()[:32]
    assert cut == f"{'a' * HEAD_CHARACTERS} … 1000 {digest} … {'b' * TAIL_CHARACTERS}"
    assert normalise(longer.replace("x", "y")) != cut
    assert len(cut) < limit + 64
    assert normalise(longer + "b") != cut
    assert normalise("c" + longer[1:]) != cut


@given(st.text(st.characters(exclude_categories=())))
@settings(max_examples=300, deadline=None)
def test_is_total_and_has_no_double_spaces(text: str) -> None:
    plain = normalise(text)
    assert plain == " ".join(plain.split())
