"""A conversation only appends tokens: every turn goes on from the last, whatever the template makes of the history."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import aclosing
from typing import Any

import pytest

from kitelib import KiteEngine, ReusePolicy
from kitelib.backends.chat_template import ChatTemplate
from kitelib.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    InvalidSamplingError,
    PromptTooLongError,
    UnsupportedOptionError,
)
from tests.support.engines import holder_of_template, until

SYSTEM = "You are the assistant of a bank. Answer in one short sentence."

# Shortens every answer but the last to its first word, as templates do that drop earlier reasoning.
REWRITING = """{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == "assistant" and not loop.last %}{{ m.content.split(" ")[0] }}{% else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# Shows answers as they are, except that it says "Earlier:" before those that are not the last message.
MARKING = REWRITING.replace('m.content.split(" ")[0]', '"Earlier: " + m.content')
FORGETFUL = """{% for m in messages if m.role != "assistant" %}{{ m.content }}
{% endfor %}"""


def use_template(engine: KiteEngine, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.setattr(holder_of_template(engine), "_template", ChatTemplate(source, "", "<|im_end|>"))


async def test_every_turn_appends_and_computes_only_what_is_new(engine: KiteEngine, record: Any) -> None:
    conversation = engine.conversation(SYSTEM, max_tokens=8)
    first = await conversation.send("Hello, who are you?")
    history = list(conversation.token_ids)
    assert history == [*first.prompt_token_ids, *first.token_ids]
    for text in ("What is a cheque?", "And an IBAN? 谢谢 👋"):
        steps = record(engine)
        gen = await conversation.send(text)
        assert gen.prompt_token_ids[: len(history)] == history
        new = len(gen.prompt_token_ids) - len(history)
        # The last token of an answer is never computed for the answer itself.
        assert gen.usage.cached_tokens >= len(history) - 1
        assert steps.tokens <= new + 1 + 8
        history = [*gen.prompt_token_ids, *gen.token_ids]
        assert conversation.token_ids == history
    assert [message["role"] for message in conversation.messages] == ["system", *["user", "assistant"] * 3]
    assert conversation.messages[-1]["content"] == gen.text


async def test_the_tokens_are_those_of_the_template_where_it_keeps_the_history(engine: KiteEngine) -> None:
    conversation = engine.conversation(SYSTEM, max_tokens=12)
    await conversation.send("Hello, who are you?")
    messages = [*conversation.messages, {"role": "user", "content": "What is a cheque?"}]
    expected = await engine.render_chat(messages)
    gen = await conversation.send("What is a cheque?")
    assert backend_text(engine, gen.prompt_token_ids) == expected


def backend_text(engine: KiteEngine, ids: list[int]) -> str:
    return "".join(engine._current.backend.token_text(token) for token in ids)


async def test_a_template_that_rewrites_history_does_not_lose_the_prefix(
    engine: KiteEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B43: the conversation keeps token ids."""
    use_template(engine, monkeypatch, REWRITING)
    conversation = engine.conversation(SYSTEM, max_tokens=10, ignore_eos=True)
    await conversation.send("Tell me about cheques, please.")
    history = list(conversation.token_ids)
    rendered = await engine.tokenize_chat([*conversation.messages, {"role": "user", "content": "Go on."}])
    assert rendered[: len(history)] != history  # the template does rewrite it
    gen = await conversation.send("Go on.")
    assert gen.prompt_token_ids[: len(history)] == history
    assert gen.usage.cached_tokens >= len(history) - 1
    assert backend_text(engine, gen.prompt_token_ids[len(history) :]).count("<|im_start|>") == 2


async def test_text_that_the_template_adds_to_earlier_answers_stays_out(
    engine: KiteEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_template(engine, monkeypatch, MARKING)
    conversation = engine.conversation(SYSTEM, max_tokens=6, ignore_eos=True)
    await conversation.send("Hello")
    gen = await conversation.send("Go on.")
    assert "Earlier" not in backend_text(engine, gen.prompt_token_ids)
    assert gen.usage.cached_tokens >= len(gen.prompt_token_ids) - 20


async def test_a_template_without_answers_can_not_be_continued(
    engine: KiteEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_template(engine, monkeypatch, FORGETFUL)
    conversation = engine.conversation(max_tokens=3)
    await conversation.send("Hello")
    before = (list(conversation.messages), list(conversation.token_ids))
    with pytest.raises(UnsupportedOptionError, match="earlier answers"):
        await conversation.send("Go on.")
    assert (conversation.messages, conversation.token_ids) == before


async def test_a_turn_that_fails_leaves_the_conversation_as_it_was(engine: KiteEngine) -> None:
    conversation = engine.conversation(SYSTEM, max_tokens=5)
    fails: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (InvalidRequestError, "", {}),
        (InvalidSamplingError, "Hi", {"temperature": -1}),
        (InvalidSamplingError, "Hi", {"temprature": 1}),
        (PromptTooLongError, "word " * 600, {}),
        (DeadlineExceededError, "Hi", {"deadline": 1e-9}),
    ]
    for answered in (False, True):
        if answered:
            await conversation.send("Hello")
        before = (list(conversation.messages), list(conversation.token_ids))
        for error, text, options in fails:
            with pytest.raises(error):
                await conversation.send(text, **options)
            with pytest.raises(error):
                async for _ in conversation.stream(text, **options):
                    pass
            assert (conversation.messages, conversation.token_ids) == before
    gen = await conversation.send("Thanks")
    assert gen.prompt_token_ids[: len(before[1])] == before[1]


async def test_a_turn_that_is_cancelled_leaves_the_conversation_as_it_was(engine: KiteEngine, record: Any) -> None:
    conversation = engine.conversation(SYSTEM, max_tokens=200, ignore_eos=True)
    await conversation.send("Hello", max_tokens=5)
    before = (list(conversation.messages), list(conversation.token_ids))
    steps = record(engine)
    turn = asyncio.create_task(conversation.send("Tell me more."))
    await until(steps.reached.is_set)
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    assert (conversation.messages, conversation.token_ids) == before
    async with aclosing(conversation.stream("Tell me more.")) as chunks:
        async for _ in chunks:
            break
    # Closed in order, so the request has already left.
    assert engine.stats()["open_requests"] == 0
    assert (conversation.messages, conversation.token_ids) == before
    assert (await conversation.send("Thanks", max_tokens=2)).usage.cached_tokens >= len(before[1]) - 1


async def test_streamed_turns_are_turns(engine: KiteEngine) -> None:
    sent, streamed = engine.conversation(SYSTEM, max_tokens=6), engine.conversation(SYSTEM, max_tokens=6)
    for text in ("Hello", "What is a cheque?"):
        gen = await sent.send(text)
        chunks = [chunk async for chunk in streamed.stream(text)]
        assert "".join(chunk.text for chunk in chunks) == gen.text
    assert streamed.messages == sent.messages
    assert streamed.token_ids == sent.token_ids


async def test_options_of_a_turn_go_before_those_of_the_conversation(engine: KiteEngine) -> None:
    conversation = engine.conversation(max_tokens=4, ignore_eos=True)
    assert len((await conversation.send("Hello")).token_ids) == 4
    assert len((await conversation.send("Hello", max_tokens=2)).token_ids) == 2


async def test_a_whole_message_can_be_sent(engine: KiteEngine) -> None:
    conversation = engine.conversation(max_tokens=3)
    await conversation.send({"role": "user", "content": "Hello"})
    gen = await conversation.send({"role": "tool", "content": "Balance: 5"})
    assert "<|im_start|>tool\nBalance: 5<|im_end|>" in backend_text(engine, gen.prompt_token_ids)


# Divergence


@pytest.mark.parametrize("position", [0, 1, 15, 16, 17, 40, 69])
async def test_divergence_names_the_position_and_both_tokens(engine: KiteEngine, position: int) -> None:
    known = list(range(100, 170))
    await engine.generate(known, max_tokens=1)
    prompt = [*known[:position], 1234, *known[position + 1 :]]
    gen = await engine.generate(prompt, max_tokens=1)
    if position == 0:
        assert gen.reuse.divergence is None  # nothing in common
        return
    assert gen.reuse.divergence is not None
    text = engine._current.backend.token_text
    assert gen.reuse.divergence.position == position
    assert gen.reuse.divergence.prompt_text == text(1234)
    assert gen.reuse.divergence.cached_text == text(known[position])
    assert gen.usage.cached_tokens == position  # and what is shared is the same


async def test_there_is_no_divergence_where_nothing_diverges(engine: KiteEngine) -> None:
    known = list(range(100, 170))
    gens = [await engine.generate(prompt, max_tokens=1) for prompt in (known, known, known[:50])]
    assert [gen.reuse.divergence for gen in gens] == [None] * 3


async def test_what_is_not_cached_can_not_be_left(engine: KiteEngine) -> None:
    known = list(range(100, 150))
    await engine.generate(known, max_tokens=1, reuse=ReusePolicy(mode="off"))
    assert (await engine.generate([*known, 7], max_tokens=1)).reuse.divergence is None
    await engine.invalidate()
    assert (await engine.generate([*known, 8], max_tokens=1)).reuse.divergence is None


async def test_a_prompt_that_goes_on_after_a_known_one_diverges_where_that_ended(engine: KiteEngine) -> None:
    known = list(range(100, 150))
    first = await engine.generate(known, max_tokens=2, ignore_eos=True)
    answer = first.token_ids
    other = next(token for token in itertools.count(300) if token not in answer)
    gen = await engine.generate([*known, answer[0], other], max_tokens=1)
    assert gen.reuse.divergence is not None
    assert (gen.reuse.divergence.position, gen.reuse.divergence.cached_text) == (
        51,
        engine._current.backend.token_text(answer[1]),
    )
    longer = await engine.generate([*known, *answer, other], max_tokens=1)
    assert longer.reuse.divergence is not None
    assert (longer.reuse.divergence.position, longer.reuse.divergence.cached_text) == (52, "")
