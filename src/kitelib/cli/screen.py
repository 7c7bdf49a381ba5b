"""What is drawn on the terminal while things run: loading progress, and several answers at the same time."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import IO, TYPE_CHECKING, Protocol

from kitelib.cli.table import shorten

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["AnswerBoard", "LoadProgress", "WrappedWriter", "answer_board", "dim", "is_terminal"]

_CLEAR_LINE = "\r\x1b[2K"


def is_terminal(stream: IO[str]) -> bool:
    """Whether a person is likely to look at `stream`, so that drawing on it makes sense."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def dim(text: str, stream: IO[str]) -> str:
    """`text` in a quieter colour where the terminal has one and NO_COLOR is not set."""
    if is_terminal(stream) and not os.environ.get("NO_COLOR"):
        return f"\x1b[2m{text}\x1b[0m"
    return text


class LoadProgress:
    """Progress of opening an engine: a line that changes in place on a terminal, else one line per stage."""

    def __init__(self, stream: IO[str], *, enabled: bool = True) -> None:
        self._stream = stream
        self._enabled = enabled
        self._in_place = is_terminal(stream)
        self._stage = ""

    def __call__(self, stage: str, fraction: float | None = None) -> None:
        """Shows `stage`, with its done part (0 to 1) where that is known."""
        if not self._enabled:
            return
        if self._in_place:
            percent = "" if fraction is None else f" {fraction:4.0%}"
            width = shutil.get_terminal_size().columns - 1
            self._stream.write(_CLEAR_LINE + dim(f"{stage}{percent}"[:width], self._stream))
        elif stage != self._stage:
            self._stream.write(f"  {stage} ...\n")
        self._stage = stage
        self._stream.flush()

    def clear(self) -> None:
        """Takes the changing line away."""
        if self._enabled and self._in_place:
            self._stream.write(_CLEAR_LINE)
            self._stream.flush()


def _text_width() -> int:
    """Columns to fill with running text: those of the terminal, within what is pleasant to read."""
    return max(40, min(110, shutil.get_terminal_size(fallback=(100, 24)).columns - 1))


class WrappedWriter:
    """Writes text as it arrives, broken between words and indented; a word is shown once it is complete."""

    def __init__(self, stream: IO[str], indent: str) -> None:
        self._stream = stream
        self._indent = indent
        self._column = 0
        self._word = ""

    def write(self, text: str) -> None:
        """Adds a piece of text; line breaks in it count as spaces."""
        for character in text:
            if character.isspace():
                self._put_word()
            else:
                self._word += character
        self._stream.flush()

    def close(self) -> None:
        """Writes the last word and ends the line."""
        self._put_word()
        self._stream.write("\n")
        self._stream.flush()

    def _put_word(self) -> None:
        if not self._word:
            return
        if self._column and self._column + 1 + len(self._word) <= _text_width():
            self._stream.write(" " + self._word)
            self._column += 1 + len(self._word)
        else:
            self._stream.write(("\n" if self._column else "") + self._indent + self._word)
            self._column = len(self._indent) + len(self._word)
        self._word = ""


class AnswerBoard(Protocol):
    """Shows answers that arrive at the same time."""

    def update(self, index: int, text: str) -> None:
        """The answer to question `index` is `text` so far."""
        ...

    def done(self, index: int, text: str) -> None:
        """The answer to question `index` is complete."""
        ...


@contextlib.contextmanager
def answer_board(labels: Sequence[str], questions: Sequence[str]) -> Iterator[AnswerBoard]:
    """A live panel on a terminal with `rich` installed, else plain text that shows each answer when it is complete.

    Args:
        labels: what stands in front of each question and answer, all of the same width.
        questions: one per label.
    """
    plain = _PlainBoard(labels, questions)
    if not is_terminal(sys.stdout):
        yield plain
        return
    try:
        from rich.live import Live
    except ImportError:
        yield plain
        return
    board = _LiveBoard(labels, questions)
    with Live(get_renderable=board.render, refresh_per_second=12, transient=True):
        yield board
    # The panel shows the ends of the answers only; what stays on the screen are the whole answers.
    for index, text in enumerate(board.texts):
        plain.done(index, text)


class _PlainBoard:
    def __init__(self, labels: Sequence[str], questions: Sequence[str]) -> None:
        self._labels = labels
        self._questions = questions

    def update(self, index: int, text: str) -> None:
        pass

    def done(self, index: int, text: str) -> None:
        print(f"{self._labels[index]} {self._questions[index]}")
        writer = WrappedWriter(sys.stdout, " " * (len(self._labels[index]) + 1))
        writer.write(text)
        writer.close()


class _LiveBoard:
    """One line per answer, redrawn in place, showing its newest words."""

    def __init__(self, labels: Sequence[str], questions: Sequence[str]) -> None:
        self._labels = labels
        self._questions = questions
        self._complete = [False] * len(labels)
        self.texts = [""] * len(labels)

    def update(self, index: int, text: str) -> None:
        self.texts[index] = text

    def done(self, index: int, text: str) -> None:
        self.texts[index] = text
        self._complete[index] = True

    def render(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        columns = shutil.get_terminal_size().columns
        question_width = max(16, min(38, columns // 3))
        answer_width = max(10, columns - question_width - max(map(len, self._labels)) - 6)
        table = Table.grid(padding=(0, 1))
        lines = zip(self._labels, self._questions, self.texts, self._complete, strict=True)
        for label, question, text, complete in lines:
            newest = " ".join(text.split())[-answer_width:]
            table.add_row(
                Text(label),
                Text(shorten(question, question_width), style="dim"),
                Text(newest, style="green" if complete else "", no_wrap=True),
            )
        return table
