"""What is drawn stays readable, on a terminal and in a pipe."""

from __future__ import annotations

import io

import pytest

from kitelib.cli.screen import LoadProgress, WrappedWriter, answer_board, dim


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_wrapped_text_is_indented_and_keeps_every_word(monkeypatch):
    monkeypatch.setenv("COLUMNS", "41")
    stream = io.StringIO()
    writer = WrappedWriter(stream, "    ")
    text = "Bring your identity card\nto any branch. " * 5
    for start in range(0, len(text), 3):
        writer.write(text[start : start + 3])
    writer.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) > 1
    assert all(line.startswith("    ") and len(line) <= 40 for line in lines)
    assert stream.getvalue().split() == text.split()


def test_a_word_is_shown_as_soon_as_it_is_complete():
    stream = io.StringIO()
    writer = WrappedWriter(stream, "")
    writer.write("Hello wor")
    assert stream.getvalue() == "Hello"
    writer.write("ld again")
    assert stream.getvalue() == "Hello world"


def test_colour_only_where_it_is_wanted(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert dim("text", io.StringIO()) == "text"
    assert dim("text", Terminal()) == "\x1b[2mtext\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert dim("text", Terminal()) == "text"


def test_progress_in_a_pipe_is_one_line_per_stage():
    stream = io.StringIO()
    progress = LoadProgress(stream)
    for stage, fraction in [("hashing", 0.0), ("hashing", 0.5), ("loading", 0.0), ("loading", 1.0)]:
        progress(stage, fraction)
    progress.clear()
    assert stream.getvalue() == "  hashing ...\n  loading ...\n"


def test_progress_on_a_terminal_leaves_nothing_behind(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    progress = LoadProgress(stream)
    progress("hashing", 0.5)
    progress.clear()
    assert " 50%" in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[2K")
    assert "\n" not in stream.getvalue()


def test_concurrent_answers_in_a_pipe_are_printed_whole_when_done(capsys):
    with answer_board(["#1", "#2"], ["First?", "Second?"]) as board:
        board.update(0, "one")
        board.update(1, "two")
        board.done(1, "two and more")
        assert capsys.readouterr().out == "#2 Second?\n   two and more\n"
        board.done(0, "one and more")
    assert capsys.readouterr().out == "#1 First?\n   one and more\n"


def test_concurrent_answers_on_a_terminal_stay_below_the_panel(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout", stream := Terminal())
    with answer_board(["#1", "#2"], ["First?", "Second?"]) as board:
        board.update(0, "the answer\nso far")
        board.done(1, "two")
        board.done(0, "the answer\nin full")
    end = stream.getvalue().rpartition("\x1b")[2]
    assert end.endswith("#1 First?\n   the answer in full\n#2 Second?\n   two\n")
