"""Attention on the CPU in native code (csrc/src/attend.c): bits of a row don't depend on what else is in the pass."""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from kitelib.backends.torch_engine.kernels.openmp import parallel_function
from kitelib.errors import BackendStepError
from kitelib.native.attention import BFLOAT16, FLOAT16, FLOAT32, AttentionCall
from kitelib.native.library import BEST, NativeLibrary, native_library, native_note

if TYPE_CHECKING:
    import torch

    from kitelib.backends.torch_engine.plan import StepPlan

__all__ = ["NativeAttention", "native_attention", "native_attention_note"]

_ALIGN: Final = 64
_ITEM_LINES: Final = 96
"""Query vectors of an item: enough to make up for turning keys and values into floats, few enough to share work."""

_ALONE_PAIRS: Final = 1024
"""Up to so many pairs of a row and a key, times KV heads (some 15 us), waking other threads gains nothing."""

Int32s = npt.NDArray[np.int32]


class _Work(threading.local):
    """Scratch memory of the C code, kept between steps."""

    space: npt.NDArray[np.uint8] | None = None

    def of(self, num_bytes: int) -> int:
        """Address of so many bytes, aligned."""
        if self.space is None or len(self.space) < num_bytes + _ALIGN:
            self.space = np.empty(num_bytes + _ALIGN, np.uint8)
        address: int = self.space.ctypes.data
        return address + -address % _ALIGN


class _Step:
    """What stays the same for the layers of a pass: the arguments that come from its plan, and the work items."""

    __slots__ = ("alike", "call", "items", "layout", "pairs", "pointer", "rows_per_item", "shared")

    def __init__(self, plan: StepPlan, kernel: int, run: int | None, threads: int) -> None:
        self.call = call = AttentionCall()
        self.pointer = ctypes.byref(call)
        self.layout: Any = None
        self.shared: tuple[int, ...] = ()
        self.rows_per_item = self.pairs = 0
        self.items: Int32s | None = None
        tables = plan.tables
        assert tables.stride(-1) == 1
        call.slots, call.row_starts = plan.slots.data_ptr(), plan.row_starts.data_ptr()
        call.contexts, call.tables = plan.contexts.data_ptr(), tables.data_ptr()
        call.table_width = tables.stride(0)
        call.rows, call.num_sequences = plan.num_rows, plan.num_sequences
        call.kernel, call.run, call.threads = kernel, run, threads
        # A thread that does all KV heads of a sequence reads memory in one go, if there are enough sequences for that.
        self.alike = plan.max_rows <= 1 and plan.max_context * 4 * threads <= int(plan.contexts.sum())

    def cut(self, plan: StepPlan, rows: int) -> None:
        """Makes items of up to so many rows, those with most work first."""
        if rows == self.rows_per_item:
            return
        count = plan.num_sequences
        starts, contexts = plan.row_starts.numpy()[: count + 1], plan.contexts.numpy()[:count]
        new_rows = np.diff(starts)
        if plan.max_rows <= 1:
            items = np.zeros((count, 3), np.int32)
            items[:, 0], items[:, 2] = np.arange(count), new_rows
            cost = contexts
        else:
            parts = -(-new_rows // rows)
            sequence = np.repeat(np.arange(count), parts)
            first = (np.arange(len(sequence)) - np.repeat(np.cumsum(parts) - parts, parts)) * rows
            length = np.minimum(rows, new_rows[sequence] - first)
            items = np.stack((sequence, first, length), axis=1).astype(np.int32)
            cost = length * (contexts - new_rows)[sequence] + length * (first + length // 2)
        self.pairs = int((new_rows.astype(np.int64) * contexts).sum())
        self.items = items = np.ascontiguousarray(items[np.argsort(-cost, kind="stable")])
        self.call.items, self.call.num_items, self.call.item_rows = items.ctypes.data, len(items), rows
        self.rows_per_item = rows


class NativeAttention:
    """`AttentionKernel` for the CPU, in bfloat16, float16 or float32.

    Args:
        library: the native library.
        kernel: which machine code runs; all are as exact, but only the same one gives the same bits.
        threads: threads to use; None means as many as torch does.
    """

    name = "native"
    row_invariant = True

    def __init__(self, library: NativeLibrary, kernel: int = BEST, threads: int | None = None) -> None:
        import torch

        self._library = library
        self._attend = library.attend
        self._kernel = kernel
        self._threads = threads
        self._run = parallel_function()
        self._kinds = {torch.bfloat16: BFLOAT16, torch.float16: FLOAT16, torch.float32: FLOAT32}
        self._empty, self._num_threads = torch.empty, torch.get_num_threads
        self._work = _Work()

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_pages: torch.Tensor,
        value_pages: torch.Tensor,
        plan: StepPlan,
        *,
        scale: float,
        window: int,
        softcap: float,
    ) -> torch.Tensor:
        step = plan.scratch
        if type(step) is not _Step:  # none yet, or what the latent layers of the same model keep
            step = plan.scratch = _Step(plan, self._kernel, self._run, self._threads or self._num_threads())
        call = step.call
        layout = (query.shape, query.stride(), key.stride(), value.shape, value.stride(), key_pages.dtype)
        if layout != step.layout or query.dtype is not key_pages.dtype:
            self._lay_out(step, plan, query, key, value, key_pages, value_pages)
            step.layout = layout
        out = self._empty((query.shape[0], query.shape[1], value.shape[2]), dtype=query.dtype)
        call.query, call.key, call.value = query.data_ptr(), key.data_ptr(), value.data_ptr()
        call.key_pages, call.value_pages, call.out = key_pages.data_ptr(), value_pages.data_ptr(), out.data_ptr()
        call.scale, call.softcap, call.window = scale, softcap, window
        if self._attend(step.pointer):
            raise BackendStepError(
                f"the native attention kernel {self._kernel} refuses {query.shape[1]} query heads, {key.shape[1]} KV "
                f"heads, key dim {query.shape[2]}, value dim {value.shape[2]}; use the kernel 'gathered'"
            )
        return out

    def _lay_out(
        self,
        step: _Step,
        plan: StepPlan,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_pages: torch.Tensor,
        value_pages: torch.Tensor,
    ) -> None:
        """Sets the arguments that follow from shapes and strides."""
        dtype = key_pages.dtype
        if dtype not in self._kinds or any(each.dtype is not dtype for each in (query, key, value, value_pages)):
            raise BackendStepError(
                f"attention got {query.dtype} rows for a KV cache of {dtype}; both must be the same one of bfloat16, "
                "float16 and float32"
            )
        assert query.stride(2) == key.stride(2) == value.stride(2) == 1
        call = step.call
        (rows, query_heads, key_dim), (_, kv_heads, value_dim) = query.shape, value.shape
        assert rows == plan.num_rows
        call.query_row, call.query_head = query.stride(0), query.stride(1)
        call.key_row, call.key_head = key.stride(0), key.stride(1)
        call.value_row, call.value_head = value.stride(0), value.stride(1)
        call.key_block, call.value_block = key_pages.stride(0), value_pages.stride(0)
        call.block_tokens, call.query_heads, call.kv_heads = key_pages.shape[1], query_heads, kv_heads
        call.key_dim, call.value_dim, call.kind = key_dim, value_dim, self._kinds[dtype]
        rows_per_item = max(1, _ITEM_LINES * kv_heads // max(1, query_heads))
        step.cut(plan, min(rows_per_item, max(1, plan.max_rows)))
        call.item_heads = kv_heads if step.alike else 1
        call.run = self._run if step.pairs * kv_heads > _ALONE_PAIRS else None
        shared = (query_heads, kv_heads, key_dim, value_dim)
        if shared != step.shared:
            needed = self._library.attend_scratch(step.pointer) * call.threads
            call.scratch, call.scratch_bytes = self._work.of(needed), needed
            step.shared = shared


@functools.lru_cache(maxsize=1)
def native_attention() -> NativeAttention | None:
    """The kernel, or None without the native library; `native_attention_note` says why."""
    library = native_library()
    return None if library is None else NativeAttention(library)


def native_attention_note() -> str:
    """Why there is no native attention and how to get it, for people; "" if there is."""
    return native_note()
