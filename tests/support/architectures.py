"""Tensors and hyper-parameters of the small random models, one function per architecture.

Names and shapes follow the tensor tables of the GGUF format as llama.cpp loads them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import gguf
import numpy as np
import numpy.typing as npt

__all__ = ["ARCHITECTURES", "Dimensions", "Floats", "Weight", "set_hyperparameters", "weights"]

Floats = npt.NDArray[np.float32]
Role = Literal["matrix", "vector"]

_HEAD_DIM = 64  # what every attention kernel of llama.cpp supports
_SSM_CONV, _SSM_STATE = 4, 16
_SHORTCONV_CACHE = 3
_LOGIT_STD = 3.0  # spread of the logits: clear winners, yet sampling has a choice


@dataclasses.dataclass(frozen=True, slots=True)
class Dimensions:
    """Sizes of a small model.

    Attributes:
        n_layer: number of blocks; default 2.
        n_head: attention heads of 64 channels; the hidden size is 64 * n_head; default 2.
        n_head_kv: key-value heads; default 1.
        n_ff: inner size of the feed-forward part; default 256.
        vocab_size: number of tokens; default 2048.
        context_length: trained context, tokens; default 2048.
        window: sliding attention window, tokens, of the architectures that have one; default 64.
    """

    n_layer: int = 2
    n_head: int = 2
    n_head_kv: int = 1
    n_ff: int = 256
    vocab_size: int = 2048
    context_length: int = 2048
    window: int = 64

    @property
    def hidden(self) -> int:
        """Size of the residual stream, channels."""
        return _HEAD_DIM * self.n_head

    @property
    def kv_width(self) -> int:
        """Channels of the keys, and of the values, of one token in one layer."""
        return _HEAD_DIM * self.n_head_kv


@dataclasses.dataclass(frozen=True, slots=True)
class Weight:
    """One tensor: its name, its values (outermost dimension first) and whether it may be quantized."""

    name: str
    values: Floats
    role: Role


Block = Callable[[np.random.Generator, Dimensions, int], Iterator[Weight]]


def _normal(rng: np.random.Generator, *shape: int, std: float) -> Floats:
    return (rng.standard_normal(shape) * std).astype(np.float32)


def _matrix(rng: np.random.Generator, name: str, outputs: int, inputs: int) -> Weight:
    return Weight(f"{name}.weight", _normal(rng, outputs, inputs, std=inputs**-0.5), "matrix")


def _norm(rng: np.random.Generator, name: str, size: int) -> Weight:
    return Weight(f"{name}.weight", 1.0 + _normal(rng, size, std=0.1), "vector")


def _bias(rng: np.random.Generator, name: str, size: int) -> Weight:
    return Weight(f"{name}.bias", _normal(rng, size, std=0.2), "vector")


def _attention(rng: np.random.Generator, size: Dimensions, block: str) -> Iterator[Weight]:
    yield _norm(rng, f"{block}.attn_norm", size.hidden)
    yield _matrix(rng, f"{block}.attn_q", size.hidden, size.hidden)
    yield _matrix(rng, f"{block}.attn_k", size.kv_width, size.hidden)
    yield _matrix(rng, f"{block}.attn_v", size.kv_width, size.hidden)
    yield _matrix(rng, f"{block}.attn_output", size.hidden, size.hidden)


def _feed_forward(rng: np.random.Generator, size: Dimensions, block: str) -> Iterator[Weight]:
    yield _norm(rng, f"{block}.ffn_norm", size.hidden)
    yield _matrix(rng, f"{block}.ffn_gate", size.n_ff, size.hidden)
    yield _matrix(rng, f"{block}.ffn_up", size.n_ff, size.hidden)
    yield _matrix(rng, f"{block}.ffn_down", size.hidden, size.n_ff)


def _llama(rng: np.random.Generator, size: Dimensions, layer: int) -> Iterator[Weight]:
    yield from _attention(rng, size, f"blk.{layer}")
    yield from _feed_forward(rng, size, f"blk.{layer}")


def _qwen2(rng: np.random.Generator, size: Dimensions, layer: int) -> Iterator[Weight]:
    yield from _llama(rng, size, layer)
    for part, width in (("q", size.hidden), ("k", size.kv_width), ("v", size.kv_width)):
        yield _bias(rng, f"blk.{layer}.attn_{part}", width)


def _phi3(rng: np.random.Generator, size: Dimensions, layer: int) -> Iterator[Weight]:
    block = f"blk.{layer}"
    yield _norm(rng, f"{block}.attn_norm", size.hidden)
    yield _matrix(rng, f"{block}.attn_qkv", size.hidden + 2 * size.kv_width, size.hidden)
    yield _matrix(rng, f"{block}.attn_output", size.hidden, size.hidden)
    yield _norm(rng, f"{block}.ffn_norm", size.hidden)
    yield _matrix(rng, f"{block}.ffn_up", 2 * size.n_ff, size.hidden)  # gate and up in one
    yield _matrix(rng, f"{block}.ffn_down", size.hidden, size.n_ff)


def _gemma3(rng: np.random.Generator, size: Dimensions, layer: int) -> Iterator[Weight]:
    block = f"blk.{layer}"
    yield from _llama(rng, size, layer)
    yield _norm(rng, f"{block}.attn_q_norm", _HEAD_DIM)
    yield _norm(rng, f"{block}.attn_k_norm", _HEAD_DIM)
    yield _norm(rng, f"{block}.post_attention_norm", size.hidden)
    yield _norm(rng, f"{block}.post_ffw_norm", size.hidden)


def _mamba(rng: np.random.Generator, size: Dimensions, layer: int) -> Iterator[Weight]:
    block, inner, rank = f"blk.{layer}", 2 * size.hidden, size.hidden // 16
    yield _norm(rng, f"{block}.attn_norm", size.hidden)
    yield _matrix(rng, f"{block}.ssm_in", 2 * inner, size.hidden)
    yield Weight(f"{block}.ssm_conv1d.weight", _normal(rng, inner, _SSM_CONV, std=_SSM_CONV**-0.5), "vector")
    yield _bias(rng, f"{block}.ssm_conv1d", inner)
    yield _matrix(rng, f"{block}.ssm_x", rank + 2 * _SSM_STATE, inner)
    yield _matrix(rng, f"{block}.ssm_dt", inner, rank)
    # Initial values of Gu and Dao 2023 (Mamba): step sizes of 0.001 to 0.1 before softplus, A = -(1 .. state).
    steps = np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), inner))
    yield Weight(f"{block}.ssm_dt.bias", np.log(np.expm1(steps)).astype(np.float32), "vector")
    decay = np.broadcast_to(-np.arange(1, _SSM_STATE + 1, dtype=np.float32), (inner, _SSM_STATE))
    yield Weight(f"{block}.ssm_a", np.ascontiguousarray(decay), "vector")
    yield Weight(f"{block}.ssm_d", np.ones(inner, dtype=np.float32), "vector")
    yield _matrix(rng, f"{block}.ssm_out", size.hidden, inner)


def _lfm2_attends(layer: int) -> bool:
    return layer % 2 == 1


def _lfm2(rng: np.random.Generator, size: Dimensions, layer: int) -> Iterator[Weight]:
    block = f"blk.{layer}"
    if _lfm2_attends(layer):
        yield from _attention(rng, size, block)
        yield _norm(rng, f"{block}.attn_q_norm", _HEAD_DIM)
        yield _norm(rng, f"{block}.attn_k_norm", _HEAD_DIM)
    else:
        yield _norm(rng, f"{block}.attn_norm", size.hidden)
        conv = _normal(rng, size.hidden, _SHORTCONV_CACHE, std=_SHORTCONV_CACHE**-0.5)
        yield Weight(f"{block}.shortconv.conv.weight", conv, "vector")
        yield _matrix(rng, f"{block}.shortconv.in_proj", 3 * size.hidden, size.hidden)
        yield _matrix(rng, f"{block}.shortconv.out_proj", size.hidden, size.hidden)
    yield from _feed_forward(rng, size, block)


ARCHITECTURES: Mapping[str, Block] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "phi3": _phi3,
    "gemma3": _gemma3,
    "mamba": _mamba,
    "lfm2": _lfm2,
}


def weights(architecture: str, size: Dimensions, seed: int) -> Iterator[Weight]:
    """All tensors of a random model; the same arguments give the same values.

    The output matrix is not tied to the embeddings: with tied random weights a model only repeats its last token.
    """
    rng = np.random.default_rng(seed)
    # gemma multiplies embeddings by sqrt(hidden); the residual stream starts at unit variance everywhere.
    embed_std = size.hidden**-0.5 if architecture == "gemma3" else 1.0
    yield Weight("token_embd.weight", _normal(rng, size.vocab_size, size.hidden, std=embed_std), "matrix")
    for layer in range(size.n_layer):
        yield from ARCHITECTURES[architecture](rng, size, layer)
    yield _norm(rng, "token_embd_norm" if architecture == "lfm2" else "output_norm", size.hidden)
    output = _normal(rng, size.vocab_size, size.hidden, std=_LOGIT_STD * size.hidden**-0.5)
    yield Weight("output.weight", output, "matrix")


def set_hyperparameters(writer: gguf.GGUFWriter, architecture: str, size: Dimensions) -> None:
    """Write the ``<architecture>.*`` metadata that llama.cpp asks for."""
    writer.add_vocab_size(size.vocab_size)
    writer.add_context_length(size.context_length)
    writer.add_embedding_length(size.hidden)
    writer.add_block_count(size.n_layer)
    writer.add_layer_norm_rms_eps(1e-5)
    if architecture == "mamba":
        writer.add_feed_forward_length(0)
        writer.add_head_count(0)
        writer.add_ssm_conv_kernel(_SSM_CONV)
        writer.add_ssm_inner_size(2 * size.hidden)
        writer.add_ssm_state_size(_SSM_STATE)
        writer.add_ssm_time_step_rank(size.hidden // 16)
        return
    writer.add_feed_forward_length(size.n_ff)
    writer.add_head_count(size.n_head)
    writer.add_rope_dimension_count(_HEAD_DIM)
    writer.add_rope_freq_base(10000.0)
    if architecture == "lfm2":
        writer.add_head_count_kv([size.n_head_kv if _lfm2_attends(i) else 0 for i in range(size.n_layer)])
        writer.add_shortconv_l_cache(_SHORTCONV_CACHE)
        return
    writer.add_head_count_kv(size.n_head_kv)
    if architecture == "gemma3":
        writer.add_key_length(_HEAD_DIM)
        writer.add_value_length(_HEAD_DIM)
        writer.add_sliding_window(size.window)
        # Every second layer sees everything, so that two layers already have both kinds of cache.
        writer.add_sliding_window_pattern(2)
