"""Single flight: however many want a value at once, it is read once, and nobody's cancellation disturbs the others."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Final

__all__ = ["Flights"]

Values = dict[str, bytes | None]

_SLACK_S: Final = 0.05  # a read ends by itself in time; this only bounds what its own limit can't


@dataclasses.dataclass(slots=True, eq=False)
class _Batch:
    """One read under way. The task is its own, not that of any waiter."""

    keys: tuple[str, ...]
    task: asyncio.Task[Values]
    waiters: int = 0


class Flights:
    """Reads under way in one tier. Used on the event loop only.

    Args:
        read: reads distinct keys; never raises for what the store does.
    """

    def __init__(self, read: Callable[[Sequence[str], float], Coroutine[Any, Any, Values]]) -> None:
        self._read = read
        self._batches: dict[str, _Batch] = {}
        self._tasks: set[asyncio.Task[Values]] = set()

    def __len__(self) -> int:
        """Keys that are being read."""
        return len(self._batches)

    async def get(self, keys: Sequence[str], timeout_s: float) -> list[bytes | None]:
        """Values in the order of `keys`; reads only what no one else is reading.

        Keys that one caller asks for are one read, and whoever joins waits for all of it. A read whose last waiter is
        cancelled is cancelled as well.
        """
        wanted = dict.fromkeys(keys)
        missing = tuple(key for key in wanted if key not in self._batches)
        if missing:
            self._start(missing, timeout_s)
        batches = {self._batches[key] for key in wanted}
        for batch in batches:
            batch.waiters += 1
        sources = {key: self._batches[key] for key in wanted}
        try:
            # A read that others began may have more time than this caller; then what is missing is a miss.
            await asyncio.wait({batch.task for batch in batches}, timeout=timeout_s + _SLACK_S)
        finally:
            for batch in batches:
                batch.waiters -= 1
                if not batch.waiters and not batch.task.done():
                    self._forget(batch.keys, batch)
                    batch.task.cancel()
        return [_answer(sources[key], key) for key in keys]

    def _start(self, keys: tuple[str, ...], timeout_s: float) -> None:
        batch = _Batch(keys, asyncio.get_running_loop().create_task(self._read(keys, timeout_s)))
        self._batches.update(dict.fromkeys(keys, batch))
        self._tasks.add(batch.task)
        # Registered before any waiter, so it runs before they do.
        batch.task.add_done_callback(lambda task: self._ended(task, batch))

    def _ended(self, task: asyncio.Task[Values], batch: _Batch) -> None:
        self._tasks.discard(task)
        self._forget(batch.keys, batch)
        if not task.cancelled():
            task.exception()  # looked at; an answer of none is a miss

    def _forget(self, keys: Iterable[str], batch: _Batch) -> None:
        for key in keys:
            if self._batches.get(key) is batch:
                del self._batches[key]

    def detach(self, keys: Iterable[str]) -> None:
        """Who asks from now on reads anew: what is under way may be older than what just happened."""
        for key in keys:
            self._batches.pop(key, None)

    def detach_all(self) -> None:
        """`detach` for every key."""
        self._batches.clear()

    async def aclose(self) -> None:
        """Cancels all reads; their waiters miss."""
        self._batches.clear()
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def _answer(batch: _Batch, key: str) -> bytes | None:
    task = batch.task
    if not task.done() or task.cancelled() or task.exception() is not None:
        return None
    return task.result().get(key)
