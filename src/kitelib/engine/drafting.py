"""Drafts on the model's thread: guesses of what a branch will say are verified in the step that decodes it.

A guess is a token with certainty, so exact speculative sampling (Leviathan et al. 2023, "Fast inference from
transformers via speculative decoding") is simply this: the request's own sampler draws the next token from the logits
before the guess, with the random number that it would have used anyway, and the guess is accepted if it is that token.
The answer is therefore the same with and without drafts, at any temperature, where a row of a step has the bits that it
has alone (bitwise numerics).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from kitelib.abc import Backend
from kitelib.engine.request import Branch, Request
from kitelib.engine.steps import extents
from kitelib.yoco.completions import Completion
from kitelib.yoco.drafts import DraftLibrary, Governor, Proposal, StepCost, allot
from kitelib.yoco.encoder import Vector

__all__ = ["Drafting"]

_LEARNED_PER_STEP, _LEARNED_IDLE = 16, 256  # tokens that the library takes in at once, some microseconds each
_Work = Sequence[tuple[Branch, int]]


class Drafting:
    """Chooses drafts for each step, and learns from what became of them.

    Attributes:
        proposed, accepted: draft tokens so far.
        steps: steps with drafts so far.
        learning: there are answers that nothing was learned from yet.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._library = DraftLibrary()
        self._cost = StepCost()
        self._governor = Governor(self._cost)
        self._overhead_s = 0.0
        self._accepted = self._branches = 0  # of the step under way
        self.proposed = self.accepted = self.steps = 0
        self.learning = False

    def begin(self, branch: Branch) -> None:
        """The branch is new."""
        request = branch.request
        if request.asked is None or not self._backend.info.max_outputs:
            return
        known = () if request.guess is None else request.guess.token_ids
        branch.drafter = self._library.drafter(
            branch.run.chain.root, request.prompt, request.asked, known=known, sampled=not request.params.greedy
        )

    def add_vector(self, request: Request, vector: Vector) -> None:
        """The request's question has a vector from now on: answers to near ones are guesses, too."""
        if request.asked is not None:
            request.asked = dataclasses.replace(request.asked, vector=vector)
            self._begin_again(request)

    def add_guess(self, request: Request, guess: Completion) -> None:
        """What followed the request's prompt before is known from now on."""
        request.guess = guess
        self._begin_again(request)

    def _begin_again(self, request: Request) -> None:
        if request.closed:
            return
        for branch in request.branches:
            before = branch.drafter
            if before is not None and branch.proposal is None:
                self.begin(branch)
                assert branch.drafter is not None
                branch.drafter.counts = before.counts
                for token_id in branch.new_tokens:
                    branch.drafter.advance(token_id)

    def choose(self, work: _Work) -> None:
        """Sets the drafts that branches have verified in this step. They take only rows and memory that nobody else
        needs."""
        begun = time.perf_counter()
        decoding = [branch for branch, count in work if count == branch.run.remaining]
        if not any(_can(branch) for branch in decoding) or not self._governor.allowed():
            return
        info, rows = self._backend.info, sum(count for _, count in work)
        most = min(info.max_step_tokens - rows, info.max_outputs - len(decoding))
        if most > 0:
            proposals = [_proposal(branch, most) for branch in decoding]
            counts = allot(proposals, rows, self._cost, most)
            for branch, proposal, count in zip(decoding, proposals, counts, strict=True):
                if proposal is not None and count:
                    branch.proposal, branch.draft = proposal, proposal.token_ids[: min(count, _left(branch))]
            if self._backend.room(None, extents((each, count + len(each.draft)) for each, count in work)) < 0:
                for branch in decoding:
                    branch.proposal, branch.draft = None, ()
        self.learning = self._library.work(_LEARNED_PER_STEP)
        self._branches = len(decoding)
        self._overhead_s = time.perf_counter() - begun

    def told(self, branch: Branch, token_id: int) -> None:
        """The branch has got a token: the next one of its draft, or another."""
        if branch.drafter is not None:
            branch.drafter.advance(token_id)
        if branch.accepted < len(branch.draft) and branch.draft[branch.accepted] == token_id:
            branch.accepted += 1

    def verified(self, branch: Branch) -> None:
        """Nothing more of the branch's draft can be right."""
        if branch.drafter is not None and branch.proposal is not None:
            branch.drafter.verified(branch.proposal, len(branch.draft), branch.accepted)
        self.proposed += len(branch.draft)
        self.accepted += branch.accepted
        self._accepted += branch.accepted
        branch.proposal, branch.draft, branch.accepted = None, (), 0

    def computed(self, rows: int, drafted: int, seconds: float) -> None:
        """A step has ended: so many rows, and so many draft tokens beside them."""
        self._cost.note(rows + drafted, seconds)
        self.steps += drafted > 0
        if drafted or self._overhead_s:
            self._governor.note(
                rows=rows,
                drafted=drafted,
                accepted=self._accepted,
                seconds=seconds,
                overhead_s=self._overhead_s,
                branches=self._branches,
            )
        self._overhead_s, self._accepted, self._branches = 0.0, 0, 0

    def finished(self, request: Request) -> None:
        """The request's answer is complete: others may guess with it."""
        first = request.branches[0]
        if request.asked is not None and first.run.shared and first.new_tokens:
            self._library.add(first.run.chain.root, request.asked, first.new_tokens)
            self.learning = True

    def forget(self) -> None:
        """Nothing of what was said is of use any more."""
        self._library.clear()

    def tidy(self) -> None:
        """Nobody needs the thread: learns from answers that came meanwhile."""
        self.learning = self._library.work(_LEARNED_IDLE)

    def stats(self) -> dict[str, int]:
        """For `KiteEngine.stats`. Any thread."""
        return {"proposed": self.proposed, "accepted": self.accepted, "steps": self.steps, **self._library.stats()}


def _can(branch: Branch) -> bool:
    """The logits after the prompt itself are kept, and choices part there, so drafts start behind it."""
    return branch.drafter is not None and bool(branch.new_tokens)


def _proposal(branch: Branch, most: int) -> Proposal | None:
    left = _left(branch)
    return branch.drafter.propose(min(most, left)) if branch.drafter is not None and _can(branch) and left > 0 else None


def _left(branch: Branch) -> int:
    """Tokens that a draft of the branch can have: the step gives one more, and that may be the last."""
    return branch.request.max_new_tokens - len(branch.new_tokens) - 1
