"""What every way to compute attention over the paged cache implements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from kitelib.backends.torch_engine.plan import StepPlan

__all__ = ["AttentionKernel"]


class AttentionKernel(Protocol):
    """Writes the new rows' KV to their pages, then lets every row attend to its sequence up to and including itself.

    The bits of a row may depend only on its query and on the keys and values it sees (their number included), never
    on other rows, on the other sequences of the pass, or on which blocks hold them, if `row_invariant` says so.
    """

    name: str
    row_invariant: bool

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
        """Attention of all rows of a pass in one layer.

        Args:
            query: (rows, query heads, key dim), any strides but the last, which is 1. Query head h uses KV head
                h // (query heads // KV heads).
            key: (rows, KV heads, key dim), like query.
            value: (rows, KV heads, value dim), like query.
            key_pages: (blocks, block tokens, KV heads, key dim), a view: the stride of the first dimension is larger
                than one page, the others are contiguous.
            value_pages: (blocks, block tokens, KV heads, value dim), like key_pages.
            plan: whose rows they are; rows of padding (slot -1) are not written, and their output is 0.
            scale: factor of the scores.
            window: a row at position i sees positions j with i - window < j <= i; 0 means all j <= i.
            softcap: scores become softcap * tanh(score / softcap) before the softmax; 0 means they stay.

        Returns:
            (rows, query heads, value dim), contiguous, in the type of `query`. Sums are kept in float32.
        """
        ...
