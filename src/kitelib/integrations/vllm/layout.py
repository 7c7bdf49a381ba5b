"""How the engine keeps one block of KV, and copying blocks out of its KV cache and into it.

A block's data is, layer after layer, the bytes of that layer's part of the block as the attention backend keeps them, in
the logical order of the tensor. What they mean is the backend's business, so the layout's id covers all that shapes
them, and a backend of which nobody knows whether its blocks stand for themselves is refused.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kitelib.errors import UnsupportedOptionError
from kitelib.fingerprint import encode_fields
from kitelib.integrations.vllm.compat import engine_release

__all__ = ["BlockLayout", "Rank", "read_layout"]

_BACKENDS: Final = frozenset({"CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN", "FLASHINFER"})
_SPECS: Final = frozenset({"FullAttentionSpec"})
_PROBE_BLOCKS: Final = 999_983  # no head size and no number of tokens: shows which dimension counts blocks


@dataclasses.dataclass(frozen=True, slots=True)
class Rank:
    """Which part of the model a worker has: its place and the number of places, tensor and pipeline parallel."""

    tp: int = 0
    tp_size: int = 1
    pp: int = 0
    pp_size: int = 1

    @property
    def fields(self) -> dict[str, str | int | bool]:
        """For fingerprints."""
        return {"tp": self.tp, "tp_size": self.tp_size, "pp": self.pp, "pp_size": self.pp_size}


@dataclasses.dataclass(frozen=True, slots=True)
class _Layer:
    cache: Any  # torch.Tensor
    dim: int  # which dimension counts blocks
    per_block: int  # entries of that dimension in a block
    offset: int  # bytes from the start of a stored block
    num_bytes: int
    rows: npt.NDArray[np.uint8] | None  # the cache's own memory, one row per block, where that is what it looks like

    @property
    def part(self) -> slice:
        """Where the layer's bytes are in a stored block."""
        return slice(self.offset, self.offset + self.num_bytes)


class BlockLayout:
    """The engine's KV cache, as blocks of plain bytes.

    Attributes:
        id: id of the layout, ASCII.
        block_tokens: tokens in a block.
        block_bytes: bytes of a block, all layers.
        dtype: element type, one that units know.
        num_elements: elements in a block.
    """

    def __init__(self, layers: Sequence[_Layer], block_tokens: int, dtype: str, layout_id: str) -> None:
        self.id = layout_id
        self.block_tokens = block_tokens
        self.block_bytes = sum(layer.num_bytes for layer in layers)
        self.dtype = dtype
        self.num_elements = self.block_bytes // layers[0].cache.element_size()
        self._layers = list(layers)
        self._device = layers[0].cache.device
        self._stream: Any = None

    def copy_out(self, block_ids: Sequence[int]) -> npt.NDArray[np.uint8]:
        """The bytes of the blocks, uint8 of shape (blocks, `block_bytes`). Waits for what the device computes."""
        found = np.empty((len(block_ids), self.block_bytes), np.uint8)
        runs = _runs(block_ids)
        for layer in self._layers:
            if layer.rows is not None:
                for start, first, count in runs:
                    found[first : first + count, layer.part] = layer.rows[start : start + count]
            else:
                found[:, layer.part] = self._read(layer, block_ids)
        return found

    def copy_in(self, block_ids: Sequence[int], blocks: Sequence[npt.NDArray[np.uint8]], after: Any = None) -> None:
        """Writes blocks, each uint8 of shape (`block_bytes`,), and waits until they are there. Any thread.

        Args:
            block_ids: where to; nothing else may use those blocks meanwhile.
            blocks: one for each.
            after: event of the device to wait for first; see `mark`.
        """
        import torch

        others = [layer for layer in self._layers if layer.rows is None]
        for layer in self._layers:
            if layer.rows is not None:
                for block_id, block in zip(block_ids, blocks, strict=True):
                    layer.rows[block_id] = block[layer.part]
        if not others:
            return
        host = torch.from_numpy(np.stack(blocks))
        if self._device.type == "cpu":
            self._write(others, block_ids, host)
            return
        if self._stream is None:
            self._stream = torch.Stream(device=self._device)
        with self._stream:
            if after is not None:
                self._stream.wait_event(after)
            self._write(others, block_ids, host.to(self._device))
        self._stream.synchronize()

    def mark(self) -> Any:
        """An event of the device that stands for all it was told so far; None on the CPU."""
        import torch

        if self._device.type == "cpu":
            return None
        return torch.accelerator.current_stream(self._device).record_event()

    def _read(self, layer: _Layer, block_ids: Sequence[int]) -> npt.NDArray[np.uint8]:
        import torch

        part = layer.cache.index_select(layer.dim, self._entries(layer, block_ids))
        rows = part.movedim(layer.dim, 0).contiguous().view(len(block_ids), -1).view(torch.uint8)
        found: npt.NDArray[np.uint8] = rows.cpu().numpy()
        return found

    def _write(self, layers: Sequence[_Layer], block_ids: Sequence[int], rows: Any) -> None:
        for layer in layers:
            cache, dim = layer.cache, layer.dim
            part = rows[:, layer.part].contiguous().view(cache.dtype)
            one = [layer.per_block, *cache.shape[:dim], *cache.shape[dim + 1 :]]
            part = part.view(len(block_ids) * one[0], *one[1:]).movedim(0, dim)
            cache.index_copy_(dim, self._entries(layer, block_ids), part)

    def _entries(self, layer: _Layer, block_ids: Sequence[int]) -> Any:
        import torch

        ids = torch.tensor(block_ids, dtype=torch.int64, device=layer.cache.device)
        if layer.per_block == 1:
            return ids
        inside = torch.arange(layer.per_block, device=ids.device)
        return (ids[:, None] * layer.per_block + inside).view(-1)


def _runs(block_ids: Sequence[int]) -> list[tuple[int, int, int]]:
    """Consecutive ids as (first id, its place in the list, how many)."""
    runs: list[tuple[int, int, int]] = []
    for place, block_id in enumerate(block_ids):
        if runs and runs[-1][0] + runs[-1][2] == block_id:
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((block_id, place, 1))
    return runs


def read_layout(vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, Any], rank: Rank) -> BlockLayout:
    """The layout of the KV cache that the engine allocated.

    Raises:
        UnsupportedOptionError: it is one that nobody knows how to copy; the message says what of it.
    """
    group = _only_group(kv_cache_config)
    spec = group.kv_cache_spec
    backends = _backends(vllm_config, group.layer_names)
    layers, described, seen = [], [], set()
    offset = 0
    for name in group.layer_names:
        cache = kv_caches.get(name)
        if cache is None or (place := (cache.data_ptr(), cache.storage_offset())) in seen:
            continue  # a layer of another rank, or one that shares another one's KV
        seen.add(place)
        layer = _layer(name, cache, backends[name], spec, kv_cache_config.num_blocks, offset)
        layers.append(layer)
        offset += layer.num_bytes
        shape = [size for dim, size in enumerate(cache.shape) if dim != layer.dim]
        strides = [size for dim, size in enumerate(cache.stride()) if dim != layer.dim]
        described.append([name, backends[name].get_name(), layer.dim, layer.per_block, shape, strides])
    if not layers:
        raise UnsupportedOptionError(
            "the engine has no KV cache that could be kept; KiteConnector is of no use with it"
        )
    dtypes = {layer.cache.dtype for layer in layers}
    if len(dtypes) > 1 or (dtype := str(layers[0].cache.dtype).removeprefix("torch.")) not in _DTYPES:
        raise UnsupportedOptionError(
            f"the KV cache holds {', '.join(sorted(map(str, dtypes)))}; KiteConnector knows {', '.join(_DTYPES)}, one for "
            "all layers"
        )
    fields = {
        "release": list(engine_release()[1]),
        "block_tokens": spec.block_size,
        "dtype": dtype,
        "packing": _packing(vllm_config, spec, {each.get_name() for each in backends.values()}),
        "layers": described,
        **rank.fields,
    }
    layout_id = f"vllm-{hashlib.sha256(encode_fields('kite.vllm.layout', fields)).hexdigest()[:32]}"
    return BlockLayout(layers, spec.block_size, dtype, layout_id)


_DTYPES: Final = ("bfloat16", "float16", "float32")


def _only_group(kv_cache_config: Any) -> Any:
    groups = kv_cache_config.kv_cache_groups
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    if len(groups) != 1 or kinds[0] not in _SPECS:
        raise UnsupportedOptionError(
            f"the engine keeps its KV cache as {', '.join(kinds) or 'nothing'}; KiteConnector knows one group of full "
            "attention. A model that mixes window sizes has that with --disable-hybrid-kv-cache-manager; models with a "
            "recurrent state or only windows don't"
        )
    return groups[0]


def _backends(vllm_config: Any, names: Sequence[str]) -> dict[str, Any]:
    """The attention backend's class of each layer."""
    layers = vllm_config.compilation_config.static_forward_context
    found = {name: layers[name].get_attn_backend() for name in names}
    unknown = sorted({each.get_name() for each in found.values()} - _BACKENDS)
    if unknown:
        raise UnsupportedOptionError(
            f"the attention backend is {unknown[0]}, and nobody knows whether its blocks can be copied; choose one of "
            f"{', '.join(sorted(_BACKENDS))} with --attention-backend"
        )
    return found


def _layer(name: str, cache: Any, backend: Any, spec: Any, num_blocks: int, offset: int) -> _Layer:
    dim = _block_dim(backend, spec)
    per_block, rest = divmod(cache.shape[dim], num_blocks)
    num_bytes = cache.numel() // cache.shape[dim] * per_block * cache.element_size()
    expected = spec.real_page_size_bytes if hasattr(spec, "real_page_size_bytes") else spec.page_size_bytes
    if rest or not per_block or num_bytes != expected:
        raise UnsupportedOptionError(
            f"layer {name!r} keeps its KV as {tuple(cache.shape)}, {num_bytes} bytes a block for {num_blocks} blocks; "
            f"{expected} were expected, so KiteConnector does not know this layout"
        )
    return _Layer(cache, dim, per_block, offset, num_bytes, _rows(cache, dim, num_blocks))


def _rows(cache: Any, dim: int, num_blocks: int) -> npt.NDArray[np.uint8] | None:
    import torch

    if cache.device.type != "cpu" or dim or not cache.is_contiguous():
        return None
    rows: npt.NDArray[np.uint8] = cache.view(torch.uint8).view(num_blocks, -1).numpy()
    return rows


def _block_dim(backend: Any, spec: Any) -> int:
    """Which dimension of a layer's tensor counts blocks: where the backend gives the shape, it is asked for one; else
    the engine itself shapes all of them with the blocks first."""
    shape_of = getattr(backend, "get_kv_cache_shape", None)
    if shape_of is None:
        return 0
    shape = tuple(shape_of(_PROBE_BLOCKS, spec.block_size, spec.num_kv_heads, spec.head_size))
    if shape.count(_PROBE_BLOCKS) != 1:
        raise UnsupportedOptionError(
            f"{backend.get_name()} shapes its KV cache as {shape}, in which KiteConnector finds no dimension of blocks"
        )
    return shape.index(_PROBE_BLOCKS)


def _packing(vllm_config: Any, spec: Any, names: set[str]) -> str:
    """How the CPU's attention arranges keys within a block: it depends on the instructions that the machine has."""
    if "CPU_ATTN" not in names:
        return ""
    from vllm.v1.attention.backends import cpu_attn

    find = getattr(cpu_attn, "_get_attn_isa", None)
    if find is None:
        raise UnsupportedOptionError("this vLLM does not say how it packs keys on the CPU, so blocks can't be copied")
    wanted = [vllm_config.model_config.dtype, spec.block_size, spec.head_size, vllm_config.cache_config.cache_dtype]
    return str(find(*wanted[: find.__code__.co_argcount]))
