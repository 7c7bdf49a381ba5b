"""Remembers what load-time self-tests found, so that the next load is quick."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

__all__ = ["SelfTestCache"]

Plan = TypeVar("Plan")


class SelfTestCache(Generic[Plan]):
    """Results by key, one small JSON file each; anything unreadable counts as unknown.

    Args:
        cache_dir: where; None means the user's cache folder.
        make: makes a plan, a dataclass, from its fields.
    """

    def __init__(self, cache_dir: Path | None, make: Callable[..., Plan]) -> None:
        base = cache_dir or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kite"
        self._folder = base / "selftest"
        self._make = make

    def get(self, key: str) -> tuple[bool, Plan | None]:
        """Whether there is a result, and the plan that holds, if any does."""
        try:
            stored = json.loads((self._folder / f"{key}.json").read_text())
            return True, self._make(**stored["plan"]) if stored["plan"] is not None else None
        except (OSError, ValueError, KeyError, TypeError):
            return False, None

    def put(self, key: str, plan: Any | None) -> None:
        """Remembers a result, if the folder can be written."""
        text = json.dumps({"plan": dataclasses.asdict(plan) if plan else None})
        try:
            self._folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._folder.mkdir(exist_ok=True, mode=0o700)
            with tempfile.NamedTemporaryFile("w", dir=self._folder, delete=False) as file:
                file.write(text)
            os.replace(file.name, self._folder / f"{key}.json")
        except OSError:
            pass  # a read-only cache only costs the self-test's second
