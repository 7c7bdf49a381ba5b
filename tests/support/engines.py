"""What tests of the engine share: waiting until an engine is idle, and looking at its model steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import anyio

from kitelib import KiteEngine
from kitelib.abc import StepResult, StepWork

__all__ = [
    "StepRecorder",
    "assert_nothing_left",
    "computes_slowly",
    "evict_context",
    "holder_of_template",
    "some_tokens",
    "until",
]


async def until(condition: Callable[[], bool], within_s: float = 30.0) -> None:
    """Waits for `condition`. The limit only ends a hanging test; nothing is measured.

    Raises:
        TimeoutError: it did not come true.
    """
    with anyio.fail_after(within_s):
        while not condition():
            await anyio.sleep(0.001)


async def assert_nothing_left(engine: KiteEngine) -> None:
    """Checks that no request, branch or active block stays behind; a cancelled one may take a step to go."""

    def idle() -> bool:
        stats = engine.stats()
        return not any(stats[name] for name in ("open_requests", "queued", "running", "blocks_used"))

    await until(idle)


def computes_slowly(engine: KiteEngine) -> None:
    """From now on it loads whatever a tier has, as if computing a token took 20 ms: a model of no size is quicker than
    any tier, and would never use one."""
    engine._current.planner._speed = lambda: 50.0


async def evict_context(engine: KiteEngine) -> None:
    """Makes everything idle leave the context, after the pool has it."""
    await engine.flush()
    memory = engine._current.memory
    await engine._current.on_model_thread(lambda: sum(1 for _ in iter(memory.evict_one, False)))


def holder_of_template(engine: KiteEngine) -> Any:
    """What has the chat template of the engine's model in `_template`."""
    backend: Any = engine._current.backend
    return getattr(backend, "_tokenizer", backend)


def some_tokens(count: int, first: int = 100) -> list[int]:
    """Token ids that every test model has; another `first`, other tokens from the start on."""
    return [(first + 7 * index) % 1800 + 100 for index in range(count)]


class StepRecorder:
    """Stands in for the `step` of a backend: notes every step, and can hold the model's thread before one.

    Attributes:
        steps: work items of every step so far.
        gate: steps wait while it is cleared.
        reached: set when a step waits at the gate or has passed it.
    """

    def __init__(self, step: Callable[[Sequence[StepWork]], StepResult]) -> None:
        self._step = step
        self.steps: list[list[StepWork]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.reached = threading.Event()

    def __call__(self, work: Sequence[StepWork]) -> StepResult:
        self.reached.set()
        assert self.gate.wait(60.0), "the test never opened the gate"
        self.steps.append(list(work))
        return self._step(work)

    @property
    def tokens(self) -> int:
        """Tokens of all steps."""
        return sum(len(item.token_ids) for work in self.steps for item in work)

    @classmethod
    def install(cls, engine: KiteEngine, monkeypatch: Any) -> StepRecorder:
        """Puts a recorder in front of the engine's backend until the end of the test."""
        backend = engine._current.backend
        recorder = cls(backend.step)
        monkeypatch.setattr(backend, "step", recorder)
        return recorder
