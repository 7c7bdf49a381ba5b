"""Wordings: a question finds the stored wording with its signature, and nothing that a store made up."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kitelib.abc import Store
from kitelib.config import PoolConfig
from kitelib.errors import FormatError
from kitelib.fingerprint import derived_fingerprint, end_fingerprint
from kitelib.runtime.supervisor import Supervisor
from kitelib.runtime.threads import ThreadDoor
from kitelib.stores.pool import RUPool
from kitelib.stores.registry import open_stores
from kitelib.testing import Fault, FaultyStore
from kitelib.upcycle.unit import RecyclableUnit
from kitelib.yoco.canonical import tables_digest
from kitelib.yoco.wordings import MAX_TEXT_BYTES, Question, Wording, Wordings, question_of
from tests.support.units import INFO, ROOT

TOKENS = [1, 2, 3, 9]
REST = bytes(32)
STORED = Question("How do I change my PIN?", REST)
OTHER_WORDING = Question("hello, how can i change my pin", REST)


def chat(text: Any, *before: dict[str, Any], **keys: Any) -> list[dict[str, Any]]:
    return [*before, {"role": "user", "content": text, **keys}]


# What the question of a chat is


def test_everything_but_the_last_text_belongs_to_the_rest() -> None:
    system = {"role": "system", "content": "You are a bank."}
    first = question_of(chat("What is a PIN?", system), None)
    assert first is not None
    assert first.text == "What is a PIN?"
    others = [
        question_of(chat("what's a pin", system), None),
        question_of(chat("What is a PIN?"), None),
        question_of(chat("What is a PIN?", {**system, "content": "you are a bank"}), None),
        question_of(chat("What is a PIN?", system, name="Ann"), None),
        question_of(chat("What is a PIN?", system), [{"name": "f"}]),
        question_of(chat("What is a PIN?", system, {"role": "tool", "content": "5"}), None),
        question_of(chat("What is a PIN?", system, {"role": "tool", "content": "6"}), None),
        question_of(chat([{"type": "text", "text": "What is a PIN?"}], system), None),
        question_of(chat([{"type": "text", "text": "What is a PIN?", "cache": True}], system), None),
    ]
    assert all(each is not None for each in others)
    same, *different = [each for each in others if each is not None]
    assert same.rest == first.rest
    assert same.digest("structural") != first.digest("canonical")
    assert len({first.rest, *(each.rest for each in different)}) == 1 + len(different)


def test_signatures_share_a_digest_and_levels_do_not() -> None:
    assert STORED.digest("structural") == OTHER_WORDING.digest("structural")
    assert STORED.digest("canonical") != OTHER_WORDING.digest("canonical")
    assert STORED.digest("canonical") == Question("how do i change my pin", REST).digest("canonical")
    assert STORED.digest("canonical") != STORED.digest("structural")
    assert STORED.digest("canonical") != Question(STORED.text, b"r" * 32).digest("canonical")


def test_other_tables_give_other_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    before = STORED.digest("canonical")
    monkeypatch.setattr("kitelib.yoco.wordings.tables_digest", lambda: bytes(32))
    assert tables_digest() != bytes(32)
    assert STORED.digest("canonical") != before


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "text",
        {},
        5,
        [5],
        [{"role": "assistant", "content": "hi"}],
        chat(None),
        chat(""),
        chat("  \n"),
        chat([]),
        chat([{"type": "image_url", "image_url": "x"}]),
        chat([{"type": "text", "text": "x"}, {"type": "image_url"}]),
        chat([{"type": "text", "text": 5}]),
        chat(["x"]),
        chat("x", {"role": "tool", "content": object()}),
        chat("x", {5: "no text"}),  # type: ignore[dict-item]
        chat("x" * (MAX_TEXT_BYTES + 1)),
    ],
)
def test_a_chat_without_a_plain_question_has_none(messages: Any) -> None:
    assert question_of(messages, None) is None


def test_endless_nesting_is_no_question() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    assert question_of(chat("x", {"role": "tool", "content": nested}), None) is None
    while nested:  # else it is taken apart recursively
        nested = nested.pop()


# What is found


def make_pool(**options: Any) -> RUPool:
    return RUPool(PoolConfig(**{"memory_bytes": 10**7, **options}), ThreadDoor())


def unit(
    question: Question = STORED, tokens: Sequence[int] = TOKENS, *, epoch: int = 0, root: bytes = ROOT
) -> RecyclableUnit:
    return Wordings(make_pool(), INFO).unit(root, question, "structural", tokens, epoch=epoch)


async def found(
    units: Sequence[RecyclableUnit], question: Question = OTHER_WORDING, root: bytes = ROOT
) -> Wording | None:
    pool = make_pool()
    await pool.put_units(units, pool.epoch, ROOT)
    return await Wordings(pool, INFO).find(root, question, "structural")


async def test_another_wording_finds_the_stored_one() -> None:
    assert await found([unit()]) == Wording(STORED.text, tuple(TOKENS), "memory")
    assert await found([unit()], STORED) == Wording(STORED.text, tuple(TOKENS), "memory")


@pytest.mark.parametrize("text", ["x", "abcd", "怎么还款", "what \ud800", "ab\0"])
async def test_texts_of_every_length_come_back(text: str) -> None:
    question = Question(text, REST)
    assert await found([unit(question)], question) == Wording(text, tuple(TOKENS), "memory")


@pytest.mark.parametrize(
    "question",
    [
        Question("How do I change your PIN?", REST),
        Question("How do I not change my PIN?", REST),
        Question(STORED.text, b"x" * 32),
    ],
)
async def test_other_questions_find_nothing(question: Question) -> None:
    """B47: nothing but the same question finds an entry."""
    assert await found([unit()], question) is None


async def test_levels_and_namespaces_are_apart() -> None:
    pool = make_pool()
    wordings = Wordings(pool, INFO)
    await pool.put_units([unit()], pool.epoch, ROOT)
    assert await wordings.find(ROOT, STORED, "structural")
    assert await wordings.find(ROOT, STORED, "canonical") is None
    assert await wordings.find(b"o" * 32, STORED, "structural") is None
    other_model = dataclasses.replace(INFO, model_state=b"x" * 32)
    assert await Wordings(pool, other_model).find(ROOT, STORED, "structural") is None


async def test_a_cleared_pool_forgets_wordings() -> None:
    pool = make_pool()
    await pool.put_units([unit(epoch=0)], pool.epoch, ROOT)
    pool.epoch = 1
    assert await Wordings(pool, INFO).find(ROOT, STORED, "structural") is None


def forged(data: Sequence[int], **changes: Any) -> RecyclableUnit:
    array = np.array(data, np.uint32)
    return dataclasses.replace(unit(), data=array.view(np.uint8), shape=(len(array),), **changes)


TEXT_WORDS = [23, *np.frombuffer(STORED.text.encode() + b"\0", "<u4").tolist()]


@pytest.mark.parametrize(
    "wrong",
    [
        forged([]),
        forged([0]),
        forged([0, 5]),
        forged([2**32 - 1, 5, 5]),
        forged([24, *TEXT_WORDS[1:]]),  # no token is left
        forged(TEXT_WORDS),
        forged([*TEXT_WORDS, INFO.vocab_size]),
        forged([*TEXT_WORDS, *[1] * (INFO.context_tokens + 1)]),
        forged([*TEXT_WORDS[:-1], TEXT_WORDS[-1] | 0xFF000000, 1]),  # padding is not zero
        forged([4, 0xFFFFFFFF, 1]),  # no UTF-8
        forged([4, int.from_bytes(b"what", "little"), 1]),  # another question
        forged([*TEXT_WORDS, 1], dtype="int32"),
        forged([*TEXT_WORDS, 1], layout="kite.completion"),
    ],
    ids=range(13),
)
async def test_a_hostile_unit_is_a_miss(wrong: RecyclableUnit) -> None:
    assert await found([wrong]) is None
    assert await found([forged([*TEXT_WORDS, 1])]) == Wording(STORED.text, (1,), "memory")


async def test_a_damaged_value_is_a_miss() -> None:
    pool = make_pool()
    key, value = pool.encode(unit())
    pool.memory.put(key, value[:-5] + bytes([value[-5] ^ 1]) + value[-4:])
    assert await Wordings(pool, INFO).find(ROOT, STORED, "structural") is None


@contextlib.asynccontextmanager
async def on_disk(folder: Path) -> AsyncIterator[RUPool]:
    supervisor = Supervisor()
    supervisor.start()
    pool = make_pool(memory_bytes=0, disk=str(folder))
    try:
        await pool.start(supervisor)
        await pool.use_model(INFO.model_state)
        yield pool
        await pool.drain()
    finally:
        await supervisor.aclose()
        await pool.aclose()


async def test_a_wording_survives_a_restart_and_names_its_tier(tmp_path: Path) -> None:
    async with on_disk(tmp_path) as pool:
        await pool.put_units([unit()], pool.epoch, ROOT)
    async with on_disk(tmp_path) as pool:
        found = await Wordings(pool, INFO).find(ROOT, OTHER_WORDING, "structural")
        assert found == Wording(STORED.text, tuple(TOKENS), "disk")


FAULTS = [Fault("fail"), Fault("delay", 30.0), Fault("corrupt"), Fault("truncate"), Fault("lose")]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.kind)
async def test_a_failing_tier_is_a_miss(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: Fault) -> None:
    async with on_disk(tmp_path) as pool:
        await pool.put_units([unit()], pool.epoch, ROOT)

    def faulty(config: PoolConfig) -> list[tuple[str, Store]]:
        schedule = lambda operation, _: fault if operation == "get_many" else None  # noqa: E731
        return [(name, FaultyStore(store, schedule)) for name, store in open_stores(config)]

    monkeypatch.setattr("kitelib.stores.pool.open_stores", faulty)
    async with on_disk(tmp_path) as pool:
        assert await Wordings(pool, INFO).find(ROOT, STORED, "structural") is None


async def test_a_unit_never_collides_with_a_completion() -> None:
    made = unit()
    assert made.parent == derived_fingerprint(ROOT, "wording", STORED.digest("structural"))
    assert made.cf == end_fingerprint(made.parent, [])
    assert made.cf != end_fingerprint(ROOT, [])
    assert made.kind == "completion"


def test_too_long_a_question_makes_no_unit() -> None:
    with pytest.raises(FormatError, match="longer than the 4096 that are kept"):
        unit(Question("x" * (MAX_TEXT_BYTES + 1), REST))
