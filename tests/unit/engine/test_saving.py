"""What runs leave in the pool: each block once, the tail, the logits; a few blocks at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from kitelib import KiteEngine, PoolConfig, ReusePolicy
from kitelib.upcycle.unit import RecyclableUnit, inspect
from tests.support.engines import evict_context, some_tokens


def stored(engine: KiteEngine, kind: str) -> list[RecyclableUnit]:
    memory = engine.pool.memory
    values = [memory.get(key) for key in memory.keys() if f":{kind}:" in key]  # noqa: SIM118
    return [inspect(value) for value in values if value is not None]


class Exports:
    """Counts which blocks leave the backend."""

    def __init__(self, engine: KiteEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[int, int, int | None]] = []
        backend = engine._current.backend
        real = backend.export_blocks

        def export(sequence: Any, first: int, count: int, end: int | None = None) -> Any:
            self.calls.append((first, count, end))
            return real(sequence, first, count, end)

        monkeypatch.setattr(backend, "export_blocks", export)

    @property
    def blocks(self) -> int:
        return sum(count for _, count, _ in self.calls)


def lengths(units: Sequence[RecyclableUnit]) -> list[int]:
    return sorted(len(unit.token_ids) for unit in units)


@pytest.mark.parametrize(("prompt", "answer"), [(1, 1), (15, 1), (16, 1), (17, 1), (16, 17), (40, 9), (64, 1)])
async def test_full_blocks_tail_and_logits_are_kept(open_tiny: Any, prompt: int, answer: int) -> None:
    async with open_tiny() as engine:
        gen = await engine.generate(some_tokens(prompt), max_tokens=answer, ignore_eos=True)
        await engine.flush()
        computed = prompt + answer - 1  # the last token of an answer is not computed
        full, rest = divmod(computed, 16)
        kept = lengths(stored(engine, "kv"))
        assert kept.count(16) == full
        assert (rest in kept) or not rest
        # The prompt's own tail too, if the answer went on past it.
        assert (prompt % 16 in kept) or not prompt % 16
        (logits,) = stored(engine, "logits")
        assert logits.token_ids.tolist() == gen.prompt_token_ids[prompt // 16 * 16 :]
        tokens = [*gen.prompt_token_ids, *gen.token_ids]
        for unit in stored(engine, "kv"):
            ids = unit.token_ids.tolist()
            assert any(tokens[start : start + len(ids)] == ids for start in range(0, computed, 16))


async def test_every_block_leaves_the_context_once(open_tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_tiny() as engine:
        exports = Exports(engine, monkeypatch)
        prefix = some_tokens(96)
        for last in range(5):
            await engine.generate([*prefix, 5 + last], max_tokens=1)
            await engine.flush()
        # Six shared blocks, and a tail of one token for each prompt.
        assert [call for call in exports.calls if call[2] is None] == [(0, 6, None)]
        assert exports.blocks == 6 + 5
        await evict_context(engine)
        await engine.generate([*prefix, 5], max_tokens=1)
        await engine.generate([*prefix, 99], max_tokens=1)  # restored from the pool: nothing to save but the new tail
        await engine.flush()
        assert exports.blocks == 6 + 6


async def test_saving_beside_running_requests_is_cut_into_pieces(
    open_tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_tiny(n_ctx=1024) as engine:
        exports = Exports(engine, monkeypatch)
        long, busy = some_tokens(700), some_tokens(20, 900)
        gens = await asyncio.gather(
            engine.generate(long, max_tokens=1), engine.generate(busy, max_tokens=120, ignore_eos=True)
        )
        await engine.flush()
        assert max(count for _, count, _ in exports.calls) <= 32
        assert lengths(stored(engine, "kv")).count(16) == 700 // 16 + (20 + 119) // 16
        assert [gen.usage.completion_tokens for gen in gens] == [1, 120]


async def test_a_request_without_reuse_leaves_nothing(open_tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_tiny() as engine:
        exports = Exports(engine, monkeypatch)
        await engine.generate(some_tokens(40), max_tokens=4, reuse=ReusePolicy(mode="off"), n=2)
        await engine.flush()
        assert (exports.calls, engine.pool.memory.keys(), engine.stats()["idle_sequences"]) == ([], [], 0)


async def test_a_pool_that_is_off_copies_nothing(open_tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_tiny(pool=PoolConfig(memory_bytes=0)) as engine:
        exports = Exports(engine, monkeypatch)
        await engine.generate(some_tokens(40), max_tokens=4)
        await engine.flush()
        assert exports.calls == []
        assert (await engine.generate(some_tokens(40), max_tokens=4)).usage.cached_tokens == 39  # in the context it is


async def test_what_does_not_fit_the_queue_is_not_even_copied(open_tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_tiny() as engine:
        exports = Exports(engine, monkeypatch)
        engine._recycler._max_pending_bytes = 0
        gen = await engine.generate(some_tokens(40), max_tokens=4, ignore_eos=True)
        await engine.flush()
        assert exports.calls == []
        recycler = engine.stats()["recycler"]
        # Two full blocks, two tails, the logits, and the completion.
        assert recycler["dropped"] == 2 + 2 + 1 + 1
        assert (recycler["registered"], recycler["pending_bytes"]) == (0, 0)
        engine._recycler._max_pending_bytes = 10**9
        await evict_context(engine)
        again = await engine.generate(some_tokens(40), max_tokens=4, ignore_eos=True)
        assert (again.token_ids, again.usage.cached_tokens) == (gen.token_ids, 0)


async def test_a_cancelled_request_leaves_what_it_computed(open_tiny: Any, record: Any) -> None:
    async with open_tiny() as engine:
        async for chunk in engine.stream(some_tokens(40), max_tokens=100, ignore_eos=True):
            if chunk.token_ids:
                break
        await evict_context(engine)
        gen = await engine.generate([*some_tokens(40), 7], max_tokens=1)
        assert gen.reuse.tiers == {"memory": 40}


async def test_prompts_that_part_inside_a_block_start_there_the_next_time(open_tiny: Any) -> None:
    prefix = some_tokens(40)  # two blocks and eight tokens
    async with open_tiny() as engine:
        for last in (5, 6):
            await engine.generate([*prefix, last, *some_tokens(30, 50 * last)], max_tokens=1)
        await evict_context(engine)
        gen = await engine.generate([*prefix, 7, 8, 9], max_tokens=1)
        assert gen.reuse.tiers == {"memory": 40}
