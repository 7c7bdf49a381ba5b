"""The self-test finds the row numbers under which nothing depends on company, with runners whose flaws are known."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kitelib.abc import StepResult, StepWork
from kitelib.backends.torch_engine.blocks import BlockTables
from kitelib.backends.torch_engine.packing import RowPlan
from kitelib.backends.torch_engine.selftest import CUDA_PLANS, PLANS, TEST_TOKENS, find_plan
from kitelib.errors import BackendStepError

Way = Callable[[int, int, str | None], Any]
"""Rows of the pass, rows with logits, adapter -> the way of summing that a matrix library takes."""
Attention = Callable[[int, int], Any]
"""Tokens before an item's, its rows -> the way of summing that attention takes for it."""


class FakeRunner:
    """KV and logits are digests of a sequence's own tokens and of the way of summing in which each was computed; with
    `tiles`, its matrices compute as many rows at once as the plan says. Outputs are padded as the plan says."""

    def __init__(
        self, plan: RowPlan, way: Way, *, tiles: bool = False, attention: Attention = lambda start, rows: 0
    ) -> None:
        self.tables = BlockTables(TEST_TOKENS // 4 + 100, 4, 100, lambda source, target: None)
        self._plan = plan
        self._way = way
        self._attention = attention
        self._tile = plan.tile if tiles and plan.tile else 2**31
        self._kv: dict[int, list[bytes]] = {}

    def step(self, work: Sequence[StepWork]) -> StepResult:
        total = sum(len(item.token_ids) for item in work)
        assert total <= self._plan.max_rows
        outputs = sum(1 + item.drafts for item in work if item.logits)
        padded = [min(self._plan.padded(rows), self._tile) for rows in (total, outputs)]
        logits: list[Any] = []
        drafts: list[Any] = []
        for item in work:
            table = self.tables[item.sequence]
            assert item.start == table.num_tokens
            assert 0 <= item.drafts < len(item.token_ids)
            self.tables.extend(item.sequence, len(item.token_ids))
            kv = self._kv.setdefault(int(item.sequence), [])
            del kv[item.start :]
            way = self._way(*padded, table.adapter), self._attention(item.start, len(item.token_ids))
            for token in item.token_ids:
                past = b"".join(kv[-1:])
                kv.append(hashlib.sha256(past + repr((token, way)).encode()).digest())
            rows = [np.frombuffer(row, np.uint8).astype(np.float32) for row in kv[-1 - item.drafts :]]
            logits.append(rows[-1] if item.logits else None)
            drafts.append(rows[:-1] if item.logits else [])
        return StepResult(logits, draft_logits=drafts if any(item.drafts for item in work) else ())

    def truncate(self, sequence: Any, num_tokens: int) -> None:
        self.tables.shrink(sequence, num_tokens)

    def export(self, sequence: Any, first: int, count: int, end: int | None) -> list[Any]:
        kv = self._kv[int(sequence)][first * 4 : (first + count) * 4]
        return [SimpleNamespace(data=np.frombuffer(b"".join(kv), np.uint8))]


def found(
    way: Way, plans: Any = PLANS, adapters: Sequence[str] = (), *, max_outputs: int = 16, **options: Any
) -> RowPlan | None:
    return find_plan(lambda plan: FakeRunner(plan, way, **options), plans, 1000, max_outputs, adapters)  # type: ignore[arg-type,return-value]


def test_sound_kernels_need_no_padding() -> None:
    assert found(lambda rows, outputs, adapter: 0) == RowPlan(1, 256)
    assert found(lambda rows, outputs, adapter: 0, CUDA_PLANS) == CUDA_PLANS[0]


@pytest.mark.parametrize(("least", "plan"), [(2, RowPlan(2, 256)), (3, RowPlan(4, 256)), (16, RowPlan(16, 256))])
def test_few_rows_are_padded_to_where_kernels_agree(least: int, plan: RowPlan) -> None:
    assert found(lambda rows, outputs, adapter: rows >= least) == plan


def test_kernels_that_change_in_the_middle_are_kept_on_one_side() -> None:
    assert found(lambda rows, outputs, adapter: rows > 32) == RowPlan(64, 256, 16)
    assert found(lambda rows, outputs, adapter: (rows > 32, rows > 128)) == RowPlan(64, 128, 16)
    assert found(lambda rows, outputs, adapter: min(rows, 63) if rows > 32 else 0) == RowPlan(64, 256, 16)


def test_tiles_make_passes_of_any_size_alike() -> None:
    assert found(lambda rows, outputs, adapter: rows > 32, tiles=True) == RowPlan(1, 256, tile=32)
    assert found(lambda rows, outputs, adapter: (rows > 3, rows > 32), tiles=True) == RowPlan(4, 256, 4, tile=32)
    assert found(lambda rows, outputs, adapter: (rows > 15, rows > 16), tiles=True) == RowPlan(16, 256, 16, tile=16)


def test_if_every_number_of_rows_is_another_kernel_one_number_is_left() -> None:
    assert found(lambda rows, outputs, adapter: rows) == RowPlan(64, 64, 64)
    assert found(lambda rows, outputs, adapter: rows, CUDA_PLANS) == CUDA_PLANS[0]


def test_odd_numbers_of_rows_are_noticed() -> None:
    assert found(lambda rows, outputs, adapter: rows % 16 == 0) == RowPlan(16, 256, 16, tile=16)


def test_bits_that_hang_on_the_number_of_logits_need_padding() -> None:
    assert found(lambda rows, outputs, adapter: outputs > 2) == RowPlan(4, 256)
    assert found(lambda rows, outputs, adapter: outputs) == RowPlan(16, 256)
    assert found(lambda rows, outputs, adapter: outputs, max_outputs=200) == RowPlan(64, 64, 64)
    assert found(lambda rows, outputs, adapter: outputs > 100, max_outputs=100) == RowPlan(1, 256)
    assert found(lambda rows, outputs, adapter: outputs > 100, max_outputs=101) == RowPlan(64, 64, 64)
    assert found(lambda rows, outputs, adapter: outputs > 100, max_outputs=500, tiles=True) == RowPlan(1, 256, tile=32)


@pytest.mark.parametrize(
    "attention",
    [
        lambda start, rows: start > 180 and rows > 1,
        lambda start, rows: start > 180 and rows > 8,
        lambda start, rows: start > 192 and rows == 1,
    ],
)
def test_drafts_late_in_a_text_have_to_hold(attention: Attention) -> None:
    """Whatever the number of rows, these are not what the same tokens give one by one."""
    assert found(lambda rows, outputs, adapter: 0, attention=attention) is None
    assert found(lambda rows, outputs, adapter: 0, attention=lambda start, rows: start > 400) == RowPlan(1, 256)


def test_bits_that_change_by_themselves_hold_nowhere() -> None:
    calls = iter(range(10**6))
    assert found(lambda rows, outputs, adapter: next(calls)) is None


def test_each_adapter_has_to_hold_too() -> None:
    def way(rows: int, outputs: int, adapter: str | None) -> Any:
        return adapter == "tone" and rows < 4

    assert found(way) == RowPlan(1, 256)
    assert found(way, adapters=["other"]) == RowPlan(1, 256)
    assert found(way, adapters=["other", "tone"]) == RowPlan(4, 256)


def test_steps_that_fail_prove_nothing() -> None:
    def way(rows: int, outputs: int, adapter: str | None) -> Any:
        if rows > 32:
            raise BackendStepError("no memory for so many rows")
        return 0

    assert found(way) == RowPlan(1, 32)


def test_nothing_stays_in_the_cache() -> None:
    runners = []

    def make(plan: RowPlan) -> Any:
        runners.append(FakeRunner(plan, lambda rows, outputs, adapter: rows >= 4))
        return runners[-1]

    assert find_plan(make, PLANS, 1000, 16) == RowPlan(4, 256)
    assert len(runners) == 3
    # What a plan that fails left behind goes with its runner.
    assert runners[-1].tables.free_blocks == runners[-1].tables.num_blocks
