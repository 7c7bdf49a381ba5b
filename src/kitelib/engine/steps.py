"""One step of the model: from the branches the scheduler chose to what the backend gave. Model's thread only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kitelib.abc import Backend, OverlappingBackend, SequenceId, StepResult, StepWork
from kitelib.engine.request import Branch

__all__ = ["Steps", "extents"]


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
        draws = complete and branch.new_tokens and branch.constraint is None and self._backend.info.draws_tokens
        draw = branch.sampler.draw() if draws else None
        tokens = run.tokens[run.computed : run.computed + count]
        return StepWork(run.sequence, tokens, run.computed, complete and draw is None, () if draw is None else (draw,))


def extents(work: Iterable[tuple[Branch, int]]) -> list[tuple[SequenceId, int]]:
    """The sequences of branches, and how many tokens each gets."""
    return [(branch.run.sequence, count) for branch, count in work if branch.run.sequence is not None]
