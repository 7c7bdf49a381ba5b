"""Wordings: which stored question stands for all that ask the same, as a recyclable unit.

The first wording of a question that was computed is kept under the question's signature (`kitelib.yoco.canonical`). A
later wording with the same signature finds it, and may then be answered with the KV and logits of the stored one. Only
the last user message of a chat is compared by its signature; everything else must be the same to the byte.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import anyio
import numpy as np

from kitelib.abc import Message, ModelInfo
from kitelib.errors import FormatError, InvalidRequestError
from kitelib.fingerprint import Fingerprint, derived_fingerprint, encode_fields, end_fingerprint
from kitelib.stores.pool import RUPool
from kitelib.stores.wanted import Wanted
from kitelib.upcycle.unit import Expectation, RecyclableUnit
from kitelib.yoco.canonical import Level, signature, tables_digest

__all__ = ["MAX_TEXT_BYTES", "Question", "Wording", "Wordings", "question_of", "with_question"]

_LOG = logging.getLogger("kitelib.wordings")

LAYOUT: Final = "kite.wording"
MAX_TEXT_BYTES: Final = 2**12
"""Most UTF-8 bytes of a question: longer messages are documents, which nobody words twice, and whose signature would
take more than a millisecond of the event loop."""

_PATIENCE_S: Final = 0.25  # an outer tier that takes longer is no gain over computing a question
_NO_TOKENS: Final[tuple[int, ...]] = ()


@dataclasses.dataclass(frozen=True)
class Question:
    """What the last user message of a chat asks, and digest of everything else.

    Attributes:
        text: the message's text, as it was given.
        rest: SHA-256 of the other messages, the message's other keys and the tools, 32 bytes.
    """

    text: str
    rest: bytes

    def signature(self, level: Level) -> str:
        """The signature of the text."""
        return _signature(self.text, level)

    def digest(self, level: Level) -> bytes:
        """SHA-256 of what all wordings of the question share, 32 bytes."""
        fields = encode_fields("kite.question", level, tables_digest(), self.signature(level), self.rest)
        return hashlib.sha256(fields).digest()


@dataclasses.dataclass(frozen=True)
class Wording:
    """A stored wording.

    Attributes:
        text: the question's text.
        token_ids: the whole prompt that it was asked with.
        source: the tier it came from.
    """

    text: str
    token_ids: tuple[int, ...]
    source: str = "memory"


def question_of(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> Question | None:
    """The question of a chat; None if its last message is none of the user's with text alone, or can't be written down.

    Args:
        messages, tools: as of `KiteEngine.chat`.
    """
    try:
        *before, last = messages
        if not isinstance(last, Mapping) or last.get("role") != "user":
            return None
        parts = _parts(last.get("content"))
        if parts is None:
            return None
        texts, other_keys = parts
        text = "\n".join(texts)
        if not text.strip() or len(text.encode("utf-8", "surrogatepass")) > MAX_TEXT_BYTES:
            return None
        others = {key: value for key, value in last.items() if key != "content"}
        # How the text is split into parts may be rendered, and so counts.
        fields = encode_fields(
            "kite.question.rest", before, others, isinstance(last["content"], str), other_keys, tools
        )
    except (InvalidRequestError, TypeError, ValueError, RecursionError):
        return None
    return Question(text, hashlib.sha256(fields).digest())


def with_question(messages: Sequence[Message], text: str) -> list[Message] | None:
    """The chat with another text in its last message; None if that message has several parts."""
    *before, last = messages
    content = last.get("content")
    if isinstance(content, str):
        return [*before, {**last, "content": text}]
    if isinstance(content, (list, tuple)) and len(content) == 1:
        return [*before, {**last, "content": [{**content[0], "text": text}]}]
    return None


def _parts(content: Any) -> tuple[list[str], list[dict[str, Any]]] | None:
    """The texts of a message's content, and the other keys of each part; None if there is something else in it."""
    if isinstance(content, str):
        return [content], []
    if not isinstance(content, (list, tuple)):
        return None
    texts, others = [], []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            return None
        texts.append(part["text"])
        others.append({key: value for key, value in part.items() if key != "text"})
    return texts, others


class Wordings:
    """Wordings in the pool. `unit` may be called from any thread, `find` belongs to the event loop."""

    def __init__(self, pool: RUPool, info: ModelInfo) -> None:
        self._pool = pool
        self._info = info

    def unit(
        self, root: bytes, question: Question, level: Level, token_ids: Sequence[int], *, epoch: int
    ) -> RecyclableUnit:
        """The unit that makes a question stand for all with the same signature.

        Args:
            root: root of the fingerprints that the prompt was computed under.
            question: the question.
            level: the level at which it stands for others; each level has a unit of its own.
            token_ids: the whole prompt.
            epoch: freshness epoch.

        Raises:
            InvalidRequestError: a token id is out of range. FormatError: the prompt is larger than a unit may be.
        """
        text = question.text.encode("utf-8", "surrogatepass")
        if len(text) > MAX_TEXT_BYTES:
            raise FormatError(f"a question of {len(text)} bytes is longer than the {MAX_TEXT_BYTES} that are kept")
        packed = np.frombuffer(text + bytes(-len(text) % 4), "<u4")
        data = np.concatenate([np.array([len(text)], "<u4"), packed, np.array(token_ids, "<u4")])
        parent = _parent(root, question.digest(level))
        return RecyclableUnit(
            kind="completion",
            cf=end_fingerprint(parent, _NO_TOKENS),
            parent=parent,
            token_ids=np.empty(0, np.uint32),
            model_state=self._info.model_state,
            epoch=epoch,
            created_at=time.time(),
            layout=LAYOUT,
            dtype="uint32",
            shape=(len(data),),
            data=data.view(np.uint8),
        )

    def wanted(self, root: bytes, question: Question, level: Level) -> Wanted:
        """What such a unit must be."""
        cf = end_fingerprint(_parent(root, question.digest(level)), _NO_TOKENS)
        most = self._max_bytes
        return Wanted.of(
            Expectation("completion", cf, _NO_TOKENS, self._info.model_state, LAYOUT, max_bytes=most), root
        )

    @property
    def _max_bytes(self) -> int:
        return 8 + MAX_TEXT_BYTES + 4 * self._info.context_tokens

    async def find(
        self, root: bytes, question: Question, level: Level, *, patience_s: float = _PATIENCE_S
    ) -> Wording | None:
        """The wording that stands for a question, which may be the question's own. Whatever a store does wrong is a
        miss; outer tiers are asked for as long as `patience_s` seconds.

        It says nothing of whether the KV of the wording is still there; see docs/matching.md.
        """
        try:
            wanted = self.wanted(root, question, level)
            units = await self._pool.fetch_run([wanted])
            if units:
                return self._read(units[0][0], question, level, units[0][1])
            if self._pool.tiers.tiers:
                with anyio.move_on_after(patience_s):
                    (found,) = await self._pool.fetch_any([wanted])
                    if found is not None:
                        return self._read(found[0], question, level, found[1])
        except Exception:  # noqa: BLE001 - a question that finds no other wording is only computed
            _LOG.exception("a wording could not be looked up")
        return None

    def _read(self, unit: RecyclableUnit, question: Question, level: Level, source: str) -> Wording | None:
        """None if the unit's content makes no sense, or is no wording of this question."""
        if unit.dtype != "uint32" or not 8 <= len(unit.data) <= self._max_bytes:
            return None
        data = unit.data.tobytes()
        num_bytes = int.from_bytes(data[:4], "little")
        start = 4 + num_bytes + -num_bytes % 4
        if num_bytes > MAX_TEXT_BYTES or start >= len(data) or any(data[4 + num_bytes : start]):
            return None
        token_ids = tuple(np.frombuffer(data, "<u4", offset=start).tolist())
        if len(token_ids) >= self._info.context_tokens or max(token_ids) >= self._info.vocab_size:
            return None
        try:
            text = data[4 : 4 + num_bytes].decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            return None
        if _signature(text, level) != question.signature(level):
            return None
        return Wording(text, token_ids, source)


@functools.lru_cache(maxsize=256)  # at most 256 texts of MAX_TEXT_BYTES and their signatures
def _signature(text: str, level: Level) -> str:
    return signature(text, level)


@functools.lru_cache(maxsize=256)
def _parent(root: bytes, digest: bytes) -> Fingerprint:
    return derived_fingerprint(root, "wording", digest)
