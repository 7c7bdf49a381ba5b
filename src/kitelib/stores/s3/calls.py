"""One call of the S3 store: many requests, some at once, with one deadline that moves while there is progress."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

import anyio

__all__ = ["Call"]

T = TypeVar("T")

_WORKERS: Final = 32
_MIN_BYTES_PER_S: Final = 2**20


class Call:
    """How a call is going.

    Args:
        name: of the method, for messages.
        patience_s: seconds without any success after which it ends.
        describe: turns the client's error into a safe sentence.

    Attributes:
        answered, failed: how many of its items did and did not get an answer.
        reason: why the first of those that failed did.
    """

    def __init__(self, name: str, patience_s: float, describe: Callable[[Exception], str]) -> None:
        self.name = name
        self.answered = 0
        self.failed = 0
        self.reason = ""
        self._scope = anyio.CancelScope()
        self._patience_s = patience_s
        self._describe = describe
        self._reserved = 0

    def reserve(self, num_bytes: int, limit: int) -> bool:
        """Counts bytes that are about to be received, before they are; False, and nothing, if they don't fit."""
        if self._reserved + num_bytes > limit:
            return False
        self._reserved += num_bytes
        self.allow(num_bytes)
        return True

    def allow(self, num_bytes: int) -> None:
        """Moves the deadline by what these bytes take at 1 MiB/s."""
        self._scope.deadline += num_bytes / _MIN_BYTES_PER_S

    async def run(
        self, items: Sequence[T], work: Callable[[T], Awaitable[None]], requests: anyio.CapacityLimiter
    ) -> None:
        """Does the work for every item, once per object; what fails is counted, nothing is raised but a cancellation.

        Args:
            requests: bounds how many are under way in all calls of the store.
        """
        waiting = iter(items)

        async def worker() -> None:
            for item in waiting:
                try:
                    async with requests:
                        await work(item)
                except Exception as error:  # noqa: BLE001 - whatever the client raises is a request that failed
                    self.failed += 1
                    self.reason = self.reason or self._describe(error)
                else:
                    self.answered += 1
                    self._scope.deadline = max(self._scope.deadline, anyio.current_time() + self._patience_s)

        self._scope.deadline = anyio.current_time() + self._patience_s
        with self._scope:
            if len(items) == 1:
                await worker()  # no tasks for the most common call
            else:
                async with anyio.create_task_group() as group:
                    for _ in range(min(len(items), _WORKERS)):
                        group.start_soon(worker)
        if self._scope.cancelled_caught:
            self.failed = len(items) - self.answered
            self.reason = self.reason or f"no answer for {self._patience_s:g} seconds"
