"""The attention function that Hugging Face models call, and the cache object that latent attention asks."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kitelib.backends.torch_engine.pages import LayerShape
from kitelib.backends.torch_engine.plan import current_step
from kitelib.errors import UnsupportedOptionError

if TYPE_CHECKING:
    import torch

__all__ = ["ATTENTION", "LatentCache", "record_shapes", "register_attention"]

ATTENTION = "kite_paged"
"""Name under which transformers knows `paged_attention`."""


# What models hand on to their attention that says nothing, or what is known anyway.
_HARMLESS = frozenset(
    [
        "cache",
        "cache_position",
        "dropout",
        "is_causal",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    ]
)


class _Recorder(threading.local):
    attended: dict[int, LayerShape] | None = None
    cached: dict[int, LayerShape] | None = None


_recorder = _Recorder()


def register_attention() -> None:
    """Makes transformers know the attention function. Without a mask function of the same name it builds no mask
    either. Idempotent."""
    from transformers import AttentionInterface

    from kitelib.backends.torch_engine.kernels.op import register_ops

    register_ops()
    AttentionInterface.register(ATTENTION, paged_attention)


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer in a step; see transformers' attention interface.

    Args:
        module: the layer's attention module; has `layer_idx`.
        query: (1, query heads, rows, key dim).
        key: (1, KV heads, rows, key dim); for latent attention, of all tokens of all sequences.
        value: (1, KV heads, rows, value dim), likewise.
        attention_mask: None.
        scaling: factor of the scores.
        sliding_window: tokens that a row sees, itself included; None or 0 means all.
        softcap: see `AttentionKernel.attend`.
        others: what changes nothing here; `record_shapes` refuses all else.

    Returns:
        (1, rows, query heads, value dim), and None for the weights.
    """
    import torch

    if _recorder.attended is not None:
        _check_plain(attention_mask, others)
        _recorder.attended[int(module.layer_idx)] = _shape(key, value, latent=False)
        return query.new_zeros((1, query.shape[2], query.shape[1], value.shape[3])), None
    out: torch.Tensor = torch.ops.kitelib.attend(
        query, key, value, module.layer_idx, scaling, sliding_window or 0, softcap or 0.0
    )
    return out, None


def _check_plain(attention_mask: torch.Tensor | None, others: Mapping[str, Any]) -> None:
    unknown = sorted(name for name, value in others.items() if value is not None and name not in _HARMLESS)
    if attention_mask is not None:
        unknown.append("attention_mask")
    if unknown:
        raise UnsupportedOptionError(
            f"the model's attention wants {', '.join(unknown)}, which the attention kernels don't do"
        )


def _shape(key: torch.Tensor, value: torch.Tensor, *, latent: bool) -> LayerShape:
    return LayerShape(key.shape[1], key.shape[3], value.shape[1], value.shape[3], latent)


class LatentCache:
    """What layers with latent attention call to keep their latents, and to get those of all tokens back.

    Layers whose kept values are what attention sees get them back as they are: their attention reads the pages.
    """

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keeps the rows' values, (1, heads, rows, channels) each; gives those that the layer goes on with."""
        if _recorder.cached is not None:
            _recorder.cached[layer] = _shape(key, value, latent=True)
            return key, value
        step = current_step()
        if not step.cache.layers[layer].latent:
            return key, value
        if step.wait_layer is not None:
            step.wait_layer(layer)
        return _keep(key, step.cache.keys(layer), step.plan), _keep(value, step.cache.values(layer), step.plan)

    def get_seq_length(self, *_: Any) -> int:
        """Positions are always given, so nothing hangs on it."""
        return 0


def _keep(rows: torch.Tensor, pages: torch.Tensor, plan: Any) -> torch.Tensor:
    size = pages.shape[1]
    slots = plan.slots[: plan.num_real]
    pages[slots // size, slots % size] = rows[0].transpose(0, 1)[: plan.num_real]
    found = pages[plan.history // size, plan.history % size]
    return found.transpose(0, 1)[None]


@contextmanager
def record_shapes() -> Iterator[dict[int, LayerShape]]:
    """While it is entered, layers on this thread compute no attention; it gives what each of them keeps per token,
    complete at the end.

    Raises:
        UnsupportedOptionError: a layer's attention wants something that no kernel does.
    """
    shapes: dict[int, LayerShape] = {}
    _recorder.attended, _recorder.cached = {}, {}
    try:
        yield shapes
        for layer, attended in _recorder.attended.items():
            cached = _recorder.cached.get(layer)
            kept = None if cached is None else (cached.key_heads, cached.key_dim, cached.value_heads, cached.value_dim)
            seen = (attended.key_heads, attended.key_dim, attended.value_heads, attended.value_dim)
            shapes[layer] = attended if cached is None or kept == seen else cached
    finally:
        _recorder.attended = _recorder.cached = None
