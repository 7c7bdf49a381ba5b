"""Tables line up, and figures keep their meaning."""

from __future__ import annotations

import pytest

from kitelib.cli.table import format_factor, format_seconds, format_table, shorten


def test_columns_line_up():
    table = format_table(("#", "request", "tokens"), [("1", "Hi", "7"), ("12", "Hello there", "640")], left=(1,))
    assert table.splitlines() == [
        " #  request      tokens",
        "--  -----------  ------",
        " 1  Hi                7",
        "12  Hello there     640",
    ]


def test_a_row_with_other_cells_is_an_error():
    with pytest.raises(ValueError, match="1 cells, but the header has 2"):
        format_table(("a", "b"), [("1",)])


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0.0 ms"), (0.0042, "4.2 ms"), (0.083, "83 ms"), (0.5, "0.50 s"), (5.208, "5.21 s"), (12.44, "12.4 s")],
)
def test_seconds(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(("slow", "fast", "text"), [(5, 5, "1.0x"), (5, 0.5, "10x"), (5, 0.001, "5,000x"), (5, 0, "-")])
def test_factor(slow, fast, text):
    assert format_factor(slow, fast) == text


def test_shorten_cuts_between_words():
    assert shorten("What does a new card cost?", 20) == "What does a new..."
    assert shorten("Short", 20) == "Short"
