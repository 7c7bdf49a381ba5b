"""GGUF files for tests: small random models, LoRA adapters, and damaged or altered copies of a file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import gguf
import numpy as np
from gguf.quants import quantize

from tests.support.architectures import ARCHITECTURES, Dimensions, Weight, set_hyperparameters, weights
from tests.support.vocabulary import BaseModel, read_base, smollm2_gguf, truncated_tokenizer

__all__ = ["corrupt_copy", "modified_copy", "truncated_copy", "write_lora", "write_model"]

Quantization = Literal["F32", "F16", "Q8_0", "Q4_1", "Q4_0"]
Damage = Literal["magic", "metadata", "tensor_type"]

# The first inputs of each block: changing them changes the KV cache, not only the logits.
_LORA_TARGETS = ("attn_q", "attn_k", "attn_v", "attn_qkv", "ssm_in", "shortconv.in_proj")


def write_model(
    path: Path,
    architecture: str,
    *,
    seed: int,
    n_layer: int = 2,
    vocab_size: int = 2048,
    context_length: int = 2048,
    window: int = 64,
    quantization: Quantization = "F16",
    vocabulary: Path | None = None,
) -> Path:
    """Write a decoder model with random weights, about 1.5 MB with the defaults, and return ``path``.

    The text it produces means nothing; its logits are finite, spread out, and depend on every token of the context.

    Args:
        path: file to write.
        architecture: "llama", "qwen2", "phi3", "gemma3" (sliding window in every second layer), "mamba" (recurrent)
            or "lfm2" (hybrid: short convolutions and attention in turn).
        seed: the same arguments give the same file, another seed other weights.
        n_layer: number of blocks.
        vocab_size: number of tokens, the first ones of the vocabulary.
        context_length: trained context, tokens.
        window: sliding attention window, tokens ("gemma3" only).
        quantization: type of the matrices; vectors stay float32.
        vocabulary: GGUF file with a byte-pair tokenizer; default the SmolLM2 file of the development dependencies.

    Raises:
        ValueError: unknown architecture.
    """
    if architecture not in ARCHITECTURES:
        raise ValueError(f"architecture is {architecture!r}; it must be one of {', '.join(ARCHITECTURES)}")
    tokenizer = truncated_tokenizer(read_base(vocabulary or smollm2_gguf()), vocab_size)
    size = Dimensions(n_layer=n_layer, vocab_size=vocab_size, context_length=context_length, window=window)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type("model")
    writer.add_name("random weights")  # llama.cpp looks for special tokens of Phi-3 when the name holds "phi3"
    set_hyperparameters(writer, architecture, size)
    for key, entry in tokenizer.items():
        writer.add_key_value(key, entry.value, entry.kind, entry.element)
    for weight in weights(architecture, size, seed):
        _add_weight(writer, weight, gguf.GGMLQuantizationType[quantization])
    return _finish(writer, path)


def write_lora(
    path: Path,
    base_gguf: Path,
    *,
    rank: int = 4,
    seed: int,
    scale_std: float = 0.5,
    targets: Sequence[str] = _LORA_TARGETS,
) -> Path:
    """Write a random LoRA adapter that fits ``base_gguf`` and return ``path``.

    Args:
        path: file to write.
        base_gguf: the model that the adapter is for; architecture and shapes are read from it.
        rank: inner dimension of the adapter.
        seed: the same arguments give the same file.
        scale_std: size of what the adapter adds to a matrix product, where the inputs have about unit variance.
        targets: which matrices of each block get an adapter, by name without ``blk.N.`` and ``.weight``.

    Raises:
        ValueError: the base has none of the target matrices.
    """
    base = read_base(base_gguf)
    adapted = _adapted(base, targets)
    if not adapted:
        raise ValueError(f"{base_gguf} has none of the matrices {', '.join(targets)}; name some that it has")
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, base.architecture)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    # llama.cpp multiplies by alpha / rank: with alpha = rank a scale of 1 applies the product as it is.
    writer.add_float32("adapter.lora.alpha", float(rank))
    for name, (outputs, inputs) in adapted.items():
        a = rng.standard_normal((rank, inputs)) * inputs**-0.5
        b = rng.standard_normal((outputs, rank)) * scale_std * rank**-0.5
        writer.add_tensor(f"{name}.lora_a", a.astype(np.float32))
        writer.add_tensor(f"{name}.lora_b", b.astype(np.float32))
    return _finish(writer, path)


def corrupt_copy(path: Path, out: Path, *, damage: Damage = "magic") -> Path:
    """Copy the GGUF file ``path`` to ``out`` with damage that no loader may accept, and return ``out``.

    ``damage`` says where: the first four bytes, the count of metadata entries, or the type of the first tensor.
    """
    if damage == "magic":
        offset, data = 0, b"\0BAD"
    elif damage == "metadata":
        offset, data = 16, (2**62).to_bytes(8, "little")
    else:
        # Tensor info: name length, name, number of dimensions, dimensions, type, offset.
        first = gguf.GGUFReader(path).tensors[0].field
        offset, data = first.offset + sum(int(part.nbytes) for part in first.parts[:4]), b"\xff\xff\xff\x7f"
    return _patched(path, out, offset, data)


def truncated_copy(path: Path, out: Path, *, fraction: float = 0.5) -> Path:
    """Copy the first ``fraction`` (0 to 1) of the bytes of ``path`` to ``out``, as a broken download would."""
    shutil.copyfile(path, out)
    os.truncate(out, int(path.stat().st_size * fraction))
    return out


def modified_copy(path: Path, out: Path, *, tensor: str = "blk.0.attn_norm.weight") -> Path:
    """Copy the GGUF model ``path`` to ``out`` with one byte of one weight changed, and return ``out``.

    Size, architecture and metadata stay the same. The largest value of ``tensor`` (float32) becomes four times as
    large; with the default tensor this reaches the KV cache of every attention layer and every logit.

    Raises:
        ValueError: there is no such tensor, or it is not float32.
    """
    found = [t for t in gguf.GGUFReader(path).tensors if t.name == tensor]
    if not found or found[0].tensor_type != gguf.GGMLQuantizationType.F32:
        raise ValueError(f"{path} has no float32 tensor {tensor!r}; name one that it has")
    index = int(np.argmax(np.abs(found[0].data)))
    # The top byte holds the sign and the upper seven bits of the exponent: one more there is a factor of four.
    offset = int(found[0].data_offset) + 4 * index + 3
    top = int(np.ascontiguousarray(found[0].data).view(np.uint8).reshape(-1)[4 * index + 3])
    return _patched(path, out, offset, bytes([top + 1]))


def _adapted(base: BaseModel, targets: Sequence[str]) -> dict[str, tuple[int, int]]:
    wanted = tuple(f".{target}.weight" for target in targets)
    found = {name: shape for name, shape in base.shapes.items() if name.startswith("blk.") and name.endswith(wanted)}
    return {name: (shape[0], shape[1]) for name, shape in found.items() if len(shape) == 2}


def _add_weight(writer: gguf.GGUFWriter, weight: Weight, kind: gguf.GGMLQuantizationType) -> None:
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    if weight.role == "vector" or weight.values.shape[-1] % block:
        kind = gguf.GGMLQuantizationType.F32
    if kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16):
        writer.add_tensor(weight.name, weight.values.astype(np.float32 if kind.name == "F32" else np.float16))
    else:
        writer.add_tensor(weight.name, quantize(weight.values, kind), raw_dtype=kind)


def _finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _patched(path: Path, out: Path, offset: int, data: bytes) -> Path:
    shutil.copyfile(path, out)
    with out.open("r+b") as file:
        file.seek(offset)
        file.write(data)
    return out
