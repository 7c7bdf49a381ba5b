"""Filling the pool before the first request comes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

__all__ = ["CanPreheat", "preheat_ru_pool"]


class CanWarm(Protocol):
    """What `preheat_ru_pool` needs of an engine's pool."""

    async def warm(self, deadline_s: float = ...) -> dict[str, str]:
        """Opens connections and indexes."""
        ...

    async def warm_hot_set(self, max_bytes: int | None = ..., deadline_s: float = ...) -> int:
        """Brings the most recently used units into process memory."""
        ...


class CanPreheat(Protocol):
    """What `preheat_ru_pool` needs of an engine; `KiteEngine` has it."""

    @property
    def pool(self) -> CanWarm:
        """The tiers."""
        ...

    async def preheat(self, prompts: Sequence[Any], **options: Any) -> dict[str, int]:
        """Computes prompts and keeps what they leave behind."""
        ...


async def preheat_ru_pool(
    engine: CanPreheat,
    prompts: Sequence[Any] = (),
    *,
    hot_set_bytes: int | None = None,
    deadline_s: float = 30.0,
    **options: Any,
) -> dict[str, Any]:
    """Makes an engine's pool ready for the first request: opens the connections and indexes of all tiers, brings the
    most recently used units of the fastest of them into process memory, and computes the prompts that are not there.

    Tiers that can't be reached are reported and left alone; requests work without them.

    Args:
        engine: an open `KiteEngine`.
        prompts: each one a text, token ids, or a list of chat messages; none by default.
        hot_set_bytes: most bytes of used units to bring; None means half of what memory may hold, at most 256 MiB; 0
            brings none.
        deadline_s: seconds that opening, and bringing units, may each take.
        **options: as of `KiteEngine.preheat`, e.g. ``adapter=`` or ``reuse=``.

    Returns:
        "tiers" (name -> "ready" or why not), "hot_units" (how many came), and what `KiteEngine.preheat` returns:
        "prompts", their "prompt_tokens", and how many were "computed_tokens" this time.

    Raises:
        InvalidRequestError, UnknownAdapterError, EngineClosedError, ...: as of `KiteEngine.generate`.
    """
    tiers = await engine.pool.warm(deadline_s)
    hot_units = 0 if hot_set_bytes == 0 else await engine.pool.warm_hot_set(hot_set_bytes, deadline_s)
    return {"tiers": tiers, "hot_units": hot_units, **await engine.preheat(prompts, **options)}
