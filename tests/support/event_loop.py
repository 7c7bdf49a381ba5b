"""Pytest plugin: what the event loop is held up by."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from blockbuster import BlockBuster

__all__ = ["LoopGap", "MeasureLoopGap", "loop_gap", "no_blocking_calls", "quietest"]

_PACKAGE = Path(__file__).resolve().parents[2] / "src" / "kitelib"
_TICK_S = 0.001


@dataclasses.dataclass
class LoopGap:
    """Longest times between two turns of the event loop.

    Attributes:
        longest_s: seconds of wall clock that a ready task waited; includes what other processes take.
        longest_cpu_s: seconds that the loop's thread computed in one turn; a sleep or a wait does not count.
        turns: how often it was measured.
    """

    longest_s: float = 0.0
    longest_cpu_s: float = 0.0
    turns: int = 0


MeasureLoopGap = Callable[[], AbstractAsyncContextManager[LoopGap]]


@contextlib.asynccontextmanager
async def _measure() -> AsyncIterator[LoopGap]:
    """A garbage collection runs in the thread that allocates and takes as long as the heap is big: 0.3 s with all that a
    test session has imported. What was there before is therefore frozen, so that collections cover what the measured
    code makes."""
    gap = LoopGap()
    gc.collect()
    gc.freeze()

    async def tick() -> None:
        while True:
            wall, cpu = time.perf_counter(), time.thread_time()
            await asyncio.sleep(_TICK_S)
            gap.longest_s = max(gap.longest_s, time.perf_counter() - wall - _TICK_S)
            gap.longest_cpu_s = max(gap.longest_cpu_s, time.thread_time() - cpu)
            gap.turns += 1

    task = asyncio.create_task(tick())
    try:
        await asyncio.sleep(2 * _TICK_S)  # the first turn has begun before the body can hold the loop up
        yield gap
        await asyncio.sleep(2 * _TICK_S)  # ends the turn that the body was in
    finally:
        gc.unfreeze()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.fixture
def loop_gap() -> MeasureLoopGap:
    """``async with loop_gap() as gap: ...`` measures how long the loop was held up at most inside the block."""
    return _measure


async def quietest(measure: MeasureLoopGap, limit_s: float, run: Callable[[], Awaitable[object]]) -> LoopGap:
    """The gap of the quietest of up to three runs; no more of them than needed to stay below `limit_s` seconds of CPU.

    What a hypervisor takes from a virtual machine counts as time of the thread that had the core, so any turn may look
    long once. What the code under test does itself is in every run.
    """
    gaps: list[LoopGap] = []
    while len(gaps) < 3 and all(gap.longest_cpu_s >= limit_s for gap in gaps):
        async with measure() as gap:
            await run()
        gaps.append(gap)
    return min(gaps, key=lambda gap: gap.longest_cpu_s)


@pytest.fixture(autouse=True)
def no_blocking_calls() -> Iterator[BlockBuster]:
    """Fails every test in which kitelib makes a blocking call (file, socket, sleep) on the event loop.

    Locks are left out: holding one for microseconds is how threads hand over work, and `loop_gap` sees the rest.
    """
    blocking = BlockBuster()
    for name, function in list(blocking.functions.items()):
        function._scanned_modules = (str(_PACKAGE),)  # by path: importing kitelib here would hide missing imports
        if name.startswith("threading.Lock"):
            del blocking.functions[name]
    blocking.activate()
    yield blocking
    blocking.deactivate()
