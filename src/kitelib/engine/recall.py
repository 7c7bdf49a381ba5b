"""What is known for a request before anything is computed: KV and logits of its prompt, its answer, guesses of it."""

from __future__ import annotations

import dataclasses

from kitelib.config import ReusePolicy, SamplingParams
from kitelib.engine.serving import Serving
from kitelib.engine.verifying import Ask
from kitelib.fingerprint import BlockChain, Fingerprint
from kitelib.runtime.threads import ThreadDoor
from kitelib.yoco.completions import Completion, sampling_key
from kitelib.yoco.drafts import Asked
from kitelib.yoco.encoder import Vector
from kitelib.yoco.planner import EMPTY_PREFIX, PooledPrefix
from kitelib.yoco.wordings import Question

__all__ = ["Recall", "Recalled"]

_INLINE_TOKENS = 2048  # shorter prompts are fingerprinted on the loop (0.2 ms): a thread would take longer


@dataclasses.dataclass(frozen=True, slots=True)
class Recalled:
    """Attributes are those of `Request` with the same names; `resident` counts the first blocks in the context."""

    prompt: list[int]
    chain: BlockChain
    prefix: PooledPrefix = EMPTY_PREFIX
    asked: Asked | None = None
    guess: Completion | None = None
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

    def let_go(self) -> None:
        """It is not used after all."""
        if self.prefix.late is not None:
            self.prefix.late.close()


class Recall:
    """Looks one prompt up in the context and in the pool. Whatever a store does wrong is a miss.

    Args:
        serving: the model.
        door: to the threads.
        root: what the prompt's fingerprints start from.
        policy, params: of the request.
        ask: asks the model within the request's namespace.
        judge: asks it on the engine's own behalf.
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
    ) -> None:
        self._serving = serving
        self._door = door
        self._root = root
        self._policy = policy
        self._params = params
        self._ask = ask
        self._judge = judge
        self._drafts = policy.drafts and bool(serving.backend.info.max_outputs)

    def moved(self, tokens: list[int], chain: BlockChain) -> Recalled:
        """Of a prompt whose fingerprints are of a kind that is never stored."""
        return Recalled(tokens, chain, asked=self._asked(chain) if self._drafts else None)

    async def prompt(self, tokens: list[int], question: Question | None, signature: bytes | None) -> Recalled:
        """Of a prompt, or of the stored wording that may be answered in its place; `signature` is the question's."""
        if self._policy.mode == "off":
            return Recalled(tokens, await self._chain(tokens))
        known = await self._look_up(tokens)
        matcher, vector = self._serving.matcher, None
        if self._policy.mode == "semantic" and question is not None and not known.whole:
            if self._policy.neighbours:
                vector = await matcher.vector(question)
            wording = await matcher.wording(self._root, question, self._policy, vector, self._ask, self._judge)
            if wording is not None and list(wording.token_ids) != tokens:
                other = await self._look_up(list(wording.token_ids))
                if other.whole:
                    known.let_go()
                    known = dataclasses.replace(other, wording=wording.text)
                else:
                    other.let_go()  # it would have to be computed as well: then better the question that is asked
                    known = dataclasses.replace(known, rewords=True)
        if not self._drafts or known.answer is not None:
            return dataclasses.replace(known, question=question, vector=vector)
        # Who knows a prompt from an outer tier has not answered it since it was opened, so no draft is at hand.
        elsewhere = known.prefix.logits_source not in ("", "memory")
        guess = await self._serving.completions.find(known.chain, None, outside=elsewhere)
        asked = self._asked(known.chain, signature, vector)
        return dataclasses.replace(known, question=question, vector=vector, guess=guess, asked=asked)

    async def _chain(self, tokens: list[int]) -> BlockChain:
        size = self._serving.backend.info.block_tokens
        if len(tokens) <= _INLINE_TOKENS:
            return BlockChain(self._root, size, tokens)
        return await self._door.run(lambda: BlockChain(self._root, size, tokens))

    async def _look_up(self, tokens: list[int]) -> Recalled:
        chain = await self._chain(tokens)
        sampling = sampling_key(self._params) if self._policy.completions else None
        if sampling is not None:
            answer = await self._serving.completions.find(chain, sampling, outside=True)
            if answer is not None:
                return Recalled(tokens, chain, answer=answer, sampling=sampling)
        first = self._serving.memory.residency.resident_blocks(chain)
        prefix = await self._serving.planner.find(chain, tokens, first, logits=self._policy.zero_prefill)
        return Recalled(tokens, chain, prefix, sampling=sampling, resident=first)

    @staticmethod
    def _asked(chain: BlockChain, signature: bytes | None = None, vector: Vector | None = None) -> Asked:
        return Asked(chain.fingerprints, chain.end(), signature, vector, chain.block_tokens)
