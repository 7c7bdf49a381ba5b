"""The door to threads: results, exceptions, the limit, and what cancelling does."""

from __future__ import annotations

import asyncio
import threading

import anyio
import pytest

from kitelib.runtime.threads import ModelThread, ThreadDoor, in_own_thread


async def test_a_job_runs_in_another_thread_and_gives_its_result() -> None:
    here = threading.get_ident()
    assert await ThreadDoor().run(lambda: (threading.get_ident() != here, 5)) == (True, 5)


async def test_a_job_s_exception_is_raised_here() -> None:
    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError, match="x"):
        await ThreadDoor().run(fail)


async def test_no_more_jobs_run_at_once_than_allowed_and_others_wait() -> None:
    door, lock, gate = ThreadDoor(2), threading.Lock(), threading.Event()
    running, most = 0, 0
    entered = threading.Semaphore(0)

    def job() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        entered.release()
        assert gate.wait(30)
        with lock:
            running -= 1

    tasks = [asyncio.create_task(door.run(job)) for _ in range(6)]
    await asyncio.to_thread(lambda: (entered.acquire(), entered.acquire()))
    await asyncio.sleep(0.01)
    gate.set()
    await asyncio.gather(*tasks)
    assert most == 2


@pytest.mark.parametrize("scoped", [False, True])
async def test_a_cancelled_caller_waits_for_its_job(scoped: bool) -> None:
    door, started, gate, done = ThreadDoor(1), threading.Event(), threading.Event(), threading.Event()

    def job() -> None:
        started.set()
        assert gate.wait(30)
        done.set()

    scope = anyio.CancelScope()

    async def call() -> None:
        with scope:
            await door.run(job)
            await anyio.sleep(0)
            pytest.fail("the cancellation was lost")

    task = asyncio.create_task(call())
    await asyncio.to_thread(started.wait)
    for _ in range(3):  # once more does not change it
        scope.cancel() if scoped else task.cancel()
        await asyncio.sleep(0.001)
    assert not task.done()  # what the job works on stays alive
    gate.set()
    await asyncio.wait([task])
    assert scope.cancelled_caught if scoped else task.cancelled()
    assert done.is_set()
    assert await door.run(lambda: 7) == 7  # and its place is free again


async def test_a_result_that_a_cancelled_caller_left_is_discarded() -> None:
    door, started, gate, discarded = ThreadDoor(), threading.Event(), threading.Event(), []

    def job() -> str:
        started.set()
        assert gate.wait(30)
        return "model"

    task = asyncio.create_task(door.run(job, discard=discarded.append))
    await asyncio.to_thread(started.wait)
    task.cancel()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert discarded == ["model"]
    assert await door.run(lambda: "kept", discard=discarded.append) == "kept"
    assert discarded == ["model"]


async def test_a_caller_cancelled_in_the_queue_never_runs_its_job() -> None:
    door, started, gate, ran = ThreadDoor(1), threading.Event(), threading.Event(), []

    def block() -> None:
        started.set()
        assert gate.wait(30)

    first = asyncio.create_task(door.run(block))
    await asyncio.to_thread(started.wait)
    second = asyncio.create_task(door.run(lambda: ran.append(1)))
    await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    gate.set()
    await first
    assert ran == []


async def test_a_model_thread_has_a_name_and_is_joined() -> None:
    gate, seen = threading.Event(), []

    def main() -> None:
        seen.append(threading.current_thread().name)
        assert gate.wait(30)

    thread = ModelThread("kite-test", main)
    thread.start()
    joining = asyncio.create_task(thread.join())
    await asyncio.sleep(0.01)
    assert not joining.done()
    gate.set()
    await joining
    assert seen == ["kite-test"]
    assert "kite-test" not in {each.name for each in threading.enumerate()}
    assert thread._thread.daemon  # see test_a_program_that_forgets_to_close_ends


async def test_joining_goes_on_although_the_caller_is_cancelled() -> None:
    gate = threading.Event()
    thread = ModelThread("kite-test", lambda: gate.wait(30) and None)
    thread.start()
    joining = asyncio.create_task(thread.join())
    await asyncio.sleep(0.01)
    joining.cancel()
    await asyncio.sleep(0.01)
    assert not joining.done()
    gate.set()
    await asyncio.wait([joining])
    assert not thread._thread.is_alive()


def test_a_job_in_its_own_thread_gives_its_result_and_leaves_no_thread() -> None:
    here, seen = threading.get_ident(), []

    def job() -> int:
        seen.append(threading.current_thread())
        return 7

    assert in_own_thread("kite-test", job) == 7
    assert seen[0].name == "kite-test"
    assert seen[0].ident != here
    assert not seen[0].is_alive()


def test_what_a_job_in_its_own_thread_raises_comes_out() -> None:
    def job() -> None:
        raise ValueError("no such luck")

    with pytest.raises(ValueError, match="no such luck"):
        in_own_thread("kite-test", job)
