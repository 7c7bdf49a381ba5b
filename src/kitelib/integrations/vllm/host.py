"""The pool on an event loop in a thread of its own, one per engine and process.

vLLM's scheduler and workers run in threads that must not wait. They hand work over here and look later whether it is
done. Where both halves of the connector live in one process they share one host, and so one process memory.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import dataclasses
import functools
import logging
import math
import random
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

import anyio
import numpy as np
import numpy.typing as npt

from kitelib.config import PoolConfig
from kitelib.integrations.vllm.metrics import Counters
from kitelib.runtime.limits import default_pool_bytes
from kitelib.runtime.supervisor import Supervisor
from kitelib.runtime.threads import ThreadDoor
from kitelib.stores.pool import RUPool
from kitelib.stores.tiered import Span
from kitelib.stores.wanted import Wanted
from kitelib.upcycle.recycler import Recycler
from kitelib.upcycle.unit import RecyclableUnit
from kitelib.yoco.decision import decide, load_costs

__all__ = ["Batch", "PoolHost", "acquire", "release"]

T = TypeVar("T")
Describe = Callable[[], Sequence[Wanted]]
"""Gives what to look for."""
CopyIn = Callable[[int, Sequence[npt.NDArray[np.uint8]]], None]
"""Takes the index of the first block and the data of consecutive ones."""

_LOG = logging.getLogger("kitelib.vllm")
_PENDING_BYTES: Final = 256 * 2**20  # of blocks on their way into the pool
_CHUNK_BLOCKS: Final = 16
_CHUNK_BYTES: Final = 32 * 2**20
_LOADS_AT_ONCE: Final = 4  # each holds at most two chunks
_EXPLORE: Final = 1 / 16  # how often a tier that is too slow is measured again
_START_S: Final = 30.0
_CLOSE_MARGIN_S: Final = 5.0
_LEAST_LOAD_S: Final = 1.0
_LOAD_MARGIN: Final = 2.0  # a load is given up when it took so many times what computing would


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """Units on their way into the pool.

    Attributes:
        make: makes them; runs in a thread.
        reserved_bytes: what `PoolHost.reserve` set aside for them.
        root: fingerprint that theirs start from.
        namespace: whose they are.
        epoch: the pool's when they were computed.
    """

    make: Callable[[], list[RecyclableUnit]]
    reserved_bytes: int
    root: bytes
    namespace: str | None
    epoch: int


class PoolHost:
    """Owns the thread, its event loop and the pool. All methods may be called in any thread, none waits unless it says
    so.

    Args:
        config: the tiers.

    Attributes:
        counters: what happened.
        resets: how often `clear` was called.
        users: how many halves of the connector use it.
    """

    def __init__(self, config: PoolConfig) -> None:
        self.counters = Counters()
        self.resets = 0
        self.users = 0
        self._config = config
        self._ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._model: bytes | None = None
        self._closed = False
        self._telling: set[asyncio.Future[Any]] = set()
        self._thread = threading.Thread(target=self._run, name="kite-pool", daemon=True)
        self._thread.start()
        self._ready.result(_START_S)
        _at_exit(self.close)

    @property
    def epoch(self) -> int:
        """The pool's freshness epoch."""
        return self._pool.epoch

    @property
    def measured(self) -> bool:
        """Whether every outer tier was read before, so that it is known how fast it is."""
        return all(tier.tried for tier in self._pool.tiers.tiers)

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:  # noqa: BLE001 - whoever waits for the start has to know
            if not self._ready.done():
                self._ready.set_exception(error)
            else:
                _LOG.exception("KITE's pool ended; from now on nothing is found in it")

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        supervisor = Supervisor()
        self._door = ThreadDoor()
        self._pool = RUPool(self._config, self._door)
        self._recycler = Recycler(self._pool, _PENDING_BYTES)
        self._loads = asyncio.Semaphore(_LOADS_AT_ONCE)
        supervisor.start()
        await self._pool.start(supervisor)
        supervisor.keep("recycler", self._recycler.run)
        self._ready.set_result(None)
        try:
            await self._stop.wait()
            with anyio.move_on_after(self._config.drain_seconds):
                await self._recycler.drain()
                await asyncio.gather(*self._telling, return_exceptions=True)
            await self._pool.drain()
        finally:
            await supervisor.aclose()
            self._recycler.close()
            await self._pool.aclose()

    def _submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T] | None:
        """Starts work on the loop; None if it does not run any more."""
        loop = self._loop
        if self._closed or loop is None or loop.is_closed() or not self._thread.is_alive():
            work.close()
            return None
        return asyncio.run_coroutine_threadsafe(work, loop)

    def use_model(self, model_state: bytes, block_bytes: int) -> None:
        """Says whose units these are; waits until the tiers told their epoch, a few seconds at most. Later calls do
        nothing."""
        if self._model == model_state:
            return
        self._model = model_state
        done = self._submit(self._pool.use_model(model_state, bitwise=False, max_data_bytes=block_bytes))
        if done is not None:
            done.result(_START_S)

    # Looking up

    def look(
        self, describe: Describe, namespace: str | None, compute_block_s: float
    ) -> concurrent.futures.Future[int] | None:
        """How many of the first of the blocks that `describe` gives it pays to load. The future never has an
        exception."""
        if not self._pool.searchable:
            return None
        self.counters.add("lookups")
        return self._submit(self._look(describe, namespace, compute_block_s))

    async def _look(self, describe: Describe, namespace: str | None, compute_block_s: float) -> int:
        try:
            wanted = await self._door.run(describe)
            self._pool.add_namespace(wanted[0].root, namespace)
            await self._pool.freshen()
            count = await self._pool.leading_run(wanted)
            spans = await self._pool.locate(wanted[count:])
            costs = [load_costs(span, self._pool, wanted[0].expected.num_bytes or 0) for span in spans]
            verdict = decide(spans, costs, compute_block_s, math.inf)
            # What is left out by `wait` alone might still gain beside computing; here a request does one or the other.
            skipped = sum(span.count for span in (*verdict.overlap, *verdict.skip))
            if skipped:
                self.counters.add("skipped_blocks", skipped)
                await self._explore((*verdict.overlap, *verdict.skip)[0], wanted[count:])
            return count + sum(span.count for span in verdict.wait)
        except Exception:  # noqa: BLE001 - whatever fails, the request only misses
            _LOG.exception("looking up a request failed")
            return 0

    async def _explore(self, span: Span, wanted: Sequence[Wanted]) -> None:
        """A tier that is never read would be thought slow for ever."""
        if random.random() < _EXPLORE:  # noqa: S311 - no secret
            one = dataclasses.replace(span, count=1)
            await self._pool.read(one, wanted[span.first : span.first + 1])

    # Loading

    def load(
        self, describe: Describe, namespace: str | None, compute_s: float, copy_in: CopyIn
    ) -> concurrent.futures.Future[int] | None:
        """Loads blocks, and gives how many of the first were copied by `copy_in`, which runs in a thread. The future
        never has an exception.

        Args:
            describe: gives the blocks, in order; runs in a thread.
            namespace: whose they are.
            compute_s: seconds that computing them takes: a load that takes much longer is given up.
            copy_in: writes blocks to where they belong.
        """
        return self._submit(self._load(describe, namespace, compute_s, copy_in))

    async def _load(self, describe: Describe, namespace: str | None, compute_s: float, copy_in: CopyIn) -> int:
        begun, epoch, done = time.monotonic(), self._pool.epoch, 0
        until = begun + max(_LEAST_LOAD_S, _LOAD_MARGIN * compute_s)
        try:
            async with self._loads:
                wanted = await self._door.run(describe)
                self._pool.add_namespace(wanted[0].root, namespace)
                reading = asyncio.ensure_future(self._next(wanted, 0, None))
                while done < len(wanted):
                    units, spans = await reading
                    if not units or time.monotonic() > until or self._pool.epoch != epoch:
                        break
                    first, done = done, done + len(units)
                    more = done < len(wanted)
                    reading = asyncio.ensure_future(self._next(wanted, done, spans)) if more else reading
                    data = [unit.data for unit in units]
                    await self._door.run(functools.partial(copy_in, first, data))
                reading.cancel()
        except Exception:  # noqa: BLE001 - as above
            _LOG.exception("loading blocks failed")
            done = 0
        self.counters.add("load_seconds", time.monotonic() - begun)
        return done if self._pool.epoch == epoch else 0

    async def _next(
        self, wanted: Sequence[Wanted], start: int, spans: list[Span] | None
    ) -> tuple[list[RecyclableUnit], list[Span] | None]:
        """The next few units from `start` on, and where the rest is: `spans` begin at `start`, None is not known."""
        size = max(1, wanted[start].expected.num_bytes or 1)
        chunk = wanted[start : start + max(1, min(_CHUNK_BLOCKS, _CHUNK_BYTES // size))]
        if not spans:
            found = await self._pool.fetch_run(chunk[: await self._pool.leading_run(chunk)])
            if found:
                return [unit for unit, _ in found], None
            spans = await self._pool.locate(wanted[start:])
            if not spans:
                return [], None
        span, rest = spans[0], spans[1:]
        count = min(span.count, len(chunk))
        found = await self._pool.read(dataclasses.replace(span, count=count), chunk[:count])
        if len(found) < count:
            return [unit for unit, _ in found], None  # something is gone: what is left is looked for again
        if count < span.count:
            rest = [dataclasses.replace(span, first=span.first + count, count=span.count - count), *rest]
        return [unit for unit, _ in found], rest or None

    # Storing

    def lacks(self, wanted: Wanted) -> bool:
        """Whether the unit should be stored."""
        return self._pool.enabled and not self._pool.contains(wanted)

    def reserve(self, num_bytes: int, count: int) -> bool:
        """As `Recycler.reserve`."""
        if self._recycler.reserve(num_bytes, count):
            return True
        self.counters.add("dropped_blocks", count)
        return False

    def save(self, batch: Batch) -> None:
        """Stores units that are made in a thread, under a reservation."""
        self._submit(self._save(batch))

    async def _save(self, batch: Batch) -> None:
        units: list[RecyclableUnit] = []
        try:
            units = await self._door.run(batch.make)
        except Exception:  # noqa: BLE001 - as above
            _LOG.exception("blocks could not be kept")
        self._pool.add_namespace(batch.root, batch.namespace)
        self._recycler.submit(units, batch.reserved_bytes, batch.epoch, batch.root)

    # Managing

    def clear(self) -> None:
        """Makes all units void: here at once, in the tiers and for other processes behind the caller."""
        self.resets += 1
        done = self._submit(self._forget())
        if done is not None:
            done.result(_START_S)

    async def _forget(self) -> None:
        self._pool.forget()
        task = asyncio.ensure_future(self._pool.spread_epoch())
        self._telling.add(task)
        task.add_done_callback(self._told)

    def _told(self, task: asyncio.Future[Any]) -> None:
        self._telling.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _LOG.error("telling the tiers that units are void failed: %s", task.exception())

    def settle(self) -> None:
        """Waits until everything is stored that was handed over, `PoolConfig.drain_seconds` at most; for tests and
        tools."""
        done = self._submit(self._settle())
        if done is not None:
            done.result(self._config.drain_seconds * 2 + _CLOSE_MARGIN_S)

    async def _settle(self) -> None:
        await self._recycler.drain()
        await self._pool.settle()

    def stats(self) -> dict[str, dict[str, Any]]:
        """Counters of the tiers."""
        return self._pool.stats()

    def close(self) -> None:
        """Writes what is on its way, for `PoolConfig.drain_seconds` at most, and ends the thread. Waits. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._loop is not None and self._stop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(2 * self._config.drain_seconds + _CLOSE_MARGIN_S)


def _at_exit(call: Callable[[], None]) -> None:
    # What is registered with `atexit` comes after the executors' threads have ended, and closing tiers needs them.
    getattr(threading, "_register_atexit", atexit.register)(call)


_HOSTS: dict[str, PoolHost] = {}
_HOSTS_LOCK = threading.Lock()


def acquire(key: str, config: PoolConfig, *, worker: bool, share: int = 1) -> PoolHost:
    """The host of an engine in this process.

    Args:
        key: the engine.
        config: the tiers.
        worker: whether a worker asks. A scheduler without a worker in its process has no use for process memory.
        share: how many workers share the machine's memory.

    Raises:
        ConfigError, MissingExtraError: the tiers can't be opened.
    """
    with _HOSTS_LOCK:
        host = _HOSTS.get(key)
        if host is None:
            if not worker:
                config = dataclasses.replace(config, memory_bytes=0)
            elif config.memory_bytes is None and share > 1:
                config = dataclasses.replace(config, memory_bytes=default_pool_bytes() // share)
            host = _HOSTS[key] = PoolHost(config)
        host.users += 1
        return host


def release(key: str) -> None:
    """Closes the host of an engine when nobody uses it any more. Waits."""
    with _HOSTS_LOCK:
        host = _HOSTS.get(key)
        if host is None:
            return
        host.users -= 1
        if host.users > 0:
            return
        del _HOSTS[key]
    host.close()
