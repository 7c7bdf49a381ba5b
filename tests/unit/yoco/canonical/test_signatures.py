"""Signatures: equal for the same question in other words, different for everything that asks something else."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitelib.errors import InvalidRequestError
from kitelib.yoco.canonical import LEVELS, Level, signature
from kitelib.yoco.canonical.tables import NAMES, load
from tests.support.question_pairs import DIFFERENT, SAME, pairs

# Of 15 pairs each, how many have one signature. The edits of zh_pos_synonym include 可以 for 能够 in statements, and
# those of en_pos_rewrite "how can i" for "how do i", which only the structural level folds.
MATCHED = {
    "en_pos_case_punct": (15, 15),
    "en_pos_filler": (15, 15),
    "en_pos_rewrite": (3, 15),
    "zh_pos_filler": (15, 15),
    "zh_pos_punct": (15, 15),
    "zh_pos_synonym": (13, 14),
}


def same(a: str, b: str, level: Level) -> bool:
    return signature(a, level) == signature(b, level)


def assert_different(a: str, b: str) -> None:
    for level in LEVELS:
        assert not same(a, b, level), signature(a, level)


# Pairs by rule, and what peers got wrong


@pytest.mark.parametrize("kind", DIFFERENT)
def test_edits_that_ask_something_else_have_another_signature(kind: str) -> None:
    """B47: one number, name, attribute, opposite or negation changed, which cosine similarity does not see."""
    found = pairs(kind)
    assert len(found) == 15
    for pair in found:
        assert_different(pair.a, pair.b)


@pytest.mark.parametrize("kind", SAME)
def test_benign_edits_have_the_same_signature(kind: str) -> None:
    found = pairs(kind)
    counts = tuple(sum(same(pair.a, pair.b, level) for pair in found) for level in LEVELS)
    assert counts == MATCHED[kind]
    # The structural level folds more, never less.
    assert all(same(pair.a, pair.b, "structural") for pair in found if same(pair.a, pair.b, "canonical"))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("How do I enable two-factor login?", "How do I disable two-factor login?"),
        ("how do i turn on notifications", "how do i turn off notifications"),
        ("Is this medicine safe for children?", "Is this medicine not safe for children?"),
        ("Can I cancel my order?", "Can I not cancel my order?"),
        ("I can access my account", "I can't access my account"),
        ("Which countries are in the EU?", "Which countries aren't in the EU?"),
        ("如何开启指纹支付", "如何关闭指纹支付"),
        ("这个能退款吗", "这个不能退款吗"),
        ("为什么能登录", "为什么不能登录"),
        ("信用卡可以提现吗", "信用卡不可以提现吗"),
        ("我有逾期吗", "我没有逾期吗"),
    ],
)
def test_negated_and_opposite_questions_are_others(a: str, b: str) -> None:
    """B47: peers gave the answer of one of these for the other."""
    assert_different(a, b)


def test_one_entry_does_not_answer_everything() -> None:
    """B47: all queries mapped to one entry, greetings and empty ones included."""
    texts = [
        "",
        " ",
        "?",
        "？！",
        "hi",
        "hello",
        "你好",
        "谢谢",
        "thanks",
        "please",
        "the",
        "a",
        "的",
        "是",
        "。",
        "1",
        "我想",
    ]
    for level in LEVELS:
        # The full-width question mark is the other one in another width.
        assert len({signature(text, level) for text in texts}) == len(texts) - 1


# What is folded


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("What's the exchange rate?", "what is the exchange rate"),
        ("Ｗｈａｔ　ｉｓ　ＡＴＭ？", "what is atm"),
        ("Hi there, can you tell me where is my card? Thanks!", "Where is my card"),
        ("I can’t log in", "i cannot log in"),
        ("My payment was cancelled", "my payment was canceled."),
        ("please tell me, what colour is it", "What color is it?"),
        ("Roll two dice, how many sides?", "roll 2 dice how many sides"),
        ("e-mail", "email"),
        ("怎么办理信用卡？", "如何办理信用卡"),
        ("请问咋登录啊", "怎样登录？"),
        ("为啥扣款", "为什么扣款呢？"),
        ("这是啥？", "这是什么"),
        ("您好，请问在哪儿退款？谢谢", "在哪里退款"),
        ("有电话么", "有电话吗"),
        ("用 iPhone 怎么付款", "用iphone怎么付款"),
    ],
)
def test_canonical_folds_how_a_question_is_written(a: str, b: str) -> None:
    assert signature(a, "canonical") == signature(b, "canonical")
    assert signature(a, "structural") == signature(b, "structural")


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("How do I change my PIN?", "how to change my pin"),
        ("What is the way to change my PIN?", "How can I change my PIN"),
        ("Is it possible to get a card?", "can I get the card"),
        ("Is it possible for me to pay cash?", "can i pay cash"),
        ("how long do the transfers take", "how long do transfer take"),
        ("能不能提前还款", "可以提前还款吗"),
        ("可不可以提前还款？", "能否提前还款"),
        ("有没有年费", "有年费吗"),
        ("我的额度是多少", "我额度多少"),
        ("我想知道怎么注销", "怎么注销"),
        ("帮我查一下余额", "查余额"),
        ("需要三天吗", "需要3天吗"),
        ("十五个工作日到账吗", "15个工作日到账吗"),
    ],
)
def test_structural_folds_how_it_is_asked(a: str, b: str) -> None:
    assert signature(a, "canonical") != signature(b, "canonical")
    assert signature(a, "structural") == signature(b, "structural")


# What is never folded


@pytest.mark.parametrize(
    ("a", "b"),
    [
        # pronouns
        ("你怎么还款", "我怎么还款"),
        ("what is your name", "what is my name"),
        ("is the card his", "is the card hers"),
        ("我想你", "你"),
        ("帮我们查余额", "们查余额"),
        # order of two entities
        ("深圳到上海的机票", "上海到深圳的机票"),
        ("convert dollars to euros", "convert euros to dollars"),
        ("does a cat chase a dog", "does a dog chase a cat"),
        # 上 下 多 到 前 后
        ("还上款了吗", "还下款了吗"),
        ("要多久", "要久"),
        ("要多还一点吗", "要还一点吗"),
        ("还款到账了吗", "还款账了吗"),
        ("怎么提前还款", "怎么提后还款"),
        ("节前发货吗", "节后发货吗"),
        # aspect 了 会 能
        ("还款了吗", "还款吗"),
        ("会扣款吗", "扣款吗"),
        ("能取现吗", "会取现吗"),
        ("能取现吗", "取现吗"),
        ("怎么死的", "怎么死"),
        # you and I
        ("how do you close an account", "how do I close an account"),
        ("how do you close an account", "how to close an account"),
        ("how do i look", "how to look"),
        ("can you", "can i"),
        # quoted titles
        ("who wrote 'How Do I Live'", "who wrote 'How to Live'"),
        ('who sings "What Is Love"', 'who sings "What\'s Love"'),
        ("谁唱的《什么》", "谁唱的《啥》"),
        ("《我的父亲》讲什么", "《我父亲》讲什么"),
        ("《你好》讲什么", "讲什么"),
        # numbers and dates
        ("roll 5 dice", "roll 6 dice"),
        ("is 10² more", "is 102 more"),
        ("add 5½ cups", "add 51⁄2 cups"),
        ("pay .5 dollars", "pay 5 dollars"),
        ("set it to -5 degrees", "set it to 5 degrees"),
        ("温度-5度", "温度5度"),
        ("is it 1,000 or 1.000", "is it 1.000 or 1,000"),
        ("what happened on 2024-05-01", "what happened on 2024-01-05"),
        ("三个人", "四个人"),
        ("十五天", "五十天"),
        ("第一个", "第二个"),
        ("meet at twenty five", "meet at 20 5"),
        # negation
        ("不，可以退", "不可以退"),
        ("no, i want that", "i want that"),
        ("we can not go", "we can go"),
        ("这没问题吗", "这问题吗"),
        # what tells a question from a statement, one thing from another
        ("你有钱吗", "你有钱"),
        ("你呢", "你"),
        ("好的酒店", "酒店"),
        ("你好看吗", "看吗"),
        ("how do i say thank you", "how do i say"),
        ("hello kitty price", "kitty price"),
        ("is there a few left", "is there few left"),
        ("from a to b", "from to b"),
        ("plan a costs what", "plan costs what"),
        ("where are customs", "where are custom"),
        ("2*(3+4)", "2*3+4"),
        ("what is c++", "what is c"),
        ("目的是什么", "目是什么"),
        ("a=b`x`", "a=B`x`"),
        ("open https://example.com/aB", "open https://example.com/ab"),
        ("if x:\n  y\nz", "if x:\n  y\n  z"),
        # other languages keep what English drops
        ("¿comes carne?", "¿come carne?"),
        ("il a mange", "il mange"),
    ],
)
def test_is_never_folded(a: str, b: str) -> None:
    """B47: polarity, numbers and entities decide."""
    assert_different(a, b)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("ПРИВЕТ, мир!", "привет мир"),
        ("ｶﾞｲﾄﾞ", "ガイド"),
        ("ΣΊΣΥΦΟΣ", "σίσυφος"),
        ("الأسعار؟", "الأسعار"),
        ("안녕 하세요", "안녕 하세요?"),
    ],
)
def test_other_scripts_pass_through_unicode_alone(a: str, b: str) -> None:
    assert same(a, b, "canonical")
    assert same(a, b, "structural")


def test_japanese_keeps_its_chinese_characters() -> None:
    assert signature("これの目的は何ですか？", "structural") == "これの目的は何ですか"
    assert signature("是非お願いします", "structural") == "是非お願いします"


# Properties

WORDS = st.sampled_from(
    [
        *load("en")["words"],
        *load("en")["phrases"],
        *[
            phrase
            for part in ("head", "tail")
            for key in ("always", "please", "break")
            for phrase in load("en")[part].get(key, ())
        ],
        *load("en")["structural"]["phrases"],
        *load("en")["starters"],
        *load("en")["numbers"],
        *load("en")["structural"]["articles"],
        *load("zh")["phrases"],
        *[
            phrase
            for part in ("head", "tail")
            for key in ("always", "please", "break")
            for phrase in load("zh")[part].get(key, ())
        ],
        *load("zh")["head"]["starter"],
        *load("zh")["head"]["request"],
        *load("zh")["structural"]["yes_no"],
        *load("zh")["structural"]["wishes"],
        *"你我的是一下吗么呢啊了能不可以有没会要三十五百天个",
        *load("common")["breaks"],
        *"~'-—·_¿《》「」!=()+#%.^",
        *["x!", "5!", '6"', "6'", "U.S.", "-x", "...", '" ', " '", "401k!", "!=", "a.b", ".net"],
        *load("en")["frame"],
        *load("zh")["frame"],
        *[
            "5",
            "-5",
            ".5",
            "10²",
            "x",
            "s",
            "cards",
            "news",
            "《",
            "》",
            '"',
            "'",
            "’",
            " ",
            "  ",
            "　",
            "\u200b",
            "ﬁ",
            "İ",
            "ß",
        ],
    ]
)
TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=())),
    st.lists(WORDS, max_size=12).map(" ".join),
    st.lists(WORDS, max_size=12).map("".join),
)


@given(TEXTS)
@settings(max_examples=600, deadline=None)
def test_is_idempotent_and_total(text: str) -> None:
    for level in LEVELS:
        once = signature(text, level)
        assert signature(once, level) == once
        assert bool(once) == bool(text.strip())


def test_surrogates_pass() -> None:
    for level in LEVELS:
        assert signature("what is \ud800?", level) == "what is \ud800"


def test_other_processes_agree() -> None:
    texts = ["What's the way to pay 5 dollars?", "您好，能不能帮我查一下额度", "hi", "ﬁne ① ½ \ud800"]
    program = (
        "import sys; from kitelib.yoco.canonical import signature, tables_digest;"
        f"sys.stdout.buffer.write(repr([[signature(text, level) for level in ('canonical', 'structural')]"
        f" for text in {texts!r}] + [tables_digest()]).encode('utf-8', 'surrogatepass'))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, check=True, capture_output=True
        ).stdout
        for seed in ("0", "1", "77")
    }
    assert len(outputs) == 1
    assert repr([signature(texts[0], level) for level in LEVELS]).encode() in outputs.pop()


def test_an_unknown_level_is_named() -> None:
    with pytest.raises(InvalidRequestError, match="'loose'; it must be one of canonical, structural"):
        signature("x", "loose")  # type: ignore[arg-type]


def test_tables_are_data_files_of_the_package() -> None:
    for name in NAMES:
        assert load(name)
