"""The same requests with drafts and without, in turn, and how much faster the former were decoded."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from kitelib import KiteEngine, ReusePolicy
from kitelib.engine.results import Generation

__all__ = ["OFF", "ON", "Group", "Job", "Pairs", "Sample", "measure"]

# Logits of a known prompt would give the first token before the prompt's KV is in place, and the time that this takes
# would count as decoding. The first token of both arms comes from a step instead.
ON = ReusePolicy(zero_prefill=False)
OFF = ReusePolicy(zero_prefill=False, drafts=False)

Job = Callable[..., Awaitable[list[Generation]]]
"""``job(policy, **options)``: one request, or the turns of one dialogue."""


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Requests put at once.

    Attributes:
        before: are put first, with drafts, and are not measured.
        warm: the prompts are computed beforehand, so that both arms find them computed.
    """

    jobs: Sequence[Job]
    before: Sequence[Job] = ()
    warm: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One group with one arm.

    Attributes:
        tokens: decoded, that is, without the first of each answer.
        seconds: from the first to the last token of an answer, over all answers.
        answered: all tokens of the answers.
        steps: that the engine computed, prompts included.
        cpu_s: CPU time of the process, from when the group is put to its last answer.
    """

    tokens: int
    seconds: float
    answered: int
    steps: int
    cpu_s: float


@dataclasses.dataclass(slots=True)
class Pairs:
    """Groups that were measured with both arms.

    Attributes:
        on, off: one sample per group.
        drafts: source -> [tokens proposed, tokens accepted].
        answers: answers compared.
        same: how many of them were the same with drafts and without.
        texts: prompts and answers, as token ids, without drafts.
    """

    on: list[Sample] = dataclasses.field(default_factory=list)
    off: list[Sample] = dataclasses.field(default_factory=list)
    drafts: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    answers: int = 0
    same: int = 0
    texts: list[tuple[list[int], list[int]]] = dataclasses.field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Tokens per second with drafts over without, all groups together."""
        return speed(self.on) / speed(self.off)

    @property
    def cpu_ratio(self) -> float:
        """The same by CPU time per token, prompts included: what other processes do on the same cores is left out."""
        on, off = (
            sum(each.cpu_s for each in some) / sum(each.answered for each in some) for some in (self.on, self.off)
        )
        return off / on

    def interval(self, draws: int = 1000) -> tuple[float, float]:
        """95 % of the ratio, by drawing groups with replacement (Efron's percentile bootstrap)."""
        draw = random.Random(0)
        ratios = []
        for _ in range(draws):
            chosen = [draw.randrange(len(self.on)) for _ in self.on]
            ratios.append(speed([self.on[each] for each in chosen]) / speed([self.off[each] for each in chosen]))
        ratios.sort()
        return ratios[int(0.025 * draws)], ratios[int(0.975 * draws)]

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        found = dataclasses.asdict(self)
        del found["texts"]
        return found


def speed(samples: Sequence[Sample]) -> float:
    """Tokens per second that one answer is decoded with."""
    seconds = sum(each.seconds for each in samples)
    return sum(each.tokens for each in samples) / seconds if seconds else float("nan")


def tokens_per_step(samples: Sequence[Sample]) -> float:
    """Tokens of answers per step of the engine."""
    return sum(each.answered for each in samples) / max(1, sum(each.steps for each in samples))


async def measure(engine: KiteEngine, groups: Sequence[Group], limit_s: float, least: int) -> Pairs:
    """Puts each group with both arms; who comes first changes from group to group.

    Ends after the last group, or after `least` of them when the next would probably go on for longer than `limit_s`.
    """
    pairs = Pairs()
    begun, longest = time.perf_counter(), 0.0
    for number, group in enumerate(groups):
        start = time.perf_counter()
        if number >= least and start - begun + longest > limit_s:
            break
        for job in group.before:
            await job(ON)
        if group.warm:
            await asyncio.gather(*(job(OFF, max_tokens=1) for job in group.jobs))
            await engine.flush()
        found: dict[bool, list[Generation]] = {}
        for drafts in (True, False) if number % 2 == 0 else (False, True):
            found[drafts], sample = await _put(engine, group.jobs, ON if drafts else OFF)
            (pairs.on if drafts else pairs.off).append(sample)
        _compare(pairs, found[True], found[False])
        longest = max(longest, time.perf_counter() - start)
    return pairs


async def _put(engine: KiteEngine, jobs: Sequence[Job], policy: ReusePolicy) -> tuple[list[Generation], Sample]:
    before, cpu = engine.stats()["steps"], time.process_time()
    found = [gen for gens in await asyncio.gather(*(job(policy) for job in jobs)) for gen in gens]
    steps, cpu = engine.stats()["steps"] - before, time.process_time() - cpu
    await engine.flush()  # what is written behind one arm must not be charged to the other
    seconds = sum(gen.timing.total_s - gen.timing.ttft_s for gen in found)
    answered = sum(gen.usage.completion_tokens for gen in found)
    tokens = sum(max(0, gen.usage.completion_tokens - 1) for gen in found)
    return found, Sample(tokens, seconds, answered, steps, cpu)


def _compare(pairs: Pairs, on: Sequence[Generation], off: Sequence[Generation]) -> None:
    for mine, plain in zip(on, off, strict=True):
        pairs.answers += 1
        pairs.same += mine.token_ids == plain.token_ids
        pairs.texts.append((plain.prompt_token_ids, plain.token_ids))
        for source, count in mine.reuse.drafts.items():
            totals = pairs.drafts.setdefault(source, [0, 0])
            totals[0] += count.proposed
            totals[1] += count.accepted
