"""Blocks that arrive from an outer tier while their request already computes, and how fast it computes."""

from __future__ import annotations

from collections.abc import Sequence

from kitelib.engine.context_memory import ContextMemory
from kitelib.engine.request import Branch, Request
from kitelib.yoco.planner import EMPTY_PREFIX, PooledPrefix
from kitelib.yoco.search import Late

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
    def arrived(request: Request, late: Late, prefix: PooledPrefix) -> None:
        """All that came of `late` so far. Only for branches that wait for it: another one's is of other tokens."""
        for branch in request.branches:
            if branch.late is late:
                branch.arrived = prefix

    @classmethod
    def give(cls, branch: Branch, late: Late | None) -> None:
        """From now on the branch waits for this, and for nothing that came before."""
        cls.close(branch)
        if late is not None and not late.closed:
            branch.late = late

    def take_over(self, branch: Branch) -> int:
        """Attaches what arrived, as soon as computing has reached it; returns how many tokens that were."""
        late, run = branch.late, branch.run
        if late is None:
            return 0
        start = run.computed
        if branch.arrived.payloads:
            restored = self._memory.take_over(run, branch.arrived)
            if branch.counts:
                branch.request.note_restored(start, restored)
        late.frontier = run.computed // self._size
        if late.frontier >= (len(run.tokens) - 1) // self._size:
            self.close(branch)
        return run.computed - start

    @staticmethod
    def close(branch: Branch) -> None:
        """The branch needs nothing more."""
        if branch.late is not None:
            branch.late.close()
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
