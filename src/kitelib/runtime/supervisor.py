"""Background tasks of one engine, in one task group that outlives the calls that start them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import anyio
import anyio.abc

__all__ = ["Supervisor"]

_LOG = logging.getLogger("kitelib.runtime")
_RESTART_DELAYS_S = (0.05, 0.5, 5.0)


class Supervisor:
    """Runs tasks until `aclose`. A task that fails is logged and never takes the others with it."""

    def __init__(self) -> None:
        self._stop = asyncio.Event()
        self._group: anyio.abc.TaskGroup | None = None
        self._main: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Opens the task group."""
        started = asyncio.Event()
        self._main = asyncio.create_task(self._run(started), name="kite-supervisor")
        await started.wait()

    async def _run(self, started: asyncio.Event) -> None:
        async with anyio.create_task_group() as group:
            self._group = group
            started.set()
            await self._stop.wait()
            group.cancel_scope.cancel()

    def spawn(self, name: str, job: Callable[[], Awaitable[None]]) -> None:
        """Runs a job once; after `aclose`, does nothing."""
        if self._group is not None and not self._stop.is_set():
            self._group.start_soon(self._guard, name, job, name=f"kite-{name}")

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
        self._stop.set()
        if self._main is not None:
            with anyio.CancelScope(shield=True):
                await self._main
