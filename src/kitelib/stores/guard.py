"""Calling a store that may hang, fail or lie: every call has a timeout, a breaker, and an answer that is checked.

A store call runs in a task of its own. When its time is over, the task is cancelled and left behind, so that a store
that ignores cancellation holds up nobody; only so many tasks may be left behind before the store is not called at all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from kitelib.abc import SharedStore, Store, StoredItem, StoreStats
from kitelib.errors import StoreError
from kitelib.stores.breaker import Breaker

__all__ = ["GuardedStore", "StoreGuard"]

T = TypeVar("T")

_LOG = logging.getLogger("kitelib.pool")
_MAX_ABANDONED: Final = 32
_CLOSE_S: Final = 2.0
_GRACE_S: Final = 0.5  # what cancelled calls get to end when the store is closed


class StoreGuard:
    """Makes the calls of one store. Used on the event loop only.

    Attributes:
        breaker: stops calls while the store keeps failing.
        timeout_s: seconds that a call may take unless it says otherwise.
        errors: calls that failed, those that timed out included.
        timeouts: calls that timed out.
    """

    def __init__(self, name: str, breaker: Breaker, timeout_s: float) -> None:
        self.breaker = breaker
        self.timeout_s = timeout_s
        self.errors = 0
        self.timeouts = 0
        self._name = name
        self._reported = 0
        self._why = "nobody knows"
        self._abandoned: set[asyncio.Task[Any]] = set()

    @property
    def num_abandoned(self) -> int:
        """Calls that were cancelled and have not ended yet."""
        return len(self._abandoned)

    async def call(
        self,
        operation: str,
        make: Callable[[], Awaitable[T]],
        good: Callable[[T], bool],
        timeout_s: float | None = None,
    ) -> T:
        """The store's answer.

        Args:
            operation: what is called, for messages.
            make: starts the call.
            good: whether an answer can be one; whatever else comes counts as a failure.
            timeout_s: seconds that this call may take.

        Raises:
            StoreError: there is no good answer: it failed, was late, or the breaker lets no call pass.
        """
        if not self.breaker.allows():
            raise StoreError(
                f"{operation} of {self._name} is not tried: it failed too often a moment ago, at last because {self._why}"
            )
        if len(self._abandoned) >= _MAX_ABANDONED:
            raise StoreError(f"{operation} of {self._name} is not tried: {len(self._abandoned)} calls still hang")
        try:
            with self.breaker.watch():
                return await self._bounded(operation, make, good, self.timeout_s if timeout_s is None else timeout_s)
        except TimeoutError as error:
            self.timeouts += 1
            raise self._failure(operation, error) from error
        except Exception as error:
            raise self._failure(operation, error) from error

    def _failure(self, operation: str, error: Exception) -> StoreError:
        self.errors += 1
        _LOG.debug("%s of %s failed: %r", operation, self._name, error)
        failure = (
            error if isinstance(error, StoreError) else StoreError(f"{operation} of {self._name} failed: {error!r}")
        )
        self._why = str(failure)
        if self.breaker.opened > self._reported:
            self._reported = self.breaker.opened
            _LOG.warning("%s failed several times in a row and is left alone for a while: %s", self._name, failure)
        return failure

    async def _bounded(
        self, operation: str, make: Callable[[], Awaitable[T]], good: Callable[[T], bool], timeout_s: float
    ) -> T:
        task = asyncio.get_running_loop().create_task(_as_coroutine(make))
        try:
            await asyncio.wait({task}, timeout=timeout_s)
            if not task.done():
                raise TimeoutError(f"no answer within {timeout_s:g} s")
            if task.cancelled():
                raise StoreError(f"{operation} of {self._name} cancelled itself")
            answer = task.result()
        finally:
            if not task.done():
                self.abandon(task)
        if not good(answer):
            raise StoreError(f"{operation} of {self._name} gave an answer that can't be one: {type(answer).__name__}")
        return answer

    def abandon(self, task: asyncio.Task[Any]) -> None:
        """Cancels a call and leaves it behind, watched until it ends."""
        task.cancel()
        self._abandoned.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._abandoned.discard(task)
        if not task.cancelled():
            task.exception()  # looked at, so that asyncio does not complain: nobody waits for it any more

    async def settle(self) -> None:
        """Cancels calls that were left behind once more and gives them a moment to end."""
        for task in self._abandoned:
            task.cancel()
        if self._abandoned:
            await asyncio.wait(set(self._abandoned), timeout=_GRACE_S)

    async def close(self, store: Store) -> None:
        """Closes the store, whatever the breaker says, and settles."""
        closing = asyncio.get_running_loop().create_task(_as_coroutine(store.aclose))
        await asyncio.wait({closing}, timeout=_CLOSE_S)
        if not closing.done():
            _LOG.warning("closing %s takes more than %g s; left behind", self._name, _CLOSE_S)
            self.abandon(closing)
        elif not closing.cancelled() and closing.exception() is not None:
            _LOG.warning("closing %s failed: %r", self._name, closing.exception())
        await self.settle()


class GuardedStore:
    """A `SharedStore` whose every call is made by a `StoreGuard`: it ends in time, and raises nothing but StoreError.

    Args:
        store: the store. If it is a plain `Store`, only the methods of that contract may be called.
        guard: makes the calls.
        timeout_s: seconds that a call may take.
    """

    def __init__(self, store: Store, guard: StoreGuard, timeout_s: float) -> None:
        self._store: Any = store
        self._guard = guard
        self._timeout_s = timeout_s

    async def _call(self, operation: str, good: Callable[[Any], bool], *arguments: Any) -> Any:
        method = getattr(self._store, operation)
        return await self._guard.call(operation, lambda: method(*arguments), good, self._timeout_s)

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        answer: list[bytes | None] = await self._call("get_many", lambda found: _are_values(found, len(keys)), keys)
        return answer

    async def put_many(self, items: Sequence[tuple[str, bytes]]) -> None:
        await self._call("put_many", lambda _: True, items)

    async def leading_run(self, keys: Sequence[str]) -> int:
        return int(await self._call("leading_run", lambda count: _is_count(count, len(keys)), keys))

    async def delete_many(self, keys: Sequence[str]) -> int:
        return int(await self._call("delete_many", lambda count: _is_count(count, len(keys)), keys))

    async def stats(self) -> StoreStats:
        answer: StoreStats = await self._call("stats", lambda stats: isinstance(stats, StoreStats))
        return answer

    async def aclose(self) -> None:
        await self._call("aclose", lambda _: True)

    async def warm(self) -> None:
        await self._call("warm", lambda _: True)

    async def get_heads(self, keys: Sequence[str], num_bytes: int) -> list[bytes | None]:
        answer: list[bytes | None] = await self._call(
            "get_heads", lambda found: _are_values(found, len(keys), num_bytes), keys, num_bytes
        )
        return answer

    async def get_epoch(self, name: str) -> int:
        return int(await self._call("get_epoch", _is_epoch, name))

    async def raise_epoch(self, name: str, epoch: int) -> int:
        return int(await self._call("raise_epoch", _is_epoch, name, epoch))

    async def add_hits(self, model: str, day: int, hits: Mapping[str, int], roots: Mapping[str, str]) -> None:
        await self._call("add_hits", lambda _: True, model, day, hits, roots)

    async def read_hits(self, model: str, days: Sequence[int], limit: int) -> tuple[dict[str, int], dict[str, str]]:
        answer: tuple[dict[str, int], dict[str, str]] = await self._call(
            "read_hits", lambda found: _are_hits(found, limit), model, days, limit
        )
        return answer

    async def hit_models(self) -> list[str]:
        answer: list[str] = await self._call("hit_models", lambda names: isinstance(names, list))
        return answer

    async def sweep(self) -> int:
        """Removes what is expired, where the store can; returns how much."""
        if not hasattr(self._store, "sweep"):
            return 0
        return int(await self._call("sweep", lambda count: _is_count(count, None)))

    async def list_items(self) -> AsyncGenerator[list[StoredItem], None]:
        """Each page may take as long as a call."""
        pages: asyncio.Queue[list[StoredItem] | Exception | None] = asyncio.Queue(1)
        task = asyncio.get_running_loop().create_task(_pump(self._store, pages))
        try:
            while True:
                page = await self._guard.call("list_items", lambda: _next_page(pages), _is_page, self._timeout_s)
                if page is None:
                    return
                yield page
        finally:
            if not task.done():
                self._guard.abandon(task)


async def _pump(store: SharedStore, pages: asyncio.Queue[list[StoredItem] | Exception | None]) -> None:
    """One task from the first page to the last: a generator may hold what belongs to the task it runs in."""
    iterator = store.list_items()
    try:
        async for page in iterator:
            await pages.put(page)
        await pages.put(None)
    except Exception as error:  # noqa: BLE001 - raised where the pages are taken
        await pages.put(error)
    finally:
        if isinstance(iterator, AsyncGenerator):
            await iterator.aclose()


async def _next_page(pages: asyncio.Queue[list[StoredItem] | Exception | None]) -> list[StoredItem] | None:
    page = await pages.get()
    if isinstance(page, Exception):
        raise page
    return page


async def _as_coroutine(make: Callable[[], Awaitable[T]]) -> T:
    return await make()


def _are_values(found: Any, count: int, most_bytes: int | None = None) -> bool:
    return (
        isinstance(found, list)
        and len(found) == count
        and all(value is None or type(value) is bytes for value in found)
        and (most_bytes is None or all(value is None or len(value) <= most_bytes for value in found))
    )


def _are_hits(found: Any, most: int) -> bool:
    return (
        isinstance(found, tuple)
        and len(found) == 2
        and all(isinstance(each, dict) for each in found)
        and len(found[0]) <= most
        and all(type(member) is str and type(count) is int for member, count in found[0].items())
    )


def _is_count(count: Any, most: int | None) -> bool:
    return type(count) is int and count >= 0 and (most is None or count <= most)


def _is_epoch(epoch: Any) -> bool:
    return type(epoch) is int and 0 <= epoch < 2**63


def _is_page(page: Any) -> bool:
    return page is None or (isinstance(page, list) and all(isinstance(item, StoredItem) for item in page))
