"""Forty blocks of memory in all: everything ends, with the answers of an engine that has plenty."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kitelib import KiteEngine
from kitelib.abc import StepWork
from kitelib.engine.results import Generation
from tests.support.answers import REUSE_OFF, answer, prompt_of
from tests.support.engines import assert_nothing_left

BLOCK, BLOCKS = 16, 40
REQUESTS = 60
VOCAB = 512
SIZES: dict[str, Any] = {"n_ctx": 256, "max_sequences": 12}


def workload(seed: int) -> list[dict[str, Any]]:
    """Prompts that share prefixes, ending inside blocks and at their edges; one to three choices."""
    chance = random.Random(seed)
    stems = [prompt_of(160, index, VOCAB) for index in range(5)]
    calls = []
    for number in range(REQUESTS):
        length = chance.choice((1, 15, 16, 17, 48, 64, 90, 128, 150))
        own = prompt_of(chance.randrange(1, 30), 100 + number, VOCAB)
        calls.append(
            {
                "prompt": [*chance.choice(stems)[:length], *own],
                "n": chance.choice((1, 1, 1, 2, 3)),
                "max_tokens": chance.choice((1, 5, 20, 60)),
                "temperature": chance.choice((0.0, 1.0)),
                "seed": number,
                "logprobs": 2,
                "ignore_eos": True,
            }
        )
    return calls


async def run(engine: KiteEngine, calls: list[dict[str, Any]], chance: random.Random) -> dict[int, Generation]:
    """All calls, twelve at a time or more; one in eight is given up by its caller."""
    found: dict[int, Generation] = {}
    queue = asyncio.Semaphore(18)

    async def one(number: int) -> None:
        async with queue:
            task = asyncio.create_task(engine.generate(**calls[number], priority=number % 3))
            if number % 8 == 3:
                await asyncio.sleep(chance.uniform(0.0, 0.1))
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                found[number] = await task

    await asyncio.gather(*(one(number) for number in range(len(calls))))
    return found


@pytest.mark.parametrize("seed", [0, 1])
async def test_every_request_ends_with_its_own_answer(
    hf_model: Callable[..., Path], open_engine: Callable[..., Any], seed: int
) -> None:
    calls, chance = workload(seed), random.Random(seed)
    async with open_engine(hf_model("llama"), kv_tokens=16384, reuse=REUSE_OFF, **SIZES) as engine:
        assert engine.stats()["numerics"] == "bitwise"
        expected = [answer(gen) for gen in await asyncio.gather(*(engine.generate(**call) for call in calls))]
        assert engine.stats()["preemptions"] == 0
    async with open_engine(hf_model("llama"), kv_tokens=BLOCKS * BLOCK, **SIZES) as engine:
        assert (engine.stats()["blocks_total"], engine.stats()["block_tokens"]) == (BLOCKS, BLOCK)
        found = await run(engine, calls, chance)
        assert len(found) >= REQUESTS - REQUESTS // 8 - 1
        for number, gen in found.items():
            assert answer(gen) == expected[number], f"request {number}: {gen.reuse.note}"
        stats = engine.stats()
        assert stats["preemptions"] > 0
        assert stats["step_failures"] == 0
        await assert_nothing_left(engine)
        await engine.flush()
        await engine._current.on_model_thread(lambda: check_blocks(engine))


def check_blocks(engine: KiteEngine) -> None:
    """Every block is free or idle, and one sequence can have whatever number is free. On the model's thread."""
    serving = engine._current
    backend, tables = serving.backend, serving.backend.runner.tables
    assert not serving.memory._active
    idle = {
        int(block)
        for run in serving.memory._idle
        for block in tables[run.sequence].blocks[: tables[run.sequence].num_blocks]
    }
    assert idle  # not trivially so
    assert tables.free_blocks + len(idle) == BLOCKS
    while True:
        room = backend.room()
        assert room == tables.free_blocks * BLOCK
        fill(backend, room)
        if not serving.memory.evict_one():
            break
    assert backend.room() == BLOCKS * BLOCK


def fill(backend: Any, num_tokens: int) -> None:
    """One sequence takes exactly so many tokens, in whichever blocks are free, and gives them back."""
    sequence = backend.create()
    most = backend.info.max_step_tokens
    for start in range(0, num_tokens, most):
        tokens = [7] * min(most, num_tokens - start)
        backend.step([StepWork(sequence, tokens, start, False)])
    assert backend.room(sequence) == 0
    backend.release(sequence)
