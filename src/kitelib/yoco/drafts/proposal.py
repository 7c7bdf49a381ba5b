"""What a drafter says will come next."""

from __future__ import annotations

import dataclasses

__all__ = ["Proposal"]


@dataclasses.dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens that may follow, for the model to verify.

    Attributes:
        token_ids: the tokens, at least one.
        chances: `chances[i]` is the estimated probability that the first i + 1 tokens are all accepted; never rising.
        source: where they come from: "same prompt", "conversation", "canonical", "neighbour", "answers" or "prompt".
    """

    token_ids: tuple[int, ...]
    chances: tuple[float, ...]
    source: str
