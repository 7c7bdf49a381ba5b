from __future__ import annotations

import ctypes
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
import pytest

from kitelib.config import SamplingParams
from kitelib.engine.constraints import Constraint, ConstraintFactory
from kitelib.engine.sampling import Sampler
from kitelib.errors import InvalidSamplingError, MissingExtraError
from tests.support.vocabulary import smollm2_gguf

END_IDS = (0, 2, 4)


@pytest.fixture(scope="module")
def vocab_bytes() -> list[bytes]:
    """Bytes of every SmolLM2 token; b"" for special ones."""
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(smollm2_gguf()).encode(), params)
    assert model
    vocab = llama_cpp.llama_model_get_vocab(model)
    buffer = ctypes.create_string_buffer(1024)
    tokens = []
    for token in range(llama_cpp.llama_vocab_n_tokens(vocab)):
        size = llama_cpp.llama_token_to_piece(vocab, token, buffer, len(buffer), 0, False)
        assert size >= 0
        tokens.append(buffer.raw[:size])
    llama_cpp.llama_model_free(model)
    return tokens


@pytest.fixture(scope="module")
def factory(vocab_bytes: list[bytes]) -> ConstraintFactory:
    return ConstraintFactory(vocab_bytes, END_IDS)


def compiled(factory: ConstraintFactory, **options: Any) -> Constraint:
    constraint = factory.compile(SamplingParams(**options))
    assert constraint is not None
    return constraint


def allowed(constraint: Constraint) -> list[int]:
    return np.flatnonzero(constraint.mask()).tolist()


def random_text(constraint: Constraint, vocab_bytes: Sequence[bytes], seed: int, *, limit: int = 400) -> str:
    """What a model that knows nothing writes under the constraint."""
    random = np.random.default_rng(seed)
    params = SamplingParams(temperature=1.0 if seed % 2 else 0.0)
    sampler = Sampler(params, len(vocab_bytes), prompt_ids=(), choice=0, seed=seed)
    data = b""
    for _ in range(limit):
        mask = constraint.mask()
        assert mask.dtype == np.bool_
        assert mask.shape == (len(vocab_bytes),)
        assert mask[list(END_IDS)].tolist() == [constraint.complete] * len(END_IDS)
        logits = random.standard_normal(len(vocab_bytes), dtype=np.float32) * 4
        # The random model is keen to close what is open, or long strings would take the test's time.
        logits[list(END_IDS)] += 12
        token = sampler.sample(logits, mask).token_id
        if token in END_IDS:
            return data.decode()
        data += vocab_bytes[token]
        constraint.advance(token)
        if constraint.finished:
            return data.decode()
    raise AssertionError(f"no end after {limit} tokens: {data!r}")


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "姓名": {"type": "string", "maxLength": 12},
        "city": {"enum": ["北京", "上海", "Zürich 😀"]},
        "age": {"type": "integer", "minimum": 18, "maximum": 130},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 3},
        "account": {
            "type": "object",
            "properties": {"open": {"type": "boolean"}, "note": {"type": ["string", "null"], "maxLength": 5}},
            "required": ["open"],
            "additionalProperties": False,
        },
    },
    "required": ["姓名", "city", "age", "tags", "account"],
    "additionalProperties": False,
}


def assert_fits_schema(value: Any) -> None:
    assert list(value) == ["姓名", "city", "age", "tags", "account"]
    assert isinstance(value["姓名"], str)
    assert len(value["姓名"]) <= 12
    assert value["city"] in SCHEMA["properties"]["city"]["enum"]
    assert type(value["age"]) is int
    assert 18 <= value["age"] <= 130
    assert len(value["tags"]) <= 3
    assert all(isinstance(tag, str) and len(tag) <= 4 for tag in value["tags"])
    account = value["account"]
    assert set(account) <= {"open", "note"}
    assert isinstance(account["open"], bool)
    note = account.get("note")
    assert note is None or len(note) <= 5


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_random_logits_give_json_of_the_schema(
    factory: ConstraintFactory, vocab_bytes: list[bytes], seed: int, as_text: bool
) -> None:
    schema = json.dumps(SCHEMA) if as_text else SCHEMA
    text = random_text(compiled(factory, json_schema=schema), vocab_bytes, seed)
    assert_fits_schema(json.loads(text))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "regex",
    [
        r"[0-9]{3}-[a-z]{2,5}(foo|bar)?",
        r"(yes|no|maybe)",
        r"[\u4e00-\u9fa5]{2,6}，金额[0-9]{1,4}元。",
        r"(😀|é|你){1,5}",
        r"^IBAN [A-Z]{2}[0-9]{2}( [0-9]{4}){2}$",
        r"a*",
    ],
)
def test_random_logits_match_the_regex(
    factory: ConstraintFactory, vocab_bytes: list[bytes], regex: str, seed: int
) -> None:
    assert re.fullmatch(regex, random_text(compiled(factory, regex=regex), vocab_bytes, seed))


def test_choosing_chinese_is_possible(factory: ConstraintFactory, vocab_bytes: list[bytes]) -> None:
    def feed(text: str) -> Constraint:
        constraint = compiled(factory, json_schema=SCHEMA)
        rest = text.encode()
        while rest:
            fitting = [
                token for token in allowed(constraint) if vocab_bytes[token] and rest.startswith(vocab_bytes[token])
            ]
            assert fitting, f"nothing spells the start of {rest!r}"
            token = max(fitting, key=lambda token: len(vocab_bytes[token]))
            constraint.advance(token)
            rest = rest[len(vocab_bytes[token]) :]
        return constraint

    text = json.dumps(
        {"姓名": '王小明"\\', "city": "上海", "age": 30, "tags": ["金", "卡"], "account": {"open": True}},
        ensure_ascii=False,
        indent=2,
    )
    constraint = feed(text)
    assert constraint.finished
    assert allowed(constraint) == list(END_IDS)
    assert not feed(text[:-1]).finished


def test_end_tokens_open_when_complete_and_close_the_text(factory: ConstraintFactory, vocab_bytes: list[bytes]) -> None:
    constraint = compiled(factory, regex="(ab)+")
    a, b = vocab_bytes.index(b"a"), vocab_bytes.index(b"b")
    for _ in range(3):
        assert a in allowed(constraint)
        constraint.advance(a)
        assert not constraint.complete
        assert not set(END_IDS) & set(allowed(constraint))
        constraint.advance(b)
        assert constraint.complete
        assert not constraint.finished
        assert {*END_IDS, a} <= set(allowed(constraint))
    constraint.advance(2)
    assert constraint.finished


def test_forks_and_repeated_compilations_are_independent(factory: ConstraintFactory, vocab_bytes: list[bytes]) -> None:
    first = compiled(factory, regex="[ab]{2}")
    start = first.mask()
    first.advance(vocab_bytes.index(b"a"))
    fork = first.fork()
    first.advance(vocab_bytes.index(b"b"))
    assert first.finished
    assert not fork.finished
    fork.advance(vocab_bytes.index(b"a"))
    assert fork.finished
    np.testing.assert_array_equal(compiled(factory, regex="[ab]{2}").mask(), start)


def test_compiles_in_several_threads(factory: ConstraintFactory, vocab_bytes: list[bytes]) -> None:
    regexes = [f"[a-c]{{{i % 5 + 1}}}" for i in range(20)]

    def run(regex: str) -> str:
        return random_text(compiled(factory, regex=regex), vocab_bytes, 1)

    with ThreadPoolExecutor(4) as pool:
        for regex, text in zip(regexes, pool.map(run, regexes), strict=True):
            assert re.fullmatch(regex, text)


def test_nothing_asked_for_is_no_constraint() -> None:
    assert ConstraintFactory([b"", b"a"], {0}).compile(SamplingParams()) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regex": "(abc"}, r"regex can't be used: .*unclosed group"),
        ({"regex": "(?=a)b"}, r"regex can't be used: .*look-around"),
        ({"json_schema": {"type": "nope"}}, r"json_schema can't be used: .*nope"),
        ({"json_schema": {"not": {"type": "string"}}}, r"json_schema can't be used: .*not"),
        ({"json_schema": {"$ref": "http://example.org/x"}}, r"json_schema can't be used: .*example\.org"),
        ({"json_schema": {"x-guidance": {"whitespace_pattern": 3}}}, r"json_schema can't be used"),
        ({"json_schema": '{"type": '}, r"json_schema is not JSON"),
        ({"json_schema": {"const": {1, 2}}}, r"json_schema is not JSON"),
        ({"json_schema": "true"}, r"json_schema is true; give a JSON object"),
        ({"json_schema": "[1]"}, r"json_schema is \[1\]; give a JSON object"),
    ],
)
def test_errors_name_the_option(factory: ConstraintFactory, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSamplingError, match="(?s)" + message):
        factory.compile(SamplingParams(**options))


@pytest.mark.parametrize("regex", ["ac", "(a|b)c"])
def test_a_dead_end_is_an_error_not_an_answer(regex: str) -> None:
    constraint = compiled(ConstraintFactory([b"", b"a", b"b"], {0}), regex=regex)

    def go_on() -> None:
        while not constraint.finished:
            constraint.advance(allowed(constraint)[0])

    with pytest.raises(InvalidSamplingError, match="regex can't be followed"):
        go_on()


def test_a_token_outside_the_mask_is_refused() -> None:
    constraint = compiled(ConstraintFactory([b"", b"a", b"b"], {0}), regex="ab")
    with pytest.raises(InvalidSamplingError, match="regex"):
        constraint.advance(2)
    assert not constraint.finished


def test_special_tokens_never_spell_text() -> None:
    vocab = [b"</s>", b"a", b"a", b"</s>", b"b"]
    factory = ConstraintFactory(vocab, {0}, special_ids={1, 3})
    factory.prepare()
    constraint = compiled(factory, regex="[ab]{1,2}")
    assert allowed(constraint) == [2, 4]
    constraint.advance(2)
    assert allowed(constraint) == [0, 2, 4]


@pytest.mark.parametrize(
    ("tokenize", "first"),
    [
        (None, 3),  # the longest token
        (lambda text: [1, 2], 1),  # as the model's tokenizer splits it
        (lambda text: [4, 2], 3),  # a tokenizer that adds a space does not spell the text
        (lambda text: [3, 0], 3),
    ],
)
def test_a_forced_text_is_split_as_the_tokenizer_would(tokenize: Callable[[str], list[int]] | None, first: int) -> None:
    vocab = [b"", b"a", b"b", b"ab", b" a"]
    assert allowed(compiled(ConstraintFactory(vocab, {0}, tokenize=tokenize), regex="ab")) == [first]


@pytest.mark.parametrize("vocab_size", [31, 32, 33, 64])
def test_masks_of_any_vocabulary_size(vocab_size: int) -> None:
    vocab = [b""] * (vocab_size - 2) + [b"x", b"y"]
    mask: npt.NDArray[np.bool_] = compiled(ConstraintFactory(vocab, {0}), regex="[xy]").mask()
    assert mask.shape == (vocab_size,)
    assert np.flatnonzero(mask).tolist() == [vocab_size - 2, vocab_size - 1]


def test_endless_white_space_is_not_json(factory: ConstraintFactory, vocab_bytes: list[bytes]) -> None:
    constraint = compiled(factory, json_schema={"type": "object"})
    constraint.advance(vocab_bytes.index(b"{"))
    space = vocab_bytes.index(b" ")
    spaces = 0
    while constraint.mask()[space]:
        constraint.advance(space)
        spaces += 1
        assert spaces < 1000
    assert spaces == 64


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtraError, match=r"json_schema needs .*kitelib\[guided\]"):
        ConstraintFactory([b"", b"a"], {0}).compile(SamplingParams(json_schema={}))
    with pytest.raises(MissingExtraError, match="structured output needs"):
        ConstraintFactory([b"", b"a"], {0}).prepare()


def test_importing_loads_no_llguidance() -> None:
    code = "import sys, kitelib.engine.constraints; sys.exit('llguidance' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
