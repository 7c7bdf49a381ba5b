"""Linear layers on the CPU with weights in the layout that oneDNN's matrix kernels want.

A plain linear rearranges its weights in every call, or runs a slower kernel on them as they are. Rearranged once, a
step of a small model in bfloat16 takes about a sixth less time.

**Memory.** The rearranged copy lives in memory of its own, about as large as the weights. Weights that were mapped from
a file are no longer touched, so the system takes their pages back when it needs them; others are freed. Weights that
something else uses as well (an output layer tied to the input embeddings) stay, and the copy comes on top.

It can't be undone: the plain weights are gone. Load the model again for them.

**Tiles.** oneDNN sums in one order for few rows and in another for many. Where a row's bits must not depend on the number
of rows, a pass is computed in tiles of so few rows that one order holds for all (`RowTile`). The weights of one linear
mostly stay in the cache from tile to tile.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["PackedLinears", "RowTile", "pack_linears"]

_MIN_ELEMENTS = 4096
"""Smaller weights (routers, gates) gain nothing."""


@dataclasses.dataclass(slots=True)
class RowTile:
    """How many rows the packed linears of a model compute at once; 0 means all of them."""

    rows: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class PackedLinears:
    """What `pack_linears` did.

    Attributes:
        modules: linears that run on rearranged weights.
        left: linears that were left as they are.
        packed_bytes: memory of the rearranged weights.
        kept_bytes: of these, how many exist a second time because something else uses the plain weights.
        tile: read by all of them in every call.
    """

    modules: int
    left: int
    packed_bytes: int
    kept_bytes: int
    tile: RowTile


def pack_linears(model: torch.nn.Module) -> PackedLinears:
    """Replaces the linears of a model on the CPU by ones with rearranged weights, in place.

    Left alone are linears of a subclass, with hooks, on another device or of a type that oneDNN does not compute with
    here, and everything where torch has no oneDNN. The replacements keep `in_features`, `out_features` and `bias`; they
    have no `weight`. Pack before adapters are attached.
    """
    import torch

    owners, tile = _owners(model), RowTile()
    plain: Any = torch.nn.Linear
    places: list[tuple[Any, str, Any]] = [
        (parent, name, child)
        for parent in list(model.modules())
        for name, child in parent._modules.items()  # `named_children` leaves out what it has named before
        if type(child) is plain
    ]
    made: dict[int, torch.nn.Module] = {}
    packed = kept = 0
    left: set[int] = set()
    for parent, name, linear in places:
        if id(linear) in made:
            setattr(parent, name, made[id(linear)])
            continue
        if not _can_pack(linear):
            left.add(id(linear))
            continue
        made[id(linear)] = replacement = _packed_linear(linear, tile)
        setattr(parent, name, replacement)
        size = linear.weight.numel() * linear.weight.element_size()
        packed += size
        kept += size if owners[linear.weight.untyped_storage().data_ptr()] > 1 else 0
    # `places` holds the plain linears, and so their weights, until here.
    return PackedLinears(len(made), len(left), packed, kept, tile)


def _owners(model: torch.nn.Module) -> dict[int, int]:
    """How many modules use the memory of each parameter."""
    found: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.device.type == "cpu":
                address = parameter.untyped_storage().data_ptr()
                found[address] = found.get(address, 0) + 1
    return found


def _can_pack(linear: torch.nn.Linear) -> bool:
    import torch

    mkldnn: Any = torch.backends.mkldnn
    weight = linear.weight
    if weight.device.type != "cpu" or weight.numel() < _MIN_ELEMENTS or weight.layout != torch.strided:
        return False
    if linear._forward_hooks or linear._forward_pre_hooks or not mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def _packed_linear(linear: torch.nn.Linear, tile: RowTile) -> torch.nn.Module:
    return _packed_type()(linear, tile)  # type: ignore[no-any-return]


_types: list[Any] = []


def _packed_type() -> Any:
    """The class, made when torch is there: importing this module does not import torch."""
    if _types:
        return _types[0]
    import torch

    class PackedLinear(torch.nn.Module):
        """A linear on rearranged weights; computes what `torch.nn.Linear` does."""

        def __init__(self, linear: torch.nn.Linear, tile: RowTile) -> None:
            super().__init__()
            self.in_features, self.out_features = linear.in_features, linear.out_features
            # No parameter: nothing must move, convert or save this opaque tensor.
            self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
            self.bias = linear.bias
            self.tile = tile
            self.eval()

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            """(..., in_features) to (..., out_features)."""
            size = self.tile.rows
            if not size or rows.numel() <= size * self.in_features:
                return self._multiply(rows)
            flat = rows.reshape(-1, self.in_features)
            out = rows.new_empty((len(flat), self.out_features))
            for start in range(0, len(flat), size):
                out[start : start + size] = self._multiply(flat[start : start + size])
            return out.view(*rows.shape[:-1], self.out_features)

        def _multiply(self, rows: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.packed, self.bias, "none", [], "")
            return out

        def extra_repr(self) -> str:
            return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    _types.append(PackedLinear)
    return PackedLinear
