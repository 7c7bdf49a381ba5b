"""What the demo measured, as a table and a few sentences."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kitelib.cli.table import format_factor, format_seconds, format_table, shorten
from kitelib.engine.results import Generation

__all__ = ["Row", "comparison", "from_earlier", "totals"]

_IN_PROCESS = ("context", "memory")
"""Tiers that die with the process; what comes from any other outlived its process or was computed by another."""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One request of the demo.

    Attributes:
        number: counted from 1.
        question: the customer's words.
        generation: the answer with reuse.
        fresh: the answer of the same request without reuse; None if that was not measured.
    """

    number: int
    question: str
    generation: Generation
    fresh: Generation | None


def from_earlier(generation: Generation) -> str:
    """What came from tiers outside this process, as ``480 from disk``; "" if nothing did."""
    outside = {name: count for name, count in generation.reuse.tiers.items() if name not in _IN_PROCESS and count}
    return ", ".join(f"{count:,} from {name}" for name, count in outside.items())


def _sources(generation: Generation) -> str:
    """The two tiers that most of the cached tokens came from; ``-`` if there are none."""
    counts = generation.reuse.tiers
    return "+".join(sorted((name for name in counts if counts[name]), key=lambda name: -counts[name])[:2]) or "-"


def comparison(rows: Sequence[Row]) -> str:
    """The table: what each request reused, and its TTFT with and without."""
    header = ("#", "request", "prompt", "cached", "from", "TTFT", "no reuse", "factor")
    cells = []
    for row in rows:
        ttft_s = row.generation.timing.ttft_s
        fresh_s = None if row.fresh is None else row.fresh.timing.ttft_s
        cells.append(
            (
                str(row.number),
                shorten(row.question, 28),
                str(row.generation.usage.prompt_tokens),
                str(row.generation.usage.cached_tokens),
                _sources(row.generation),
                format_seconds(ttft_s),
                "-" if fresh_s is None else format_seconds(fresh_s),
                "-" if fresh_s is None else format_factor(fresh_s, ttft_s),
            )
        )
    legend = (
        "prompt, cached: tokens. from: where those were kept; context is the model's own memory.\n"
        "TTFT: time to first token. no reuse: TTFT without reuse."
    )
    return f"{format_table(header, cells, left=(1, 4))}\n\n{legend}"


def totals(rows: Sequence[Row]) -> str:
    """What all requests together saved, and whether reuse changed any answer."""
    prompt_tokens = sum(row.generation.usage.prompt_tokens for row in rows)
    cached_tokens = sum(row.generation.usage.cached_tokens for row in rows)
    zero_prefill = sum(row.generation.reuse.zero_prefill for row in rows)
    exactness = sorted({row.generation.reuse.exactness for row in rows})
    share = cached_tokens / prompt_tokens if prompt_tokens else 0.0
    lines = [
        f"Total: {len(rows)} requests, {prompt_tokens:,} prompt tokens, {cached_tokens:,} ({share:.0%}) not computed again.",
        f"Requests whose first token needed no model step at all: {zero_prefill}.",
    ]
    tiers: dict[str, int] = {}
    for row in rows:
        for name, count in row.generation.reuse.tiers.items():
            tiers[name] = tiers.get(name, 0) + count
    if any(tiers.values()):
        counts = ", ".join(f"{name} {count:,}" for name, count in sorted(tiers.items()) if count)
        lines.insert(1, f"They came from: {counts}.")
    measured = [(row, row.fresh) for row in rows if row.fresh is not None]
    if measured:
        with_s = sum(row.generation.timing.ttft_s for row, _ in measured)
        without_s = sum(fresh.timing.ttft_s for _, fresh in measured)
        equal = sum(row.generation.token_ids == fresh.token_ids for row, fresh in measured)
        lines.append(
            f"TTFT added up over the {len(measured)} requests measured both ways: {format_seconds(with_s)} "
            f"instead of {format_seconds(without_s)} ({format_factor(without_s, with_s)})."
        )
        lines.append(
            f"Token for token the same answer with and without reuse: {equal} of {len(measured)} "
            f"(exactness: {', '.join(exactness)})."
        )
        lines.append("Without reuse, requests were measured one at a time, also those asked together before.")
    return "\n".join(lines)
