"""`torch.ops.kitelib.attend`: attention of the current pass as one operation that compilers leave alone."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from kitelib.backends.torch_engine.kernels.ragged import ragged_attention
from kitelib.backends.torch_engine.plan import current_step

if TYPE_CHECKING:
    import torch

__all__ = ["register_ops"]

_SCHEMA = "attend(Tensor query, Tensor key, Tensor value, int layer, float scale, int window, float softcap) -> Tensor"


@functools.lru_cache(maxsize=1)
def register_ops() -> Any:
    """Makes torch know the operation; once per process. Returns what keeps it registered."""
    import torch

    make: Any = torch.library.Library  # torch doesn't say what its constructor takes
    library = make("kitelib", "FRAGMENT")
    library.define(_SCHEMA)
    library.impl("attend", _attend, "CPU")
    library.impl("attend", _attend, "CUDA")
    torch.library.register_fake("kitelib::attend", _shape_of, lib=library)
    return library


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    scale: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    """Writes the pass's KV and attends; see `paged_attention` and `AttentionKernel` for the shapes."""
    state = current_step()
    if state.wait_layer is not None:
        state.wait_layer(layer)
    cache = state.cache
    rows = _rows(query)
    if cache.layers[layer].latent:
        out = ragged_attention(rows, key, value, state.plan, scale=scale, window=window, softcap=softcap)
    else:
        out = state.kernel.attend(
            rows,
            _rows(key),
            _rows(value),
            cache.keys(layer),
            cache.values(layer),
            state.plan,
            scale=scale,
            window=window,
            softcap=softcap,
        )
    return out.unsqueeze(0)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """(rows, heads, dim) of (1, heads, rows, dim), the last dimension without gaps."""
    if tensor.stride(3) != 1:
        tensor = tensor.contiguous()
    return tensor[0].transpose(0, 1)


def _shape_of(
    query: torch.Tensor,
    key: torch.Tensor,  # noqa: ARG001 - the operation's
    value: torch.Tensor,
    layer: int,  # noqa: ARG001
    scale: float,  # noqa: ARG001
    window: int,  # noqa: ARG001
    softcap: float,  # noqa: ARG001
) -> torch.Tensor:
    return query.new_empty((1, query.shape[2], query.shape[1], value.shape[3]))
