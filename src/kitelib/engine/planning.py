"""Which active branch gets how many of its tokens in the next step. Model's thread only."""

from __future__ import annotations

from collections.abc import Sequence

from kitelib.abc import Backend
from kitelib.engine.late_blocks import LateBlocks
from kitelib.engine.request import Branch
from kitelib.engine.splicing import cut_at_splice
from kitelib.engine.steps import extents

__all__ = ["StepPlanner"]


class StepPlanner:
    """Decoding branches first, one token each; then pieces of prompts, up to what one step may hold."""

    def __init__(self, backend: Backend, late: LateBlocks) -> None:
        self._backend = backend
        self._late = late
        self._last_adapter: str | None = None

    def ready(self, active: Sequence[Branch]) -> list[Branch]:
        """The branches that can go on in this step, the most urgent first."""
        adapter = self._choose_adapter(active)
        mixes = self._backend.info.mixes_adapters
        ready = [each for each in active if each.run.remaining and (mixes or each.run.adapter == adapter)]
        return sorted(ready, key=lambda branch: branch.order)

    def decoding(self, ready: Sequence[Branch]) -> list[Branch]:
        """Those of them that only have to compute their last token."""
        decodes = [branch for branch in ready if branch.run.remaining == 1]
        most = self._backend.info.max_step_tokens
        if len(decodes) > most:  # those that are behind go first
            decodes = sorted(decodes, key=lambda branch: len(branch.new_tokens))[:most]
        return decodes

    def work(self, ready: Sequence[Branch], decodes: Sequence[Branch]) -> list[tuple[Branch, int]]:
        """The step: branches, and how many tokens each gets. There must be room for those that decode."""
        work = [(branch, 1) for branch in decodes]
        budget = self._backend.info.max_step_tokens - len(work)
        for branch in ready:
            if branch.run.remaining > 1:
                most = min(branch.run.remaining, budget, self._backend.room(branch.run.sequence, extents(work)))
                if most <= 0:
                    break
                count = cut_at_splice(branch, self._late.aligned(branch, most))
                work.append((branch, count))
                budget -= count
        return work[: self._backend.info.max_sequences]

    def _choose_adapter(self, active: Sequence[Branch]) -> str | None:
        """Adapters take turns where a step can have only one."""
        adapters: list[str | None] = []
        for branch in active:
            if branch.run.adapter not in adapters:
                adapters.append(branch.run.adapter)
        if not adapters:
            return None
        if self._last_adapter in adapters:
            adapters = adapters[adapters.index(self._last_adapter) + 1 :] + adapters
        self._last_adapter = adapters[0]
        return adapters[0]
