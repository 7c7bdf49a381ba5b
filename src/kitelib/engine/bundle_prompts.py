"""What a bundle is made from: prompts, and files of them."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import numbers
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from kitelib.abc import Message
from kitelib.engine.bundle_templates import marked_parts
from kitelib.errors import InvalidRequestError

__all__ = ["BundlePrompt", "as_bundle_prompt", "read_prompts", "unmarked_parts"]

_SOURCES: Final = ("prompt", "messages", "template")
_OPTIONS: Final = ("tools", "hits", "completion", "adapter")
_MAX_LINE_BYTES: Final = 16 * 2**20


@dataclasses.dataclass(frozen=True, slots=True)
class BundlePrompt:
    """One prompt whose units go into a bundle.

    With `varying`, parts of the text, or of the messages' contents, vary from call to call. They are marked by a name in
    double braces, ``{{question}}``, and only what comes before the first of them is kept: the first tokens that are the
    same whatever stands there. ``{{{{`` and ``}}}}`` are literal double braces; without `varying` braces are just braces.

    Attributes:
        prompt: a text or token ids; give this or `messages`.
        messages: a chat, rendered with the model's own template.
        tools: tools that the chat's template shows; only with `messages`.
        varying: the prompt has marked parts.
        hits: how often it is expected, for choosing what fits into the bundle; no unit, only compared; default 1.
        completion: most tokens of a greedy completion to keep, 0 for none; None (default) takes what the build says.
        adapter: name of the LoRA adapter that it is computed with; None without one.
        source: where it was found, for errors.

    Raises:
        InvalidRequestError: the fields make no sense.
    """

    prompt: str | Sequence[int] | None = None
    messages: Sequence[Message] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    varying: bool = False
    hits: float = 1.0
    completion: int | None = None
    adapter: str | None = None
    source: str = ""

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequestError("a prompt of a bundle needs exactly one of prompt and messages")
        if self.prompt is not None:
            _check_prompt(self.prompt)
        else:
            _check_messages(self.messages)
        _check_options(self)
        if self.varying:
            self._check_template()

    def _check_template(self) -> None:
        value = self.prompt if self.messages is None else self.messages
        if self.prompt is not None and not isinstance(self.prompt, str):
            raise InvalidRequestError(
                "a template must be a text or a list of messages, since token ids can't be marked"
            )
        if not marked_parts(value):
            raise InvalidRequestError(
                "a template has no marked part; mark what varies by a name in double braces, such as {{question}}, or "
                "give it as a prompt"
            )
        if self.completion:
            raise InvalidRequestError(
                f"completion is {self.completion}, but a template has none: what follows depends on what varies"
            )


def as_bundle_prompt(value: Any) -> BundlePrompt:
    """A prompt in any form that callers have: a `BundlePrompt`, a text, token ids, a list of messages, or a mapping with
    the keys that an object in a file of prompts has (`read_prompts`).

    Raises:
        InvalidRequestError: it is none of those, or a key is wrong.
    """
    if isinstance(value, BundlePrompt):
        return value
    if isinstance(value, Mapping):
        return _prompt_of(dict(value), "")
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and len(value) > 0:
        if isinstance(value[0], Mapping):
            return BundlePrompt(messages=value)
        return BundlePrompt(prompt=value)
    if isinstance(value, str):
        return BundlePrompt(prompt=value)
    raise InvalidRequestError(
        f"a prompt of a bundle is {_shown(value)}; give a text, token ids, a list of messages, a BundlePrompt, or a dict "
        "with the keys of one"
    )


def unmarked_parts(prompt: BundlePrompt) -> list[str]:
    """Names in double braces that are part of a prompt as they stand, since it is no template: maybe by mistake."""
    value = prompt.messages if prompt.prompt is None else prompt.prompt
    if prompt.varying or (prompt.prompt is not None and not isinstance(prompt.prompt, str)):
        return []
    try:
        return marked_parts(value)
    except InvalidRequestError:  # braces of some other language
        return []


def read_prompts(path: str | os.PathLike[str]) -> list[BundlePrompt]:
    """Reads a file of JSON lines, one prompt a line; empty lines are skipped. Blocks.

    A line is a text, a list of token ids, or an object with one of ``prompt`` (a text or token ids), ``messages``, and
    ``template`` (a text or messages with marked parts), and maybe ``tools``, ``hits``, ``completion`` and ``adapter``;
    they mean what they mean in `BundlePrompt`.

    Raises:
        InvalidRequestError: the file can't be read, has no prompts, or a line is wrong; it names the file, the line
            and the key.
    """
    name = os.fspath(path)
    try:
        with open(name, "rb") as file:
            prompts = [_parse(f"{name}, line {number}", raw) for number, raw in _lines(file, name)]
    except OSError as error:
        raise InvalidRequestError(
            f"the file {name!r} can't be read: {error.strerror}; give a file of JSON lines, one prompt a line"
        ) from error
    if not prompts:
        raise InvalidRequestError(f"the file {name!r} has no prompts; write one JSON value a line")
    return prompts


def _lines(file: Any, name: str) -> Iterator[tuple[int, bytes]]:
    number = 0
    while raw := file.readline(_MAX_LINE_BYTES + 1):
        number += 1
        if len(raw) > _MAX_LINE_BYTES:
            raise InvalidRequestError(
                f"{name}, line {number} is longer than {_MAX_LINE_BYTES // 2**20} MiB; shorten it"
            )
        if number == 1:
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        if raw.strip():
            yield number, raw


def _parse(where: str, raw: bytes) -> BundlePrompt:
    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_object)
        return _prompt_of(value, where)
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{where}: it is not UTF-8, at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise InvalidRequestError(f"{where}: it is not JSON: {error.msg}, at column {error.colno}") from error
    except RecursionError as error:
        raise InvalidRequestError(f"{where}: it is nested too deeply") from error
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{where}: {error}") from error


def _refuse_constant(name: str) -> Any:
    raise InvalidRequestError(f"it holds {name}, which is not JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidRequestError(f"the key {twice!r} is there twice")
    return found


def _prompt_of(value: Any, where: str) -> BundlePrompt:
    if isinstance(value, (str, list)):
        return BundlePrompt(prompt=value, source=where)
    if not isinstance(value, dict):
        raise InvalidRequestError(f"it is {_shown(value)}; give a text, a list of token ids, or an object")
    for key in value:
        if key not in (*_SOURCES, *_OPTIONS):
            near = difflib.get_close_matches(key, (*_SOURCES, *_OPTIONS), 1, 0.0)[0]
            raise InvalidRequestError(f"the key {key!r} is unknown; did you mean {near!r}?")
    given = [key for key in _SOURCES if key in value]
    if len(given) != 1:
        raise InvalidRequestError(
            f"it has {' and '.join(map(repr, given)) or 'none of the keys'}; give exactly one of "
            f"{', '.join(map(repr, _SOURCES))}"
        )
    (key,) = given
    for name in _OPTIONS:
        if name in value and value[name] is None:
            raise InvalidRequestError(f"the key {name!r} is null; leave it out instead")
    options = {name: value[name] for name in _OPTIONS if name in value}
    source = value[key]
    if source is None:
        raise InvalidRequestError(f"the key {key!r} is null; give a prompt")
    chat = key == "messages" or (key == "template" and not isinstance(source, str))
    return BundlePrompt(
        prompt=None if chat else source,
        messages=source if chat else None,
        varying=key == "template",
        source=where,
        **options,
    )


def _check_prompt(prompt: Any) -> None:
    if isinstance(prompt, str):
        if not prompt:
            raise InvalidRequestError("the prompt is empty; give some text")
        return
    ids = list(prompt) if isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray)) else None
    if ids is None or any(isinstance(each, bool) or not isinstance(each, numbers.Integral) or each < 0 for each in ids):
        raise InvalidRequestError(f"the prompt is {_shown(prompt)}; give a text or a list of token ids")
    if not ids:
        raise InvalidRequestError("the prompt is empty; give at least one token id")


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise InvalidRequestError(f"messages is {_shown(messages)}; give a list with at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequestError(
                f"messages[{index}] is {_shown(message)}; give an object with 'role' and 'content'"
            )
        content = message.get("content")
        if content is not None and not isinstance(content, (str, list)):
            raise InvalidRequestError(f"messages[{index}].content is {_shown(content)}; give a text")


def _check_options(prompt: BundlePrompt) -> None:
    tools, hits, completion = prompt.tools, prompt.hits, prompt.completion
    if tools is not None:
        if prompt.messages is None:
            raise InvalidRequestError("tools only go with messages: the chat template renders them")
        good = isinstance(tools, Sequence) and not isinstance(tools, (str, bytes))
        if not good or not all(isinstance(tool, Mapping) for tool in tools):
            raise InvalidRequestError(f"tools is {_shown(tools)}; give a list of objects")
    if isinstance(hits, bool) or not isinstance(hits, (int, float)) or not math.isfinite(hits) or hits <= 0:
        raise InvalidRequestError(f"hits is {_shown(hits)}; give a number above 0")
    if completion is not None and (isinstance(completion, bool) or not isinstance(completion, int) or completion < 0):
        raise InvalidRequestError(f"completion is {_shown(completion)}; give a whole number of tokens, 0 for none")
    if prompt.adapter is not None and not (isinstance(prompt.adapter, str) and prompt.adapter):
        raise InvalidRequestError(f"adapter is {_shown(prompt.adapter)}; give the name of an adapter")
    if not isinstance(prompt.varying, bool):
        raise InvalidRequestError(f"varying is {_shown(prompt.varying)}; give True or False")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
