"""`kite chat`: the line after each turn, and a conversation through a pipe."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest

from kitelib.cli.chat import describe_turn

FIGURES = re.compile(r"\[(\d+) of (\d+) prompt tokens cached, TTFT [\d.]+ m?s(?:, [\d.]+ tokens/s)?\]")


def test_turn_line(finished):
    turn = finished(prompt=640, cached=600, completion=11, ttft_s=0.5, total_s=1.5)
    assert describe_turn(turn) == "600 of 640 prompt tokens cached, TTFT 0.50 s, 10.0 tokens/s"


def test_turn_line_says_what_came_from_an_earlier_run(finished):
    turn = finished(prompt=640, cached=600, completion=1, tiers={"context": 100, "disk": 500})
    assert describe_turn(turn) == "600 of 640 prompt tokens cached (500 from disk), TTFT 0.50 s"


def test_turn_line_has_no_speed_for_a_single_token(finished):
    assert describe_turn(finished(completion=1)) == "0 of 650 prompt tokens cached, TTFT 0.50 s"


def test_conversation_through_a_pipe(kite):
    done = kite(
        "chat", "smollm2", "--threads", "1", "--max-tokens", "6",
        stdin="Hello\n\nAnd you?\n/stats\n/reset\n/nonsense\nHello\n/quit\nnot read any more\n",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    turns = [(int(cached), int(prompt)) for cached, prompt in FIGURES.findall(done.stdout)]
    assert len(turns) == 3
    # The second turn builds on the first; the third, after /reset, repeats it.
    assert turns[1][0] > 0
    assert turns[1][1] > turns[0][1]
    assert turns[2] == (turns[0][1], turns[0][1])
    assert "running: 0" in done.stdout
    assert "/nonsense is not a command" in done.stdout
    assert "not read any more" not in done.stdout


def test_end_of_input_ends_the_chat(kite):
    done = kite("chat", "smollm2", "--threads", "1", stdin="")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_turn_that_fails_does_not_end_the_chat(kite):
    done = kite(
        "chat", "smollm2", "--threads", "1", "--ctx", "256", "--max-tokens", "4",
        stdin=f"{'word ' * 600}\nHello\n",
    )  # fmt: skip
    assert done.returncode == 0
    assert done.stderr.startswith("kite: the prompt has ")
    assert "/reset" in done.stderr
    assert len(FIGURES.findall(done.stdout)) == 1


class Keyboard:
    """`kite chat` on a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        self._end, child = pty.openpty()
        self._seen = b""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kitelib.cli.main", "chat", *arguments],
            stdin=child, stdout=child, stderr=child, start_new_session=True, env={**os.environ, "TERM": "xterm"},
        )  # fmt: skip
        os.close(child)

    def type(self, keys: str) -> None:
        os.write(self._end, keys.encode())

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def interrupt_until(self, text: str) -> None:
        """Interrupts until `text` shows: input() misses a signal that comes between its prompt and its wait for keys."""
        for _ in range(60):
            self.interrupt()
            with contextlib.suppress(AssertionError):
                self.wait_for(text, timeout_s=1)
                return
        pytest.fail(f"{text!r} never came: {self._seen!r}")

    def wait_for(self, text: str, timeout_s: float = 60) -> str:
        """What was shown up to and with `text`; later calls look behind it."""
        deadline = time.monotonic() + timeout_s
        while text.encode() not in self._seen:
            assert time.monotonic() < deadline, f"{text!r} never came: {self._seen!r}"
            if select.select([self._end], [], [], 0.5)[0]:
                self._seen += os.read(self._end, 65536)
        shown, found, self._seen = self._seen.partition(text.encode())
        return (shown + found).decode(errors="replace")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._end)


def test_control_c_stops_the_answer_and_not_the_program():
    chat = Keyboard("smollm2", "--threads", "1", "--max-tokens", "2000")
    try:
        chat.wait_for("> ")
        chat.type("Write a very long story about a lighthouse.\r")
        chat.wait_for("lighthouse.")
        chat.wait_for(" the ")
        chat.interrupt()
        chat.wait_for("[stopped]")
        chat.wait_for("> ")
        chat.interrupt_until("/quit")
        # The model's thread ends the request after the step it is in.
        for _ in range(600):
            chat.type("/stats\r")
            if "running: 0" in chat.wait_for("pool:"):
                break
            time.sleep(0.1)
        else:
            pytest.fail("the stopped answer is still being computed")
        chat.wait_for("> ")
        chat.type("\x04")
        assert chat.process.wait(timeout=30) == 0
    finally:
        chat.close()
