"""LoRA adapters written by the PEFT library on small random models, with PEFT's own model as the reference.

torch, transformers and peft are imported by the functions.
"""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

__all__ = ["edit_config", "edit_tensors", "small_model", "write_adapter"]

_STD = 0.3  # makes what an adapter adds as large as what the small models' linears give


def small_model(architecture: str = "llama", *, seed: int = 0, **overrides: Any) -> Any:
    """A random model of two layers in float32, on the CPU."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
    }
    config = AutoConfig.for_model(architecture, **{**settings, **overrides})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    _randomize(dict(model.named_parameters()), seed, 0.2)
    return model


def write_adapter(folder: Path, model: Any, *, seed: int = 0, dtype: str = "float32", **options: Any) -> Any:
    """Writes a random adapter for `model` and returns PEFT's own model with it; `model` itself stays as it is.

    Args:
        folder: made if needed.
        model: the base model.
        seed: the same arguments give the same adapter.
        dtype: type of the numbers in the file.
        options: of ``LoraConfig``; by default rank 4 on the attention.
    """
    import torch
    from peft import LoraConfig, get_peft_model

    defaults: dict[str, Any] = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj"],
        "lora_dropout": 0.1,
        "init_lora_weights": True,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT comments on settings that are meant here
        adapted = get_peft_model(copy.deepcopy(model), LoraConfig(**{**defaults, **options})).eval()
        named = {name: each for name, each in adapted.named_parameters() if "lora_" in name}
        _randomize(named, seed + 1, _STD)
        for each in named.values():
            each.data = each.data.to(getattr(torch, dtype)).to(torch.float32)
        # PEFT computes with 16-bit adapters in float32; the file has what they were.
        saved = copy.deepcopy(adapted)
        for name, each in saved.named_parameters():
            if "lora_" in name:
                each.data = each.data.to(getattr(torch, dtype))
        saved.save_pretrained(str(folder), save_embedding_layers=False)
    return adapted


def edit_config(folder: Path, **values: Any) -> Path:
    """Changes fields of an adapter's configuration; returns the folder."""
    path = folder / "adapter_config.json"
    plain = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps({**plain, **values}), "utf-8")
    return folder


def edit_tensors(folder: Path, edit: Any) -> Path:
    """Gives an adapter's tensors (name -> torch tensor) to `edit`, which changes the mapping; returns the folder."""
    from safetensors.torch import load_file, save_file

    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file({name: each.contiguous() for name, each in tensors.items()}, path, metadata={"format": "pt"})
    return folder


def _randomize(parameters: dict[str, Any], seed: int, std: float) -> None:
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, each in parameters.items():
            if "norm" not in name:
                each.copy_(torch.randn(each.shape, generator=generator) * std)
