"""Prompts as people have them: a text, a file, a list of chat messages, lines of a request log."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

from kitelib.errors import EmptyPromptError, InvalidRequestError

__all__ = ["BadLine", "Line", "Prompt", "prompt_of", "read_lines", "read_prompt"]

_MAX_LINE_BYTES: Final = 16 * 2**20
_ENVELOPES: Final = ("body", "request")  # request logs keep the call in one of these
_CHAT: Final = re.compile(r'\s*(?:\{\s*"messages"\s*:|\[\s*\{\s*"role"\s*:)')  # so begins nothing but a chat


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: a text, or a chat.

    Attributes:
        text: the whole prompt; None for a chat.
        messages: of a chat; empty for a text.
        tools: function descriptions given with the chat.
    """

    text: str | None
    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] = ()

    @property
    def question(self) -> str:
        """The user's own part: the last user message of a chat, else the whole text."""
        if self.text is not None:
            return self.text
        said = [message for message in self.messages if message.get("role") == "user"]
        return content_text(said[-1].get("content")) if said else ""

    def plain(self) -> str:
        """The prompt as one text, for where there is no model with a chat template of its own."""
        if self.text is not None:
            return self.text
        lines = [json.dumps(list(self.tools), ensure_ascii=False)] if self.tools else []
        for message in self.messages:
            calls = message.get("tool_calls")
            said = content_text(message.get("content")) + (json.dumps(calls, ensure_ascii=False) if calls else "")
            lines.append(f"{message['role']}: {said}")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """A prompt and the number of the line it stands on, from 1."""

    number: int
    prompt: Prompt


@dataclasses.dataclass(frozen=True, slots=True)
class BadLine:
    """A line that holds no prompt, and why."""

    number: int
    reason: str


def content_text(content: object) -> str:
    """The text of a message's content: a string, or a list of parts, of which others than texts are named only."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [part.get("text", f"[{part.get('type')}]") if isinstance(part, Mapping) else str(part) for part in parts]
    return "".join(map(str, texts))


def prompt_of(value: object) -> Prompt:
    """The prompt in a JSON value: a string, a list of messages, or an object with ``prompt`` or ``messages``, maybe
    inside ``body`` or ``request``. A list of one string is that string.

    Raises:
        ValueError: there is none, or its text is not known; says what is there.
    """
    value = _opened(value)
    tools: object = ()
    chat = isinstance(value, Mapping) and "messages" in value
    if isinstance(value, Mapping):
        if "messages" not in value and "prompt" not in value:
            names = ", ".join(map(repr, list(value)[:6])) or "nothing"
            raise ValueError(f"has neither 'prompt' nor 'messages', but {names}")
        tools = value.get("tools") or ()
        value = value["messages"] if "messages" in value else value["prompt"]
    if isinstance(value, list) and not chat:
        value = _listed(value)
    if isinstance(value, str):
        if not value.strip():
            raise ValueError("has an empty prompt")
        return Prompt(value)
    if not isinstance(value, list):
        raise ValueError(f"has a {type(value).__name__} where a text or a list of messages should be")  # noqa: TRY004 - of a line, not of a caller
    if not value:
        raise ValueError("has an empty list of messages")
    if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError("has tools that are no list of objects")
    for index, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"has a message without a role at index {index}")  # noqa: TRY004 - of a line
        content = message.get("content")
        if content is not None and not isinstance(content, (str, list)):
            raise ValueError(f"has a message whose content is a {type(content).__name__} at index {index}")
    return Prompt(None, value, tuple(tools))


def _opened(value: object) -> object:
    """The call that a line of a request log is about; else the value itself."""
    if isinstance(value, Mapping):
        return next((value[name] for name in _ENVELOPES if isinstance(value.get(name), Mapping)), value)
    return value


def _listed(values: list[Any]) -> object:
    """What a list is that may hold other things than messages, as ``prompt`` of OpenAI's completions may."""
    flat = [each for value in values for each in (value if isinstance(value, list) else [value])]
    if flat and all(type(each) is int for each in flat):
        raise ValueError("has token ids, whose text isn't known; give the text, or messages")
    if values and all(isinstance(value, str) for value in values):
        if len(values) > 1:
            raise ValueError(f"has a list of {len(values)} texts where one prompt should be; give each by itself")
        return values[0]
    return values


def _meant_as_chat(value: object) -> bool:
    """Whether JSON that holds no prompt was to hold one, rather than being a text that happens to be JSON."""
    value = _opened(value)
    if isinstance(value, Mapping):
        return "messages" in value or "prompt" in value
    return isinstance(value, list) and any(isinstance(each, Mapping) and "role" in each for each in value)


def read_prompt(argument: str) -> Prompt:
    """The prompt that a person named: a text, ``@file``, or ``-`` for standard input; ``@@`` begins a text with ``@``.
    A file, input or text that is JSON with messages is a chat; other JSON is a text, but not in a file ``*.json``.

    Raises:
        InvalidRequestError: the file can't be read, is not UTF-8, or there is a chat with something wrong in it.
        EmptyPromptError: there is nothing in it.
    """
    where, text = "the prompt", argument
    if argument == "-":
        where, text = "standard input", sys.stdin.read()
    elif argument.startswith("@@"):
        text = argument[1:]
    elif argument.startswith("@"):
        where, text = repr(argument[1:]), _file_text(argument[1:])
    if not text.strip():
        raise EmptyPromptError(f"{where} is empty; give some text, or @file")
    if text.lstrip()[0] in "[{":
        # A text may begin with a bracket too, or be JSON; a file of that name is meant to be a chat.
        meant = argument.startswith("@") and argument.endswith(".json") and not argument.startswith("@@")
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            if meant or _CHAT.match(text):
                raise _no_chat(where, str(error)) from error
            return Prompt(text)
        try:
            return prompt_of(value)
        except ValueError as error:
            if meant or _meant_as_chat(value):
                raise _no_chat(where, f"it {error}") from error
    return Prompt(text)


def _no_chat(where: str, reason: str) -> InvalidRequestError:
    return InvalidRequestError(
        f'{where} is no chat: {reason}; give JSON such as {{"messages": [{{"role": "user", "content": "Hi"}}]}}, or a '
        'text that looks like it as {"prompt": "..."}'
    )


def _file_text(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InvalidRequestError(
            f"the file {path!r} can't be read: {error.strerror}; a text that begins with @ is written with @@"
        ) from error
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"the file {path!r} is not UTF-8 text, at byte {error.start}; convert it") from error


def read_lines(path: str) -> Iterator[tuple[Line | BadLine, float | None]]:
    """The lines of a file of JSON lines one by one, each with the done part of the file, 0 to 1, or None where that is
    not known. Empty lines are left out. ``-`` is standard input. A line is held in memory only while it is looked at.

    Raises:
        InvalidRequestError: the file can't be read.
    """
    try:
        if path == "-":
            yield from _lines(sys.stdin.buffer, None)
            return
        with open(os.path.expanduser(path), "rb") as file:
            yield from _lines(file, os.fstat(file.fileno()).st_size)
    except OSError as error:
        raise InvalidRequestError(
            f"the file {path!r} can't be read: {error.strerror}; give a file of JSON lines, one prompt a line"
        ) from error


def _lines(file: IO[bytes], size: int | None) -> Iterator[tuple[Line | BadLine, float | None]]:
    number = done = 0
    while raw := file.readline(_MAX_LINE_BYTES):
        number += 1
        done += len(raw)
        too_long = len(raw) == _MAX_LINE_BYTES and not raw.endswith(b"\n")
        while too_long and raw and not raw.endswith(b"\n"):
            raw = file.readline(_MAX_LINE_BYTES)
            done += len(raw)
        if number == 1:
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        if too_long:
            found: Line | BadLine = BadLine(number, f"is longer than {_MAX_LINE_BYTES // 2**20} MiB")
        elif not raw.strip():
            continue
        else:
            found = _parse(number, raw)
        yield found, min(done / size, 1.0) if size else None


def _parse(number: int, raw: bytes) -> Line | BadLine:
    try:
        return Line(number, prompt_of(json.loads(raw)))
    except UnicodeDecodeError:
        return BadLine(number, "is not UTF-8")
    except json.JSONDecodeError as error:
        return BadLine(number, f"is not JSON: {error.msg}, at column {error.colno}")
    except RecursionError:
        return BadLine(number, "is nested too deeply")
    except ValueError as error:
        return BadLine(number, str(error))
