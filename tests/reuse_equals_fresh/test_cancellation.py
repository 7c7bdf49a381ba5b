"""Two hundred cancellations at random moments leave nothing behind and spoil no later answer."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

from kitelib import KiteEngine
from tests.support.answers import answer, cold_answer, prompt_of
from tests.support.backends import BackendKit

CANCELLATIONS = 200
AT_ONCE = 20
GREEDY = {"max_tokens": 6, "logprobs": 3, "ignore_eos": True}


async def cancelled_call(engine: KiteEngine, prompt: list[int], rng: random.Random) -> str:
    """A call of `generate` that is cancelled before its first await, before its admission, or later."""
    options = {"max_tokens": 64, "ignore_eos": True, "n": rng.choice((1, 1, 3)), "temperature": 1.0}
    task = asyncio.create_task(engine.generate(prompt, **options))
    for _ in range(rng.choice((0, 1, 2, 5, 20))):
        await asyncio.sleep(0)
    await asyncio.sleep(rng.choice((0.0, 0.0, 0.002, 0.02, 0.1, 0.3)))
    return await end(task)


async def cancelled_stream(engine: KiteEngine, prompt: list[int], rng: random.Random) -> str:
    """A stream whose reader is cancelled while it waits for a chunk, or right between two."""
    wanted = rng.randrange(6)
    seen = asyncio.Event()

    async def read() -> None:
        count = 0
        async with aclosing(engine.stream(prompt, max_tokens=64, ignore_eos=True)) as chunks:
            async for _ in chunks:
                count += 1
                if count >= wanted:
                    seen.set()
        raise AssertionError("64 tokens came before the cancellation")

    task = asyncio.create_task(read())
    if wanted:
        await seen.wait()
    return await end(task)


async def left_stream(engine: KiteEngine, prompt: list[int], rng: random.Random) -> str:
    """A stream that is closed after some chunks, or before it was started."""
    wanted = rng.randrange(6)
    count = 0
    async with aclosing(engine.stream(prompt, max_tokens=64, ignore_eos=True)) as chunks:
        while count < wanted:
            await anext(chunks)
            count += 1
    return "cancelled"


async def end(task: asyncio.Task[Any]) -> str:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
        return "finished"
    return "cancelled"


async def test_cancelled_requests_leave_nothing(
    kit: BackendKit, model: Path, open_engine: Callable[..., Any], cold_engine: KiteEngine
) -> None:
    rng = random.Random(11)
    prefix = prompt_of(40, seed=80)
    prompts = [prefix + prompt_of(rng.randrange(1, 40), seed=90 + index) for index in range(6)]
    prompts += [prompt_of(rng.randrange(1, 100), seed=100 + index) for index in range(6)]
    expected = [await cold_answer(cold_engine, prompt, **GREEDY) for prompt in prompts]
    async with open_engine(model, n_ctx=256, kv_tokens=512) as engine:
        backend = engine._current.backend
        await engine.flush()  # the engine's own tasks have started
        sequences, tasks = backend.free_sequences(), asyncio.all_tasks()
        outcomes: list[str] = []

        async def one_after_the_other() -> None:
            while len(outcomes) < CANCELLATIONS:
                how = rng.choice((cancelled_call, cancelled_stream, left_stream))
                outcomes.append(await how(engine, rng.choice(prompts), rng))

        await asyncio.gather(*(one_after_the_other() for _ in range(AT_ONCE)))
        assert outcomes.count("cancelled") >= 0.9 * CANCELLATIONS

        await engine.flush()  # runs on the model's thread, after every cancellation
        stats = engine.stats()
        assert [stats[name] for name in ("queued", "running", "open_requests", "blocks_used")] == [0, 0, 0, 0]
        assert stats["recycler"]["pending_bytes"] == 0
        assert asyncio.all_tasks() == tasks
        assert not engine._current.scheduler._computing

        answers = await asyncio.gather(*(engine.generate(prompt, **GREEDY) for prompt in prompts))
        assert [answer(gen) for gen in answers] == expected

        await engine.invalidate()
        stats = engine.stats()
        assert (stats["idle_sequences"], stats["blocks_idle"], stats["pool"]["memory"]["items"]) == (0, 0, 0)
        assert backend.used_tokens() == 0
        assert not engine._current.memory.residency._holders
        assert not engine._current.memory.residency._roots
        if kit.name == "llama_cpp":
            backend._context.compact()  # dead sequences keep their slot until then
        assert backend.free_sequences() == sequences
        assert answer(await engine.generate(prompts[0], **GREEDY)) == expected[0]


async def test_a_cancelled_leader_does_not_stop_its_followers(
    model: Path, open_engine: Callable[..., Any], cold_engine: KiteEngine
) -> None:
    """Others wait for the prefix that the first request computes; it is cancelled in the middle of it."""
    prefix = prompt_of(150, seed=120)
    prompts = [[*prefix, *prompt_of(3, seed=121 + index)] for index in range(3)]
    expected = [await cold_answer(cold_engine, prompt, **GREEDY) for prompt in prompts]
    async with open_engine(model, n_ctx=256, kv_tokens=1024) as engine:
        leader = asyncio.create_task(engine.generate(prefix, **GREEDY))
        followers = [asyncio.create_task(engine.generate(prompt, **GREEDY)) for prompt in prompts]
        while engine.stats()["steps"] < 1:
            await asyncio.sleep(0.001)
        assert await end(leader) == "cancelled"
        assert [answer(await follower) for follower in followers] == expected
