"""Memory of the model's context: what is shared, what stays idle, what goes when room is needed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from kitelib.abc import Backend
from kitelib.engine.request import Run
from kitelib.engine.residency import Residency
from kitelib.engine.saving import Saver
from kitelib.errors import BackendError, FormatError
from kitelib.yoco.planner import PooledPrefix

__all__ = ["ContextMemory"]

_SAVE_BLOCKS = 32
_EVICTED_TOGETHER = 4  # the share of idle runs that goes when sequences, not tokens, run short


class ContextMemory:
    """Owns the sequences of all runs. Model's thread only.

    A run that has ended stays idle in the context, least recently used first out, as long as it costs less there
    than it would cost to bring it back from the pool (`ModelInfo.resident_idle_tokens`).

    Attributes:
        evictions: idle runs that had to go.
    """

    def __init__(self, backend: Backend, saver: Saver, epoch: Callable[[], int]) -> None:
        self.backend = backend
        self.saver = saver
        self.epoch = epoch
        self.evictions = 0
        self.residency = Residency(backend.info.block_tokens)
        self._idle: OrderedDict[Run, None] = OrderedDict()
        self._active: dict[Run, None] = {}

    @property
    def num_idle(self) -> int:
        """Idle runs."""
        return len(self._idle)

    def idle_tokens(self) -> int:
        """Tokens of idle runs, shared ones counted once per run."""
        return sum(run.computed for run in list(self._idle))

    def best_match(self, run: Run) -> tuple[Run | None, int]:
        """The run to share a prefix with, and how many tokens; at least one token is left to compute."""
        if not run.shared or not self.backend.info.reuse_blocks:
            return None, 0
        for other, length in self.residency.candidates(run.chain, run.tokens, len(run.tokens) - 1):
            # What is from before an invalidation is not shared with what came after it.
            if other.epoch != run.epoch or other.sequence is None:
                continue
            if self.backend.shareable(other.sequence, length):
                return other, length
        return None, 0

    def start(
        self, run: Run, source: Run | None, shared: int, prefix: PooledPrefix, *, idle: bool
    ) -> tuple[int, dict[str, int]] | None:
        """Gives a run its sequence, with everything that can be reused in it. What already runs has to be able to go
        on: one token each is kept free.

        Returns:
            Tokens shared in the context, and tokens restored from the pool by tier; None if the memory does not
            suffice.

        Raises:
            BackendError: it can never suffice.
        """
        size = self.backend.info.block_tokens
        restorable = self._restorable(run, shared, prefix)
        base = shared // size * size if restorable > shared else shared
        new_tokens = len(run.tokens) - base
        if source is not None:
            self.touch(source)
        self._trim_idle(source, max(new_tokens, run.expected_tokens - base))
        if not self.backend.free_sequences():
            # Backends that have to tidy up before they can give sequences out again do so once for many.
            for _ in range(self.num_idle // _EVICTED_TOGETHER):
                self.evict_one(spare=source)
        while self._room(base) < new_tokens or not self.backend.free_sequences():
            if not self.evict_one(spare=source):
                if source is not None and idle and self.evict_one():
                    source, shared, base = None, 0, 0
                    restorable = self._restorable(run, 0, prefix)
                    new_tokens = len(run.tokens)
                    continue
                if idle:
                    raise BackendError(f"a prompt of {len(run.tokens)} tokens does not fit the empty context")
                return None
        restored = self._begin(run, source, base, prefix, restorable)
        self.residency.update(run)
        return base, restored

    def _room(self, shared: int) -> int:
        """Tokens that a new run can have on top of those it shares."""
        others = [(run.sequence, 1) for run in self._active if run.sequence is not None]
        return self.backend.room(None, others, shared=shared)

    def _restorable(self, run: Run, shared: int, prefix: PooledPrefix) -> int:
        """How many tokens the run would hold with the pool's units on top; at least one is left to compute."""
        size = self.backend.info.block_tokens
        if prefix.first * size > shared:
            return 0
        found = len(prefix.payloads) * size + prefix.tail_tokens
        return min(prefix.first * size + found, len(run.tokens) - 1) if found else 0

    def _begin(self, run: Run, source: Run | None, base: int, prefix: PooledPrefix, restorable: int) -> dict[str, int]:
        size = self.backend.info.block_tokens
        if source is not None and base:
            assert source.sequence is not None
            run.sequence = self.backend.fork(source.sequence, base)
            run.saved = min(source.saved, base // size * size)
        else:
            run.sequence = self.backend.create(run.adapter)
            run.saved = 0
        self._active[run] = None
        run.computed = base
        return self._restore(run, prefix, restorable) if restorable > base else {}

    def _restore(self, run: Run, prefix: PooledPrefix, stop: int) -> dict[str, int]:
        """Puts a prefix's KV on a run that ends at a block boundary, up to token `stop`; returns tokens by tier."""
        size, base = self.backend.info.block_tokens, run.computed
        found = [*prefix.payloads, *([prefix.tail] if prefix.tail is not None else [])]
        sources = [*prefix.sources, prefix.tail_source]
        first, last = base // size - prefix.first, -(-stop // size) - prefix.first
        payloads = found[first:last]
        assert run.sequence is not None
        try:
            if payloads and stop % size not in (0, payloads[-1].num_tokens):
                payloads[-1] = self.backend.cut(payloads[-1], stop % size)
            self.backend.restore_blocks(run.sequence, base // size, payloads)
        except (BackendError, FormatError):
            return {}  # a miss: the tokens are computed instead
        if run.saved == base:
            run.saved = stop // size * size
        restored: dict[str, int] = {}
        for source, payload in zip(sources[first:last], payloads, strict=True):
            restored[source] = restored.get(source, 0) + payload.num_tokens
        run.computed = stop
        return restored

    def take_over(self, run: Run, arrived: PooledPrefix) -> dict[str, int]:
        """Puts blocks that arrived late on top of what the run has computed, where both meet; returns tokens by tier,
        none if they don't fit (yet)."""
        size = self.backend.info.block_tokens
        stop = min((arrived.first + len(arrived.payloads)) * size, len(run.tokens) - 1)
        fits = run.sequence is not None and run.computed % size == 0 and arrived.first * size <= run.computed < stop
        if not fits or self.backend.room(run.sequence) < stop - run.computed:
            return {}
        restored = self._restore(run, arrived, stop)
        self.residency.update(run)
        return restored

    def _trim_idle(self, source: Run | None, new_tokens: int) -> None:
        """Makes room for what a new run will compute. Runs that still have to be saved go later, see `trim`."""
        limit = self._idle_limit(new_tokens)
        spared = source.computed if source is not None and source in self._idle else 0
        for run in list(self._idle):
            if self.idle_tokens() - spared <= limit:
                return
            if run is not source and not self.saver.is_pending(run):
                self._evict(run)

    def trim(self) -> None:
        """Makes saved idle runs go, the least recently used first, while there are more than is worth keeping.

        One stays if nothing runs, however long it is: the next request may well go on from there.
        """
        limit, keep = self._idle_limit(), 0 if self._active else 1
        for run in list(self._idle):
            if len(self._idle) <= keep or self.idle_tokens() <= limit:
                return
            if not self.saver.is_pending(run):
                self._evict(run)

    def _idle_limit(self, new_tokens: int = 0) -> int:
        """Idle tokens worth keeping: the more there is to compute in each step, the more they would slow it."""
        active = sum(max(len(run.tokens), run.expected_tokens) for run in self._active)
        return max(0, self.backend.info.resident_idle_tokens - active - new_tokens)

    def touch(self, run: Run) -> None:
        """The run is used: if it is idle, it goes last."""
        if run in self._idle:
            self._idle.move_to_end(run)

    def computed(self, run: Run) -> None:
        """The run has computed more."""
        self.residency.update(run)

    def settle(self, run: Run) -> None:
        """The step is evaluated: what is left of the run's drafts was wrong, or comes after its end."""
        if run.ahead and run.sequence is not None:
            self.backend.truncate(run.sequence, run.computed)
        run.ahead = 0
        self.residency.update(run)

    def retire(self, run: Run) -> None:
        """The run has ended: it becomes idle if it may be reused, else it goes."""
        if run.sequence is None:
            return
        self.settle(run)
        if not run.shared or not run.computed or not self.backend.info.reuse_blocks:
            self.drop(run)
            return
        self.saver.note(run, tail=True)
        self._active.pop(run, None)
        self._idle[run] = None

    def preempt(self, run: Run) -> None:
        """Upcycles all of an active run and takes its sequence away."""
        self.saver.note(run, tail=True)
        if run.shared and run.kept and run.sequence is not None and self.backend.info.reuse_blocks:
            self.saver.save(run)
        self.drop(run)

    def drop(self, run: Run) -> None:
        """Takes a run's sequence away."""
        self._idle.pop(run, None)
        self._active.pop(run, None)
        self.saver.forget(run)
        if run.sequence is not None:
            self.residency.forget(run)
            self.backend.release(run.sequence)
            run.sequence = None
            run.computed = run.saved = run.ahead = 0

    def evict_one(self, spare: Run | None = None) -> bool:
        """Makes the least recently used idle run go; False if there is none but `spare`."""
        for run in self._idle:
            if run is not spare:
                self._evict(run)
                return True
        return False

    def _evict(self, run: Run) -> None:
        self.evictions += 1
        if self.saver.is_pending(run):
            self.saver.save(run)
        self.drop(run)

    def evict_all(self) -> int:
        """Makes all idle runs go without saving; returns how many."""
        count = len(self._idle)
        for run in list(self._idle):
            self.drop(run)
        return count

    def save_all(self) -> int:
        """Saves everything that is still to be saved; returns how many idle runs there are."""
        while self.saver.pending:
            self.saver.save_some(_SAVE_BLOCKS)
        return len(self._idle)

    def invalidate(self, active: Iterable[Run]) -> int:
        """Makes all idle runs go, and keeps active ones out of every reuse from now on; returns how many went."""
        for run in active:
            self.saver.forget(run)
            self.residency.forget(run)
            run.shared = False
        return self.evict_all()
