"""From a thread to the loop: in order, in batches, nothing lost."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kitelib.runtime.streams import LoopPort, Mailbox


async def test_items_come_in_order() -> None:
    box: Mailbox[int] = Mailbox()
    for item in range(5):
        box.put(item)
    assert [await box.get() for _ in range(5)] == list(range(5))


async def test_a_reader_waits_for_an_item() -> None:
    box: Mailbox[str] = Mailbox()
    reading = asyncio.create_task(box.get())
    await asyncio.sleep(0)
    assert not reading.done()
    box.put("x")
    assert await reading == "x"
    again = asyncio.create_task(box.get())
    await asyncio.sleep(0)
    assert not again.done()  # an old wake-up is not taken for a new item
    again.cancel()
    with pytest.raises(asyncio.CancelledError):
        await again


async def test_cancelling_a_reader_loses_nothing() -> None:
    box: Mailbox[int] = Mailbox()
    reading = asyncio.create_task(box.get())
    await asyncio.sleep(0)
    box.put(1)  # wakes the reader, which is cancelled before it runs
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    box.put(2)
    assert [await box.get(), await box.get()] == [1, 2]


async def test_calls_are_made_on_the_loop_in_order_and_only_after_flush() -> None:
    port = LoopPort(asyncio.get_running_loop())
    made: list[tuple[int, int]] = []
    flushed, added, done = threading.Event(), threading.Event(), asyncio.Event()

    def work() -> None:
        for index in range(100):
            port.add(lambda index=index: made.append((index, threading.get_ident())))  # type: ignore[misc]
        added.set()
        assert flushed.wait(30)
        port.flush()
        port.add(done.set)
        port.flush()

    thread = threading.Thread(target=work)
    thread.start()
    await asyncio.to_thread(added.wait)
    await asyncio.sleep(0)
    assert made == []
    flushed.set()
    await done.wait()
    thread.join()
    assert made == [(index, threading.get_ident()) for index in range(100)]


async def test_a_flush_wakes_the_loop_once_for_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    port, wakeups = LoopPort(loop), []
    real = loop.call_soon_threadsafe

    def count(*args: object) -> object:
        wakeups.append(args)
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "call_soon_threadsafe", count)
    port.flush()
    assert wakeups == []
    for _ in range(10):
        port.add(lambda: None)
    port.flush()
    port.flush()
    assert len(wakeups) == 1


def test_a_closed_loop_drops_the_calls() -> None:
    loop = asyncio.new_event_loop()
    port, made = LoopPort(loop), []
    loop.close()
    port.add(lambda: made.append(1))
    port.flush()
    assert made == []
