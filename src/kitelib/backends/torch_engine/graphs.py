"""CUDA graphs for decode steps: one captured graph per size of batch, all reading and writing the same static memory.

A decode step launches hundreds of small kernels; a graph launches them with one call. What changes from step to step
goes through one host buffer and one copy, and the tokens drawn come back the same way: the host waits once per step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from kitelib.backends.torch_engine.device_sampling import (
    NUM_SETTINGS,
    DeviceSampling,
    SamplingMode,
    pack_draws,
    sample_rows,
)
from kitelib.backends.torch_engine.plan import StepPlan

if TYPE_CHECKING:
    import torch

    from kitelib.abc import TokenDraw

__all__ = [
    "BUCKETS",
    "CudaGraphs",
    "DecodeBatch",
    "DecodeGraphs",
    "DecodeStep",
    "GraphApi",
    "PlainReplay",
    "buckets_to",
]

_WARM_UPS: Final = 2  # runs before a capture: kernels get compiled and libraries make their workspaces
_NUM_SLOTS: Final = 2  # host buffers: one may still be read by a copy while the next step's is written


def buckets_to(most: int) -> tuple[int, ...]:
    """Sizes of batch with a graph of their own: 1, 2, 4, 8, then every 8 up to 64, every 16 up to 128, every 32."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, most + 32, 32)]
    inside = [size for size in sizes if size < most]
    return (*inside, most)


BUCKETS: Final = buckets_to(256)
"""The usual sizes of batch."""


class GraphApi(Protocol):
    """What `DecodeGraphs` needs of a device's runtime."""

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """Records what `function` does to static memory; the call given back does it again."""
        ...

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed host memory that the device can copy from and to without waiting."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queues a copy between host buffer and device."""
        ...

    def mark(self) -> Callable[[], None]:
        """A call that waits until everything queued so far is done."""
        ...

    def scope(self) -> AbstractContextManager[Any]:
        """What steps and captures run in: the device and its stream."""
        ...


class CudaGraphs:
    """`GraphApi` of one CUDA device. All graphs share one pool of memory, since only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._device = device
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._side: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        import torch

        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._side.wait_stream(current)
            with torch.cuda.stream(self._side):
                for _ in range(_WARM_UPS):
                    function()
            current.wait_stream(self._side)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            # Other threads (the copies of restored blocks) may go on calling CUDA meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"):
                function()
        replay: Callable[[], None] = graph.replay
        return replay

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        import torch

        return torch.zeros(shape, dtype=dtype, pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def mark(self) -> Callable[[], None]:
        import torch

        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        wait: Callable[[], None] = event.synchronize
        return wait

    def scope(self) -> AbstractContextManager[Any]:
        import torch

        context: AbstractContextManager[Any] = torch.cuda.device(self._device)
        return context


class PlainReplay:
    """`GraphApi` without graphs: a replay calls the function again. For the CPU, and to compare graphs with."""

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        return function

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        import torch

        return torch.zeros(shape, dtype=dtype)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def mark(self) -> Callable[[], None]:
        return lambda: None

    def scope(self) -> AbstractContextManager[Any]:
        return nullcontext()


class DecodeForward(Protocol):
    """Runs the model on one row per sequence, without waiting for the device and without any shape that depends on
    data."""

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        """Logits (rows, vocabulary) for `input_ids` and `positions`, int64 (1, rows)."""
        ...


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class DecodeBatch:
    """The next token of some sequences; drafts that follow it are sequences of their own, with the same blocks.

    Attributes:
        ids: int64 (sequences,): token ids.
        contexts: int32 (sequences,): tokens of each sequence, this one included.
        slots: int64 (sequences,): where their KV goes; see `StepPlan`.
        tables: int32 (sequences, width): block numbers; beyond a sequence's blocks anything.
        draws: how to draw each next token on the device, None where the logits are wanted; empty if all are.
    """

    ids: npt.NDArray[np.int64]
    contexts: npt.NDArray[np.int32]
    slots: npt.NDArray[np.int64]
    tables: npt.NDArray[np.int32]
    draws: Sequence[TokenDraw | None] = ()


class DecodeStep:
    """What one decode step gives; valid until the next but one starts."""

    def __init__(self, logits: torch.Tensor, tokens: torch.Tensor | None, wait: Callable[[], None]) -> None:
        self._logits = logits
        self._tokens = tokens
        self._wait = wait

    @property
    def logits(self) -> torch.Tensor:
        """(rows, vocabulary), on the device; the next step overwrites it."""
        return self._logits

    def tokens(self) -> list[int]:
        """The tokens drawn; waits for the device. -1 where a row's logits are unusable; see `sample_rows`."""
        self._wait()
        return [] if self._tokens is None else [int(token) for token in self._tokens.tolist()]


class DecodeGraphs:
    """Decode steps through captured graphs.

    Inputs and results live in static memory, sized for the largest batch; graphs of smaller ones use the first part
    of each. A batch is filled up to the next size with padding: rows with slot -1, context 0 and token 0.

    Args:
        forward: the model; see `DecodeForward`. It is run a few times per capture, with padding only.
        max_blocks: most blocks of one sequence.
        max_context: most tokens of one sequence.
        vocab_size: length of a row of logits.
        logits_dtype: their type.
        device: of the model.
        api: the device's graphs; `CudaGraphs(device)` or `PlainReplay()`.
        buckets: sizes of batch, ascending. One size alone makes every step use the same kernels.
    """

    def __init__(
        self,
        forward: DecodeForward,
        *,
        max_blocks: int,
        max_context: int,
        vocab_size: int,
        logits_dtype: torch.dtype,
        device: torch.device,
        api: GraphApi,
        buckets: Sequence[int] = BUCKETS,
    ) -> None:
        import torch

        assert list(buckets) == sorted(set(buckets))
        assert buckets[0] > 0
        self._forward = forward
        self._max_context = max_context
        self._api = api
        self._buckets = tuple(buckets)
        with api.scope():
            self._memory = _StaticMemory(self._buckets[-1], max_blocks, device, api)
            self._logits = torch.zeros((self._buckets[-1], vocab_size), dtype=logits_dtype, device=device)
        self._graphs: dict[int, Callable[[], None]] = {}
        self._samplers: dict[tuple[int, SamplingMode], Callable[[], None]] = {}
        self._turn = 0
        self._copied: list[Callable[[], None]] = [lambda: None] * _NUM_SLOTS

    @property
    def max_rows(self) -> int:
        """Rows of the largest batch."""
        return self._buckets[-1]

    def fits(self, num_sequences: int, context: int) -> bool:
        """Whether there is a graph for so many sequences, the longest of `context` tokens."""
        return num_sequences <= self._buckets[-1] and context <= self._max_context

    def bucket(self, num_rows: int) -> int:
        """Rows of the graph that `num_rows` rows use."""
        return next(size for size in self._buckets if size >= num_rows)

    def warm(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Captures every size of batch, largest first: smaller graphs then fit into the memory of larger ones.

        Args:
            progress: called with how many sizes are done and how many there are.
        """
        import torch

        for index, bucket in enumerate(reversed(self._buckets)):
            with torch.inference_mode(), self._api.scope():
                self._graph(bucket)
                self._sampler(bucket, SamplingMode.GREEDY)
            if progress is not None:
                progress(index + 1, len(self._buckets))

    def run(self, batch: DecodeBatch) -> DecodeStep:
        """Starts one decode step and returns at once. The arrays may be changed afterwards.

        Args:
            batch: at least one sequence; it `fits`, and its tables are no wider than `max_blocks`.
        """
        import torch

        count = len(batch.ids)
        bucket = self.bucket(count)
        with torch.inference_mode(), self._api.scope():
            graph = self._graph(bucket)
            slot, self._turn = self._turn, (self._turn + 1) % _NUM_SLOTS
            self._copied[slot]()
            mode = self._memory.fill(slot, batch, bucket)
            self._memory.upload(slot, bucket)
            self._copied[slot] = self._api.mark()
            graph()
            logits = self._logits[:count]
            if mode is None:
                return DecodeStep(logits, None, self._api.mark())
            self._sampler(bucket, mode)()
            tokens = self._memory.download(slot, count)
            return DecodeStep(logits, tokens, self._api.mark())

    def _graph(self, bucket: int) -> Callable[[], None]:
        graph = self._graphs.get(bucket)
        if graph is None:
            self._memory.clear(bucket)
            graph = self._graphs[bucket] = self._api.capture(lambda: self._compute(bucket))
        return graph

    def _compute(self, bucket: int) -> None:
        """The model on the static memory. The logits are copied, so that all graphs share one place for them."""
        views = self._memory.device_views(bucket)
        plan = StepPlan(
            num_rows=bucket,
            num_sequences=bucket,
            max_rows=1,
            max_context=self._max_context,
            row_starts=self._memory.row_starts[: bucket + 1],
            contexts=views.contexts,
            tables=views.tables,
            slots=views.slots,
            positions=views.positions,
        )
        self._logits[:bucket].copy_(self._forward(views.ids[None], views.positions[None], plan))

    def _sampler(self, bucket: int, mode: SamplingMode) -> Callable[[], None]:
        """Sampling is captured apart from the model: few batches need more than the largest logit."""
        sampler = self._samplers.get((bucket, mode))
        if sampler is None:
            settings = DeviceSampling.from_packed(self._memory.device_views(bucket).draws)

            def once() -> None:
                self._memory.tokens[:bucket].copy_(sample_rows(self._logits[:bucket], settings, mode))

            sampler = self._samplers[bucket, mode] = self._api.capture(once)
        return sampler


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Views:
    """Parts of one packed buffer, for one size of batch; see `_StaticMemory`."""

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    draws: torch.Tensor
    contexts: torch.Tensor
    tables: torch.Tensor


class _StaticMemory:
    """Inputs of all graphs, packed so that a step needs one copy: int64 words that hold, for `bucket` rows, ids,
    positions and slots (int64), draws (float64), contexts and tables (int32), one after the other.
    """

    def __init__(self, most: int, max_blocks: int, device: torch.device, api: GraphApi) -> None:
        import torch

        self._width = max_blocks + max_blocks % 2  # an even number of int32 fills whole words
        size = self._words(most)
        self._api = api
        self._device = torch.zeros(size, dtype=torch.int64, device=device)
        self._host = [api.host_buffer((size,), torch.int64) for _ in range(_NUM_SLOTS)]
        self._results = [api.host_buffer((most,), torch.int64) for _ in range(_NUM_SLOTS)]
        self._host_views: dict[tuple[int, int], tuple[_Views, _Arrays]] = {}
        self.tokens = torch.zeros(most, dtype=torch.int64, device=device)
        self.row_starts = torch.arange(most + 1, dtype=torch.int32, device=device)

    def device_views(self, bucket: int) -> _Views:
        """The static tensors that a graph of that size reads."""
        return self._split(self._device, bucket)

    def clear(self, bucket: int) -> None:
        """Makes all rows padding."""
        views = self._split(self._device, bucket)
        views.slots.fill_(-1)
        for part in (views.ids, views.positions, views.contexts, views.tables):
            part.zero_()

    def fill(self, slot: int, batch: DecodeBatch, bucket: int) -> SamplingMode | None:
        """Writes a step's inputs into a host buffer; the mode of sampling, or None if no sequence draws."""
        views, arrays = self._host_part(slot, bucket)
        count, width = batch.tables.shape
        arrays.ids[:count] = batch.ids
        arrays.contexts[:count] = batch.contexts
        np.subtract(batch.contexts, 1, out=arrays.positions[:count])
        arrays.slots[:count] = batch.slots
        arrays.tables[:count, :width] = batch.tables
        for part in (arrays.ids, arrays.positions, arrays.contexts):
            part[count:] = 0
        arrays.slots[count:] = -1
        if all(draw is None for draw in batch.draws):
            return None
        return pack_draws(batch.draws, views.draws)

    def upload(self, slot: int, bucket: int) -> None:
        """Queues the copy of a host buffer to the static memory."""
        words = self._words(bucket)
        self._api.copy(self._device[:words], self._host[slot][:words])

    def download(self, slot: int, count: int) -> torch.Tensor:
        """Queues the copy of the tokens to host memory, and gives that; it belongs to the buffer of that number."""
        result = self._results[slot][:count]
        self._api.copy(result, self.tokens[:count])
        return result

    def _words(self, bucket: int) -> int:
        return bucket * (3 + NUM_SETTINGS) + (bucket + 1) // 2 + bucket * self._width // 2

    def _host_part(self, slot: int, bucket: int) -> tuple[_Views, _Arrays]:
        part = self._host_views.get((slot, bucket))
        if part is None:
            views = self._split(self._host[slot], bucket)
            part = self._host_views[slot, bucket] = views, _Arrays.of(views)
        return part

    def _split(self, packed: torch.Tensor, bucket: int) -> _Views:
        import torch

        ids, positions, slots = packed[: 3 * bucket].view(3, bucket).unbind(0)
        end = (3 + NUM_SETTINGS) * bucket
        draws = packed[3 * bucket : end].view(torch.float64).view(NUM_SETTINGS, bucket)
        start, end = end, end + (bucket + 1) // 2
        contexts = packed[start:end].view(torch.int32)[:bucket]
        tables = packed[end : self._words(bucket)].view(torch.int32).view(bucket, self._width)
        return _Views(ids, positions, slots, draws, contexts, tables)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Arrays:
    """The same memory as `_Views` of a host buffer, for numpy."""

    ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    contexts: npt.NDArray[np.int32]
    tables: npt.NDArray[np.int32]

    @classmethod
    def of(cls, views: _Views) -> _Arrays:
        return cls(
            views.ids.numpy(),
            views.positions.numpy(),
            views.slots.numpy(),
            views.contexts.numpy(),
            views.tables.numpy(),
        )
