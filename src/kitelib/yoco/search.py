"""Looking in the outer tiers for one prompt, without ever making its request slower than computing.

A request waits for the tiers only as long as `decision.patience` allows. What comes later comes while the request
computes: blocks are loaded from the end of the prompt towards the blocks being computed, and taken over where the two
meet (`Late`). Tiers that are slower than the model are left alone.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

import anyio

from kitelib.stores.pool import RUPool, Wanted
from kitelib.stores.tiered import Span
from kitelib.upcycle.unit import RecyclableUnit
from kitelib.yoco.decision import decide, load_costs

__all__ = ["Late", "Search"]

_FRONT_CHUNK: Final = 16
_BACK_CHUNK: Final = 8
_READS_AT_ONCE: Final = 2
_EXPLORE: Final = 1 / 16  # how often a tier that is too slow is measured again, by reading one block


class Late:
    """Blocks that arrive while their request already computes. Filled on the event loop, read by the model's thread.

    Attributes:
        frontier: first block that is not yet computed; written by the model's thread.
        closed: nobody needs more blocks; written by the model's thread.
        pending: whether more may come.
        promising: whether something was found that is being loaded.
    """

    __slots__ = ("_deliver", "_last", "closed", "frontier", "pending", "promising")

    def __init__(self) -> None:
        self.frontier = 0
        self.closed = False
        self.pending = True
        self.promising = False
        self._deliver: Callable[[int, Sequence[tuple[RecyclableUnit, str]]], None] | None = None
        self._last: tuple[int, Sequence[tuple[RecyclableUnit, str]]] | None = None

    def bind(self, deliver: Callable[[int, Sequence[tuple[RecyclableUnit, str]]], None]) -> None:
        """Calls `deliver(first block, units with their tiers)` now, if something is there, and whenever more came."""
        self._deliver = deliver
        if self._last is not None:
            deliver(*self._last)

    def put(self, first: int, units: Sequence[tuple[RecyclableUnit, str]]) -> None:
        """The consecutive units that are there so far, from block `first` on."""
        self._last = first, units
        if self._deliver is not None:
            self._deliver(first, units)


@dataclasses.dataclass(slots=True)
class _Read:
    """A part of a span, and what of it was read."""

    chunk: Span
    units: list[tuple[RecyclableUnit, str]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class Search:
    """One look into the outer tiers: `run` it as a task, wait for `settled` as long as it pays, then call `leave`.

    Attributes:
        pool: where to look.
        blocks: the full blocks that are missing, in order.
        first: block index of the first of them.
        block_bytes: bytes of a block.
        compute_block_s: seconds to compute one block.
        patience_s: seconds that the request waits at most.
        logits: looks for the logits; runs beside everything else.
        tail: looks for what follows the blocks that were found, given how many those are.
        front: the blocks that were waited for, with their tiers; consecutive from `first` on.
        skipped: tier -> blocks that are there but slower to load than to compute.
        settled: set when waiting longer is of no use.
        late: what comes after that.
    """

    pool: RUPool
    blocks: Sequence[Wanted]
    first: int
    block_bytes: int
    compute_block_s: float
    patience_s: float
    logits: Callable[[], Coroutine[Any, Any, None]]
    tail: Callable[[int], Coroutine[Any, Any, None]]
    front: list[tuple[RecyclableUnit, str]] = dataclasses.field(default_factory=list)
    skipped: dict[str, int] = dataclasses.field(default_factory=dict)
    settled: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    late: Late | None = None
    _reads: list[_Read] = dataclasses.field(default_factory=list)
    _left: bool = False
    _begun: float = dataclasses.field(default_factory=time.monotonic)

    def leave(self) -> Late | None:
        """The request goes on now; what `run` finds from here on comes through the result, if it still looks."""
        self._left = True
        for read in self._reads:
            self.front += read.units
            if len(read.units) < read.chunk.count:
                break
        if self.late is None and not self.settled.is_set():
            self.late = Late()
        if self.late is not None:
            self.late.frontier = self.first + len(self.front)
        return self.late

    def abandon(self) -> None:
        """The request is gone."""
        self._left = True
        if self.late is not None:
            self.late.closed = True

    async def run(self) -> None:
        """Looks. Never raises for what a tier did."""
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self.logits)
                spans = await self.pool.locate(self.blocks)
                group.start_soon(self.tail, sum(span.count for span in spans))
                rest = await self._wait_for(spans)
            if not rest or (self._left and self.late is None):
                return
            if self.late is None:
                self.late = Late()
            self.late.promising = True
            self.settled.set()
            await self._load_back(rest, self.late)
        finally:
            if self.late is not None:
                self.late.pending = self.late.promising = False
            self.settled.set()

    async def _wait_for(self, spans: Sequence[Span]) -> list[Span]:
        """Reads what is worth waiting for; returns what is left to be loaded beside computing."""
        costs = [load_costs(span, self.pool, self.block_bytes) for span in spans]
        left = 0.0 if self._left else self.patience_s - (time.monotonic() - self._begun)
        verdict = decide(spans, costs, self.compute_block_s, left)
        for span in verdict.skip:
            self.skipped[span.tier.name] = self.skipped.get(span.tier.name, 0) + span.count
        await self._explore(verdict.skip)
        self._reads = [_Read(chunk) for span in verdict.wait for chunk in _chunks(span, _FRONT_CHUNK)]
        limiter = anyio.CapacityLimiter(_READS_AT_ONCE)  # one is checked while the next one is read
        async with anyio.create_task_group() as group:
            for read in self._reads:
                group.start_soon(self._read_front, read, limiter)
        if self._left:  # the request did not wait: what is missing is loaded from the back
            return [*verdict.wait, *verdict.overlap]
        if any(len(read.units) < read.chunk.count for read in self._reads):
            return []  # something was gone, and what follows it would not fit
        return list(verdict.overlap)

    async def _read_front(self, read: _Read, limiter: anyio.CapacityLimiter) -> None:
        async with limiter:
            if not self._left:
                read.units = await self._read(read.chunk)

    async def _explore(self, spans: Sequence[Span]) -> None:
        """A tier that is never read would be thought slow for ever."""
        if spans and not self.front and random.random() < _EXPLORE:  # noqa: S311 - no secret
            await self._read(_chunks(spans[0], 1)[0])

    async def _load_back(self, spans: Sequence[Span], late: Late) -> None:
        """Loads from the last block towards the one being computed, until both meet."""
        have: list[tuple[RecyclableUnit, str]] = []
        for span in reversed(spans):
            before: Span | None = span
            while before is not None:
                computed = late.frontier - self.first
                if late.closed or computed >= before.first + before.count:
                    return
                before, chunk = _split_back(before, _BACK_CHUNK)
                units = await self._read(chunk)
                if len(units) < chunk.count:
                    return
                have = [*units, *have]
                late.put(self.first + chunk.first, have)

    async def _read(self, span: Span) -> list[tuple[RecyclableUnit, str]]:
        units = await self.pool.read(span, self.blocks[span.first : span.first + span.count])
        return [(unit, span.tier.name) for unit in units]


def _chunks(span: Span, count: int) -> list[Span]:
    """The span in pieces of at most `count` keys."""
    stop = span.first + span.count
    return [
        dataclasses.replace(span, first=first, count=min(count, stop - first))
        for first in range(span.first, stop, count)
    ]


def _split_back(span: Span, count: int) -> tuple[Span | None, Span]:
    if span.count <= count:
        return None, span
    keep = span.count - count
    return dataclasses.replace(span, count=keep), dataclasses.replace(span, first=span.first + keep, count=count)
