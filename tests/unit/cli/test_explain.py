"""`kite explain`: the first difference with its cause, what moving it gains, and the figures against a real engine."""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Callable
from pathlib import Path

import anyio.to_thread
import pytest

from kitelib import KiteEngine
from kitelib.cli.explain import Explanation, common_length, explain
from kitelib.cli.prompts import Prompt
from kitelib.cli.screen import LoadProgress
from kitelib.cli.tokens import WordTokens, open_tokens
from tests.support.hf_folders import write_model

RULES = (
    "You answer for a bank. Be brief, polite and exact. Never promise anything that is not in the rules: refunds take "
    "ten days, cards are sent by post, and limits are changed in the app."
)


def chat(clock: str, question: str) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": f"Current time: 2026-11-30T{clock}Z. {RULES}"},
        {"role": "user", "content": question},
    ]


GOLDEN = """\
A has 71 words, B has 71 words; a block has 16.

First difference: word 14, character 37 (counted from 0)
  A  word '14'  in  system: Current time: [2026-11-30T09:14:25Z]. You answer for a bank. Be brie...
  B  word '15'  in  system: Current time: [2026-11-30T09:15:02Z]. You answer for a bank. Be brie...

Cause: a date with a time of day: '2026-11-30T09:14:25Z' in A, '2026-11-30T09:15:02Z' in B.
Remedy: move it behind the fixed part: to the end of the prompt, or into the last message.

The users' own parts:
  canonical signature   A: how do i order 2 cards
                        B: how can i order 2 cards
  structural signature  equal: how to order 2 card
  gates that differ     none

Of B's 71 words, once A was computed:
  from the pool         0 full blocks, 0 words (0%)
  from the context      14 words (20%), while A is there
  after moving          3 full blocks, 48 words (68%), with all volatile parts at the end
"""


@pytest.fixture
def run(kite_here: Callable[..., tuple[int, str, str]]) -> Callable[..., tuple[int, str, str]]:
    return functools.partial(kite_here, "explain")


@pytest.fixture
def chats(tmp_path: Path) -> tuple[str, str]:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    first.write_text(json.dumps({"messages": chat("09:14:25", "How do I order 2 cards?")}))
    second.write_text(json.dumps(chat("09:15:02", "How can I order 2 cards?")))
    return f"@{first}", f"@{second}"


def test_the_report_of_two_conversations(run, chats):
    assert run(*chats) == (0, GOLDEN, "")


def test_the_same_in_json(run, chats):
    code, out, err = run(*chats, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["unit"], found["model"], found["block_size"], found["lengths"]) == ("words", None, 16, [71, 71])
    assert (found["token"], found["character"]) == (14, 37)
    assert found["a"]["volatile"]["kind"] == "timestamp"
    assert found["b"]["volatile"]["text"] == "2026-11-30T09:15:02Z"
    assert found["reuse"] == {"prefix": 14, "blocks": 0, "block_tokens": 0}
    assert found["reuse_after_moving"]["blocks"] == 3


def test_with_a_model_its_tokens_and_its_chat_template_count(run, chats):
    code, out, _ = run(*chats, "--model", "smollm2", "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["unit"], found["block_size"]) == ("tokens", 16)
    assert found["model"].endswith(".gguf")
    assert found["a"]["token"] == "4"  # of 14: SmolLM2 has a token for each digit
    assert found["b"]["token"] == "5"
    assert found["a"]["before"].endswith("system\nCurrent time: ")
    assert found["reuse"]["blocks"] == found["reuse"]["prefix"] // 16


async def test_the_figures_are_what_an_engine_reuses(smollm2_path, tmp_path):
    first, second = chat("09:14:25", "How do I order 2 cards?"), chat("09:15:02", "How can I order 2 cards?")
    async with KiteEngine.open(smollm2_path, n_ctx=512, threads=1, cache_dir=tmp_path) as engine:
        await engine.chat(first, max_tokens=1)
        generation = await engine.chat(second, max_tokens=1)

    def explained() -> Explanation:
        with open_tokens(str(smollm2_path), None, LoadProgress(io.StringIO())) as tokens:
            return explain(Prompt(None, first), Prompt(None, second), tokens)

    found = await anyio.to_thread.run_sync(explained)
    assert generation.usage.prompt_tokens == found.lengths[1]
    assert found.reuse.block_tokens <= generation.usage.cached_tokens <= found.reuse.prefix
    assert generation.usage.cached_tokens > 0


def test_a_model_folder_needs_no_weights(run, chats, tmp_path):
    folder = write_model(tmp_path / "model", "qwen2")
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    code, out, _ = run(*chats, "--model", folder, "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["model"], found["block_size"]) == ("model", 32)  # 32 as the engine does for qwen
    assert found["a"]["volatile"]["text"] == "2026-11-30T09:14:25Z"


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        ("How do I enable it?", "How do I disable it?", ["word ' enable'", "Cause: text of their own", "antonyms"]),
        ("Pay 3 euros", "Pay 4 euros", ["gates that differ     numbers"]),
        ("Hi", "Hi there", ["A  word the end", "B  word ' there'  in  Hi[ there]", "A has 1 word, B has 2 words"]),
        ("request #12 is new", "request #123 is new", ["Cause: a running number: '123' in B. Hardly anything"]),
        (
            f"It is {{{{ now() }}}}. {RULES}",
            f"It is noon. {RULES}",
            ["that was not filled in", "Remedy: fill it in"],
        ),
        ("same", "same", ["The prompts are equal", "100%"]),
        ("怎么转账？", "如何转账", ["equal: ", "word '怎'"]),
        ("@@home", "@@work", ["[home]", "[work]"]),
        ("a\nb", "a\tb", ["a[\\nb]", "a[\\tb]"]),
        ('[{"role": "user", "content": "A?"}]', '[{"role": "user", "content": "B?"}]', ["user: [A?]", "canonical"]),
        ("[1] is a text, not JSON", "[2] is a text", ["[1]]"]),
        ('{"city": "Rome"}', '{"city": "Oslo"}', ['{"city": "[Rome"}]', '{"city": "[Oslo"}]']),
        ("[1, 2]", "[1, 3]", ["[2]]", "[3]]"]),
        ("{{ now }} is open", '[{"price": 3}]', ["[{{ now }}]", '[[{"price":]']),
        ('{"prompt": "[1, 2]"}', '{"prompt": ["[1, 3]"]}', ["[2]]", "[3]]"]),
    ],
)
def test_what_is_said_of_two_texts(run, a, b, words):
    code, out, err = run(a, b)
    assert (code, err) == (0, "")
    assert [word for word in words if word not in out] == []


def test_the_question_alone_decides_the_signatures():
    """Only the user's last message is compared by meaning, never system prompts or earlier turns."""
    turns = [*chat("09:14:25", "Hello"), {"role": "assistant", "content": "Hi!"}]
    first = Prompt(None, [*turns, {"role": "user", "content": "How do I pay?"}])
    second = Prompt(None, [*turns[1:], {"role": "user", "content": [{"type": "text", "text": "how do I PAY"}]}])
    found = explain(first, second, WordTokens())
    assert len(set(found.signatures["canonical"])) == 1
    assert found.token == 0
    assert found.gates == ()


def test_the_size_of_a_block_can_be_given(run):
    text = "one two three four five six"
    _, out, _ = run(text, f"{text} seven", "--block-tokens", 2, "--json")
    assert json.loads(out)["reuse"] == {"prefix": 6, "blocks": 3, "block_tokens": 6}


def test_standard_input_is_one_of_the_prompts(kite):
    done = kite("explain", "-", "Hi there", stdin="Hi")
    assert done.returncode == 0
    assert "B has 2 words" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["@nothing.txt", "x"], "the file 'nothing.txt' can't be read: No such file or directory"),
        (["x", '{"messages": 5}'], "the prompt is no chat: it has a int where a text or a list of messages should be"),
        (["x", '{"messages": []}'], "is no chat: it has an empty list of messages; give JSON such as"),
        (["x", '{"body": {"messages": [{"content": "x"}]}}'], "it has a message without a role at index 0"),
        (["x", '[{"role": "user", "content": 3}]'], "it has a message whose content is a int at index 0"),
        (["x", '{"prompt": [1, 2, 3]}'], "it has token ids, whose text isn't known"),
        (["x", '{"prompt": 5}'], 'or a text that looks like it as {"prompt": "..."}'),
        (["x", '{ "messages": [{"role": "user"'], "the prompt is no chat: Expecting"),
        (["x", ' [{"role": "user", "content": "Hi"'], "the prompt is no chat: Expecting"),
        (["x", "@LOOKS"], "'LOOKS' is no chat: it has a NoneType"),
        (["@/", "x"], "the file '/' can't be read: Is a directory; a text that begins with @ is written with @@"),
        (["", "x"], "the prompt is empty; give some text, or @file"),
        (["x", "@EMPTY"], "is empty"),
        (["x", "@BAD.json"], "BAD.json' is no chat: Expecting"),
        (["x", "@ROLE.json"], "has a message without a role at index 0"),
        (["x", "@BINARY"], "is not UTF-8 text, at byte 0"),
        (["-", "-"], "only one of A and B can be standard input"),
        (["x", "y", "--model", "nothing.gguf"], "there is no model at 'nothing.gguf'"),
    ],
)
def test_mistakes_are_one_sentence_with_a_remedy(run, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    Path("EMPTY").write_text(" \n")
    Path("BAD.json").write_text('{"messages": [')
    Path("ROLE.json").write_text('[{"content": "x"}]')
    Path("LOOKS").write_text('{"messages": null}')
    Path("BINARY").write_bytes(b"\xff\xfe")
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("kite: ")
    assert err.count("\n") == 1
    assert words in err


def test_a_chat_for_a_model_without_a_template_is_refused(run, chats, tmp_path):
    folder = write_model(tmp_path / "model", "llama")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    code, _, err = run(*chats, "--model", folder)
    assert code == 2
    assert "no chat template" in err


def test_help_has_examples(kite):
    done = kite("explain", "--help")
    assert done.returncode == 0
    assert "kite explain @first.json @second.json --model smollm2" in done.stdout.partition("examples:")[2]


@pytest.mark.parametrize(
    ("a", "b", "length"), [("", "", 0), ("a", "", 0), ("abc", "abd", 2), ("ab", "abc", 2), ("xa", "ya", 0)]
)
def test_common_length(a, b, length):
    assert common_length(a, b) == common_length(b, a) == length
    assert common_length(list(a), list(b)) == length
