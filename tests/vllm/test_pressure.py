"""Chunked prefill, a KV cache that is too small, preemption, and requests that go away."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.vllm.engines import Engine, open_engine, prompt, transfer_config
from tests.vllm.models import BLOCK

SHARED = [prompt(seed, 6 * BLOCK) for seed in (1, 2, 3)]
# Some share all of a prefix, some a part that ends within a block, some nothing; lengths are multiples of a block or not.
PROMPTS = [
    prompt(100 + index, length, SHARED[index % 3][: (6 * BLOCK, 100, 0)[index // 3 % 3]])
    for index, length in enumerate([200, 7 * BLOCK, 8 * BLOCK, 230] * 4)
]
TOKENS = 40


@pytest.fixture(scope="module")
def plain(reference: Engine) -> list[list[int]]:
    """The answers without the connector, one request at a time."""
    return [reference.generate(prompts=[each], max_tokens=TOKENS)["tokens"][0] for each in PROMPTS]


def test_prompts_in_chunks(model: Path, disk: Path, tmp_path: Path, plain: list[list[int]]) -> None:
    transfer = transfer_config({"disk": str(disk), "memory_bytes": 0})
    options = {"max_num_batched_tokens": 48, "max_num_seqs": 16}  # a chunk ends within a block
    with open_engine(model, tmp_path / "first", transfer, **options) as engine:
        assert engine.generate(prompts=PROMPTS, max_tokens=TOKENS)["tokens"] == plain
        engine.settle()
        engine.reset()
        restored = engine.generate(prompts=PROMPTS, max_tokens=TOKENS)
        counters = engine.stats()["counters"]
    assert restored["tokens"] == plain
    assert counters["loaded_tokens"] > 0
    lengths = [(len(each) - 1) // BLOCK * BLOCK for each in PROMPTS]
    assert all(cached >= length for cached, length in zip(restored["cached"], lengths, strict=True))


def test_sixteen_requests_with_aborts_in_a_small_cache(
    model: Path, disk: Path, tmp_path: Path, plain: list[list[int]]
) -> None:
    transfer = transfer_config({"disk": str(disk), "memory_bytes": 0})
    # Room for about four whole requests: the others are preempted or wait.
    options = {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 256, "max_num_seqs": 16}
    rng = random.Random(5)
    with open_engine(model, tmp_path / "log", transfer, **options) as engine:
        preempted = 0
        for _ in range(4):
            gone = rng.sample(range(len(PROMPTS)), 5)
            aborts = {str(index): rng.randrange(1, 60) for index in gone}
            result = engine.crowd(prompts=PROMPTS, max_tokens=TOKENS, aborts=aborts)
            answers = {int(index): tokens for index, tokens in result["tokens"].items()}
            assert answers == {index: plain[index] for index in answers}
            assert set(range(len(PROMPTS))) - set(gone) <= set(answers)
            assert result["free"], "a request that went away left blocks behind"
            preempted += result["preempted"]
            engine.settle()
            assert engine.reset()
        counters = engine.stats()["counters"]
    assert preempted, "the cache was not small enough"
    assert counters["loaded_blocks"] > 100
    assert "failed_blocks" not in counters
