"""A step's work as rows: where each token goes, what is padded, and which rows have logits."""

from __future__ import annotations

import numpy as np
import pytest

from kitelib.abc import StepWork, TokenDraw
from kitelib.backends.torch_engine.blocks import BlockTables
from kitelib.backends.torch_engine.packing import RowPlan, pack

DRAW = TokenDraw(0.0, 0, 1.0, 0.0, 0.0)


def tables_with(*lengths: int) -> tuple[BlockTables, list]:
    """Sequences of these lengths, in blocks of 4 that lie in no order."""
    tables = BlockTables(32, 4, 8, lambda source, target: None)
    tables._free = [5, 1, 9, 3, 7, 2, 8, 4, 6, 0]
    sequences = [tables.create(None) for _ in lengths]
    for sequence, length in zip(sequences, lengths, strict=True):
        tables.extend(sequence, length)
    return tables, sequences


@pytest.mark.parametrize(
    ("plan", "rows", "padded"),
    [
        (RowPlan(1, 256), 1, 1),
        (RowPlan(4, 256), 1, 4),
        (RowPlan(4, 256), 5, 5),
        (RowPlan(64, 128, 16), 3, 64),
        (RowPlan(64, 128, 16), 65, 80),
        (RowPlan(64, 64, 64), 64, 64),
    ],
)
def test_rows_are_padded_to_the_plan(plan: RowPlan, rows: int, padded: int) -> None:
    assert plan.padded(rows) == padded


def test_rows_of_a_mixed_step() -> None:
    tables, (first, second) = tables_with(3, 5)
    work = [StepWork(first, [10, 11, 12, 13], 3, False), StepWork(second, [20], 5, True)]
    for item in work:
        tables.extend(item.sequence, len(item.token_ids))
    # Blocks, from the end of the free list: first has 0 and, later, 8; second has 6 and 4.
    packed = pack(tables, work, RowPlan(8, 64))
    assert packed.ids.tolist() == [10, 11, 12, 13, 20, 0, 0, 0]
    assert packed.positions.tolist() == [3, 4, 5, 6, 5, 0, 0, 0]
    assert packed.slots.tolist() == [3, 32, 33, 34, 17, -1, -1, -1]
    assert packed.row_starts.tolist() == [0, 4, 5]
    assert packed.contexts.tolist() == [7, 6]
    assert packed.tables.tolist() == [[0, 8], [6, 4]]
    assert packed.select.tolist() == [4] * 8  # the last one again, as padding
    assert (packed.num_outputs, packed.max_rows, packed.num_rows, packed.is_decode) == (1, 4, 8, False)


def test_step_without_logits_selects_no_row() -> None:
    tables, (sequence,) = tables_with(0)
    tables.extend(sequence, 2)
    packed = pack(tables, [StepWork(sequence, [1, 2], 0, False)], RowPlan(4, 64))
    assert (packed.select.tolist(), packed.num_outputs) == ([], 0)


@pytest.mark.parametrize("draw", [None, DRAW])
def test_one_row_for_everybody_is_a_decode_step(draw: TokenDraw | None) -> None:
    tables, sequences = tables_with(4, 1, 7)
    work = [
        StepWork(sequence, [30 + place], length, draw is None, () if draw is None else (draw,))
        for place, (sequence, length) in enumerate(zip(sequences, (4, 1, 7), strict=True))
    ]
    for item in work:
        tables.extend(item.sequence, 1)
    packed = pack(tables, work, RowPlan(1, 64))
    assert packed.is_decode
    assert packed.select.tolist() == [0, 1, 2]
    assert packed.positions.tolist() == [4, 1, 7]
    without = [*work[:2], StepWork(sequences[2], [32], 7, False)]
    assert not pack(tables, without, RowPlan(1, 64)).is_decode


def test_every_real_row_has_a_slot_of_its_own() -> None:
    rng = np.random.default_rng(0)
    for _ in range(30):
        lengths = rng.integers(0, 5, 4).tolist()
        tables = BlockTables(64, 4, 8, lambda source, target: None)
        sequences = [tables.create(None) for _ in lengths]
        counts = rng.integers(1, 6, 4).tolist()
        work = []
        for sequence, length, count in zip(sequences, lengths, counts, strict=True):
            tables.extend(sequence, length)
            tables.extend(sequence, count)
            work.append(StepWork(sequence, list(range(count)), length, bool(rng.integers(2))))
        packed = pack(tables, work, RowPlan(1, 64, 8))
        total = sum(counts)
        assert len(set(packed.slots[:total].tolist())) == total
        assert (packed.slots[total:] == -1).all()
        for place, item in enumerate(work):
            table = tables[item.sequence]
            for offset in range(len(item.token_ids)):
                position = item.start + offset
                slot = int(table.blocks[position // 4]) * 4 + position % 4
                assert packed.slots[packed.row_starts[place] + offset] == slot


def test_plan_lists_all_slots_for_latent_attention() -> None:
    tables, (first, second) = tables_with(3, 4)
    work = [StepWork(first, [1, 2], 3, True), StepWork(second, [3], 4, True)]
    for item in work:
        tables.extend(item.sequence, len(item.token_ids))
    plan = pack(tables, work, RowPlan(8, 64)).plan("cpu", history=True)
    assert plan.history is not None
    found = plan.history.tolist()
    # Blocks 0 and 4 hold the first sequence's five tokens, 6 and 8 the second's.
    assert found == [0, 1, 2, 3, 16, 24, 25, 26, 27, 32]
    assert (plan.num_rows, plan.num_real, plan.num_sequences, plan.max_context) == (8, 3, 2, 5)
    assert pack(tables, work, RowPlan(8, 64)).plan("cpu", history=False).history is None
