"""Every architecture of the torch backend, small and in float32: the answers of `transformers`, whatever is reused,
shared, cut, preempted or computed beside it; and where numerics are bitwise, the same bytes."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kitelib import KiteEngine, PoolConfig
from kitelib.abc import BlockPayload, SequenceId, StepWork
from kitelib.backends.torch_engine.backend import TorchBackend, TorchOptions
from tests.support.answers import ONE_STEP, REUSE_OFF, evict_to_pool, prompt_of
from tests.support.engines import assert_nothing_left, computes_slowly
from tests.support.hf_folders import ARCHITECTURES, reference_model

VOCAB = 512
NEW_TOKENS = 12
WINDOW = 32  # of the architectures that have one
# Around the sizes of blocks (8, 16, 32) and windows, beyond both, and more than a step takes.
LENGTHS = (1, 15, 16, 17, 32, 33, 64, 100, 300)
PREFIX = prompt_of(41, 77, VOCAB)  # ends inside a block
BRANCHES = [[*PREFIX, *prompt_of(6, seed, VOCAB)] for seed in (1, 2, 3)]
PROMPTS = [*(prompt_of(length, 7, VOCAB) for length in LENGTHS), *BRANCHES]
SAMPLE = prompt_of(96, 8, VOCAB)
# One router logit in the last bits and another expert answers; dense models have no such cliff.
DENSE = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text")
GREEDY: dict[str, Any] = {"max_tokens": NEW_TOKENS, "ignore_eos": True}
SIZES: dict[str, Any] = {"n_ctx": 512, "kv_tokens": 2048, "max_sequences": 16}

Logits = npt.NDArray[np.float32]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folder(request: pytest.FixtureRequest, hf_model: Callable[..., Path]) -> Path:
    return hf_model(request.param)


@dataclasses.dataclass(frozen=True)
class Reference:
    """What `transformers` gives.

    Attributes:
        greedy: tokens after each of PROMPTS.
        logits: after every token of SAMPLE, (96, vocabulary).
    """

    greedy: list[list[int]]
    logits: Logits


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    model = reference_model(folder)
    model.generation_config.eos_token_id = None
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "pad_token_id": 0}
    with torch.inference_mode():
        found = []
        for prompt in PROMPTS:
            ids = torch.tensor([prompt])
            whole = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
            found.append(whole[0, len(prompt) :].tolist())
        logits = model(torch.tensor([SAMPLE])).logits[0].float().numpy()
    assert all(len(each) == NEW_TOKENS for each in found)
    assert len({tuple(each) for each in found}) == len(PROMPTS)
    return Reference(found, logits)


@pytest.fixture(scope="module")
async def engine(folder: Path, open_engine: Callable[..., Any]) -> AsyncIterator[KiteEngine]:
    async with open_engine(folder, **SIZES) as engine:
        yield engine


async def ask(engine: KiteEngine, prompt: list[int], **options: Any) -> Any:
    return await engine.generate(prompt, **{**GREEDY, **options})


# Tokens


async def test_alone(engine: KiteEngine, reference: Reference) -> None:
    for prompt, expected in zip(PROMPTS, reference.greedy, strict=True):
        gen = await ask(engine, prompt, reuse=REUSE_OFF)
        assert gen.token_ids == expected, f"{len(prompt)} tokens"
        assert gen.usage.cached_tokens == 0


async def test_batched(engine: KiteEngine, reference: Reference) -> None:
    gens = await asyncio.gather(*(ask(engine, prompt, reuse=REUSE_OFF) for prompt in PROMPTS))
    assert [gen.token_ids for gen in gens] == reference.greedy


async def test_chunked(engine: KiteEngine, reference: Reference) -> None:
    """Prompts come in pieces of 23 tokens, beside others that decode."""
    backend = engine._current.backend
    info = backend.info
    try:
        backend.info = dataclasses.replace(info, max_step_tokens=23)
        gens = await asyncio.gather(*(ask(engine, prompt, reuse=REUSE_OFF) for prompt in PROMPTS))
    finally:
        backend.info = info
    assert [gen.token_ids for gen in gens] == reference.greedy


async def test_shared_and_restored(engine: KiteEngine, reference: Reference) -> None:
    await engine.invalidate()
    for prompt, expected in zip(PROMPTS[: len(LENGTHS)], reference.greedy, strict=False):
        assert (await ask(engine, prompt)).token_ids == expected
        shared = await ask(engine, prompt, reuse=ONE_STEP)
        assert (shared.token_ids, shared.usage.cached_tokens) == (expected, len(prompt) - 1)
        await evict_to_pool(engine)
        restored = await ask(engine, prompt, reuse=ONE_STEP)
        assert restored.token_ids == expected
        assert restored.reuse.tiers == ({"memory": len(prompt) - 1} if len(prompt) > 1 else {})
    await evict_to_pool(engine)
    gens = await asyncio.gather(*(ask(engine, prompt, reuse=ONE_STEP) for prompt in PROMPTS))
    assert [gen.token_ids for gen in gens] == reference.greedy
    known = await ask(engine, PROMPTS[2])
    assert (known.token_ids, known.reuse.zero_prefill) == (reference.greedy[2], True)


async def test_forked(engine: KiteEngine, reference: Reference) -> None:
    """Choices of one request, and requests that part inside a block."""
    await engine.invalidate()
    expected = reference.greedy[len(LENGTHS) :]
    gen = await ask(engine, BRANCHES[0], n=3)
    assert [choice.token_ids for choice in gen.choices] == [expected[0]] * 3
    for prompt, each in zip(BRANCHES[1:], expected[1:], strict=True):
        gen = await ask(engine, prompt)
        assert (gen.token_ids, gen.usage.cached_tokens) == (each, len(PREFIX))
    gens = await asyncio.gather(*(ask(engine, prompt, n=3) for prompt in BRANCHES))
    assert [[choice.token_ids for choice in gen.choices] for gen in gens] == [[each] * 3 for each in expected]
    # Sampled choices differ from each other, and are the same whoever shares with whom.
    options: dict[str, Any] = {"n": 3, "temperature": 1.0, "seed": 4}
    alone = await ask(engine, BRANCHES[0], reuse=REUSE_OFF, **options)
    shared = await ask(engine, BRANCHES[0], **options)
    assert [each.token_ids for each in shared.choices] == [each.token_ids for each in alone.choices]
    assert len({tuple(each.token_ids) for each in alone.choices}) == 3


async def test_preempted(folder: Path, open_engine: Callable[..., Any], reference: Reference) -> None:
    async with open_engine(folder, n_ctx=320, kv_tokens=320, max_sequences=16) as engine:
        gens = await asyncio.gather(*(ask(engine, prompt) for prompt in [*PROMPTS, *BRANCHES, *PROMPTS[3:8]]))
        expected = [*reference.greedy, *reference.greedy[len(LENGTHS) :], *reference.greedy[3:8]]
        assert [gen.token_ids for gen in gens] == expected
        stats = engine.stats()
        assert stats["preemptions"] > 0
        assert stats["step_failures"] == 0
        await assert_nothing_left(engine)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("folder", ["gemma3_text", "deepseek_v3"], indirect=True)
async def test_restored_from_disk_in_another_engine(
    folder: Path, open_engine: Callable[..., Any], reference: Reference, tmp_path: Path
) -> None:
    config = PoolConfig(disk=str(tmp_path / "pool"))
    async with open_engine(folder, pool=config, **SIZES) as engine:
        for prompt in PROMPTS[: len(LENGTHS)]:
            await ask(engine, prompt)
    async with open_engine(folder, pool=config, **SIZES) as engine:
        computes_slowly(engine)
        for prompt, expected in zip(PROMPTS[: len(LENGTHS)], reference.greedy, strict=False):
            gen = await ask(engine, prompt, reuse=ONE_STEP)
            assert gen.token_ids == expected
            assert gen.reuse.tiers == ({"disk": len(prompt) - 1} if len(prompt) > 1 else {})


# Numbers


@pytest.fixture(scope="module")
def backend(folder: Path, kite_cache: Path) -> Iterator[TorchBackend]:
    options = TorchOptions(n_ctx=512, kv_tokens=2048, max_sequences=16, threads=1, compile=False, cache_dir=kite_cache)
    backend = TorchBackend.load(folder, options)
    yield backend
    backend.close()


def extend(backend: TorchBackend, sequence: SequenceId, start: int, stop: int) -> Logits:
    """Computes tokens of SAMPLE; the logits after the last one."""
    (logits,) = backend.step([StepWork(sequence, SAMPLE[start:stop], start, True)]).logits
    assert logits is not None
    return logits.copy()


def export(backend: TorchBackend, sequence: SequenceId, stop: int) -> list[BlockPayload]:
    return backend.export_blocks(sequence, 0, -(-stop // backend.info.block_tokens), stop)


def data_of(payloads: Sequence[BlockPayload]) -> list[bytes]:
    return [payload.data.tobytes() for payload in payloads]


@pytest.mark.parametrize("piece", [1, 16, WINDOW + 1])
def test_logits_are_the_references(backend: TorchBackend, reference: Reference, piece: int) -> None:
    """At every position, where a token comes alone; at the ends of pieces, where it doesn't."""
    sequence = backend.create()
    for start in range(0, len(SAMPLE), piece):
        stop = min(len(SAMPLE), start + piece)
        error = np.abs(extend(backend, sequence, start, stop) - reference.logits[stop - 1]).max()
        assert error < 1e-4, f"after {stop} tokens"
    backend.release(sequence)


def test_logits_after_restored_blocks_are_the_references(backend: TorchBackend, reference: Reference) -> None:
    source = backend.create()
    extend(backend, source, 0, len(SAMPLE))
    for held in (1, 15, 16, 32, 33, 64, 95):
        sequence = backend.create()
        backend.restore_blocks(sequence, 0, export(backend, source, held))
        for stop in (held + 1, len(SAMPLE)):
            start = backend.runner.tables[sequence].num_tokens
            if start < stop:
                error = np.abs(extend(backend, sequence, start, stop) - reference.logits[stop - 1]).max()
                assert error < 1e-4, f"{held} tokens restored, {stop} in all"
        backend.release(sequence)
    backend.release(source)


def test_dense_models_are_bitwise(backend: TorchBackend) -> None:
    if backend.info.architecture in DENSE:
        assert backend.info.numerics == "bitwise", backend.info.notes


def test_bitwise_means_the_same_bytes_cold_warm_and_under_load(backend: TorchBackend) -> None:
    if backend.info.numerics != "bitwise":
        assert backend.info.notes  # says why
        pytest.skip(f"{backend.info.architecture}: numerics are standard")
    most = backend.info.max_step_tokens
    cold = backend.create()
    logits = [extend(backend, cold, start, min(start + most, len(SAMPLE))) for start in range(0, len(SAMPLE), most)][-1]
    blocks = export(backend, cold, len(SAMPLE))

    def check(sequence: SequenceId, found: Logits, how: str) -> None:
        assert found.tobytes() == logits.tobytes(), how
        assert data_of(export(backend, sequence, len(SAMPLE))) == data_of(blocks), how
        backend.release(sequence)

    for held in (1, 17, 32, 64, 80, 95):
        warm = backend.create()
        backend.restore_blocks(warm, 0, export(backend, cold, held))
        while (start := backend.runner.tables[warm].num_tokens) < len(SAMPLE):
            found = extend(backend, warm, start, min(start + most, len(SAMPLE)))
        check(warm, found, f"{held} tokens restored")
        fork, start = backend.fork(cold, held), held
        while start < len(SAMPLE):
            found = extend(backend, fork, start, min(start + 7, len(SAMPLE)))
            start += 7
        check(fork, found, f"{held} tokens shared")
    for seed in range(4):
        check(*under_load(backend, random.Random(seed)), f"under load {seed}")
    assert data_of(export(backend, cold, len(SAMPLE))) == data_of(blocks)  # nobody wrote to it
    backend.release(cold)


def under_load(backend: TorchBackend, chance: random.Random) -> tuple[SequenceId, Logits]:
    """SAMPLE in pieces of any size, beside up to five sequences that come, grow and go."""
    sequence, start, most = backend.create(), 0, backend.info.max_step_tokens
    others: dict[SequenceId, int] = {}
    found: Logits | None = None
    while start < len(SAMPLE):
        if len(others) < 5:
            others[backend.create()] = 0
        piece = min(chance.choice((1, 1, 2, 5, 16, 31)), len(SAMPLE) - start, most)
        work, left = [StepWork(sequence, SAMPLE[start : start + piece], start, True)], most - piece
        for other, held in others.items():
            count = min(chance.choice((0, 1, 1, 9, 20)), left)
            if count:
                tokens = prompt_of(count, held, VOCAB)
                work.insert(chance.randint(0, len(work)), StepWork(other, tokens, held, chance.random() < 0.5))
                others[other], left = held + count, left - count
        result = backend.step(work)
        found = result.logits[[item.sequence for item in work].index(sequence)]
        start += piece
        for other in [each for each, held in others.items() if held > 60]:
            backend.release(other)
            del others[other]
    for other in others:
        backend.release(other)
    assert found is not None
    return sequence, found.copy()
