"""LoRA adapters on the device."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import torch

from kitelib.config import AdapterConfig
from tests.gpu.rig import compute, export_all, greedy, load, model_folder, prompt, scratch

_TARGETS = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
_RANK, _ALPHA = 8, 16


@functools.cache
def _adapter(name: str, seed: int) -> Path:
    """A PEFT folder with random weights, written by hand."""
    import json

    from safetensors.torch import load_file, save_file

    folder = scratch() / name
    folder.mkdir()
    weights = load_file(str(model_folder() / "model.safetensors"))
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for key, weight in weights.items():
        module = key.removesuffix(".weight")
        if module.endswith(_TARGETS):
            rows, columns = weight.shape
            prefix = f"base_model.model.{module}"
            first = torch.randn((_RANK, columns), generator=random) / columns**0.5
            second = torch.randn((rows, _RANK), generator=random) * 0.2
            tensors[f"{prefix}.lora_A.weight"] = first.to(torch.bfloat16)
            tensors[f"{prefix}.lora_B.weight"] = second.to(torch.bfloat16)
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": _RANK,
        "lora_alpha": _ALPHA,
        "target_modules": sorted({target.rpartition(".")[2] for target in _TARGETS}),
        "bias": "none",
        "fan_in_fan_out": False,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@functools.cache
def _merged() -> Path:
    """The model with the adapter multiplied into its weights."""
    import shutil

    from safetensors.torch import load_file, save_file

    folder = scratch() / "merged"
    shutil.copytree(model_folder(), folder)
    weights = load_file(str(folder / "model.safetensors"))
    adapter = load_file(str(_adapter("first", 1) / "adapter_model.safetensors"))
    for key in list(weights):
        prefix = f"base_model.model.{key.removesuffix('.weight')}"
        if f"{prefix}.lora_A.weight" in adapter:
            added = adapter[f"{prefix}.lora_B.weight"].float() @ adapter[f"{prefix}.lora_A.weight"].float()
            weights[key] = (weights[key].float() + added * (_ALPHA / _RANK)).to(weights[key].dtype)
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


def test_an_adapter_computes_what_merged_weights_compute() -> None:
    """Up to the rounding of the merged weights; and the base model stays as it is."""
    tokens = prompt(60)
    adapters = {"first": AdapterConfig(str(_adapter("first", 1))), "second": AdapterConfig(str(_adapter("second", 2)))}
    with load(model_folder(), numerics="standard") as plain:
        base = compute(plain, plain.create(), tokens)
    with load(_merged(), numerics="standard") as merged:
        wanted = compute(merged, merged.create(), tokens)
    with load(model_folder(), numerics="standard", adapters=adapters) as backend:
        first = compute(backend, backend.create("first"), tokens)
        second = compute(backend, backend.create("second"), tokens)
        again = compute(backend, backend.create(), tokens)
    assert np.array_equal(again, base)
    spread = float(np.abs(base - wanted).max())
    assert np.abs(first - wanted).max() < 0.2 * spread
    assert np.abs(second - wanted).max() > 0.2 * spread


def test_adapted_kv_comes_back() -> None:
    """Cold and restored agree bit for bit with an adapter, too."""
    with load(
        model_folder(), numerics="standard", adapters={"first": AdapterConfig(str(_adapter("first", 1)))}
    ) as backend:
        tokens, held = prompt(90), 64
        cold = backend.create("first")
        compute(backend, cold, tokens[:held])
        payloads = export_all(backend, cold, held)
        wanted = compute(backend, cold, tokens[held:], held)
        warm = backend.create("first")
        backend.restore_blocks(warm, 0, payloads)
        found = compute(backend, warm, tokens[held:], held)
        assert np.array_equal(found, wanted)
        assert greedy(backend, warm, found, 90, 8) == greedy(backend, cold, wanted, 90, 8)
