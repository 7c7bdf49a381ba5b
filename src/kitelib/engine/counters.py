"""What the scheduler counts."""

from __future__ import annotations

import dataclasses

__all__ = ["SchedulerCounters"]


@dataclasses.dataclass(slots=True)
class SchedulerCounters:
    """Written by the model's thread, read anywhere."""

    steps: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    zero_prefills: int = 0
    reused_completions: int = 0
    step_failures: int = 0
