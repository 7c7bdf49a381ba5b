"""Prompts of bundles and files of them: what is accepted, and what an error says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kitelib.engine.bundle_prompts import BundlePrompt, as_bundle_prompt, read_prompts, unmarked_parts
from kitelib.errors import InvalidRequestError

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
OPEN_CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "{{question}}"}]
TOOLS = [{"type": "function", "function": {"name": "open_window"}}]


def written(folder: Path, *lines: Any) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines), encoding="utf-8")
    return path


def test_every_form_of_a_line(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        json.dumps("plain text with {{braces}}"),
        "",
        [1, 2, 3],
        {"prompt": "text", "hits": 12.5, "completion": 8},
        "   ",
        {"prompt": [4, 5], "adapter": "de"},
        {"messages": CHAT, "tools": TOOLS},
        {"template": "Answer: {{question}}"},
        {"template": OPEN_CHAT, "tools": TOOLS, "hits": 3},
    )
    found = read_prompts(path)
    assert [(each.prompt, each.messages, each.tools, each.varying) for each in found] == [
        ("plain text with {{braces}}", None, None, False),
        ([1, 2, 3], None, None, False),
        ("text", None, None, False),
        ([4, 5], None, None, False),
        (None, CHAT, TOOLS, False),
        ("Answer: {{question}}", None, None, True),
        (None, OPEN_CHAT, TOOLS, True),
    ]
    assert [(each.hits, each.completion, each.adapter) for each in found] == [
        (1.0, None, None),
        (1.0, None, None),
        (12.5, 8, None),
        (1.0, None, "de"),
        (1.0, None, None),
        (1.0, None, None),
        (3, None, None),
    ]
    assert [each.source for each in found] == [f"{path}, line {number}" for number in (1, 3, 4, 6, 7, 8, 9)]


def test_a_byte_order_mark_and_windows_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'\xef\xbb\xbf"one"\r\n\r\n"two"\r\n')
    assert [each.prompt for each in read_prompts(path)] == ["one", "two"]


BAD_LINES: list[tuple[Any, str]] = [
    ({"promt": "x"}, "the key 'promt' is unknown; did you mean 'prompt'?"),
    ({"prompt": "x", "hit": 3}, "the key 'hit' is unknown; did you mean 'hits'?"),
    ({"prompt": "x", "messages": CHAT}, "it has 'prompt' and 'messages'; give exactly one of"),
    ({"hits": 3}, "it has none of the keys; give exactly one of 'prompt', 'messages', 'template'"),
    ({"prompt": "x", "hits": 0}, "hits is 0; give a number above 0"),
    ({"prompt": "x", "hits": True}, "hits is True"),
    ({"prompt": "x", "hits": None}, "the key 'hits' is null"),
    ({"prompt": None}, "the key 'prompt' is null"),
    ({"prompt": "x", "completion": -1}, "completion is -1"),
    ({"prompt": "x", "completion": 1.5}, "completion is 1.5"),
    ({"prompt": "x", "adapter": 3}, "adapter is 3"),
    ({"prompt": "x", "tools": TOOLS}, "tools only go with messages"),
    ({"messages": CHAT, "tools": {"name": "x"}}, "tools is {'name': 'x'}; give a list of objects"),
    ({"prompt": ""}, "the prompt is empty"),
    ({"prompt": [1, "x"]}, "give a text or a list of token ids"),
    ({"prompt": [1, -2]}, "give a text or a list of token ids"),
    ({"prompt": [1, True]}, "give a text or a list of token ids"),
    ({"messages": []}, "messages is []"),
    ({"messages": "hello"}, "messages is 'hello'"),
    ({"messages": [{"content": "x"}]}, "messages[0] is {'content': 'x'}; give an object with 'role'"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content is 7"),
    ({"template": "no mark"}, "a template has no marked part"),
    ({"template": "{{now()}}"}, "a template has '{{now()}}', which marks no varying part"),
    ({"template": [1, 2]}, "messages[0] is 1"),
    ({"template": "x {{y}}", "completion": 4}, "completion is 4, but a template has none"),
    ([], "the prompt is empty"),
    ("[[1]]", "give a text or a list of token ids"),
    ("17", "it is 17; give a text, a list of token ids, or an object"),
    ("null", "it is None"),
    ('{"prompt": "x"', "it is not JSON: "),
    ('{"prompt": "x", "hits": NaN}', "it holds NaN, which is not JSON"),
    ('{"prompt": "x", "prompt": "y"}', "the key 'prompt' is there twice"),
    ("[" * 100_000, "it is nested too deeply"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES, ids=[f"line{number}" for number in range(len(BAD_LINES))])
def test_an_error_names_file_line_and_key(tmp_path: Path, line: Any, message: str) -> None:
    path = written(tmp_path, json.dumps("good"), "", line)
    with pytest.raises(InvalidRequestError) as caught:
        read_prompts(path)
    assert str(caught.value).startswith(f"{path}, line 3: ")
    assert message in str(caught.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"missing\.jsonl' can't be read: No such file"):
        read_prompts(tmp_path / "missing.jsonl")
    with pytest.raises(InvalidRequestError, match="has no prompts"):
        read_prompts(written(tmp_path, "", "  "))
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b'"one"\n"\xff\xfe"\n')
    with pytest.raises(InvalidRequestError, match=r"line 2: it is not UTF-8, at byte 1"):
        read_prompts(binary)


def test_a_line_is_read_only_as_far_as_it_may_be_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kitelib.engine.bundle_prompts._MAX_LINE_BYTES", 2**20)
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps("x" * 2**20) + "\n")
    with pytest.raises(InvalidRequestError, match="line 1 is longer than 1 MiB"):
        read_prompts(path)


def test_forms_in_code() -> None:
    assert as_bundle_prompt("text") == BundlePrompt(prompt="text")
    assert as_bundle_prompt([1, 2]) == BundlePrompt(prompt=[1, 2])
    assert as_bundle_prompt(CHAT) == BundlePrompt(messages=CHAT)
    given = BundlePrompt(prompt="x", hits=2)
    assert as_bundle_prompt(given) is given
    line = {"template": "Answer {{question}}", "hits": 3}
    assert as_bundle_prompt(line) == BundlePrompt(prompt="Answer {{question}}", varying=True, hits=3)
    for wrong in (7, None, b"bytes", [], {"role": "user", "content": "x"}, {"prompt": "x", "template": "y"}):
        with pytest.raises(InvalidRequestError):
            as_bundle_prompt(wrong)
    with pytest.raises(InvalidRequestError, match="exactly one of prompt and messages"):
        BundlePrompt()
    with pytest.raises(InvalidRequestError, match="token ids can't be marked"):
        BundlePrompt(prompt=[1, 2], varying=True)


def test_marks_in_a_prompt_that_is_no_template_are_found() -> None:
    chat = [{"role": "user", "content": "What is {{ topic }} in {{place}}?"}]
    assert unmarked_parts(BundlePrompt(prompt="Hello {{name}}")) == ["name"]
    assert unmarked_parts(BundlePrompt(messages=chat)) == ["topic", "place"]
    for fine in ("{{{{name}}}}", "{name}", "{{ 1 + 2 }}", [1, 2]):
        assert unmarked_parts(BundlePrompt(prompt=fine)) == []
    assert unmarked_parts(BundlePrompt(prompt="Hello {{name}}", varying=True)) == []
