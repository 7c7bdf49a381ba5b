"""What is reused and what is not: preheating, forgetting, full hits, tenants. Costs are counted in model steps."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kitelib import KiteEngine, PoolConfig, ReusePolicy
from tests.support.engines import evict_context, some_tokens, until

OFF = ReusePolicy(mode="off")
STORY = list(range(100, 170))


# What is kept


async def test_preheat_computes_once_and_keeps(engine: KiteEngine) -> None:
    chat = [{"role": "system", "content": "You are a bank's assistant."}, {"role": "user", "content": "Hi"}]
    first = await engine.preheat([STORY, "You are a bank's assistant.", chat])
    again = await engine.preheat([STORY, "You are a bank's assistant.", chat])
    assert first["prompts"] == again["prompts"] == 3
    assert first["prompt_tokens"] == again["prompt_tokens"] == first["computed_tokens"]
    assert again["computed_tokens"] == 0
    assert engine.stats()["pool"]["memory"]["items"] > 0
    gen = await engine.chat([*chat[:1], {"role": "user", "content": "How are you?"}], max_tokens=1)
    assert gen.usage.cached_tokens > len(await engine.tokenize("You are a bank's assistant."))
    assert await engine.preheat([]) == {"prompts": 0, "prompt_tokens": 0, "computed_tokens": 0}


async def test_flush_waits_until_everything_is_in_the_pool(open_tiny: Any, record: Any) -> None:
    async with open_tiny() as engine:
        gen = await engine.generate(some_tokens(40), max_tokens=4, ignore_eos=True)
        steps = record(engine)
        steps.gate.clear()
        busy = asyncio.create_task(engine.generate(some_tokens(40, 900), max_tokens=4, ignore_eos=True))
        await until(steps.reached.is_set)  # the model's thread is held in a step
        flushing = asyncio.create_task(engine.flush())
        await asyncio.sleep(0.01)
        assert not flushing.done()
        steps.gate.set()
        await flushing
        # Two full blocks of prompt and answer, the tail, and the prompt's logits.
        keys = engine.pool.memory.keys()
        assert sum(":logits:" in key for key in keys) >= 1
        assert sum(":kv:" in key for key in keys) >= 3
        await busy
        await evict_context(engine)
        assert engine.stats()["recycler"]["pending_bytes"] == 0
        again = await engine.generate([*gen.prompt_token_ids, 5], max_tokens=1)
        assert again.reuse.tiers == {"memory": 40}


async def test_invalidate_forgets_everything_and_says_how_much(engine: KiteEngine) -> None:
    """B20: one call for the context and every tier."""
    await engine.generate(STORY, max_tokens=2)
    await engine.generate([5, *STORY], max_tokens=2)
    await engine.flush()
    items = engine.stats()["pool"]["memory"]["items"]
    assert items > 0
    assert await engine.invalidate() == {"context": 2, "memory": items}
    assert engine.stats()["pool"]["memory"]["items"] == 0
    gen = await engine.generate(STORY, max_tokens=2)
    assert (gen.usage.cached_tokens, gen.reuse.zero_prefill) == (0, False)
    await engine.invalidate()
    assert await engine.invalidate() == {"context": 0, "memory": 0}


@pytest.mark.parametrize("n", [1, 2])
async def test_what_ran_during_an_invalidation_leaves_nothing_behind(open_tiny: Any, record: Any, n: int) -> None:
    async with open_tiny(max_sequences=2) as engine:
        await engine.generate(some_tokens(40), max_tokens=2)
        steps = record(engine)
        steps.gate.clear()
        running = asyncio.create_task(engine.generate(some_tokens(40, 900), max_tokens=20, n=n, ignore_eos=True))
        others = [
            asyncio.create_task(engine.generate([*some_tokens(40), 5 + i], max_tokens=9, ignore_eos=True))
            for i in range(3)
        ]
        await until(lambda: steps.reached.is_set() and engine.stats()["open_requests"] == 4)
        invalidating = asyncio.create_task(engine.invalidate())
        await asyncio.sleep(0.01)
        steps.gate.set()
        await invalidating
        gens = await asyncio.gather(running, *others)
        assert [gen.usage.completion_tokens for gen in gens] == [20 * n, 9, 9, 9]
        await engine.flush()
        assert engine.stats()["pool"]["memory"]["items"] == 0
        assert engine.stats()["idle_sequences"] == 0
        for prompt in (some_tokens(40, 900), some_tokens(40), [*some_tokens(40), 6]):
            assert (await engine.generate(prompt, max_tokens=1, reuse=None)).usage.cached_tokens == 0
            await engine.invalidate()


async def test_reuse_off_computes_everything_and_keeps_nothing(engine: KiteEngine, record: Any) -> None:
    known = await engine.generate(STORY, max_tokens=3)
    steps = record(engine)
    cold = await engine.generate(STORY, max_tokens=3, reuse=OFF)
    assert cold.token_ids == known.token_ids
    assert (cold.usage.cached_tokens, cold.reuse.computed_tokens, cold.reuse.tiers) == (0, len(STORY), {})
    assert steps.tokens == len(STORY) + 2
    await engine.generate([7, *STORY], max_tokens=3, reuse=OFF)
    assert (await engine.generate([7, *STORY], max_tokens=3)).usage.cached_tokens == 0


async def test_the_engine_policy_holds_where_a_call_gives_none(open_tiny: Any) -> None:
    async with open_tiny(reuse=OFF) as engine:
        for _ in range(2):
            assert (await engine.generate(STORY, max_tokens=2)).usage.cached_tokens == 0
        on = ReusePolicy()
        await engine.generate(STORY, max_tokens=2, reuse=on)
        assert (await engine.generate(STORY, max_tokens=2, reuse=on)).usage.cached_tokens >= len(STORY) - 1


# Zero prefill


async def test_a_full_hit_takes_no_step_at_all_for_one_token(engine: KiteEngine) -> None:
    cold = await engine.generate(STORY, max_tokens=1, logprobs=3)
    await engine.flush()
    for evicted in (False, True):
        if evicted:
            await evict_context(engine)
        before = engine.stats()
        gen = await engine.generate(STORY, max_tokens=1, logprobs=3)
        after = engine.stats()
        assert after["steps"] == before["steps"]
        assert after["zero_prefills"] == before["zero_prefills"] + 1
        assert (gen.token_ids, gen.logprobs) == (cold.token_ids, cold.logprobs)
        assert (gen.usage.cached_tokens, gen.reuse.computed_tokens) == (len(STORY), 0)
        assert gen.reuse.zero_prefill


@pytest.mark.parametrize("evicted", [False, True])
async def test_the_first_token_of_a_full_hit_does_not_wait_for_a_step(
    engine: KiteEngine, record: Any, evicted: bool
) -> None:
    cold = await engine.generate(STORY, max_tokens=4, ignore_eos=True)
    await engine.flush()
    if evicted:
        await evict_context(engine)
    steps = record(engine)
    steps.gate.clear()  # no step ends before the first chunk is here
    before = engine.stats()["steps"]
    got = []
    async for chunk in engine.stream(STORY, max_tokens=4, ignore_eos=True):
        if not got:
            assert engine.stats()["steps"] == before
            assert steps.steps == []
            steps.gate.set()
        got += chunk.token_ids
    assert got == cold.token_ids
    if evicted:  # the KV came back from the pool; the last prompt token and the answer are left to compute
        assert steps.tokens <= 1 + 4
    else:
        assert steps.tokens == 3


async def test_zero_prefill_can_be_turned_off(engine: KiteEngine, record: Any) -> None:
    cold = await engine.generate(STORY, max_tokens=2)
    steps = record(engine)
    gen = await engine.generate(STORY, max_tokens=2, reuse=ReusePolicy(zero_prefill=False))
    assert gen.token_ids == cold.token_ids
    assert not gen.reuse.zero_prefill
    assert gen.usage.cached_tokens == len(STORY) - 1
    assert steps.tokens == 2


# Tenants


async def test_namespaces_share_nothing(engine: KiteEngine) -> None:
    def tenant(name: str | None) -> ReusePolicy:
        return ReusePolicy(namespace=name)

    for name in (None, "a", "b", ""):
        gen = await engine.generate(STORY, max_tokens=2, reuse=tenant(name))
        assert gen.usage.cached_tokens == 0
    await evict_context(engine)
    for name in (None, "a", "b", ""):
        gen = await engine.generate(STORY, max_tokens=2, reuse=tenant(name))
        assert gen.usage.cached_tokens == len(STORY)
    assert (await engine.generate(STORY, max_tokens=2, reuse=tenant("c"))).usage.cached_tokens == 0


async def test_concurrent_tenants_do_not_share_a_prefill(engine: KiteEngine, record: Any) -> None:
    steps = record(engine)
    gens = await asyncio.gather(
        *(engine.generate(STORY, max_tokens=1, reuse=ReusePolicy(namespace=name)) for name in ("a", "b"))
    )
    assert [gen.usage.cached_tokens for gen in gens] == [0, 0]
    assert steps.tokens == 2 * len(STORY)


async def test_a_namespace_secret_changes_every_key_but_no_answer(open_tiny: Any) -> None:
    keys, answers = [], []
    for secret in (None, b"one", b"two", b"one"):
        async with open_tiny(pool=PoolConfig(namespace_secret=secret)) as engine:
            policy = ReusePolicy(namespace="bank")
            answers.append((await engine.generate(STORY, max_tokens=2, reuse=policy)).token_ids)
            await engine.flush()
            keys.append(frozenset(engine.pool.memory.keys()))
    assert keys[1] == keys[3]
    assert not keys[0] & keys[1]
    assert not keys[0] & keys[2]
    assert not keys[1] & keys[2]
    assert answers[0] == answers[1] == answers[2]


async def test_a_full_hit_that_needs_no_kv_is_counted_as_cached_everywhere(engine: KiteEngine) -> None:
    await engine.generate(STORY, max_tokens=1)
    await engine.flush()
    before = engine.stats()["cached_tokens"]
    gen = await engine.generate(STORY, max_tokens=1)
    assert gen.reuse.zero_prefill
    assert gen.usage.cached_tokens == sum(gen.reuse.tiers.values()) == len(STORY)
    assert engine.stats()["cached_tokens"] - before == len(STORY)
