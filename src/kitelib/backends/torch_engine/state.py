"""The model state of a torch model: what of it enters fingerprints."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from kitelib.errors import ModelFormatError
from kitelib.fingerprint import encode_fields

__all__ = ["config_digest", "torch_model_state"]

# Names, bookkeeping and what only concerns generation or training. Whatever is not listed counts: a field too many
# costs a miss, one too few would be a wrong answer.
_NOT_NUMBERS = frozenset(
    {
        "_name_or_path",
        "architectures",
        "auto_map",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "finetuning_task",
        "id2label",
        "initializer_range",
        "label2id",
        "name_or_path",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "task_specific_params",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)


def torch_model_state(
    weights: bytes, config: Mapping[str, Any], *, weights_dtype: str, kv_dtype: str, settings: Mapping[str, Any]
) -> bytes:
    """`ModelInfo.model_state`, 32 bytes.

    Args:
        weights: digest of the weight files' content.
        config: what the folder's config.json says; empty for a GGUF file, whose digest covers its header.
        weights_dtype, kv_dtype: what the weights and the KV cache are kept in, e.g. "bfloat16".
        settings: what kitelib itself changes about the model's numbers (RoPE, attention), by name.

    Raises:
        ModelFormatError: the config holds values that JSON has no form for.
    """
    fields = encode_fields(
        "kite.torch-model", weights, weights_dtype, kv_dtype, _canonical(config), _canonical(settings)
    )
    return hashlib.sha256(fields).digest()


def config_digest(config: Mapping[str, Any], settings: Mapping[str, Any]) -> bytes:
    """Digest of a configuration and of what kitelib changes about it, 32 bytes; arguments as of `torch_model_state`."""
    return hashlib.sha256(encode_fields(_canonical(config), _canonical(settings))).digest()


def _canonical(config: Mapping[str, Any]) -> str:
    """The same text for the same settings, whatever their order and however they are spaced."""
    try:
        return json.dumps(_without_names(config), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise ModelFormatError(f"the model's config.json can't be understood: {error}") from error


def _without_names(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _without_names(each) for key, each in value.items() if key not in _NOT_NUMBERS}
    return [_without_names(each) for each in value] if isinstance(value, (list, tuple)) else value
