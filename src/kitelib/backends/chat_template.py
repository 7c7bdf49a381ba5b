"""Chat templates: the Jinja program in a model file that turns a list of messages into one prompt text.

The environment is the one Hugging Face templates are written for
(https://huggingface.co/docs/transformers/chat_templating): blocks trimmed, loop controls, `raise_exception`,
`strftime_now`, a `tojson` that keeps non-ASCII text, `{% generation %}`. Templates come with model files from anywhere,
so they run in Jinja's immutable sandbox (`template_sandbox.py`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kitelib.errors import InvalidRequestError, KiteError, MissingExtraError, UnsupportedOptionError

if TYPE_CHECKING:
    import jinja2

__all__ = ["ChatTemplate"]

_PROBE = "kite-template-probe"


class ChatTemplate:
    """A chat template, compiled on first use. Thread-safe.

    Args:
        source: Jinja source; None if the model has none, then `render` raises.
        bos_text: text of the token that begins a text, "" if there is none.
        eos_text: text of the token that ends one, "" if there is none.
        add_bos: whether the model wants BOS before every text. Many templates write it themselves; either way the
            rendered text begins with exactly the BOS the model wants, because rendered chats are tokenized without
            adding special tokens. llama.cpp's server does the same by cutting it off and adding it again.
        tool_source: another source for requests with tools, if the model has one.
        extra: the extra that brings jinja2, for the message of its absence.
    """

    def __init__(
        self,
        source: str | None,
        bos_text: str,
        eos_text: str,
        *,
        add_bos: bool = False,
        tool_source: str | None = None,
        extra: str = "lite",
    ) -> None:
        self._source = source
        self._tool_source = tool_source
        self._bos_text = bos_text
        self._eos_text = eos_text
        self._add_bos = add_bos
        self._extra = extra

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """The chat as one prompt text, ending where the assistant's answer starts.

        Args:
            messages: each has a ``role`` and a ``content``, a string or a list of ``{"type": "text", "text": ...}``
                parts, which are joined. With ``tool_calls`` the content may be missing; call arguments may be an
                object or its JSON text. Other keys reach the template as they are.
            tools: descriptions of functions (JSON schema) the model may call.

        Raises:
            UnsupportedOptionError: the model has no template, or tools are given and its template ignores them.
            InvalidRequestError: a message is malformed, or the template refuses the messages; says why.
            ModelFormatError: the template itself is broken.
            MissingExtraError: jinja2 is not installed.
        """
        source = self._tool_source if tools and self._tool_source else self._source
        if source is None:
            raise UnsupportedOptionError(
                "this model has no chat template, so it can't chat; give a plain prompt, or use an instruction-tuned model"
            )
        template, uses_tools = _compile(source, self._extra)
        if tools and not uses_tools:
            raise UnsupportedOptionError(
                "tools are given, but this model's chat template ignores them; use a model trained to call tools, or "
                "describe the tools in a system message"
            )
        checked = [_check_message(index, message) for index, message in enumerate(messages)]
        if not checked:
            raise InvalidRequestError("messages is empty; give at least one message")
        if self._wants_parts:
            checked = [_with_parts(message) for message in checked]
        try:
            text = self._run(template, checked, tools)
        except KiteError:
            raise
        except Exception as error:  # a foreign program: anything may come out of it
            raise InvalidRequestError(f"the model's chat template refuses these messages: {error}") from error
        if self._add_bos and not text.startswith(self._bos_text):
            text = self._bos_text + text
        return text

    def _run(
        self,
        template: jinja2.Template,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> str:
        return template.render(
            messages=messages,
            tools=list(tools) if tools else None,
            documents=None,
            add_generation_prompt=True,
            bos_token=self._bos_text,
            eos_token=self._eos_text,
        )

    @functools.cached_property
    def _wants_parts(self) -> bool:
        """Whether the template shows contents only when they are lists of parts, as some multimodal ones do.

        Given strings, those iterate over characters and silently print nothing, so they are found by trial.
        """
        template, _ = _compile(self._source or self._tool_source or "", self._extra)
        plain = {"role": "user", "content": _PROBE}
        for message, found in ((plain, False), (_with_parts(plain), True)):
            try:
                if _PROBE in self._run(template, [message], None):
                    return found
            except Exception:  # noqa: BLE001, S112  a template that refuses the trial is asked in the other form
                continue
        return False


def _check_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the message with its content as one string and its call arguments as objects."""
    if not isinstance(message, Mapping):
        raise InvalidRequestError(
            f"messages[{index}] is {type(message).__name__}; give a mapping with role and content"
        )
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(f"messages[{index}] has role {role!r}; give 'system', 'user', 'assistant' or 'tool'")
    if content is None and not calls:
        raise InvalidRequestError(f'messages[{index}] has no content; give a string, "" for an empty one')
    checked = {**message, "content": _join_content(index, content)}
    if calls:
        checked["tool_calls"] = [_check_call(index, call) for call in calls]
    return checked


def _join_content(index: int, content: object) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise InvalidRequestError(
            f"messages[{index}] has content of type {type(content).__name__}; give a string or a list of text parts"
        )
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(text, str):
            raise InvalidRequestError(
                f"messages[{index}] has a content part of type {kind!r}; only text parts, "
                '{"type": "text", "text": "..."}, can be used'
            )
        texts.append(text)
    return "".join(texts)


def _check_call(index: int, call: object) -> Any:
    """The tool call with its arguments as an object: templates print them, callers often hold their JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError as error:
            raise InvalidRequestError(
                f"messages[{index}] has tool call arguments that are not JSON: {error}"
            ) from error
    return {**call, "function": {**function, "arguments": arguments}}


def _with_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _compile(source: str, extra: str) -> tuple[jinja2.Template, bool]:
    """The compiled template, and whether it looks at `tools`."""
    try:
        from kitelib.backends import template_sandbox  # plain prompts work without jinja2
    except ImportError as error:
        raise MissingExtraError("jinja2", extra, "rendering a chat") from error
    return template_sandbox.compile_template(source)
