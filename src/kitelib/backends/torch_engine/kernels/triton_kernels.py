# Triton compiles these functions: their parameters have no Python types, and triton ships none itself.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The CUDA kernels of the paged attention; `triton_attention` chooses their shapes and starts them.

How the work is cut. A *tile* is `tile_m` pairs of a row and a query head: some neighbouring rows of one sequence times
the query heads that share a KV head, so that each key and value read from memory serves all of them. The positions
that a sequence attends to are cut into *spans*. A program takes one tile and, of its spans, every `num_programs(2)`-th;
inside a span it walks over `tile_n` positions at a time with the usual running maximum, sum and accumulator in float32.

How one row gets the same bits everywhere (`fixed_span` > 0, numerics "bitwise"):

- Spans begin at multiples of `fixed_span`, and the steps inside a span at multiples of `tile_n`: absolute positions,
  whatever the length of the sequence, the number of its new rows or the batch.
- Partial results of spans are merged from the first to the last by `_merge`, in one program (`combine`) or by `reduce`
  from memory, where they lie in float32, so nothing is rounded in between.
- The tile has one shape, whether it holds one decoded row or a piece of a prompt, and the matrix instructions compute
  each row of a tile from that row alone.
- A step or span in which a row sees nothing leaves it as it is: the maximum stays, the factors are exactly 1 and 0.
- The launcher forbids contraction of multiplications and additions, which the compiler could choose differently in
  `combine` and `reduce`.

Otherwise (`fixed_span` 0) spans are as long as it takes to fill the device.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["attend", "reduce", "write_pages"]


@triton.jit
def write_pages(
    key,
    value,
    key_pages,
    value_pages,
    out,
    slots,
    key_row,
    key_head,
    value_row,
    value_head,
    key_block,
    value_block,
    block_tokens: tl.constexpr,
    kv_heads: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    key_pad: tl.constexpr,
    value_pad: tl.constexpr,
    heads_tile: tl.constexpr,
    out_width: tl.constexpr,
    out_tile: tl.constexpr,
):
    """Copies the key and the value of one row to its slot; clears the output of a row of padding.

    Grid: (rows, tiles of KV heads).
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot < 0:
        if tl.program_id(1) == 0:
            for start in range(0, out_width, out_tile):
                column = start + tl.arange(0, out_tile)
                tl.store(out + row * out_width + column, tl.zeros([out_tile], out.dtype.element_ty), column < out_width)
        return
    block = slot // block_tokens
    token = slot % block_tokens
    head = tl.program_id(1) * heads_tile + tl.arange(0, heads_tile)[:, None]
    channel = tl.arange(0, key_pad)[None, :]
    inside = (head < kv_heads) & (channel < key_dim)
    new = tl.load(key + row * key_row + head * key_head + channel, inside)
    page = key_pages + block * key_block + token * (kv_heads * key_dim)
    tl.store(page + head * key_dim + channel, new, inside)
    channel = tl.arange(0, value_pad)[None, :]
    inside = (head < kv_heads) & (channel < value_dim)
    new = tl.load(value + row * value_row + head * value_head + channel, inside)
    page = value_pages + block * value_block + token * (kv_heads * value_dim)
    tl.store(page + head * value_dim + channel, new, inside)


@triton.jit
def _sequence_of(index, row_starts, num_sequences, tile_rows: tl.constexpr):
    """The sequence of a tile, the last one whose first tile, row_starts[i] // tile_rows + i, is not after `index`.

    With 0 rows per tile, the sequence of the row `index`: the last one that does not begin after it.
    """
    low = index * 0
    high = low + num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        start = tl.load(row_starts + middle)
        before = (start // tile_rows + middle if tile_rows > 0 else start) <= index
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


@triton.jit
def _extent(row_starts, contexts, sequence):
    """First row of a sequence in the pass, its rows, and its tokens."""
    row_start = tl.load(row_starts + sequence)
    return row_start, tl.load(row_starts + sequence + 1) - row_start, tl.load(contexts + sequence)


@triton.jit
def _tile(row_starts, num_sequences, single: tl.constexpr, tile_rows: tl.constexpr):
    """Sequence of this program's tile, and its first row among those of the sequence, which may lie beyond them."""
    index = tl.program_id(0)
    sequence = index
    tile_row = index * 0
    if not single:
        # The last rows of a long prompt take longest, so they begin first.
        index = tl.num_programs(0) - 1 - index
        sequence = _sequence_of(index, row_starts, num_sequences, tile_rows)
        tile_row = (index - sequence - tl.load(row_starts + sequence) // tile_rows) * tile_rows
    return sequence, tile_row


@triton.jit
def _members(group: tl.constexpr, group_tile: tl.constexpr, tile_m: tl.constexpr):
    """KV head of the program's tile; query head and index of the row of each member, and whether it is used."""
    groups: tl.constexpr = (group + group_tile - 1) // group_tile
    kv_head = tl.program_id(1) // groups
    member = tl.arange(0, tile_m)
    in_group = tl.program_id(1) % groups * group_tile + member % group_tile
    tile_index = member // group_tile
    used = (tile_index < tile_m // group_tile) & (in_group < group)
    return kv_head, kv_head * group + in_group, tile_index, used


@triton.jit
def _quotient(acc, total):
    """The weighted mean of the values; 0 for members of a tile that are no rows and saw nothing."""
    return acc / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit
def _spans(
    context, num_rows, window, num_spans, windowed: tl.constexpr, fixed_span: tl.constexpr, tile_n: tl.constexpr
):
    """Position where the spans of a sequence begin in this pass, and positions in a span."""
    unit: tl.constexpr = fixed_span if fixed_span > 0 else tile_n
    lowest = context * 0
    if windowed:
        lowest = tl.maximum(context - num_rows - window + 1, 0) // unit * unit
    size = lowest * 0 + unit
    if fixed_span == 0:
        # A span shorter than 256 positions costs more to merge than it gains.
        size = tl.maximum((tl.cdiv(context - lowest, num_spans) + unit - 1) // unit * unit, 256)
    return lowest, size


@triton.jit
def _nothing(rows: tl.constexpr, value_pad: tl.constexpr):
    """Running maximum, sum and accumulator of rows that have seen no position."""
    return (
        tl.full([rows], float("-inf"), tl.float32),
        tl.zeros([rows], tl.float32),
        tl.zeros([rows, value_pad], tl.float32),
    )


@triton.jit
def _merge(maximum, total, acc, new_maximum, new_total, new_acc):
    """The state after the positions of both; -inf, 0 and 0 is the state of no positions."""
    top = tl.maximum(maximum, new_maximum)
    # Differences of two -inf are no number; a row that has seen nothing has factors 0.
    finite = tl.where(top == float("-inf"), 0.0, top)
    old_factor = tl.exp2(maximum - finite)
    new_factor = tl.exp2(new_maximum - finite)
    return (
        top,
        total * old_factor + new_total * new_factor,
        acc * old_factor[:, None] + new_acc * new_factor[:, None],
    )


@triton.jit
def _walk(
    maximum,
    total,
    acc,
    query,
    positions,
    start,
    end,
    last,
    table,
    key_pages,
    value_pages,
    key_block,
    value_block,
    scale,
    inner_scale,
    window,
    masked: tl.constexpr,
    windowed: tl.constexpr,
    capped: tl.constexpr,
    block_tokens: tl.constexpr,
    kv_heads: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    key_pad: tl.constexpr,
    value_pad: tl.constexpr,
    tile_n: tl.constexpr,
):
    """Takes the positions start .. end - 1, of which those up to `last` exist, into the state of the tile's rows.

    `start` is a multiple of tile_n. Without `masked`, all rows see all of these positions and `end` is a multiple, too.
    The key and value pointers are those of the tile's KV head.
    """
    key_channel = tl.arange(0, key_pad)[None, :]
    value_channel = tl.arange(0, value_pad)[None, :]
    for first in range(start, end, tile_n):
        position = first + tl.arange(0, tile_n)
        exists = position <= last if masked else position >= 0
        # Beyond the last position the table holds anything, and the blocks' values must still be numbers: a weight of
        # 0 would not cancel an infinity.
        table_at = table + position // block_tokens
        block = (tl.load(table_at, exists, other=0) if masked else tl.load(table_at)).to(tl.int64)
        token = position % block_tokens
        key_at = key_pages + (block * key_block + token * (kv_heads * key_dim))[:, None] + key_channel
        key_inside = (key_channel < key_dim) & exists[:, None] if masked else key_channel < key_dim
        keys = tl.load(key_at, key_inside, other=0.0)  # (tile_n, key_pad)
        value_at = value_pages + (block * value_block + token * (kv_heads * value_dim))[:, None] + value_channel
        value_inside = (value_channel < value_dim) & exists[:, None] if masked else value_channel < value_dim
        values = tl.load(value_at, value_inside, other=0.0)  # (tile_n, value_pad)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee")  # (tile_m, tile_n)
        # With a cap: scale * tanh(scores), without a library call that the interpreter lacks.
        scores = scale * (1.0 - 2.0 / (tl.exp2(scores * inner_scale) + 1.0)) if capped else scores * scale
        if masked:
            visible = position[None, :] <= positions[:, None]
            if windowed:
                visible = visible & (position[None, :] > positions[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
        top = tl.maximum(maximum, tl.max(scores, 1))
        finite = tl.where(top == float("-inf"), 0.0, top)
        weights = tl.exp2(scores - finite[:, None])
        factor = tl.exp2(maximum - finite)
        total = total * factor + tl.sum(weights, 1)
        acc = tl.dot(weights.to(values.dtype), values, acc * factor[:, None], input_precision="ieee")
        maximum = top
    return maximum, total, acc


@triton.jit(do_not_specialize=["num_rows", "num_sequences", "table_stride", "num_spans"])
def attend(
    query,
    key_pages,
    value_pages,
    out,
    partial,
    partial_stats,
    row_starts,
    contexts,
    tables,
    slots,
    num_rows,
    num_sequences,
    table_stride,
    query_row,
    query_head,
    key_block,
    value_block,
    scale,
    inner_scale,
    window,
    num_spans,
    windowed: tl.constexpr,
    capped: tl.constexpr,
    block_tokens: tl.constexpr,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    key_pad: tl.constexpr,
    value_pad: tl.constexpr,
    single: tl.constexpr,
    mode: tl.constexpr,
    fixed_span: tl.constexpr,
    group_tile: tl.constexpr,
    tile_m: tl.constexpr,
    tile_n: tl.constexpr,
):
    """Attention of one tile. Grid: (tiles of rows, KV heads * tiles of a group, programs that share the spans).

    Args:
        partial: float32 (rows, query heads, num_spans, value_dim): accumulators of spans.
        partial_stats: float32 (2, rows, query heads, num_spans): their maxima and sums.
        scale: factor of the scores that makes them exponents of 2; with a cap, the cap in that unit.
        inner_scale: with a cap, factor of the scores that makes them twice the argument of tanh, in that unit.
        single: every sequence has one row, so a tile is a sequence; otherwise the tiles are those of `_sequence_of`.
        mode: "whole": one program walks over all positions; "combine": likewise, but span by span; "partial": spans
            go to `partial`, and `reduce` has to follow.
        group_tile: query heads of a tile, of the `group` that share a KV head.
    """
    tile_rows: tl.constexpr = tile_m // group_tile
    sequence, tile_row = _tile(row_starts, num_sequences, single, tile_rows)
    row_start, sequence_rows, context = _extent(row_starts, contexts, sequence)
    if tile_row >= sequence_rows or context <= 0:
        return
    low_position = context - sequence_rows + tile_row
    last = tl.minimum(low_position + tile_rows, context) - 1
    lowest = tl.maximum(low_position - window + 1, 0) if windowed else low_position * 0

    # The grid's third dimension shares the spans that this tile sees.
    begin, size = _spans(context, sequence_rows, window, num_spans, windowed, fixed_span, tile_n)
    programs = tl.num_programs(2)
    first_span = (lowest - begin) // size
    last_span = (last - begin) // size
    first_span += (tl.program_id(2) + programs - first_span % programs) % programs
    if mode != "whole" and first_span > last_span:
        return

    kv_head, head, tile_index, in_tile = _members(group, group_tile, tile_m)
    row = (row_start + tile_row + tile_index).to(tl.int64)
    real = in_tile & (tile_row + tile_index < sequence_rows)
    real = real & (tl.load(slots + row, real, other=-1) >= 0)
    positions = low_position + tile_index

    channel = tl.arange(0, key_pad)[None, :]
    query_at = query + (row * query_row + head * query_head)[:, None] + channel
    queries = tl.load(query_at, real[:, None] & (channel < key_dim), other=0.0)
    table = tables + sequence.to(tl.int64) * table_stride
    key_pages += kv_head * key_dim
    value_pages += kv_head * value_dim
    value_channel = tl.arange(0, value_pad)[None, :]
    out_row = row * (kv_heads * group) + head
    stored = real[:, None] & (value_channel < value_dim)

    maximum, total, acc = _nothing(tile_m, value_pad)
    if mode == "whole":
        # Positions that all rows of the tile see need no mask.
        start = lowest // tile_n * tile_n
        middle = start
        if not windowed and not single:
            middle = (low_position + 1) // tile_n * tile_n
            maximum, total, acc = _walk(
                maximum, total, acc, queries, positions, start, middle, last, table, key_pages, value_pages,
                key_block, value_block, scale, inner_scale, window, False, windowed, capped, block_tokens, kv_heads,
                key_dim, value_dim, key_pad, value_pad, tile_n,
            )  # fmt: skip
        maximum, total, acc = _walk(
            maximum, total, acc, queries, positions, middle, last + 1, last, table, key_pages, value_pages,
            key_block, value_block, scale, inner_scale, window, True, windowed, capped, block_tokens, kv_heads,
            key_dim, value_dim, key_pad, value_pad, tile_n,
        )  # fmt: skip
    else:
        for span in range(first_span, last_span + 1, programs):
            start = tl.maximum(begin + span * size, lowest // tile_n * tile_n)
            maximum0, total0, acc0 = _nothing(tile_m, value_pad)
            maximum0, total0, acc0 = _walk(
                maximum0, total0, acc0, queries, positions, start, tl.minimum(begin + (span + 1) * size, last + 1), last, table, key_pages,
                value_pages, key_block, value_block, scale, inner_scale, window, True, windowed, capped, block_tokens,
                kv_heads, key_dim, value_dim, key_pad, value_pad, tile_n,
            )  # fmt: skip
            if mode == "partial":
                at = out_row * num_spans + span
                tl.store(partial_stats + at, maximum0, real)
                tl.store(
                    partial_stats + tl.cast(num_rows, tl.int64) * (kv_heads * group) * num_spans + at, total0, real
                )
                tl.store(partial + at[:, None] * value_dim + value_channel, acc0, stored)
            else:
                maximum, total, acc = _merge(maximum, total, acc, maximum0, total0, acc0)
    if mode != "partial":
        result = _quotient(acc, total).to(out.dtype.element_ty)
        tl.store(out + out_row[:, None] * value_dim + value_channel, result, stored)


@triton.jit
def _load_span(partial, partial_stats, stats_size, at, span, limits, channel, value_dim: tl.constexpr):
    """State of one span for some query heads of a row; that of no positions after their last span, `limits`."""
    exists = span <= limits
    maximum = tl.load(partial_stats + at + span, exists, other=float("-inf"))
    total = tl.load(partial_stats + stats_size + at + span, exists, other=0.0)
    inside = exists[:, None] & (channel < value_dim)
    acc = tl.load(partial + (at + span)[:, None] * value_dim + channel, inside, other=0.0)
    return maximum, total, acc


@triton.jit(do_not_specialize=["num_rows", "num_sequences", "num_spans"])
def reduce(
    out,
    partial,
    partial_stats,
    row_starts,
    contexts,
    slots,
    num_rows,
    num_sequences,
    window,
    num_spans,
    windowed: tl.constexpr,
    num_heads: tl.constexpr,
    value_dim: tl.constexpr,
    value_pad: tl.constexpr,
    single: tl.constexpr,
    fixed_span: tl.constexpr,
    heads_tile: tl.constexpr,
    tile_n: tl.constexpr,
):
    """Merges the spans of one row, first to last. Grid: (rows, tiles of query heads)."""
    row = tl.program_id(0)
    if tl.load(slots + row) < 0:
        return
    sequence = row
    if not single:
        sequence = _sequence_of(row, row_starts, num_sequences, 0)
    row_start, sequence_rows, context = _extent(row_starts, contexts, sequence)
    position = context - sequence_rows + row - row_start
    if context <= 0 or row - row_start >= sequence_rows:
        return
    begin, size = _spans(context, sequence_rows, window, num_spans, windowed, fixed_span, tile_n)
    first_span = row * 0
    if windowed:
        first_span = (tl.maximum(position - window + 1, 0) - begin) // size
    last_span = (position - begin) // size

    head = tl.program_id(1) * heads_tile + tl.arange(0, heads_tile)
    limits = tl.where(head < num_heads, last_span, -1)
    channel = tl.arange(0, value_pad)[None, :]
    at = (row.to(tl.int64) * num_heads + head) * num_spans
    stats_size = num_rows.to(tl.int64) * num_heads * num_spans
    maximum, total, acc = _nothing(heads_tile, value_pad)
    for span in range(first_span, last_span + 1, 8):
        # Eight spans are on their way at once; they are merged one after the other all the same.
        m0, t0, a0 = _load_span(partial, partial_stats, stats_size, at, span, limits, channel, value_dim)
        m1, t1, a1 = _load_span(partial, partial_stats, stats_size, at, span + 1, limits, channel, value_dim)
        m2, t2, a2 = _load_span(partial, partial_stats, stats_size, at, span + 2, limits, channel, value_dim)
        m3, t3, a3 = _load_span(partial, partial_stats, stats_size, at, span + 3, limits, channel, value_dim)
        m4, t4, a4 = _load_span(partial, partial_stats, stats_size, at, span + 4, limits, channel, value_dim)
        m5, t5, a5 = _load_span(partial, partial_stats, stats_size, at, span + 5, limits, channel, value_dim)
        m6, t6, a6 = _load_span(partial, partial_stats, stats_size, at, span + 6, limits, channel, value_dim)
        m7, t7, a7 = _load_span(partial, partial_stats, stats_size, at, span + 7, limits, channel, value_dim)
        maximum, total, acc = _merge(maximum, total, acc, m0, t0, a0)
        maximum, total, acc = _merge(maximum, total, acc, m1, t1, a1)
        maximum, total, acc = _merge(maximum, total, acc, m2, t2, a2)
        maximum, total, acc = _merge(maximum, total, acc, m3, t3, a3)
        maximum, total, acc = _merge(maximum, total, acc, m4, t4, a4)
        maximum, total, acc = _merge(maximum, total, acc, m5, t5, a5)
        maximum, total, acc = _merge(maximum, total, acc, m6, t6, a6)
        maximum, total, acc = _merge(maximum, total, acc, m7, t7, a7)
    result = _quotient(acc, total).to(out.dtype.element_ty)
    out_at = out + (row.to(tl.int64) * num_heads + head)[:, None] * value_dim + channel
    tl.store(out_at, result, (head < num_heads)[:, None] & (channel < value_dim))
