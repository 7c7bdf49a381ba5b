"""A suffix automaton over many texts: which continuation follows the longest suffix that was seen before.

The automaton is built online (Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text"), and its
states carry counts, from which a continuation and its chance are read as in suffix decoding (Oliaro et al. 2024,
"SuffixDecoding"). Every text starts with a marker of its own kind, so that beginnings are matched as beginnings and no
match crosses from one text into the next; the automaton starts again at its initial state for each text, so a text that
was seen before adds no state.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Final

__all__ = ["START", "SuffixAutomaton"]

START: Final = -1
"""Stands before the first token of every text."""

_NONE: Final = -2
_STATE_BYTES: Final = 6 * 4 + 3  # six numbers, and what arrays keep free to grow
_BRANCH_BYTES: Final = 300  # a second continuation of a state: a dict, and its place in the dict of dicts
_CONTINUATION_BYTES: Final = 78  # each one after that: an entry and two numbers
_FIXED_BYTES: Final = 1200


class SuffixAutomaton:
    """All substrings of the texts added so far.

    A state stands for the substrings that end at the same places; state 0 for the empty one. `counts[s]` is the number
    of texts that contain them: counting texts, and not places, makes a text that repeats itself cost no more than its
    length. `best_tokens[s]` is the continuation that most texts have (the latest one, if several), and `best_states[s]`
    where it leads; -2 and 0 if there is none. Most states have no other continuation; those of the others are in a dict.

    Adding a token takes amortized constant time (a few microseconds), and so does advancing a match.

    Attributes:
        num_tokens: tokens added, markers left out.
        num_texts: texts added.
        num_bytes: bytes held, estimated from the numbers of states and continuations.
        counts, best_tokens, best_states, lengths, links: one number per state; to be read only.
    """

    __slots__ = (
        "_last",
        "_more",
        "_stamps",
        "best_states",
        "best_tokens",
        "counts",
        "lengths",
        "links",
        "num_bytes",
        "num_texts",
        "num_tokens",
    )

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_texts = 0
        self._last = 0
        self.num_bytes = _FIXED_BYTES
        self.lengths = array("i", (0,))
        self.links = array("i", (-1,))
        self.counts = array("i", (0,))
        self._stamps = array("i", (0,))  # the last text that was counted
        self.best_tokens = array("i", (_NONE,))
        self.best_states = array("i", (0,))
        self._more: dict[int, dict[int, int]] = {}

    def add(self, token_ids: Iterable[int]) -> None:
        """Adds one text; ids from 0 to 2**31 - 1."""
        self.start()
        self.extend(token_ids)

    def start(self) -> None:
        """Starts a text; what `extend` adds from now on belongs to it."""
        self.num_texts += 1
        self.counts[0] = self.num_texts
        self._last = self._extend(0, START)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Goes on with the text that was started last."""
        state = self._last
        for token in token_ids:
            state = self._extend(state, token)
            self.num_tokens += 1
        self._last = state

    def next(self, state: int, token: int) -> int:
        """The state that `token` leads to from `state`; 0 if nothing does."""
        if self.best_tokens[state] == token:
            return self.best_states[state]
        more = self._more.get(state)
        return more.get(token, 0) if more is not None else 0

    def advance(self, state: int, length: int, token: int) -> tuple[int, int]:
        """The longest suffix that occurs, after one more token.

        Args:
            state: state of the longest suffix before; 0 at the start.
            length: tokens of that suffix.
            token: what the text goes on with.

        Returns:
            State and length of the longest suffix now; (0, 0) if not even `token` alone occurs.
        """
        lengths, links = self.lengths, self.links
        while state and length <= lengths[links[state]]:  # the state was split since
            state = links[state]
        while True:
            target = self.next(state, token)
            if target:
                return target, length + 1
            if not state:
                return 0, 0
            state = links[state]
            length = lengths[state]

    def begin(self) -> tuple[int, int]:
        """State and length of a text that is about to start."""
        return self.advance(0, 0, START)

    def find(self, token_ids: Sequence[int]) -> int:
        """How many texts contain these tokens in a row; START may stand first."""
        state = 0
        for token in token_ids:
            state = self.next(state, token)
            if not state:
                return 0
        return self.counts[state]

    def _extend(self, last: int, token: int) -> int:
        """Adds `token` after the text that ends in `last`; returns the state of the text with it."""
        lengths = self.lengths
        target = self.next(last, token)
        if target:
            reached = target if lengths[target] == lengths[last] + 1 else self._split(last, token, target)
        else:
            reached = self._append(last, token)
        self._count(last, token)
        return reached

    def _append(self, last: int, token: int) -> int:
        links, lengths = self.links, self.lengths
        new = self._new_state(lengths[last] + 1, 0, 0, 0)
        state, target = last, 0
        while state >= 0:
            target = self.next(state, token)
            if target:
                break
            self._set(state, token, new)
            state = links[state]
        if state >= 0:
            links[new] = target if lengths[target] == lengths[state] + 1 else self._split(state, token, target)
        return new

    def _split(self, state: int, token: int, target: int) -> int:
        """Gives the shorter substrings of `target`, which now also end elsewhere, a state of their own."""
        links = self.links
        clone = self._new_state(self.lengths[state] + 1, links[target], self.counts[target], self._stamps[target])
        self.best_tokens[clone] = self.best_tokens[target]
        self.best_states[clone] = self.best_states[target]
        more = self._more.get(target)
        if more is not None:
            self._more[clone] = more.copy()
            self.num_bytes += _BRANCH_BYTES + _CONTINUATION_BYTES * len(more)
        links[target] = clone
        while state >= 0 and self.next(state, token) == target:
            if self.best_tokens[state] == token:
                self.best_states[state] = clone
            else:
                self._more[state][token] = clone
            state = links[state]
        return clone

    def _count(self, last: int, token: int) -> None:
        """Counts the text for all substrings that end here and were not counted yet, the longest first.

        A state that was counted at an earlier place of this text ends the walk: all shorter ones were counted then.
        """
        counts, stamps, links, best_states = self.counts, self._stamps, self.links, self.best_states
        best_tokens, text, state, before = self.best_tokens, self.num_texts, last, -1
        while state >= 0:
            target = best_states[state] if best_tokens[state] == token else self._more[state][token]
            if target != before:
                if stamps[target] == text:
                    return
                stamps[target] = text
                counts[target] += 1
                before = target
            if best_tokens[state] != token and counts[target] >= counts[best_states[state]]:
                more = self._more[state]
                del more[token]
                more[best_tokens[state]] = best_states[state]
                best_tokens[state] = token
                best_states[state] = target
            state = links[state]

    def _new_state(self, length: int, link: int, count: int, stamp: int) -> int:
        new = len(self.lengths)
        self.lengths.append(length)
        self.links.append(link)
        self.counts.append(count)
        self._stamps.append(stamp)
        self.best_tokens.append(_NONE)
        self.best_states.append(0)
        self.num_bytes += _STATE_BYTES
        return new

    def _set(self, state: int, token: int, target: int) -> None:
        if self.best_tokens[state] == _NONE:
            self.best_tokens[state] = token
            self.best_states[state] = target
            return
        more = self._more.get(state)
        if more is None:
            more = self._more[state] = {}
            self.num_bytes += _BRANCH_BYTES
        more[token] = target
        self.num_bytes += _CONTINUATION_BYTES
