"""Background tasks of one engine, in one task group that outlives the calls that start them."""

from __future__ import annotations

import asyncio
import collections
import logging
from collections.abc import Awaitable, Callable

import anyio

__all__ = ["Supervisor"]

_LOG = logging.getLogger("kitelib.runtime")
_RESTART_DELAYS_S = (0.05, 0.5, 5.0)


class Supervisor:
    """Runs tasks until `aclose`. A task that fails is logged and never takes the others with it."""

    def __init__(self) -> None:
        self._jobs: collections.deque[tuple[str, Callable[[], Awaitable[None]]]] = collections.deque()
        self._wake = asyncio.Event()
        self._stopping = False
        self._main: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Opens the task group. Call it on the event loop."""
        self._main = asyncio.get_running_loop().create_task(self._run(), name="kite-supervisor")

    async def _run(self) -> None:
        async with anyio.create_task_group() as group:
            while not self._stopping:
                # Jobs come from callbacks as well, where no task runs; only a task may add to the group.
                while self._jobs:
                    name, job = self._jobs.popleft()
                    group.start_soon(self._guard, name, job, name=f"kite-{name}")
                    del job  # what it holds must not live until the next one comes
                self._wake.clear()
                await self._wake.wait()
            group.cancel_scope.cancel()

    def spawn(self, name: str, job: Callable[[], Awaitable[None]]) -> None:
        """Runs a job once; after `aclose`, does nothing. On the event loop, in a task or in a callback."""
        self._jobs.append((name, job))
        self._wake.set()

    def keep(self, name: str, job: Callable[[], Awaitable[None]]) -> None:
        """Runs a job for ever, restarting it with growing delays whenever it ends or fails."""

        async def forever() -> None:
            failures = 0
            while True:
                await self._guard(name, job)
                await anyio.sleep(_RESTART_DELAYS_S[min(failures, len(_RESTART_DELAYS_S) - 1)])
                failures += 1

        self.spawn(name, forever)

    async def _guard(self, name: str, job: Callable[[], Awaitable[None]]) -> None:
        try:
            await job()
        except Exception:  # noqa: BLE001 - whatever a task does, the others go on
            _LOG.exception("the background task %r failed", name)

    async def aclose(self) -> None:
        """Cancels all tasks and waits for them. Idempotent."""
        self._stopping = True
        self._wake.set()
        if self._main is not None:
            with anyio.CancelScope(shield=True):
                await self._main
