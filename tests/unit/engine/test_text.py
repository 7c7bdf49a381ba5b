from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kitelib.engine.text import TextStream


def whole_text_answer(text: str, stops: list[str]) -> tuple[str, bool]:
    """Cuts at the stop string that is complete first, at the longest of those complete at the same character."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges)]


# Few letters make overlapping stop strings common; the rest has characters of one to four bytes.
letters = st.text("ab", max_size=30) | st.text("ab你é😀\n", max_size=40) | st.text(max_size=30)
texts = letters.map(lambda text: text.encode("utf-8", "ignore").decode())  # no lone surrogates
stop_lists = st.lists(st.text("ab", min_size=1, max_size=5) | st.text("ab你é😀\n", min_size=1, max_size=4), max_size=4)


@settings(max_examples=1500, deadline=None)
@given(texts, stop_lists, st.lists(st.integers(0, 200), max_size=60))
@example("abcd", ["abcd", "bc"], [1, 2, 3])
@example("aabaabaaab", ["aabaaa"], list(range(10)))
def test_any_split_gives_the_whole_text_answer(text: str, stops: list[str], cuts: list[int]) -> None:
    stream = TextStream(stops)
    shown = ""
    expected, stopped = whole_text_answer(text, stops)
    consumed = b""
    for piece in pieces(text.encode(), cuts):
        consumed += piece
        shown += stream.push(piece)
        assert stream.text == shown
        assert expected.startswith(shown)
        if not stream.stopped:  # nothing is held back for longer than it may still become a stop string
            known = consumed.decode(errors="ignore")
            held = known[len(shown) :]
            assert known == shown + held
            assert not held or any(stop.startswith(held) and stop != held for stop in stops)
    assert stream.stopped == stopped
    shown += stream.finish()
    assert shown == stream.text == expected
    assert stream.finish() == ""


@settings(max_examples=1000, deadline=None)
@given(
    st.lists(st.binary(max_size=6) | st.sampled_from([b"\xe4\xbd\xa0", b"\xf0\x9f\x98\x80", b"\xed\xa0\x80", b"a"])),
    st.lists(st.integers(0, 200), max_size=40),
)
def test_invalid_bytes_are_replaced_as_in_the_whole_text(parts: list[bytes], cuts: list[int]) -> None:
    data = b"".join(parts)
    stream = TextStream()
    shown = "".join(map(stream.push, pieces(data, cuts))) + stream.finish()
    whole = data.decode(errors="replace")
    # The whole text may end in replacements for the bytes, at most three, of an unfinished character.
    assert whole.startswith(shown)
    assert whole[len(shown) :] in ("", "\ufffd", "\ufffd" * 2, "\ufffd" * 3)


def test_half_a_character_is_never_shown() -> None:
    stream = TextStream()
    shown = [stream.push(bytes([byte])) for byte in "é你😀".encode()]
    assert shown == ["", "é", "", "", "你", "", "", "", "😀"]


def test_an_unfinished_character_is_dropped_at_the_end() -> None:
    stream = TextStream()
    assert stream.push("好你".encode()[:-1]) == "好"
    assert stream.finish() == ""
    assert stream.text == "好"


def test_truly_invalid_bytes_become_replacement_characters() -> None:
    stream = TextStream()
    assert [stream.push(b"a\xff"), stream.push(b"\xe4"), stream.push(b"b")] == ["a\ufffd", "", "\ufffdb"]


def test_stop_string_across_tokens_is_held_back_and_cut() -> None:
    stream = TextStream(["\nUser:", "</s>"])
    assert [stream.push(piece) for piece in (b"Hi", b" there\n", b"Us", b"age", b"\n", b"User", b": x")] == [
        "Hi",
        " there",
        "",
        "\nUsage",
        "",
        "",
        "",
    ]
    assert stream.stopped
    assert stream.push(b"more") == stream.finish() == ""
    assert stream.text == "Hi there\nUsage"


def test_what_was_held_back_comes_out_at_the_end() -> None:
    stream = TextStream(["END"])
    assert stream.push(b"the EN") == "the "
    assert not stream.stopped
    assert stream.finish() == "EN"
    assert stream.text == "the EN"


def test_stop_string_inside_one_token_keeps_the_text_before() -> None:
    stream = TextStream(["。"])
    assert stream.push("你好。再见".encode()) == "你好"
    assert stream.stopped


@pytest.mark.parametrize("cuts", [[], [1, 2, 3]])
def test_the_first_complete_stop_string_wins_then_the_longest(cuts: list[int]) -> None:
    for stops, text, expected in (
        (["abcd", "bc"], "xabcd", "xa"),
        (["c", "bc", "abc"], "xabcd", "x"),
        (["ab", "b"], "xab", "x"),
    ):
        stream = TextStream(stops)
        for piece in pieces(text.encode(), cuts):
            stream.push(piece)
        stream.finish()
        assert (stream.text, stream.stopped) == (expected, True)


def test_a_long_stream_keeps_only_what_it_has_to() -> None:
    stream = TextStream(["aaaaaaab"])
    for _ in range(20000):
        stream.push(b"a")
    # Seven of them may still become the stop string; everything else is out.
    assert len(stream.text) == 20000 - 7
    assert stream.finish() == "a" * 7
