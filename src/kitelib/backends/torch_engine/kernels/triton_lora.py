# Triton compiles these functions: their parameters have no Python types, and triton ships none itself.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""LoRA on CUDA: rows of several adapters in two launches, each row with the bits that it has alone.

Rows are cut into tiles of 16 rows with one adapter. `shrink` gives ``x @ A.T`` of a tile, 16 ranks per program, with
the input features cut into a number of pieces that depends on their number only. `expand` adds the pieces up in order
and ``factor * (.. @ B.T)`` to the output, 16 ranks at a time. So nothing depends on the other rows, or on the ranks of
the other adapters.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

__all__ = ["RANK_STEP", "TILE_ROWS", "SiteTables", "TileTable", "add_adapters"]

TILE_ROWS = 16
RANK_STEP = 16
_FEATURE_STEP = 64
_FEATURES_PER_PIECE = 512
_MOST_PIECES = 8


@dataclasses.dataclass(frozen=True, slots=True)
class SiteTables:
    """Matrices of one linear by adapter number, as the kernels find them. All tensors are on the device.

    Attributes:
        a: int64 (adapters,): address of the matrix (rank, in features), contiguous; 0 if the adapter has none.
        b: int64 (adapters,): address of the matrix (out features, rank), likewise.
        ranks: int32 (adapters,): multiples of `RANK_STEP`.
        factors: float32 (adapters,).
        most_ranks: the largest rank.
        dtype: element type of the matrices.
    """

    a: torch.Tensor
    b: torch.Tensor
    ranks: torch.Tensor
    factors: torch.Tensor
    most_ranks: int
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True, slots=True)
class TileTable:
    """Tiles of a pass: int32 tensors (tiles,) on the device; tile i has rows first[i] .. first[i] + rows[i] - 1."""

    first: torch.Tensor
    rows: torch.Tensor
    adapters: torch.Tensor


def add_adapters(x: torch.Tensor, out: torch.Tensor, tiles: TileTable, site: SiteTables) -> None:
    """Adds to `out` what the adapters of the tiles give for `x`.

    Args:
        x: (rows, in features), rows contiguous; in the type of the matrices.
        out: (rows, out features), contiguous; any floating type.
        tiles: which rows have which adapter.
        site: the adapters' matrices.
    """
    import torch

    num_tiles, features, blocks = len(tiles.first), x.shape[1], site.most_ranks // RANK_STEP
    pieces = min(_MOST_PIECES, -(-features // _FEATURES_PER_PIECE))
    piece = -(-features // (pieces * _FEATURE_STEP)) * _FEATURE_STEP
    partial = torch.empty((pieces, num_tiles, blocks, TILE_ROWS, RANK_STEP), dtype=torch.float32, device=x.device)
    shrink[num_tiles, blocks, pieces](
        x, partial, tiles.first, tiles.rows, tiles.adapters, site.a, site.ranks, x.stride(0), features, num_tiles, blocks,
        piece, dtype=_triton_type(site.dtype), tile_rows=TILE_ROWS, rank_step=RANK_STEP, feature_step=_FEATURE_STEP,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    width = 64
    expand[num_tiles, -(-out.shape[1] // width)](
        partial, out, tiles.first, tiles.rows, tiles.adapters, site.b, site.ranks, site.factors, out.shape[1],
        num_tiles, blocks, pieces=pieces, dtype=_triton_type(site.dtype), tile_rows=TILE_ROWS, rank_step=RANK_STEP,
        width=width, precision="ieee" if site.dtype == torch.float32 else "tf32", num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def shrink(
    x,
    partial,
    tile_first,
    tile_rows_of,
    tile_adapters,
    addresses,
    ranks,
    x_row,
    features,
    num_tiles,
    blocks,
    piece,
    dtype: tl.constexpr,
    tile_rows: tl.constexpr,
    rank_step: tl.constexpr,
    feature_step: tl.constexpr,
):
    """Grid: (tiles, blocks of ranks, pieces of the input features)."""
    tile = tl.program_id(0)
    block = tl.program_id(1)
    part = tl.program_id(2)
    adapter = tl.load(tile_adapters + tile)
    address = tl.load(addresses + adapter)
    if (address == 0) | (block * rank_step >= tl.load(ranks + adapter)):
        return
    a = address.to(tl.pointer_type(dtype))
    place = tl.arange(0, tile_rows)
    row = (tl.load(tile_first + tile) + place).to(tl.int64)[:, None]
    there = (place < tl.load(tile_rows_of + tile))[:, None]
    rank = tl.arange(0, rank_step)
    a_rows = (block * rank_step + rank).to(tl.int64)[None, :] * features
    acc = tl.zeros([tile_rows, rank_step], tl.float32)
    first = part * piece
    for start in range(first, first + piece, feature_step):
        feature = start + tl.arange(0, feature_step)
        values = tl.load(x + row * x_row + feature[None, :], there & (feature[None, :] < features), 0.0)
        matrix = tl.load(a + a_rows + feature[:, None], feature[:, None] < features, 0.0)
        acc = tl.dot(values, matrix, acc, input_precision="ieee")
    base = partial + (((part * num_tiles + tile) * blocks + block) * (tile_rows * rank_step)).to(tl.int64)
    tl.store(base + place[:, None] * rank_step + rank[None, :], acc)


@triton.jit
def expand(
    partial,
    out,
    tile_first,
    tile_rows_of,
    tile_adapters,
    addresses,
    ranks,
    factors,
    features,
    num_tiles,
    blocks,
    pieces: tl.constexpr,
    dtype: tl.constexpr,
    tile_rows: tl.constexpr,
    rank_step: tl.constexpr,
    width: tl.constexpr,
    precision: tl.constexpr,
):
    """Grid: (tiles, tiles of the output features)."""
    tile = tl.program_id(0)
    adapter = tl.load(tile_adapters + tile)
    address = tl.load(addresses + adapter)
    if address == 0:
        return
    b = address.to(tl.pointer_type(dtype))
    ranks_here = tl.load(ranks + adapter)
    place = tl.arange(0, tile_rows)
    rank = tl.arange(0, rank_step)
    feature = tl.program_id(1) * width + tl.arange(0, width)
    acc = tl.zeros([tile_rows, width], tl.float32)
    for block in range(ranks_here // rank_step):
        inner = tl.zeros([tile_rows, rank_step], tl.float32)
        for part in tl.static_range(pieces):
            base = partial + (((part * num_tiles + tile) * blocks + block) * (tile_rows * rank_step)).to(tl.int64)
            inner += tl.load(base + place[:, None] * rank_step + rank[None, :])
        columns = feature.to(tl.int64)[None, :] * ranks_here + (block * rank_step + rank)[:, None]
        matrix = tl.load(b + columns, feature[None, :] < features, 0.0).to(tl.float32)
        # TF32 holds 16-bit weights exactly, and more of the inner values than their own type would.
        acc = tl.dot(inner, matrix, acc, input_precision=precision)
    row = (tl.load(tile_first + tile) + place).to(tl.int64)[:, None]
    there = (place < tl.load(tile_rows_of + tile))[:, None] & (feature[None, :] < features)
    target = out + row * features + feature[None, :]
    before = tl.load(target, there, 0.0).to(tl.float32)
    tl.store(target, (before + acc * tl.load(factors + adapter)).to(out.dtype.element_ty), there)


def _triton_type(dtype: torch.dtype) -> Any:
    import torch

    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]
