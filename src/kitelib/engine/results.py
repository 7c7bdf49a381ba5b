"""What a call gives back: plain data, no handles."""

from __future__ import annotations

import dataclasses
from typing import Literal

__all__ = [
    "Choice",
    "Chunk",
    "Divergence",
    "DraftCount",
    "Exactness",
    "FinishReason",
    "Generation",
    "ReuseReport",
    "Timing",
    "Usage",
]

FinishReason = Literal["stop", "length", "cancelled"]
Exactness = Literal["bitwise", "standard", "approximate"]


@dataclasses.dataclass(frozen=True, slots=True)
class Usage:
    """Token counts.

    Attributes:
        prompt_tokens: tokens of the prompt.
        cached_tokens: of those, how many were not computed for this request.
        completion_tokens: tokens generated, all choices together.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """Seconds, measured from the call: to the first token, spent waiting for admission, and in all."""

    ttft_s: float
    queue_s: float
    total_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Divergence:
    """Where a prompt left the longest cached run.

    Attributes:
        position: index of the first prompt token that differs from the cached run.
        prompt_text: text of the prompt's token there ("" if the prompt ended).
        cached_text: text of the cached run's token there ("" if the run ended).
    """

    position: int
    prompt_text: str
    cached_text: str


@dataclasses.dataclass(frozen=True, slots=True)
class DraftCount:
    """Draft tokens of one source: given to the model to verify, and accepted by it."""

    proposed: int
    accepted: int


@dataclasses.dataclass(frozen=True, slots=True)
class ReuseReport:
    """What was reused for one request.

    Attributes:
        exactness: "bitwise", "standard" or "approximate"; see docs/concepts.md.
        tiers: tier name -> prompt tokens that came from it ("context": shared in place; "memory", "bundle", "disk",
            "redis", "s3" or a third party's name: the pool; "passages": moved from elsewhere).
        skipped: tier name -> prompt tokens that it had but that were computed, because loading them takes longer.
        computed_tokens: prompt tokens that were computed.
        zero_prefill: the first token was sampled from stored logits, without a model step.
        divergence: where the prompt left the cached run; None if it never did or nothing was cached.
        note: one plain sentence.
        drafts: where guesses of the answer came from ("same prompt", "conversation", "canonical", "neighbour",
            "answers", "prompt") -> how many; sources that gave none are left out.
        completion: the answer is a stored completion, at least its beginning; no model step was needed for that.
        wording: with mode="semantic", the stored question whose units answered this one; None if its own did.
        passage_tokens: prompt tokens whose KV was taken from another place (`ReusePolicy.passages`); more than `tiers`
            counts where a passage had to be computed for this request first.
    """

    exactness: Exactness
    tiers: dict[str, int]
    computed_tokens: int
    zero_prefill: bool
    divergence: Divergence | None
    note: str
    skipped: dict[str, int] = dataclasses.field(default_factory=dict)
    drafts: dict[str, DraftCount] = dataclasses.field(default_factory=dict)
    completion: bool = False
    wording: str | None = None
    passage_tokens: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """One of the n texts of a request."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[dict[int, float]] | None


@dataclasses.dataclass(frozen=True, slots=True)
class Generation:
    """A finished request. `text`, `token_ids`, `finish_reason` and `logprobs` are those of the first choice.

    Attributes:
        logprobs: None, or per token a dict token id -> natural-log probability.
        choices: all n choices, in order.
        prompt_token_ids: the prompt as the model saw it.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[dict[int, float]] | None
    usage: Usage
    reuse: ReuseReport
    timing: Timing
    choices: list[Choice]
    prompt_token_ids: list[int]


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a streamed text.

    Attributes:
        text: new text; whole characters only; may be "" when only the state changed.
        token_ids: tokens that this piece accounts for.
        index: which of the n choices.
        finish_reason: set on the last chunk of a choice, else None.
        generation: set on the very last chunk of the stream, else None.
    """

    text: str
    token_ids: list[int]
    index: int = 0
    finish_reason: FinishReason | None = None
    generation: Generation | None = None
