"""Blocks that arrive from an outer tier while their request already computes, and how fast it computes."""

from __future__ import annotations

from collections.abc import Sequence

from kitelib.engine.context_memory import ContextMemory
from kitelib.engine.request import Branch, Request
from kitelib.yoco.planner import EMPTY_PREFIX, PooledPrefix

__all__ = ["LateBlocks", "PrefillSpeed"]

_SHORT_STEPS = 4
_MEASURED_ROWS = 16  # smaller steps say little about how fast prompts are
_NEWEST = 0.125  # weight of the newest sample, that of RFC 6298 for round trips


class LateBlocks:
    """Attaches late blocks where loading, from the back, and computing, from the front, meet. Model's thread only."""

    def __init__(self, memory: ContextMemory) -> None:
        self._memory = memory
        self._size = memory.backend.info.block_tokens

    @staticmethod
    def arrived(request: Request, prefix: PooledPrefix) -> None:
        """All that is there for a request so far."""
        for branch in request.branches:
            if branch.late is not None:
                branch.arrived = prefix

    def take_over(self, branch: Branch) -> int:
        """Attaches what arrived, as soon as computing has reached it; returns how many tokens that were."""
        late, run = branch.late, branch.run
        if late is None:
            return 0
        start = run.computed
        if branch.arrived.payloads:
            branch.request.note_restored(start, self._memory.take_over(run, branch.arrived))
        late.frontier = run.computed // self._size
        if late.frontier >= (len(run.tokens) - 1) // self._size:
            self.close(branch)
        return run.computed - start

    @staticmethod
    def close(branch: Branch) -> None:
        """The branch needs nothing more."""
        if branch.late is not None:
            branch.late.closed = True
            branch.late, branch.arrived = None, EMPTY_PREFIX

    def aligned(self, branch: Branch, count: int) -> int:
        """`count`, or fewer tokens, so that the step ends where late blocks can begin. The first steps are short: what
        is only a little late then has less to wait for."""
        run = branch.run
        if branch.late is None:
            return count
        if branch.late.promising and branch.short_steps < _SHORT_STEPS:
            branch.short_steps += 1
            count = min(count, self._size)
        if count >= run.remaining:
            return count
        start = branch.arrived.first * self._size
        if branch.arrived.payloads and start > run.computed:
            count = min(count, start - run.computed)
        excess = (run.computed + count) % self._size
        return count - excess if excess < count else count


class PrefillSpeed:
    """Tokens of prompts per second, in steps that only compute prompts; the last ones weigh most.

    Attributes:
        tokens_per_s: the present estimate; a guess until something was measured. Read by any thread.
    """

    def __init__(self, guess: float) -> None:
        self.tokens_per_s = guess
        self._measured = False

    def note(self, work: Sequence[tuple[Branch, int]], seconds: float) -> None:
        """A step took that long."""
        rows = sum(count for _, count in work)
        if rows < _MEASURED_ROWS or any(count == 1 for _, count in work):
            return
        speed = rows / max(seconds, 1e-6)
        self.tokens_per_s += (speed - self.tokens_per_s) * (_NEWEST if self._measured else 1.0)
        self._measured = True
