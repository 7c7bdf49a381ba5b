"""The life of an engine: opening, closing, failing, deadlines, and leaving early."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from kitelib import KiteEngine, ReusePolicy
from kitelib.engine.loading import Loader
from kitelib.errors import BackendError, DeadlineExceededError, EngineClosedError, KiteError, ModelFormatError
from tests.support.backends import BackendKit
from tests.support.engines import assert_nothing_left, some_tokens, until

OFF = ReusePolicy(mode="off")
# Long enough for several blocks and a tail.
STORY = list(range(100, 170))


# Opening and closing


async def test_an_engine_opens_with_await_and_with_async_with(open_tiny: Any) -> None:
    engine = await open_tiny()
    assert (await engine.generate(STORY, max_tokens=2)).usage.completion_tokens == 2
    await engine.aclose()
    async with open_tiny() as engine:
        assert (await engine.generate(STORY, max_tokens=2)).usage.completion_tokens == 2
    async with await open_tiny() as engine:
        pass
    with pytest.raises(EngineClosedError):
        engine.stats()


async def test_progress_is_told_while_loading(open_tiny: Any) -> None:
    told: list[tuple[str, float]] = []
    async with open_tiny(progress=lambda what, share: told.append((what, share))):
        pass
    assert any("weights" in what for what, _ in told)
    assert all(0.0 <= share <= 1.0 for _, share in told)


@pytest.mark.parametrize(
    "call",
    [
        lambda engine: engine.generate(STORY),
        lambda engine: anext(engine.stream(STORY)),
        lambda engine: engine.chat([{"role": "user", "content": "Hi"}]),
        lambda engine: anext(aiter(engine.chat([{"role": "user", "content": "Hi"}], stream=True))),
        lambda engine: engine.preheat([STORY]),
        lambda engine: engine.flush(),
        lambda engine: engine.invalidate(),
        lambda engine: engine.reload(),
        lambda engine: engine.tokenize("Hi"),
        lambda engine: engine.conversation("Be brief.").send("Hi"),
    ],
)
async def test_a_closed_engine_says_so(open_tiny: Any, call: Callable[[KiteEngine], Any]) -> None:
    engine = await open_tiny()
    await engine.aclose()
    with pytest.raises(EngineClosedError):
        await call(engine)


async def test_closing_ends_what_is_open(open_tiny: Any, record: Any) -> None:
    engine = await open_tiny(max_sequences=1)
    steps = record(engine)
    steps.gate.clear()

    async def stream() -> None:
        async for _ in engine.stream(some_tokens(20, 300), max_tokens=50):
            pass

    calls = [
        asyncio.create_task(engine.generate(some_tokens(20), max_tokens=50)),  # running
        asyncio.create_task(engine.generate(some_tokens(20, 500), max_tokens=50)),  # waiting
        asyncio.create_task(stream()),
        asyncio.create_task(engine.flush()),
    ]
    await until(steps.reached.is_set)
    await until(lambda: engine.stats()["open_requests"] == 3)
    closing = [asyncio.create_task(engine.aclose()) for _ in range(2)]
    late = asyncio.create_task(engine.generate(some_tokens(5)))
    await asyncio.sleep(0)
    steps.gate.set()
    results = await asyncio.gather(*calls, late, return_exceptions=True)
    await asyncio.gather(*closing)
    assert [type(each) for each in [*results[:3], results[4]]] == [EngineClosedError] * 4
    assert results[3] is None or isinstance(results[3], EngineClosedError)  # it may have been through already
    assert not any(thread.name == "kite-model" for thread in threading.enumerate())
    await engine.aclose()


async def test_the_model_is_freed_off_the_event_loop(open_tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Freeing gigabytes takes a while, and a server that reloads a model goes on meanwhile."""
    threads: list[threading.Thread] = []

    def watch(engine: KiteEngine) -> None:
        backend = engine._current.backend
        close = backend.close
        monkeypatch.setattr(backend, "close", lambda: (threads.append(threading.current_thread()), close()))

    async with open_tiny() as engine:
        watch(engine)
        await engine.reload()
        watch(engine)
    assert len(threads) == 2
    assert threading.main_thread() not in threads


async def test_a_cancelled_closing_still_closes(open_tiny: Any, record: Any) -> None:
    engine = await open_tiny()
    steps = record(engine)
    steps.gate.clear()
    call = asyncio.create_task(engine.generate(some_tokens(20), max_tokens=50))
    await until(steps.reached.is_set)
    closing = asyncio.create_task(engine.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    steps.gate.set()
    with pytest.raises(EngineClosedError):
        await call
    await engine.aclose()
    assert not any(thread.name == "kite-model" for thread in threading.enumerate())


@pytest.fixture
def slow_load(monkeypatch: pytest.MonkeyPatch, kit: BackendKit) -> Any:
    """Holds loading between the model being there and the caller having it; notes which backends were closed."""

    state = SimpleNamespace(loaded=threading.Event(), gate=threading.Event(), backends=[], closed=[])
    real_load, real_close = Loader.load, kit.backend_type.close

    def load(loader: Loader, *args: Any) -> Any:
        state.backends.append(real_load(loader, *args))
        state.loaded.set()
        assert state.gate.wait(30)
        return state.backends[-1]

    def close(backend: Any) -> None:
        state.closed.append(backend)
        real_close(backend)

    monkeypatch.setattr(Loader, "load", load)
    monkeypatch.setattr(kit.backend_type, "close", close)
    return state


async def test_a_cancelled_opening_frees_the_model(open_tiny: Any, slow_load: Any) -> None:
    tasks = asyncio.all_tasks()

    async def opening() -> None:
        async with open_tiny():
            pytest.fail("opened")

    task = asyncio.create_task(opening())
    await until(slow_load.loaded.is_set)
    task.cancel()
    slow_load.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert slow_load.closed == slow_load.backends
    assert asyncio.all_tasks() == tasks


@pytest.mark.parametrize("ending", ["cancel", "close"])
async def test_a_reload_that_is_interrupted_frees_the_new_model(open_tiny: Any, slow_load: Any, ending: str) -> None:
    slow_load.gate.set()
    engine = await open_tiny()
    slow_load.gate.clear()
    slow_load.loaded.clear()
    reloading = asyncio.create_task(engine.reload())
    await until(slow_load.loaded.is_set)
    if ending == "cancel":
        reloading.cancel()
        slow_load.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await reloading
        assert slow_load.closed == slow_load.backends[1:]
        assert (await engine.generate(STORY, max_tokens=2)).usage.completion_tokens == 2  # on the old model
        await engine.aclose()
    else:
        await engine.aclose()
        slow_load.gate.set()
        with pytest.raises(EngineClosedError):
            await reloading
    assert set(slow_load.closed) == set(slow_load.backends)
    assert not any(thread.name == "kite-model" for thread in threading.enumerate())


async def test_no_task_and_no_thread_outlives_an_engine(open_tiny: Any) -> None:
    tasks = asyncio.all_tasks()
    async with open_tiny() as engine:
        await asyncio.gather(*(engine.generate(some_tokens(20 + i), max_tokens=3, n=2) for i in range(4)))
    assert asyncio.all_tasks() == tasks
    assert not any(thread.name == "kite-model" for thread in threading.enumerate())


PROGRAM = """
import asyncio, sys
from kitelib import KiteEngine

async def main():
    engine = await KiteEngine.open(sys.argv[1], n_ctx=512, threads=1, cache_dir=sys.argv[2])
    await engine.generate([5, 6, 7], max_tokens=2)
    if sys.argv[3] == "busy":
        asyncio.create_task(engine.generate([5, 6, 7], max_tokens=500, ignore_eos=True))
        await asyncio.sleep(0.01)
    print("over")

asyncio.run(main())
"""


@pytest.mark.parametrize("state", ["idle", "busy"])
async def test_a_program_that_forgets_to_close_ends(kit: BackendKit, cache_dir: Path, state: str) -> None:
    command = [sys.executable, "-c", PROGRAM, str(kit.small()), str(cache_dir), state]
    with anyio.fail_after(120):  # it would never end
        done = await anyio.run_process(command, check=False)
    assert (done.returncode, done.stdout.decode()) == (0, "over\n"), done.stderr.decode()


async def test_if_the_model_thread_fails_everyone_hears_of_it(
    open_tiny: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_tiny() as engine:

        def broken(work: Any) -> Any:
            raise RuntimeError("the library broke")

        monkeypatch.setattr(engine._current.backend, "step", broken)
        calls = [asyncio.create_task(engine.generate(some_tokens(20, 100 * i), max_tokens=5)) for i in range(1, 4)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(each, BackendError) and "the library broke" in str(each) for each in results)
        with pytest.raises(BackendError, match="the library broke"):  # and later ones do not wait for ever
            await engine.generate(some_tokens(5))
        with pytest.raises(KiteError):
            await engine.flush()
        with pytest.raises(KiteError):
            await engine.invalidate()
    assert "the model's thread failed" in caplog.text


async def test_a_reload_that_fails_leaves_the_old_model(open_tiny: Any, tmp_path: Path, kit: BackendKit) -> None:
    async with open_tiny() as engine:
        before = await engine.generate(STORY, max_tokens=4, ignore_eos=True)
        with pytest.raises(ModelFormatError):
            await engine.reload(kit.damaged(kit.small(), tmp_path / "bad"))
        after = await engine.generate(STORY, max_tokens=4, ignore_eos=True)
        assert after.token_ids == before.token_ids
        assert after.reuse.zero_prefill  # nothing was forgotten either


# Deadlines


async def test_a_deadline_ends_a_running_request(open_tiny: Any, record: Any) -> None:
    async with open_tiny() as engine:
        steps = record(engine)
        steps.gate.clear()
        call = asyncio.create_task(engine.generate(some_tokens(20), max_tokens=200, deadline=0.05, ignore_eos=True))
        await until(steps.reached.is_set)
        await asyncio.sleep(0.06)  # passes while the first step is held
        steps.gate.set()
        with pytest.raises(DeadlineExceededError):
            await call
        assert len(steps.steps) <= 2
        await assert_nothing_left(engine)
        with pytest.raises(TimeoutError):
            await engine.generate(some_tokens(20), max_tokens=200, deadline=1e-9)
        assert (await engine.generate(some_tokens(20), max_tokens=2, deadline=3600.0)).finish_reason == "length"


async def test_a_deadline_ends_a_waiting_request(open_tiny: Any, record: Any) -> None:
    async with open_tiny(max_sequences=1) as engine:
        steps = record(engine)
        running = asyncio.create_task(engine.generate(some_tokens(20), max_tokens=100, ignore_eos=True))
        await until(steps.reached.is_set)
        steps.gate.clear()
        waiting = asyncio.create_task(engine.generate(some_tokens(20, 900), max_tokens=5, deadline=0.05))
        await asyncio.sleep(0.06)
        steps.gate.set()
        with pytest.raises(DeadlineExceededError):
            await waiting
        assert (await running).usage.completion_tokens == 100
        computed = {tuple(item.token_ids) for work in steps.steps for item in work}
        assert tuple(some_tokens(20, 900)) not in computed
        await assert_nothing_left(engine)


# Leaving


async def test_leaving_a_stream_ends_the_request(engine: KiteEngine) -> None:
    async with aclosing(engine.stream(STORY, max_tokens=300, ignore_eos=True)) as chunks:
        async for _ in chunks:
            break
    assert engine.stats()["open_requests"] == 0
    await until(lambda: engine.stats()["running"] == 0)
    assert (await engine.generate(STORY, max_tokens=2)).usage.cached_tokens >= len(STORY) - 1
