"""Answers that are known already, given out piece by piece, so that nobody else's step waits for a long one."""

from __future__ import annotations

from collections.abc import Iterator

from kitelib.engine.request import Branch
from kitelib.yoco.completions import Completion

__all__ = ["Replays"]

_PIECE = 64  # tokens; about a millisecond when they are streamed


class Replays:
    """The branches that are being told what is known. Model's thread only."""

    def __init__(self) -> None:
        self._open: dict[Branch, int] = {}

    def __len__(self) -> int:
        return len(self._open)

    @property
    def branches(self) -> list[Branch]:
        """Those that have not been told everything yet."""
        return list(self._open)

    def add(self, branch: Branch) -> None:
        """The branch is to be told its request's answer."""
        self._open[branch] = 0

    def discard(self, branch: Branch) -> None:
        """The branch needs nothing more."""
        self._open.pop(branch, None)

    def pieces(self) -> Iterator[tuple[Branch, tuple[int, ...], Completion | None]]:
        """For each branch its next tokens, and with the last of them the whole answer."""
        for branch, start in list(self._open.items()):
            answer = branch.request.answer
            assert answer is not None
            stop = start + _PIECE
            over = stop >= len(answer.token_ids)
            if over:
                del self._open[branch]
            else:
                self._open[branch] = stop
            yield branch, answer.token_ids[start:stop], answer if over else None
