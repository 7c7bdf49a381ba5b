"""The Jinja environment of chat templates. Imports jinja2: import it only when a template is to be rendered."""

from __future__ import annotations

import datetime as dt
import functools
import json
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from kitelib.errors import InvalidRequestError, ModelFormatError

__all__ = ["compile_template"]


@functools.lru_cache(maxsize=16)
def compile_template(source: str) -> tuple[jinja2.Template, bool]:
    """The compiled template, and whether it looks at `tools`.

    Raises:
        ModelFormatError: the source is not valid.
    """
    environment = _environment()
    try:
        names = jinja2.meta.find_undeclared_variables(environment.parse(source))
        return environment.from_string(source), "tools" in names
    except (jinja2.TemplateError, RecursionError) as error:
        line = f" in line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise ModelFormatError(
            f"the model's chat template is broken{line}: {error}; give a plain prompt, or use another build of the "
            "model"
        ) from error


class _Generation(jinja2.ext.Extension):
    """``{% generation %} ... {% endgeneration %}`` marks the assistant's text for training; here it is a scope."""

    tags = {"generation"}  # noqa: RUF012  as the base class declares it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """`json.dumps`. Jinja's own filter escapes HTML characters and non-ASCII text, which models never saw."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise InvalidRequestError(f"the model's chat template refuses these messages: {message}")


def _strftime_now(form: str) -> str:
    return dt.datetime.now().astimezone().strftime(form)
