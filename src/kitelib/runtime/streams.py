"""From the model's thread to the event loop: batched, in order, without locks on the loop."""

from __future__ import annotations

import asyncio
import collections
import logging
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["LoopPort", "Mailbox"]

T = TypeVar("T")

_LOG = logging.getLogger("kitelib.runtime")


class Mailbox(Generic[T]):
    """Events for one waiting task. Used on the event loop only."""

    __slots__ = ("_event", "_items")

    def __init__(self) -> None:
        self._items: collections.deque[T] = collections.deque()
        self._event = asyncio.Event()

    def put(self, item: T) -> None:
        """Adds an item and wakes the reader."""
        self._items.append(item)
        self._event.set()

    async def get(self) -> T:
        """The next item. Cancelling loses nothing."""
        while not self._items:
            self._event.clear()
            await self._event.wait()
        return self._items.popleft()


class LoopPort:
    """Collects calls in another thread and makes them on the loop, one wake-up for all of them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: list[Callable[[], None]] = []

    def add(self, call: Callable[[], None]) -> None:
        """Queues a call; `flush` sends it. Only the owning thread may call this."""
        self._calls.append(call)

    def flush(self) -> None:
        """Makes the queued calls on the loop, in order. A closed loop drops them: nobody is waiting any more."""
        if not self._calls:
            return
        calls, self._calls = self._calls, []
        try:
            self._loop.call_soon_threadsafe(_run_all, calls)
        except RuntimeError:
            if not self._loop.is_closed():
                raise


def _run_all(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        try:
            call()
        except Exception:  # noqa: BLE001 - a call that fails must not take the deliveries after it along
            _LOG.exception("a call from the model's thread failed")
