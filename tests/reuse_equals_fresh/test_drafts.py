"""Drafts change nothing: tokens, log-probabilities and random draws are those of decoding token by token."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kitelib import KiteEngine, PoolConfig, ReusePolicy
from kitelib.engine.results import Generation
from tests.support.answers import answer, cold_answer, evict_to_pool, prompt_of
from tests.support.backends import BackendKit
from tests.support.drafts import propose
from tests.support.engines import StepRecorder, assert_nothing_left

NO_DRAFTS = ReusePolicy(drafts=False)
QUESTIONS = (Path(__file__).parents[1] / "data" / "banking77_extract.txt").read_text(encoding="utf-8").splitlines()


@pytest.fixture
async def engine(model: Path, open_engine: Callable[..., Any]) -> AsyncIterator[KiteEngine]:
    """One whose memory is short enough that drafts sometimes have no room."""
    async with open_engine(model, n_ctx=512, kv_tokens=1024, pool=PoolConfig(memory_bytes=64 * 2**20)) as opened:
        yield opened


def accepted(gen: Generation) -> int:
    return sum(count.accepted for count in gen.reuse.drafts.values())


def proposed(gen: Generation) -> int:
    return sum(count.proposed for count in gen.reuse.drafts.values())


def wordings(count: int) -> list[str]:
    """Questions as customers ask them, many of them alike."""
    starts = ("", "Hi, ", "Please tell me: ", "One more thing. ", "Hello! ")
    return [starts[index // len(QUESTIONS) % len(starts)] + QUESTIONS[index % len(QUESTIONS)] for index in range(count)]


@pytest.mark.usefixtures("eager_drafts")
@pytest.mark.parametrize("part", range(5))
async def test_300_prompts_at_once(engine: KiteEngine, part: int) -> None:
    """Greedy, sixty in each part: all wait at once, and guess from each other's answers and from their own prompts;
    a quarter was asked before."""
    prompts = wordings(300)[part::5]
    wanted = await ask_all(engine, prompts, reuse=NO_DRAFTS)
    await engine.invalidate()
    await ask_all(engine, prompts[::4])
    found = await ask_all(engine, prompts)
    assert [gen.token_ids for gen in found] == [gen.token_ids for gen in wanted]
    assert [gen.text for gen in found] == [gen.text for gen in wanted]
    assert sum(accepted(gen) for gen in found) > 10
    assert any(proposed(gen) > accepted(gen) for gen in found)
    assert {gen.reuse.exactness for gen in found} == {"bitwise"}
    await assert_nothing_left(engine)


async def ask_all(engine: KiteEngine, prompts: Sequence[str], **options: Any) -> list[Generation]:
    return await asyncio.gather(*(engine.generate(prompt, max_tokens=12, **options) for prompt in prompts))


OPTIONS: list[dict[str, Any]] = [
    {},
    {"logprobs": 3},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 1.2, "seed": 6, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "logprobs": 0},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"temperature": 0.7, "seed": 9, "logit_bias": {1000: 3.0}, "n": 3},
]


@pytest.mark.usefixtures("eager_drafts")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
async def test_right_drafts_with_every_option(
    engine: KiteEngine, cold_engine: KiteEngine, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft is what the answer is going to be; it is verified in few steps and gives the same."""
    prompt = prompt_of(21, seed=60)
    options = {"max_tokens": 20, "ignore_eos": True, **options}
    wanted = await cold_answer(cold_engine, prompt, **options)
    texts = [list(choice["token_ids"]) for choice in wanted]
    propose(
        monkeypatch,
        lambda _, tokens: next((each[len(tokens) :] for each in texts if each[: len(tokens)] == tokens), []),
    )
    steps = StepRecorder.install(engine, monkeypatch)
    gen = await engine.generate(prompt, **options)
    assert answer(gen) == wanted
    assert accepted(gen) >= 15 * len(wanted)
    assert len(steps.steps) <= 6
    await assert_nothing_left(engine)


def hostile() -> dict[str, Callable[[Sequence[int], Sequence[int]], Sequence[int]]]:
    rng = random.Random(1)
    return {
        "random": lambda prompt, tokens: [rng.randrange(100, 1900) for _ in range(rng.randrange(1, 9))],
        "the same token again and again": lambda prompt, tokens: [(tokens or prompt)[-1]] * 7,
        "the end of the text": lambda prompt, tokens: [0, 1, 2, 0],
        "longer than anything": lambda prompt, tokens: [rng.randrange(100, 1900) for _ in range(5000)],
        "the prompt": lambda prompt, tokens: prompt,
        "sometimes": lambda prompt, tokens: [] if len(tokens) % 2 else [7, 8],
    }


@pytest.mark.usefixtures("eager_drafts")
@pytest.mark.parametrize("kind", hostile())
async def test_hostile_drafts(
    engine: KiteEngine, cold_engine: KiteEngine, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and together, greedy and sampled; what remains in the context and in the pool is right as well."""
    prompts = [prompt_of(count, seed=70) for count in (1, 15, 16, 17, 33)]
    options: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 3}, {}, {"temperature": 0.8, "seed": 4}, {}]
    common: dict[str, Any] = {"max_tokens": 19, "logprobs": 2}
    wanted = [
        await cold_answer(cold_engine, each, **more, **common) for each, more in zip(prompts, options, strict=True)
    ]
    propose(monkeypatch, hostile()[kind])
    found = await asyncio.gather(
        *(engine.generate(each, **more, **common) for each, more in zip(prompts, options, strict=True))
    )
    assert [answer(gen) for gen in found] == wanted
    assert sum(proposed(gen) for gen in found) > 20
    # What was rejected is in nothing that is reused: each answer is continued from the context, then from the pool.
    for _ in range(2):
        for gen in found:
            longer = [*gen.prompt_token_ids, *gen.token_ids, 500, 501]
            again = await engine.generate(longer, max_tokens=4, logprobs=2)
            assert answer(again) == await cold_answer(cold_engine, longer, max_tokens=4, logprobs=2)
            assert again.usage.cached_tokens > 0
        await evict_to_pool(engine)
    await assert_nothing_left(engine)


@pytest.mark.usefixtures("eager_drafts")
async def test_the_end_inside_of_a_draft(
    engine: KiteEngine, cold_engine: KiteEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stop strings, stop tokens and the length hold wherever in an accepted draft they come."""
    prompt = prompt_of(12, seed=80)
    full = await cold_engine.generate(prompt, max_tokens=16, ignore_eos=True, reuse=ReusePolicy(mode="off"))
    propose(monkeypatch, lambda _, tokens: full.token_ids[len(tokens) :])
    pieces = [text for text in full.text.split() if text][:4]
    cases: list[dict[str, Any]] = [
        *({"stop": piece} for piece in pieces),
        *({"stop_token_ids": [token]} for token in full.token_ids[2:9:3]),
        *({"max_tokens": count} for count in (1, 2, 3, 7)),
    ]
    for case in cases:
        options = {"max_tokens": 16, "ignore_eos": True, **case}
        gen = await engine.generate(prompt, **options)
        assert answer(gen) == await cold_answer(cold_engine, prompt, **options)
        again = await engine.generate([*prompt, *gen.token_ids], max_tokens=3)
        assert answer(again) == await cold_answer(cold_engine, [*prompt, *gen.token_ids], max_tokens=3)
    await assert_nothing_left(engine)


@pytest.mark.usefixtures("eager_drafts")
@pytest.mark.parametrize(
    "constraint",
    [
        {"regex": r"[a-f]{3}-[0-9]{4}( [x-z]+){2}"},
        {"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    ],
    ids=["regex", "schema"],
)
async def test_constraints_hold_inside_of_a_draft(
    engine: KiteEngine, cold_engine: KiteEngine, constraint: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft is the answer without the constraint, then with it, then something that the constraint forbids."""
    prompt = prompt_of(12, seed=81)
    free = await cold_engine.generate(prompt, max_tokens=16, ignore_eos=True, reuse=ReusePolicy(mode="off"))
    wanted = await cold_answer(cold_engine, prompt, max_tokens=16, **constraint)
    for text in (free.token_ids, list(wanted[0]["token_ids"]), [300] * 16):
        propose(monkeypatch, lambda _, tokens, text=text: text[len(tokens) :])  # type: ignore[misc]
        gen = await engine.generate(prompt, max_tokens=16, **constraint)
        assert answer(gen) == wanted
        assert proposed(gen) > 0
    assert accepted(gen) == 0


@pytest.mark.usefixtures("eager_drafts")
async def test_cancelled_and_preempted_in_the_middle_of_drafts(
    kit: BackendKit, open_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory for three of eight: some are preempted, some cancelled; the others answer as they do alone."""
    rng = random.Random(5)
    prompts = [prompt_of(20 + 7 * index, seed=90, vocab_size=2048) for index in range(8)]
    options: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True}
    async with open_engine(kit.small(), n_ctx=256, kv_tokens=kit.kv_tokens(512)) as small:
        wanted = [await cold_answer(small, prompt, **options) for prompt in prompts]
        texts = [list(each[0]["token_ids"]) for each in wanted]

        def half_right(prompt: Sequence[int], tokens: Sequence[int]) -> Sequence[int]:
            text = texts[prompts.index(list(prompt))]
            return [*text[len(tokens) : len(tokens) + rng.randrange(4)], 5, 6]

        propose(monkeypatch, half_right)
        for _ in range(3):
            tasks = [asyncio.create_task(small.generate(prompt, **options)) for prompt in prompts]
            for task in rng.sample(tasks, 3):
                await asyncio.sleep(0.01)
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            done = [(index, gen) for index, gen in enumerate(results) if isinstance(gen, Generation)]
            assert len(done) >= 5
            for index, gen in done:
                assert answer(gen) == wanted[index]
            await assert_nothing_left(small)
        assert small.stats()["drafts"]["accepted"] > 0


async def test_drafts_can_be_turned_off(engine: KiteEngine) -> None:
    for _ in range(2):
        gen = await engine.generate(QUESTIONS[0], max_tokens=12, reuse=NO_DRAFTS)
        assert gen.reuse.drafts == {}
    assert engine.stats()["drafts"]["proposed"] == 0


@pytest.mark.usefixtures("eager_drafts")
async def test_tenants_do_not_guess_from_each_other(engine: KiteEngine) -> None:
    """A guess that comes true too fast would tell what somebody else was told."""
    prompt, options = prompt_of(20, seed=97), {"max_tokens": 12, "ignore_eos": True}
    for tenant in ("a", "b"):
        gen = await engine.generate(prompt, reuse=ReusePolicy(namespace=tenant), **options)
        assert set(gen.reuse.drafts) <= {"prompt"}
    again = await engine.generate(prompt, reuse=ReusePolicy(namespace="b"), **options)
    assert again.reuse.drafts["same prompt"].accepted >= 8


@pytest.mark.timeout(230)  # 20,000 requests
@pytest.mark.usefixtures("eager_drafts")
async def test_sampled_texts_have_the_distribution_of_the_model(
    kit: BackendKit, open_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """20,000 texts of three tokens without a seed, guessed by drafts that are right, wrong, and impossible: chi-square
    against the probabilities that the model gives to each text."""
    temperature, kept, total = 0.8, 3, 20_000
    prompt = prompt_of(9, seed=95, vocab_size=2048)
    options: dict[str, Any] = {"ignore_eos": True, "temperature": temperature, "top_k": kept}
    async with open_engine(kit.small(), n_ctx=64, kv_tokens=2048, max_sequences=32) as small:
        chances: dict[tuple[int, ...], float] = {(): 1.0}
        for _ in range(3):
            longer: dict[tuple[int, ...], float] = {}
            for text, chance in chances.items():
                gen = await small.generate([*prompt, *text], max_tokens=1, ignore_eos=True, logprobs=kept)
                assert gen.logprobs is not None
                weights = {token: math.exp(value / temperature) for token, value in gen.logprobs[0].items()}
                for token, weight in weights.items():
                    longer[(*text, token)] = chance * weight / sum(weights.values())
            chances = longer
        ranked = sorted(chances, key=lambda text: -chances[text])
        guesses = [ranked[0], ranked[1], ranked[-1], (ranked[0][0], ranked[0][1], 7), (8, 8, 8)]
        turn = itertools.count()
        propose(monkeypatch, lambda _, tokens: guesses[next(turn) % len(guesses)][len(tokens) :])
        counts: dict[tuple[int, ...], int] = dict.fromkeys(chances, 0)
        for _ in range(total // 200):
            many = (small.generate(prompt, max_tokens=3, **options) for _ in range(200))
            for gen in await asyncio.gather(*many):
                counts[tuple(gen.token_ids)] += 1
        drafts = small.stats()["drafts"]
        assert drafts["accepted"] > total / 50
        assert drafts["proposed"] - drafts["accepted"] > total / 50
    assert sum(counts.values()) == total
    assert chi_square_p(counts, chances) > 1e-4
    flat = dict.fromkeys(chances, 1 / len(chances))
    assert chi_square_p(counts, flat) < 1e-9  # the test can tell distributions apart


def chi_square_p(counts: dict[tuple[int, ...], int], chances: dict[tuple[int, ...], float]) -> float:
    """Probability of a deviation as large as this one (Wilson and Hilferty's normal approximation); cells that are
    expected fewer than ten times are joined."""
    total = sum(counts.values())
    cells = [(counts[text], total * chance) for text, chance in chances.items() if total * chance >= 10]
    rest = [(counts[text], total * chance) for text, chance in chances.items() if total * chance < 10]
    if sum(expected for _, expected in rest) >= 10:
        cells.append((sum(count for count, _ in rest), sum(expected for _, expected in rest)))
    degrees = len(cells) - 1
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells)
    spread = 2 / (9 * degrees)
    return 0.5 * math.erfc(((statistic / degrees) ** (1 / 3) - (1 - spread)) / math.sqrt(2 * spread))
