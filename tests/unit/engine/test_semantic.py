"""``mode="semantic"``: a question that was asked in other words is answered with what is stored for those."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kitelib import ConfigError, KiteEngine, PoolConfig, ReusePolicy, UnsupportedOptionError
from kitelib.backends.chat_template import ChatTemplate
from tests.support.answers import answer, evict_to_pool
from tests.support.backends import BackendKit
from tests.support.engines import holder_of_template, until

SYSTEM = {"role": "system", "content": "You are the assistant of a bank. Cards are free. We open at nine."}
SEMANTIC = ReusePolicy(mode="semantic")
STRUCTURAL = ReusePolicy(mode="semantic", level="structural")
FIRST = "How do I block my card?"
SAME = "hello, how do i block my card"
FOLDED = "What is the way to block my card?"


def chat(question: str, system: dict[str, str] = SYSTEM) -> list[dict[str, str]]:
    return [system, {"role": "user", "content": question}]


@pytest.fixture
async def engine(kit: BackendKit, cache_dir: Path) -> AsyncIterator[KiteEngine]:
    async with KiteEngine.open(kit.text(), n_ctx=512, threads=1, cache_dir=cache_dir) as opened:
        yield opened


async def ask(engine: KiteEngine, question: str, policy: ReusePolicy = SEMANTIC, **options: Any) -> Any:
    messages = options.pop("messages", chat(question))
    return await engine.chat(messages, **{"max_tokens": 6, "reuse": policy, **options})


async def asked_first(engine: KiteEngine, policy: ReusePolicy = SEMANTIC) -> Any:
    gen = await ask(engine, FIRST, policy)
    assert gen.reuse.wording is None
    await engine.flush()
    return gen


async def test_another_wording_gets_the_stored_answer(engine: KiteEngine) -> None:
    first = await asked_first(engine)
    gen = await ask(engine, SAME)
    assert gen.reuse.wording == FIRST
    assert gen.reuse.exactness == "approximate"
    assert gen.prompt_token_ids == first.prompt_token_ids
    assert (gen.text, gen.usage.cached_tokens) == (first.text, first.usage.prompt_tokens)
    assert gen.reuse.zero_prefill
    assert "another wording" in gen.reuse.note


async def test_only_where_it_was_asked_for(engine: KiteEngine) -> None:
    await asked_first(engine)
    for policy in (ReusePolicy(), ReusePolicy(mode="off")):
        gen = await ask(engine, SAME, policy)
        assert gen.reuse.wording is None
        assert gen.reuse.exactness == "bitwise"


async def test_levels(engine: KiteEngine) -> None:
    await asked_first(engine)
    assert (await ask(engine, FOLDED)).reuse.wording is None
    await engine.invalidate()
    await asked_first(engine)
    assert (await ask(engine, FOLDED, STRUCTURAL)).reuse.wording == FIRST


@pytest.mark.parametrize(
    "other",
    [
        chat("How do I unblock my card?"),
        chat("How do you block my card?"),
        chat("How do I not block my card?"),
        chat("How do I block my 2 cards?"),
        chat(SAME, {"role": "system", "content": SYSTEM["content"].upper()}),
        chat(SAME, {"role": "system", "content": SYSTEM["content"].replace("nine", "ten")}),
        [SYSTEM, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hi."}, chat(SAME)[1]],
        [*chat(SAME), {"role": "assistant", "content": "You can"}],
    ],
    ids=[
        "opposite",
        "person",
        "negation",
        "number",
        "case of the system prompt",
        "system prompt",
        "history",
        "no question",
    ],
)
async def test_what_is_not_the_same_is_computed(engine: KiteEngine, other: Sequence[dict[str, str]]) -> None:
    """Everything around the question must be the same to the byte (B47)."""
    await asked_first(engine)
    gen = await ask(engine, "", STRUCTURAL, messages=other)
    assert gen.reuse.wording is None
    assert gen.reuse.exactness == "bitwise"
    assert answer(gen) == answer(await ask(engine, "", ReusePolicy(mode="off"), messages=other))


async def test_plain_prompts_are_never_changed(engine: KiteEngine) -> None:
    await engine.generate(FIRST, max_tokens=4, reuse=STRUCTURAL)
    await engine.flush()
    gen = await engine.generate(FIRST.lower(), max_tokens=4, reuse=STRUCTURAL)
    assert gen.reuse.wording is None


async def test_tenants_have_their_own_wordings(engine: KiteEngine) -> None:
    await asked_first(engine)
    gen = await ask(engine, SAME, ReusePolicy(mode="semantic", namespace="other"))
    assert gen.reuse.wording is None


async def test_a_wording_whose_units_are_gone_is_not_used(engine: KiteEngine) -> None:
    """Computing the stored wording would save nothing: then better what was asked."""
    await asked_first(engine)
    await evict_to_pool(engine)
    gone = [key for key in engine.pool.memory.keys() if ":kv:" in key or ":logits:" in key]  # noqa: SIM118
    assert gone
    for key in gone:
        engine.pool.memory.delete(key)
    gen = await ask(engine, SAME)
    assert gen.reuse.wording is None
    assert gen.reuse.exactness == "bitwise"


async def test_its_own_units_go_first(engine: KiteEngine) -> None:
    exact = await ask(engine, SAME, ReusePolicy())
    await asked_first(engine)
    gen = await ask(engine, SAME)
    assert gen.reuse.wording is None
    assert gen.prompt_token_ids == exact.prompt_token_ids


async def test_invalidate_forgets_wordings(engine: KiteEngine) -> None:
    await asked_first(engine)
    await engine.invalidate()
    assert (await ask(engine, SAME)).reuse.wording is None


async def test_together_with_stored_completions(engine: KiteEngine) -> None:
    policy = ReusePolicy(mode="semantic", completions=True)
    first = await asked_first(engine, policy)
    before = engine.stats()["steps"]
    gen = await ask(engine, SAME, policy)
    assert engine.stats()["steps"] == before
    assert (gen.text, gen.reuse.wording, gen.reuse.completion) == (first.text, FIRST, True)
    assert gen.reuse.exactness == "approximate"


async def test_another_engine_finds_the_wording_on_disk(kit: BackendKit, cache_dir: Path, tmp_path: Path) -> None:
    pool = PoolConfig(disk=str(tmp_path))
    for expected in (None, FIRST):
        async with KiteEngine.open(kit.text(), n_ctx=512, threads=1, cache_dir=cache_dir, pool=pool) as engine:
            if expected is None:
                await asked_first(engine)
                continue
            await engine.pool.warm()
            gen = await ask(engine, SAME)
            assert gen.reuse.wording in (expected, None)  # a tier that was never read may be slower than computing


DATED = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}It is DAY.\nassistant: "


async def test_a_template_that_renders_something_else_today(
    engine: KiteEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As templates do that show the date: the messages are the same, the prompt is not."""

    def today(day: str) -> None:
        template = ChatTemplate(DATED.replace("DAY", day), "", "<|im_end|>")
        monkeypatch.setattr(holder_of_template(engine), "_template", template)

    today("Monday")
    await asked_first(engine)
    assert (await ask(engine, SAME)).reuse.wording == FIRST
    today("Tuesday")
    gen = await ask(engine, SAME)
    assert (gen.reuse.wording, gen.reuse.exactness) == (None, "bitwise")
    await engine.flush()
    assert (await ask(engine, FIRST.upper())).reuse.wording == SAME  # which stands for the question from now on


async def test_a_message_of_several_parts(engine: KiteEngine) -> None:
    def parts(*texts: str) -> list[dict[str, Any]]:
        return [SYSTEM, {"role": "user", "content": [{"type": "text", "text": text} for text in texts]}]

    await ask(engine, "", messages=parts(FIRST))
    await ask(engine, "", messages=parts("How do I", "block my card?"))
    await engine.flush()
    assert (await ask(engine, "", messages=parts(SAME))).reuse.wording == FIRST
    assert (await ask(engine, "", messages=parts("how do i", "block my card"))).reuse.wording is None


async def test_many_at_once(engine: KiteEngine) -> None:
    await asked_first(engine)
    wordings = [SAME, SAME.upper(), f"{FIRST}!!", f"please, {FIRST}", "How do I block my cards"] * 4
    found = await asyncio.gather(*(ask(engine, each) for each in wordings))
    assert {gen.reuse.wording for gen in found} <= {FIRST, None}
    assert sum(gen.reuse.wording == FIRST for gen in found) >= 8


@pytest.mark.usefixtures("eager_drafts")
async def test_another_wording_is_a_guess_for_exact_requests(engine: KiteEngine) -> None:
    """The answer to the same question is verified token by token, so it may come from any wording."""
    await ask(engine, FIRST, ReusePolicy(), max_tokens=16)
    gen = await ask(engine, FOLDED, ReusePolicy(), max_tokens=16)
    assert gen.reuse.drafts["canonical"].proposed > 0
    assert gen.reuse.exactness == "bitwise"
    assert answer(gen) == answer(await ask(engine, FOLDED, ReusePolicy(mode="off"), max_tokens=16))


class Bag:
    """An encoder of our own: counts of letters."""

    name, dimensions, num_bytes = "letters", 26, 0

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails

    def encode(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        if self.fails:
            raise RuntimeError("out of order")
        rows = np.array([[text.lower().count(chr(97 + k)) for k in range(26)] for text in texts], np.float32)
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)


async def test_answers_are_kept_with_the_vectors_of_their_questions(kit: BackendKit, cache_dir: Path) -> None:
    """The vector comes beside the request, so not in time for the shortest ones."""
    encoder = Bag()
    async with KiteEngine.open(kit.text(), n_ctx=512, threads=1, cache_dir=cache_dir, encoder=encoder) as own:
        first = await ask(own, FIRST, ReusePolicy(), max_tokens=40, ignore_eos=True)
        serving = own._current
        kept = serving.scheduler.drafting._library._roots[serving.root(own.reuse, None)].records
        near = kept.near(encoder.encode(["Which way do I block this card?"])[0])
        assert [[ord(character) for character in text] for _, text in near] == [first.token_ids]
        assert near[0][0] > 0.8
        assert own.stats()["matching"]["encoder_bytes"] == 0


async def test_a_failing_encoder_is_a_miss(kit: BackendKit, cache_dir: Path) -> None:
    policy = ReusePolicy(mode="semantic", neighbours=True)
    options: dict[str, Any] = {"n_ctx": 512, "threads": 1, "cache_dir": cache_dir, "encoder": Bag(fails=True)}
    async with KiteEngine.open(kit.text(), **options) as engine:
        for question in (FIRST, "Something else?"):
            gen = await ask(engine, question, policy)
            assert gen.reuse.exactness == "bitwise"
        assert (await ask(engine, SAME, policy)).reuse.wording in (FIRST, None)


async def test_neighbours_need_an_encoder(engine: KiteEngine) -> None:
    with pytest.raises(UnsupportedOptionError, match="encoder='use'"):
        await ask(engine, FIRST, ReusePolicy(mode="semantic", neighbours=True))


@pytest.mark.parametrize("encoder", ["bert", 3, ["use"], object()], ids=str)
async def test_unknown_encoders_are_refused(kit: BackendKit, cache_dir: Path, encoder: Any) -> None:
    with pytest.raises(ConfigError, match="'use'"):
        await KiteEngine.open(kit.text(), threads=1, cache_dir=cache_dir, encoder=encoder)


async def test_a_judge_that_can_not_be_asked_is_asked_once(
    engine: KiteEngine, kit: BackendKit, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template that refuses system messages, as Gemma's does."""
    refusing = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ m.content }}\n{% endfor %}"
    policy = ReusePolicy(mode="semantic", neighbours=True)
    async with KiteEngine.open(kit.text(), n_ctx=512, threads=1, cache_dir=cache_dir, encoder=Bag()) as own:
        monkeypatch.setattr(holder_of_template(own), "_template", ChatTemplate(refusing, "", "<|im_end|>"))
        asked: list[str] = []
        matcher = own._current.matcher
        monkeypatch.setattr(matcher, "_spawn", lambda name, job: (asked.append(name), spawn(name, job)))
        spawn = own._current.spawn
        for question in ("One?", "Two?", "Three?"):
            await own.chat([{"role": "user", "content": question}], max_tokens=2, reuse=policy)
            await until(lambda: own.stats()["matching"]["judge"] != "")
        assert asked.count("qualify") == 1
        assert "no system" in own.stats()["matching"]["judge"]
