"""The completions seen, and the drafters made from them."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kitelib.yoco.drafts.drafter import Drafter
from kitelib.yoco.drafts.followers import (
    ANSWER_PRIORS,
    STORED_PRIORS,
    AnswersFollower,
    PromptFollower,
    StoredFollower,
    Text,
    as_text,
)
from kitelib.yoco.drafts.rates import Rates
from kitelib.yoco.drafts.records import Records
from kitelib.yoco.drafts.suffix_automaton import SuffixAutomaton

__all__ = ["Asked", "DraftLibrary"]

_SAME, _CONVERSATION, _CANONICAL, _NEIGHBOUR, _PROMPT = 0, 1, 2, 3, 6  # kinds in STORED_PRIORS
_NEIGHBOUR_STEPS = (0.9, 0.8)  # dot products from which a neighbour is of the first or second kind of neighbours
_ROOT_BYTES = 1500  # a root without what it counts itself
_AUTOMATON_SHARE = 0.3  # of the bytes, for each of the two generations of a root's automata
_RECORDS_SHARE = 0.3
_LEAST_BYTES_PER_TOKEN = 2000  # a text may have one token per so many bytes of the library, lest it fill it alone
_PIECE_TOKENS = 256  # of a text that enter the automaton at once: about a millisecond
_MOST_PENDING = 2**16


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """What is known of a prompt beside its tokens.

    Attributes:
        fingerprints: of its full blocks, in order (`BlockChain.fingerprints`).
        end: identifies the whole prompt (`BlockChain.end()`).
        signature: digest of the canonical form of the user's question and of all around it; None if there is none.
        vector: embedding of the question, of unit length and shape (dimensions,); None without an encoder.
        block_tokens: tokens of a full block; 0 if earlier turns are not to be looked for.
    """

    fingerprints: Sequence[bytes]
    end: bytes
    signature: bytes | None = None
    vector: npt.NDArray[np.float32] | None = None
    block_tokens: int = 0


class _Root:
    """All that is kept for one root: nothing of it is ever seen under another."""

    __slots__ = ("automaton", "num_bytes", "older", "rates", "records")

    def __init__(self) -> None:
        self.num_bytes = 0
        self.records = Records()
        self.automaton = SuffixAutomaton()
        self.older: SuffixAutomaton | None = None
        self.rates: dict[bool, tuple[Rates, Rates]] = {}

    def rates_of(self, sampled: bool) -> tuple[Rates, Rates]:
        """Rates of stored texts, and of what all answers have in common: greedy answers repeat more than others."""
        rates = self.rates.get(sampled)
        if rates is None:
            rates = self.rates[sampled] = Rates(STORED_PRIORS), Rates(ANSWER_PRIORS)
        return rates

    def measure(self) -> int:
        """Bytes held, estimated from what is counted as it is added; also sets `num_bytes`."""
        automata = self.automaton.num_bytes + (self.older.num_bytes if self.older is not None else 0)
        rates = sum(each.num_bytes for both in self.rates.values() for each in both)
        self.num_bytes = _ROOT_BYTES + self.records.num_bytes + automata + rates
        return self.num_bytes


class DraftLibrary:
    """Completions seen, per root fingerprint, and drafters made from them.

    A draft that was taken from another tenant's answers would show in the time it saves, so nothing crosses roots: a
    root covers the model and the tenant. When the library is full, the root that was used least recently goes; within
    the last one, the oldest completions. What all answers of a root have in common is kept in two generations of a
    suffix automaton: when the younger is full, it takes the place of the older.

    For use by one thread, except `stats`.

    Args:
        max_bytes: what all roots may hold together; 0 keeps nothing.

    Attributes:
        max_bytes: the same.
        num_bytes: bytes held, estimated from what is counted as it is added.
    """

    __slots__ = ("_pending", "_roots", "max_bytes", "num_bytes")

    def __init__(self, max_bytes: int = 64 * 2**20) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._roots: OrderedDict[bytes, _Root] = OrderedDict()
        self._pending: deque[tuple[_Root, Text, int]] = deque()  # texts for automata, from the given token on

    def drafter(
        self, root: bytes, prompt: Sequence[int], asked: Asked, *, known: Sequence[int] = (), sampled: bool = False
    ) -> Drafter:
        """A drafter for one branch that answers `prompt`.

        Args:
            root: fingerprint that the prompt's chain starts from.
            prompt: its token ids; not copied, so not to be changed while the drafter is used.
            asked: what is known of it.
            known: a stored completion of exactly this prompt; may be empty.
            sampled: whether the branch draws its tokens at a temperature above 0.
        """
        kept = self._root(root)
        rates, answer_rates = kept.rates_of(sampled)
        stored: list[StoredFollower] = []
        texts: set[Text] = set()
        for source, kind, text in self._candidates(kept.records, prompt, asked, known):
            if text and text not in texts:
                texts.add(text)
                stored.append(StoredFollower(source, text, rates, kind))
        answers = [
            AnswersFollower(automaton, answer_rates)
            for automaton in (kept.automaton, kept.older)
            if automaton is not None and automaton.num_texts
        ]
        self._work_off()
        self._bound(kept)
        return Drafter(stored, answers, PromptFollower(lambda: as_text(prompt), rates, _PROMPT))

    def add(self, root: bytes, asked: Asked, completion: Sequence[int]) -> None:
        """Keeps a completion of a prompt, without the end token, in the place of an earlier one of the same prompt.

        Long ones enter the automaton piece by piece, a piece with each call, so that no call takes long.
        """
        text = as_text(completion)
        if not text:
            return
        kept = self._root(root)
        block = asked.fingerprints[-1] if asked.fingerprints else None
        kept.records.add(asked.end, block, asked.signature, asked.vector, text)
        kept.records.shrink(int(self.max_bytes * _RECORDS_SHARE))
        if sum(len(waiting) for _, waiting, _ in self._pending) < _MOST_PENDING:
            self._pending.append((kept, text[: self.max_bytes // _LEAST_BYTES_PER_TOKEN], 0))
        self._work_off()
        self._bound(kept)

    def clear(self) -> None:
        """Forgets everything."""
        self._roots.clear()
        self._pending.clear()
        self.num_bytes = 0

    def stats(self) -> dict[str, int]:
        """Completions kept, their tokens, and the bytes of everything. Any thread."""
        records = [root.records for root in list(self._roots.values())]
        return {
            "completions": sum(len(each) for each in records),
            "tokens": sum(each.num_tokens for each in records),
            "bytes": self.num_bytes,
        }

    def _root(self, root: bytes) -> _Root:
        kept = self._roots.get(root)
        if kept is None:
            kept = self._roots[root] = _Root()
        else:
            self._roots.move_to_end(root)
        return kept

    def _work_off(self) -> None:
        """Adds what is pending to automata, at most one piece."""
        left = _PIECE_TOKENS
        while self._pending and left > 0:
            kept, text, at = self._pending.popleft()
            if at == 0:
                if kept.automaton.num_bytes > self.max_bytes * _AUTOMATON_SHARE:
                    kept.older, kept.automaton = kept.automaton, SuffixAutomaton()
                kept.automaton.start()
            kept.automaton.extend(map(ord, text[at : at + left]))
            if at + left < len(text):
                self._pending.appendleft((kept, text, at + left))
            left -= len(text) - at
            self._measure(kept)

    def _measure(self, kept: _Root) -> None:
        before = kept.num_bytes
        self.num_bytes += kept.measure() - before

    def _bound(self, kept: _Root) -> None:
        """Lets go what is too much: other roots first, then of this one what is oldest."""
        self._measure(kept)
        while self.num_bytes > self.max_bytes and len(self._roots) > 1:
            self._forget(next(iter(self._roots)))
        if self.num_bytes > self.max_bytes:
            kept.older = None
            self._measure(kept)
        if self.num_bytes > self.max_bytes:
            self.clear()

    def _forget(self, root: bytes) -> None:
        gone = self._roots.pop(root)
        self.num_bytes -= gone.num_bytes
        self._pending = deque(each for each in self._pending if each[0] is not gone)

    @staticmethod
    def _candidates(
        records: Records, prompt: Sequence[int], asked: Asked, known: Sequence[int]
    ) -> list[tuple[str, int, Text | None]]:
        found = [("same prompt", _SAME, as_text(known)), ("same prompt", _SAME, records.of_prompt(asked.end))]
        if asked.block_tokens:
            before = records.of_beginning(asked.fingerprints, asked.block_tokens, prompt)
            found.append(("conversation", _CONVERSATION, before))
        found.append(("canonical", _CANONICAL, records.of_signature(asked.signature)))
        for likeness, text in records.near(asked.vector):
            kind = _NEIGHBOUR + sum(likeness < step for step in _NEIGHBOUR_STEPS)
            found.append(("neighbour", kind, text))
        return found
