"""The gate counts calls, refuses too many, and holds them back while the model is replaced."""

from __future__ import annotations

import asyncio

import pytest

from kitelib.engine.gate import Gate
from kitelib.errors import DeadlineExceededError, EngineClosedError, EngineOverloadedError


async def turns(count: int = 5) -> None:
    """Lets every ready task run."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_calls_are_counted_also_when_they_fail() -> None:
    gate = Gate(5)
    async with gate.enter(), gate.enter():
        assert gate.num_inside == 2
    with pytest.raises(KeyError):
        async with gate.enter():
            raise KeyError
    assert gate.num_inside == 0


async def test_a_deadline_holds_while_the_gate_is_shut() -> None:
    gate = Gate(5)
    async with gate.shut():
        with pytest.raises(DeadlineExceededError, match="reload"):
            async with gate.enter(0.01):
                pytest.fail("the gate was shut")
        waiting = asyncio.create_task(_enter(gate, 60))
        await turns()
        assert not waiting.done()
    await waiting
    assert gate.num_inside == 0


async def _enter(gate: Gate, deadline: float) -> None:
    async with gate.enter(deadline):
        pass


async def test_one_too_many_is_refused_at_once_and_takes_no_place() -> None:
    gate = Gate(2)
    async with gate.enter():
        async with gate.enter():
            with pytest.raises(EngineOverloadedError, match="2 requests are open"):
                async with gate.enter():
                    pass
            assert gate.num_inside == 2
        async with gate.enter():
            assert gate.num_inside == 2


async def test_a_cancelled_call_leaves() -> None:
    gate = Gate(1)

    async def call() -> None:
        async with gate.enter():
            await asyncio.Event().wait()

    task = asyncio.create_task(call())
    await turns()
    assert gate.num_inside == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert gate.num_inside == 0


async def test_a_shut_gate_waits_for_those_inside_and_holds_the_others() -> None:
    gate, events, leave = Gate(5), [], asyncio.Event()

    async def call(name: str) -> None:
        async with gate.enter():
            events.append(f"{name} in")
            await leave.wait()
        events.append(f"{name} out")

    async def replace() -> None:
        async with gate.shut():
            events.append("shut")
            await turns()
            assert gate.num_inside == 0
            events.append("opened")

    first = asyncio.create_task(call("first"))
    await turns()
    replacing = asyncio.create_task(replace())
    await turns()
    second = asyncio.create_task(call("second"))
    await turns()
    assert events == ["first in"]
    leave.set()
    await asyncio.gather(first, replacing, second)
    assert events == ["first in", "first out", "shut", "opened", "second in", "second out"]


async def test_the_gate_opens_again_when_replacing_fails_or_is_cancelled() -> None:
    gate = Gate(5)
    with pytest.raises(KeyError):
        async with gate.shut():
            raise KeyError
    async with gate.enter():

        async def replace() -> None:
            async with gate.shut():
                pytest.fail("somebody is inside")

        task = asyncio.create_task(replace())
        await turns()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with gate.enter():  # not held back any more
            assert gate.num_inside == 2


async def test_replacing_happens_one_after_the_other() -> None:
    gate, inside = Gate(5), []

    async def replace(name: str) -> None:
        async with gate.shut():
            inside.append(name)
            await turns()
            assert inside[-1] == name

    await asyncio.gather(*(replace(name) for name in "abc"))
    assert sorted(inside) == ["a", "b", "c"]


async def test_a_closed_gate_lets_nobody_in_and_those_who_wait_fail() -> None:
    gate = Gate(5)

    async def call() -> None:
        async with gate.enter():
            pytest.fail("let in")

    async def shut_for_long() -> None:
        async with gate.shut():
            await asyncio.Event().wait()

    shutting = asyncio.create_task(shut_for_long())
    await turns()
    waiting = asyncio.create_task(call())
    await turns()
    gate.close()
    with pytest.raises(EngineClosedError):
        await waiting
    with pytest.raises(EngineClosedError):
        await call()
    with pytest.raises(EngineClosedError):
        async with gate.shut():
            pytest.fail("shut after the end")
    shutting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await shutting
    with pytest.raises(EngineClosedError):
        await call()
