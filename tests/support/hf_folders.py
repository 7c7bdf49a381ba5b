"""Hugging Face model folders for tests: small models with random weights, and SmolLM2 out of its GGUF file.

torch and transformers are imported by the functions, so that this module costs nothing where it is only named.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.support.vocabulary import smollm2_gguf

__all__ = ["ARCHITECTURES", "CHATML", "reference_model", "smollm2_folder", "write_model", "write_tokenizer"]

_LOGIT_STD = 3.0  # spread of the logits: clear winners, yet sampling has a choice
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
}
_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 32, "head_dim": 32},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    },
    "phi3": {},
    "gemma2": {
        "head_dim": 32,
        "sliding_window": 32,
        "query_pre_attn_scalar": 32,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gemma3_text": {
        "head_dim": 32,
        "sliding_window": 32,
        "query_pre_attn_scalar": 32,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": {**_LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "topk_method": "greedy"},
    "deepseek_v3": {**_LATENT, "q_lora_rank": 48, "n_group": 2, "topk_group": 1},
}

ARCHITECTURES: tuple[str, ...] = tuple(_SETTINGS)
"""Architectures of `write_model`, by the names that transformers gives them."""


def write_model(
    folder: Path,
    architecture: str,
    *,
    seed: int = 0,
    dtype: str = "float32",
    shard_bytes: int | None = None,
    **overrides: Any,
) -> Path:
    """Writes a model folder with random weights (a few MB), a tokenizer and a chat template, and returns `folder`.

    The text it produces means nothing; its logits are spread out and depend on every token that each layer sees.
    The output matrix is not tied to the embeddings: with tied random weights a model only repeats its last token.

    Args:
        folder: made if needed.
        architecture: one of `ARCHITECTURES`, or another that transformers knows, with all its settings in `overrides`.
        seed: the same arguments give the same weights.
        dtype: type of the weights in the files, e.g. "bfloat16".
        shard_bytes: most bytes of one weight file; None writes a single one.
        overrides: settings of config.json, e.g. ``num_hidden_layers=4``.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {**_COMMON, **_SETTINGS.get(architecture, {}), **overrides}
    with _quiet():
        config = AutoConfig.for_model(architecture, **settings)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _randomize(model, torch.Generator().manual_seed(seed))
    config.dtype = model.config.dtype = getattr(torch, dtype)
    folder.mkdir(parents=True, exist_ok=True)
    _save(model.to(getattr(torch, dtype)), folder, shard_bytes)
    write_tokenizer(folder, settings["vocab_size"])
    return folder


def write_tokenizer(folder: Path, vocab_size: int = 512) -> None:
    """Writes a byte-level BPE tokenizer of at most `vocab_size` tokens with a ChatML template."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(_tokenizer_json(vocab_size), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHATML,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def reference_model(folder: Path, *, attention: str = "eager", **options: Any) -> Any:
    """The folder's model as plain transformers runs it, on the CPU, in the type of its files."""
    from transformers import AutoModelForCausalLM

    with _quiet():
        model = AutoModelForCausalLM.from_pretrained(
            str(folder), attn_implementation=attention, local_files_only=True, **{"dtype": "auto", **options}
        )
    return model.eval()


def smollm2_folder(folder: Path) -> Path:
    """Writes SmolLM2-135M-Instruct from its GGUF file into `folder`, in bfloat16, and returns it; takes seconds.

    transformers reads the file to the same weights, but parses it three times over.
    """
    import gguf
    import torch
    from safetensors.torch import save_file

    reader = gguf.GGUFReader(smollm2_gguf())

    def value(key: str) -> Any:
        return reader.fields[key].contents()

    heads, kv_heads = value("llama.attention.head_count"), value("llama.attention.head_count_kv")
    weights: dict[str, Any] = {}
    for tensor in reader.tensors:
        values = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        if tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
            values = _rotate_halves(values, heads if "attn_q" in tensor.name else kv_heads)
        weights[_hf_name(tensor.name)] = values.to(torch.bfloat16).contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, str(folder / "model.safetensors"), {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": len(value("tokenizer.ggml.tokens")),
        "hidden_size": value("llama.embedding_length"),
        "intermediate_size": value("llama.feed_forward_length"),
        "num_hidden_layers": value("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": value("llama.context_length"),
        "rms_norm_eps": float(value("llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": float(value("llama.rope.freq_base")),
        "tie_word_embeddings": "output.weight" not in {tensor.name for tensor in reader.tensors},
        "bos_token_id": value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": value("tokenizer.ggml.eos_token_id"),
        "pad_token_id": value("tokenizer.ggml.eos_token_id"),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    _write_gguf_tokenizer(folder, value)
    return folder


_GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _hf_name(name: str) -> str:
    parts = name.split(".")
    if parts[0] != "blk":
        return f"{_GGUF_NAMES[parts[0]]}.{parts[1]}"
    return f"model.layers.{parts[1]}.{_GGUF_NAMES[parts[2]]}.{parts[3]}"


def _rotate_halves(values: Any, heads: int) -> Any:
    """GGUF keeps the two channels that RoPE turns together side by side, transformers half a head apart."""
    outputs, inputs = values.shape
    return values.view(heads, outputs // heads // 2, 2, inputs).transpose(1, 2).reshape(outputs, inputs)


def _write_gguf_tokenizer(folder: Path, value: Callable[[str], Any]) -> None:
    import gguf
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = value("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in value("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, value("tokenizer.ggml.token_type"), strict=True)
    special = [token for token, kind in kinds if kind == gguf.TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[value("tokenizer.ggml.bos_token_id")],
        "eos_token": tokens[value("tokenizer.ggml.eos_token_id")],
        "clean_up_tokenization_spaces": False,
        "chat_template": value("tokenizer.chat_template"),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _save(model: Any, folder: Path, shard_bytes: int | None) -> None:
    with _quiet():
        model.save_pretrained(str(folder), max_shard_size="10GB" if shard_bytes is None else shard_bytes)


def _quiet() -> Any:
    from kitelib.backends.torch_engine.quiet import quiet_transformers

    return quiet_transformers()


def _randomize(model: Any, rng: Any) -> None:
    """Values at which the residual stream keeps about unit variance, attention is neither flat nor one-hot, and the
    router of a mixture chooses different experts."""
    import torch

    def normal(weight: Any, std: float, mean: float = 0.0) -> None:
        weight.copy_(torch.randn(weight.shape, generator=rng) * std + mean)

    gemma = "gemma" in model.config.model_type  # embeddings are multiplied by sqrt(hidden), norms by 1 + weight
    hidden = model.config.hidden_size
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                normal(weight, 0.1, 0.0 if gemma else 1.0)
            elif name.endswith("embed_tokens.weight"):
                normal(weight, hidden**-0.5 if gemma else 1.0)
            elif name.endswith("lm_head.weight"):
                normal(weight, _LOGIT_STD * hidden**-0.5)
            elif weight.dim() == 1:
                normal(weight, 0.2)
            else:
                normal(weight, weight.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                normal(buffer, 0.05)


@functools.lru_cache(maxsize=8)
def _tokenizer_json(vocab_size: int) -> str:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(text, special=True) for text in _SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sentences(), trainer)
    text: str = tokenizer.to_str()
    return text


def _sentences() -> list[str]:
    people = ("The customer", "A clerk", "My neighbour", "The bank", "Nobody", "Every teacher", "The old sailor")
    acts = ("asks about", "pays for", "forgets", "describes", "repairs", "remembers", "closes", "explains")
    things = (
        "the account",
        "a broken card",
        "three letters",
        "the weather",
        "an invoice",
        "this long journey",
        "the garden",
    )
    ends = (" in the morning.", " without a word.", ", as usual.", " before noon!", "; why?")
    return [f"{who} {act} {what}{end}" for who in people for act in acts for what in things for end in ends]
