"""Models that can't be served over a paged KV cache, and why."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from kitelib.errors import UnsupportedOptionError

__all__ = ["refuse_config", "refuse_model", "rope_settings"]

_ATTENDING = {"full_attention", "sliding_attention", "attention"}
_FEED_FORWARD = {"dense", "sparse", "mlp", "moe"}
_RECURRENT_SETTINGS = (
    "ssm_cfg",
    "mamba_d_state",
    "conv_L_cache",
    "linear_num_key_heads",
    "ssm_state_size",
    "lru_width",
)


def refuse_config(whole: Any, config: Any, path: pathlib.Path) -> None:
    """Raises for a model whose configuration shows that it can't be served.

    Args:
        whole: transformers' configuration of the folder.
        config: the language model's part of it; often the same.
        path: the folder or file, for the message.

    Raises:
        UnsupportedOptionError: says why and what to do.
    """
    reason = _kind_reason(whole, config) or _attention_reason(config) or _rope_reason(config)
    if reason is not None:
        raise UnsupportedOptionError(f"{str(path)!r} (model type {config.model_type!r}) can't be served: {reason}")


def refuse_model(model: Any, architecture: str) -> None:
    """Raises for a model whose modules show that it can't be served.

    Raises:
        UnsupportedOptionError: it has attention sinks, or looks ahead.
    """
    # Sinks are extra logits in the softmax; implementations keep them as a parameter of the attention.
    sinks = [name for name, _ in model.named_parameters() if name.rsplit(".", 1)[-1] in {"sinks", "sink", "s_aux"}]
    if sinks:
        raise UnsupportedOptionError(f"{architecture!r} {_SINKS} ({sinks[0]})")
    for name, module in model.named_modules():
        # Only attention modules of decoders know their layer; those of an encoder say that they are not causal.
        if getattr(module, "layer_idx", None) is not None and getattr(module, "is_causal", True) is False:
            raise UnsupportedOptionError(
                f"{architecture!r} looks ahead ({name}), so it is no model that continues a text; use a decoder-only one"
            )


def rope_settings(config: Any) -> list[Mapping[str, Any]]:
    """The model's RoPE settings: one mapping, or one per kind of layer."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(found, Mapping):
        return []
    nested = [each for each in found.values() if isinstance(each, Mapping)]
    return nested or [found]


_SINKS = "adds attention sinks to the softmax, which the attention kernels don't have"


def _kind_reason(whole: Any, config: Any) -> str | None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    quantized = getattr(whole, "quantization_config", None) or getattr(config, "quantization_config", None)
    if quantized is not None:
        method = (
            quantized.get("quant_method") if isinstance(quantized, Mapping) else getattr(quantized, "quant_method", "")
        )
        if str(getattr(method, "value", method)) != "gguf":
            return f"its weights are quantized ({method or 'method unknown'}); only unquantized weights can be used"
    if getattr(whole, "is_encoder_decoder", False) or getattr(config, "is_encoder_decoder", False):
        return "it has an encoder; only decoder-only language models can be served"
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return "transformers has no causal language model for it"
    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if isinstance(model, (tuple, list)):
        model = model[0]
    if getattr(model, "_is_stateful", False) or any(getattr(config, each, None) for each in _RECURRENT_SETTINGS):
        return "some of its layers keep a recurrent state instead of KV"
    if not getattr(model, "_supports_attention_backend", False):
        return "transformers' code for it does not let the attention be replaced"
    if getattr(config, "transformers_weights", None) or getattr(config, "fusion_config", None):
        return "its config.json renames weight files or replaces layers (transformers_weights, fusion_config)"
    return None


def _attention_reason(config: Any) -> str | None:
    kinds = set(getattr(config, "layer_types", None) or ()) - _ATTENDING - _FEED_FORWARD
    if "chunked_attention" in kinds or getattr(config, "attention_chunk_size", None):
        return "its attention is cut into chunks, which the attention kernels don't do"
    if kinds:
        return f"it has layers of the kinds {', '.join(sorted(kinds))}; only full and sliding attention can be served"
    if getattr(config, "is_causal", True) is False or getattr(config, "use_bidirectional_attention", None) is True:
        return "its attention looks ahead, so it is no model that continues a text"
    if getattr(config, "model_type", "") == "gpt_oss":
        return f"it {_SINKS}"
    if getattr(config, "index_topk", None):
        return "it selects the keys of each token (sparse attention), which the attention kernels don't do"
    if getattr(config, "num_kv_shared_layers", None):
        return "some of its layers use the KV of other layers"
    return None


def _rope_reason(config: Any) -> str | None:
    kinds = {str(rope.get("rope_type", rope.get("type", ""))) for rope in rope_settings(config)}
    if "dynamic" in kinds:
        return (
            "its RoPE factors depend on the length of the text (dynamic NTK), so KV of a token changes when others "
            "follow; use a model with static RoPE"
        )
    return None
