"""Passages: exact where nothing is moved, the right KV in the right place where it is, and never in an exact answer."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kitelib import KiteEngine, Passage, PoolConfig, ReusePolicy, UnsupportedOptionError
from kitelib.errors import BackendStepError
from kitelib.fingerprint import BlockChain
from tests.support.answers import REUSE_OFF, answer, cold_answer, evict_to_pool, prompt_of
from tests.support.engines import assert_nothing_left, evict_context, until

VOCAB = 512
SYSTEM, QUESTION = prompt_of(40, 1, VOCAB), prompt_of(11, 2, VOCAB)
DOCS = [prompt_of(length, 3, VOCAB) for length in (130, 90, 61)]
GREEDY: dict[str, Any] = {"max_tokens": 10, "ignore_eos": True, "logprobs": 20}
REUSE, BLEND = ReusePolicy(passages="reuse"), ReusePolicy(passages="blend")
SIZES: dict[str, Any] = {"n_ctx": 1024, "kv_tokens": 4096, "max_sequences": 8}


def rag(*docs: list[int], head_tokens: int = 16, question: list[int] = QUESTION) -> list[Any]:
    return [SYSTEM, *(Passage(doc, head_tokens) for doc in docs), question]


def flat(*docs: list[int], question: list[int] = QUESTION) -> list[int]:
    return [*SYSTEM, *(token for doc in docs for token in doc), *question]


@pytest.fixture(scope="module")
async def shared(hf_model: Callable[..., Path], open_engine: Callable[..., Any]) -> AsyncIterator[KiteEngine]:
    async with open_engine(hf_model("llama"), **SIZES) as engine:
        assert engine.stats()["numerics"] == "bitwise"
        yield engine


@pytest.fixture
async def engine(shared: KiteEngine) -> AsyncIterator[KiteEngine]:
    await shared.invalidate()
    yield shared
    await assert_nothing_left(shared)


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
async def flat_engine(
    request: pytest.FixtureRequest, hf_model: Callable[..., Path], open_engine: Callable[..., Any]
) -> AsyncIterator[KiteEngine]:
    """A model of one layer: its KV depends on token and position only, so moved KV is what would be computed there."""
    settings: dict[str, Any] = {"num_hidden_layers": 1}
    if request.param == "gemma3_text":
        settings["layer_types"] = ["sliding_attention"]
    async with open_engine(hf_model(request.param, **settings), **SIZES) as engine:
        yield engine


def near(found: Any, wanted: Any, within: float = 1e-3) -> None:
    """The same tokens with nearly the same log-probabilities."""
    assert [each["token_ids"] for each in found] == [each["token_ids"] for each in wanted]
    for ours, theirs in zip(found, wanted, strict=True):
        for a, b in zip(ours["logprobs"], theirs["logprobs"], strict=True):
            common = a.keys() & b.keys()
            assert len(common) > 10
            assert max(abs(a[token] - b[token]) for token in common) < within


# What is moved


@pytest.mark.parametrize("policy", [REUSE, BLEND])
@pytest.mark.parametrize("head_tokens", [0, 1, 16, 37])
async def test_moved_kv_is_what_would_be_computed_there(
    flat_engine: KiteEngine, policy: ReusePolicy, head_tokens: int
) -> None:
    await flat_engine.invalidate()
    for docs in ((DOCS[0],), (DOCS[1], DOCS[0]), (DOCS[2], DOCS[2], DOCS[1])):
        gen = await flat_engine.generate(rag(*docs, head_tokens=head_tokens), reuse=policy, **GREEDY)
        assert gen.prompt_token_ids == flat(*docs)
        assert gen.reuse.exactness == "approximate"
        assert gen.reuse.passage_tokens == sum(len(doc) - head_tokens for doc in docs)
        near(answer(gen), await cold_answer(flat_engine, flat(*docs), **GREEDY))
    await assert_nothing_left(flat_engine)


async def test_passage_at_the_front_and_at_the_end(flat_engine: KiteEngine) -> None:
    for prompt in ([Passage(DOCS[0])], [Passage(DOCS[0], 0), QUESTION], [QUESTION, Passage(DOCS[1], 0)]):
        gen = await flat_engine.generate(prompt, reuse=REUSE, **GREEDY)
        near(answer(gen), await cold_answer(flat_engine, gen.prompt_token_ids, **GREEDY))
    # The last token of a prompt is always computed, for what follows it.
    assert gen.reuse.passage_tokens == len(DOCS[1]) - 1


async def test_model_with_bos_computes_passages_after_it(
    hf_model: Callable[..., Path], open_engine: Callable[..., Any], tmp_path: Path
) -> None:
    import json
    import shutil

    folder = Path(shutil.copytree(hf_model("llama", num_hidden_layers=1), tmp_path / "bos"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    bos = {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}
    single = [{"SpecialToken": {"id": bos["id"], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": single,
        "special_tokens": {bos["id"]: bos},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    text = "The customer repairs a broken card before noon! Nobody describes the weather, as usual. " * 3
    async with open_engine(folder, **SIZES) as engine:
        gen = await engine.generate(["Read this. ", Passage(text), "Why?"], reuse=REUSE, **GREEDY)
        assert gen.prompt_token_ids.count(1) == 1
        assert gen.prompt_token_ids[0] == 1
        assert gen.reuse.passage_tokens > 20
        near(answer(gen), await cold_answer(engine, gen.prompt_token_ids, **GREEDY))
        # Alone it is the prompt that anybody may send.
        alone = await engine.generate(text, **GREEDY)
        assert alone.usage.cached_tokens >= alone.usage.prompt_tokens - 1


async def test_blend_of_everything_is_a_plain_prefill(engine: KiteEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kitelib.engine.passages.BLEND_SHARE", 1.0)
    gen = await engine.generate(rag(DOCS[0], DOCS[1], head_tokens=0), reuse=BLEND, **GREEDY)
    assert (gen.reuse.passage_tokens, gen.reuse.exactness) == (0, "approximate")
    near(answer(gen), await cold_answer(engine, flat(DOCS[0], DOCS[1]), **GREEDY))


# What is exact stays exact


async def test_tokens_are_the_same_in_all_modes_and_exact_is_exact(engine: KiteEngine) -> None:
    wanted = await cold_answer(engine, flat(*DOCS), **GREEDY)
    exact = await engine.generate(rag(*DOCS), **GREEDY)
    assert (answer(exact), exact.reuse.exactness, exact.reuse.passage_tokens) == (wanted, "bitwise", 0)
    gens = [await engine.generate(rag(*DOCS), reuse=policy, **GREEDY) for policy in (REUSE, BLEND, REUSE_OFF)]
    assert all(gen.prompt_token_ids == flat(*DOCS) for gen in gens)
    off = await engine.generate(rag(*DOCS), reuse=ReusePolicy(mode="off", passages="reuse"), **GREEDY)
    assert (answer(off), off.usage.cached_tokens, off.reuse.exactness) == (wanted, 0, "bitwise")


async def test_head_of_the_whole_passage_is_a_plain_prompt(engine: KiteEngine) -> None:
    wanted = await cold_answer(engine, flat(*DOCS), **GREEDY)
    for policy in (REUSE, BLEND):
        gen = await engine.generate(rag(*DOCS, head_tokens=1000), reuse=policy, **GREEDY)
        assert answer(gen) == wanted
        assert (gen.reuse.exactness, gen.reuse.passage_tokens) == ("bitwise", 0)


@pytest.mark.parametrize("policy", [REUSE, BLEND])
async def test_moved_kv_never_reaches_an_exact_request(engine: KiteEngine, policy: ReusePolicy) -> None:
    """Neither in the context nor from the pool, whatever is the same: all tokens, the beginning, or the parts."""
    prompts = [flat(*DOCS), [*flat(*DOCS), 5], flat(*DOCS)[:-5], flat(DOCS[0]), [*SYSTEM, *DOCS[0][:20], 7]]
    wanted = [await cold_answer(engine, prompt, **GREEDY) for prompt in prompts]
    moved = answer(await engine.generate(rag(*DOCS), reuse=policy, **GREEDY))
    assert moved != wanted[0]  # it would show
    for _ in range(2):
        for prompt, expected in zip(prompts, wanted, strict=True):
            gen = await engine.generate(prompt, **GREEDY)
            assert (answer(gen), gen.reuse.exactness) == (expected, "bitwise")
        await engine.invalidate()
        await engine.generate(rag(*DOCS), reuse=policy, **GREEDY)
        await evict_to_pool(engine)


async def test_pool_only_gets_what_is_exact(engine: KiteEngine) -> None:
    """Passages alone, and what stands before the first; nothing of the run that has them moved."""
    gen = await engine.generate(rag(*DOCS), reuse=REUSE, **GREEDY)
    assert gen.reuse.passage_tokens
    await evict_to_pool(engine)
    serving = engine._current
    root, size = serving.root(engine.reuse, None), serving.backend.info.block_tokens
    chains = [BlockChain(root, size, text) for text in (SYSTEM, *DOCS)]
    expected = {cf.hex() for chain in chains for cf in (*chain.fingerprints, chain.end())}
    keys = engine.pool.memory.keys()
    found = {key.rsplit(":", 1)[1] for key in keys}
    assert found == expected


async def test_exact_requests_beside_keep_their_bits(engine: KiteEngine) -> None:
    prompts = [prompt_of(length, 50, VOCAB) for length in (5, 33, 150, 300)] + [flat(*DOCS), flat(DOCS[1])]
    wanted = [await cold_answer(engine, prompt, **GREEDY) for prompt in prompts]
    await engine.invalidate()
    calls = []
    for number, prompt in enumerate(prompts):
        docs = (DOCS[number % 3], DOCS[(number + 1) % 3])
        calls.append(engine.generate(rag(*docs), reuse=(REUSE, BLEND)[number % 2], **GREEDY))
        calls.append(engine.generate(prompt, **GREEDY))
    gens = await asyncio.gather(*calls)
    assert [answer(gen) for gen in gens[1::2]] == wanted
    assert all(gen.reuse.exactness == "approximate" and len(gen.token_ids) == 10 for gen in gens[::2])


# What is reused


async def test_passages_are_computed_once(engine: KiteEngine) -> None:
    first = await engine.generate(rag(DOCS[0], DOCS[1]), reuse=REUSE, **GREEDY)
    moved = len(DOCS[0]) + len(DOCS[1]) - 32
    # All was computed for this request: before the first passage, each passage alone, and what was not moved.
    assert (first.usage.cached_tokens, first.reuse.passage_tokens) == (0, moved)
    second = await engine.generate(rag(DOCS[1], DOCS[0]), reuse=REUSE, **GREEDY)
    assert second.reuse.tiers == {"context": len(SYSTEM), "passages": moved}
    assert second.usage.cached_tokens == len(SYSTEM) + moved
    assert second.reuse.computed_tokens == 32 + len(QUESTION)
    assert "approximate" in second.reuse.note
    assert answer(second) != answer(first)
    # A new passage among known ones.
    third = await engine.generate(rag(DOCS[1], DOCS[2]), reuse=REUSE, **GREEDY)
    assert third.reuse.passage_tokens == len(DOCS[1]) + len(DOCS[2]) - 32
    assert third.usage.cached_tokens == len(SYSTEM) + third.reuse.passage_tokens - len(DOCS[2])


async def test_same_parts_again_share_what_was_moved(engine: KiteEngine) -> None:
    first = await engine.generate(rag(*DOCS), reuse=REUSE, **GREEDY)
    again = await engine.generate(rag(*DOCS), reuse=REUSE, **GREEDY)
    assert answer(again) == answer(first)
    assert again.reuse.tiers == {"context": len(flat(*DOCS)) - 1}
    assert again.reuse.exactness == "approximate"
    other = await engine.generate(rag(*DOCS, question=prompt_of(9, 8, VOCAB)), reuse=REUSE, **GREEDY)
    assert other.reuse.tiers == {"context": len(flat(*DOCS)) - len(QUESTION)}
    # Other heads and blending are other KV.
    for prompt, policy in ((rag(*DOCS, head_tokens=8), REUSE), (rag(*DOCS), BLEND)):
        apart = await engine.generate(prompt, reuse=policy, **GREEDY)
        assert apart.reuse.passage_tokens > 100


async def test_passages_come_back_from_the_pool(engine: KiteEngine) -> None:
    first = await engine.generate(rag(DOCS[0], DOCS[1]), reuse=REUSE, **GREEDY)
    await evict_to_pool(engine)
    again = await engine.generate(rag(DOCS[0], DOCS[1]), reuse=REUSE, **GREEDY)
    assert answer(again) == answer(first)
    # One token of each is computed, for the step that brings it in.
    assert again.usage.cached_tokens >= len(SYSTEM) + len(DOCS[0]) + len(DOCS[1]) - 32 - 3


async def test_preheated_text_serves_as_a_passage(engine: KiteEngine) -> None:
    await engine.preheat([DOCS[0], [Passage(DOCS[1])]])
    for doc in DOCS[:2]:
        gen = await engine.generate([Passage(doc), QUESTION], reuse=REUSE, **GREEDY)
        assert gen.reuse.tiers == {"passages": len(doc) - 16}


async def test_namespaces_and_epochs_share_no_passage(engine: KiteEngine) -> None:
    await engine.generate(rag(DOCS[0]), reuse=REUSE, **GREEDY)
    other = ReusePolicy(passages="reuse", namespace="other")
    gen = await engine.generate(rag(DOCS[0]), reuse=other, **GREEDY)
    assert (gen.usage.cached_tokens, gen.reuse.passage_tokens) == (0, len(DOCS[0]) - 16)
    await engine.invalidate()
    assert (await engine.generate(rag(DOCS[0]), reuse=REUSE, **GREEDY)).usage.cached_tokens == 0


async def test_choices_and_streams(engine: KiteEngine) -> None:
    one = await engine.generate(rag(*DOCS), reuse=REUSE, **GREEDY)
    await engine.invalidate()
    several = await engine.generate(rag(*DOCS), reuse=REUSE, n=3, **GREEDY)
    assert [choice.token_ids for choice in several.choices] == [one.token_ids] * 3
    await engine.invalidate()
    chunks = [chunk async for chunk in engine.stream(rag(*DOCS), reuse=BLEND, **GREEDY)]
    assert chunks[-1].generation is not None
    assert sum(len(chunk.token_ids) for chunk in chunks) == 10


async def test_many_at_once_compute_each_passage_once(engine: KiteEngine) -> None:
    steps_before = engine.stats()["prompt_tokens"] - engine.stats()["cached_tokens"]
    gens = await asyncio.gather(
        *(engine.generate(rag(*DOCS, question=prompt_of(7, n, VOCAB)), reuse=REUSE, **GREEDY) for n in range(6))
    )
    assert all(gen.reuse.exactness == "approximate" for gen in gens)
    computed = engine.stats()["prompt_tokens"] - engine.stats()["cached_tokens"] - steps_before
    once = len(flat(*DOCS)) + sum(map(len, DOCS))
    assert computed < 2 * once  # six times that without sharing


# Where it does not work out


async def test_short_passages_are_plain_text(engine: KiteEngine) -> None:
    prompt = [SYSTEM, Passage(DOCS[0][:31]), QUESTION]
    gen = await engine.generate(prompt, reuse=REUSE, **GREEDY)
    assert (gen.reuse.exactness, gen.reuse.passage_tokens) == ("bitwise", 0)
    assert answer(gen) == await cold_answer(engine, gen.prompt_token_ids, **GREEDY)


async def test_passage_that_left_the_context_is_computed(engine: KiteEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its being computed and the request's reaching it."""
    splicer = engine._current.scheduler._splicer
    monkeypatch.setattr(splicer, "_source", lambda *_: None)
    gen = await engine.generate(rag(*DOCS), reuse=REUSE, **GREEDY)
    assert (gen.reuse.passage_tokens, gen.reuse.exactness) == (0, "approximate")  # it may have been, as far as it knows
    near(answer(gen), await cold_answer(engine, flat(*DOCS), **GREEDY), 1e-5)


async def test_context_too_small_for_both_computes_exactly(
    hf_model: Callable[..., Path], open_engine: Callable[..., Any]
) -> None:
    async with open_engine(hf_model("llama"), n_ctx=512, kv_tokens=512) as engine:
        gen = await engine.generate(rag(*DOCS), reuse=REUSE, **GREEDY)
        assert (gen.reuse.exactness, gen.reuse.passage_tokens) == ("bitwise", 0)
        assert answer(gen) == await cold_answer(engine, flat(*DOCS), **GREEDY)
        await assert_nothing_left(engine)


@pytest.mark.parametrize("policy", [REUSE, BLEND])
async def test_under_memory_pressure_everybody_is_answered(
    hf_model: Callable[..., Path], open_engine: Callable[..., Any], policy: ReusePolicy
) -> None:
    """Preempted requests go on from their place; exact ones keep their bits."""
    plain = [prompt_of(200, seed, VOCAB) for seed in range(4)]
    async with open_engine(hf_model("llama"), n_ctx=640, kv_tokens=1024, max_sequences=6) as engine:
        options = {**GREEDY, "max_tokens": 60}
        wanted = [await cold_answer(engine, prompt, **options) for prompt in plain]
        await engine.invalidate()
        calls = []
        for seed, prompt in enumerate(plain):
            docs = (DOCS[seed % 3], DOCS[(seed + 1) % 3])
            calls += [engine.generate(rag(*docs), reuse=policy, **options), engine.generate(prompt, **options)]
        gens = await asyncio.gather(*calls)
        assert [answer(gen) for gen in gens[1::2]] == wanted
        assert all(len(gen.token_ids) == 60 for gen in gens)
        await assert_nothing_left(engine)


async def test_backend_that_fails_is_no_failure_of_the_request(
    engine: KiteEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise BackendStepError("no memory")

    monkeypatch.setattr(engine._current.backend.passages, "splice", fail)
    gen = await engine.generate(rag(*DOCS), reuse=BLEND, **GREEDY)
    assert gen.reuse.passage_tokens == 0
    near(answer(gen), await cold_answer(engine, flat(*DOCS), **GREEDY), 1e-4)


@pytest.mark.parametrize("gap", [1, 32, 33, 100])
async def test_text_between_passages(flat_engine: KiteEngine, gap: int) -> None:
    """Short ones are computed with the heads, long ones in steps."""
    between = prompt_of(gap, 9, VOCAB)
    prompt = [Passage(DOCS[0]), between, Passage(DOCS[1], 0), between, Passage(DOCS[2], 33), QUESTION]
    gen = await flat_engine.generate(prompt, reuse=REUSE, **GREEDY)
    assert gen.reuse.passage_tokens == sum(map(len, DOCS)) - 16 - 33
    near(answer(gen), await cold_answer(flat_engine, gen.prompt_token_ids, **GREEDY))


async def test_more_heads_than_a_step_may_hold(engine: KiteEngine) -> None:
    backend = engine._current.backend
    info = backend.info
    wanted = await engine.generate(rag(*DOCS, *DOCS[:2]), reuse=REUSE, **GREEDY)
    await engine.invalidate()
    try:
        backend.info = dataclasses.replace(info, max_step_tokens=24)
        gen = await engine.generate(rag(*DOCS, *DOCS[:2]), reuse=REUSE, **GREEDY)
    finally:
        backend.info = info
    assert gen.reuse.passage_tokens == wanted.reuse.passage_tokens
    near(answer(gen), answer(wanted), 1e-3)


@pytest.mark.parametrize("after", [0, 1, 3, 6])
async def test_cancelled_calls_leave_nothing(engine: KiteEngine, after: int) -> None:
    """While passages are computed, while the request is, or later."""
    before = engine.stats()["steps"]
    task = asyncio.create_task(engine.generate(rag(*DOCS), reuse=BLEND, max_tokens=400, ignore_eos=True))
    await until(lambda: engine.stats()["steps"] >= before + after)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await assert_nothing_left(engine)
    gen = await engine.generate(flat(*DOCS), **GREEDY)
    assert answer(gen) == await cold_answer(engine, flat(*DOCS), **GREEDY)


async def test_without_a_pool(hf_model: Callable[..., Path], open_engine: Callable[..., Any]) -> None:
    async with open_engine(hf_model("llama"), pool=PoolConfig(memory_bytes=0), **SIZES) as engine:
        await engine.generate(rag(DOCS[0]), reuse=REUSE, **GREEDY)
        gen = await engine.generate(rag(DOCS[1], DOCS[0]), reuse=REUSE, **GREEDY)
        assert gen.usage.cached_tokens == len(SYSTEM) + gen.reuse.passage_tokens - len(DOCS[1])
        await evict_context(engine)
        gen = await engine.generate(rag(DOCS[0]), reuse=REUSE, **GREEDY)
        assert gen.usage.cached_tokens == 0


# Refusals


@pytest.mark.parametrize(
    ("architecture", "settings", "reason"),
    [
        ("deepseek_v3", {}, "latent"),
        ("gpt2", {"n_inner": 192}, "rotary"),
    ],
)
@pytest.mark.filterwarnings("ignore")
async def test_models_without_movable_kv_are_refused(
    hf_model: Callable[..., Path],
    open_engine: Callable[..., Any],
    architecture: str,
    settings: dict[str, Any],
    reason: str,
) -> None:
    async with open_engine(hf_model(architecture, **settings), n_ctx=512) as engine:
        for policy in (REUSE, BLEND):
            with pytest.raises(UnsupportedOptionError, match=reason):
                await engine.generate(rag(DOCS[0]), reuse=policy, **GREEDY)
        gen = await engine.generate(rag(DOCS[0]), **GREEDY)
        assert np.array_equal(gen.prompt_token_ids, flat(DOCS[0]))
        assert len(gen.token_ids) == 10


async def test_other_backends_have_exact_passages_only(smollm2: Path, open_engine: Callable[..., Any]) -> None:
    async with open_engine(smollm2, n_ctx=512) as engine:
        prompt = ["Read this.\n", Passage("The river Aa is 83 km long and has eleven bridges. " * 4), "\nHow long?"]
        for mode in ("reuse", "blend"):
            with pytest.raises(UnsupportedOptionError, match="llama_cpp backend"):
                await engine.generate(prompt, reuse=ReusePolicy(passages=mode), max_tokens=2)  # type: ignore[arg-type]
        gen = await engine.generate(prompt, max_tokens=2)
        assert gen.reuse.exactness == "bitwise"
        again = await engine.generate(gen.prompt_token_ids, max_tokens=2)
        assert again.usage.cached_tokens >= again.usage.prompt_tokens - 1
