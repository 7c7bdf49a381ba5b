"""The door from the event loop to threads: `ThreadDoor` for short jobs, `ModelThread` for the model's own thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import anyio
import anyio.to_thread

__all__ = ["ModelThread", "ThreadDoor", "in_own_thread", "to_the_end"]

T = TypeVar("T")


_EXIT_WAIT_S = 10.0


class ThreadDoor:
    """Runs short blocking jobs (tokenizing, hashing, checking and copying units) off the event loop.

    At most `max_threads` run at once. A cancelled caller waits for its job, so that no job outlives its data.
    """

    def __init__(self, max_threads: int = 4) -> None:
        self._max_threads = max_threads
        self._limiters: tuple[anyio.CapacityLimiter, anyio.CapacityLimiter] | None = None

    async def run(self, job: Callable[[], T], *, discard: Callable[[T], object] | None = None) -> T:
        """The job's result; its exception is raised here. `discard` takes a result that a cancelled caller left."""
        if self._limiters is None:  # a limiter belongs to an event loop, which exists only now
            self._limiters = (anyio.CapacityLimiter(self._max_threads), anyio.CapacityLimiter(self._max_threads))
        queue, inner = self._limiters
        async with queue:  # cancelled here, the job never begins
            return await _whole(anyio.to_thread.run_sync(job, limiter=inner), discard)


class ModelThread:
    """One dedicated thread that runs `main` until it returns: `join` it. A daemon, because the interpreter waits for the
    others before it calls what is registered with `atexit`, which is where a forgotten one is ended (`join_at_exit`)."""

    def __init__(self, name: str, main: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=main, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    async def join(self) -> None:
        """Waits for the thread to end, without blocking the loop, even if the caller is cancelled."""
        await to_the_end(self._thread.join)

    def join_at_exit(self) -> None:
        """Waits for the thread, blocking, but not for long: a step may hang."""
        self._thread.join(_EXIT_WAIT_S)


def in_own_thread(name: str, job: Callable[[], T]) -> T:
    """Runs a job in a new thread and waits for it: what the job leaves behind per thread ends with it. Blocks.

    The job's exception is raised here.
    """
    done: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            done.set_result(job())
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            done.set_exception(error)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    try:
        return done.result()
    finally:
        thread.join()


async def to_the_end(job: Callable[[], T]) -> T:
    """Runs a blocking job in a thread of its own, to its end even if the caller is cancelled."""
    return await _whole(anyio.to_thread.run_sync(job))


async def _whole(call: Coroutine[Any, Any, T], discard: Callable[[T], object] | None = None) -> T:
    """Awaits a call to its end. A cancellation takes effect afterwards: anyio's, and `asyncio.Task.cancel`, which no
    shield of anyio keeps out."""
    task = asyncio.get_running_loop().create_task(call)
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as error:
                cancelled = error
    if cancelled is None:
        return task.result()
    if not task.cancelled() and task.exception() is None and discard is not None:
        discard(task.result())
    raise cancelled
