"""Records of the scheduler: a request, its branches (one per choice), and runs (tokens with KV in the context)."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any

from kitelib.abc import SequenceId
from kitelib.config import ReusePolicy, SamplingParams
from kitelib.engine.constraints import Constraint
from kitelib.engine.passages import Splices
from kitelib.engine.results import Divergence, FinishReason
from kitelib.engine.sampling import Sampler
from kitelib.engine.text import TextStream
from kitelib.fingerprint import BlockChain
from kitelib.yoco.completions import Completion
from kitelib.yoco.drafts import Asked, Drafter, Proposal
from kitelib.yoco.encoder import Vector
from kitelib.yoco.planner import EMPTY_PREFIX, PooledPrefix
from kitelib.yoco.search import Late
from kitelib.yoco.wordings import Question

__all__ = ["Branch", "Request", "Run"]

_REQUEST_IDS = itertools.count(1)
Deliver = Callable[[Any], None]


@dataclasses.dataclass(eq=False, slots=True)
class Run:
    """Tokens of one sequence and how many of them the context holds. The only owner of that number.

    Token spans::

        |<------------------- tokens ------------------->|
        |<------------- computed ------------->|
        |<--- saved --->|                                  in the pool, or on the way there
        |<-- chain.fingerprints x block -->|<-- chain.tail -->|

    Attributes:
        chain: fingerprints of `tokens`.
        ahead: drafts that the sequence holds after `computed`; not 0 only until the step is evaluated.
        sequence: the backend's sequence; None while nothing is held.
        shared: False keeps the run out of every reuse: nobody forks it and it is never saved.
        kept: False keeps it in the context: others may fork it, but it is never saved.
        indexed: full blocks known to the residency index.
        expected_tokens: how long the run may get.
        tail_ends: token counts at which a partial block is to be saved as well.
        epoch: the pool's epoch when the run started; older runs are not saved.
    """

    tokens: list[int]
    chain: BlockChain
    shared: bool
    epoch: int
    adapter: str | None = None
    kept: bool = True
    sequence: SequenceId | None = None
    computed: int = 0
    ahead: int = 0
    saved: int = 0
    indexed: int = 0
    expected_tokens: int = 0
    tail_ends: list[int] = dataclasses.field(default_factory=list)

    @property
    def remaining(self) -> int:
        """Tokens still to be computed."""
        return len(self.tokens) - self.computed


@dataclasses.dataclass(eq=False, slots=True)
class Request:
    """One call of `generate` or `stream`.

    Attributes:
        deadline: on `time.monotonic`, or None.
        deliver: takes a `Chunk`, a `Generation` or an exception on the event loop.
        streaming: whether chunks are wanted before the end.
        epoch: the pool's epoch before it was asked; a request from before an invalidation leaves nothing behind.
        context_tokens: prompt tokens that were shared in the context when it was first admitted.
        pool_tokens: tier -> prompt tokens that came from it.
        skipped_tokens: tier -> prompt tokens that it had but that were computed, because loading takes longer.
        prefix: what the pool had for it when it came; let go when it is not needed any more, for it is large.
        logits_source: the tier of its stored logits; "" if there were none.
        asked: what is known of the prompt beside its tokens; None if no drafts are wanted.
        guess: what followed this prompt before; drafts start with it. None if the pool has nothing.
        seek_guess: the pool's outer tiers may know such a guess, and are asked beside the request.
        answer: what is to be given without computing it (`ReusePolicy.completions`); None if the pool has nothing.
        sampling: canonical bytes of its options if its answer is to be kept for that, else None.
        question: what the last message of a chat asks; None if it is none, or if nobody wants to know.
        vector: of the question; None without an encoder, or while it is not needed.
        rewords: what stands for its question has no units any more, so from now on it does.
        wording: the stored question that is asked instead of its own; None if it is its own.
        splices: its passages whose KV is moved; None if there are none.
        admitted_at: when its first own work was admitted; None before.
    """

    prompt: list[int]
    chain: BlockChain
    params: SamplingParams
    policy: ReusePolicy
    seed: int
    max_new_tokens: int
    adapter: str | None
    priority: int
    deadline: float | None
    constraint: Constraint | None
    deliver: Deliver
    streaming: bool
    epoch: int
    prefix: PooledPrefix = EMPTY_PREFIX
    created: float = dataclasses.field(default_factory=time.monotonic)
    number: int = dataclasses.field(default_factory=lambda: next(_REQUEST_IDS))
    branches: list[Branch] = dataclasses.field(default_factory=list)
    context_tokens: int = 0
    pool_tokens: dict[str, int] = dataclasses.field(default_factory=dict)
    skipped_tokens: dict[str, int] = dataclasses.field(default_factory=dict)
    logits_source: str = ""
    asked: Asked | None = None
    guess: Completion | None = None
    seek_guess: bool = False
    answer: Completion | None = None
    sampling: bytes | None = None
    question: Question | None = None
    vector: Vector | None = None
    rewords: bool = False
    wording: str | None = None
    splices: Splices | None = None
    zero_prefill: bool = False
    divergence: Divergence | None = None
    admitted_at: float | None = None
    first_token_at: float | None = None
    closed: bool = False

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed for this request. A choice that ended with its first token, sampled
        from stored logits, never asked for the prompt's KV."""
        untouched = (self.zero_prefill or self.answer is not None) and self.admitted_at is None
        return len(self.prompt) if untouched else self.context_tokens + sum(self.pool_tokens.values())

    def note_restored(self, start: int, restored: Mapping[str, int]) -> None:
        """Tokens from `start` on came from tiers, in their order; only the prompt's count."""
        for tier, count in restored.items():
            counted = max(0, min(start + count, len(self.prompt)) - start)
            start += count
            if counted:
                self.pool_tokens[tier] = self.pool_tokens.get(tier, 0) + counted

    def let_go(self) -> None:
        """Nothing of what the pool has for it is needed any more; what is on its way need not come."""
        if self.prefix.late is not None:
            self.prefix.late.close()
        self.prefix = EMPTY_PREFIX

    @property
    def reuses(self) -> bool:
        """Whether anything may be reused for it, or from it."""
        return self.policy.mode != "off"


@dataclasses.dataclass(eq=False, slots=True)
class Branch:
    """One choice of a request: the unit that is scheduled.

    Attributes:
        prefix: what the pool gave for its tokens.
        late: what is still on its way from the outer tiers; None if nothing is.
        arrived: the blocks of it that are there.
        short_steps: steps that were kept short because something may arrive.
        fetching: the pool is being asked; not admitted until the answer.
        ask_pool: ask the pool again before the next admission: it was preempted, or too much was held when it came.
        counts: what is restored for it counts as the request's: the first branch, in its first life.
        drafter: guesses its next tokens; None if no drafts are wanted.
        proposal: its guess for the step under way; None if it made none.
        draft: how much of that the model verifies in this step; () if nothing.
        accepted: how many of these tokens were right.
    """

    request: Request
    index: int
    run: Run
    sampler: Sampler
    text: TextStream
    constraint: Constraint | None
    prefix: PooledPrefix = EMPTY_PREFIX
    late: Late | None = None
    arrived: PooledPrefix = EMPTY_PREFIX
    short_steps: int = 0
    fetching: bool = False
    ask_pool: bool = False
    counts: bool = False
    drafter: Drafter | None = None
    proposal: Proposal | None = None
    draft: tuple[int, ...] = ()
    accepted: int = 0
    new_tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[dict[int, float]] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key: higher priority first, then older requests, then lower choices."""
        return (-self.request.priority, self.request.number, self.index)
