"""Requests as a service gets them: a few prefixes that many share, in Zipf's proportions, and all kinds of lengths."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from kitelib import ReusePolicy
from tests.support.answers import ONE_STEP, prompt_of

__all__ = ["Ask", "asks", "shared_prompts"]

_TAILS = (0, 0, 0, 1, 15, 16, 17, 7)
_TENANT = ReusePolicy(namespace="tenant")
_POLICIES = (None, None, ONE_STEP, _TENANT)


@dataclasses.dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    Attributes:
        prompt: which of the prompts.
        reuse: its policy; None is the engine's.
        after_s: seconds between the request before and this one.
        cancel_after_s: seconds after which its caller gives up; None is never.
    """

    prompt: int
    reuse: ReusePolicy | None
    after_s: float
    cancel_after_s: float | None


def shared_prompts(
    chance: random.Random, count: int, *, most: int, vocab_size: int, block: int = 16
) -> list[list[int]]:
    """Prompts of 1 to `most` tokens. Each starts like one of a few documents, for some blocks and perhaps a bit more,
    and some then go their own way."""
    documents = [prompt_of(most, seed, vocab_size) for seed in range(max(2, count // 6))]
    prompts = [documents[0][:length] for length in (1, block - 1, block, block + 1, most)]
    while len(prompts) < count:
        length = chance.randrange(1, most // block) * block + chance.choice(_TAILS)
        prompt = chance.choice(documents)[:length]
        if chance.random() < 0.3:
            own = prompt_of(min(chance.choice((1, 15, 16, 17)), most - len(prompt)), len(prompts) + 1000, vocab_size)
            prompt = prompt + own
        if prompt not in prompts:
            prompts.append(prompt)
    return prompts


def asks(chance: random.Random, count: int, prompts: Sequence[object], mean_gap_s: float) -> list[Ask]:
    """Requests for the prompts, the k-th most popular one with frequency 1/k, at random times; one in twelve is
    cancelled soon."""
    order = chance.sample(range(len(prompts)), len(prompts))
    weights = [1 / rank for rank in range(1, len(prompts) + 1)]
    return [
        Ask(
            prompt,
            chance.choice(_POLICIES),
            chance.expovariate(1 / mean_gap_s),
            chance.uniform(0.0, 0.1) if chance.random() < 1 / 12 else None,
        )
        for prompt in chance.choices(order, weights, k=count)
    ]
