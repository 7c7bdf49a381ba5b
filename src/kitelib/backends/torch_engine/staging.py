"""Blocks between GPU and host: through pinned buffers, on a stream of their own, restored layer by layer."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from kitelib.native.upcycle_ext import PageMover

if TYPE_CHECKING:
    import torch

    from kitelib.backends.torch_engine.pages import PagedCache

__all__ = ["CudaLane", "Lane", "StagedTransfer"]

_SLOT_BYTES: Final = 2**25
_NUM_SLOTS: Final = 3  # one is filled, one on its way, one emptied
_GROUPS: Final = 8  # of layers that are restored together
_DIRECT_BYTES: Final = 2**18  # a whole block of this size is copied as it is: no kernel takes time from others' steps

Bytes = npt.NDArray[np.uint8]


class Lane(Protocol):
    """Where copies run, in order, beside what the caller computes."""

    def host_bytes(self, num_bytes: int) -> torch.Tensor:
        """Memory of the host that the device copies from and to by itself."""
        ...

    def device_bytes(self, num_bytes: int) -> torch.Tensor:
        """Memory of the device."""
        ...

    def work(self) -> AbstractContextManager[None]:
        """Inside, torch's operations go to the lane, after all that the caller has enqueued so far."""
        ...

    def mark(self) -> Any:
        """A point after everything in the lane so far."""
        ...

    def wait(self, mark: Any) -> None:
        """What the caller enqueues next comes after the mark."""
        ...

    def sync(self, mark: Any) -> None:
        """Comes back once the mark is passed."""
        ...


class CudaLane:
    """A CUDA stream."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def host_bytes(self, num_bytes: int) -> torch.Tensor:
        import torch

        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def device_bytes(self, num_bytes: int) -> torch.Tensor:
        import torch

        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    @contextlib.contextmanager
    def work(self) -> Iterator[None]:
        import torch

        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> Any:
        import torch

        event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def wait(self, mark: Any) -> None:
        import torch

        torch.cuda.current_stream(self._device).wait_event(mark)

    def sync(self, mark: Any) -> None:
        mark.synchronize()


@dataclasses.dataclass(slots=True)
class _Slot:
    """A piece of the ring; until its mark is passed, it belongs to the copies."""

    host: torch.Tensor
    device: torch.Tensor
    view: Bytes  # the memory of `host`
    mark: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Group:
    """Layers that are restored together, and where their bytes are."""

    layers: range
    mover: PageMover
    spans: tuple[tuple[int, int], ...]  # bytes of a token in a payload, in the order of the mover's segments


class StagedTransfer:
    """Exports and restores blocks of a cache through a lane. For one thread at a time.

    Args:
        slot_bytes: size of a staging buffer, of which there are three on each side; at least one block.
    """

    def __init__(self, cache: PagedCache, lane: Lane, slot_bytes: int = _SLOT_BYTES) -> None:
        import torch

        self._lane = lane
        self._num_layers = len(cache.layers)
        self._block_tokens = cache.block_tokens
        self._rows = cache.arena.view(torch.uint8)
        self._slot_bytes = max(slot_bytes, self._rows.shape[1])
        self._slots: list[_Slot] = []
        self._turn = 0
        pages = [cache.keys(layer) for layer in range(self._num_layers)]
        pages += [cache.values(layer) for layer in range(self._num_layers)]
        item_bytes = cache.arena.element_size()
        self._all = _mover(pages)
        starts = [0, *itertools.accumulate(width * item_bytes for width in cache.widths)]
        self._groups = list(self._make_groups(pages, starts))
        self._marks: list[Any] = [None] * self._num_layers

    def _make_groups(self, pages: list[torch.Tensor], starts: list[int]) -> Iterator[_Group]:
        num = min(_GROUPS, self._num_layers)
        for index in range(num):
            layers = range(index * self._num_layers // num, (index + 1) * self._num_layers // num)
            keys = slice(layers.start, layers.stop)
            values = slice(layers.start + self._num_layers, layers.stop + self._num_layers)
            spans = tuple((starts[part.start], starts[part.stop]) for part in (keys, values))
            yield _Group(layers, _mover(pages[keys] + pages[values]), spans)

    def export(self, blocks: Sequence[int], num_tokens: Sequence[int]) -> list[Bytes]:
        """See `BlockTransfer.export`. While one buffer is on its way, the one before is emptied."""
        payloads: list[Bytes] = []
        waiting: tuple[_Slot, list[int]] | None = None
        sizes = [tokens * self._all.token_bytes for tokens in num_tokens]
        for chunk in self._chunks(sizes):
            slot = self._next_slot()
            self._fetch(slot, [blocks[i] for i in chunk], [num_tokens[i] for i in chunk])
            if waiting is not None:
                payloads += self._take(*waiting)
            waiting = (slot, [sizes[i] for i in chunk])
        if waiting is not None:
            payloads += self._take(*waiting)
        return payloads

    def _fetch(self, slot: _Slot, blocks: list[int], num_tokens: list[int]) -> None:
        """Enqueues the copies of blocks into a slot, behind each other."""
        table, packed = [], 0
        with self._lane.work():
            at = 0
            for block, tokens in zip(blocks, num_tokens, strict=True):
                size = tokens * self._all.token_bytes
                if tokens == self._block_tokens and size >= _DIRECT_BYTES:
                    slot.host[at : at + size].copy_(self._rows[block], non_blocking=True)
                else:
                    table.append((block, 0, tokens, packed, at))
                    packed += size
                at += size
            if table:
                self._all.pack(np.array([row[:4] for row in table], np.int64), slot.device[:packed])
            for _, _, tokens, start, target in _merged(table, self._all.token_bytes):
                size = tokens * self._all.token_bytes
                slot.host[target : target + size].copy_(slot.device[start : start + size], non_blocking=True)
            slot.mark = self._lane.mark()

    def _take(self, slot: _Slot, sizes: list[int]) -> list[Bytes]:
        self._lane.sync(slot.mark)
        slot.mark = None
        ends = list(itertools.accumulate(sizes))
        return [slot.view[end - size : end].copy() for end, size in zip(ends, sizes, strict=True)]

    def restore(self, blocks: Sequence[int], payloads: Sequence[Bytes], num_tokens: Sequence[int]) -> None:
        """See `BlockTransfer.restore`. The first layers' KV goes first."""
        for group in self._groups:
            width = sum(end - start for start, end in group.spans)
            mark = None
            for chunk in self._chunks([tokens * width for tokens in num_tokens]):
                slot = self._next_slot()
                table, at = [], 0
                for i in chunk:
                    table.append((blocks[i], 0, num_tokens[i], at))
                    for start, end in group.spans:
                        size = (end - start) * num_tokens[i]
                        slot.view[at : at + size] = payloads[i][start * num_tokens[i] : end * num_tokens[i]]
                        at += size
                with self._lane.work():
                    slot.device[:at].copy_(slot.host[:at], non_blocking=True)
                    group.mover.unpack(np.array(table, np.int64), slot.device[:at])
                    mark = slot.mark = self._lane.mark()
            if mark is not None:  # the lane is in order: the last chunk's mark is passed after all before
                for layer in group.layers:
                    self._marks[layer] = mark

    def wait_layer(self, layer: int) -> None:
        """What the caller enqueues next comes after this layer's KV of all restored blocks."""
        mark, self._marks[layer] = self._marks[layer], None
        if mark is not None:
            self._lane.wait(mark)

    def wait(self) -> None:
        """`wait_layer` for all layers: the last group's mark is passed after all others."""
        last = self._marks[-1]
        self._marks = [None] * self._num_layers
        if last is not None:
            self._lane.wait(last)

    def _next_slot(self) -> _Slot:
        """The slot that was used longest ago, once its copies are done."""
        turn, self._turn = self._turn, self._turn + 1
        if turn < _NUM_SLOTS:
            host = self._lane.host_bytes(self._slot_bytes)
            self._slots.append(_Slot(host, self._lane.device_bytes(self._slot_bytes), host.numpy()))
        slot = self._slots[turn % _NUM_SLOTS]
        if slot.mark is not None:
            self._lane.sync(slot.mark)
            slot.mark = None
        return slot

    def _chunks(self, sizes: Sequence[int]) -> Iterator[list[int]]:
        """Indices of neighbours that fill a slot together."""
        chunk: list[int] = []
        total = 0
        for index, size in enumerate(sizes):
            if chunk and total + size > self._slot_bytes:
                yield chunk
                chunk, total = [], 0
            chunk.append(index)
            total += size
        if chunk:
            yield chunk


def _mover(pages: list[torch.Tensor]) -> PageMover:
    return PageMover([page for page in pages if page.numel()])  # a layer may keep keys only


def _merged(
    table: Iterable[tuple[int, int, int, int, int]], token_bytes: int
) -> Iterator[tuple[int, int, int, int, int]]:
    """Packed items that follow each other on both sides, as one."""
    held: tuple[int, int, int, int, int] | None = None
    for row in table:
        if held is not None and held[4] + held[2] * token_bytes == row[4]:
            held = (held[0], 0, held[2] + row[2], held[3], held[4])
            continue
        if held is not None:
            yield held
        held = row
    if held is not None:
        yield held
