"""The yardstick: llama.cpp driven through its C API, with nothing around `llama_decode` but an argmax."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
from lite_clock import Span, Stopwatch

__all__ = ["BareContext", "BareModel", "ContextOptions", "Row"]


@dataclasses.dataclass(frozen=True, slots=True)
class ContextOptions:
    """Context parameters that change the speed.

    Attributes:
        threads: threads of prefill and decode.
        flash_attention: fused attention kernels.
        num_ubatch_tokens: most tokens llama.cpp computes at once.
        num_context_tokens: KV cells, all sequences together.
        max_sequences: most sequences.
    """

    threads: int
    flash_attention: bool
    num_ubatch_tokens: int
    num_context_tokens: int = 4096
    max_sequences: int = 32

    def __str__(self) -> str:
        return f"flash attention {'on' if self.flash_attention else 'off'}, n_ubatch {self.num_ubatch_tokens}"


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One token of a batch: what, where, for which sequence, and whether its logits are wanted."""

    token: int
    position: int
    sequence: int
    logits: bool


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _silent(level: int, text: bytes, user_data: Any) -> None:
    return None


class BareModel:
    """A model file, loaded once for all bare contexts of a run."""

    def __init__(self, path: str) -> None:
        llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self.handle: Any = llama_cpp.llama_model_load_from_file(path.encode(), params)
        if not self.handle:
            raise SystemExit(f"llama.cpp cannot load {path}; give the path of a GGUF file with --model")
        self._vocab: Any = llama_cpp.llama_model_get_vocab(self.handle)
        self.vocab_size: int = llama_cpp.llama_vocab_n_tokens(self._vocab)

    def tokenize(self, text: str) -> list[int]:
        data = text.encode()
        ids = (llama_cpp.llama_token * (len(data) + 8))()
        count = llama_cpp.llama_tokenize(self._vocab, data, len(data), ids, len(ids), False, False)
        return list(ids[:count])

    def detokenize(self, ids: Sequence[int]) -> str:
        piece = ctypes.create_string_buffer(256)
        parts = []
        for token in ids:
            size = llama_cpp.llama_token_to_piece(self._vocab, token, piece, len(piece), 0, False)
            parts.append(piece.raw[: max(size, 0)])
        return b"".join(parts).decode(errors="replace")

    def context(self, options: ContextOptions) -> BareContext:
        return BareContext(self, options)

    def close(self) -> None:
        llama_cpp.llama_model_free(self.handle)


class BareContext:
    """One llama.cpp context with a unified KV cache and one reused batch."""

    def __init__(self, model: BareModel, options: ContextOptions) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = options.num_context_tokens
        params.n_batch = max(2048, options.num_ubatch_tokens)
        params.n_ubatch = options.num_ubatch_tokens
        params.n_seq_max = options.max_sequences
        params.n_threads = params.n_threads_batch = options.threads
        params.flash_attn_type = 1 if options.flash_attention else 0
        params.kv_unified = True
        params.swa_full = True
        params.offload_kqv = params.op_offload = False
        self._handle: Any = llama_cpp.llama_init_from_model(model.handle, params)
        if not self._handle:
            raise SystemExit(f"llama.cpp cannot make a context with {options}")
        self._memory: Any = llama_cpp.llama_get_memory(self._handle)
        self._vocab_size = model.vocab_size
        self._capacity = params.n_batch
        self._batch: Any = llama_cpp.llama_batch_init(self._capacity, 0, 1)
        shape = (self._capacity,)
        self._tokens = np.ctypeslib.as_array(self._batch.token, shape)
        self._positions = np.ctypeslib.as_array(self._batch.pos, shape)
        self._num_sequences = np.ctypeslib.as_array(self._batch.n_seq_id, shape)
        self._wanted = np.ctypeslib.as_array(self._batch.logits, shape)
        self._num_sequences[:] = 1

    def decode(self, rows: Sequence[Row]) -> list[npt.NDArray[np.float32]]:
        """One `llama_decode`; logits of shape (vocab_size,) where asked, valid until the next call."""
        count = len(rows)
        self._batch.n_tokens = count
        self._tokens[:count] = [row.token for row in rows]
        self._positions[:count] = [row.position for row in rows]
        self._wanted[:count] = [row.logits for row in rows]
        for index, row in enumerate(rows):
            self._batch.seq_id[index][0] = row.sequence
        code = llama_cpp.llama_decode(self._handle, self._batch)
        if code != 0:
            raise RuntimeError(f"llama_decode returned {code} for {count} tokens")
        shape = (self._vocab_size,)
        return [
            np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self._handle, index), shape)
            for index, row in enumerate(rows)
            if row.logits
        ]

    def extend(self, sequence: int, ids: Sequence[int], start: int = 0) -> int:
        """Evaluates `ids` at position `start`; the most likely next token."""
        last = len(ids) - 1
        rows = [Row(token, start + i, sequence, i == last) for i, token in enumerate(ids)]
        return int(self.decode(rows)[0].argmax())

    def time_extend(self, sequence: int, ids: Sequence[int], start: int) -> Span:
        """Time from tokens to the next token; the tokens are removed again."""
        watch = Stopwatch()
        self.extend(sequence, ids, start)
        span = watch.span()
        llama_cpp.llama_memory_seq_rm(self._memory, sequence, start, -1)
        return span

    def time_batch(self, prompts: Sequence[Sequence[int]], num_new_tokens: int) -> tuple[Span, Span]:
        """Prefills all prompts in one batch, then decodes them together, greedily.

        Returns:
            Time to the first tokens, time in all. The context is empty again afterwards.
        """
        watch = Stopwatch()
        rows = [
            Row(token, position, sequence, position == len(ids) - 1)
            for sequence, ids in enumerate(prompts)
            for position, token in enumerate(ids)
        ]
        tokens = [int(logits.argmax()) for logits in self.decode(rows)]
        first = watch.span()
        for step in range(num_new_tokens - 1):
            rows = [Row(token, len(prompts[s]) + step, s, True) for s, token in enumerate(tokens)]
            tokens = [int(logits.argmax()) for logits in self.decode(rows)]
        total = watch.span()
        self.clear()
        return first, total

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(self._memory, True)

    def close(self) -> None:
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._handle)
