"""What the options of a request do, on a real model; what they cost is counted in model steps, never timed."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from typing import Any

import numpy as np
import pytest

from kitelib import KiteEngine, ReusePolicy, SamplingParams
from kitelib.abc import StepWork
from tests.support.engines import until

COUNT = "1 2 3 4 5 6 7 8 9"
OFF = ReusePolicy(mode="off")

# About what SmolLM2 says; the random model that other backends are tested with says nothing of the kind.
on_smollm2 = pytest.mark.parametrize("kit", ["llama_cpp"], indirect=True)


async def test_max_tokens(engine: KiteEngine) -> None:
    for count in (1, 2, 7):
        gen = await engine.generate(COUNT, max_tokens=count)
        assert (len(gen.token_ids), gen.usage.completion_tokens, gen.finish_reason) == (count, count, "length")
    assert gen.text == engine._current.backend.detokenize(gen.token_ids).decode()


@on_smollm2
async def test_the_model_is_the_one_that_was_asked_for(engine: KiteEngine) -> None:
    assert (await engine.generate(COUNT, max_tokens=7)).text.startswith(" 10 11")


async def test_options_come_as_keywords_or_as_one_object(engine: KiteEngine) -> None:
    options = {"max_tokens": 12, "temperature": 0.9, "seed": 5}
    first = await engine.generate(COUNT, **options)
    second = await engine.generate(COUNT, sampling=SamplingParams(**options))
    assert first.token_ids == second.token_ids


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.05}])
async def test_a_seed_gives_the_same_text_again_and_another_seed_another(
    engine: KiteEngine, options: dict[str, Any]
) -> None:
    texts = []
    for seed in (1, 1, 2, 3):
        gen = await engine.generate("Once upon a time", max_tokens=12, temperature=1.0, seed=seed, **options)
        texts.append(tuple(gen.token_ids))
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3


async def test_without_a_seed_texts_differ(engine: KiteEngine) -> None:
    gens = [await engine.generate("Once upon a time", max_tokens=12, temperature=1.5) for _ in range(2)]
    assert gens[0].token_ids != gens[1].token_ids


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 0.0}])
async def test_only_the_most_likely_token_left_is_greedy(engine: KiteEngine, options: dict[str, Any]) -> None:
    greedy = await engine.generate(COUNT, max_tokens=8)
    gen = await engine.generate(COUNT, max_tokens=8, **{"temperature": 2.0, "seed": 3, **options})
    assert gen.token_ids == greedy.token_ids


@on_smollm2
@pytest.mark.parametrize(
    "penalty", [{"repetition_penalty": 1.8}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0}]
)
async def test_penalties_make_a_repeating_text_change(engine: KiteEngine, penalty: dict[str, float]) -> None:
    prompt = "la la la la"  # goes on as -100000000000000
    plain = await engine.generate(prompt, max_tokens=16)
    penalized = await engine.generate(prompt, max_tokens=16, **penalty)
    assert len(set(penalized.token_ids)) > len(set(plain.token_ids))


# Stopping


async def test_stop_strings_end_the_text_before_them(engine: KiteEngine) -> None:
    plain = await engine.generate(COUNT, max_tokens=20)
    stop = engine._current.backend.detokenize(plain.token_ids[10:12]).decode()
    gen = await engine.generate(COUNT, max_tokens=20, stop=[stop, "never"])
    assert gen.finish_reason == "stop"
    assert gen.text == plain.text[: plain.text.index(stop)] != ""
    assert (await engine.generate(COUNT, max_tokens=20, stop=stop)).text == gen.text


async def test_a_stop_string_is_found_across_tokens(engine: KiteEngine) -> None:
    plain = await engine.generate(COUNT, max_tokens=20)
    pieces = [engine._current.backend.detokenize([token]).decode() for token in plain.token_ids]
    # From the middle of the text: the end of one token, all of the next, the start of the one after.
    start = len("".join(pieces[:6])) - 1
    stop = plain.text[start : start + len(pieces[6]) + 2]
    assert all(stop not in piece for piece in pieces)
    gen = await engine.generate(COUNT, max_tokens=20, stop=stop)
    assert (gen.text, gen.finish_reason) == (plain.text[: plain.text.index(stop)], "stop")
    streamed = [chunk.text async for chunk in engine.stream(COUNT, max_tokens=20, stop=stop)]
    assert "".join(streamed) == gen.text


@pytest.mark.parametrize("answer", ["🎉🎊🎈🚀🌍", "敝帚自珍饕餮"])
async def test_a_stop_string_inside_characters_of_several_tokens(engine: KiteEngine, answer: str) -> None:
    plain = await engine.generate("Answer: ", max_tokens=40, regex=answer)
    assert plain.text == answer
    assert len(plain.token_ids) > len(answer)  # characters do span tokens here
    gen = await engine.generate("Answer: ", max_tokens=40, regex=answer, stop=answer[2:4])
    assert (gen.text, gen.finish_reason) == (answer[:2], "stop")
    chunks = [chunk async for chunk in engine.stream("Answer: ", max_tokens=40, regex=answer, stop=[answer[2:4], "x"])]
    assert "".join(chunk.text for chunk in chunks) == answer[:2]


async def test_stop_token_ids(engine: KiteEngine) -> None:
    plain = await engine.generate(COUNT, max_tokens=12)
    token = plain.token_ids[5]
    cut = plain.token_ids.index(token)
    gen = await engine.generate(COUNT, max_tokens=12, stop_token_ids=[token], logprobs=0)
    assert (gen.token_ids, gen.finish_reason) == (plain.token_ids[:cut], "stop")
    assert gen.logprobs is not None
    assert len(gen.logprobs) == cut


@on_smollm2
async def test_ignore_eos_goes_on_after_the_end(engine: KiteEngine) -> None:
    chat = [{"role": "user", "content": "Say only: ok"}]
    short = await engine.generate(messages=chat, max_tokens=40)
    assert short.finish_reason == "stop"
    long = await engine.generate(messages=chat, max_tokens=len(short.token_ids) + 4, ignore_eos=True)
    assert long.finish_reason == "length"
    assert long.token_ids[: len(short.token_ids)] == short.token_ids
    assert long.token_ids[len(short.token_ids)] in engine._current.backend.info.end_token_ids


# Logits


async def test_logit_bias_forces_and_forbids_tokens(engine: KiteEngine) -> None:
    forced = await engine.generate(COUNT, max_tokens=3, logit_bias={1234: 1000.0})
    assert forced.token_ids == [1234] * 3
    plain = await engine.generate(COUNT, max_tokens=3)
    without = await engine.generate(COUNT, max_tokens=3, logit_bias={plain.token_ids[0]: float("-inf")})
    assert without.token_ids[0] != plain.token_ids[0]


async def test_logprobs_are_those_of_the_model(engine: KiteEngine, record: Any) -> None:
    gen = await engine.generate(
        COUNT, max_tokens=3, logprobs=4, temperature=1.5, seed=1, logit_bias={1234: 5.0}, ignore_eos=True
    )
    assert gen.logprobs is not None
    assert len(gen.logprobs) == 3
    tokens = [*gen.prompt_token_ids, *gen.token_ids]
    for index, found in enumerate(gen.logprobs):
        logits = (await raw_logits(engine, tokens[: len(gen.prompt_token_ids) + index])).astype(np.float64)
        expected = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        best = np.argsort(-expected)[:4].tolist()
        assert set(found) == {*best, gen.token_ids[index]}
        assert list(found)[:4] == best
        assert all(abs(value - expected[token]) < 1e-4 for token, value in found.items())


async def raw_logits(engine: KiteEngine, tokens: list[int]) -> np.ndarray:
    """Logits after the tokens, straight from the backend, in a sequence of their own."""
    backend = engine._current.backend
    found: list[np.ndarray] = []

    def work() -> int:
        sequence = backend.create()
        (logits,) = backend.step([StepWork(sequence, tokens, 0, True)]).logits
        found.append(logits.copy())
        backend.release(sequence)
        return 0

    await engine._current.on_model_thread(work)
    return found[0]


async def test_logprobs_zero_gives_the_chosen_token_alone(engine: KiteEngine) -> None:
    gen = await engine.generate(COUNT, max_tokens=4, logprobs=0)
    assert gen.logprobs is not None
    assert [list(each) for each in gen.logprobs] == [[token] for token in gen.token_ids]
    assert (await engine.generate(COUNT, max_tokens=4)).logprobs is None


# Several choices


async def test_n_choices_share_the_prompt_and_differ(engine: KiteEngine) -> None:
    options: dict[str, Any] = {"max_tokens": 10, "temperature": 1.0, "seed": 7}
    gen = await engine.generate("Once upon a time", n=3, **options)
    assert len(gen.choices) == 3
    assert len({tuple(choice.token_ids) for choice in gen.choices}) == 3
    assert gen.usage.completion_tokens == sum(len(choice.token_ids) for choice in gen.choices)
    assert (gen.text, gen.token_ids, gen.finish_reason) == (
        gen.choices[0].text,
        gen.choices[0].token_ids,
        gen.choices[0].finish_reason,
    )
    # Choice i only depends on (seed, i): fewer choices are the first of more.
    for count in (1, 2):
        fewer = await engine.generate("Once upon a time", n=count, **options)
        assert fewer.choices == gen.choices[:count]
    again = await engine.generate("Once upon a time", n=3, reuse=OFF, **options)
    assert again.choices == gen.choices


async def test_streamed_choices_are_told_apart(engine: KiteEngine) -> None:
    options: dict[str, Any] = {"max_tokens": 6, "temperature": 1.0, "seed": 7, "n": 3}
    gen = await engine.generate("Once upon a time", **options)
    texts, tokens, reasons = [""] * 3, [[], [], []], [None] * 3  # type: ignore[var-annotated]
    chunks = [chunk async for chunk in engine.stream("Once upon a time", **options)]
    for chunk in chunks:
        texts[chunk.index] += chunk.text
        tokens[chunk.index] += chunk.token_ids
        reasons[chunk.index] = reasons[chunk.index] or chunk.finish_reason
    assert texts == [choice.text for choice in gen.choices]
    assert tokens == [choice.token_ids for choice in gen.choices]
    assert reasons == [choice.finish_reason for choice in gen.choices]
    assert [chunk.generation is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].generation is not None
    assert chunks[-1].generation.choices == gen.choices


# Structured output


async def test_json_schema(engine: KiteEngine) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 150}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    for given in (schema, json.dumps(schema)):
        gen = await engine.generate("A person as JSON: ", json_schema=given, max_tokens=80, temperature=1.0, seed=4)
        assert gen.finish_reason == "stop"
        value = json.loads(gen.text)
        assert set(value) == {"name", "age"}
        assert isinstance(value["age"], int)
        assert value["age"] <= 150


async def test_regex(engine: KiteEngine) -> None:
    pattern = r"IBAN [A-Z]{2}\d{4}( \d{4}){2}"
    gen = await engine.generate("My account: ", regex=pattern, max_tokens=60, temperature=1.5, seed=2, n=2)
    for choice in gen.choices:
        assert re.fullmatch(pattern, choice.text)
        assert choice.finish_reason == "stop"


async def test_a_constraint_holds_for_other_scripts(engine: KiteEngine) -> None:
    gen = await engine.generate("你好", regex="(你好|世界|🎉){3}", max_tokens=60, temperature=1.0, seed=1)
    assert re.fullmatch("(你好|世界|🎉){3}", gen.text)


# Text


@pytest.mark.parametrize(
    "prompt", ["你好，世界！你好，世界！你好", "😀😁😀😁😀😁😀😁", "Grüße aus Köln: ä ö ü ß, ä ö ü", COUNT]
)
async def test_a_stream_is_the_text_in_whole_characters(engine: KiteEngine, prompt: str) -> None:
    gen = await engine.generate(prompt, max_tokens=24)
    chunks = [chunk async for chunk in engine.stream(prompt, max_tokens=24)]
    assert "".join(chunk.text for chunk in chunks) == gen.text
    assert [token for chunk in chunks for token in chunk.token_ids] == gen.token_ids
    assert all("\ufffd" not in chunk.text for chunk in chunks)
    assert chunks[-1].generation is not None
    assert chunks[-1].generation.text == gen.text
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == gen.finish_reason


@on_smollm2
async def test_a_text_cut_inside_a_character_ends_before_it(engine: KiteEngine) -> None:
    prompt = "😀😁😀😁😀😁😀😁"
    whole = await engine.generate(prompt, max_tokens=24)
    lengths = set()
    for count in range(1, 8):
        gen = await engine.generate(prompt, max_tokens=count)
        assert "\ufffd" not in gen.text
        assert whole.text.startswith(gen.text)
        lengths.add(len(gen.text))
    assert len(lengths) < 7  # some ended inside a character


async def test_prompts_in_any_script_come_back_from_their_tokens(engine: KiteEngine) -> None:
    for text in ("你好，世界", "🎉👩‍👩‍👧‍👦", "Привет", "مرحبا"):
        gen = await engine.generate(text, max_tokens=1)
        assert engine._current.backend.detokenize(gen.prompt_token_ids).decode() == text


# Chat


CHAT = [{"role": "system", "content": "You are a bank's assistant."}, {"role": "user", "content": "你好 👋"}]


async def test_chat_is_the_rendered_prompt(engine: KiteEngine) -> None:
    gen = await engine.chat(CHAT, max_tokens=8)
    rendered = await engine.render_chat(CHAT)
    assert rendered.endswith("<|im_start|>assistant\n")
    assert gen.prompt_token_ids == await engine.tokenize(rendered, add_special=False)
    assert gen.token_ids == (await engine.generate(messages=CHAT, max_tokens=8)).token_ids


async def test_chat_streams_with_and_without_await(engine: KiteEngine) -> None:
    gen = await engine.chat(CHAT, max_tokens=8)
    plain = [chunk.text async for chunk in engine.chat(CHAT, stream=True, max_tokens=8)]
    awaited = [chunk.text async for chunk in await engine.chat(CHAT, stream=True, max_tokens=8)]
    assert "".join(plain) == "".join(awaited) == gen.text


async def test_a_chat_stream_can_be_closed(engine: KiteEngine) -> None:
    stream = engine.chat(CHAT, stream=True, max_tokens=200, ignore_eos=True)
    async for _ in stream:
        break
    await stream.aclose()
    await until(lambda: engine.stats()["open_requests"] == 0 and engine.stats()["running"] == 0)


async def test_results_are_plain_data(engine: KiteEngine) -> None:
    gen = await engine.chat(CHAT, max_tokens=4, logprobs=2, n=2)
    json.dumps(dataclasses.asdict(gen))
    json.dumps(engine.stats())


async def test_concurrent_requests_keep_their_own_options(engine: KiteEngine) -> None:
    plain = await engine.generate(COUNT, max_tokens=9)
    prompts: dict[str, dict[str, Any]] = {
        "plain": {},
        "forced": {"logit_bias": {1234: 1000.0}},
        "short": {"max_tokens": 2},
        "stop": {"stop": engine._current.backend.detokenize(plain.token_ids[4:6]).decode()},
    }
    alone = {name: await engine.generate(COUNT, **{"max_tokens": 9, **each}) for name, each in prompts.items()}
    together = await asyncio.gather(*(engine.generate(COUNT, **{"max_tokens": 9, **each}) for each in prompts.values()))
    assert [gen.token_ids for gen in together] == [gen.token_ids for gen in alone.values()]
    assert len({tuple(gen.token_ids) for gen in together}) == 4
