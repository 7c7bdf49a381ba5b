"""Every mistake has its own exception, names what is wrong, and leaves the engine as it was."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kitelib import KiteEngine, PoolConfig, ReusePolicy, SamplingParams
from kitelib.errors import (
    ConfigError,
    EmptyPromptError,
    EngineOverloadedError,
    InvalidRequestError,
    InvalidSamplingError,
    KiteError,
    ModelFormatError,
    ModelNotFoundError,
    PromptTooLongError,
    UnknownAdapterError,
    UnsupportedOptionError,
)
from tests.support.engines import assert_nothing_left, holder_of_template
from tests.support.gguf_files import corrupt_copy, truncated_copy

HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


@asynccontextmanager
async def refused(engine: KiteEngine, error: type[KiteError], match: str) -> AsyncIterator[None]:
    """The block raises `error`; the engine makes no step for it, has nothing left and still works."""
    steps = engine.stats()["steps"]
    with pytest.raises(error, match=match):
        yield
    assert engine.stats()["steps"] == steps
    await assert_nothing_left(engine)
    assert (await engine.generate([10, 11, 12], max_tokens=1)).usage.completion_tokens == 1


# Opening


def model_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "kite-model"}


async def open_fails(error: type[KiteError], match: str, model: Any, **options: Any) -> None:
    tasks, threads, models = asyncio.all_tasks(), threading.active_count(), model_threads()
    with pytest.raises(error, match=match):
        await KiteEngine.open(model, threads=options.pop("threads", 1), **options)
    assert asyncio.all_tasks() == tasks
    assert model_threads() == models
    assert threading.active_count() <= threads + 1  # at most a pooled worker thread


async def test_a_missing_model_file(tmp_path: Path) -> None:
    await open_fails(ModelNotFoundError, r"none\.gguf", tmp_path / "none.gguf")
    with pytest.raises(FileNotFoundError):
        await KiteEngine.open(str(tmp_path / "none.gguf"))


@pytest.mark.parametrize("damage", ["magic", "metadata", "tensor_type"])
async def test_a_corrupt_model_file(tmp_path: Path, tiny_model: Callable[..., Path], damage: Any) -> None:
    path = corrupt_copy(tiny_model("llama"), tmp_path / "bad.gguf", damage=damage)
    await open_fails(ModelFormatError, r"bad\.gguf", path)


@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.5, 0.999])
async def test_a_truncated_model_file(tmp_path: Path, tiny_model: Callable[..., Path], fraction: float) -> None:
    path = truncated_copy(tiny_model("llama"), tmp_path / "cut.gguf", fraction=fraction)
    await open_fails(ModelFormatError, r"cut\.gguf", path)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"backend": "vllm"}, UnsupportedOptionError, "vllm"),
        ({"backend": "lama_cpp"}, ConfigError, "did you mean 'llama_cpp'"),
        ({"dtype": "float32"}, UnsupportedOptionError, "dtype is 'float32'"),
        ({"device": "cuda"}, UnsupportedOptionError, "device is 'cuda'"),
        ({"pool": PoolConfig(redis="http://nowhere")}, ConfigError, "PoolConfig.redis"),
        ({"pool": PoolConfig(s3="http://nowhere")}, ConfigError, "PoolConfig.s3"),
        ({"pool": PoolConfig(stores=("nothing://here",))}, ConfigError, r"PoolConfig.stores\[0\]"),
        ({"n_ctx": 0}, ConfigError, "n_ctx is 0"),
        ({"n_ctx": "large"}, ConfigError, "n_ctx is 'large'"),
        ({"threads": 5000}, ConfigError, "threads is 5000"),
        ({"max_sequences": True}, ConfigError, "max_sequences is True"),
        ({"n_ctx": 10**7}, ConfigError, "n_ctx is 10000000"),
        ({"n_ctx": 256, "kv_tokens": 255}, ConfigError, "kv_tokens is 255"),
        ({"threads": 0}, ConfigError, "threads is 0"),
        ({"max_sequences": 0}, ConfigError, "max_sequences is 0"),
        ({"max_sequences": 64}, ConfigError, "max_sequences is 64"),
        ({"block_tokens": 0}, ConfigError, "block_tokens is 0"),
        ({"max_queue": -1}, ConfigError, "max_queue is -1"),
        ({"max_queue": 1.5}, ConfigError, "max_queue is 1.5"),
        ({"adapters": {"bank": 5}}, ConfigError, "bank"),
        ({"adapters": {"bank": "/nowhere/bank.gguf"}}, ModelNotFoundError, r"bank\.gguf"),
    ],
)
async def test_options_that_do_not_fit(
    tiny_model: Callable[..., Path], cache_dir: Path, options: dict[str, Any], error: type[KiteError], match: str
) -> None:
    await open_fails(error, match, tiny_model("llama"), **{"cache_dir": cache_dir, **options})


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"n_ctx": 10**7}, ConfigError, "n_ctx is 10000000"),
        ({"n_ctx": 256, "kv_tokens": 255}, ConfigError, "kv_tokens is 255"),
        ({"block_tokens": 300}, ConfigError, "block_tokens is 300"),
        ({"dtype": "int4"}, UnsupportedOptionError, "dtype is 'int4'"),
        ({"device": "abacus"}, ConfigError, "device is 'abacus'"),
        ({"adapters": {"bank": 5}}, ConfigError, "bank"),
        ({"adapters": {"bank": "/nowhere/bank"}}, ModelNotFoundError, "/nowhere/bank"),
        ({"backend": "llama_cpp"}, UnsupportedOptionError, "is a folder"),
    ],
)
async def test_options_that_do_not_fit_a_folder(
    hf_model: Callable[..., Path], cache_dir: Path, options: dict[str, Any], error: type[KiteError], match: str
) -> None:
    await open_fails(error, match, hf_model("llama"), **{"cache_dir": cache_dir, **options})


async def test_a_folder_without_a_model(tmp_path: Path) -> None:
    await open_fails(ModelFormatError, "model.safetensors", tmp_path)


async def test_a_damaged_adapter(tmp_path: Path, tiny_model: Callable[..., Path], smollm2_lora: Path) -> None:
    path = truncated_copy(smollm2_lora, tmp_path / "bad_adapter.gguf")
    await open_fails(ModelFormatError, "bad_adapter", tiny_model("llama"), adapters={"bank": path})


# Prompts


@pytest.mark.parametrize("call", ["generate", "stream"])
@pytest.mark.parametrize("source", [{"prompt": ""}, {"prompt": []}, {"prompt": ()}, {"messages": []}])
async def test_an_empty_prompt(engine: KiteEngine, call: str, source: dict[str, Any]) -> None:
    async with refused(engine, EmptyPromptError, "empty"):
        if call == "generate":
            await engine.generate(**source)
        else:
            async for _ in engine.stream(**source):
                pytest.fail("a chunk of nothing")


async def test_a_prompt_longer_than_the_context(open_tiny: Any) -> None:
    async with open_tiny() as engine:
        async with refused(engine, PromptTooLongError, "256 tokens.*at most 255"):
            await engine.generate([7] * 256)
        with pytest.raises(PromptTooLongError) as caught:
            await engine.generate("word " * 3000)
        assert caught.value.num_prompt_tokens > 2999
        assert caught.value.max_prompt_tokens == 255


async def test_the_longest_prompt_has_room_for_one_token(open_tiny: Any) -> None:
    async with open_tiny() as engine:
        gen = await engine.generate([7] * 255, max_tokens=5, ignore_eos=True)
        assert (gen.usage.prompt_tokens, gen.usage.completion_tokens, gen.finish_reason) == (255, 1, "length")


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ({}, "exactly one"),
        ({"prompt": "Hi", "messages": HELLO}, "exactly one"),
        ({"prompt": "Hi", "tools": [TOOL]}, "tools only go with messages"),
        ({"prompt": [1, -1]}, "token id -1"),
        ({"prompt": [1, 49152]}, "token id 49152"),
        ({"prompt": [1.5, 2.0]}, "token ids"),
        ({"prompt": ["1", "2"]}, "token ids"),
        ({"prompt": np.array([[1, 2], [3, 4]])}, "token ids"),
        ({"prompt": 5}, "token ids"),
        ({"prompt": b"Hi"}, "token ids"),
        ({"messages": "Hi"}, "messages must be"),
        ({"messages": ["Hi"]}, r"messages\[0\]"),
        ({"messages": [{"content": "Hi"}]}, r"messages\[0\].*role"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\].*content"),
        ({"prompt": "Hi", "deadline": 0}, "deadline is 0"),
        ({"prompt": "Hi", "deadline": -1.0}, "deadline is -1"),
        ({"prompt": "Hi", "deadline": float("nan")}, "deadline is nan"),
        ({"prompt": "Hi", "deadline": "soon"}, "deadline is 'soon'"),
        ({"prompt": "Hi", "priority": "high"}, "priority is 'high'"),
        ({"prompt": "Hi", "priority": None}, "priority is None"),
        ({"prompt": "Hi", "reuse": "off"}, "reuse is 'off'"),
        ({"prompt": "Hi", "sampling": {"max_tokens": 3}}, "sampling is"),
    ],
)
async def test_arguments_that_make_no_sense(engine: KiteEngine, source: dict[str, Any], match: str) -> None:
    async with refused(engine, InvalidRequestError, match):
        await engine.generate(**source)


async def test_token_ids_may_be_any_integers(engine: KiteEngine) -> None:
    plain = await engine.generate([10, 11, 12], max_tokens=4)
    for prompt in ((10, 11, 12), np.array([10, 11, 12]), np.array([10, 11, 12], np.uint16)):
        gen = await engine.generate(prompt, max_tokens=4)  # type: ignore[arg-type]
        assert gen.token_ids == plain.token_ids
        assert all(type(token) is int for token in gen.prompt_token_ids)


# Sampling


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 2.5),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", float("inf")),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 1.0),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [5]),
        ("stop", 5),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [49152]),
        ("stop_token_ids", 5),
        ("logit_bias", {49152: 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"a": 1.0}),
        ("logit_bias", {5: "much"}),
        ("logit_bias", {5: float("nan")}),
        ("logit_bias", [5]),
        ("logit_bias", None),
        ("logprobs", -1),
        ("logprobs", 101),
        ("n", 0),
        ("n", 9),
        ("json_schema", "{"),
        ("json_schema", "[]"),
        ("json_schema", {"type": "unheard of"}),
        ("json_schema", 5),
        ("regex", "("),
        ("regex", 5),
    ],
)
async def test_sampling_values(engine: KiteEngine, name: str, value: Any) -> None:
    async with refused(engine, InvalidSamplingError, name):
        await engine.generate("Hi", **{name: value})


async def test_json_schema_and_regex_exclude_each_other(engine: KiteEngine) -> None:
    async with refused(engine, InvalidSamplingError, "json_schema and regex"):
        await engine.generate("Hi", json_schema={"type": "object"}, regex="a+")


async def test_an_unknown_option(engine: KiteEngine) -> None:
    async with refused(engine, InvalidSamplingError, "unknown option 'temprature'.*temperature"):
        await engine.generate("Hi", temprature=0.5)
    with pytest.raises(InvalidSamplingError, match="temprature"):
        engine.stream("Hi", temprature=0.5)
    with pytest.raises(InvalidSamplingError, match="temprature"):
        await engine.chat(HELLO, temprature=0.5)


async def test_sampling_options_come_one_way_or_the_other(engine: KiteEngine) -> None:
    async with refused(engine, InvalidSamplingError, "'temperature' are both given"):
        await engine.generate("Hi", sampling=SamplingParams(max_tokens=3), temperature=0.5)


# Policies and adapters


async def test_a_call_may_not_ask_for_more_exactness_than_the_engine_has(open_tiny: Any) -> None:
    standard, bitwise = ReusePolicy(numerics="standard"), ReusePolicy(numerics="bitwise")
    async with open_tiny(reuse=standard) as engine, refused(engine, UnsupportedOptionError, "bitwise"):
        await engine.generate("Hi", reuse=bitwise)


async def test_an_unknown_adapter(engine: KiteEngine) -> None:
    async with refused(engine, UnknownAdapterError, "'bank'.*none"):
        await engine.generate("Hi", adapter="bank")


async def test_a_template_that_ignores_tools_refuses_them(engine: KiteEngine) -> None:
    async with refused(engine, UnsupportedOptionError, "tools"):
        await engine.chat(HELLO, tools=[TOOL])


async def test_a_model_without_a_template_can_not_chat(open_tiny: Any) -> None:
    async with open_tiny() as engine:
        holder_of_template(engine)._template._source = None
        async with refused(engine, UnsupportedOptionError, "no chat template"):
            await engine.chat(HELLO)


async def test_preheat_takes_a_list(engine: KiteEngine) -> None:
    async with refused(engine, InvalidRequestError, "list of prompts"):
        await engine.preheat("Hi")  # type: ignore[arg-type]


# Overload


async def test_overload_is_told_at_once(open_tiny: Any, record: Any) -> None:
    async with open_tiny(max_sequences=1, max_queue=2) as engine:
        steps = record(engine)
        steps.gate.clear()
        calls = [asyncio.create_task(engine.generate([10 + i, 5], max_tokens=2)) for i in range(3)]
        try:
            await asyncio.sleep(0)  # all three are at the gate of the engine
            with pytest.raises(EngineOverloadedError, match="3 requests are open"):
                await engine.generate([20, 5])
            with pytest.raises(EngineOverloadedError):
                await anext(engine.stream([20, 5]))
            assert steps.steps == []  # nobody had to wait for a step to hear it
        finally:
            steps.gate.set()
        assert [gen.usage.completion_tokens for gen in await asyncio.gather(*calls)] == [2, 2, 2]
        assert (await engine.generate([20, 5], max_tokens=1)).usage.completion_tokens == 1
        await assert_nothing_left(engine)
