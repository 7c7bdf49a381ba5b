"""Answers are the same without the connector, cold, and restored."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.engines import Engine, open_engine, prompt, transfer_config
from tests.vllm.models import BLOCK

LENGTHS = (20, BLOCK, BLOCK + 1, 4 * BLOCK, 4 * BLOCK + 1, 5 * BLOCK - 1, 300)
PROMPTS = [prompt(seed, length) for seed, length in enumerate(LENGTHS)]
TOKENS = 24


def _restorable(length: int) -> int:
    return (length - 1) // BLOCK * BLOCK


@pytest.fixture(scope="module")
def plain(reference: Engine) -> list[list[int]]:
    """The answers without the connector."""
    return reference.generate(prompts=PROMPTS, max_tokens=TOKENS)["tokens"]


@pytest.mark.parametrize("memory_bytes", [0, 2**28])
def test_the_same_process_restores_what_it_forgot(
    model: Path, disk: Path, tmp_path: Path, plain: list[list[int]], memory_bytes: int
) -> None:
    transfer = transfer_config({"disk": str(disk), "memory_bytes": memory_bytes})
    with open_engine(model, tmp_path / "log", transfer) as engine:
        cold = engine.generate(prompts=PROMPTS, max_tokens=TOKENS)
        assert cold == {"tokens": plain, "cached": [0] * len(PROMPTS)}
        engine.settle()
        assert engine.reset()
        restored = engine.generate(prompts=PROMPTS, max_tokens=TOKENS)
        counters = engine.stats()["counters"]
    assert restored["tokens"] == plain
    assert restored["cached"] == [_restorable(length) for length in LENGTHS]
    assert counters["loaded_tokens"] == sum(map(_restorable, LENGTHS))
    assert "failed_blocks" not in counters


def test_another_process_restores(model: Path, disk: Path, tmp_path: Path, plain: list[list[int]]) -> None:
    transfer = transfer_config({"disk": str(disk), "memory_bytes": 0})
    with open_engine(model, tmp_path / "first", transfer) as engine:
        assert engine.generate(prompts=PROMPTS, max_tokens=TOKENS)["tokens"] == plain
    with open_engine(model, tmp_path / "second", transfer) as engine:
        restored = engine.generate(prompts=PROMPTS, max_tokens=TOKENS)
        again = engine.generate(prompts=PROMPTS, max_tokens=TOKENS)
        counters = engine.stats()["counters"]
    assert restored["tokens"] == plain
    assert restored["cached"] == [_restorable(length) for length in LENGTHS]
    assert again["tokens"] == plain, "what was restored serves vLLM's own prefix cache"
    assert counters["loaded_tokens"] == sum(map(_restorable, LENGTHS))


def test_an_answer_is_restored_with_its_prompt(model: Path, disk: Path, tmp_path: Path) -> None:
    first = prompt(99, 50)
    with open_engine(model, tmp_path / "log", transfer_config({"disk": str(disk)})) as engine:
        answer = engine.generate(prompts=[first], max_tokens=60)["tokens"][0]
        engine.settle()
        engine.reset()
        dialogue = [*first, *answer, *prompt(98, 10)]
        restored = engine.generate(prompts=[dialogue], max_tokens=8)
    # The last token of an answer was never computed.
    assert restored["cached"] == [(len(first) + len(answer) - 1) // BLOCK * BLOCK]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_blocks_come_back_bit_by_bit(model: Path, disk: Path, tmp_path: Path, dtype: str) -> None:
    tokens = prompt(7, 6 * BLOCK)
    transfer = transfer_config({"disk": str(disk), "memory_bytes": 0})
    with open_engine(model, tmp_path / "first", transfer, dtype=dtype) as engine:
        engine.generate(prompts=[tokens], max_tokens=1)
        written = engine.blocks(prompt=tokens)
    with open_engine(model, tmp_path / "second", transfer, dtype=dtype) as engine:
        # Fills other blocks first, so that the restored ones lie elsewhere.
        engine.generate(prompts=[prompt(8, 3 * BLOCK)], max_tokens=1)
        cached = engine.generate(prompts=[[*tokens, 5]], max_tokens=1)["cached"]
        read = engine.blocks(prompt=tokens)
    assert cached == [6 * BLOCK]
    assert len(written) == 6
    assert len(set(written)) == 6
    assert read == written
