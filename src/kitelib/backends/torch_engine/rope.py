"""Moves keys to another position: finds out how the loaded model rotates them (RoPE, Su et al. 2021), and proves it.

A rotary key is R(p) k: channels are turned in pairs by angles that grow linearly with the position p. Rotations by p and
by d make one by p + d, so a key that was computed at p becomes the key at p + d without its hidden state. That holds
for every kind of scaling whose frequencies don't depend on the length of the text, and for a constant factor on top.

Nothing is taken from the name of an architecture. A token that sees only itself has the same hidden states wherever it
stands, in every layer: its attention is its own value. So one pass over a few tokens, each alone and at several positions,
gives all layers' keys for the same hidden states, and what turns those of one position into those of another is searched
among the model's own frequencies. A layer without positions keeps its keys as they are. If nothing fits, or if values
change with the position, the model is refused.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    import torch

    from kitelib.backends.torch_engine.plan import StepPlan

__all__ = ["KeyRotation", "RecordKeys", "find_rotations", "model_frequencies"]

Form = Literal["none", "halves", "pairs"]

_NOISE: Final = 4.0
"""Roundings, in units of the type's precision, by which two ways to the same key may differ."""
_ANGLE_NOISE: Final = 2.0**-23
"""Relative precision of an angle: models compute position times frequency in float32."""


@dataclasses.dataclass(frozen=True, slots=True)
class KeyRotation:
    """How a layer's keys depend on their position.

    Attributes:
        form: which channels are turned together: "halves" the first with the one half of the rotary channels further on,
            "pairs" each even one with its neighbour; "none" if keys don't depend on the position.
        frequencies: float64 (rotary channels / 2,): radians per position; None for "none". Channels behind the rotary
            ones stay.
    """

    form: Form
    frequencies: torch.Tensor | None = None

    def move(self, keys: torch.Tensor, distance: int) -> torch.Tensor:
        """The keys as they are `distance` positions further on, computed in float32.

        Args:
            keys: (tokens, heads, channels) of any float type.
            distance: positions; may be negative.

        Returns:
            The same shape and type; `keys` itself if nothing changes.
        """
        import torch

        if self.frequencies is None or not distance:
            return keys
        angles = self.frequencies * distance
        cos, sin = angles.cos().float(), angles.sin().float()
        count = len(cos)
        moved = keys.to(torch.float32, copy=True)
        if self.form == "halves":
            first, second = moved[..., :count], moved[..., count : 2 * count]
        else:
            first, second = moved[..., 0 : 2 * count : 2], moved[..., 1 : 2 * count : 2]
        turned = first * cos - second * sin
        second.copy_(second * cos + first * sin)
        first.copy_(turned)
        return moved.to(keys.dtype)


class RecordKeys:
    """An `AttentionKernel` for rows that see only themselves: gives each row its own value, writes no page, and keeps the
    keys and values of every layer.

    Attributes:
        found: address of the layer's key pages -> keys (rows, KV heads, key dim) and values, in float32.
    """

    name = "record"
    row_invariant = True

    def __init__(self) -> None:
        self.found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_pages: torch.Tensor,
        value_pages: torch.Tensor,  # noqa: ARG002 - the kernels' contract
        plan: StepPlan,  # noqa: ARG002
        **_: Any,
    ) -> torch.Tensor:
        """See `AttentionKernel.attend`."""
        self.found[key_pages.data_ptr()] = (key.float().clone(), value.float().clone())
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1).to(query.dtype).contiguous()


def model_frequencies(model: torch.nn.Module) -> list[torch.Tensor]:
    """The different rotary frequencies that the model keeps, float64 (rotary channels / 2,) each, on its device.

    transformers keeps them as buffers called ``inv_freq``, with the scaling of the configuration in them, and one for each
    kind of layer where these differ.
    """
    import torch

    found: list[torch.Tensor] = []
    for name, buffer in model.named_buffers():
        if not name.endswith("inv_freq") or buffer.dim() != 1 or not buffer.is_floating_point():
            continue
        values = buffer.to(torch.float64)
        if not any(values.shape == other.shape and torch.equal(values, other) for other in found):
            found.append(values)
    return found


def find_rotations(
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    positions: Sequence[int],
    frequencies: Sequence[torch.Tensor],
    precision: float,
) -> tuple[KeyRotation, ...] | str:
    """How each layer turns its keys, or why they can't be moved.

    Args:
        keys: per layer, float32 (positions, tokens, heads, channels): the same tokens at each position, each seeing only
            itself.
        values: likewise.
        positions: of the first dimension; at least two.
        frequencies: what the model may turn keys by.
        precision: relative rounding of the model's type, e.g. 2**-7 for bfloat16.
    """
    tolerance = _NOISE * precision + _ANGLE_NOISE * max(positions)
    found = []
    for layer, (layer_keys, layer_values) in enumerate(zip(keys, values, strict=True)):
        if _error(layer_values[1:], layer_values[:1].expand_as(layer_values[1:])) > tolerance:
            return (
                f"layer {layer} computes other values for the same token at another position: the model adds positions to "
                "its hidden states (learned or sinusoidal position embeddings)"
            )
        rotations = list(_candidates(layer_keys.shape[-1], frequencies))
        errors = [_moving_error(rotation, layer_keys, positions) for rotation in rotations]
        best = min(range(len(rotations)), key=errors.__getitem__)
        if not errors[best] <= tolerance:  # not a number is no proof either
            return (
                f"no rotation of the model's own turns the keys of layer {layer} from one position to another (the best is "
                f"off by {errors[best]:.2g} of a key's length, allowed is {tolerance:.2g})"
            )
        found.append(rotations[best])
    if all(rotation.form == "none" for rotation in found):
        return "its keys don't depend on the position, so positions are told apart in some other way (such as ALiBi)"
    return tuple(found)


def _candidates(channels: int, frequencies: Sequence[torch.Tensor]) -> Iterator[KeyRotation]:
    yield KeyRotation("none")
    for values in frequencies:
        if 2 * len(values) <= channels:
            yield KeyRotation("halves", values)
            yield KeyRotation("pairs", values)


def _moving_error(rotation: KeyRotation, keys: torch.Tensor, positions: Sequence[int]) -> float:
    """The largest error of any move between neighbouring positions, and from the last one back to the first."""
    worst = 0.0
    for source in range(len(positions)):
        target = (source + 1) % len(positions)
        moved = rotation.move(keys[source], positions[target] - positions[source])
        error = _error(moved, keys[target])
        worst = error if math.isnan(error) else max(worst, error)
    return worst


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest distance of two vectors, in lengths of the wanted one."""
    distance = (found - wanted).norm(dim=-1)
    return float((distance / wanted.norm(dim=-1).clamp_min(1e-30)).max())
