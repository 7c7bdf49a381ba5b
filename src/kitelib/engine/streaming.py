"""How a call waits for its request."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from typing import Any

from kitelib.engine.request import Request
from kitelib.engine.results import Chunk, Generation
from kitelib.engine.scheduler import Scheduler
from kitelib.errors import KiteError

__all__ = ["ChatStream", "Submitted"]


class Submitted:
    """A submitted request; leaving the block before its end cancels it."""

    def __init__(self, scheduler: Scheduler, request: Request) -> None:
        self._scheduler = scheduler
        self._request = request
        self.finished = False

    def __enter__(self) -> Submitted:
        return self

    def take(self, item: Chunk | Generation | KiteError) -> Chunk | Generation:
        """The next event; raises it if it is an error."""
        self.finished = not isinstance(item, Chunk)
        if isinstance(item, KiteError):
            raise item
        return item

    def __exit__(self, *_: object) -> None:
        if not self.finished:
            self._scheduler.cancel(self._request)


class ChatStream:
    """A stream that may also be awaited first, which gives itself."""

    def __init__(self, chunks: AsyncGenerator[Chunk, None]) -> None:
        self._chunks = chunks

    def __aiter__(self) -> AsyncGenerator[Chunk, None]:
        return self._chunks

    def __await__(self) -> Generator[Any, None, ChatStream]:
        async def itself() -> ChatStream:
            return self

        return itself().__await__()

    async def aclose(self) -> None:
        """Ends the request."""
        await self._chunks.aclose()
