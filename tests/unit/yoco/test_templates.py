"""Templates: what prompts share is found, and what stands where they differ is told to be volatile or data."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitelib.yoco.templates import TemplateBuilder, common_template, split_pieces

RULES = (
    "You answer for a bank. Be brief, polite and exact. Never promise anything that is not in the rules below. "
    "Rule 1: ask for the name of the customer before you look anything up."
)
QUESTIONS = ["How do I pay in euros?", "Where is my card?", "I want to close the account, please."]


def prompt(index: int, *, rules: str = RULES) -> str:
    return (
        f"Time: 2026-11-30 09:1{index}:25\nSession-ID: ab12cd3{index}\n{rules}\nQuestion: {QUESTIONS[index]}\nAnswer:"
    )


def test_clock_and_id_in_front_are_volatile_and_the_question_is_data() -> None:
    template = common_template([prompt(index) for index in range(3)])
    clock, session, question = template.gaps
    assert (clock.volatile, clock.kinds, clock.start) == (True, ("timestamp",), len("Time: "))
    assert clock.examples == ("2026-11-30 09:10:25", "2026-11-30 09:11:25", "2026-11-30 09:12:25")
    assert (session.volatile, session.kinds) == (True, ("request id",))
    assert (question.volatile, question.kinds, question.examples) == (False, (), tuple(QUESTIONS))
    assert template.first_volatile == clock
    fixed = f"Time: \nSession-ID: \n{RULES}\nQuestion: \nAnswer:"
    assert template.fixed_chars == len(fixed)
    assert [gap.fixed_before for gap in template.gaps] == [
        len("Time: "),
        len("Time: \nSession-ID: "),
        fixed.rindex("\n"),
    ]
    assert all(gap.fixed_before + gap.fixed_after == len(fixed) for gap in template.gaps)


def test_a_clock_that_stands_still_is_a_constant_with_common_text_behind_it() -> None:
    still = "Time: 2026-11-30 09:10:25\n"
    template = common_template([f"{still}{RULES}\n{question}\n2026-11-30" for question in QUESTIONS])
    (constant,) = template.constants  # not the date at the end, which nothing stands behind
    assert (constant.kind, constant.start, constant.text) == ("timestamp", len("Time: "), still[6:-1])
    assert template.first_volatile is None
    assert common_template([prompt(index) for index in range(3)]).constants == ()


def test_a_clock_at_the_end_costs_nothing() -> None:
    template = common_template([f"{RULES}\n{question}\n2026-11-30 09:1{at}" for at, question in enumerate(QUESTIONS)])
    assert template.first_volatile is None
    # Question and clock are one place: what differs in it is not the clock alone, since a line break says nothing.
    assert [gap.volatile for gap in template.gaps] == [False]


def test_a_labelled_clock_that_some_prompts_lack_is_volatile() -> None:
    template = common_template(
        [f"Time: 2026-11-30 09:10. {RULES} Go.", f"{RULES} Go.", f"Time: 2026-11-30 09:12. {RULES} Go."]
    )
    (gap,) = template.gaps
    assert (gap.volatile, gap.examples) == (True, ("Time: 2026-11-30 09:10. ", "Time: 2026-11-30 09:12. "))


def test_data_in_front_is_no_volatile_part() -> None:
    template = common_template([f"{question}\n\n{RULES}" for question in QUESTIONS])
    (gap,) = template.gaps
    assert (gap.start, gap.volatile, gap.examples) == (0, False, tuple(QUESTIONS))
    assert gap.fixed_after == len(f"\n\n{RULES}")


def test_a_clock_that_stands_still_is_common_text() -> None:
    template = common_template([f"Built on 2026-11-01. {RULES} {question}" for question in QUESTIONS])
    assert [gap.kinds for gap in template.gaps] == [()]
    assert template.gaps[0].fixed_before == len(f"Built on 2026-11-01. {RULES} ")


def test_unfilled_expressions_of_the_common_text_are_told() -> None:
    template = common_template(
        [f"It is {{{{ now() }}}}. {RULES} {question} {'${x}' * at}" for at, question in enumerate(QUESTIONS)]
    )
    assert [(part.start, part.text) for part in template.expressions] == [(6, "{{ now() }}")]


def test_conversations_that_grow_share_their_beginning() -> None:
    turns = ["user: Hi, I need help with my card.", "assistant: Sure, what is wrong with it?", "user: It was eaten."]
    template = common_template(["\n".join(turns[: count + 1]) for count in range(3)])
    assert template.fixed_chars == len(turns[0])
    assert [gap.start for gap in template.gaps] == [len(turns[0])]


def test_chinese_prompts_are_compared_character_by_character() -> None:
    rules = "你是一家银行的客服，请简短礼貌地回答客户的问题，不要承诺规则以外的任何事情。"
    template = common_template(
        [f"今天是2026年11月{day}日。{rules}{text}" for day, text in ((29, "怎么转账？"), (30, "卡丢了。"))]
    )
    assert template.gaps[0].volatile
    assert template.gaps[0].examples == ("2026年11月29日", "2026年11月30日")
    assert template.gaps[0].fixed_after >= len(rules)


@pytest.mark.parametrize("texts", [["a"], ["", "x"], ["", ""], ["same", "same"], [" ", "\n"], ["a b", "c d"]])
def test_small_and_empty_prompts(texts: list[str]) -> None:
    template = common_template(texts)
    assert template.num_prompts == len(texts)
    assert template.fixed_chars <= min(map(len, texts))
    assert bool(template.gaps) == (len(set(texts)) > 1)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.lists(st.sampled_from(["a", "b", "c", "d", "\n", "09:14:25", "{{x}}", "你", ","]), max_size=25),
        min_size=1,
        max_size=5,
    )
)
def test_common_text_is_in_every_prompt_in_order(prompts: list[list[str]]) -> None:
    texts = [" ".join(words) for words in prompts]
    builder = TemplateBuilder(split_pieces(texts[0]))
    for text in texts[1:]:
        builder.add(split_pieces(text))
    template = builder.template()
    fixed = [piece for piece, held in zip(builder._pieces, builder._fixed, strict=True) if held]
    for text in texts:
        words = iter(piece.text for piece in split_pieces(text))
        assert all(piece.text in words for piece in fixed)  # `in` consumes: this is the test for a subsequence
    assert template.fixed_chars <= sum(len(piece.text) for piece in fixed)


@settings(deadline=None, max_examples=200)
@given(st.text(max_size=80))
def test_pieces_are_the_whole_text(text: str) -> None:
    pieces = split_pieces(text)
    assert "".join(piece.text for piece in pieces) == text
    assert all(text.startswith(piece.text, piece.start) for piece in pieces)


def test_very_long_prompts_are_cut() -> None:
    assert len(split_pieces("word " * 50_000)) == 20_000
    assert [piece.text for piece in split_pieces("a b 09:14:25 c", max_pieces=4)] == ["a", " ", "b", " "]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("unit", ["a ", "a b ", "x", "09:14:25 "])
def test_repeated_text_takes_no_quadratic_time(unit: str) -> None:
    text = unit * 30_000
    common_template([text, text[1:], "b" + text])
