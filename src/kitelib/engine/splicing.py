"""Puts the KV of passages into the runs of requests (see `passages`). Model's thread only.

A run that reaches a passage gets the KV of all but its first tokens from a run in which the passage was computed alone; the
first ones, of this and of the passages that follow, are computed in one pass then, and the run goes on behind them. All of
that follows from the run's position, so a request that was preempted, forked or resumed goes on like any other; and where
no run has a passage any more, it is computed in place.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from kitelib.engine.context_memory import ContextMemory
from kitelib.engine.passages import Splice, Splices
from kitelib.engine.request import Branch, Run
from kitelib.errors import KiteError

__all__ = ["Splicer", "cut_at_splice"]

_LOG = logging.getLogger("kitelib.splicing")
_GAP_TOKENS = 32  # text between two passages that is computed with their heads; more is better off in a step


def cut_at_splice(branch: Branch, count: int) -> int:
    """`count`, or fewer tokens, so that the step ends where a passage, or what is moved of it, begins."""
    splices, computed = branch.request.splices, branch.run.computed
    if splices is None or splices.failed:
        return count
    spans = (each.span for each in splices.items)
    ends = [place for span in spans for place in (span.start, span.start + span.head) if place > computed]
    return min(count, min(ends) - computed) if ends else count


class Splicer:
    """Moves KV between the runs of one context."""

    def __init__(self, memory: ContextMemory) -> None:
        self._memory = memory
        self._backend: Any = memory.backend

    def best_match(self, branch: Branch) -> tuple[Run | None, int]:
        """The run to share a prefix with, and how many tokens; for a prompt with passages also a run of an exact prompt,
        up to the first of them."""
        run, splices = branch.run, branch.request.splices
        source, shared = self._memory.best_match(run)
        if splices is None or not run.shared:
            return source, shared
        start = splices.items[0].span.start
        for other, length in self._memory.residency.candidates(splices.prefix, run.tokens, start):
            if length > shared and self._usable(other, run):
                return other, length
        return source, shared

    def take_over(self, branch: Branch) -> int:
        """Appends the KV of the passages that the run has reached; returns how many tokens that were."""
        splices, start = branch.request.splices, branch.run.computed
        if splices is None or branch.run.sequence is None:
            return 0
        if branch.counts:  # what was computed for the request in advance was not reused
            branch.request.context_tokens = max(0, branch.request.context_tokens - splices.fresh_prefix)
            splices.fresh_prefix = 0
        if not splices.failed:
            self._splice(branch, splices)
        return branch.run.computed - start

    def _splice(self, branch: Branch, splices: Splices) -> None:
        run = branch.run
        found, stop = self._within_reach(run, splices)
        count = stop - run.computed
        if not found or self._backend.room(run.sequence) < count:
            return
        moves = []
        for splice, source, first, last in found:
            self._memory.touch(source)
            place = splice.lead + first - splice.span.start
            moves.append((source.sequence, place, last - first, first - run.computed))
        try:
            again = self._backend.passages.splice(run.sequence, run.tokens[run.computed : stop], moves, splices.share)
        except KiteError as error:
            _LOG.warning("%d passages could not be moved, so they are computed: %s", len(moves), error)
            splices.failed = True
            return
        run.computed = stop
        self._memory.computed(run)
        if branch.counts:
            _count(branch, splices, [splice for splice, *_ in found], sum(move[2] for move in moves) - again)

    def _within_reach(self, run: Run, splices: Splices) -> tuple[list[tuple[Splice, Run, int, int]], int]:
        """The passages that the run has come to, each with the run to take its KV from and the prompt's tokens that are
        moved, from first to before last; and where they end. What lies between is computed with them, as much as a
        step may hold."""
        found: list[tuple[Splice, Run, int, int]] = []
        position, fresh = run.computed, 0
        for splice in splices.items:
            span = splice.span
            if span.stop <= position:
                continue
            if span.start > position + (_GAP_TOKENS if found else 0):
                break
            # The last token of a prompt is computed by a step, for what follows it.
            first, last = max(position, span.start + span.head), min(span.stop, len(run.tokens) - 1)
            source = self._source(run, splice, last - span.start) if first < last else None
            fresh += first - position
            if source is None or (found and fresh > self._backend.info.max_step_tokens):
                break
            found.append((splice, source, first, last))
            position = last
        return found, position

    def _source(self, run: Run, splice: Splice, num_tokens: int) -> Run | None:
        """A run that has so many tokens of a passage alone."""
        wanted = splice.lead + num_tokens
        for other, length in self._memory.residency.candidates(splice.chain, splice.token_ids, wanted):
            if length == wanted and self._usable(other, run):
                return other
        return None

    @staticmethod
    def _usable(other: Run, run: Run) -> bool:
        return other is not run and other.sequence is not None and other.epoch == run.epoch


def _count(branch: Branch, splices: Splices, items: Sequence[Splice], moved: int) -> None:
    """So many prompt tokens were moved; what was computed for this request in advance was not reused."""
    splices.moved += moved
    reused = max(0, moved - sum(splice.fresh for splice in items))
    for splice in items:
        splice.fresh = 0
    if reused:
        pool_tokens = branch.request.pool_tokens
        pool_tokens["passages"] = pool_tokens.get("passages", 0) + reused
