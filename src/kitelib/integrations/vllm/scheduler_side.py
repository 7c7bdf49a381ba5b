"""The half of the connector beside vLLM's scheduler: decides by looking up keys only, and never waits for a tier."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from kitelib.fingerprint import Fingerprint, as_token_ids, block_fingerprints
from kitelib.integrations.vllm.host import PoolHost
from kitelib.integrations.vllm.identity import Adapters, rank_state, request_root
from kitelib.integrations.vllm.layout import Rank
from kitelib.integrations.vllm.messages import BlockRun, LayoutMessage, StepMessage
from kitelib.integrations.vllm.speed import PrefillSpeed
from kitelib.integrations.vllm.worker_side import wanted_block
from kitelib.stores.wanted import Wanted
from kitelib.yoco.decision import patience

__all__ = ["SchedulerSide"]

_IDLE_WAIT_S: Final = 0.002
_FRESH_S: Final = 2.0  # a request that waits longer for its turn is looked up again


@dataclasses.dataclass(slots=True)
class _Lookup:
    first: int
    future: concurrent.futures.Future[int] | None
    begun: float
    patience_s: float


@dataclasses.dataclass(slots=True)
class _Tracked:
    """One request, from its first lookup to its end.

    Attributes:
        root: what its blocks start from; None until its adapter is known.
        cfs: fingerprints of its full blocks, as far as they were needed.
        block_ids: where its blocks lie.
        saved: blocks from the front that need not be saved (any more).
        save: whether what it computes may be kept.
        loaded_at: how often it had been preempted when its last load was planned.
    """

    request: Any
    root: Fingerprint | None = None
    adapter: concurrent.futures.Future[None] | None = None
    cfs: list[Fingerprint] = dataclasses.field(default_factory=list)
    block_ids: list[int] = dataclasses.field(default_factory=list)
    saved: int = -1
    save: bool = True
    loaded_at: int = -1
    lookup: _Lookup | None = None


class SchedulerSide:
    """Used in the scheduler's thread only.

    Args:
        host: the pool.
        model_state: digest of the whole model.
        rank: how many ranks there are; the place is that of the first.
        block_tokens: tokens in a block.
        secret: `PoolConfig.namespace_secret`.
        patience_s: least seconds to wait for a lookup.
    """

    def __init__(
        self,
        host: PoolHost,
        *,
        model_state: bytes,
        rank: Rank,
        block_tokens: int,
        secret: bytes | None,
        patience_s: float = 0.0,
    ) -> None:
        self._host = host
        self._model_state = model_state
        self._state = rank_state(model_state, rank)
        self._rank = rank
        self._size = block_tokens
        self._secret = secret
        self._patience_s = patience_s
        self._layout: LayoutMessage | None = None
        self._adapters = Adapters()
        self._threads = concurrent.futures.ThreadPoolExecutor(1, "kite-adapters")
        self._roots: dict[tuple[str | None, bytes | None], Fingerprint] = {}
        self._requests: dict[str, _Tracked] = {}
        self._loads: list[BlockRun] = []
        self._speed = PrefillSpeed()
        self._idle = True

    def use_layout(self, layout: LayoutMessage) -> None:
        """Takes the layout of the first rank; before that, nothing is found."""
        self._layout = layout
        self._host.use_model(self._state, layout.block_bytes)

    # Looking up and loading

    def matched(self, request: Any, num_computed: int) -> int | None:
        """Tokens past the first `num_computed` that are worth loading; None if that is not known yet."""
        first, end = num_computed // self._size, (request.num_tokens - 1) // self._size
        if num_computed % self._size or first >= end or getattr(request, "skip_reading_prefix_cache", False):
            return 0
        tracked = self._track(request)
        if tracked is None or tracked.loaded_at >= request.num_preemptions:
            return 0
        if tracked.root is None and not self._find_root(tracked):
            if tracked.adapter is None:
                return 0
            if not self._done(tracked.adapter):
                return None
            if not self._find_root(tracked):  # asked again: it may have been read just now
                return 0
        lookup = tracked.lookup
        if lookup is None or lookup.first > first or time.monotonic() - lookup.begun > _FRESH_S + lookup.patience_s:
            lookup = tracked.lookup = self._look(tracked, first, end)
        if lookup.future is None:
            return 0
        if not self._done(lookup.future):
            if time.monotonic() - lookup.begun < lookup.patience_s:
                return None
            self._host.counters.add("lookups_late")
            lookup.future = None
            return 0
        found = 0 if lookup.future.cancelled() else lookup.future.result()
        count: int = max(0, min(lookup.first + found, end) - first) * self._size
        return count

    def _done(self, future: concurrent.futures.Future[Any]) -> bool:
        """Whether it is done; waits a moment if the engine has nothing else to do and would only ask in a loop."""
        if self._idle and not future.done():
            with contextlib.suppress(concurrent.futures.TimeoutError, concurrent.futures.CancelledError):
                future.exception(_IDLE_WAIT_S)
        return future.done()

    def _look(self, tracked: _Tracked, first: int, end: int) -> _Lookup:
        assert self._layout is not None
        run = self._run(tracked, first, end)
        describe = functools.partial(_describe, run, self._state, self._layout)
        block_s = self._size / self._speed.tokens_per_s
        future = self._host.look(describe, run.namespace, block_s)
        patient_s = max(self._patience_s, patience((end - first) * block_s, measured=self._host.measured))
        return _Lookup(first, future, time.monotonic(), patient_s)

    def allocated(self, request: Any, block_ids: Sequence[int], num_external: int) -> None:
        """The scheduler made room for a request; `num_external` tokens of it are to be loaded."""
        tracked = self._requests.get(request.request_id)
        if tracked is None or not num_external or tracked.lookup is None:
            return
        end = request.num_tokens - 1
        # What is loaded ends where the found run ends, whatever of it the engine itself had.
        stop = min(self._stop(tracked), end // self._size)
        first = stop - num_external // self._size
        run = self._run(tracked, first, stop)
        compute_s = num_external / self._speed.tokens_per_s
        self._loads.append(dataclasses.replace(run, block_ids=tuple(block_ids[first:stop]), compute_s=compute_s))
        tracked.loaded_at, tracked.lookup = request.num_preemptions, None

    @staticmethod
    def _stop(tracked: _Tracked) -> int:
        lookup = tracked.lookup
        assert lookup is not None
        assert lookup.future is not None
        return lookup.first + lookup.future.result()

    # Saving

    def message(self, output: Any) -> StepMessage:
        """What the workers have to do in the step that was just scheduled."""
        saves: list[BlockRun] = []
        for new in output.scheduled_new_reqs:
            self._place(new.req_id, new.block_ids[0], new.num_computed_tokens, replace=True)
            self._add_save(saves, output, new.req_id, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[index]
            computed = cached.num_computed_tokens[index]
            resumed = request_id in cached.resumed_req_ids
            if blocks is not None:
                self._place(request_id, blocks[0], computed, replace=resumed)
            self._add_save(saves, output, request_id, computed)
        self._idle = not output.total_num_scheduled_tokens
        self._speed.begin(output.total_num_scheduled_tokens)
        loads, self._loads = self._loads, []
        return StepMessage(self._model_state, loads, saves, self._host.resets, not self._idle)

    def _place(self, request_id: str, block_ids: Sequence[int], num_computed: int, *, replace: bool) -> None:
        tracked = self._requests.get(request_id)
        if tracked is None:
            return
        if replace:
            tracked.block_ids = list(block_ids)
            # What the engine had already was kept when it was computed, or comes from the pool.
            tracked.saved = max(tracked.saved, num_computed // self._size)
        else:
            tracked.block_ids += block_ids

    def _add_save(self, saves: list[BlockRun], output: Any, request_id: str, num_computed: int) -> None:
        tracked = self._requests.get(request_id)
        if tracked is None or not tracked.save:
            return
        # Guesses may be wrong, and what is not known yet has no name; both are saved by a later step.
        guesses = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
        computed = num_computed + output.num_scheduled_tokens[request_id] - guesses
        end = min(computed, tracked.request.num_tokens, len(tracked.block_ids) * self._size) // self._size
        if end <= tracked.saved or (tracked.root is None and not self._find_root(tracked)):
            return
        if not self._same_adapter(tracked):
            tracked.save = False
            return
        run = self._run(tracked, tracked.saved, end)
        saves.append(dataclasses.replace(run, block_ids=tuple(tracked.block_ids[tracked.saved : end])))
        tracked.saved = end

    # Keeping track

    def ended(self) -> None:
        """A step's results are there."""
        self._speed.end()

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._requests.pop(request_id, None)

    def reset(self) -> None:
        """Makes everything void, also what requests that run now compute from it."""
        for tracked in self._requests.values():
            tracked.save = False
            tracked.lookup = None
        self._host.clear()

    def close(self) -> None:
        """Ends the thread that reads adapters."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _track(self, request: Any) -> _Tracked | None:
        """The request's record; None if it is left alone."""
        tracked = self._requests.get(request.request_id)
        if tracked is None and self._layout is not None and _is_plain(request):
            tracked = self._requests[request.request_id] = _Tracked(request)
        return tracked

    def track(self, request: Any) -> None:
        """Begins to follow a request, unless it is one that is left alone."""
        self._track(request)

    def _find_root(self, tracked: _Tracked) -> bool:
        """Finds what the request's blocks start from; False if that is not known, yet or at all."""
        assert self._layout is not None
        request = tracked.request
        adapter: bytes | None = None
        if request.lora_request is not None:
            if not self._adapters.is_known(request.lora_request):
                if tracked.adapter is None:
                    tracked.adapter = self._threads.submit(self._adapters.read, request.lora_request)
                return False
            known = self._adapters.get(request.lora_request)
            if known is None:
                tracked.save = False
                return False
            adapter = known.digest
        key = request.cache_salt, adapter
        root = self._roots.get(key)
        if root is None:
            root = request_root(
                self._model_state,
                layout=self._layout.layout,
                block_tokens=self._size,
                rank=self._rank,
                salt=request.cache_salt,
                secret=self._secret,
                adapter=adapter,
            )
            if len(self._roots) >= 4096:
                self._roots.clear()
            self._roots[key] = root
        tracked.root = root
        return True

    def _same_adapter(self, tracked: _Tracked) -> bool:
        lora = tracked.request.lora_request
        return lora is None or self._adapters.get(lora) is not None

    def _run(self, tracked: _Tracked, first: int, end: int) -> BlockRun:
        """Blocks `first` to `end - 1` of a request, whose tokens are known."""
        assert tracked.root is not None
        request, cfs, size = tracked.request, tracked.cfs, self._size
        if len(cfs) < end:
            ids = as_token_ids(request.all_token_ids[len(cfs) * size : end * size])
            cfs += block_fingerprints(cfs[-1] if cfs else tracked.root, ids, size)
        token_ids = np.asarray(request.all_token_ids[first * size : end * size], "<u4").tobytes()
        parent = cfs[first - 1] if first else tracked.root
        return BlockRun(
            request.request_id, tracked.root, request.cache_salt, parent, tuple(cfs[first:end]), token_ids, ()
        )


def _describe(run: BlockRun, state: bytes, layout: LayoutMessage) -> list[Wanted]:
    return [wanted_block(run, index, state, layout.layout, layout.block_bytes) for index in range(len(run.cfs))]


def _is_plain(request: Any) -> bool:
    """Whether a request's KV depends on nothing but its tokens, its adapter and the model."""
    return (
        not request.mm_features
        and request.prompt_embeds is None
        and request.pooling_params is None
        and not getattr(request, "resumable", False)
        and getattr(request.sampling_params, "prompt_logprobs", None) is None
    )
