"""How fast the engine computes prompts, as the scheduler sees it."""

from __future__ import annotations

import collections
import time
from typing import Final

__all__ = ["PrefillSpeed"]

_GUESS: Final = 1000.0  # tokens per second, until the first step was measured
_LEAST_TOKENS: Final = 64  # shorter steps say more about overheads than about prompts
_WEIGHT: Final = 0.25


class PrefillSpeed:
    """Tokens per second in steps that compute prompts.

    Attributes:
        tokens_per_s: the measured mean, recent steps counting more; a guess before the first.
    """

    def __init__(self) -> None:
        self.tokens_per_s = _GUESS
        self._measured = False
        self._running: collections.deque[tuple[float, int]] = collections.deque(maxlen=64)
        self._last_end = 0.0

    def begin(self, num_tokens: int) -> None:
        """A step of so many tokens was scheduled."""
        self._running.append((time.monotonic(), num_tokens))

    def end(self) -> None:
        """The oldest step that was scheduled has ended."""
        if not self._running:
            return
        begun, num_tokens = self._running.popleft()
        now = time.monotonic()
        # Where steps are scheduled ahead, one begins when the one before it ends.
        seconds, self._last_end = now - max(begun, self._last_end), now
        if num_tokens < _LEAST_TOKENS or seconds <= 0:
            return
        rate = num_tokens / seconds
        if self._measured:
            self.tokens_per_s += (rate - self.tokens_per_s) * _WEIGHT
        else:
            self.tokens_per_s, self._measured = rate, True
