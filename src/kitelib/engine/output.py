"""From logits to what the caller sees: sampling, text, stopping, results. Model's thread only."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kitelib.abc import Backend, ModelInfo
from kitelib.engine.request import Branch, Request, Run
from kitelib.engine.residency import RecentPrompts
from kitelib.engine.results import (
    Choice,
    Chunk,
    Divergence,
    DraftCount,
    Exactness,
    FinishReason,
    Generation,
    ReuseReport,
    Timing,
    Usage,
)
from kitelib.engine.sampling import Sampler
from kitelib.engine.text import TextStream

__all__ = ["Outputs"]

Post = Callable[[Callable[[], None]], None]


class Outputs:
    """Turns the logits of branches into tokens, text and results. `post` makes a call on the event loop, `finished` is
    called there with each request that is answered; `rounded` says that what the pool gives is not exact."""

    def __init__(
        self,
        backend: Backend,
        token_text: Callable[[int], str],
        post: Post,
        finished: Callable[[Request], None],
        *,
        rounded: bool = False,
    ) -> None:
        self._backend = backend
        self._token_text = token_text
        self._post = post
        self._finished = finished
        self._rounded = rounded
        self._recent = RecentPrompts()

    def new_branch(self, request: Request, index: int, run: Run) -> Branch:
        """A branch at the end of its prompt."""
        sampler = Sampler(
            request.params,
            self._backend.info.vocab_size,
            prompt_ids=request.prompt,
            choice=index,
            seed=request.seed,
        )
        constraint = request.constraint.fork() if request.constraint else None
        return Branch(request, index, run, sampler, TextStream(tuple(request.params.stop)), constraint)

    def divergence(self, request: Request) -> Divergence | None:
        """Where the request's prompt leaves the longest prompt or answer seen before."""
        found = self._recent.divergence(request.chain, request.prompt)
        if found is None:
            return None
        position, other = found
        return Divergence(
            position, self._token_text(request.prompt[position]), "" if other is None else self._token_text(other)
        )

    def forget_recent(self) -> None:
        """Nothing is cached any more that a prompt could leave."""
        self._recent.clear()

    def take_token(self, branch: Branch, found: npt.NDArray[np.float32] | int) -> int:
        """Chooses the next token of a branch from logits, or takes the one that was drawn; sets `finish_reason` if it
        was the last. Returns the token.

        Raises:
            InvalidSamplingError: the constraint allows no token.
            BackendStepError: the logits are not numbers.
        """
        if isinstance(found, int):
            sampled = branch.sampler.drawn(found)
        else:
            sampled = branch.sampler.sample(found, branch.constraint.mask() if branch.constraint else None)
        request = branch.request
        if request.first_token_at is None:
            request.first_token_at = time.monotonic()
        text, reason = self._extend(branch, sampled.token_id)
        new_ids = [] if reason == "stop" and self._is_end(request, sampled.token_id) else [sampled.token_id]
        if new_ids and sampled.logprobs is not None:
            branch.logprobs.append(sampled.logprobs)
        branch.finish_reason = reason
        if request.streaming:
            chunk = Chunk(text, new_ids, branch.index, reason)
            self._post(lambda: request.deliver(chunk))
        return sampled.token_id

    def end(self, branch: Branch) -> None:
        """The text of a branch is over, as is known from an earlier one."""
        request, text = branch.request, branch.text.finish()
        branch.finish_reason = "stop"
        if request.streaming:
            chunk = Chunk(text, [], branch.index, "stop")
            self._post(lambda: request.deliver(chunk))

    def _is_end(self, request: Request, token_id: int) -> bool:
        ends = token_id in self._backend.info.end_token_ids and not request.params.ignore_eos
        return ends or token_id in request.params.stop_token_ids

    def _extend(self, branch: Branch, token_id: int) -> tuple[str, FinishReason | None]:
        request = branch.request
        if self._is_end(request, token_id):
            return branch.text.finish(), "stop"
        branch.new_tokens.append(token_id)
        branch.run.tokens.append(token_id)
        branch.run.chain.append(token_id)
        text = branch.text.push(self._backend.detokenize([token_id]))
        if branch.text.stopped:
            return text, "stop"
        if branch.constraint is not None:
            branch.constraint.advance(token_id)
            if branch.constraint.finished:
                return text + branch.text.finish(), "stop"
        if len(branch.new_tokens) >= request.max_new_tokens:
            return text + branch.text.finish(), "length"
        return text, None

    def complete(self, request: Request) -> None:
        """Delivers the result of a finished request."""
        if request.branches[0].run.shared:
            self._recent.add(request.chain, [*request.prompt, *request.branches[0].new_tokens])
        generation = self._generation(request, time.monotonic())

        def deliver() -> None:
            self._finished(request)
            request.deliver(generation)

        self._post(deliver)

    def _generation(self, request: Request, now: float) -> Generation:
        branches = sorted(request.branches, key=lambda branch: branch.index)
        wants_logprobs = request.params.logprobs is not None
        choices = [
            Choice(
                each.text.text,
                each.new_tokens,
                each.finish_reason or "cancelled",
                each.logprobs if wants_logprobs else None,
            )
            for each in branches
        ]
        first = choices[0]
        cached = request.cached_tokens
        first_token_at = request.first_token_at or now
        return Generation(
            text=first.text,
            token_ids=first.token_ids,
            finish_reason=first.finish_reason,
            logprobs=first.logprobs,
            usage=Usage(len(request.prompt), cached, sum(len(each.new_tokens) for each in branches)),
            reuse=self._report(request, cached),
            timing=Timing(
                ttft_s=first_token_at - request.created,
                queue_s=min(request.admitted_at or first_token_at, first_token_at) - request.created,
                total_s=now - request.created,
            ),
            choices=choices,
            prompt_token_ids=request.prompt,
        )

    def _report(self, request: Request, cached: int) -> ReuseReport:
        exact = self._backend.info.numerics == "bitwise" and request.policy.numerics == "bitwise"
        tiers = {"context": request.context_tokens, **request.pool_tokens}
        known = sum(tiers.values())
        if cached > known:  # what no tier's KV was needed for: its logits were stored
            source = request.logits_source or "memory"
            if request.answer is not None:
                source = request.answer.source
            tiers[source] = tiers.get(source, 0) + cached - known
        tiers = {name: count for name, count in tiers.items() if count}
        exactness: Exactness = "bitwise" if exact else "standard"
        if request.wording is not None or request.splices is not None or (self._rounded and cached):
            exactness = "approximate"
        return ReuseReport(
            exactness=exactness,
            tiers=tiers,
            computed_tokens=len(request.prompt) - cached,
            zero_prefill=request.zero_prefill,
            divergence=request.divergence,
            note=_note(request, tiers, cached, self._backend.info),
            skipped=dict(request.skipped_tokens),
            drafts=_draft_counts(request),
            completion=request.answer is not None,
            wording=request.wording,
            passage_tokens=0 if request.splices is None else request.splices.moved,
        )


def _draft_counts(request: Request) -> dict[str, DraftCount]:
    totals: dict[str, DraftCount] = {}
    for branch in request.branches:
        for source, (proposed, accepted) in {} if branch.drafter is None else branch.drafter.counts.items():
            before = totals.get(source, DraftCount(0, 0))
            totals[source] = DraftCount(before.proposed + proposed, before.accepted + accepted)
    return {source: each for source, each in totals.items() if each.proposed}


def _note(request: Request, tiers: dict[str, int], cached: int, info: ModelInfo) -> str:
    if not request.reuses:
        return "reuse was off for this request"
    if request.wording is not None:
        return f"answered with what is stored for another wording: {_exact_note(request, tiers, cached, info)}"
    return _exact_note(request, tiers, cached, info)


def _exact_note(request: Request, tiers: dict[str, int], cached: int, info: ModelInfo) -> str:
    computed = len(request.prompt) - cached
    if request.answer is not None:
        known = len(request.answer.token_ids)
        more = (
            "" if request.admitted_at is None else f"; more than its {known} tokens was asked for, so it was continued"
        )
        return f"the answer was stored in {request.answer.source}{more}"
    if request.zero_prefill:
        again = f"; {computed} prompt tokens were computed again for what followed" if computed else ""
        source = request.prefix.logits_source
        stored = f"logits stored in {source}" if source not in ("", "memory") else "stored logits"
        return f"the whole prompt was known: the first token came from {stored}, without a model step{again}"
    slow = "".join(
        f"; {count // info.block_tokens} blocks in {name} recomputed: slower to load"
        for name, count in request.skipped_tokens.items()
    )
    if not tiers:
        reason = f" ({info.notes[0]})" if info.notes and not info.reuse_blocks else ""
        return f"nothing was reused: {computed} prompt tokens computed{reason}{slow}"
    parts = [f"{count} {_place(name)}" for name, count in tiers.items()]
    return f"prompt tokens: {', '.join(parts)}, {computed} computed{slow}"


def _place(tier: str) -> str:
    places = {
        "context": "shared in the context",
        "memory": "from the memory pool",
        "bundle": "from a preloaded bundle",
        "passages": "of passages moved from elsewhere (approximate)",
    }
    return places.get(tier, f"from {tier}")
