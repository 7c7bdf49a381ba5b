"""Other wordings of a question, for requests with ``mode="semantic"``, and vectors of questions, for drafts."""

from __future__ import annotations

import logging
from typing import Any, Final

from kitelib.abc import Backend
from kitelib.config import ReusePolicy
from kitelib.engine.request import Request
from kitelib.engine.verifying import AnswerTokens, Ask, NearQuestions, Verifier
from kitelib.errors import ConfigError, KiteError, RequestError
from kitelib.fingerprint import Fingerprint
from kitelib.runtime.threads import ThreadDoor
from kitelib.stores.pool import RUPool
from kitelib.upcycle.recycler import Recycler
from kitelib.yoco.canonical import LEVELS
from kitelib.yoco.encoder import Encoder, Vector, load_encoder, question_vector
from kitelib.yoco.planner import Spawn
from kitelib.yoco.wordings import Question, Wording, Wordings

__all__ = ["Matcher", "check_encoder", "open_encoder"]

_LOG = logging.getLogger("kitelib.matching")
_MOST_ENCODING: Final = 64  # questions on their way through the encoder; others do without
_UNIT_BYTES: Final = 4096  # set aside for a wording on its way to the pool


async def open_encoder(wanted: str | Encoder | None, door: ThreadDoor) -> Encoder | None:
    """The encoder of that name, or the one that is given. Raises as `load_encoder`."""
    return await door.run(lambda: load_encoder(wanted)) if isinstance(wanted, str) else wanted


def check_encoder(wanted: Any) -> None:
    """Raises ConfigError unless it is a name, an encoder, or None."""
    parts = ("encode", "dimensions", "num_bytes", "name")
    if wanted is not None and not isinstance(wanted, str) and not all(hasattr(wanted, part) for part in parts):
        raise ConfigError(
            f"encoder is {wanted!r}; give 'use', None, or an object with {', '.join(parts)} (kitelib.yoco.encoder.Encoder)"
        )


class Matcher:
    """Finds which stored question may be answered instead of one that is asked. Used on the event loop; one per loaded
    model.

    Args:
        backend: the model.
        pool: has the stored wordings.
        recycler: takes new ones.
        door: to the threads.
        spawn: runs a supervised task.
        encoder: makes vectors of questions; None without one.
    """

    def __init__(
        self,
        backend: Backend,
        pool: RUPool,
        recycler: Recycler,
        door: ThreadDoor,
        spawn: Spawn,
        encoder: Encoder | None,
    ) -> None:
        self._backend = backend
        self._pool = pool
        self._recycler = recycler
        self._door = door
        self._spawn = spawn
        self._encoder = encoder
        self._wordings = Wordings(pool, backend.info)
        self._near = None if encoder is None else NearQuestions(door, encoder.dimensions)
        self._verifier: Verifier | None = None
        self._encoder_door = ThreadDoor(max_threads=1)  # one at a time, and nobody else waits for a thread
        self._encoding = 0
        self._judge: Ask | None = None
        self._qualifying = False  # or done with it
        self._judge_note = ""

    @property
    def encodes(self) -> bool:
        """Whether there is an encoder."""
        return self._encoder is not None

    async def vector(self, question: Question) -> Vector | None:
        """The question's vector; None if it has none."""
        encoder = self._encoder
        if encoder is None or self._encoding >= _MOST_ENCODING:
            return None
        self._encoding += 1
        try:
            return await self._encoder_door.run(lambda: question_vector(encoder, question.text))
        finally:
            self._encoding -= 1

    async def wording(
        self,
        root: Fingerprint,
        question: Question,
        policy: ReusePolicy,
        vector: Vector | None,
        ask: Ask,
        judge: Ask,
        patience_s: float,
    ) -> Wording | None:
        """The stored wording whose units may answer the question; None if there is none. Whatever goes wrong is a miss.

        Args:
            root: of the request's fingerprints.
            question: what is asked.
            policy: how alike they must be.
            vector: of the question, where near ones are wanted.
            ask: asks the model within the request's namespace.
            judge: asks it on the engine's own behalf, after everybody else.
            patience_s: seconds that outer tiers are waited for.
        """
        found = await self._wordings.find(root, question, policy.level, patience_s=patience_s)
        if found is not None or not policy.neighbours or self._near is None:
            return found
        self._judge = judge
        if self._verifier is None:
            return None
        near = await self._near.find(root, question, vector, self._verifier, ask=ask)
        if near is None:
            return None
        return await self._wordings.find(root, near, policy.level, patience_s=patience_s)

    async def _qualify(self, judge: Ask) -> None:
        """The model has to show that it can judge before anybody is given what it says; nobody waits for that."""
        backend = self._backend
        try:
            tokens = await self._door.run(
                lambda: AnswerTokens.of(lambda text: backend.tokenize(text, add_special=False))
            )
            verifier = Verifier(judge, tokens)
            await verifier.qualify()
        except RequestError as error:  # the model's tokens or its template don't allow it: not tried again
            self._judge_note = str(error)
            _LOG.warning("%s", error)
        except KiteError as error:  # the engine was busy, say: the next request tries again
            self._qualifying = False
            _LOG.warning("the model could not be asked whether it can judge: %s", error)
        else:
            self._verifier = verifier
            self._judge_note = "" if verifier.qualification is None else verifier.qualification.note

    def finished(self, request: Request) -> None:
        """The request is answered: from now on its question stands for all that ask the same. Never raises."""
        question = request.question
        if question is None or request.policy.mode != "semantic" or request.wording is not None:
            return
        try:
            self._keep(request, question)
        except Exception:  # noqa: BLE001 - the answer is there; who asks in other words is only not answered by it
            _LOG.exception("a question could not be kept")

    def _keep(self, request: Request, question: Question) -> None:
        run, near, judge = request.branches[0].run, self._near, self._judge
        if judge is not None and not self._qualifying:  # not earlier: the request itself must not wait for it
            self._qualifying = True
            self._spawn("qualify", lambda: self._qualify(judge))
        if not run.shared:
            return
        root = run.chain.root
        for level in LEVELS:
            if not request.rewords and self._pool.contains(self._wordings.wanted(root, question, level)):
                continue
            if self._recycler.reserve(_UNIT_BYTES, 1):
                unit = self._wordings.unit(root, question, level, request.prompt, epoch=run.epoch)
                self._recycler.submit([unit], _UNIT_BYTES, run.epoch, root)
        vector = request.vector
        if near is not None and vector is not None and request.policy.neighbours:
            kept, known = near, (root, question, vector)

            async def remember() -> None:
                await kept.remember(*known)

            self._spawn("remember", remember)

    async def forget(self) -> None:
        """Nothing that was asked before counts any more."""
        if self._verifier is not None:
            self._verifier.clear()
        if self._near is not None:
            await self._near.clear()

    def stats(self) -> dict[str, Any]:
        """For `KiteEngine.stats`."""
        return {
            "encoder_bytes": 0 if self._encoder is None else self._encoder.num_bytes,
            "near_questions": 0 if self._near is None else len(self._near),
            "judge": self._judge_note,
        }
