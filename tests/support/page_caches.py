"""Small paged caches with known content, and item tables for them."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

BLOCKS = 5


def random_segments(place, widths, block_tokens, dtype, seed=0):
    """Segments (blocks, tokens, channels): "tensors" has one tensor each, "arena" one for all, blocks in one piece."""
    generator = torch.Generator().manual_seed(seed)

    def fill(*shape):
        made = torch.randn(shape, generator=generator) * torch.rand(shape[-1], generator=generator).mul(4).exp()
        return made.to(dtype)

    if place == "tensors":
        return [fill(BLOCKS, block_tokens, width) for width in widths]
    arena = fill(BLOCKS, sum(widths) * block_tokens)
    segments, start = [], 0
    for width in widths:
        part = arena[:, start : start + width * block_tokens]
        segments.append(part.view(BLOCKS, block_tokens, width))
        start += width * block_tokens
    return segments


def blank_like(segments):
    """Segments of the same layout that hold zeros."""
    base = segments[0]._base
    if base is None:
        return [torch.zeros_like(each) for each in segments]
    arena = torch.zeros_like(base)
    return [torch.as_strided(arena, each.shape, each.stride(), each.storage_offset()) for each in segments]


def item_table(mover, form, picks):
    """Items (block, first, tokens, start) behind each other, each start a multiple of 16; and the bytes they need."""
    rows, at = [], 0
    for block, first, tokens in picks:
        rows.append((block, first, tokens, at))
        at += -(-mover.packed_bytes(tokens, form) // 16) * 16
    return np.array(rows, np.int64), at


def packed_pieces(mover, form, items, packed):
    """The bytes of every item."""
    return [packed[start : start + mover.packed_bytes(tokens, form)] for _, _, tokens, start in items.tolist()]


def unit_bytes(segments, block, first, tokens):
    """What a recyclable unit of these tokens holds: uint8."""
    return torch.cat([each[block, first : first + tokens].contiguous().view(-1).view(torch.uint8) for each in segments])
