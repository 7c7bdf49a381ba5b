"""One llama.cpp context: sequences, steps, and blocks in and out of its unified KV cache.

Sequence ids of the library ("slots"): 0 is scratch (blocks on their way in or out, padding rows), the others hold
live and dead sequences (see cells.py). For sliding-window models every sequence has a second slot, its shadow, that
holds the same cells: llama.cpp reuses a cell that has left the window of its only sequence, which would break the
ascending order and take away positions that a later request wants to share.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kitelib.abc import BlockPayload, SequenceId, StepResult, StepWork
from kitelib.backends.llama_cpp.blocks import StateLayout
from kitelib.backends.llama_cpp.cells import CellMap, SequenceCells
from kitelib.errors import BackendError, BackendStepError, FormatError

__all__ = ["ContextOptions", "LlamaContext"]

_SCRATCH = 0
_MAX_SLOTS = 256  # LLAMA_MAX_SEQ
_SLOTS_PER_SEQUENCE = 4  # running, idle and dead ones; the library keeps room for the logits of each
_MOVE_TOKENS = 256  # compaction moves this many tokens at a time, which bounds its staging memory


@dataclasses.dataclass(frozen=True, slots=True)
class ContextOptions:
    """How a context is created.

    Attributes:
        capacity_tokens: cells of the KV cache.
        max_sequences: sequences that may ask for logits in one step.
        rows: most tokens in one step; one micro-batch holds them all.
        min_rows: a step with fewer tokens is padded to this many.
        row_multiple: steps are padded to a multiple of this many tokens; divides `rows`.
        threads: threads of one step.
        flash_attention: whether to use the flash attention kernels.
    """

    capacity_tokens: int
    max_sequences: int
    rows: int
    min_rows: int
    row_multiple: int
    threads: int
    flash_attention: bool


class LlamaContext:
    """Owns a `llama_context`. Not thread-safe: one thread makes all calls."""

    def __init__(
        self, lib: Any, model: Any, options: ContextOptions, *, adapters: dict[str, tuple[Any, float]]
    ) -> None:
        self._lib = lib
        self.options = options
        self._adapters = adapters
        params = lib.llama_context_default_params()
        params.n_ctx = options.capacity_tokens
        params.n_ubatch = options.rows
        self._swa = int(lib.llama_model_n_swa(model))
        self._plain = bool(lib.llama_model_is_recurrent(model) or lib.llama_model_is_hybrid(model))
        stride = 2 if self._swa and not self._plain else 1
        slots = 1 + options.max_sequences * (1 if self._plain else _SLOTS_PER_SEQUENCE * stride)
        params.n_seq_max = min(_MAX_SLOTS, slots)
        params.n_outputs_max = max(params.n_seq_max, options.max_sequences + self._padding(options.max_sequences))
        params.n_batch = max(options.rows, params.n_seq_max)
        params.n_threads = params.n_threads_batch = options.threads
        params.flash_attn_type = int(options.flash_attention)
        params.kv_unified = True
        params.swa_full = True
        params.offload_kqv = params.op_offload = False
        params.no_perf = True
        self._handle = lib.llama_init_from_model(model, params)
        if not self._handle:
            raise BackendError(
                f"llama.cpp could not create a context of {options.capacity_tokens} tokens; "
                "open the engine with a smaller n_ctx or max_sequences"
            )
        self._memory = lib.llama_get_memory(self._handle)
        self._vocab_size = int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model)))
        self._cells = CellMap(options.capacity_tokens)
        self._sequences: dict[SequenceId, SequenceCells] = {}
        self._ids = itertools.count(1)
        self._stride = stride
        self._slots = list(range(int(params.n_seq_max) - stride, 0, -stride))
        self._batch = lib.llama_batch_init(options.rows, 0, 2)
        self._rows = _BatchArrays(self._batch, options.rows)
        self._adapter: str | None = None
        self.layout: StateLayout | None = None
        self.compactions = 0

    # Sequences

    @property
    def free_sequences(self) -> int:
        """How many sequences can be created."""
        return len(self._slots) + (0 if self._plain else len(self._cells.dead))

    @property
    def used_tokens(self) -> int:
        """Cells that live sequences hold."""
        return self._cells.live_cells

    def room(self) -> int:
        """Tokens that can still be stored; what padding rows may need is set aside."""
        reserve = max(self.options.min_rows, self.options.row_multiple)
        return max(0, self.options.capacity_tokens - self._cells.live_cells - reserve)

    def create(self, adapter: str | None = None) -> SequenceId:
        """A new empty sequence."""
        if not self._slots:
            self.compact()
        if not self._slots:
            raise BackendError("all sequences of the context are in use; release one first")
        sequence = SequenceId(next(self._ids))
        self._sequences[sequence] = SequenceCells(self._slots.pop(), adapter)
        return sequence

    def fork(self, source: SequenceId, num_tokens: int) -> SequenceId:
        """A new sequence that shares the first tokens of `source`."""
        if not self.shareable(source, num_tokens):
            raise BackendError(f"the first {num_tokens} tokens of sequence {source} can't be shared")
        record = self._sequences[source]
        sequence = self.create(record.adapter)
        target = self._sequences[sequence]
        self._cells.share(record, target, num_tokens)
        for slot in self._slots_of(target):
            self._lib.llama_memory_seq_cp(self._memory, record.slot, slot, 0, num_tokens)
        return sequence

    def shareable(self, source: SequenceId, num_tokens: int) -> bool:
        """Whether `fork(source, num_tokens)` works."""
        record = self._sequences[source]
        if self._plain or num_tokens > len(record.cells):
            return False
        if self._swa and num_tokens:
            window_start = max(0, num_tokens - self._swa)
            return int(self._lib.llama_memory_seq_pos_min(self._memory, record.slot)) <= window_start
        return True

    def release(self, sequence: SequenceId) -> None:
        """Forgets a sequence."""
        record = self._sequences.pop(sequence)
        if self._plain:
            self._remove(record)
            self._cells.recount(self._sequences.values())
            return
        self._cells.bury(record)
        trims, removed = self._cells.cut()
        for dead, position in trims:
            for slot in self._slots_of(dead):
                self._lib.llama_memory_seq_rm(self._memory, slot, position, -1)
        for dead in removed:
            self._remove(dead)

    def truncate(self, sequence: SequenceId, num_tokens: int) -> None:
        """Takes a sequence back to its first `num_tokens` tokens."""
        raise BackendError(f"sequence {sequence} can't be taken back to {num_tokens} tokens")

    def num_tokens(self, sequence: SequenceId) -> int:
        """Tokens that the sequence holds."""
        return len(self._sequences[sequence].cells)

    def _slots_of(self, record: SequenceCells) -> tuple[int, ...]:
        return (record.slot, record.slot + 1) if self._stride == 2 else (record.slot,)

    def _remove(self, record: SequenceCells) -> None:
        for slot in self._slots_of(record):
            self._lib.llama_memory_seq_rm(self._memory, slot, -1, -1)
        self._slots.append(record.slot)

    # Steps

    def step(self, work: Sequence[StepWork]) -> StepResult:
        """Processes all work items in one micro-batch."""
        records = [self._sequences[item.sequence] for item in work]
        total = sum(len(item.token_ids) for item in work)
        self._check_step(work, records, total)
        self._use_adapter(records[0].adapter)
        padding = self._padding(total)
        self._make_room(total + padding)
        rows, row = self._rows, 0
        outputs: list[int | None] = []
        for item, record in zip(work, records, strict=True):
            rows.fill(row, item.token_ids, item.start, self._slots_of(record))
            row += len(item.token_ids)
            outputs.append(row - 1 if item.logits else None)
            if item.logits:
                rows.logits[row - 1] = 1
        if padding:
            rows.fill(row, [work[0].token_ids[0]] * padding, 0, (_SCRATCH,))
        self._pad_outputs(sum(item.logits for item in work), total + padding)
        self._batch.n_tokens = total + padding
        status = int(self._lib.llama_decode(self._handle, self._batch))
        if padding:
            self._lib.llama_memory_seq_rm(self._memory, _SCRATCH, -1, -1)
        if status != 0:
            raise BackendStepError(f"llama_decode failed with status {status} on a step of {total} tokens")
        for item, record in zip(work, records, strict=True):
            self._cells.append(record, len(item.token_ids))
        return StepResult([None if index is None else self._logits(index) for index in outputs])

    def _padding(self, total: int) -> int:
        padded = max(total, self.options.min_rows)
        return padded + -padded % self.options.row_multiple - total

    def _pad_outputs(self, num_outputs: int, num_rows: int) -> None:
        """The end of the model only sees the rows whose logits are asked for, so their number is padded as well."""
        if num_outputs and (extra := self._padding(num_outputs)):
            self._rows.logits[np.flatnonzero(self._rows.logits[:num_rows] == 0)[:extra]] = 1

    def _check_step(self, work: Sequence[StepWork], records: Sequence[SequenceCells], total: int) -> None:
        if not 0 < total <= self.options.rows:
            raise BackendStepError(f"a step has {total} tokens; it must have 1 to {self.options.rows}")
        for item, record in zip(work, records, strict=True):
            if item.start != len(record.cells):
                raise BackendStepError(
                    f"a sequence holds {len(record.cells)} tokens, but a step starts at {item.start}"
                )
            if record.adapter != records[0].adapter:
                raise BackendStepError("a step mixes sequences of different adapters")

    def _logits(self, row: int) -> npt.NDArray[np.float32]:
        pointer = self._lib.llama_get_logits_ith(self._handle, row)
        if not pointer:
            raise BackendStepError(f"llama.cpp gave no logits for row {row}")
        return np.ctypeslib.as_array(pointer, (self._vocab_size,))

    def _use_adapter(self, name: str | None) -> None:
        if name == self._adapter:
            return
        if name is None:
            status = self._lib.llama_set_adapters_lora(self._handle, None, 0, None)
        else:
            handle, scale = self._adapters[name]
            array = (self._lib.llama_adapter_lora_p_ctypes * 1)(handle)
            status = self._lib.llama_set_adapters_lora(self._handle, array, 1, (ctypes.c_float * 1)(scale))
        if status != 0:
            raise BackendStepError(f"llama.cpp could not switch to the adapter {name!r}")
        self._adapter = name

    # Memory

    def _make_room(self, num_tokens: int) -> None:
        if self._cells.next_cell + num_tokens <= self.options.capacity_tokens:
            return
        if num_tokens > self.options.capacity_tokens - self._cells.live_cells:
            raise BackendStepError(f"{num_tokens} tokens don't fit; {self.room()} are free. Release a sequence first")
        self.compact()

    @property
    def wasted_tokens(self) -> int:
        """Cells that no live sequence needs but that still slow every step; `compact` frees them."""
        return self._cells.wasted_cells

    def compact(self) -> None:
        """Moves all live tokens to the lowest cells, in place and in order, a bounded piece at a time."""
        for dead in self._cells.forget_dead():
            self._remove(dead)
        if self._plain:
            return
        self.compactions += 1
        records = list(self._sequences.values())
        cells = [record.as_array() for record in records]
        occupied = np.zeros(self.options.capacity_tokens, bool)
        for own in cells:
            occupied[own] = True
        holes = np.flatnonzero(~occupied[: self._cells.next_cell])
        if not len(holes):
            self._cells.renumber(np.arange(self.options.capacity_tokens, dtype=np.int32), records)
            return
        moved = np.arange(self.options.capacity_tokens, dtype=np.int32)
        done = np.zeros(self.options.capacity_tokens, bool)
        done[: holes[0]] = True
        for own in cells:
            pending = np.flatnonzero(~done[own])
            start = int(pending[0]) if len(pending) else len(own)
            while start < len(own):
                stop = min(start + self._chunk_tokens(), len(own))
                self._move(records, cells, own, start, stop, occupied, moved)
                done[own[start:stop]] = True
                start = stop
        self._cells.renumber(moved, records)

    def _chunk_tokens(self) -> int:
        return min(_MOVE_TOKENS, self._swa) if self._swa else _MOVE_TOKENS

    def _move(
        self,
        records: list[SequenceCells],
        cells: list[npt.NDArray[np.int32]],
        own: npt.NDArray[np.int32],
        start: int,
        stop: int,
        occupied: npt.NDArray[np.bool_],
        moved: npt.NDArray[np.int32],
    ) -> None:
        """Moves positions start..stop of one sequence, and of all that share them, into the lowest free cells."""
        lib, memory = self._lib, self._memory
        slots_and_ends = []
        slot = -1
        for record, theirs in zip(records, cells, strict=True):
            end = min(stop, len(theirs))
            shared = int(np.count_nonzero(theirs[start:end] == own[start:end])) if end > start else 0
            if shared:
                slots_and_ends.append((record, start + shared))
            if theirs is own:
                slot = record.slot
        lib.llama_memory_seq_cp(memory, slot, _SCRATCH, start, stop)
        blob = self._read_scratch()
        for record, end in slots_and_ends:
            for each in self._slots_of(record):
                lib.llama_memory_seq_rm(memory, each, start, end)
        occupied[own[start:stop]] = False
        self._write_scratch(blob)
        free = np.flatnonzero(~occupied)[: stop - start].astype(np.int32)
        occupied[free] = True
        moved[own[start:stop]] = free
        for record, end in slots_and_ends:
            for each in self._slots_of(record):
                lib.llama_memory_seq_cp(memory, _SCRATCH, each, start, end)
        lib.llama_memory_seq_rm(memory, _SCRATCH, -1, -1)

    # Blocks

    def read_range(self, sequence: SequenceId, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """The state blob of positions start..stop; clears scratch again.

        Raises:
            BackendError: the library gave no state.
        """
        record = self._sequences[sequence]
        self._lib.llama_memory_seq_cp(self._memory, record.slot, _SCRATCH, start, stop)
        try:
            return self._read_scratch()
        finally:
            self._lib.llama_memory_seq_rm(self._memory, _SCRATCH, -1, -1)

    def export_range(self, sequence: SequenceId, start: int, counts: Sequence[int]) -> list[BlockPayload]:
        """Payloads of consecutive runs of `counts` tokens from position `start` on. FormatError if incomplete."""
        assert self.layout is not None
        payloads: list[BlockPayload] = []
        chunk = self._chunk_tokens()
        pending: list[int] = []
        for i, count in enumerate(counts):
            pending.append(count)
            if i + 1 == len(counts) or sum(pending) + counts[i + 1] > chunk:
                total = sum(pending)
                blob = self.read_range(sequence, start, start + total)
                payloads += self.layout.split(blob, start, pending)
                start += total
                pending = []
        return payloads

    def restore(self, sequence: SequenceId, payloads: Sequence[BlockPayload]) -> None:
        """Appends payloads to a sequence. All or nothing.

        Raises:
            BackendError: nothing was restored.
        """
        assert self.layout is not None
        record = self._sequences[sequence]
        start = len(record.cells)
        total = sum(payload.num_tokens for payload in payloads)
        if not total:
            return  # the library refuses an empty state
        try:
            blob = self.layout.join(start, payloads)
            self._make_room(total)
        except (FormatError, BackendStepError) as error:
            raise BackendError(f"blocks can't be restored: {error}") from None
        self._write_scratch(blob)
        for slot in self._slots_of(record):
            self._lib.llama_memory_seq_cp(self._memory, _SCRATCH, slot, start, start + total)
        self._lib.llama_memory_seq_rm(self._memory, _SCRATCH, -1, -1)
        self._cells.append(record, total)

    def _read_scratch(self) -> npt.NDArray[np.uint8]:
        size = int(self._lib.llama_state_seq_get_size(self._handle, _SCRATCH))
        blob = np.empty(size, np.uint8)
        pointer = blob.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        if int(self._lib.llama_state_seq_get_data(self._handle, pointer, size, _SCRATCH)) != size:
            self._lib.llama_memory_seq_rm(self._memory, _SCRATCH, -1, -1)
            raise BackendError("llama.cpp could not write the state of a sequence")
        return blob

    def _write_scratch(self, blob: npt.NDArray[np.uint8]) -> None:
        # SAFETY: `blob` outlives the call; the library copies it.
        pointer = blob.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        if int(self._lib.llama_state_seq_set_data(self._handle, pointer, len(blob), _SCRATCH)) != len(blob):
            self._lib.llama_memory_seq_rm(self._memory, _SCRATCH, -1, -1)
            raise BackendError("llama.cpp refused the state of a sequence")

    def close(self) -> None:
        """Frees the context. Idempotent."""
        if self._handle:
            self._lib.llama_batch_free(self._batch)
            self._lib.llama_free(self._handle)
            self._handle = None
            self._sequences.clear()


class _BatchArrays:
    """Numpy views of a `llama_batch`, so that a row costs no Python call per field."""

    def __init__(self, batch: Any, size: int) -> None:
        self.token = np.ctypeslib.as_array(batch.token, (size,))
        self.position = np.ctypeslib.as_array(batch.pos, (size,))
        self.num_slots = np.ctypeslib.as_array(batch.n_seq_id, (size,))
        self.logits = np.ctypeslib.as_array(batch.logits, (size,))
        self.slots = [np.ctypeslib.as_array(batch.seq_id[i], (2,)) for i in range(size)]

    def fill(self, row: int, token_ids: Sequence[int], start: int, slots: tuple[int, ...]) -> None:
        stop = row + len(token_ids)
        self.token[row:stop] = token_ids
        self.position[row:stop] = range(start, start + len(token_ids))
        self.num_slots[row:stop] = len(slots)
        self.logits[row:stop] = 0
        for view in self.slots[row:stop]:
            view[: len(slots)] = slots
