"""Volatile parts: each form is found with exactly its own text, real questions hold none, and hostile texts end soon."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitelib.yoco.volatile import KINDS, find_volatile, move_to_end

QUESTIONS = (Path(__file__).parents[2] / "data" / "banking77_extract.txt").read_text("utf-8").splitlines()

# «» marks what must be found, and nothing else may be.
FOUND = [
    ("timestamp", "It is «2026-11-30T09:14:25.123456Z» now."),
    ("timestamp", "[«2026-11-30 09:14:25,123»] INFO"),
    ("timestamp", "at «2026-11-30T09:14:25+02:00»,"),
    ("timestamp", "«20261130T091425Z»"),
    ("timestamp", "Date: «Mon, 30 Nov 2026 09:14:25 GMT»"),
    ("timestamp", "date: «Mon Nov 30 09:14:25 UTC 2026»"),
    ("timestamp", "on «November 30th, 2026 at 9:14 am», we"),
    ("timestamp", "«30/11/2026 09:14»"),
    ("timestamp", "今天是«2026年11月30日 星期一 14:05»。"),
    ("timestamp", "İstanbul, «2026-11-30 09:14»"),
    ("date", "Today is «Monday, 30 November 2026»."),
    ("date", "Today is «Monday, November 30»."),
    ("date", "as of «Nov 30, 2026»"),
    ("date", "Current date: «2026-11-30»"),
    ("date", "the «30th of November 2026»"),
    ("date", "Heute ist der «30.11.2026»"),
    ("date", "«2026/11/30» and «11-30-2026»"),
    ("date", "今天是«2026年11月30日»，请"),
    ("date", "当前日期：«2026 年 11 月 30 日»"),
    ("date", "«二〇二六年十一月三十日»"),
    ("date", "오늘은 «2026년 11월 30일»"),
    ("date", "Today's date is «Monday»"),
    ("date", "Current month: «November 2026»"),
    ("time", "Local time: «14:05»"),
    ("time", "log «09:14:25.120» start"),
    ("time", "at «14:05 UTC» we"),
    ("time", "现在是«下午3点»"),
    ("epoch", "ts=«1764494065»"),
    ("epoch", "ts «1764494065123», next"),
    ("epoch", "time «1764494065.25»"),
    ("uuid", "id «550e8400-e29b-41d4-a716-446655440000»."),
    ("uuid", "{«550E8400-E29B-41D4-A716-446655440000»}"),
    ("request id", '{"request_id": "«req_011CSHoEeqs5C35K2UUqR7Fy»"}'),
    ("request id", "Session-ID: «ab12cd34»"),
    ("request id", "X-Trace-Id=«4bf92f3577b34da6a3ce929d0e0e4736»"),
    ("request id", "Session: «9f31c0aa»\n"),
    ("request id", "see «chatcmpl-9aB3xY7z»"),
    ("random id", "key «dGhpcyBpcyBhIHNlY3JldA1x==»"),
    ("random id", "«01ARZ3NDEKTSV4RRFFQ69G5FAV»"),
    ("random id", "sha «d41d8cd98f00b204e9800998ecf8427e»"),
    ("nonce", "nonce: «a8f3»"),
    ("nonce", "cache-buster=«81723»"),
    ("counter", "This is request #«123» of today."),
    ("counter", "call number «5»"),
    ("counter", "Turn: «12»"),
    ("address", "from «203.0.113.7:443»"),
    ("address", "client «2001:db8::8a2e:370:7334» asks"),
    ("template", "Today is «{{ now() }}»."),
    ("template", "«{% if user %}»Hi"),
    ("template", "Hello «${USER_NAME}»"),
    ("template", "Today is «%s», time %%"),
    ("template", "«%(date)s»"),
    ("template", "Date: «{date}», «{current_time:%H:%M}»"),
]

NOTHING = [
    "",
    "The meeting is at 10:30 and the shop is open 11:00-14:00, 17:00-22:00.",
    "周一至周日 11:00-14:00 17:00-22:00",
    "Python 3.11.7, version 1.2.3.4, chapter 1.2.3, 127.0.0.1, 0.0.0.0",
    "Call 1-800-555-0199 or 13901234567, order 3348917502, zip 75227.",
    "The war ended in 1945, on 8 May 1945. In May 5 people came; the sun shines on Monday.",
    "I have 3 cards, 2 of 10 were sent, 50% off, 100%s",
    'A JSON object {"name": "x", "items": [1, 2]}, a set {a, b}, f"{name}" and {0}',
    "def sha256WithRSAEncryption(self): return CamelCaseNamesLongOnes(model-v2-2024)",
    "std::vector, dead::beef, a::b, thread-safe, message passing, call center, session musician",
    "https://example.org/a/very/long/path/of/many/parts/index.html?page=2",
    "I know as of yet nothing, nowadays monday",
    "request for 3 items; the message was clear; step #3; issue #12",
    "seedling: 7, basalt: 4",
]


@pytest.mark.parametrize(("kind", "marked"), FOUND, ids=lambda value: value[:40])
def test_a_form_is_found_with_its_own_text(kind: str, marked: str) -> None:
    text = marked.replace("«", "").replace("»", "")
    expected = [part.partition("»")[0] for part in marked.split("«")[1:]]
    found = find_volatile(text)
    assert [part.text for part in found] == expected
    assert {part.kind for part in found} == {kind}
    assert all(text[part.start : part.end] == part.text for part in found)


def test_every_kind_has_a_case() -> None:
    assert {kind for kind, _ in FOUND} == set(KINDS)


@pytest.mark.parametrize("text", NOTHING, ids=lambda value: value[:40])
def test_what_only_looks_like_it_is_left_alone(text: str) -> None:
    assert find_volatile(text) == []


def test_real_questions_hold_nothing_volatile() -> None:
    assert len(QUESTIONS) > 70
    assert [found for question in QUESTIONS if (found := find_volatile(question))] == []


def test_the_longest_of_overlapping_forms_wins() -> None:
    text = "request_id=550e8400-e29b-41d4-a716-446655440000 at 2026-11-30T09:14:25Z (1764494065)"
    assert [(part.kind, part.text) for part in find_volatile(text)] == [
        ("uuid", "550e8400-e29b-41d4-a716-446655440000"),
        ("timestamp", "2026-11-30T09:14:25Z"),
        ("epoch", "1764494065"),
    ]


def test_far_from_any_digit_forms_without_digits_are_found_too() -> None:
    text = "word " * 400 + "Today is Monday. {{ now() }} " + "word " * 400 + "2026-11-30"
    assert [part.text for part in find_volatile(text)] == ["Monday", "{{ now() }}", "2026-11-30"]


def test_moving_keeps_everything_and_puts_it_last() -> None:
    text = "Now: 2026-11-30 09:14. Session-ID: ab12cd34. Be brief."
    assert move_to_end(text, find_volatile(text)) == "Now: . Session-ID: . Be brief.\n2026-11-30 09:14 ab12cd34"
    assert move_to_end("Be brief.", []) == "Be brief."


HOSTILE_BITS = (
    ["2026-", "11-30", "T09:14:25", " ", "Mon", ", ", "30 Nov", "{{", "}}", "%s", "req_", "a1B2a1B2a1B2a1B2a1B2", "年"],
    ["11月", "3日", "İ", "1764494065", "::", "1.2", "\n", "session id: ", "x", "\ud800"],
)
REPEATED = (
    ["a", "0", "{", "{{ a", "mon ", "1:", "2026-11-", "request id ", " ", "ab1-", "1.", "may 1 ", "${", "aA1", "req_"],
    ["today ", "<%", "nonce=", "f:", "20", "年1月", "[0-9]", "session session:"],
)


@settings(deadline=None, max_examples=300)
@given(
    st.lists(
        st.sampled_from([*HOSTILE_BITS[0], *HOSTILE_BITS[1]])
        | st.text(max_size=3),
        max_size=30,
    )
)  # fmt: skip
def test_parts_lie_in_order_inside_the_text(pieces: list[str]) -> None:
    text = "".join(pieces)
    position = 0
    for part in find_volatile(text):
        assert position <= part.start < part.end <= len(text)
        assert text[part.start : part.end] == part.text
        position = part.end


@pytest.mark.parametrize(
    "unit",
    [*REPEATED[0], *REPEATED[1]],
)
@pytest.mark.timeout(30)
def test_hostile_texts_take_linear_time(unit: str) -> None:
    """They end within the limit on any machine; a quadratic pattern would take hours."""
    find_volatile(unit * (300_000 // len(unit)))
