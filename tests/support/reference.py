"""The least code that runs a GGUF file through llama.cpp: what tests compare the library with.

Calls the low-level bindings only, with one thread and one context per run, so that nothing is ever reused.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

__all__ = ["Reference", "open_reference"]


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _discard_log(level: int, text: bytes, user_data: ctypes.c_void_p) -> None:
    """Keep llama.cpp from writing to stderr; it holds one callback for the whole process."""


class Reference:
    """A loaded model. Not thread-safe; made by `open_reference`."""

    def __init__(self, model: ctypes.c_void_p) -> None:
        self._model = model
        self._vocab = llama_cpp.llama_model_get_vocab(model)
        self._adapters: list[tuple[Any, float]] = []

    @property
    def is_recurrent(self) -> bool:
        """Whether the model keeps a running state instead of a KV cache."""
        return bool(llama_cpp.llama_model_is_recurrent(self._model))

    @property
    def is_hybrid(self) -> bool:
        """Whether the model has both a running state and a KV cache."""
        return bool(llama_cpp.llama_model_is_hybrid(self._model))

    @property
    def window(self) -> int:
        """Sliding attention window, tokens; 0 means none."""
        return int(llama_cpp.llama_model_n_swa(self._model))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, which is also the number of logits."""
        return int(llama_cpp.llama_vocab_n_tokens(self._vocab))

    def tokenize(self, text: str) -> list[int]:
        """Token ids of ``text``, special tokens recognized, none added."""
        data = text.encode()
        ids = (llama_cpp.llama_token * (len(data) + 1))()
        count = llama_cpp.llama_tokenize(self._vocab, data, len(data), ids, len(ids), False, True)
        if count < 0:
            raise RuntimeError(f"llama_tokenize needs room for {-count} tokens, had {len(ids)}")
        return list(ids[:count])

    def apply_lora(self, path: Path, scale: float = 1.0) -> None:
        """Use the adapter ``path`` in every later run.

        Raises:
            RuntimeError: llama.cpp rejects the adapter.
        """
        adapter = llama_cpp.llama_adapter_lora_init(self._model, str(path).encode())
        if not adapter:
            raise RuntimeError(f"llama.cpp cannot load the adapter {path}")
        self._adapters.append((adapter, scale))

    def logits(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Logits after each token of one prefill of ``tokens``; shape (len(tokens), vocab_size)."""
        with self._context(len(tokens)) as context:
            self._decode(context, tokens, 0)
            return self._rows(context, len(tokens))

    def greedy(self, prompt: Sequence[int], count: int) -> tuple[list[int], npt.NDArray[np.float32]]:
        """Decode ``count`` tokens after ``prompt``, end-of-text tokens included.

        Returns:
            The tokens, and the logits each was chosen from, shape (count, vocab_size).
        """
        chosen: list[int] = []
        rows: list[npt.NDArray[np.float32]] = []
        with self._context(len(prompt) + count) as context:
            step: Sequence[int] = prompt
            for _ in range(count):
                self._decode(context, step, len(prompt) + len(chosen) - len(step) if chosen else 0)
                rows.append(self._rows(context, len(step))[-1])
                chosen.append(int(np.argmax(rows[-1])))
                step = chosen[-1:]
        return chosen, np.stack(rows)

    @contextlib.contextmanager
    def _context(self, n_tokens: int) -> Iterator[ctypes.c_void_p]:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = n_tokens + 8
        params.n_threads = params.n_threads_batch = 1
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        context = llama_cpp.llama_init_from_model(self._model, params)
        if not context:
            raise RuntimeError(f"llama.cpp cannot make a context of {params.n_ctx} tokens")
        try:
            if self._adapters:
                adapters = (llama_cpp.llama_adapter_lora_p_ctypes * len(self._adapters))(
                    *[adapter for adapter, _ in self._adapters]
                )
                scales = (ctypes.c_float * len(self._adapters))(*[scale for _, scale in self._adapters])
                code = llama_cpp.llama_set_adapters_lora(context, adapters, len(self._adapters), scales)
                if code != 0:
                    raise RuntimeError(f"llama_set_adapters_lora returned {code}")
            yield context
        finally:
            llama_cpp.llama_free(context)

    def _decode(self, context: ctypes.c_void_p, tokens: Sequence[int], first_position: int) -> None:
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        try:
            batch.n_tokens = len(tokens)
            for i, token in enumerate(tokens):
                batch.token[i] = token
                batch.pos[i] = first_position + i
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = 0
                batch.logits[i] = 1
            code = llama_cpp.llama_decode(context, batch)
            if code != 0:
                raise RuntimeError(f"llama_decode returned {code} for {len(tokens)} tokens at {first_position}")
        finally:
            llama_cpp.llama_batch_free(batch)

    def _rows(self, context: ctypes.c_void_p, count: int) -> npt.NDArray[np.float32]:
        shape = (count, self.vocab_size)
        # Copied: the memory belongs to the context.
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), shape=shape).copy()


@contextlib.contextmanager
def open_reference(path: Path) -> Iterator[Reference]:
    """Load the GGUF file ``path`` and free it at the end.

    Raises:
        RuntimeError: llama.cpp rejects the file.
    """
    llama_cpp.llama_log_set(_discard_log, None)
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    if not model:
        raise RuntimeError(f"llama.cpp cannot load {path}")
    try:
        yield Reference(model)
    finally:
        llama_cpp.llama_model_free(model)
