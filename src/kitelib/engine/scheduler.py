"""The scheduler: decides, step by step, what the model computes. Runs on the model's thread and owns the backend.

Every branch is the same thing at all times: tokens, and how many of them are computed (`Run`). A step gives each
chosen branch its next tokens: one if it is decoding, a piece if it is in its prompt or comes back from a preemption.
When all tokens of a branch are computed, the step's logits give it one more. See docs/design.md.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np
import numpy.typing as npt

from kitelib.engine.context_memory import ContextMemory
from kitelib.engine.counters import SchedulerCounters
from kitelib.engine.deadlines import overdue, until_deadline
from kitelib.engine.drafting import Drafting
from kitelib.engine.inbox import Inbox
from kitelib.engine.late_blocks import LateBlocks, PrefillSpeed
from kitelib.engine.output import Outputs
from kitelib.engine.planning import StepPlanner
from kitelib.engine.replaying import Replays
from kitelib.engine.request import Branch, Request, Run
from kitelib.engine.single_flight import SingleFlight
from kitelib.engine.splicing import Splicer
from kitelib.engine.steps import Steps, extents, outputs_of
from kitelib.errors import (
    BackendError,
    BackendStepError,
    DeadlineExceededError,
    EngineClosedError,
    KiteError,
)
from kitelib.runtime.streams import LoopPort
from kitelib.yoco.planner import EMPTY_PREFIX, PooledPrefix
from kitelib.yoco.search import Late

__all__ = ["Scheduler"]

_LOG = logging.getLogger("kitelib.scheduler")
_ADMISSION_WINDOW = 64  # waiting branches looked at per step
_SAVED_BLOCKS_PER_STEP = 8
_SAVED_BLOCKS_IDLE = 32
# Fetches the pool's part of a branch's tokens from a block on; called on the event loop, answers with `fetched`.
AskPool = Callable[[Branch, int], None]


class Scheduler:
    """One per loaded model. `submit`, `cancel`, `fetched`, `arrived`, `forget`, `call` and `stop` may be called from any
    thread.

    Attributes:
        counters: what happened so far.
        drafting: chooses drafts; model's thread only.
        speed: how fast prompts are computed.
        ended: the thread has ended, or is about to.
    """

    def __init__(
        self, memory: ContextMemory, outputs: Outputs, drafting: Drafting, port: LoopPort, ask_pool: AskPool
    ) -> None:
        self._memory = memory
        self._backend = memory.backend
        self._outputs = outputs
        self._port = port
        self._ask_pool = ask_pool
        self._inbox = Inbox()
        self._waiting: list[Branch] = []
        self._active: list[Branch] = []
        self._computing = SingleFlight(memory.backend.info.block_tokens)
        self._stopping: KiteError | None = None
        self.ended = False
        self._late = LateBlocks(memory)
        self._splicer = Splicer(memory)
        self._planner = StepPlanner(memory.backend, self._late)
        self.drafting = drafting
        self._replays = Replays()
        self._steps = Steps(memory.backend, self._tidy)
        self.speed = PrefillSpeed(memory.backend.info.prefill_guess)
        self.counters = SchedulerCounters()

    # Called from other threads

    def submit(self, request: Request) -> None:
        """Takes a request."""
        self._inbox.put(lambda: self._on_submit(request))
        if self.ended:  # nobody reads the inbox any more: answer here
            self._end(EngineClosedError() if self._stopping is None else self._stopping)

    def expecting(self) -> AbstractContextManager[None]:
        """See `Inbox.expecting`."""
        return self._inbox.expecting()

    def cancel(self, request: Request) -> None:
        """Ends a request without an answer; what it computed stays reusable."""
        self._inbox.put(lambda: None if request.closed else self._close_request(request))

    def fetched(self, branch: Branch, prefix: PooledPrefix) -> None:
        """The pool's answer for a branch."""
        self._inbox.put(lambda: self._on_fetched(branch, prefix))

    def arrived(self, request: Request, late: Late, prefix: PooledPrefix) -> None:
        """Blocks for a request that already computes; each call brings all that came of `late` so far."""
        self._inbox.put(lambda: self._late.arrived(request, late, prefix))

    def call(self, job: Callable[[], None]) -> None:
        """Runs `job` on the model's thread between two steps."""
        self._inbox.put(job)

    def stop(self, reason: KiteError) -> None:
        """Ends the thread; all requests fail with `reason`."""

        def halt() -> None:
            self._stopping = reason

        self._inbox.put(halt)

    @property
    def num_waiting(self) -> int:
        """Branches waiting for admission."""
        return len(self._waiting)

    @property
    def num_active(self) -> int:
        """Branches being computed."""
        return len(self._active)

    def active_runs(self) -> list[Run]:
        """Runs of the active branches. Model's thread only."""
        return [branch.run for branch in self._active]

    def forget(self) -> None:
        """`invalidate`, as soon as the step under way has ended."""

        def job() -> None:
            self.invalidate()

        self._inbox.put(job)

    def fail_all(self, reason: KiteError) -> None:
        """Ends every request with `reason`. Model's thread only."""
        for branch in self._open_branches():
            self._fail(branch.request, reason)

    def invalidate(self) -> int:
        """Forgets what could be reused; who has not ended leaves nothing behind. Model's thread only.

        Returns:
            How many idle runs there were.
        """
        self._outputs.forget_recent()
        self.drafting.forget()
        return self._memory.invalidate(branch.run for branch in self._open_branches())

    def _open_branches(self) -> list[Branch]:
        return [*self._waiting, *self._active, *self._replays.branches]

    # The thread

    def run(self) -> None:
        """The thread's main function."""
        reason: KiteError | None = None
        try:
            while self._stopping is None:
                self._drain_inbox()
                self._expire()
                self._replay()
                self._port.flush()  # a first token from stored logits does not wait for the step
                self._admit()
                if not self._step() or not self._steps.overlap:
                    self._tidy()
                self._port.flush()
            reason = self._stopping
        except Exception as error:  # noqa: BLE001 - a bug or a dying library: every caller has to hear of it
            _LOG.exception("the model's thread failed")
            reason = BackendError(f"the model's thread failed: {error!r}; open a new engine")
            self._stopping = reason
        finally:
            self._end(EngineClosedError() if reason is None else reason)

    def _tidy(self) -> None:
        self._port.flush()  # nor does any token wait for blocks that are copied out
        self._memory.saver.save_some(_SAVED_BLOCKS_PER_STEP if self._active else _SAVED_BLOCKS_IDLE)
        self._memory.trim()
        if not self._active:
            self.drafting.tidy()

    def _end(self, reason: KiteError) -> None:
        self.ended = True
        self._inbox.run_jobs()
        self.fail_all(reason)
        self._memory.evict_all()
        self._port.flush()

    def _drain_inbox(self) -> None:
        idle = not self._busy()
        self._inbox.run_jobs(until_deadline(self._waiting) if idle else 0.0)
        if idle and self._waiting and self._inbox.expects_more:
            self._port.flush()
            self._inbox.await_companions()

    def _busy(self) -> bool:
        ready = self._active or self._memory.saver.pending or self.drafting.learning or len(self._replays)
        return bool(ready or any(not each.fetching for each in self._waiting))

    def _expire(self) -> None:
        for branch, waited in overdue(self._open_branches()):
            self._fail(branch.request, DeadlineExceededError(f"the request's deadline passed after {waited:.2f} s"))

    # Requests

    def _on_submit(self, request: Request) -> None:
        if request.closed:
            request.let_go()
            return
        if self._stopping is not None:
            self._fail(request, self._stopping)
            return
        if request.reuses:
            request.divergence = self._outputs.divergence(request)
        branch = self._new_branch(request, 0)
        self._give(branch, request.prefix)
        branch.ask_pool = request.prefix.deferred and branch.run.shared
        size = self._backend.info.block_tokens
        request.logits_source = request.prefix.logits_source
        request.skipped_tokens = {tier: count * size for tier, count in request.prefix.skipped}
        logits = request.prefix.logits
        if request.answer is not None:
            self.counters.reused_completions += 1
            for each in (branch, *(self._new_branch(request, index) for index in range(1, request.params.n))):
                self._replays.add(each)
        elif logits is not None and request.policy.zero_prefill:
            request.zero_prefill = True
            self.counters.zero_prefills += 1
            self._first_tokens(branch, logits)
        else:
            self._enqueue(branch)

    def _new_branch(self, request: Request, index: int) -> Branch:
        shared = request.reuses and request.epoch == self._memory.epoch()
        run = Run(
            list(request.prompt),
            request.chain.copy(),
            shared,
            request.epoch,
            adapter=request.adapter,
            kept=request.splices is None,
            expected_tokens=len(request.prompt) + request.max_new_tokens,
        )
        branch = self._outputs.new_branch(request, index, run)
        request.branches.append(branch)
        self.drafting.begin(branch)
        return branch

    def _first_tokens(self, first: Branch, logits: npt.NDArray[np.float32]) -> None:
        """The prompt's logits are known: gives every choice its first token."""
        request = first.request
        branches = [first, *(self._new_branch(request, index) for index in range(1, request.params.n))]
        for branch in branches:
            self._take_token(branch, logits)
            if branch.finish_reason is None and branch.run.sequence is None and not request.closed:
                self._give(branch, request.prefix)
                self._enqueue(branch)

    def _replay(self) -> None:
        """What the model would say is known: gives it out. Whoever wants more than that goes on computing."""
        for branch, token_ids, answer in self._replays.pieces():
            for token_id in token_ids:
                if branch.finish_reason is None and not branch.request.closed:
                    self._take_token(branch, token_id)
            if answer is None or branch.finish_reason is not None or branch.request.closed:
                continue
            if answer.ended:
                self._outputs.end(branch)
                self._finish(branch)
            else:
                branch.ask_pool = branch.run.shared
                self._enqueue(branch)

    def _enqueue(self, branch: Branch) -> None:
        bisect.insort(self._waiting, branch, key=lambda each: each.order)

    def _give(self, branch: Branch, prefix: PooledPrefix) -> None:
        branch.prefix = prefix
        self._late.give(branch, prefix.late)

    def _on_fetched(self, branch: Branch, prefix: PooledPrefix) -> None:
        branch.fetching = False
        self._give(branch, prefix)
        if branch.request.closed:
            self._let_go(branch)

    def _take_token(self, branch: Branch, found: npt.NDArray[np.float32] | int) -> None:
        try:
            taken = self._outputs.take_token(branch, found)
        except KiteError as error:
            self._fail(branch.request, error)
            return
        self.drafting.told(branch, taken)
        self.counters.generated_tokens += 1
        if branch.finish_reason is not None:
            self._finish(branch)

    def _finish(self, branch: Branch) -> None:
        self.drafting.verified(branch)
        self._retire(branch)
        request = branch.request
        done = len(request.branches) == request.params.n and all(each.finish_reason for each in request.branches)
        if done and not request.closed:
            request.closed = True
            self.counters.prompt_tokens += len(request.prompt)
            self.counters.cached_tokens += request.cached_tokens
            self._memory.saver.save_completion(request)
            self.drafting.finished(request)
            self._outputs.complete(request)
            request.let_go()

    def _retire(self, branch: Branch) -> None:
        """Takes a branch out of the schedule; what it computed becomes idle."""
        self._let_go(branch)
        self._replays.discard(branch)
        if branch in self._active:
            self._active.remove(branch)
            self._computing.end(branch)
        if branch in self._waiting:
            self._waiting.remove(branch)
        self._memory.retire(branch.run)

    def _let_go(self, branch: Branch) -> None:
        """The branch needs nothing more of what the pool has for it."""
        self._late.close(branch)
        branch.prefix = EMPTY_PREFIX

    def _close_request(self, request: Request) -> None:
        request.closed = True
        for branch in request.branches:
            self._retire(branch)
        request.let_go()

    def _fail(self, request: Request, error: KiteError) -> None:
        if not request.closed:
            self._close_request(request)
            self._port.add(lambda: request.deliver(error))

    # Admission

    def _admit(self) -> None:
        if self._stopping is not None:
            return
        for place, branch in enumerate(self._waiting[:_ADMISSION_WINDOW]):
            # Who asks the pool holds what it gives, so only those ask whose turn is near.
            early = branch.ask_pool and place >= self._backend.info.max_sequences
            if branch.fetching or branch.request.closed or early:
                continue
            if len(self._active) >= self._backend.info.max_sequences or not self._try_admit(branch):
                break

    def _try_admit(self, branch: Branch) -> bool:
        """False if the memory does not suffice, so that nobody overtakes; True otherwise, also if it has to wait."""
        run = branch.run
        source, shared = self._splicer.best_match(branch)
        block = shared // self._backend.info.block_tokens
        if self._computing.is_behind(branch, block):
            return True
        if branch.ask_pool:
            branch.ask_pool = False
            self._fetch(branch, block)
            return True
        prefix = branch.prefix
        if prefix.first > block and (prefix.payloads or prefix.tail):
            # The context gave up blocks since the pool was asked: ask again for the missing part.
            branch.prefix = EMPTY_PREFIX
            self._fetch(branch, block)
            return True
        try:
            started = self._memory.start(run, source, shared, prefix, idle=not self._active)
        except BackendError as error:
            self._fail(branch.request, error)
            return True
        if started is None:
            return False
        self._waiting.remove(branch)
        self._active.append(branch)
        branch.prefix = EMPTY_PREFIX
        if branch.request.params.n == 1:
            branch.request.prefix = EMPTY_PREFIX  # further choices would start from it
        self._note_admission(branch, *started)
        self._computing.begin(branch)
        return True

    def _fetch(self, branch: Branch, block: int) -> None:
        branch.fetching = True
        self._port.add(lambda: self._ask_pool(branch, block))

    def _note_admission(self, branch: Branch, context_tokens: int, restored: dict[str, int]) -> None:
        request = branch.request
        if request.admitted_at is None:
            branch.counts = True
            request.admitted_at = time.monotonic()
            request.context_tokens = min(context_tokens, len(request.prompt))
            request.note_restored(context_tokens, restored)

    # Steps

    def _step(self) -> bool:
        """Computes one step; False if there is nothing to compute."""
        work = self._plan_step()
        if not work:
            return False
        begun = time.perf_counter()
        try:
            result = self._steps.run(work)
        except BackendStepError as error:
            self.counters.step_failures += 1
            for branch, _ in work:
                self._memory.drop(branch.run)
                self._fail(branch.request, error)
            return True
        finally:
            self.counters.steps += 1  # afterwards: who sees a first token sees the steps that it took
        seconds = time.perf_counter() - begun
        self.speed.note(work, seconds)
        rows, drafted = sum(count for _, count in work), sum(len(branch.draft) for branch, _ in work)
        for branch, count in work:
            branch.run.computed += count
            branch.run.ahead = len(branch.draft)
            self._memory.computed(branch.run)
            self._computing.computed(branch, count)
        for place, (branch, _) in enumerate(work):
            self._evaluate(branch, outputs_of(result, place))
        self.drafting.computed(rows, drafted, seconds)
        return True

    def _evaluate(self, branch: Branch, outputs: Sequence[npt.NDArray[np.float32] | int]) -> None:
        """Takes tokens as long as the draft has said them before."""
        run = branch.run
        for found in outputs:
            if branch.request.closed:
                break
            accepted = branch.accepted
            self._on_output(branch, found)
            if branch.finish_reason is not None or branch.request.closed or branch.accepted == accepted:
                break
            run.computed, run.ahead = run.computed + 1, run.ahead - 1
        self._memory.settle(run)
        self.drafting.verified(branch)

    def _on_output(self, branch: Branch, found: npt.NDArray[np.float32] | int) -> None:
        request = branch.request
        if not branch.new_tokens and not isinstance(found, int):
            self._memory.saver.save_logits(request, branch.run, found)
            self._memory.saver.note(branch.run, tail=True)
            if branch.index == 0 and len(request.branches) == 1 < request.params.n:
                self._first_tokens(branch, found)
                return
        self._take_token(branch, found)

    def _plan_step(self) -> list[tuple[Branch, int]]:
        for branch in self._active:
            self._computing.computed(branch, self._late.take_over(branch) + self._splicer.take_over(branch))
        ready = self._planner.ready(self._active)
        decodes = self._planner.decoding(ready)
        self._make_room(decodes)
        ready, decodes = ([each for each in some if each in self._active] for some in (ready, decodes))
        work = self._planner.work(ready, decodes)
        if not work and ready:
            self._preempt_one(spare=ready[0])
        self.drafting.choose(work)
        return work

    def _make_room(self, decodes: Sequence[Branch]) -> None:
        while self._backend.room(None, extents((each, 1) for each in decodes if each in self._active)) < 0:
            if self._memory.evict_one():
                continue
            if not self._preempt_one(spare=None):
                return

    def _preempt_one(self, spare: Branch | None) -> bool:
        """Upcycles the active branch that can best wait and puts it back into the queue."""
        if self._memory.evict_one():
            return True
        victims = [branch for branch in self._active if branch is not spare]
        if not victims or len(self._active) < 2:
            return False
        victim = max(victims, key=lambda branch: branch.order)
        self.counters.preemptions += 1
        self._active.remove(victim)
        self._computing.end(victim)
        self._memory.preempt(victim.run)
        self._let_go(victim)
        victim.ask_pool, victim.counts = victim.run.shared and victim.run.kept, False
        self._enqueue(victim)
        return True
