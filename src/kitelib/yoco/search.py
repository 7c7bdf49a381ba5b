"""Looking in the outer tiers for one prompt, without ever making its request slower than computing.

A request waits for the tiers only as long as `decision.patience` allows. What comes later comes while the request
computes: blocks are loaded from the end of the prompt towards the blocks being computed, and taken over where the two
meet (`Late`). Tiers that are slower than the model are left alone.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

import anyio

from kitelib.stores.pool import RUPool
from kitelib.stores.tiered import Span
from kitelib.stores.wanted import Wanted
from kitelib.upcycle.unit import RecyclableUnit
from kitelib.yoco.decision import Verdict, decide, load_costs
from kitelib.yoco.held import Found, HeldBytes

__all__ = ["Late", "Search"]

_FRONT_CHUNK: Final = 16
_BACK_CHUNK: Final = 8
_READS_AT_ONCE: Final = 2
_LOCATE_SHARE: Final = 1 / 8  # of the time that computing would take: as long may tiers think about what they have
_EXPLORE: Final = 1 / 16  # how often a tier that is too slow is measured again, by reading one block


class Late:
    """Blocks that arrive while their request already computes. Filled on the event loop, read by the model's thread.

    Attributes:
        frontier: first block that is not yet computed; written by the model's thread.
        closed: nobody needs more blocks.
        promising: whether something was found that is being loaded.
    """

    __slots__ = ("_deliver", "_last", "closed", "frontier", "promising")

    def __init__(self) -> None:
        self.frontier = 0
        self.closed = False
        self.promising = False
        self._deliver: Callable[[int, Sequence[tuple[RecyclableUnit, str]]], None] | None = None
        self._last: tuple[int, Sequence[tuple[RecyclableUnit, str]]] | None = None

    def bind(self, deliver: Callable[[int, Sequence[tuple[RecyclableUnit, str]]], None]) -> None:
        """Calls `deliver(first block, units with their tiers)` now, if something is there, and whenever more came."""
        if self.closed:
            return
        self._deliver, last = deliver, self._last
        if last is not None:
            deliver(*last)

    def close(self) -> None:
        """Nobody needs more blocks. Any thread."""
        self.closed = True
        self._deliver = self._last = None

    def put(self, first: int, units: Sequence[tuple[RecyclableUnit, str]]) -> None:
        """The consecutive units that are there so far, from block `first` on."""
        if self.closed:
            return
        self._last, deliver = (first, units), self._deliver
        if deliver is not None:
            deliver(first, units)


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
        held: counts what was read.
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
    held: HeldBytes
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
            self.late.close()

    async def run(self) -> None:
        """Looks. Never raises for what a tier did."""
        try:
            async with anyio.create_task_group() as group:
                async with anyio.create_task_group() as waited_for:
                    waited_for.start_soon(self.logits)
                    # A tier that is slow to say what it has must not keep what a faster one has from being used.
                    budget_s = max(self.patience_s / 2, _LOCATE_SHARE * self.compute_block_s * len(self.blocks))
                    spans = await self.pool.locate(self.blocks, budget_s)
                    waited_for.start_soon(self.tail, sum(span.count for span in spans))
                    verdict = self._verdict(spans)
                    group.start_soon(self._explore, verdict.skip)
                    rest = await self._wait_for(verdict)
                    if rest and not (self._left and self.late is None):
                        self.late = self.late or Late()
                        self.late.promising = True
                        group.start_soon(self._load_back, rest, self.late)
                self.settled.set()
        finally:
            self.settled.set()

    def _verdict(self, spans: Sequence[Span]) -> Verdict:
        costs = [load_costs(span, self.pool, self.block_bytes) for span in spans]
        left = 0.0 if self._left else self.patience_s - (time.monotonic() - self._begun)
        verdict = decide(spans, costs, self.compute_block_s, left)
        for span in verdict.skip:
            self.skipped[span.tier.name] = self.skipped.get(span.tier.name, 0) + span.count
        return verdict

    async def _wait_for(self, verdict: Verdict) -> list[Span]:
        """Reads what is worth waiting for; returns what is left to be loaded beside computing."""
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
        if spans and random.random() < _EXPLORE:  # noqa: S311 - no secret
            await self._read(_chunks(spans[0], 1)[0])

    async def _load_back(self, spans: Sequence[Span], late: Late) -> None:
        """Loads from the last block towards the one being computed, until both meet."""
        have: list[tuple[RecyclableUnit, str]] = []
        try:
            for chunk in (chunk for span in reversed(spans) for chunk in _from_the_back(span)):
                if late.closed or late.frontier - self.first >= chunk.first + chunk.count:
                    return
                units = await self._read(chunk)
                if len(units) < chunk.count:
                    return
                have = [*units, *have]
                late.put(self.first + chunk.first, have)
        finally:
            late.promising = False

    async def _read(self, span: Span) -> list[Found]:
        wanted = self.blocks[span.first : span.first + span.count]
        return await self.held.read(wanted, functools.partial(self.pool.read, span))


def _chunks(span: Span, count: int) -> list[Span]:
    """The span in pieces of at most `count` keys."""
    stop = span.first + span.count
    return [
        dataclasses.replace(span, first=first, count=min(count, stop - first))
        for first in range(span.first, stop, count)
    ]


def _from_the_back(span: Span) -> list[Span]:
    """The span in pieces, the last one first; each ends at the same distance from the span's end."""
    stops = range(span.first + span.count, span.first, -_BACK_CHUNK)
    firsts = [max(stop - _BACK_CHUNK, span.first) for stop in stops]
    return [
        dataclasses.replace(span, first=first, count=stop - first) for first, stop in zip(firsts, stops, strict=True)
    ]
