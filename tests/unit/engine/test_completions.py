"""Stored completions: an identical prompt with identical deterministic sampling is answered without a step."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kitelib import KiteEngine, PoolConfig, ReusePolicy, SamplingParams
from kitelib.fingerprint import BlockChain
from kitelib.upcycle.unit import RecyclableUnit
from kitelib.yoco.completions import sampling_key
from tests.support.answers import answer
from tests.support.backends import BackendKit
from tests.support.engines import assert_nothing_left, some_tokens

STORED = ReusePolicy(completions=True)
COLD = ReusePolicy(mode="off")


@pytest.fixture
async def engine(kit: BackendKit, cache_dir: Path) -> AsyncIterator[KiteEngine]:
    async with KiteEngine.open(kit.small(), n_ctx=512, threads=1, cache_dir=cache_dir) as opened:
        yield opened


async def store(engine: KiteEngine, prompt: list[int], **options: Any) -> Any:
    gen = await engine.generate(prompt, reuse=STORED, **options)
    assert not gen.reuse.completion
    await engine.flush()
    return gen


async def again(engine: KiteEngine, prompt: list[int], **options: Any) -> tuple[Any, int]:
    before = engine.stats()["steps"]
    gen = await engine.generate(prompt, reuse=STORED, **options)
    return gen, engine.stats()["steps"] - before


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.9, "seed": 4},
        {"temperature": 0.9, "seed": 4, "repetition_penalty": 1.2, "top_p": 0.8},
        {"n": 2},
    ],
    ids=str,
)
async def test_the_second_time_takes_no_step(engine: KiteEngine, options: dict[str, Any]) -> None:
    prompt = some_tokens(40)
    first = await store(engine, prompt, max_tokens=12, **options)
    gen, steps = await again(engine, prompt, max_tokens=12, **options)
    assert steps == 0
    assert answer(gen) == answer(first) == answer(await engine.generate(prompt, max_tokens=12, reuse=COLD, **options))
    assert gen.reuse.completion
    assert "stored" in gen.reuse.note
    assert (gen.usage.cached_tokens, gen.usage.completion_tokens) == (40, first.usage.completion_tokens)
    assert engine.stats()["reused_completions"] == 1


async def test_it_is_off_unless_asked_for(engine: KiteEngine) -> None:
    prompt = some_tokens(30)
    await store(engine, prompt, max_tokens=8)
    before = engine.stats()["steps"]
    gen = await engine.generate(prompt, max_tokens=8)
    assert engine.stats()["steps"] > before
    assert not gen.reuse.completion


async def test_streams_give_the_same_pieces(engine: KiteEngine) -> None:
    prompt = some_tokens(30)
    first = await store(engine, prompt, max_tokens=8)
    before = engine.stats()["steps"]
    chunks = [chunk async for chunk in engine.stream(prompt, max_tokens=8, reuse=STORED)]
    assert engine.stats()["steps"] == before
    assert [token for chunk in chunks for token in chunk.token_ids] == first.token_ids
    assert "".join(chunk.text for chunk in chunks) == first.text
    assert chunks[-1].generation is not None
    assert chunks[-1].finish_reason == first.finish_reason


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 2}, {"frequency_penalty": 0.7}], ids=str)
@pytest.mark.parametrize("wanted", [3, 8, 20])
async def test_less_or_more_than_is_stored(engine: KiteEngine, wanted: int, options: dict[str, Any]) -> None:
    """More is computed from there on: random numbers and penalties go on where the stored text ends."""
    prompt = some_tokens(33)
    await store(engine, prompt, max_tokens=8, ignore_eos=True, **options)
    gen, steps = await again(engine, prompt, max_tokens=wanted, ignore_eos=True, **options)
    cold = await engine.generate(prompt, max_tokens=wanted, ignore_eos=True, reuse=COLD, **options)
    assert answer(gen) == answer(cold)
    assert (steps == 0) == (wanted <= 8)
    assert gen.usage.cached_tokens >= 32


async def test_a_stored_end_is_an_end(engine: KiteEngine) -> None:
    prompt = some_tokens(25)
    full = await engine.generate(prompt, max_tokens=10, ignore_eos=True, reuse=COLD)
    options = {"max_tokens": 10, "stop_token_ids": [full.token_ids[5]]}
    first = await store(engine, prompt, **options)
    assert first.finish_reason == "stop"
    gen, steps = await again(engine, prompt, **{**options, "max_tokens": 50})
    assert (answer(gen), steps) == (answer(first), 0)


OTHER: list[dict[str, Any]] = [
    {"temperature": 0.5, "seed": 1},
    {"temperature": 0.5},
    {"logit_bias": {5: 1.0}},
    {"stop": "x"},
    {"ignore_eos": True},
    {"repetition_penalty": 1.1},
    {"logprobs": 1},
]


@pytest.mark.parametrize("options", OTHER, ids=str)
async def test_other_options_are_computed(engine: KiteEngine, options: dict[str, Any]) -> None:
    prompt = some_tokens(30)
    await store(engine, prompt, max_tokens=8)
    gen, steps = await again(engine, prompt, max_tokens=8, **options)
    assert steps > 0
    assert not gen.reuse.completion


async def test_chance_is_never_stored(engine: KiteEngine) -> None:
    prompt = some_tokens(30)
    for _ in range(2):
        gen, steps = await again(engine, prompt, max_tokens=4, temperature=1.0)
        assert steps > 0
        assert not gen.reuse.completion


async def test_other_prompts_and_tenants_are_computed(engine: KiteEngine) -> None:
    prompt = some_tokens(32)
    await store(engine, prompt, max_tokens=6)
    for other, policy in (
        (prompt[:-1], STORED),
        ([*prompt, 7], STORED),
        (prompt, ReusePolicy(completions=True, namespace="b")),
    ):
        gen = await engine.generate(other, max_tokens=6, reuse=policy)
        assert not gen.reuse.completion


async def test_invalidate_forgets_answers(engine: KiteEngine) -> None:
    prompt = some_tokens(30)
    await store(engine, prompt, max_tokens=6)
    await engine.invalidate()
    gen, steps = await again(engine, prompt, max_tokens=6)
    assert steps > 0
    assert not gen.reuse.completion


@pytest.mark.parametrize("damage", ["no tokens", "unknown flag", "token outside", "too long"])
async def test_a_forged_unit_is_a_miss(engine: KiteEngine, damage: str) -> None:
    """Checksums hold; its content makes no sense."""
    prompt = some_tokens(30)
    first = await store(engine, prompt, max_tokens=6)
    serving = engine._current
    ids = {"no tokens": [0], "unknown flag": [2, 5], "token outside": [0, 2**31], "too long": [0] * 600}[damage]
    chain = BlockChain(serving.root(engine.reuse, None), serving.backend.info.block_tokens, prompt)
    key = sampling_key(SamplingParams())
    good = serving.completions.unit(chain, key, [1], ended=False, epoch=engine.pool.epoch)
    data = np.array(ids, np.uint32)
    fields = {name: getattr(good, name) for name in good.__slots__} | {
        "data": data.view(np.uint8),
        "shape": (len(data),),
    }
    await engine.pool.put_units([RecyclableUnit(**fields)], engine.pool.epoch)
    gen, steps = await again(engine, prompt, max_tokens=6)
    assert steps > 0
    assert answer(gen) == answer(first)


async def put_answer(
    engine: KiteEngine, prompt: list[int], params: SamplingParams, ids: list[int], *, ended: bool
) -> None:
    """A unit that is well formed, and was never computed."""
    serving = engine._current
    chain = BlockChain(serving.root(engine.reuse, None), serving.backend.info.block_tokens, prompt)
    unit = serving.completions.unit(chain, sampling_key(params), ids, ended=ended, epoch=engine.pool.epoch)
    await engine.pool.put_units([unit], engine.pool.epoch)


@pytest.mark.parametrize("ended", [False, True])
async def test_an_answer_that_the_constraint_forbids_is_a_miss(engine: KiteEngine, ended: bool) -> None:
    options = {"max_tokens": 8, "regex": "[0-9]{5}"}
    for prompt, forbidden in ((some_tokens(30), True), (some_tokens(30, 7), False)):
        cold = await engine.generate(prompt, reuse=COLD, **options)
        ids = [100, 101] if forbidden else cold.token_ids[:1]
        await put_answer(engine, prompt, SamplingParams(**options), ids, ended=ended)
        gen, _ = await again(engine, prompt, **options)
        assert answer(gen) == answer(cold)
        assert gen.reuse.completion == (not forbidden and not ended)


async def test_a_long_answer_is_given_piece_by_piece(engine: KiteEngine) -> None:
    """Others go on meanwhile, and who leaves in the middle leaves nothing."""
    prompt = some_tokens(20)
    ids = [100 + index % 50 for index in range(400)]
    await put_answer(engine, prompt, SamplingParams(ignore_eos=True), ids, ended=True)
    options: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True, "reuse": STORED}
    gen = await engine.generate(prompt, n=3, **options)
    assert [choice.token_ids for choice in gen.choices] == [ids] * 3
    count = 0
    async for chunk in engine.stream(prompt, **options):
        count += len(chunk.token_ids)
        if count > 70:
            break
    await assert_nothing_left(engine)
    expired = [chunk async for chunk in engine.stream(prompt, deadline=60, **options)]
    assert sum(len(chunk.token_ids) for chunk in expired) == 400
    await assert_nothing_left(engine)


@pytest.mark.usefixtures("eager_drafts")
async def test_another_process_guesses_from_what_is_on_disk(kit: BackendKit, cache_dir: Path, tmp_path: Path) -> None:
    prompt, pool = some_tokens(40), PoolConfig(disk=str(tmp_path))
    options: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True, "temperature": 1.0, "seed": 4}
    found = []
    for _ in range(2):
        async with KiteEngine.open(kit.small(), n_ctx=512, threads=1, cache_dir=cache_dir, pool=pool) as engine:
            await engine.pool.warm()
            await engine.generate(some_tokens(40, 7), max_tokens=2)  # tiers are measured
            found.append(await engine.generate(prompt, **options))
    assert found[0].token_ids == found[1].token_ids
    assert "same prompt" not in found[0].reuse.drafts
    if found[1].reuse.zero_prefill:  # else the tier was slower than computing, and nothing of it was waited for
        assert found[1].reuse.drafts["same prompt"].accepted > 0


async def test_another_process_finds_the_answer_on_disk(kit: BackendKit, cache_dir: Path, tmp_path: Path) -> None:
    """Another engine stands for it: it shares nothing with the first but the folder."""
    prompt = some_tokens(30)
    pool = PoolConfig(disk=str(tmp_path))
    async with KiteEngine.open(kit.small(), n_ctx=512, threads=1, cache_dir=cache_dir, pool=pool) as engine:
        first = await store(engine, prompt, max_tokens=6)
    async with KiteEngine.open(kit.small(), n_ctx=512, threads=1, cache_dir=cache_dir, pool=pool) as engine:
        gen, steps = await again(engine, prompt, max_tokens=6)
        assert steps == 0
        assert answer(gen) == answer(first)


def test_keys_of_options() -> None:
    assert sampling_key(SamplingParams()) == sampling_key(SamplingParams(max_tokens=5, n=3, seed=9))
    assert sampling_key(SamplingParams(temperature=1.0)) is None
    assert sampling_key(SamplingParams(temperature=1.0, seed=1, n=2)) is None
    assert sampling_key(SamplingParams(temperature=1.0, seed=1)) != sampling_key(
        SamplingParams(temperature=1.0, seed=2)
    )
    one = {"properties": {"a": {}, "b": {}}}
    two = {"properties": {"b": {}, "a": {}}}  # the order of keys is that of the answer
    assert sampling_key(SamplingParams(json_schema=one)) != sampling_key(SamplingParams(json_schema=two))
    assert sampling_key(SamplingParams(json_schema={"enum": [{1, 2}]})) is None
    assert sampling_key(SamplingParams(logit_bias={3: 1})) == sampling_key(SamplingParams(logit_bias={3: 1.0}))
