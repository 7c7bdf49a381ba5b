"""The completions seen, and the drafters made from them."""

from __future__ import annotations

import dataclasses
import sys
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
_PENDING_SHARE = 0.005  # of the bytes, for a root's texts that are not in its automaton yet: about what it can hold
_PENDING_BYTES = 16  # of a pending text, beside the text
_TRIED = 8  # one of so many drafters follows the automata even while answers have nothing in common

_Candidates = list[tuple[str, int, Text]]


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """What is known of a prompt beside its tokens.

    Attributes:
        fingerprints: of its full blocks, in order (`BlockChain.fingerprints`).
        end: identifies the whole prompt (`BlockChain.end()`).
        signature: digest of the canonical form of the user's question and of all around it; None if there is none.
        vector: embedding of the question, of unit length and shape (dimensions,); None without an encoder.
        block_tokens: tokens of a full block; 0 if earlier turns are not to be looked for.
        tail_tokens: tokens after the last full block.
    """

    fingerprints: Sequence[bytes]
    end: bytes
    signature: bytes | None = None
    vector: npt.NDArray[np.float32] | None = None
    block_tokens: int = 0
    tail_tokens: int = 0


class _Root:
    """All that is kept for one root: nothing of it is ever seen under another."""

    __slots__ = ("at", "automaton", "drafters", "num_bytes", "older", "pending", "pending_bytes", "rates", "records")

    def __init__(self) -> None:
        self.num_bytes = 0
        self.drafters = 0
        self.records = Records()
        self.automaton = SuffixAutomaton()
        self.older: SuffixAutomaton | None = None
        self.rates: dict[bool, tuple[Rates, Rates]] = {}
        self.pending: deque[Text] = deque()  # texts for the automaton
        self.pending_bytes = 0
        self.at = 0  # tokens of the first one that are in it already

    def wait(self, text: Text, max_bytes: float) -> None:
        """Notes a text for the automaton; lets the oldest ones go if there are too many."""
        self.pending.append(text)
        self.pending_bytes += sys.getsizeof(text) + _PENDING_BYTES
        while self.pending and self.pending_bytes > max_bytes:
            self.next_text()

    def next_text(self) -> None:
        """Is done with the first pending text."""
        self.pending_bytes -= sys.getsizeof(self.pending.popleft()) + _PENDING_BYTES
        self.at = 0

    def learn(self, max_tokens: int, max_bytes: float) -> int:
        """Adds tokens of the first pending text to the automaton; returns how many."""
        text = self.pending[0]
        if self.at == 0:
            if self.automaton.num_bytes > max_bytes:
                self.older, self.automaton = self.automaton, SuffixAutomaton()
            self.automaton.start()
        piece = text[self.at : self.at + max_tokens]
        self.automaton.extend(map(ord, piece))
        self.at += len(piece)
        if self.at == len(text):
            self.next_text()
        return len(piece)

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
        self.num_bytes = _ROOT_BYTES + self.records.num_bytes + automata + rates + self.pending_bytes
        return self.num_bytes


class DraftLibrary:
    """Completions seen, per root fingerprint, and drafters made from them.

    A draft that was taken from another tenant's answers would show in the time it saves, so nothing crosses roots: a
    root covers the model and the tenant. When the library is full, the root that was used least recently goes; within
    the last one, the oldest completions. What all answers of a root have in common is kept in two generations of a
    suffix automaton: when the younger is full, it takes the place of the older. A completion enters the automaton with
    `work`, for which the caller chooses the time; of what waits for it, little is kept.

    For use by one thread, except `stats`.

    Args:
        max_bytes: what all roots may hold together; 0 keeps nothing.

    Attributes:
        max_bytes: the same.
        num_bytes: bytes held, estimated from what is counted as it is added.
    """

    __slots__ = ("_busy", "_found", "_found_for", "_roots", "max_bytes", "num_bytes")

    def __init__(self, max_bytes: int = 64 * 2**20) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._roots: OrderedDict[bytes, _Root] = OrderedDict()
        self._busy: OrderedDict[bytes, None] = OrderedDict()  # roots with pending texts
        # What was found last: all branches of a request ask the same.
        self._found_for: tuple[_Root, int, Asked, Sequence[int]] | None = None
        self._found: _Candidates = []

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
        stored = [
            StoredFollower(source, text, rates, kind)
            for source, kind, text in self._candidates(kept, prompt, asked, known)
        ]
        tries = kept.drafters % _TRIED == 0
        kept.drafters += 1
        answers = [
            AnswersFollower(automaton, answer_rates, tries)
            for automaton in (kept.automaton, kept.older)
            if automaton is not None and automaton.num_texts
        ]
        self._bound(kept)
        return Drafter(stored, answers, PromptFollower(lambda: as_text(prompt), rates, _PROMPT))

    def add(self, root: bytes, asked: Asked, completion: Sequence[int]) -> None:
        """Keeps a completion of a prompt, without the end token, in the place of an earlier one of the same prompt.

        It is followed from now on; what it has in common with others is found out by `work`.
        """
        text = as_text(completion)
        if not text:
            return
        kept = self._root(root)
        block = asked.fingerprints[-1] if asked.fingerprints else None
        kept.records.add(asked.end, block, asked.tail_tokens, asked.signature, asked.vector, text)
        kept.records.shrink(int(self.max_bytes * _RECORDS_SHARE))
        kept.wait(text[: self.max_bytes // _LEAST_BYTES_PER_TOKEN], self.max_bytes * _PENDING_SHARE)
        if kept.pending:
            self._busy[root] = None
        else:
            self._busy.pop(root, None)
        self._bound(kept)

    def work(self, max_tokens: int) -> bool:
        """Takes in what waits, at most so many tokens (a few microseconds each); returns whether anything is left.

        The roots take turns, text by text. Into how many calls the work is cut makes no difference.
        """
        left = max_tokens
        while left > 0 and self._busy:
            root = next(iter(self._busy))
            kept = self._roots[root]
            left -= kept.learn(left, self.max_bytes * _AUTOMATON_SHARE)
            if not kept.pending:
                del self._busy[root]
            elif not kept.at:
                self._busy.move_to_end(root)
            self._bound(kept)
        return bool(self._busy)

    def clear(self) -> None:
        """Forgets everything."""
        self._roots.clear()
        self._busy.clear()
        self._found_for = None
        self._found = []
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

    def _measure(self, kept: _Root) -> None:
        before = kept.num_bytes
        self.num_bytes += kept.measure() - before

    def _bound(self, kept: _Root) -> None:
        """Measures this root, and lets go what is too much: other roots first, then of the last what is oldest."""
        self._measure(kept)
        while self.num_bytes > self.max_bytes and len(self._roots) > 1:
            self._forget(next(iter(self._roots)))
        if self.num_bytes > self.max_bytes:
            (last,) = self._roots.values()
            last.older = None
            self._measure(last)
        if self.num_bytes > self.max_bytes:
            self.clear()

    def _forget(self, root: bytes) -> None:
        gone = self._roots.pop(root)
        self._busy.pop(root, None)
        self.num_bytes -= gone.num_bytes
        self._found_for = None
        self._found = []

    def _candidates(self, kept: _Root, prompt: Sequence[int], asked: Asked, known: Sequence[int]) -> _Candidates:
        last, version = self._found_for, kept.records.version
        if last is None or last[0] is not kept or last[1] != version or last[2] is not asked or last[3] is not known:
            self._found_for = kept, version, asked, known
            self._found = _look_up(kept.records, prompt, asked, known)
        return self._found


def _look_up(records: Records, prompt: Sequence[int], asked: Asked, known: Sequence[int]) -> _Candidates:
    """Source, kind and text of each stored answer that may come again, the most likely first; each text once."""
    found = [("same prompt", _SAME, as_text(known)), ("same prompt", _SAME, records.of_prompt(asked.end))]
    if asked.block_tokens:
        before = records.of_beginning(asked.fingerprints, asked.block_tokens, prompt)
        found.append(("conversation", _CONVERSATION, before))
    found.append(("canonical", _CANONICAL, records.of_signature(asked.signature)))
    for likeness, text in records.near(asked.vector):
        kind = _NEIGHBOUR + sum(likeness < step for step in _NEIGHBOUR_STEPS)
        found.append(("neighbour", kind, text))
    texts: set[Text] = set()
    unlike: _Candidates = []
    for source, kind, text_or_none in found:
        if text_or_none and text_or_none not in texts:
            texts.add(text_or_none)
            unlike.append((source, kind, text_or_none))
    return unlike
