"""One step of the model: from the branches the scheduler chose to what the backend gave. Model's thread only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kitelib.abc import Backend, OverlappingBackend, SequenceId, StepResult, StepWork
from kitelib.engine.request import Branch

__all__ = ["Steps", "extents", "outputs_of"]


class Steps:
    """Runs steps. `meanwhile` is what the thread does beside a step, if the backend computes elsewhere."""

    def __init__(self, backend: Backend, meanwhile: Callable[[], None]) -> None:
        self._backend = backend
        self._meanwhile = meanwhile
        self._begin = backend.begin_step if isinstance(backend, OverlappingBackend) else None

    @property
    def overlap(self) -> bool:
        """Whether `meanwhile` is called during every step."""
        return self._begin is not None

    def run(self, work: Sequence[tuple[Branch, int]]) -> StepResult:
        """Gives each branch its next tokens. Those with all tokens computed get logits, or the next token drawn.

        Raises:
            BackendStepError: nothing was processed.
        """
        items = [self._item(branch, count) for branch, count in work]
        if self._begin is None:
            return self._backend.step(items)
        wait = self._begin(items)
        self._meanwhile()
        return wait()

    def _item(self, branch: Branch, count: int) -> StepWork:
        run = branch.run
        assert run.sequence is not None
        complete = count == run.remaining
        # The logits after a prompt are kept; later ones only serve to choose a token.
        drawing = complete and branch.new_tokens and branch.constraint is None and self._backend.info.draws_tokens
        draws = branch.sampler.draws(1 + len(branch.draft)) if drawing else ()
        tokens = [*run.tokens[run.computed : run.computed + count], *branch.draft]
        return StepWork(run.sequence, tokens, run.computed, complete and not draws, draws, len(branch.draft))


def extents(work: Iterable[tuple[Branch, int]]) -> list[tuple[SequenceId, int]]:
    """The sequences of branches, and how many tokens each gets."""
    return [(branch.run.sequence, count) for branch, count in work if branch.run.sequence is not None]


def outputs_of(result: StepResult, place: int) -> list[npt.NDArray[np.float32] | int]:
    """What the model said at one place of a step, in order: tokens that it drew, or logits; nothing if nothing was
    asked for."""
    if result.tokens and result.tokens[place]:
        return list(result.tokens[place])
    last = result.logits[place]
    if last is None:
        return []
    return [*(result.draft_logits[place] if result.draft_logits else ()), last]
