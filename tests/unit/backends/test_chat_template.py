"""Chat templates: those of real models, Hugging Face's helpers, tools, and templates that misbehave."""

from __future__ import annotations

import datetime as dt
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kitelib.backends.chat_template import ChatTemplate
from kitelib.backends.llama_cpp.gguf import check_file
from kitelib.errors import InvalidRequestError, ModelFormatError, UnsupportedOptionError

PLAIN = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[go]{% endif %}"
)
TOOLS = """\
{%- if tools %}
    {{- 'tools: ' + tools | tojson + '\\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.tool_calls %}
        {%- for call in m.tool_calls %}
            {{- 'call ' + call.function.name + ' ' + call.function.arguments | tojson + '\\n' }}
        {%- endfor %}
    {%- else %}
        {{- m.role + ': ' + m.content + '\\n' }}
    {%- endif %}
{%- endfor %}"""
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"city": "<城市>"}}}
USER = [{"role": "user", "content": "Hi"}]


def render(source: str, messages: Any = USER, tools: Any = None, **options: Any) -> str:
    return ChatTemplate(source, "<s>", "</s>", **options).render(messages, tools)


def test_the_template_of_a_real_model(smollm2_path: Path) -> None:
    source = str(check_file(smollm2_path).metadata["tokenizer.chat_template"])
    text = render(source, [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "你好 😀"}])
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n你好 😀<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_prompt_ends_where_the_answer_starts() -> None:
    assert render(PLAIN) == "[user]Hi[go]"


def test_text_parts_are_joined_and_others_refused() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render(PLAIN, [{"role": "user", "content": parts}]) == "[user]ab[go]"
    with pytest.raises(InvalidRequestError, match=r"messages\[0\] has a content part of type 'image_url'"):
        render(PLAIN, [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])


def test_a_template_that_only_knows_parts_gets_parts() -> None:
    source = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    assert render(source) == "Hi"


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "messages is empty"),
        (["Hi"], r"messages\[0\] is str"),
        ([{"content": "Hi"}], r"messages\[0\] has role None"),
        ([{"role": 7, "content": "Hi"}], "role 7"),
        ([*USER, {"role": "user"}], r"messages\[1\] has no content"),
        ([{"role": "user", "content": 7}], "content of type int"),
        ([{"role": "user", "content": ["Hi"]}], "part of type 'str'"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "arguments that are not JSON",
        ),
    ],
)
def test_malformed_messages_are_named(messages: Any, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        render(PLAIN, messages)


def test_messages_are_not_changed() -> None:
    calls = [{"function": {"name": "f", "arguments": "{}"}}]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "tool_calls": calls},
    ]
    before = repr(messages)
    render(TOOLS, messages)
    assert repr(messages) == before


# -- BOS ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [PLAIN, "{{ bos_token }}" + PLAIN])
def test_a_model_that_wants_bos_gets_exactly_one(source: str) -> None:
    assert render(source, add_bos=True) == "<s>[user]Hi[go]"


def test_a_model_that_wants_none_gets_what_the_template_writes() -> None:
    assert render(PLAIN) == "[user]Hi[go]"
    assert render("{{ bos_token }}" + PLAIN + "{{ eos_token }}") == "<s>[user]Hi[go]</s>"


# -- tools ----------------------------------------------------------------------------------------------------------


def test_tools_calls_and_answers_are_rendered() -> None:
    messages = [
        *USER,
        {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": '{"city": "上海"}'}}]},
        {"role": "tool", "content": "sunny"},
    ]
    assert render(TOOLS, messages, [WEATHER]) == (
        'tools: [{"type": "function", "function": {"name": "weather", "parameters": {"city": "<城市>"}}}]\n'
        'user: Hi\ncall weather {"city": "上海"}\ntool: sunny\n'
    )
    assert render(TOOLS) == render(TOOLS, tools=[]) == "user: Hi\n"


def test_a_template_that_ignores_tools_is_not_given_any() -> None:
    with pytest.raises(UnsupportedOptionError, match="ignores them"):
        render(PLAIN, tools=[WEATHER])


def test_the_template_for_tools_is_used_when_there_is_one() -> None:
    assert render(PLAIN, tools=[WEATHER], tool_source=TOOLS).startswith("tools: ")
    assert render(PLAIN, tool_source=TOOLS) == "[user]Hi[go]"


# -- what templates may and may not do ------------------------------------------------------------------------------


def test_blocks_are_trimmed_and_loops_controlled() -> None:
    source = "{% for m in messages %}\n    {% if loop.index > 1 %}\n    {% break %}\n    {% endif %}\n{{ m.role }}\n{% endfor %}"
    assert render(source, USER * 3) == "user\n"


def test_generation_marks_are_invisible() -> None:
    assert render("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}") == "Hi"


def test_the_date_is_todays() -> None:
    assert render("{{ strftime_now('%Y') }}" + PLAIN)[:4] == str(dt.datetime.now().astimezone().year)


def test_json_is_not_escaped_for_html() -> None:
    assert render("{{ {'a': '<你>'} | tojson }}") == '{"a": "<你>"}'
    assert render("{{ [1, 2] | tojson(indent=2) }}") == "[\n  1,\n  2\n]"


def test_a_refusing_template_is_quoted() -> None:
    with pytest.raises(InvalidRequestError, match="Roles must alternate"):
        render("{{ raise_exception('Roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 1 }}",
        "{{ messages[7].content }}",
        "{{ 1 / 0 }}",
        "{{ undefined_function() }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}{{ messages.__init__.__globals__.x }}",
    ],
)
def test_a_failing_or_hostile_template_is_an_error(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="chat template refuses"):
        render(source)


@pytest.mark.parametrize("source", ["{% for m in messages %}", "{{ a b }}", "{% nonsense %}", "{{ x | nofilter }}"])
def test_a_broken_template_is_the_models_fault(source: str) -> None:
    with pytest.raises(ModelFormatError, match="broken"):
        render(source)


def test_a_model_without_a_template_says_so() -> None:
    with pytest.raises(UnsupportedOptionError, match="no chat template"):
        ChatTemplate(None, "", "").render(USER)


def test_a_missing_jinja_is_named_with_its_extra() -> None:
    code = """
import sys
sys.modules["jinja2"] = None
from kitelib.backends.chat_template import ChatTemplate
from kitelib.errors import MissingExtraError
try:
    ChatTemplate("x", "", "").render([{"role": "user", "content": "Hi"}])
except MissingExtraError as error:
    assert "jinja2" in str(error) and error.extra == "lite"
else:
    raise SystemExit("no error")
"""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
