"""KV is found only by what computed it: the same weights, adapter, tenant and layout, and never after a reset."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.vllm.engines import Engine, open_engine, prompt, transfer_config
from tests.vllm.models import BLOCK, write_llama, write_lora

PROMPT = prompt(11, 5 * BLOCK + 3)
FULL = 5 * BLOCK
TOKENS = 16


def _ask(engine: Engine, **options: object) -> tuple[list[int], int]:
    """The answer to `PROMPT` and how many of its tokens came from outside, with vLLM's own cache empty."""
    engine.settle()
    engine.reset()
    answer = engine.generate(prompts=[PROMPT], max_tokens=TOKENS, **options)
    return answer["tokens"][0], answer["cached"][0]


def test_a_reset_makes_everything_void_here_and_for_others(model: Path, disk: Path, tmp_path: Path) -> None:
    transfer = transfer_config({"disk": str(disk)})
    with open_engine(model, tmp_path / "first", transfer) as engine:
        cold, cached = _ask(engine)
        assert cached == 0
        assert _ask(engine) == (cold, FULL)
        engine.settle()
        assert engine.reset(connector=True)
        assert engine.generate(prompts=[PROMPT], max_tokens=TOKENS) == {"tokens": [cold], "cached": [0]}
        assert _ask(engine) == (cold, FULL), "what is computed afterwards counts"
        engine.reset(connector=True)
    with open_engine(model, tmp_path / "second", transfer) as engine:
        assert _ask(engine) == (cold, 0)


def test_a_salt_is_a_namespace(model: Path, disk: Path, tmp_path: Path) -> None:
    (tmp_path / "hmac").write_bytes(b"0123456789abcdef")
    (tmp_path / "secret").write_bytes(b"fedcba9876543210")
    secrets = {"hmac_key_file": str(tmp_path / "hmac"), "namespace_secret_file": str(tmp_path / "secret")}
    transfer = transfer_config({"disk": str(disk), "memory_bytes": 0, **secrets})
    with open_engine(model, tmp_path / "log", transfer) as engine:
        cold, _ = _ask(engine, salt="a")
        assert _ask(engine, salt="b") == (cold, 0)
        assert _ask(engine) == (cold, 0)
        assert _ask(engine, salt="a") == (cold, FULL)
        assert _ask(engine, salt="b") == (cold, FULL)
    # Another secret is another owner: not even the same salt finds anything.
    (tmp_path / "secret").write_bytes(b"another secret..")
    with open_engine(model, tmp_path / "log2", transfer) as engine:
        assert _ask(engine, salt="a") == (cold, 0)


def test_two_adapters_with_one_name(model: Path, disk: Path, tmp_path: Path) -> None:
    first, second = write_lora(tmp_path / "first", 1), write_lora(tmp_path / "second", 2)
    options = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    with open_engine(model, tmp_path / "plain", **options) as engine:
        wanted = [
            engine.generate(prompts=[PROMPT], max_tokens=TOKENS, lora=lora)["tokens"][0]
            for lora in (["one", 1, str(first)], ["other", 2, str(second)], None)
        ]
    assert len(set(map(tuple, wanted))) == 3
    transfer = transfer_config({"disk": str(disk), "memory_bytes": 0})
    with open_engine(model, tmp_path / "log", transfer, **options) as engine:
        assert _ask(engine, lora=["name", 1, str(first)]) == (wanted[0], 0)
        assert _ask(engine, lora=["name", 2, str(second)]) == (wanted[1], 0)
        assert _ask(engine) == (wanted[2], 0)
        assert _ask(engine, lora=["name", 1, str(first)]) == (wanted[0], FULL)
        assert _ask(engine, lora=["name", 2, str(second)]) == (wanted[1], FULL)
        # The folder changes under an engine that has loaded it: nobody knows which of both it computes with.
        shutil.rmtree(first)
        shutil.copytree(second, first)
        assert _ask(engine, lora=["name", 1, str(first)]) == (wanted[0], 0)
    # In a new process the folder is what it holds now, and a copy elsewhere is the same adapter.
    copy = shutil.copytree(second, tmp_path / "copy")
    with open_engine(model, tmp_path / "log2", transfer, **options) as engine:
        assert _ask(engine, lora=["name", 1, str(first)]) == (wanted[1], FULL)
        assert _ask(engine, lora=["third", 3, str(copy)]) == (wanted[1], FULL)


def test_changed_weights_under_one_name(disk: Path, tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "model", seed=3)
    transfer = transfer_config({"disk": str(disk), "memory_bytes": 0})
    with open_engine(folder, tmp_path / "first", transfer) as engine:
        old, _ = _ask(engine)
        assert _ask(engine) == (old, FULL)
    shutil.rmtree(folder)
    write_llama(folder, seed=4)
    with open_engine(folder, tmp_path / "plain") as engine:
        new = engine.generate(prompts=[PROMPT], max_tokens=TOKENS)["tokens"][0]
    assert new != old
    with open_engine(folder, tmp_path / "second", transfer) as engine:
        assert _ask(engine) == (new, 0)
        assert _ask(engine) == (new, FULL)
    # The same weights with another configuration are another model, too.
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 50000.0}))
    with open_engine(folder, tmp_path / "third", transfer) as engine:
        assert _ask(engine)[1] == 0


@pytest.mark.parametrize("options", [{"block_size": 2 * BLOCK}, {"dtype": "bfloat16"}])
def test_another_layout_finds_nothing(model: Path, disk: Path, tmp_path: Path, options: dict[str, object]) -> None:
    transfer = transfer_config({"disk": str(disk), "memory_bytes": 0})
    with open_engine(model, tmp_path / "first", transfer) as engine:
        _ask(engine)
    with open_engine(model, tmp_path / "second", transfer, **options) as engine:
        answer, cached = _ask(engine)
        assert cached == 0
        assert _ask(engine)[1] == FULL // (2 * BLOCK if "block_size" in options else BLOCK) * (
            2 * BLOCK if "block_size" in options else BLOCK
        )
        assert len(answer) == TOKENS
