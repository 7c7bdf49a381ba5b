"""From a YAML file to frozen dataclasses, with errors that say where in the file they are, and the checks that options
made in code share with it."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from kitelib.errors import ConfigError

__all__ = [
    "check_bytes",
    "check_choice",
    "check_count",
    "check_seconds",
    "read_yaml",
    "section",
    "shown",
    "unknown_name",
]

T = TypeVar("T")
_CREDENTIALS = re.compile(r"//[^/@\s]*@")
Part = Callable[[Any, str], Any]
"""Turns the plain value of one key, found at the given place, into what the dataclass wants."""


def read_yaml(path: str | os.PathLike[str]) -> Any:
    """The one YAML document in a file, as plain values; None for an empty one. Blocks.

    Raises:
        ConfigError: the file can't be read, or is no YAML; the message has the line and column.
    """
    import yaml

    name = os.fspath(path)
    try:
        with open(path, "rb") as file:
            return yaml.safe_load(file)
    except FileNotFoundError as error:
        raise ConfigError(f"there is no configuration file at {name!r}; check the path") from error
    except OSError as error:
        raise ConfigError(f"the configuration file {name!r} can't be read: {error.strerror}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"{name}: {where}{error.problem or error.context}; correct the YAML there") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # ValueError: a date that does not exist, a number of too many digits. RecursionError: nested without end.
        raise ConfigError(f"{name} is no valid YAML: {shown(str(error))}") from error


def section(
    kind: Callable[..., T],
    value: Any,
    place: str,
    parts: Mapping[str, Part] | None = None,
    *,
    required: tuple[str, ...] = (),
) -> T:
    """A dataclass from a mapping of its fields; None, which is a heading with nothing below it, gives the defaults.

    Args:
        kind: the dataclass.
        value: the plain value in the file.
        place: where that is, e.g. ``ru_pool.lifecycle``; "" is the whole file.
        parts: what turns the values of some keys into field values.
        required: fields that must be there.

    Raises:
        ConfigError: a key is unknown or missing, or a value does not fit; the message starts with its place.
    """
    valid = [field.name for field in dataclasses.fields(cast(Any, kind))]
    here = place or "the file"
    values = {} if value is None else value
    if not isinstance(values, Mapping):
        raise ConfigError(f"{here} is {shown(value)}; give a mapping with the keys {', '.join(valid)}")
    for key in values:
        if key not in valid:
            raise ConfigError(f"{here} has the unknown key {shown(key)}; {unknown_name(key, valid)}")
    for name in required:
        if name not in values:
            raise ConfigError(f"{here} has no {name!r}; add it")
    inside = f"{place}." if place else ""
    built = {key: parts[key](each, inside + key) if parts and key in parts else each for key, each in values.items()}
    try:
        return kind(**built)
    except ConfigError as error:
        raise ConfigError(f"{inside}{error}") from error


def unknown_name(name: Any, valid: list[str]) -> str:
    """The end of a message about a name that is not among the valid ones: the nearest, and all there are."""
    near = difflib.get_close_matches(str(name), valid, 1, 0.0)[0]
    return f"did you mean {near!r}? There are: {', '.join(valid)}"


def shown(value: Any) -> str:
    """The value as a message shows it: cut short, since aliases can make a small file mean a huge value, and without
    the user and password of a URL."""
    text = reprlib.Repr()
    text.maxstring = text.maxother = 80
    text.maxlevel = 2
    # Masked before it is cut, or a cut between the password and the @ would show it.
    return _CREDENTIALS.sub("//***@", text.repr(_masked(value)))


def _masked(value: Any) -> Any:
    return _CREDENTIALS.sub("//***@", value) if isinstance(value, str) else value


def check_seconds(name: str, value: Any) -> None:
    """Raises ConfigError unless `value` is a positive, finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise ConfigError(f"{name} is {shown(value)}; give a positive number of seconds")


def check_bytes(name: str, value: Any, *, least: int = 1) -> None:
    """Raises ConfigError unless `value` is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        kind = "a positive number of bytes" if least else "0 or a number of bytes"
        raise ConfigError(f"{name} is {shown(value)}; give {kind}")


def check_count(name: str, value: Any) -> None:
    """Raises ConfigError unless `value` is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} is {shown(value)}; give a whole number, 1 or more")


def check_choice(name: str, value: Any, valid: list[str]) -> None:
    """Raises ConfigError unless `value` is one of `valid`; the message has the nearest."""
    if value not in valid:
        raise ConfigError(f"{name} is {shown(value)}; {unknown_name(value, valid)}")
