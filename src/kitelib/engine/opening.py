"""What `KiteEngine.open` gives: awaitable, and an async context manager."""

from __future__ import annotations

from collections.abc import Callable, Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kitelib.runtime.threads import ThreadDoor

if TYPE_CHECKING:
    from kitelib.engine.engine import KiteEngine

__all__ = ["Opening"]


class Opening:
    """Makes the engine and starts it when it is awaited or entered."""

    def __init__(self, make: Callable[[], KiteEngine]) -> None:
        self._make = make
        self._engine: KiteEngine | None = None

    async def _open(self) -> KiteEngine:
        # In a thread: how much the pool may hold is read from the system's files.
        engine = await ThreadDoor().run(self._make)
        await engine._start()
        return engine

    def __await__(self) -> Generator[Any, None, KiteEngine]:
        return self._open().__await__()

    async def __aenter__(self) -> KiteEngine:
        self._engine = await self._open()
        return self._engine

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._engine is not None
        await self._engine.aclose()
