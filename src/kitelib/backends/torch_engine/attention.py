"""The attention function that Hugging Face models call, and the cache object that latent attention asks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["ATTENTION", "register_attention"]

ATTENTION = "kite_paged"
"""Name under which transformers knows `paged_attention`."""


def register_attention() -> None:
    """Makes transformers know the attention function; once per process. Without a mask function of the same name it
    builds no mask either."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, paged_attention)


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001 - the interface's; there is none
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer in a step; see transformers' attention interface.

    Args:
        query: (1, query heads, rows, key dim).
        key: (1, KV heads, rows, key dim); for latent attention, of all tokens of all sequences.
        value: (1, KV heads, rows, value dim), likewise.

    Returns:
        (1, rows, query heads, value dim), and None for the weights.
    """
    import torch

    out: torch.Tensor = torch.ops.kitelib.attend(
        query, key, value, module.layer_idx, scaling, sliding_window or 0, softcap or 0.0
    )
    return out, None
