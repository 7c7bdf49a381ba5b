"""Jobs for the model's thread, from any other thread, and how long it waits for them."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Iterator

__all__ = ["Inbox"]

_COMPANION_WAIT_S = 0.003

Job = Callable[[], None]


class Inbox:
    """`put` is for any thread, `expecting` for the event loop, the rest for the model's thread."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._expected = 0

    def put(self, job: Job) -> None:
        """Has a job run between two steps."""
        self._jobs.put(job)

    @contextlib.contextmanager
    def expecting(self) -> Iterator[None]:
        """A request is being prepared and will be put inside the block.

        An idle scheduler that gets the first of several simultaneous requests waits a moment for the others, so that
        they share their first step instead of waiting for that of the first.
        """
        self._expected += 1
        try:
            yield
        finally:
            self._expected -= 1

    def run_jobs(self, wait_s: float | None = 0.0) -> None:
        """Runs what is there; waits up to `wait_s` seconds (None: without limit) for the first."""
        job = self._next(wait_s)
        while job is not None:
            job()
            job = self._next(0.0)

    @property
    def expects_more(self) -> bool:
        """Whether requests are being prepared."""
        return self._expected > 0

    def await_companions(self) -> None:
        """Runs the jobs of requests that are being prepared, as they come, for a moment."""
        deadline = time.monotonic() + _COMPANION_WAIT_S
        while self._expected and (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                self._jobs.get(timeout=left)()

    def _next(self, wait_s: float | None) -> Job | None:
        try:
            return self._jobs.get(block=wait_s != 0, timeout=wait_s or None)
        except queue.Empty:
            return None
