"""What is known for a request before anything is computed: KV and logits of its prompt, its answer, guesses of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable

from kitelib.config import ReusePolicy, SamplingParams
from kitelib.engine.constraints import Constraint
from kitelib.engine.serving import Serving
from kitelib.engine.verifying import Ask
from kitelib.errors import InvalidSamplingError
from kitelib.fingerprint import BlockChain, Fingerprint
from kitelib.runtime.threads import ThreadDoor
from kitelib.stores.pinned import PINNED
from kitelib.stores.pool import MEMORY
from kitelib.yoco.completions import Completion, sampling_key
from kitelib.yoco.decision import patience
from kitelib.yoco.drafts import Asked
from kitelib.yoco.encoder import Vector
from kitelib.yoco.planner import EMPTY_PREFIX, PooledPrefix
from kitelib.yoco.wordings import Question

__all__ = ["NOTHING_ASKED", "Asking", "Recall", "Recalled"]

_INLINE_TOKENS = 2048  # shorter prompts are fingerprinted on the loop (0.2 ms): a thread would take longer


@dataclasses.dataclass(frozen=True, slots=True)
class Recalled:
    """Attributes are those of `Request` with the same names; `resident` counts the first blocks in the context."""

    prompt: list[int]
    chain: BlockChain
    prefix: PooledPrefix = EMPTY_PREFIX
    asked: Asked | None = None
    guess: Completion | None = None
    seek_guess: bool = False
    answer: Completion | None = None
    sampling: bytes | None = None
    question: Question | None = None
    vector: Vector | None = None
    rewords: bool = False
    wording: str | None = None
    resident: int = 0

    @property
    def whole(self) -> bool:
        """Nothing of the prompt has to be computed before the first token, or next to nothing."""
        known = max(self.resident, self.prefix.first + len(self.prefix.payloads))
        return self.answer is not None or self.prefix.logits is not None or 0 < len(self.chain.fingerprints) <= known

    @property
    def deepest(self) -> Fingerprint | None:
        """Fingerprint of the whole prompt if it is known, else of its last block that is; None if none is."""
        if self.answer is not None or self.prefix.logits is not None:
            return self.chain.end()
        blocks = max(self.resident, self.prefix.first + len(self.prefix.payloads))
        return self.chain.fingerprints[blocks - 1] if blocks else None

    def let_go(self) -> None:
        """It is not used after all."""
        if self.prefix.late is not None:
            self.prefix.late.close()


@dataclasses.dataclass(frozen=True, slots=True)
class Asking:
    """What a chat asks.

    Attributes:
        question: None if it asks nothing, or nobody wants to know.
        signature: digest of the question and all around it, for drafts; None if there is no question.
        render: gives the chat's token ids with another text in the place of the question, or None if that can't be done;
            there is one where there is a question.
    """

    question: Question | None = None
    signature: bytes | None = None
    render: Callable[[str], Awaitable[list[int] | None]] | None = None


NOTHING_ASKED = Asking()


class Recall:
    """Looks one prompt up in the context and in the pool. Whatever a store does wrong is a miss.

    Args:
        serving: the model.
        door: to the threads.
        root: what the prompt's fingerprints start from.
        policy, params: of the request.
        ask: asks the model within the request's namespace.
        judge: asks it on the engine's own behalf.
        constraint: of the request, at its start; None if it has none.
    """

    def __init__(
        self,
        serving: Serving,
        door: ThreadDoor,
        root: Fingerprint,
        policy: ReusePolicy,
        params: SamplingParams,
        ask: Ask,
        judge: Ask,
        constraint: Constraint | None,
    ) -> None:
        self._serving = serving
        self._door = door
        self._root = root
        self._policy = policy
        self._params = params
        self._ask = ask
        self._judge = judge
        self._constraint = constraint
        self._drafts = policy.drafts and bool(serving.backend.info.max_outputs)

    def moved(self, tokens: list[int], chain: BlockChain) -> Recalled:
        """Of a prompt whose fingerprints are of a kind that is never stored."""
        return Recalled(tokens, chain, asked=self._asked(chain) if self._drafts else None)

    async def prompt(self, tokens: list[int], asking: Asking = NOTHING_ASKED) -> Recalled:
        """Of a prompt, or of the stored wording that may be answered in its place."""
        if self._policy.mode == "off":
            return Recalled(tokens, await self._chain(tokens))
        known = await self._look_up(tokens)
        question, vector = asking.question, None
        if self._policy.mode == "semantic" and question is not None and not known.whole:
            if self._policy.neighbours:
                vector = await self._serving.matcher.vector(question)
            known = await self._reworded(known, question, vector, asking)
        known = dataclasses.replace(known, question=question, vector=vector)
        if known.deepest is not None:
            self._serving.pool.hits.note(known.chain.root, known.deepest)
        if not self._drafts or known.answer is not None:
            return known
        guess = await self._serving.completions.find(known.chain, None)
        # Who knows a prompt from an outer tier has not answered it since it was opened, so no draft is at hand.
        elsewhere = guess is None and known.prefix.logits_source not in ("", MEMORY, PINNED)
        asked = self._asked(known.chain, asking.signature, vector)
        return dataclasses.replace(known, guess=guess, seek_guess=elsewhere, asked=asked)

    async def _reworded(self, known: Recalled, question: Question, vector: Vector | None, asking: Asking) -> Recalled:
        """What is known of the stored wording that stands for the question, if that is the whole prompt; else `known`."""
        patience_s = self._patience_s(known.prompt)
        wording = await self._serving.matcher.wording(
            self._root, question, self._policy, vector, self._ask, self._judge, patience_s
        )
        if wording is None or wording.text == question.text or asking.render is None:
            return known
        tokens = list(wording.token_ids)
        # With the wording in its place the chat has to be exactly the stored prompt: a template that shows the date, or
        # the keys of tools in their order, may render another one today.
        if await asking.render(wording.text) != tokens:
            return dataclasses.replace(known, rewords=True)
        other = await self._look_up(tokens)
        if not other.whole:  # it would have to be computed as well: then better the question that is asked
            other.let_go()
            return dataclasses.replace(known, rewords=True)
        known.let_go()
        return dataclasses.replace(other, wording=wording.text)

    def _patience_s(self, tokens: list[int]) -> float:
        """How long a request waits for what may be in an outer tier, beside what `Planner.find` waits."""
        measured = all(tier.tried for tier in self._serving.pool.tiers.tiers)
        return patience(len(tokens) / self._serving.scheduler.speed.tokens_per_s, measured=measured)

    async def _chain(self, tokens: list[int]) -> BlockChain:
        size = self._serving.backend.info.block_tokens
        if len(tokens) <= _INLINE_TOKENS:
            return BlockChain(self._root, size, tokens)
        return await self._door.run(lambda: BlockChain(self._root, size, tokens))

    async def _look_up(self, tokens: list[int]) -> Recalled:
        chain = await self._chain(tokens)
        sampling = sampling_key(self._params) if self._policy.completions else None
        if sampling is not None:
            answer = await self._answer(chain, sampling, self._patience_s(tokens))
            if answer is not None:
                return Recalled(tokens, chain, answer=answer, sampling=sampling)
        first = self._serving.memory.residency.resident_blocks(chain)
        prefix = await self._serving.planner.find(chain, tokens, first, logits=self._policy.zero_prefill)
        return Recalled(tokens, chain, prefix, sampling=sampling, resident=first)

    async def _answer(self, chain: BlockChain, sampling: bytes, patience_s: float) -> Completion | None:
        """The stored answer, unless the request's constraint forbids it: then it is none of these options."""
        answer = await self._serving.completions.find(chain, sampling, patience_s=patience_s)
        constraint = self._constraint
        if answer is None or constraint is None:
            return answer
        fits = await self._door.run(lambda: _fits(constraint.fork(), answer))
        return answer if fits else None

    @staticmethod
    def _asked(chain: BlockChain, signature: bytes | None = None, vector: Vector | None = None) -> Asked:
        return Asked(chain.fingerprints, chain.end(), signature, vector, chain.block_tokens, len(chain.tail))


def _fits(constraint: Constraint, answer: Completion) -> bool:
    """Whether the constraint leads to these tokens, and may end after them if the text does."""
    try:
        for token_id in answer.token_ids:
            constraint.advance(token_id)
    except InvalidSamplingError:
        return False
    return constraint.complete or constraint.finished or not answer.ended
