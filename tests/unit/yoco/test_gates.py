"""Gates: each sees its own kind of difference, and lets other wordings of one question pass."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitelib.yoco.gates import GATES, differing_gates
from tests.support.question_pairs import DIFFERENT, SAME, pairs

EXPECTED = {
    "en_neg_antonym": {"antonyms"},
    "en_neg_entity": {"entities", "dates", "antonyms"},
    "en_neg_negation": {"negation"},
    "en_neg_number": {"numbers"},
    "zh_neg_antonym": {"question word", "antonyms"},
    "zh_neg_attribute": {"entities", "antonyms"},
    "zh_neg_entity": {"entities", "dates", "antonyms"},
    "zh_neg_negation": {"negation"},
    "zh_neg_number": {"numbers"},
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_edits_that_ask_something_else_are_stopped(kind: str) -> None:
    """B47: what similarity lets pass, a gate names."""
    for pair in pairs(kind):
        assert EXPECTED[kind] & set(differing_gates(pair.a, pair.b)), pair


@pytest.mark.parametrize("kind", SAME)
def test_benign_edits_pass(kind: str) -> None:
    assert {pair: differing_gates(pair.a, pair.b) for pair in pairs(kind)} == {pair: [] for pair in pairs(kind)}


@pytest.mark.parametrize(
    ("gate", "a", "b"),
    [
        ("numbers", "pay 5 dollars", "pay 6 dollars"),
        ("numbers", "a table for two", "a table for three"),
        ("numbers", "推荐两个酒店", "推荐三个酒店"),
        ("numbers", "十五天到账吗", "二十天到账吗"),
        ("numbers", "limit of 1,000", "limit of 10,000"),
        ("dates", "is it open on sunday", "is it open on monday"),
        ("dates", "tomorrow's weather", "today's weather"),
        ("dates", "今天能还款吗", "明天能还款吗"),
        ("negation", "can I cancel", "can I not cancel"),
        ("negation", "it works", "it doesn't work"),
        ("negation", "能登录", "不能登录"),
        ("negation", "我还了", "我没还"),
        ("antonyms", "how do I enable alerts", "how do I disable alerts"),
        ("antonyms", "is this known", "is this unknown"),
        ("antonyms", "turn the light on", "turn the light off"),
        ("antonyms", "怎么开通会员", "怎么关闭会员"),
        ("antonyms", "提前还款", "延期还款"),
        ("entities", "谁唱的《后来》", "谁唱的《倒带》"),
        ("entities", 'who sings "Hello"', 'who sings "Help"'),
        ("entities", "flights to Oslo please", "flights to Bergen please"),
        ("entities", "how do I pay with Visa", "how do I pay with Mastercard"),
        ("entities", "怎么用iphone付款", "怎么用ipad付款"),
        ("entities", "where is order ab12", "where is order ab13"),
        ("entities", "北京的天气", "上海的天气"),
        ("entities", "my credit card is lost", "my debit card is lost"),
        ("question word", "where is my card", "when is my card"),
        ("question word", "how long is it", "how old is it"),
        ("question word", "多少钱还款", "怎么还款"),
        ("question word", "什么时候发货", "在哪里发货"),
        ("pronouns", "what is my name", "what is your name"),
        ("pronouns", "我叫什么", "你叫什么"),
        ("pronouns", "is it his", "is it hers"),
        ("order", "深圳到上海", "上海到深圳"),
        ("order", "convert dollars to euros now", "convert euros to dollars"),
        ("order", "does a dog chase a cat", "does a cat chase a dog"),
        ("signs", "is x = 1", "is x != 1"),
        ("signs", "what is -x", "what is x"),
        ("signs", "how long is 6' in cm", 'how long is 6" in cm'),
        ("signs", "what is .net", "what is net"),
        ("signs", "温度-5度", "温度5度"),
        ("signs", "what is (a)", "what is a"),
    ],
)
def test_each_gate_sees_its_own(gate: str, a: str, b: str) -> None:
    assert gate in differing_gates(a, b)
    assert gate in differing_gates(b, a)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("How do I change my PIN?", "what is the way to change my pin"),
        ("A table for two", "table for 2"),
        ("Is it possible to pay in Paris", "can i pay in paris"),
        ("I cannot log in", "I can't log in!"),
        ("能不能提前还款", "可以提前还款吗"),
        ("有没有酒店", "有酒店吗"),
        ("两个人住", "2个人住"),
        ("这个不错吗", "这个好吗"),
        ("can you tell me when it opens", "when it opens"),
        ("what is a top-up (fee)", "what is a top up fee"),
        ("is it mcdonald's 1,000 dollars", "is it mcdonalds 1000 dollars"),
        ("my card - it is lost!", "my card it is lost"),
        ("马丁·路德是谁？", "马丁路德是谁"),
        ("他说：好", "他说好"),
    ],
)
def test_other_wordings_pass(a: str, b: str) -> None:
    assert differing_gates(a, b) == []


@given(st.text(max_size=60), st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_gates_are_symmetric_total_and_ordered(a: str, b: str) -> None:
    found = differing_gates(a, b)
    assert found == differing_gates(b, a)
    assert found == [gate for gate in GATES if gate in found]
    assert differing_gates(a, a) == []


def test_long_texts_are_cut() -> None:
    assert differing_gates("x " * 50_000 + "not", "x " * 50_000) == []
    assert differing_gates("not " + "x " * 50_000, "x " * 50_000) == ["negation"]
