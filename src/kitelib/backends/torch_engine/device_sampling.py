"""Choosing the next tokens on the model's device, for requests whose options need nothing but the logits.

The rules are those of the host's sampler (temperature, exactly top_k, min_p, top_p, inverting the cumulative
distribution in order of ids with one uniform number), so a request gets the same token wherever it is drawn, except
where the last bits of a sum decide. Weights are counted in whole numbers here: their sums don't depend on the order
in which a device adds, so the same logits give the same token on every device and in every batch.

Nothing waits for the device and every shape is known in advance, so all of it can be part of a CUDA graph.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kitelib.config import GREEDY_TEMPERATURE

if TYPE_CHECKING:
    import torch

    from kitelib.abc import TokenDraw

__all__ = ["NUM_SETTINGS", "DeviceSampling", "SamplingMode", "pack_draws", "sample_rows"]

NUM_SETTINGS: Final = 5
"""Numbers per row that `pack_draws` writes."""

_MAX_TEMPERATURE: Final = 1e30  # beyond it every difference of logits is zero anyway
_SUM_BITS: Final = 62  # the weights of a whole row add up to less than 2**62
_UNUSABLE: Final = -1
_CHUNK: Final = 2**21  # logits drawn from at once: enough to keep a device busy, and bounds the memory on the way


class SamplingMode(enum.IntEnum):
    """How much work a batch of rows needs; the largest of its rows' decides."""

    GREEDY = 0
    """Every row takes its most likely token."""
    DRAW = 1
    """Some rows draw; at most min_p cuts the distribution."""
    RANK = 2
    """Some rows use top_k or top_p, for which the logits are sorted."""


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class DeviceSampling:
    """Options of a batch of rows, each float64 of shape (rows,), on the device of the logits.

    Attributes:
        temperature: below 1e-5 the row is greedy.
        top_k: 0 means all tokens stay.
        top_p: 1 means all tokens stay.
        min_p: 0 means all tokens stay.
        uniform: the number in [0, 1) that decides the draw.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    uniform: torch.Tensor

    @classmethod
    def from_packed(cls, packed: torch.Tensor) -> DeviceSampling:
        """Views of what `pack_draws` wrote, float64 (NUM_SETTINGS, rows)."""
        temperature, top_k, top_p, min_p, uniform = packed.unbind(0)
        return cls(temperature, top_k, top_p, min_p, uniform)

    def rows(self, first: int, end: int) -> DeviceSampling:
        """Views of rows `first` .. `end - 1`."""
        parts = (self.temperature, self.top_k, self.top_p, self.min_p, self.uniform)
        return DeviceSampling(*(part[first:end] for part in parts))


def pack_draws(draws: Sequence[TokenDraw | None], packed: torch.Tensor) -> SamplingMode:
    """Writes the options of each row into host memory, from where one copy takes them to the device.

    Args:
        draws: per row; None (the host samples, or the row is padding) and missing rows become greedy.
        packed: float64 (NUM_SETTINGS, rows) on the CPU, at least `len(draws)` rows.

    Returns:
        The least mode that serves all rows.
    """
    packed.zero_()
    packed[2].fill_(1.0)
    mode = SamplingMode.GREEDY
    view = packed.numpy()
    for row, draw in enumerate(draws):
        if draw is None or draw.temperature < GREEDY_TEMPERATURE:
            continue
        view[:, row] = draw.temperature, draw.top_k, draw.top_p, draw.min_p, draw.uniform
        ranks = draw.top_k > 0 or draw.top_p < 1.0
        mode = max(mode, SamplingMode.RANK if ranks else SamplingMode.DRAW)
    return mode


def sample_rows(logits: torch.Tensor, settings: DeviceSampling, mode: SamplingMode = SamplingMode.RANK) -> torch.Tensor:
    """One token per row.

    Args:
        logits: (rows, vocabulary), any floating type; -inf excludes a token.
        settings: options of the rows; not read where `mode` is GREEDY.
        mode: at least what the rows need; a lower one ignores the options that it has no work for.

    Returns:
        int64 (rows,); -1 where the largest logit is NaN or infinite.
    """
    import torch

    best = logits.argmax(dim=-1)
    peak = logits.amax(dim=-1, keepdim=True)
    token = best
    if mode is not SamplingMode.GREEDY:
        step = max(1, _CHUNK // logits.shape[-1])
        drawn = torch.cat(
            [
                _draw(
                    logits[first : first + step].float(),
                    peak[first : first + step].float(),
                    settings.rows(first, first + step),
                    ranked=mode is SamplingMode.RANK,
                )
                for first in range(0, logits.shape[0], step)
            ]
        )
        token = torch.where(settings.temperature < GREEDY_TEMPERATURE, best, drawn)
    return torch.where(peak[:, 0].isfinite(), token, _UNUSABLE)


def _draw(scores: torch.Tensor, peak: torch.Tensor, settings: DeviceSampling, *, ranked: bool) -> torch.Tensor:
    """Tokens drawn as if no row were greedy, int64 (rows,)."""
    import torch

    vocabulary = scores.shape[-1]
    temperature = settings.temperature.clamp(GREEDY_TEMPERATURE, _MAX_TEMPERATURE)[:, None]
    weights = ((scores.double() - peak) * (1.0 / temperature)).exp()
    weights = weights.masked_fill(weights < settings.min_p[:, None], 0.0)
    # Whole numbers, the largest weight 2**bits: additions are exact in any order.
    counts = (weights * 2.0 ** (_SUM_BITS - (vocabulary - 1).bit_length())).long()
    if ranked:
        counts = _keep_head(scores, counts, settings)
    sums = counts.cumsum(dim=-1)
    total = sums[:, -1]
    target = torch.minimum((settings.uniform * total.double()).long(), total - 1)
    return torch.searchsorted(sums, target[:, None], right=True)[:, 0].clamp(max=vocabulary - 1)


def _keep_head(scores: torch.Tensor, counts: torch.Tensor, settings: DeviceSampling) -> torch.Tensor:
    """`counts` (rows, vocabulary) with zeros where top_k or, of what is left, top_p drops the token."""
    import torch

    # Stable: lowest ids first among equals.
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    rank = torch.arange(scores.shape[-1], device=scores.device)
    top_k = settings.top_k[:, None]
    sorted_counts = counts.gather(-1, order).masked_fill((top_k > 0) & (rank >= top_k), 0)
    sums = sorted_counts.cumsum(dim=-1)
    top_p = settings.top_p[:, None]
    before = (sums - sorted_counts).double()
    beyond = (top_p < 1.0) & (before >= top_p * sums[:, -1:].double())
    return torch.zeros_like(counts).scatter(-1, order, sorted_counts.masked_fill(beyond, 0))
