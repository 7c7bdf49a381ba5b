"""Which branches have run out of time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from kitelib.engine.request import Branch

__all__ = ["overdue", "until_deadline"]


def until_deadline(branches: Iterable[Branch]) -> float | None:
    """Seconds until the first deadline among them; None if there is none."""
    deadlines = [each.request.deadline for each in branches if each.request.deadline is not None]
    return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None


def overdue(branches: Iterable[Branch]) -> Iterator[tuple[Branch, float]]:
    """Those whose deadline has passed, and how many seconds after the call; not those of requests that are closed."""
    now = time.monotonic()
    for branch in branches:
        deadline = branch.request.deadline
        if deadline is not None and now > deadline and not branch.request.closed:
            yield branch, now - branch.request.created
