"""Attention over keys and values that the model's own layer has just expanded from its cache (latent attention)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kitelib.backends.torch_engine.kernels.gathered import scores_attention

if TYPE_CHECKING:
    import torch

    from kitelib.backends.torch_engine.plan import StepPlan

__all__ = ["ragged_attention"]


def ragged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: StepPlan,
    *,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """Attention of all rows of a pass, sequence by sequence.

    Args:
        query: (rows, query heads, key dim).
        key: (1, KV heads, tokens of all sequences, key dim): sequences follow each other as in the plan, each with
            its whole context.
        value: (1, KV heads, tokens of all sequences, value dim).
        plan: whose rows they are.
        scale: factor of the scores.
        window: how many tokens a row sees, itself included; 0 means all.
        softcap: bound of the scores; 0 means none.

    Returns:
        (rows, query heads, value dim), contiguous; rows of padding are 0.
    """
    if type(plan.scratch) is not tuple:
        plan.scratch = (plan.row_starts.tolist(), plan.contexts.tolist())
    starts, contexts = plan.scratch
    out = query.new_zeros((query.shape[0], query.shape[1], value.shape[3]))
    begin = 0
    for i in range(plan.num_sequences):
        rows, end = slice(starts[i], starts[i + 1]), begin + contexts[i]
        seen = scores_attention(
            query[rows].transpose(0, 1)[None],
            key[:, :, begin:end],
            value[:, :, begin:end],
            scale=scale,
            window=window,
            softcap=softcap,
        )
        out[rows] = seen[0].transpose(0, 1)
        begin = end
    return out
