"""Attention in plain torch on any device: each sequence's blocks are gathered, then seen by torch's own attention."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from kitelib.backends.torch_engine.plan import StepPlan

__all__ = ["GatheredAttention", "hidden_mask", "scores_attention"]

_MOST_PADDING = 2.0
"""A decode step runs as one padded call if that computes at most so many times the work."""


class GatheredAttention:
    """`AttentionKernel` that needs nothing but torch. Its speed is that of copying the KV once more per layer."""

    name = "gathered"
    row_invariant = False

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
        if type(plan.scratch) is not tuple:
            plan.scratch = (plan.row_starts.tolist(), plan.contexts.tolist())
        starts, contexts = plan.scratch
        starts, contexts = starts[: plan.num_sequences + 1], contexts[: plan.num_sequences]
        used = starts[-1]
        block = key_pages.shape[1]
        slots = plan.slots[:used]
        numbers, offsets = slots // block, slots % block
        key_pages.index_put_((numbers, offsets), key[:used])
        value_pages.index_put_((numbers, offsets), value[:used])

        out = query.new_zeros((query.shape[0], query.shape[1], value.shape[2]))
        longest = max(contexts, default=0)
        if plan.max_rows <= 1 and len(contexts) > 1 and longest * len(contexts) <= _MOST_PADDING * sum(contexts):
            out[:used] = _decode(query[:used], key_pages, value_pages, plan, longest, scale, window, softcap)
            return out
        for i, context in enumerate(contexts):
            rows = slice(starts[i], starts[i + 1])
            table = plan.tables[i, : -(-context // block)]
            keys = key_pages[table].flatten(0, 1)[:context].transpose(0, 1)[None]
            values = value_pages[table].flatten(0, 1)[:context].transpose(0, 1)[None]
            seen = scores_attention(
                query[rows].transpose(0, 1)[None], keys, values, scale=scale, window=window, softcap=softcap
            )
            out[rows] = seen[0].transpose(0, 1)
        return out


def _decode(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    plan: StepPlan,
    longest: int,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """One row per sequence, all in one call. Returns (sequences, query heads, value dim)."""
    import torch

    count = len(query)
    contexts = plan.contexts[:count]
    width = -(-longest // key_pages.shape[1])
    # Tables may hold anything beyond a sequence's blocks.
    here = torch.arange(width, device=query.device) * key_pages.shape[1] < contexts[:, None]
    tables = torch.where(here, plan.tables[:count, :width], 0)
    keys = key_pages[tables].flatten(1, 2).transpose(1, 2)
    values = value_pages[tables].flatten(1, 2).transpose(1, 2)
    place = torch.arange(keys.shape[2], device=query.device)
    seen = place < contexts[:, None]
    # What no row has written may be anything, and 0 times infinity is no number.
    beyond = ~seen[:, None, :, None]
    keys.masked_fill_(beyond, 0)
    values.masked_fill_(beyond, 0)
    if window:
        seen &= place >= contexts[:, None] - window
    return _attention(query[:, :, None], keys, values, seen[:, None, None], scale, softcap)[:, :, 0]


def scores_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Causal attention of the last rows of one sequence.

    Args:
        query: (1, query heads, rows, key dim); the last row is the last key's.
        key: (1, KV heads, tokens, key dim).
        value: (1, KV heads, tokens, value dim).
        scale: factor of the scores.
        window: how many tokens a row sees, itself included; 0 means all.
        softcap: bound of the scores; 0 means none.

    Returns:
        (1, query heads, rows, value dim).
    """
    rows, context = query.shape[2], key.shape[2]
    plain = rows == 1 and not 0 < window < context
    seen = None if plain else ~hidden_mask(rows, context, window, query.device)
    return _attention(query, key, value, seen, scale, softcap)


def hidden_mask(rows: int, context: int, window: int, device: torch.device) -> torch.Tensor:
    """Which of `context` keys each of the last `rows` rows must not see: bool (rows, context)."""
    import torch

    place = torch.arange(context, device=device)
    position = place[context - rows :, None]
    hidden = place > position
    return hidden | (place <= position - window) if window else hidden


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: torch.Tensor | None,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """Attention with an explicit mask; (batch, heads, tokens, dim) throughout."""
    import torch

    if not softcap:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.matmul(query.float(), key.float().transpose(2, 3)).mul_(scale / softcap).tanh_().mul_(softcap)
    if seen is not None:
        scores.masked_fill_(~seen, -math.inf)
    return torch.matmul(torch.softmax(scores, -1), value.float()).to(query.dtype)
