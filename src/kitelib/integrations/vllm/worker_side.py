"""The half of the connector beside a model: brings blocks into its KV cache, and keeps what it computed."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kitelib.fingerprint import Fingerprint
from kitelib.integrations.vllm.host import Batch, PoolHost
from kitelib.integrations.vllm.identity import rank_state
from kitelib.integrations.vllm.layout import BlockLayout, Rank
from kitelib.integrations.vllm.messages import BlockRun, StepMessage
from kitelib.stores.wanted import Wanted
from kitelib.upcycle.unit import Expectation, RecyclableUnit

__all__ = ["WorkerSide", "wanted_block"]

_IDLE_WAIT_S: Final = 0.005
_COPY_BLOCKS: Final = 16  # blocks copied out at once


def wanted_block(run: BlockRun, index: int, model_state: bytes, layout: str, block_bytes: int) -> Wanted:
    """What the stored unit of block `index` of a run has to be."""
    token_ids = _token_ids(run, index)
    cf = Fingerprint(run.cfs[index])
    return Wanted.of(Expectation("kv", cf, token_ids, model_state, layout, block_bytes), run.root)


def _token_ids(run: BlockRun, index: int) -> npt.NDArray[np.uint32]:
    size = len(run.token_ids) // len(run.cfs)
    return np.frombuffer(run.token_ids[index * size : (index + 1) * size], "<u4")


@dataclasses.dataclass(slots=True)
class _Load:
    run: BlockRun
    epoch: int
    future: concurrent.futures.Future[int] | None


class WorkerSide:
    """Loads and saves for one worker. Used in the worker's thread only.

    Args:
        host: the pool.
        layout: the engine's KV cache.
        rank: which part of the model the worker has.
    """

    def __init__(self, host: PoolHost, layout: BlockLayout, rank: Rank) -> None:
        self._host = host
        self._layout = layout
        self._rank = rank
        self._state: bytes | None = None  # model state of this rank's units
        self._loads: dict[str, _Load] = {}
        self._failed: set[int] = set()
        self._progress = threading.Event()

    def begin(self, message: StepMessage) -> None:
        """Takes over what the scheduler says of a step, before anything else is asked of it."""
        if self._state is None:
            self._state = rank_state(message.model_state, self._rank)
            self._host.use_model(self._state, self._layout.block_bytes)
        if message.resets > self._host.resets:  # the scheduler lives in another process and has another host
            self._host.clear()
            self._host.resets = message.resets

    def start_loads(self, message: StepMessage) -> None:
        """Starts what is to be loaded. The blocks belong to the loads until `finished` names their requests."""
        for run in message.loads:
            load = _Load(run, self._host.epoch, None)
            describe = functools.partial(self._wanted_run, run)
            copy_in = functools.partial(self._copy_in, run, self._layout.mark())
            load.future = self._host.load(describe, run.namespace, run.compute_s, copy_in)
            if load.future is not None:
                load.future.add_done_callback(lambda _: self._progress.set())
            self._loads[run.request_id] = load

    def _wanted_run(self, run: BlockRun) -> list[Wanted]:
        return [self._wanted(run, index) for index in range(len(run.cfs))]

    def _copy_in(self, run: BlockRun, after: Any, first: int, data: Sequence[npt.NDArray[np.uint8]]) -> None:
        self._layout.copy_in(run.block_ids[first : first + len(data)], data, after)

    def save(self, message: StepMessage) -> None:
        """Copies what the step completed; storing it goes on behind."""
        for run in message.saves:
            assert self._state is not None
            new = [index for index in range(len(run.cfs)) if self._host.lacks(self._wanted(run, index))]
            self._host.counters.add("known_blocks", len(run.cfs) - len(new))
            for start in range(0, len(new), _COPY_BLOCKS):
                self._save(run, new[start : start + _COPY_BLOCKS])

    def _save(self, run: BlockRun, indexes: Sequence[int]) -> None:
        num_bytes = len(indexes) * self._layout.block_bytes
        if not self._host.reserve(num_bytes, len(indexes)):
            return
        data = self._layout.copy_out([run.block_ids[index] for index in indexes])
        epoch, created_at = self._host.epoch, time.time()
        self._host.counters.add("saved_blocks", len(indexes))

        def make() -> list[RecyclableUnit]:
            rows = zip(indexes, data, strict=True)
            return [self._unit(run, index, row, epoch, created_at) for index, row in rows]

        self._host.save(Batch(make, num_bytes, run.root, run.namespace, epoch))

    def _unit(
        self, run: BlockRun, index: int, data: npt.NDArray[np.uint8], epoch: int, created_at: float
    ) -> RecyclableUnit:
        assert self._state is not None
        parent = run.cfs[index - 1] if index else run.parent
        return RecyclableUnit(
            kind="kv",
            cf=Fingerprint(run.cfs[index]),
            parent=Fingerprint(parent),
            token_ids=_token_ids(run, index),
            model_state=self._state,
            epoch=epoch,
            created_at=created_at,
            layout=self._layout.id,
            dtype=self._layout.dtype,
            shape=(self._layout.num_elements,),
            data=data,
        )

    def finished(self, message: StepMessage | None) -> set[str]:
        """Requests whose loads have ended, well or not. If the step computes nothing, it waits a moment for one, since
        the engine would only ask again."""
        if self._loads and message is not None and not message.computes:
            self._progress.wait(_IDLE_WAIT_S)
        self._progress.clear()
        ended = [load for load in self._loads.values() if load.future is None or load.future.done()]
        for load in ended:
            del self._loads[load.run.request_id]
            self._settle(load)
        return {load.run.request_id for load in ended}

    def _settle(self, load: _Load) -> None:
        count = 0
        if load.future is not None and not load.future.cancelled() and load.future.exception() is None:
            count = load.future.result()
        if load.epoch != self._host.epoch:  # all units were made void while these were on their way
            count = 0
        block_ids = load.run.block_ids
        self._failed.update(block_ids[count:])
        self._host.counters.add("loaded_blocks", count)
        self._host.counters.add("loaded_tokens", count * self._layout.block_tokens)
        if count < len(block_ids):
            self._host.counters.add("failed_blocks", len(block_ids) - count)

    def take_failed(self) -> set[int]:
        """Blocks that were not loaded although promised, of the requests that `finished` named."""
        failed, self._failed = self._failed, set()
        return failed

    def _wanted(self, run: BlockRun, index: int) -> Wanted:
        assert self._state is not None
        return wanted_block(run, index, self._state, self._layout.id, self._layout.block_bytes)
