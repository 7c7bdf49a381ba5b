"""`compute_computation_fingerprint` and `preheat_ru_pool`: their fingerprints are those under which an engine keeps
things, and everything that changes a computation changes them."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from kitelib import (
    EmptyPromptError,
    EngineClosedError,
    InvalidRequestError,
    KiteEngine,
    ModelFormatError,
    ModelNotFoundError,
    PoolConfig,
    ReusePolicy,
    UnknownAdapterError,
)
from kitelib.fingerprint import block_fingerprints, encode_fields, end_fingerprint, root_fingerprint
from kitelib.upcycle import preheat_ru_pool
from kitelib.upcycle.unit import RecyclableUnit
from kitelib.yoco import FingerprintParts, compute_computation_fingerprint, fingerprint_parts
from kitelib.yoco.canonical import normalise, signature, tables_digest
from kitelib.yoco.fingerprints import Level

TEXT = "The opening hours of the branch in Rome are from nine to five, 你好 🙂."
SECRET = b"hunter2-hunter2-hunter2"
MODEL: dict[str, Any] = {"model_state": bytes(range(32))}
RUNTIME: dict[str, Any] = {"backend": "b", "block_tokens": 4}
PROMPT = list(range(1, 11))


@pytest.fixture(scope="module")
async def engine(
    smollm2_path: Path, smollm2_lora: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[KiteEngine]:
    async with KiteEngine.open(
        smollm2_path,
        n_ctx=512,
        threads=1,
        max_sequences=4,
        adapters={"style": str(smollm2_lora)},
        pool=PoolConfig(namespace_secret=SECRET),
        cache_dir=tmp_path_factory.mktemp("cache"),
    ) as opened:
        yield opened


async def kept(engine: KiteEngine, cf: str) -> dict[str, RecyclableUnit]:
    return {unit.kind: unit for unit in await engine.pool.get_rus_by_cf(bytes.fromhex(cf))}


# The same as the engine's


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 32, 40])
async def test_is_what_the_engine_keeps_a_prompt_under(engine: KiteEngine, num_tokens: int) -> None:
    prompt = [1000 + num_tokens, *range(20, 20 + num_tokens - 1)]
    cf = compute_computation_fingerprint(prompt, *engine.fingerprint_configs())
    assert await kept(engine, cf) == {}
    await preheat_ru_pool(engine, [prompt])
    units = await kept(engine, cf)
    logits = units["logits"]
    assert logits.cf.hex() == cf
    assert logits.data.view(np.float32).shape == (engine._current.backend.info.vocab_size,)
    # The tail past the last full block is kept under the same fingerprint; a prompt of whole blocks has none.
    assert ("kv" in units) == (num_tokens % 16 != 0)
    assert [unit.kind for unit in await engine.pool.get_rus_by_cf(cf)] == list(units)


async def test_a_text_is_tokenized_as_the_engine_does(engine: KiteEngine) -> None:
    model_config, runtime_config = engine.fingerprint_configs()
    cf = compute_computation_fingerprint(TEXT, model_config, runtime_config)
    assert cf == compute_computation_fingerprint(await engine.tokenize(TEXT), model_config, runtime_config)
    await engine.generate(TEXT, max_tokens=1)
    await engine.flush()
    assert "logits" in await kept(engine, cf)


@pytest.mark.parametrize(("namespace", "adapter"), [("tenant", None), (None, "style"), ("tenant", "style")])
async def test_tenants_and_adapters_have_their_own(
    engine: KiteEngine, namespace: str | None, adapter: str | None
) -> None:
    policy = ReusePolicy(namespace=namespace)
    prompt = [3000 + len(f"{namespace}{adapter}"), *range(30, 60)]
    cf = compute_computation_fingerprint(prompt, *engine.fingerprint_configs(reuse=policy, adapter=adapter))
    plain = compute_computation_fingerprint(prompt, *engine.fingerprint_configs())
    await preheat_ru_pool(engine, [prompt], reuse=policy, adapter=adapter)
    assert "logits" in await kept(engine, cf)
    assert await kept(engine, plain) == {}


async def test_a_model_file_stands_for_its_state(engine: KiteEngine, smollm2_path: Path, tmp_path: Path) -> None:
    model_config, runtime_config = engine.fingerprint_configs()
    expected = compute_computation_fingerprint(PROMPT, model_config, runtime_config)
    link = tmp_path / "other name.gguf"
    link.symlink_to(smollm2_path)

    def by_path() -> str:
        return compute_computation_fingerprint(PROMPT, {"path": link}, runtime_config)

    assert await anyio.to_thread.run_sync(by_path) == expected
    assert (
        compute_computation_fingerprint(PROMPT, {"model_state": model_config["model_state"].hex()}, runtime_config)
        == expected
    )


async def test_configs_are_plain_but_do_not_show_the_secret(engine: KiteEngine) -> None:
    model_config, runtime_config = engine.fingerprint_configs(adapter="style")
    assert runtime_config["namespace_secret"] == SECRET
    assert "hunter2" not in f"{runtime_config} {runtime_config['namespace_secret']}"
    without = {**runtime_config, "namespace_secret": None}
    assert compute_computation_fingerprint(PROMPT, model_config, without) != compute_computation_fingerprint(
        PROMPT, model_config, runtime_config
    )


async def test_configs_of_an_unknown_adapter_or_a_closed_engine(
    engine: KiteEngine, tiny_model: Any, tmp_path: Path
) -> None:
    with pytest.raises(UnknownAdapterError, match="no adapter is called 'stile'; this engine has: style"):
        engine.fingerprint_configs(adapter="stile")
    async with KiteEngine.open(tiny_model("llama"), n_ctx=256, threads=1, cache_dir=tmp_path) as other:
        assert "namespace_secret" not in other.fingerprint_configs()[1]
        assert other.fingerprint_configs()[0]["model_state"] != engine.fingerprint_configs()[0]["model_state"]
    with pytest.raises(EngineClosedError):
        other.fingerprint_configs()


async def test_reloading_other_weights_changes_the_configs(tiny_model: Any, tmp_path: Path) -> None:
    async with KiteEngine.open(tiny_model("llama"), n_ctx=256, threads=1, cache_dir=tmp_path) as engine:
        before = compute_computation_fingerprint(PROMPT, *engine.fingerprint_configs())
        await engine.reload(tiny_model("llama", seed=2))
        assert compute_computation_fingerprint(PROMPT, *engine.fingerprint_configs()) != before


@pytest.mark.parametrize("cf", ["", "ab", b"", b"abc", "ab" * 33])
async def test_part_of_a_fingerprint_finds_nothing_but_an_error(engine: KiteEngine, cf: Any) -> None:
    with pytest.raises(InvalidRequestError, match="give 64, or 32 bytes"):
        await engine.pool.get_rus_by_cf(cf)


async def test_preheating_gives_what_the_engine_gives(engine: KiteEngine) -> None:
    prompt = [4000, *range(40, 70)]
    first = await preheat_ru_pool(engine, [prompt])
    assert first == {"tiers": {}, "hot_units": 0, "prompts": 1, "prompt_tokens": 31, "computed_tokens": 31}
    # The second time the first token comes from the logits that were kept.
    assert await engine.preheat([prompt]) == {"prompts": 1, "prompt_tokens": 31, "computed_tokens": 0}
    with pytest.raises(InvalidRequestError, match="list of prompts"):
        await preheat_ru_pool(engine, "text")


# What it covers


def test_is_the_end_of_the_block_chain() -> None:
    root = root_fingerprint(MODEL["model_state"], RUNTIME, None)
    blocks = block_fingerprints(root, PROMPT, 4)
    assert compute_computation_fingerprint(PROMPT, MODEL, RUNTIME) == end_fingerprint(blocks[-1], PROMPT[8:]).hex()


def test_everything_that_changes_a_computation_changes_it() -> None:
    digest = hashlib.sha256(b"adapter").digest()
    other = {"model_state": bytes(32)}
    seen = [
        compute_computation_fingerprint(*arguments)
        for arguments in [
            (PROMPT, MODEL, RUNTIME),
            (PROMPT[:-1], MODEL, RUNTIME),
            (PROMPT[:8], MODEL, RUNTIME),
            ([*PROMPT[:-1], 99], MODEL, RUNTIME),
            (PROMPT, other, RUNTIME),
            (PROMPT, MODEL, {**RUNTIME, "backend": "c"}),
            (PROMPT, MODEL, {**RUNTIME, "block_tokens": 5}),
            (PROMPT, MODEL, {"backend": "b"}),
            (PROMPT, MODEL, {**RUNTIME, "threads": 1}),
            (PROMPT, MODEL, {**RUNTIME, "namespace": "a"}),
            (PROMPT, MODEL, {**RUNTIME, "namespace": ""}),
            (PROMPT, MODEL, {**RUNTIME, "namespace": "a", "namespace_secret": b"s"}),
            (PROMPT, MODEL, {**RUNTIME, "adapter": (digest, 1.0)}),
            (PROMPT, MODEL, {**RUNTIME, "adapter": (digest, 0.5)}),
        ]
    ]
    assert len(set(seen)) == len(seen)
    assert all(len(cf) == 64 and bytes.fromhex(cf) for cf in seen)


def test_forms_of_the_same_arguments_give_the_same() -> None:
    digest = hashlib.sha256(b"adapter").digest()
    runtime = {**RUNTIME, "adapter": (digest, 1), "namespace": None, "namespace_secret": None}
    same = [
        compute_computation_fingerprint(PROMPT, MODEL, runtime),
        compute_computation_fingerprint(np.array(PROMPT), MODEL, dict(reversed(runtime.items()))),
        compute_computation_fingerprint(tuple(PROMPT), {"model_state": MODEL["model_state"].hex()}, runtime),
        compute_computation_fingerprint(PROMPT, MODEL, {**runtime, "adapter": [digest.hex(), 1.0]}),
        compute_computation_fingerprint("x", {**MODEL, "tokenizer": lambda text: PROMPT}, runtime),
    ]
    assert len(set(same)) == 1


# Levels of texts


@pytest.fixture(scope="module")
def with_tokenizer() -> dict[str, Any]:
    return {**MODEL, "tokenizer": lambda text: list(text.encode())}


def test_none_is_exact_where_tokens_can_be_had_and_canonical_elsewhere(with_tokenizer: dict[str, Any]) -> None:
    of = compute_computation_fingerprint
    ids = list(TEXT.encode())
    assert (
        of(TEXT, with_tokenizer, RUNTIME) == of(TEXT, with_tokenizer, RUNTIME, level="exact") == of(ids, MODEL, RUNTIME)
    )
    assert of(ids, MODEL, RUNTIME) == of(ids, MODEL, RUNTIME, level="exact")
    assert of(TEXT, MODEL, RUNTIME) == of(TEXT, MODEL, RUNTIME, level="canonical")
    assert of(TEXT, MODEL, RUNTIME) == of(TEXT, with_tokenizer, RUNTIME, level="canonical")


def test_no_level_equals_another(with_tokenizer: dict[str, Any]) -> None:
    text = "balance of account"  # the same in canonical and in structural form
    levels: list[Level] = ["exact", "canonical", "structural"]
    seen = {compute_computation_fingerprint(text, with_tokenizer, RUNTIME, level=level) for level in levels}
    assert len(seen) == 3
    assert len({fingerprint_parts(text, with_tokenizer, RUNTIME, level=level).prompt for level in levels}) == 3


@pytest.mark.parametrize(
    ("level", "a", "b", "equal"),
    [
        ("canonical", "How do I pay?", "how do i PAY", True),
        ("canonical", "How do I pay?", "Ｈｏｗ do I\n\tpay？", True),
        ("canonical", "<p>How do I <b>pay</b>?</p>", "How do I pay?", True),
        ("canonical", "## How do I **pay**?", "How do I pay?", True),
        ("canonical", "How do I pay 3 euros?", "How do I pay 4 euros?", False),
        ("canonical", "How do I enable it?", "How do I disable it?", False),
        ("canonical", "怎么转账？", "如何转账", True),
        ("canonical", "深圳到上海", "上海到深圳", False),
        ("structural", "What is the way to pay?", "How can I pay?", True),
        ("structural", "How do I pay?", "How do you pay?", False),
        ("canonical", "How do you pay?", "How do I pay?", False),
        ("canonical", "<b></b>", "<i></i>", False),
        ("canonical", "!!!", "???", False),
    ],
)
def test_texts_that_say_the_same_share_a_text_level(level: Level, a: str, b: str, equal: bool) -> None:
    first, second = (compute_computation_fingerprint(text, MODEL, RUNTIME, level=level) for text in (a, b))
    assert (first == second) is equal


def test_of_long_texts_the_middle_counts_as_it_is() -> None:
    head, tail = "word " * 600, "end " * 600
    texts = [head + middle + tail for middle in ("one, " * 50, "ONE,  " * 50, "one " * 50, "two, " * 50, "one, " * 51)]
    first, same, *others = (compute_computation_fingerprint(text, MODEL, RUNTIME) for text in texts)
    assert first == same  # `normalise` has folded case and white space before it is cut
    assert first not in others


def test_everything_else_enters_text_levels_too() -> None:
    digest = hashlib.sha256(b"adapter").digest()
    seen = [
        compute_computation_fingerprint("Hello there", *arguments)
        for arguments in [
            (MODEL, RUNTIME),
            ({"model_state": bytes(32)}, RUNTIME),
            (MODEL, {**RUNTIME, "backend": "c"}),
            (MODEL, {**RUNTIME, "namespace": "a"}),
            (MODEL, {**RUNTIME, "namespace": "a", "namespace_secret": b"s"}),
            (MODEL, {**RUNTIME, "adapter": (digest, 1.0)}),
        ]
    ]
    assert len(set(seen)) == len(seen)


def test_other_tables_are_another_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    before = (
        compute_computation_fingerprint("Hello", MODEL, RUNTIME),
        compute_computation_fingerprint(PROMPT, MODEL, RUNTIME),
    )
    monkeypatch.setattr("kitelib.yoco.canonical.tables_digest", lambda: bytes(32))
    after = (
        compute_computation_fingerprint("Hello", MODEL, RUNTIME),
        compute_computation_fingerprint(PROMPT, MODEL, RUNTIME),
    )
    assert before[0] != after[0]
    assert before[1] == after[1]


async def test_a_text_level_finds_nothing_in_an_engine(engine: KiteEngine) -> None:
    """It is for people and tools: what is kept for the very same text is kept under the exact one."""
    prompt = "Where is the nearest branch of the bank, please?"
    await preheat_ru_pool(engine, [prompt])
    configs = engine.fingerprint_configs()
    assert "logits" in await kept(engine, compute_computation_fingerprint(prompt, *configs))
    assert await kept(engine, compute_computation_fingerprint(prompt, *configs, level="canonical")) == {}


# Parts


def test_the_part_that_differs_shows() -> None:
    base = fingerprint_parts(PROMPT, MODEL, RUNTIME)
    assert base.level == "exact"
    assert base.model_state == MODEL["model_state"].hex()
    others: list[tuple[str, Any]] = [
        ("prompt", (PROMPT[:-1], MODEL, RUNTIME)),
        ("model_state", (PROMPT, {"model_state": bytes(32)}, RUNTIME)),
        ("model_state", (PROMPT, MODEL, {**RUNTIME, "adapter": (bytes(32), 1.0)})),
        ("execution_path", (PROMPT, MODEL, {**RUNTIME, "backend": "c"})),
        ("execution_path", (PROMPT, MODEL, {**RUNTIME, "block_tokens": 8})),
        ("execution_path", (PROMPT, MODEL, {**RUNTIME, "namespace": "a"})),
        ("execution_path", (PROMPT, MODEL, {**RUNTIME, "namespace_secret": b"s"})),
    ]
    for name, arguments in others:
        other = fingerprint_parts(*arguments)
        differing = [
            each for each in ("prompt", "model_state", "execution_path") if getattr(base, each) != getattr(other, each)
        ]
        assert differing == [name]
        assert compute_computation_fingerprint(*arguments) != compute_computation_fingerprint(PROMPT, MODEL, RUNTIME)
    assert fingerprint_parts(np.array(PROMPT), MODEL, {**RUNTIME, "namespace": None}) == base


def test_parts_do_not_show_the_secret() -> None:
    assert "hunter2" not in str(fingerprint_parts(PROMPT, MODEL, {**RUNTIME, "namespace_secret": SECRET}))


# The same in every process and on every machine

GOLDEN_RUNTIME = {"backend": "llama_cpp", "block_tokens": 16, "flash": False, "namespace": "shop"}
GOLDEN_EXACT = "e4da14c3f28806ade744165b1deb3cbcf1d7d88e0a40549e9f79112ce1f752c0"
GOLDEN_PARTS = FingerprintParts(
    "exact",
    "1447502026d200c573d7d665f459fce4ebabf68c015a6f62362a05a05396cd68",
    "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f",
    "845316ef8aa7eb0d5415bc1653169d09259711ddd8ba082b130a792189b27081",
)


def test_golden_values() -> None:
    prompt = list(range(2000))
    assert compute_computation_fingerprint(prompt, MODEL, GOLDEN_RUNTIME) == GOLDEN_EXACT
    assert fingerprint_parts(prompt, MODEL, GOLDEN_RUNTIME) == GOLDEN_PARTS


@pytest.mark.parametrize("level", ["canonical", "structural"])
def test_golden_text_is_its_signature_under_the_tables(level: Level) -> None:
    """Tables change with releases, and the fingerprint with them; what it is made of does not."""
    root = root_fingerprint(MODEL["model_state"], {"backend": "b", "block_tokens": 4}, None)
    fields = encode_fields(
        "kite.cf.derived", root, "text", level, tables_digest(), signature(normalise("How do I <b>pay</b>?"), level)
    )
    expected = hashlib.sha256(fields).hexdigest()
    assert compute_computation_fingerprint("How do I <b>pay</b>?", MODEL, RUNTIME, level=level) == expected


def test_other_processes_say_the_same() -> None:
    code = (
        "from kitelib.yoco import compute_computation_fingerprint as f; m = {'model_state': bytes(range(32))}; "
        "print([f(p, m, {'backend': 'b'}, level=l) for p, l in (('How do I pay?', 'canonical'), ('怎么转账？', 'structural'), "
        "([1, 2, 3], 'exact'))])"
    )
    said = {
        subprocess.run(
            [sys.executable, "-X", "utf8", "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1


# Mistakes


@pytest.mark.parametrize(
    ("prompt", "model", "runtime", "message"),
    [
        ("text", {**MODEL, "tokenizer": "gpt2"}, RUNTIME, r"model_config\['tokenizer'\] is 'gpt2'"),
        ([1.5], MODEL, RUNTIME, "token ids have type float64"),
        ([{"role": "user", "content": "x"}], MODEL, RUNTIME, "token ids have type object"),
        ([-1], MODEL, RUNTIME, "a token id is -1"),
        (PROMPT, {}, RUNTIME, "exactly one of 'model_state' and 'path'"),
        (PROMPT, {**MODEL, "path": "x.gguf"}, RUNTIME, "exactly one of 'model_state' and 'path'"),
        (PROMPT, {"path": 3}, RUNTIME, r"model_config\['path'\] is 3"),
        (PROMPT, {"model_stat": b""}, RUNTIME, "unknown key 'model_stat'; did you mean 'model_state'"),
        (PROMPT, {"model_state": b"short"}, RUNTIME, r"model_config\['model_state'\] is b'short'; give 32 bytes or"),
        (PROMPT, {"model_state": "zz" * 32}, RUNTIME, r"give 32 bytes or their hexadecimal digits"),
        (PROMPT, {"model_state": 7}, RUNTIME, r"model_config\['model_state'\] is 7"),
        (PROMPT, "model.gguf", RUNTIME, "model_config is a str; give a mapping"),
        (PROMPT, MODEL, None, "runtime_config is a NoneType; give a mapping"),
        (PROMPT, MODEL, {"block_tokens": 0}, r"runtime_config\['block_tokens'\] is 0"),
        (PROMPT, MODEL, {"block_tokens": True}, r"runtime_config\['block_tokens'\] is True"),
        (PROMPT, MODEL, {"namespace": 5}, r"runtime_config\['namespace'\] is 5; give a str, or None"),
        (PROMPT, MODEL, {"namespace_secret": "s"}, r"runtime_config\['namespace_secret'\] is a str; give bytes"),
        (PROMPT, MODEL, {"adapter": "style"}, r"runtime_config\['adapter'\] is 'style'; give a pair"),
        (PROMPT, MODEL, {"adapter": (bytes(32), "1")}, r"the scale in runtime_config\['adapter'\] is '1'"),
        (PROMPT, MODEL, {"adapter": (b"x", 1)}, r"the digest in runtime_config\['adapter'\] is b'x'"),
        (PROMPT, MODEL, {"x": object()}, "a fingerprint field is <object"),
    ],
)
def test_a_mistake_is_told_by_name(prompt: Any, model: Any, runtime: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        compute_computation_fingerprint(prompt, model, runtime)


@pytest.mark.parametrize(
    ("prompt", "level", "message"),
    [
        ("text", "exact", "exact fingerprints cover token ids; give those, or a model_config with 'tokenizer'"),
        (PROMPT, "canonical", "level is 'canonical', but the prompt is token ids; give its text, or 'exact'"),
        ("text", "semantic", "level is 'semantic'; give one of 'exact', 'canonical', 'structural', or None"),
        (PROMPT, 1, "level is 1; give one of"),
    ],
)
def test_a_wrong_level_is_told(prompt: Any, level: Any, message: str) -> None:
    for function in (compute_computation_fingerprint, fingerprint_parts):
        with pytest.raises(InvalidRequestError, match=message):
            function(prompt, MODEL, RUNTIME, level=level)


def test_no_token_is_an_empty_prompt() -> None:
    for prompt, model in (([], MODEL), ("", {**MODEL, "tokenizer": lambda text: []}), ("", MODEL), (" \n", MODEL)):
        with pytest.raises(EmptyPromptError):
            compute_computation_fingerprint(prompt, model, RUNTIME)


def test_a_path_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        compute_computation_fingerprint(PROMPT, {"path": tmp_path / "none.gguf"}, RUNTIME)
    (tmp_path / "text.gguf").write_text("hello")
    with pytest.raises(ModelFormatError):
        compute_computation_fingerprint(PROMPT, {"path": str(tmp_path / "text.gguf")}, RUNTIME)


def test_importing_it_loads_no_model_library() -> None:
    heavy = ("llama_cpp", "kitelib.backends.llama_cpp", "kitelib.engine", "torch")
    code = f"import sys, kitelib.yoco, kitelib.upcycle; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
