"""Filling the pool before the first request comes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

__all__ = ["CanPreheat", "preheat_ru_pool"]


class CanPreheat(Protocol):
    """What `preheat_ru_pool` needs of an engine; `KiteEngine` has it."""

    async def preheat(self, prompts: Sequence[Any], **options: Any) -> dict[str, int]:
        """Computes prompts and keeps what they leave behind."""
        ...


async def preheat_ru_pool(engine: CanPreheat, prompts: Sequence[Any], **options: Any) -> dict[str, int]:
    """Computes prompts and keeps their units in the engine's pool: the same as ``engine.preheat(prompts)``.

    Args:
        engine: an open `KiteEngine`.
        prompts: each one a text, token ids, or a list of chat messages.
        **options: as of `KiteEngine.preheat`, e.g. ``adapter=`` or ``reuse=``.

    Returns:
        "prompts", their "prompt_tokens", and how many were "computed_tokens" this time.

    Raises:
        InvalidRequestError, UnknownAdapterError, EngineClosedError, ...: as of `KiteEngine.generate`.
    """
    return await engine.preheat(prompts, **options)
