"""Background tasks fail alone, come back, and end with their engine."""

from __future__ import annotations

import asyncio
import logging

import pytest

from kitelib.runtime import supervisor as module
from kitelib.runtime.supervisor import Supervisor


@pytest.fixture(autouse=True)
def no_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RESTART_DELAYS_S", (0.0, 0.001, 0.002))


async def test_a_job_runs_once() -> None:
    supervisor, done, runs = Supervisor(), asyncio.Event(), []
    supervisor.start()

    async def job() -> None:
        runs.append(1)
        done.set()

    supervisor.spawn("job", job)
    await done.wait()
    await asyncio.sleep(0.01)
    await supervisor.aclose()
    assert runs == [1]


async def test_a_failing_job_is_logged_and_takes_no_other_with_it(caplog: pytest.LogCaptureFixture) -> None:
    supervisor, others = Supervisor(), []
    supervisor.start()
    gate = asyncio.Event()

    async def fail() -> None:
        raise KeyError("broken")

    async def other() -> None:
        await gate.wait()
        others.append(1)

    supervisor.spawn("other", other)
    with caplog.at_level(logging.ERROR, "kitelib.runtime"):
        supervisor.spawn("bad", fail)
        await asyncio.sleep(0.01)
    assert "'bad' failed" in caplog.text
    gate.set()
    await asyncio.sleep(0.01)
    assert others == [1]
    await supervisor.aclose()


async def test_a_kept_job_comes_back_after_it_failed_and_after_it_ended() -> None:
    supervisor, runs, enough = Supervisor(), [], asyncio.Event()
    supervisor.start()

    async def job() -> None:
        runs.append(1)
        if len(runs) >= 6:
            enough.set()
            await asyncio.Event().wait()
        if len(runs) % 2:
            raise ValueError("again")

    supervisor.keep("job", job)
    await asyncio.wait_for(enough.wait(), 30)
    await supervisor.aclose()
    assert len(runs) == 6


async def test_closing_cancels_and_waits_and_starts_nothing_more() -> None:
    supervisor, events, started = Supervisor(), [], asyncio.Event()
    supervisor.start()

    async def job() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            events.append("cleaned up")

    tasks = asyncio.all_tasks()
    supervisor.keep("job", job)
    await started.wait()
    await supervisor.aclose()
    assert events == ["cleaned up"]
    assert len(asyncio.all_tasks()) < len(tasks) + 1
    supervisor.spawn("late", job)
    await asyncio.sleep(0.01)
    assert events == ["cleaned up"]
    await supervisor.aclose()


async def test_closing_without_having_started_is_fine() -> None:
    supervisor = Supervisor()
    await supervisor.aclose()
    supervisor.spawn("late", asyncio.Event().wait)  # type: ignore[arg-type]


async def test_a_cancelled_closing_still_ends_the_jobs() -> None:
    supervisor, ended = Supervisor(), asyncio.Event()
    supervisor.start()
    gate = asyncio.Event()

    async def slow_to_end() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.shield(gate.wait())
            ended.set()

    supervisor.spawn("slow", slow_to_end)
    await asyncio.sleep(0)
    closing = asyncio.create_task(supervisor.aclose())
    await asyncio.sleep(0.01)
    closing.cancel()
    gate.set()
    await asyncio.wait([closing])
    for _ in range(5):
        await asyncio.sleep(0)
    await supervisor.aclose()
    assert supervisor._main is not None
    assert supervisor._main.done()
