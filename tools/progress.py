"""Runs a long command: its full output goes to a log file, one short status line to the terminal."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_COMPILE_STEP = re.compile(r"\[(\d+)/(\d+)\]")
_PIP_STEP = re.compile(r"^\s*(Collecting|Downloading|Building wheel for|Installing collected packages|Getting) ?(\S*)")
_HEARTBEAT_S = 20.0
_TAIL_LINES = 40


def say(text: str) -> None:
    """Prints a line at once, even into a pipe."""
    print(text, flush=True)


def run_logged(command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> int:
    """Runs `command` and returns its exit status; shows what it is at and, on failure, the end of its output.

    On a terminal the status line is redrawn in place; in a file or a CI log a line is added every 20 seconds.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    status = _Status()
    with (
        log.open("w", encoding="utf-8", errors="replace") as out,
        subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=dict(os.environ, **(env or {})),
        ) as process,
    ):
        try:
            for line in process.stdout or ():
                out.write(line)
                status.update(line)
            code = process.wait()
        finally:
            status.stop()
    if code != 0:
        say(f"  It failed with status {code}. The last lines of {log}:")
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]:
            say(f"  | {line}")
    return code


class _Status:
    """The status line: what was last seen, and how long it has been going on."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._text = "starting"
        self._terminal = sys.stdout.isatty()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def update(self, line: str) -> None:
        if step := _COMPILE_STEP.search(line):
            self._text = f"compile step {step[1]} of {step[2]}"
        elif step := _PIP_STEP.match(line):
            verb = {"Installing collected packages": "installing into the environment", "Getting": "preparing"}
            self._text = verb.get(step[1], f"{step[1].lower()} {step[2].rpartition('/')[2]}")

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()
        if self._terminal:
            print("\r\033[K", end="", flush=True)

    def _beat(self) -> None:
        while not self._stopped.wait(1.0 if self._terminal else _HEARTBEAT_S):
            minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
            text = f"  {minutes}:{seconds:02d}  {self._text}"
            if self._terminal:
                print(f"\r\033[K{text[:78]}", end="", flush=True)
            else:
                say(text)
