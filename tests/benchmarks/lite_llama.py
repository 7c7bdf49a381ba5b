"""The first peer: `llama_cpp.Llama`, the high-level class of llama-cpp-python, with and without `LlamaRAMCache`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import llama_cpp
from llama_cpp.llama_cache import LlamaRAMCache

__all__ = ["LlamaPeer"]


class LlamaPeer:
    """One `llama_cpp.Llama` with its defaults; only threads and context length are set.

    Args:
        model: GGUF file.
        threads: threads of prefill and decode.
        num_context_tokens: context length, tokens.
        ram_cache: keep and reuse states with `LlamaRAMCache` (its default bound, 2 GiB).
    """

    def __init__(self, model: str, threads: int, *, num_context_tokens: int = 4096, ram_cache: bool = False) -> None:
        self._llama: Any = llama_cpp.Llama(
            model_path=model, n_ctx=num_context_tokens, n_threads=threads, n_threads_batch=threads, verbose=False
        )
        if ram_cache:
            self._llama.set_cache(LlamaRAMCache())

    def ttft(self, prompt: str | Sequence[int]) -> float:
        """Seconds from the call to the first streamed token."""
        return self.complete(prompt, 1)[0]

    def complete(self, prompt: str | Sequence[int], max_tokens: int) -> tuple[float, float, str]:
        """Seconds to the first streamed token, seconds in all, and the text."""
        argument = prompt if isinstance(prompt, str) else list(prompt)
        begin = time.perf_counter()
        first, text = 0.0, []
        for chunk in self._llama.create_completion(
            prompt=argument, max_tokens=max_tokens, temperature=0.0, stream=True
        ):
            first = first or time.perf_counter() - begin
            text.append(chunk["choices"][0]["text"])
        return first, time.perf_counter() - begin, "".join(text)

    def one_after_the_other(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
        """Tokens per second over all prompts, each a plain blocking call."""
        begin, num_tokens = time.perf_counter(), 0
        for ids in prompts:
            result = self._llama.create_completion(prompt=list(ids), max_tokens=max_tokens, temperature=0.0)
            num_tokens += result["usage"]["completion_tokens"]
        return num_tokens / (time.perf_counter() - begin)

    def close(self) -> None:
        self._llama.close()
