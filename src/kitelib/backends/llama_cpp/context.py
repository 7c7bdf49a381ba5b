"""One llama.cpp context: sequences, steps, and blocks in and out of its unified KV cache.

Sequence ids of the library ("slots"): 0 is scratch (blocks on their way in or out, padding rows), one is the graveyard
of cells that rejected drafts leave behind, the others hold live and dead sequences (see cells.py). For sliding-window models every sequence has a second slot, its shadow, that
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
from kitelib.backends.llama_cpp.batch import BatchRows
from kitelib.backends.llama_cpp.blocks import StateLayout
from kitelib.backends.llama_cpp.cells import CellMap, Cut, SequenceCells
from kitelib.backends.llama_cpp.compaction import move_down
from kitelib.backends.llama_cpp.kv_memory import SCRATCH, KvMemory
from kitelib.backends.llama_cpp.placing import Piece, Placement, place
from kitelib.errors import BackendError, BackendStepError, FormatError

__all__ = ["ContextOptions", "LlamaContext"]

_MAX_SLOTS = 256  # LLAMA_MAX_SEQ
_SLOTS_PER_SEQUENCE = 4  # running, idle and dead ones; the library keeps room for the logits of each
_OUTPUT_BYTES = 64 * 2**20  # for the logits of one step: 64 rows of 262,144 token ids
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
        self._vocab_size = int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model)))
        most = min(options.rows, max(options.max_sequences, _OUTPUT_BYTES // (4 * self._vocab_size)))
        self.max_outputs = 0 if self._plain else most
        slots = 1 + (
            options.max_sequences if self._plain else (options.max_sequences * _SLOTS_PER_SEQUENCE + 1) * stride
        )
        params.n_seq_max = min(_MAX_SLOTS, slots)
        params.n_outputs_max = max(
            params.n_seq_max, *(count + self._padding(count) for count in (options.max_sequences, self.max_outputs))
        )
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
        self._memory = KvMemory(lib, self._handle, stride)
        self._cells = CellMap(options.capacity_tokens)
        self._sequences: dict[SequenceId, SequenceCells] = {}
        self._ids = itertools.count(1)
        self._slots = list(range(int(params.n_seq_max) - stride, 0, -stride))
        self._graveyard = SCRATCH if self._plain else self._slots.pop(0)
        self._batch = lib.llama_batch_init(options.rows, 0, 2)
        self._rows = BatchRows(self._batch, options.rows)
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
        self._memory.share(record.slot, target.slot, 0, num_tokens)
        return sequence

    def shareable(self, source: SequenceId, num_tokens: int) -> bool:
        """Whether `fork(source, num_tokens)` works."""
        record = self._sequences[source]
        if self._plain or num_tokens > len(record.cells):
            return False
        if self._swa and num_tokens:
            window_start = max(0, num_tokens - self._swa)
            return self._memory.first_position(record.slot) <= window_start
        return True

    def release(self, sequence: SequenceId) -> None:
        """Forgets a sequence."""
        record = self._sequences.pop(sequence)
        if self._plain:
            self._remove(record)
            self._cells.recount(self._sequences.values())
            return
        self._cells.bury(record)
        self._clear(self._cells.cut())

    def truncate(self, sequence: SequenceId, num_tokens: int) -> None:
        """See `kitelib.abc.Backend.truncate`. What is taken back leaves the cache with the next step."""
        record = self._sequences[sequence]
        held = len(record.cells)
        if not 0 <= num_tokens <= held:
            raise BackendError(f"sequence {sequence} holds {held} tokens, so it can't be taken back to {num_tokens}")
        if not self.max_outputs:
            raise BackendError("the state of this model can't be taken back; don't process drafts with it")
        self._cells.take_back(record, num_tokens)

    def num_tokens(self, sequence: SequenceId) -> int:
        """Tokens that the sequence holds."""
        return len(self._sequences[sequence].cells)

    def _remove(self, record: SequenceCells) -> None:
        self._memory.forget(record.slot)
        self._slots.append(record.slot)

    def _clear(self, cut: Cut) -> None:
        for dead, position in cut.trims:
            self._memory.forget(dead.slot, position)
        for dead in cut.removed:
            self._remove(dead)
        for start, stop in _ranges(cut.graves):
            self._memory.forget(self._graveyard, start, stop)

    # Steps

    def step(self, work: Sequence[StepWork]) -> StepResult:
        """Processes all work items in one micro-batch."""
        records = [self._sequences[item.sequence] for item in work]
        total = sum(len(item.token_ids) for item in work)
        self._check_step(work, records, total)
        self._use_adapter(records[0].adapter)
        padding = self._padding(total)
        self._make_room(total + padding)
        placement = self._place(work, records)
        outputs: list[Sequence[int]] = []  # rows of each item's outputs
        for item, record, rows in zip(work, records, placement.rows, strict=True):
            self._rows.fill(rows, item.token_ids, item.start, self._memory.slots_of(record.slot))
            outputs.append(rows[-1 - item.drafts :] if item.logits else ())
            for row in outputs[-1]:
                self._rows.logits[row] = 1
        if padding:
            self._rows.fill(range(total, total + padding), [work[0].token_ids[0]] * padding, 0, (SCRATCH,))
        self._pad_outputs(sum(map(len, outputs)), total + padding)
        self._batch.n_tokens = total + padding
        status = int(self._lib.llama_decode(self._handle, self._batch))
        if padding:
            self._memory.clear_scratch()
        if status != 0:
            if placement.cells[0] < self._cells.next_cell:
                self.compact()  # the step was to fill holes, and they may not stay
            raise BackendStepError(f"llama_decode failed with status {status} on a step of {total} tokens")
        for record, rows in zip(records, placement.rows, strict=True):
            self._cells.assign(record, [placement.cells[row] for row in rows])
        logits = [self._logits(rows[-1]) if rows else None for rows in outputs]
        if not any(item.drafts for item in work):
            return StepResult(logits)
        return StepResult(logits, draft_logits=[[self._logits(row) for row in rows[:-1]] for rows in outputs])

    def _place(self, work: Sequence[StepWork], records: Sequence[SequenceCells]) -> Placement:
        """Gives each token of a step a row, and so a cell; what was taken back before leaves the cache."""
        holes = self._open_tails()
        pieces = [
            Piece(record.cells[-1] if record.cells else -1, len(item.token_ids), item.drafts)
            for item, record in zip(work, records, strict=True)
        ]
        placement = place(pieces, holes, self._cells.next_cell)
        self._close_tails(placement.unfilled)
        return placement

    def _open_tails(self) -> list[int]:
        """Cuts the top of the cache off; the cells below it that tails leave behind. `_close_tails` has to follow."""
        if not (tails := [record for record in self._sequences.values() if record.tail]):
            return []
        free = self._cells.drop_tails(tails)
        self._clear(self._cells.cut())
        return [cell for cell in free if cell < self._cells.next_cell]

    def _close_tails(self, keep: Sequence[int]) -> None:
        """Removes all tails from the cache, but for these cells, which go to the graveyard."""
        kept = set(keep)
        for record in self._sequences.values():
            if not record.tail:
                continue
            held = len(record.cells)
            graves = {held + i: cell for i, cell in enumerate(record.tail) if cell in kept}
            for start, stop in _ranges(list(graves)):
                self._memory.share(record.slot, self._graveyard, start, stop)
            for position, cell in graves.items():
                self._cells.bury_cell(cell, position)
            kept.difference_update(graves.values())
            self._memory.forget(record.slot, held)
            del record.tail[:]

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
            if not 0 <= item.drafts < len(item.token_ids):
                raise BackendStepError(
                    f"{item.drafts} of {len(item.token_ids)} tokens are drafts; the first can't be one"
                )
        if any(item.drafts for item in work) and not self.max_outputs:
            raise BackendStepError("a step has drafts, but the state of this model can't be taken back")
        outputs = sum(1 + item.drafts for item in work if item.logits)
        if self.max_outputs and outputs > self.max_outputs:
            raise BackendStepError(
                f"a step wants logits after {outputs} tokens; at most {self.max_outputs} are possible"
            )

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
        self._memory.forget(self._graveyard)
        self._close_tails(())
        moved = move_down(
            self._memory, records, self.options.capacity_tokens, self._cells.next_cell, self._chunk_tokens()
        )
        self._cells.renumber(moved, records)

    def _chunk_tokens(self) -> int:
        return min(_MOVE_TOKENS, self._swa) if self._swa else _MOVE_TOKENS

    # Blocks

    def read_range(self, sequence: SequenceId, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """The state blob of positions start..stop; clears scratch again.

        Raises:
            BackendError: the library gave no state.
        """
        return self._memory.read(self._sequences[sequence].slot, start, stop)

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
        self._close_tails(self._open_tails())
        self._memory.write_scratch(blob)
        self._memory.share(SCRATCH, record.slot, start, start + total)
        self._memory.clear_scratch()
        self._cells.append(record, total)

    def close(self) -> None:
        """Frees the context. Idempotent."""
        if self._handle:
            self._lib.llama_batch_free(self._batch)
            self._lib.llama_free(self._handle)
            self._handle = None
            self._sequences.clear()


def _ranges(positions: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending positions as runs (first, one past the last)."""
    found: list[tuple[int, int]] = []
    for position in positions:
        if found and found[-1][1] == position:
            found[-1] = (found[-1][0], position + 1)
        else:
            found.append((position, position + 1))
    return found
