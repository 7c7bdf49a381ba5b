"""What tests compare when they say that an answer is the same, and how they make an engine forget its context."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kitelib import KiteEngine, ReusePolicy
from kitelib.engine.results import Generation

__all__ = ["ONE_STEP", "REUSE_OFF", "answer", "cold_answer", "evict_to_pool", "prompt_of"]

REUSE_OFF = ReusePolicy(mode="off")
ONE_STEP = ReusePolicy(zero_prefill=False)
"""Reuses KV, but computes the last prompt token even if its logits are stored."""


def prompt_of(num_tokens: int, seed: int, vocab_size: int = 49152) -> list[int]:
    """Token ids from the middle of a vocabulary, so no control tokens; other seeds give unrelated prompts."""
    rng = np.random.default_rng([num_tokens, seed])
    return [int(token) for token in rng.integers(vocab_size // 16, vocab_size - vocab_size // 16, num_tokens)]


def answer(gen: Generation) -> list[Mapping[str, Any]]:
    """Everything of a generation that reuse must not change: all choices with texts, ids and log-probabilities."""
    return [
        {
            "token_ids": choice.token_ids,
            "text": choice.text,
            "finish_reason": choice.finish_reason,
            "logprobs": choice.logprobs,
        }
        for choice in gen.choices
    ]


async def cold_answer(engine: KiteEngine, prompt: list[int], **options: Any) -> list[Mapping[str, Any]]:
    """The answer with reuse off; fails if anything was reused all the same."""
    gen = await engine.generate(prompt, reuse=REUSE_OFF, **options)
    assert gen.usage.cached_tokens == 0
    return answer(gen)


async def evict_to_pool(engine: KiteEngine) -> None:
    """Stores everything that is finished, then empties the context, so that only the pool can help."""
    await engine.flush()
    serving = engine._current
    await serving.on_model_thread(serving.memory.evict_all)
    assert engine.stats()["idle_sequences"] == 0
