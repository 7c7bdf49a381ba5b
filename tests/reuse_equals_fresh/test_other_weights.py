"""After the weights or an adapter changed, nothing that the old ones computed is ever used."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from kitelib import AdapterConfig, KiteEngine, ReusePolicy
from tests.support.answers import answer, cold_answer, evict_to_pool, prompt_of
from tests.support.backends import BackendKit

GREEDY = {"max_tokens": 6, "logprobs": 3, "ignore_eos": True}
SMALL = {"n_ctx": 256, "kv_tokens": 256}
Answer = list[Mapping[str, Any]]
OpenEngine = Callable[..., Any]


async def warm(engine: KiteEngine, prompts: list[list[int]], **options: Any) -> list[Answer]:
    """Answers with everything known afterwards, in the context and in the pool."""
    found = [answer(await engine.generate(prompt, **GREEDY, **options)) for prompt in prompts]
    await engine.flush()
    for prompt in prompts:
        gen = await engine.generate(prompt, max_tokens=1, **options)
        assert gen.reuse.zero_prefill
    return found


async def cold(open_engine: OpenEngine, model: Path, prompts: list[list[int]], **options: Any) -> list[Answer]:
    """Answers of an engine that never held other weights."""
    adapters = options.pop("adapters", None)
    async with open_engine(model, adapters=adapters, **SMALL) as engine:
        return [await cold_answer(engine, prompt, **GREEDY, **options) for prompt in prompts]


async def check_fresh(engine: KiteEngine, prompts: list[list[int]], expected: list[Answer], **options: Any) -> None:
    """The first time nothing is known, the second time what is known is right."""
    for prompt, each in zip(prompts, expected, strict=True):
        gen = await engine.generate(prompt, **GREEDY, **options)
        assert (answer(gen), gen.usage.cached_tokens) == (each, 0)
    await evict_to_pool(engine)
    for prompt, each in zip(prompts, expected, strict=True):
        assert answer(await engine.generate(prompt, **GREEDY, **options)) == each


async def test_one_changed_weight_in_the_same_place(
    kit: BackendKit, model: Path, open_engine: OpenEngine, tmp_path: Path
) -> None:
    """B18, B19: the file is replaced under the same path: same name, size and modification time, one byte differs."""
    prompts = [prompt_of(length, seed=300) for length in (1, 16, 40)]
    path = kit.copy(model, tmp_path / "model")
    other = kit.one_byte_changed(model, tmp_path / "other")
    expected = await cold(open_engine, other, prompts)
    async with open_engine(path, **SMALL) as engine:
        old = await warm(engine, prompts)
        assert all(ours != theirs for ours, theirs in zip(old, expected, strict=True))
        kit.replace(path, other)
        await engine.reload()
        await check_fresh(engine, prompts, expected)


async def test_reload_to_other_weights_and_back(kit: BackendKit, open_engine: OpenEngine, tmp_path: Path) -> None:
    prompts = [prompt_of(length, seed=301, vocab_size=2048) for length in (1, 33, 100)]
    first, second = kit.small(1), kit.small(2)
    one_byte = kit.one_byte_changed(first, tmp_path / "one-byte")
    expected = {path: await cold(open_engine, path, prompts) for path in (first, second, one_byte)}
    assert len({repr(each) for each in expected.values()}) == 3
    async with open_engine(first, **SMALL) as engine:
        assert await warm(engine, prompts) == expected[first]
        for path in (one_byte, second, first, one_byte, first):
            await engine.reload(path)
            await check_fresh(engine, prompts, expected[path])


async def test_requests_around_a_reload_belong_to_one_model(kit: BackendKit, open_engine: OpenEngine) -> None:
    """Calls that began before the reload end on the old weights, later ones run on the new."""
    prompts = [prompt_of(30 + index, seed=302, vocab_size=2048) for index in range(8)]
    first, second = kit.small(1), kit.small(2)
    old, new = await cold(open_engine, first, prompts), await cold(open_engine, second, prompts)
    async with open_engine(first, **SMALL) as engine:
        await warm(engine, prompts[:4])
        before = [asyncio.create_task(engine.generate(prompt, **GREEDY)) for prompt in prompts]
        await asyncio.sleep(0)
        reload = asyncio.create_task(engine.reload(second))
        await asyncio.sleep(0)
        after = [asyncio.create_task(engine.generate(prompt, **GREEDY)) for prompt in prompts]
        await reload
        assert [answer(await task) for task in before] == old
        assert [answer(await task) for task in after] == new


@pytest.mark.parametrize("change", ["reload", "overwrite", "scale"])
async def test_an_adapter_of_the_same_name(
    kit: BackendKit, open_engine: OpenEngine, tmp_path: Path, change: str
) -> None:
    """B16, B17: adapters are told apart by content and scale; their names and paths say nothing."""
    model = kit.small()
    prompts = [prompt_of(length, seed=303, vocab_size=2048) for length in (1, 16, 50)]
    old, new = (kit.adapter(tmp_path / str(seed), model, seed) for seed in (1, 2))
    changed: dict[str, AdapterConfig | str] = {"tone": str(new)}
    if change == "scale":
        changed = {"tone": AdapterConfig(str(old), scale=0.5)}
    base = await cold(open_engine, model, prompts)
    before = await cold(open_engine, model, prompts, adapters={"tone": str(old)}, adapter="tone")
    expected = await cold(open_engine, model, prompts, adapters=changed, adapter="tone")
    assert len({repr(base), repr(before), repr(expected)}) == 3
    async with open_engine(model, adapters={"tone": str(old)}, **SMALL) as engine:
        assert await warm(engine, prompts, adapter="tone") == before
        assert await warm(engine, prompts) == base
        if change == "overwrite":
            kit.replace_adapter(old, new)
            await engine.reload()
        else:
            await engine.reload(adapters=changed)
        await check_fresh(engine, prompts, expected, adapter="tone")
        assert [answer(await engine.generate(prompt, **GREEDY)) for prompt in prompts] == base


async def test_adapters_beside_each_other(
    kit: BackendKit, model: Path, open_engine: OpenEngine, tmp_path: Path
) -> None:
    """The same prompts at once with two adapters and with none, twice: what one computed is never another's."""
    prompts = [prompt_of(length, seed=304) for length in (17, 40)]
    adapters = {
        name: str(kit.adapter(tmp_path / name, model, seed)) for seed, name in enumerate(("first", "second"), 1)
    }
    names = (None, "first", "second")
    async with open_engine(model, adapters=adapters, n_ctx=256, kv_tokens=512) as engine:
        asked = [(prompt, name) for prompt in prompts for name in names]
        expected = [await cold_answer(engine, prompt, adapter=name, **GREEDY) for prompt, name in asked]
        assert len({repr(each) for each in expected}) == len(expected)
        for _ in range(2):
            gens = await asyncio.gather(*(engine.generate(prompt, adapter=name, **GREEDY) for prompt, name in asked))
            assert [answer(gen) for gen in gens] == expected
            await evict_to_pool(engine)


async def test_tenants_share_nothing(kit: BackendKit, open_engine: OpenEngine) -> None:
    prompt = prompt_of(50, seed=305, vocab_size=2048)
    async with open_engine(kit.small(), **SMALL) as engine:
        expected = await cold_answer(engine, prompt, **GREEDY)
        for name in (None, "a", "b"):
            policy = ReusePolicy(namespace=name)
            gen = await engine.generate(prompt, reuse=policy, **GREEDY)
            assert (answer(gen), gen.usage.cached_tokens) == (expected, 0)
            await engine.flush()
            gen = await engine.generate(prompt, reuse=policy, **GREEDY)
            assert (answer(gen), gen.usage.cached_tokens) == (expected, 50)
