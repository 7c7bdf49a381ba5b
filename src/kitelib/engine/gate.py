"""Lets calls in, counts them, and holds new ones back while the model is replaced."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import anyio

from kitelib.errors import DeadlineExceededError, EngineClosedError, EngineOverloadedError

__all__ = ["Gate"]


class Gate:
    """Used on the event loop only.

    Attributes:
        num_inside: calls inside.
    """

    def __init__(self, max_inside: int) -> None:
        self._max_inside = max_inside
        self._open = asyncio.Event()
        self._open.set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._closed = False
        self.num_inside = 0

    @asynccontextmanager
    async def enter(self, deadline: float | None = None) -> AsyncIterator[None]:
        """For the duration of one call, which waits at most `deadline` seconds to be let in.

        Raises:
            EngineClosedError, EngineOverloadedError, DeadlineExceededError
        """
        self._check_closed()
        with anyio.move_on_after(deadline) as waiting:
            await self._open.wait()
        if waiting.cancelled_caught:
            raise DeadlineExceededError(f"the request's deadline passed after {deadline:.2f} s, during a reload")
        self._check_closed()
        if self.num_inside >= self._max_inside:
            raise EngineOverloadedError(
                f"{self.num_inside} requests are open, the most this engine takes; retry later, "
                "or open it with a larger max_queue"
            )
        with self._count():
            yield

    @contextmanager
    def _count(self) -> Iterator[None]:
        self.num_inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self.num_inside -= 1
            if not self.num_inside:
                self._empty.set()

    @asynccontextmanager
    async def shut(self) -> AsyncIterator[None]:
        """Holds new calls back, waits until nobody is inside, and lets the held ones go on afterwards."""
        while not self._open.is_set():
            await self._open.wait()
        self._check_closed()
        self._open.clear()
        try:
            await self._empty.wait()
            yield
        finally:
            self._open.set()

    def close(self) -> None:
        """From now on nobody gets in; calls that wait fail."""
        self._closed = True
        self._open.set()

    def _check_closed(self) -> None:
        if self._closed:
            raise EngineClosedError()
