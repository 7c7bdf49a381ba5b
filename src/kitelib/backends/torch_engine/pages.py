"""Memory of the paged KV cache: one arena in which a block holds the KV of its tokens for all layers, in one piece.

A block is laid out as a recyclable unit is: K of every layer, then V of every layer, each (tokens, heads, channels).
So a block leaves or enters the cache with one copy, and any free block serves any sequence.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["LayerShape", "PagedCache", "block_bytes"]


@dataclasses.dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps per token: (heads, channels) of what the model's code calls its keys and its values.

    Attributes:
        latent: the kept values are not what attention sees, but what the layer expands into it (multi-head latent
            attention).
    """

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    latent: bool = False

    @property
    def key_width(self) -> int:
        """Elements of a token's key."""
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Elements of a token's value."""
        return self.value_heads * self.value_dim


def block_bytes(layers: Sequence[LayerShape], block_tokens: int, item_bytes: int) -> int:
    """Bytes of one block, all layers."""
    return sum(each.key_width + each.value_width for each in layers) * block_tokens * item_bytes


class PagedCache:
    """The arena and its views.

    Attributes:
        arena: (blocks, elements of a block), on the model's device.
        widths: channels per token of every segment: K of all layers, then V of all layers.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        import torch

        self.layers = tuple(layers)
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.widths = [*(each.key_width for each in layers), *(each.value_width for each in layers)]
        self._starts = [0, *itertools.accumulate(width * block_tokens for width in self.widths)]
        # Zeros: what no row has written yet must at least be a number where a kernel masks it out.
        self.arena = torch.zeros((num_blocks, self._starts[-1]), dtype=dtype, device=device)
        heads = [
            *((each.key_heads, each.key_dim) for each in layers),
            *((each.value_heads, each.value_dim) for each in layers),
        ]
        self._views = [
            self.arena[:, start : start + block_tokens * width].view(num_blocks, block_tokens, *shape)
            for start, width, shape in zip(self._starts, self.widths, heads, strict=False)
        ]

    def keys(self, layer: int) -> torch.Tensor:
        """Key pages of a layer: (blocks, block tokens, heads, channels)."""
        return self._views[layer]

    def values(self, layer: int) -> torch.Tensor:
        """Value pages of a layer: (blocks, block tokens, heads, channels)."""
        return self._views[len(self.layers) + layer]

    def segments(self, block: int) -> list[torch.Tensor]:
        """The segments of one block, each (block tokens, channels)."""
        row = self.arena[block]
        return [
            row[start : start + self.block_tokens * width].view(self.block_tokens, width)
            for start, width in zip(self._starts, self.widths, strict=False)
        ]

    @property
    def uniform_width(self) -> int | None:
        """Channels per token of every segment if all are alike, else None."""
        return self.widths[0] if len(set(self.widths)) == 1 else None
