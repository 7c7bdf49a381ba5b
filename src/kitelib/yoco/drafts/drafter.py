"""One branch's drafter: asks what can predict its next tokens, and proposes the best."""

from __future__ import annotations

from collections.abc import Sequence

from kitelib.yoco.drafts.followers import AnswersFollower, Follower, PromptFollower, StoredFollower
from kitelib.yoco.drafts.proposal import Proposal

__all__ = ["Drafter"]

_MOST = 64  # tokens of one proposal; more at once hardly ever pay, and cost time to propose
_LEAST = 0.05  # chance of the first token below which a proposal is not worth saying
_CONFIDENT = 0.6  # expected tokens above which the prompt is not searched
_LEARNED = 64  # tokens said since the last proposal; of more, nothing is learned


class Drafter:
    """Proposes what a branch may say next, and learns from what it does say.

    What was said is only noted, and taken in when something is to be proposed: while nobody asks, drafts cost nothing.

    Args:
        stored: followers of stored answers, the most likely first.
        answers: followers of what all answers have in common.
        prompt: the follower of the prompt and of the answer itself.

    Attributes:
        counts: source -> [tokens given to the model to verify, tokens accepted].
    """

    __slots__ = ("_answers", "_lost", "_prompt", "_stored", "_waiting", "counts")

    def __init__(
        self, stored: Sequence[StoredFollower], answers: Sequence[AnswersFollower], prompt: PromptFollower
    ) -> None:
        self._stored = stored
        self._answers = answers
        self._prompt = prompt
        self._waiting: list[int] = []  # said since the last proposal
        self._lost = False  # the branch has a token that texts can't hold
        self.counts: dict[str, list[int]] = {}

    def propose(self, most: int) -> Proposal | None:
        """At most `most` tokens that may come next; None if nothing is worth saying.

        Of all that predict something, the one with the highest expected number of accepted tokens is taken. Asked
        again, it answers the same.
        """
        most = min(most, _MOST)
        if self._waiting:
            self._catch_up()
        if most < 1 or self._lost:
            return None
        best, best_total, source = None, 0.0, ""
        followers: tuple[Follower, ...] = (*self._stored, *self._answers)
        for follower in followers:
            found = follower.propose(most)
            if found is not None and found[2] > best_total:
                best, best_total, source = found, found[2], follower.source
        if best_total < _CONFIDENT or self._prompt.follows:
            found = self._prompt.propose(most)
            if found is not None and found[2] > best_total:
                best, source = found, self._prompt.source
        if best is None or best[1][0] < _LEAST:
            return None
        return Proposal(tuple(best[0]), tuple(best[1]), source)

    def advance(self, token_id: int) -> None:
        """The branch's next token, whether it was drafted or not; every one, in order."""
        self._waiting.append(token_id)

    def verified(self, proposal: Proposal, given: int, accepted: int) -> None:
        """Counts what the model made of a proposal: of its first `given` tokens, so many were accepted.

        Rates are learned from what is said, of every prediction and not only of those that were verified.
        """
        if given < 1:
            return
        count = self.counts.setdefault(proposal.source, [0, 0])
        count[0] += given
        count[1] += accepted

    def _catch_up(self) -> None:
        """Takes in what was said since the last proposal."""
        token_ids, self._waiting = self._waiting, []
        if self._lost:
            return
        try:
            text = "".join(map(chr, token_ids))
        except (ValueError, OverflowError):
            self._lost = True
            return
        followers: tuple[Follower, ...] = (*self._stored, *self._answers, self._prompt)
        if len(token_ids) <= _LEARNED:
            for follower in followers:
                follower.advance(text)
        else:
            for follower in followers:
                follower.skip(text)
