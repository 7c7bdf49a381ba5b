"""The door from the event loop to threads: `ThreadDoor` for short jobs, `ModelThread` for the model's own thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread

__all__ = ["ModelThread", "ThreadDoor"]

T = TypeVar("T")


class ThreadDoor:
    """Runs short blocking jobs (tokenizing, hashing, checking and copying units) off the event loop.

    At most `max_threads` run at once. A cancelled caller waits for its job, so that no job outlives its data.
    """

    def __init__(self, max_threads: int = 4) -> None:
        self._max_threads = max_threads
        self._limiter: anyio.CapacityLimiter | None = None

    async def run(self, job: Callable[[], T]) -> T:
        """The job's result; its exception is raised here."""
        if self._limiter is None:  # a limiter belongs to an event loop, which exists only now
            self._limiter = anyio.CapacityLimiter(self._max_threads)
        return await anyio.to_thread.run_sync(job, limiter=self._limiter)


class ModelThread:
    """One dedicated thread that runs `main` until it returns. Not a daemon: `join` it."""

    def __init__(self, name: str, main: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=main, name=name)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    async def join(self) -> None:
        """Waits for the thread to end, without blocking the loop, even if the caller is cancelled."""
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._thread.join)
