"""The tables of the signatures: data files of this package, read once, when they are first needed."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any, Final

from kitelib.fingerprint import encode_fields

__all__ = ["CONDITIONS", "NAMES", "Ends", "Fillers", "Rules", "ends_of", "load", "rules_of", "tables_digest"]

NAMES: Final = ("common", "en", "zh")
"""Tables that signatures depend on; those of the gates stand beside them and are not among them."""

CONDITIONS: Final = ("always", "please", "starter", "request", "break")
"""When a filler goes. At the head: always; "please": not before what may be its object; before punctuation or a word that
starts a question, or one that starts a request; only before punctuation. At the tail: not after some words, of which
"please" has others than "always"; only after punctuation."""

_STEPS: Final = 2  # counts what the code does with the tables; raise it with every change of a signature

Rules = Mapping[str, tuple[tuple[list[str], list[str]], ...]]
"""First token of a phrase -> (all its tokens, what stands for them), longest first."""


@dataclasses.dataclass(frozen=True, slots=True)
class Fillers:
    """What says nothing at one end of a question: first token (at the tail: last) -> phrases, longest first, each
    with its condition: one of `CONDITIONS`."""

    phrases: Mapping[str, tuple[tuple[list[str], str], ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class Ends:
    """Fillers of both ends.

    Attributes:
        head, tail: the fillers.
        before: condition of a filler at the head -> before what it goes where no punctuation follows.
        not_before: before what "please" does not hold, since the filler has it as its object ("please me").
        not_after: condition of a filler at the tail -> after what it stays, being what is asked about ("say thanks").
        frame: words that ask about a word; beside nothing else, no filler goes.
    """

    head: Fillers
    tail: Fillers
    before: Mapping[str, frozenset[str]]
    not_before: frozenset[str]
    not_after: Mapping[str, frozenset[str]]
    frame: frozenset[str]


@functools.cache
def load(name: str) -> Any:
    """One table, as its JSON says."""
    return json.loads(resources.files(__package__).joinpath("tables").joinpath(f"{name}.json").read_text("utf-8"))


@functools.cache
def tables_digest() -> bytes:
    """SHA-256 over all that a signature depends on next to the text, 32 bytes: part of whatever is hashed with one."""
    return hashlib.sha256(encode_fields("kite.canonical", _STEPS, [load(name) for name in NAMES])).digest()


def rules_of(phrases: Mapping[str, str], split: Any) -> Rules:
    """Rules from phrase -> replacement; `split` cuts a text into tokens."""
    found: dict[str, list[tuple[list[str], list[str]]]] = {}
    for phrase, replacement in phrases.items():
        tokens = split(phrase)
        found.setdefault(tokens[0], []).append((tokens, split(replacement)))
    return {first: tuple(sorted(some, key=lambda rule: -len(rule[0]))) for first, some in found.items()}


def ends_of(table: Any, more_heads: Mapping[str, list[str]], split: Any) -> Ends:
    """The fillers of one language's table.

    Args:
        table: with "head", "tail", "frame" and what the conditions name.
        more_heads: condition -> further phrases at the head.
        split: cuts a text into tokens.
    """
    tail = table["tail"]
    return Ends(
        head=_fillers([table["head"], more_heads], split, at=0),
        tail=_fillers([tail], split, at=-1),
        before={
            condition: frozenset(table.get({"starter": "starters", "request": "requests"}.get(condition, ""), ()))
            for condition in CONDITIONS
        },
        not_before=frozenset(table["head_not_before"]),
        not_after={condition: frozenset(words) for condition, words in tail["not_after"].items()},
        frame=frozenset(table["frame"]),
    )


def _fillers(tables: list[Mapping[str, list[str]]], split: Any, *, at: int) -> Fillers:
    found: dict[str, list[tuple[list[str], str]]] = {}
    for table in tables:
        for condition in CONDITIONS:
            for phrase in table.get(condition, ()):
                tokens = split(phrase)
                found.setdefault(tokens[at], []).append((tokens, condition))
    return Fillers({key: tuple(sorted(some, key=lambda each: -len(each[0]))) for key, some in found.items()})
