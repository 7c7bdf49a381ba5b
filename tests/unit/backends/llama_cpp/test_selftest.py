"""The self-test accepts what gives the same bits in any company, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kitelib.abc import SequenceId, StepResult, StepWork
from kitelib.backends.llama_cpp.blocks import StateLayout
from kitelib.backends.llama_cpp.context import ContextOptions, LlamaContext
from kitelib.backends.llama_cpp.library import load_library
from kitelib.backends.llama_cpp.model import GGUFModel
from kitelib.backends.llama_cpp.selftest import PLANS, RowPlan, find_plan
from kitelib.errors import BackendError, BackendStepError


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[GGUFModel]:
    model = GGUFModel.load(tiny_model("llama"), adapters={}, cache_dir=tmp_path_factory.mktemp("cache"), progress=None)
    yield model
    model.close()


class Contexts:
    """Makes real contexts and keeps them, to see that each is closed again."""

    def __init__(self, model: GGUFModel, kind: type[LlamaContext] = LlamaContext) -> None:
        self._model = model
        self._kind = kind
        self.made: list[tuple[RowPlan, LlamaContext]] = []

    def __call__(self, plan: RowPlan) -> LlamaContext:
        options = ContextOptions(
            capacity_tokens=1024,
            max_sequences=4,
            rows=plan.rows,
            min_rows=plan.min_rows,
            row_multiple=plan.row_multiple,
            threads=1,
            flash_attention=True,
        )
        context = self._kind(load_library(), self._model.handle, options, adapters={})
        sequence = context.create()
        context.step([StepWork(sequence, [1, 2, 3], 0, False)])
        context.layout = StateLayout.probe(context.read_range(sequence, 0, 3).tobytes(), [0, 1, 2])
        context.release(sequence)
        self.made.append((plan, context))
        return context

    @property
    def plans(self) -> list[RowPlan]:
        return [plan for plan, _ in self.made]

    def all_closed(self) -> bool:
        return all(context._handle is None for _, context in self.made)


def test_a_plan_is_found_and_every_context_is_closed(model: GGUFModel) -> None:
    contexts = Contexts(model)
    plan = find_plan(contexts, PLANS, model.n_vocab)
    assert plan in PLANS
    assert contexts.plans == list(PLANS[: PLANS.index(plan) + 1])
    assert contexts.all_closed()


def test_the_answer_is_the_same_every_time(model: GGUFModel) -> None:
    assert find_plan(Contexts(model), PLANS, model.n_vocab) == find_plan(Contexts(model), PLANS, model.n_vocab)


class ChunkSensitive(LlamaContext):
    """The last bit of one logit depends on how many tokens the step has."""

    def step(self, work: Sequence[StepWork]) -> StepResult:
        result = super().step(work)
        total = sum(len(item.token_ids) for item in work)
        for logits in result.logits:
            if logits is not None and total % 2:
                logits[7] = np.nextafter(logits[7], np.float32(np.inf))
        return result


class NeighbourSensitive(LlamaContext):
    """The last bit of one logit depends on whether another sequence is in the step."""

    def step(self, work: Sequence[StepWork]) -> StepResult:
        result = super().step(work)
        if len(work) > 1 and result.logits[-1] is not None:
            result.logits[-1][7] = np.nextafter(result.logits[-1][7], np.float32(np.inf))
        return result


class PlaceSensitive(LlamaContext):
    """The last bit of one logit depends on how full the cache is."""

    def step(self, work: Sequence[StepWork]) -> StepResult:
        crowded = self.used_tokens > 512
        result = super().step(work)
        if crowded and result.logits[-1] is not None:
            result.logits[-1][7] = np.nextafter(result.logits[-1][7], np.float32(np.inf))
        return result


class KvSensitive(LlamaContext):
    """One bit of the KV cache depends on how many steps there were; the logits do not."""

    steps = 0

    def step(self, work: Sequence[StepWork]) -> StepResult:
        self.steps += 1
        return super().step(work)

    def export_range(self, *args: Any) -> Any:
        payloads = super().export_range(*args)
        payloads[-1].data[-1] ^= self.steps & 1
        return payloads


class OutputSensitive(LlamaContext):
    """The last bit of one logit depends on how many rows want logits, from so many on."""

    most = 34

    def step(self, work: Sequence[StepWork]) -> StepResult:
        result = super().step(work)
        if sum(1 + item.drafts for item in work if item.logits) >= self.most:
            nudge(result.draft_logits[0][0])
        return result


class DraftSensitive(LlamaContext):
    """The logits before a draft depend on whether a piece of a prompt is in the step."""

    def step(self, work: Sequence[StepWork]) -> StepResult:
        result = super().step(work)
        if any(not item.logits for item in work):
            for rows in result.draft_logits:
                for row in rows:
                    nudge(row)
        return result


class SensitiveToDrafts(LlamaContext):
    """The logits of a lone token depend on whether there are drafts beside it."""

    def step(self, work: Sequence[StepWork]) -> StepResult:
        result = super().step(work)
        if result.draft_logits and len(work[-1].token_ids) == 1:
            nudge(result.logits[-1])
        return result


class Forgetful(LlamaContext):
    """Keeps a draft too many: it takes the next token's place."""

    def truncate(self, sequence: SequenceId, num_tokens: int) -> None:
        super().truncate(sequence, num_tokens)
        super().truncate(sequence, num_tokens - 1)
        super().step([StepWork(sequence, [1], num_tokens - 1, False)])


def nudge(row: Any) -> None:
    row[7] = np.nextafter(row[7], np.float32(np.inf))


@pytest.mark.parametrize(
    "kind",
    [
        ChunkSensitive,
        NeighbourSensitive,
        PlaceSensitive,
        KvSensitive,
        DraftSensitive,
        SensitiveToDrafts,
        Forgetful,
    ],
)
def test_a_single_bit_that_depends_on_the_company_fails_every_plan(model: GGUFModel, kind: type[LlamaContext]) -> None:
    contexts = Contexts(model, kind)
    assert find_plan(contexts, PLANS, model.n_vocab) is None
    assert contexts.plans == list(PLANS)
    assert contexts.all_closed()


def test_a_plan_with_too_many_outputs_is_passed_over(model: GGUFModel) -> None:
    contexts = Contexts(model, OutputSensitive)
    plans = (RowPlan(63, 2, 1), RowPlan(34, 2, 1), RowPlan(33, 2, 1))
    assert find_plan(contexts, plans, model.n_vocab) == plans[2]


class FailsAbove32Rows(LlamaContext):
    """A step fails on the larger plans."""

    def step(self, work: Sequence[StepWork]) -> StepResult:
        if self.options.rows > 32 and work[-1].logits:
            raise BackendStepError("no such kernel")
        return super().step(work)


def test_a_plan_whose_steps_fail_is_passed_over(model: GGUFModel) -> None:
    contexts = Contexts(model, FailsAbove32Rows)
    plans = (RowPlan(63, 2, 1), RowPlan(30, 2, 1))
    assert find_plan(contexts, plans, model.n_vocab) == plans[1]
    assert contexts.all_closed()


def test_a_context_that_can_not_be_made_is_passed_over(model: GGUFModel) -> None:
    contexts = Contexts(model)

    def make(plan: RowPlan) -> LlamaContext:
        if plan == PLANS[0]:
            raise BackendError("no memory")
        return contexts(plan)

    plan = find_plan(make, PLANS, model.n_vocab)
    assert plan in PLANS[1:]
    assert PLANS[0] not in contexts.plans


def test_without_plans_there_is_none(model: GGUFModel) -> None:
    assert find_plan(Contexts(model), (), model.n_vocab) is None
