"""Models and adapters with random weights for vLLM, written without any package but those that vLLM brings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["BLOCK", "write_llama", "write_lora"]

BLOCK = 32
"""Tokens in a block in these tests."""

_LAYERS, _HIDDEN, _INTERMEDIATE, _HEADS, _KV_HEADS, _VOCAB = 12, 512, 2048, 8, 2, 512


def write_llama(folder: Path, seed: int) -> Path:
    """A Llama of 46 million random weights in bfloat16, no tokenizer."""
    import torch
    from safetensors.torch import save_file

    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float) -> Any:
        return (torch.randn(shape, generator=rng) * std).to(torch.bfloat16)

    kv = _HIDDEN // _HEADS * _KV_HEADS
    weights = {
        "model.embed_tokens.weight": normal(_VOCAB, _HIDDEN, std=1.0),
        "model.norm.weight": torch.ones(_HIDDEN, dtype=torch.bfloat16),
        "lm_head.weight": normal(_VOCAB, _HIDDEN, std=3 * _HIDDEN**-0.5),
    }
    for layer in range(_LAYERS):
        name = f"model.layers.{layer}"
        for matrix, outputs, inputs in (
            ("self_attn.q_proj", _HIDDEN, _HIDDEN),
            ("self_attn.k_proj", kv, _HIDDEN),
            ("self_attn.v_proj", kv, _HIDDEN),
            ("self_attn.o_proj", _HIDDEN, _HIDDEN),
            ("mlp.gate_proj", _INTERMEDIATE, _HIDDEN),
            ("mlp.up_proj", _INTERMEDIATE, _HIDDEN),
            ("mlp.down_proj", _HIDDEN, _INTERMEDIATE),
        ):
            weights[f"{name}.{matrix}.weight"] = normal(outputs, inputs, std=inputs**-0.5)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{name}.{norm}.weight"] = torch.ones(_HIDDEN, dtype=torch.bfloat16)
    folder.mkdir(parents=True)
    save_file(weights, str(folder / "model.safetensors"), {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": _VOCAB,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def write_lora(folder: Path, seed: int, rank: int = 8) -> Path:
    """An adapter of the query and value matrices, as PEFT saves it."""
    import torch
    from safetensors.torch import save_file

    rng = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(_LAYERS):
        for matrix, outputs in (("q_proj", _HIDDEN), ("v_proj", _HIDDEN // _HEADS * _KV_HEADS)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{matrix}"
            tensors[f"{name}.lora_A.weight"] = torch.randn((rank, _HIDDEN), generator=rng) * _HIDDEN**-0.5
            tensors[f"{name}.lora_B.weight"] = torch.randn((outputs, rank), generator=rng) * 0.3
    folder.mkdir(parents=True)
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "llama",
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
