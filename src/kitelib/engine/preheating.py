"""Computing prompts before anybody asks for them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from kitelib.engine.results import Generation
from kitelib.errors import InvalidRequestError

__all__ = ["preheat"]


async def preheat(
    generate: Callable[..., Awaitable[Generation]], prompts: Sequence[Any], options: Mapping[str, Any]
) -> dict[str, int]:
    """Computes prompts one after the other; see `KiteEngine.preheat`."""
    totals = {"prompts": 0, "prompt_tokens": 0, "computed_tokens": 0}
    if isinstance(prompts, str):
        raise InvalidRequestError("preheat takes a list of prompts; put the text into a list")
    for prompt in prompts:
        chat = not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
        source: dict[str, Any] = {"messages": prompt} if chat else {"prompt": prompt}
        gen = await generate(**source, max_tokens=1, **options)
        totals["prompts"] += 1
        totals["prompt_tokens"] += gen.usage.prompt_tokens
        totals["computed_tokens"] += gen.reuse.computed_tokens
    return totals
