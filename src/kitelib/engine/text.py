"""From token bytes to text that may be shown: whole characters only, and nothing that may turn out to be a stop string.

Stop strings are found with the automaton of Aho and Corasick 1975 ("Efficient string matching"): the work per
character does not depend on how many stop strings there are, and the depth of its state is exactly the length of the
longest end of the text that may still become a stop string, that is, what has to be held back.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence

__all__ = ["TextStream"]


class TextStream:
    """The text of one choice, built token by token.

    The text ends before the stop string that is complete first; among those complete at the same character, before
    the longest. So the result does not depend on how the text was cut into tokens. The time per token depends on its
    own length only.

    Bytes that are not UTF-8 become U+FFFD, as in ``bytes.decode(errors="replace")``. An unfinished character at the
    end of a text that was cut by length is dropped: its missing bytes were never generated, and a replacement
    character would be text that the model did not write.

    Attributes:
        stopped: whether a stop string was found.
    """

    __slots__ = ("_decoder", "_held", "_parts", "_state", "_stops", "stopped")

    def __init__(self, stop: Sequence[str] = ()) -> None:
        """`stop` holds non-empty strings."""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = _StopAutomaton(stop) if stop else None
        self._state = 0
        self._held = ""
        self._parts: list[str] = []
        self.stopped = False

    @property
    def text(self) -> str:
        """All text returned so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def push(self, token_bytes: bytes) -> str:
        """Takes the bytes of the next token; returns the new text that can be shown, possibly "".

        After a stop string was found, everything further is dropped.
        """
        if self.stopped:
            return ""
        text = self._decoder.decode(token_bytes)
        if self._stops is not None and text:
            text = self._cut(self._stops, text)
        return self._emit(text)

    def finish(self) -> str:
        """Ends the text: returns what was held back in case it became a stop string. Further calls return ""."""
        held, self._held, self._state = self._held, "", 0
        self._decoder.reset()
        return self._emit(held)

    def _cut(self, stops: _StopAutomaton, text: str) -> str:
        window = self._held + text
        state = self._state
        for position, character in enumerate(text, len(self._held) + 1):
            state = stops.step(state, character)
            found = stops.match_length[state]
            if found:
                self.stopped = True
                self._held = ""
                return window[: position - found]
        self._state = state
        safe = len(window) - stops.depth[state]
        self._held = window[safe:]
        return window[:safe]

    def _emit(self, text: str) -> str:
        if text:
            self._parts.append(text)
        return text


class _StopAutomaton:
    """Aho-Corasick automaton. State 0 is the start; a state stands for a prefix of a stop string.

    Attributes:
        depth: state -> length of its prefix, characters.
        match_length: state -> length of the longest stop string that ends there, 0 if none.
    """

    __slots__ = ("_edges", "_fallback", "depth", "match_length")

    def __init__(self, stops: Sequence[str]) -> None:
        self._edges: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.match_length = [0]
        for stop in stops:
            state = 0
            for character in stop:
                if character not in self._edges[state]:
                    self._edges[state][character] = len(self._edges)
                    self._edges.append({})
                    self.depth.append(self.depth[state] + 1)
                    self.match_length.append(0)
                state = self._edges[state][character]
            self.match_length[state] = len(stop)
        # Fallback of a state: the state of its longest proper suffix; breadth first, as it is always shallower.
        self._fallback = [0] * len(self._edges)
        queue = deque(self._edges[0].values())
        while queue:
            state = queue.popleft()
            for character, child in self._edges[state].items():
                fallback = self.step(self._fallback[state], character)
                self._fallback[child] = fallback
                self.match_length[child] = self.match_length[child] or self.match_length[fallback]
                queue.append(child)

    def step(self, state: int, character: str) -> int:
        edges = self._edges
        while True:
            child = edges[state].get(character)
            if child is not None:
                return child
            if state == 0:
                return 0
            state = self._fallback[state]
