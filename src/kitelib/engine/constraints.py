"""Structured output: which tokens keep a text on the way to a JSON schema or a regular expression.

The work is done by llguidance (extra ``guided``); it needs no more than the bytes of every token, so it serves every
backend. One `ConstraintFactory` belongs to one model; it compiles a request's constraint once, and every choice of
the request takes its own `Constraint` from it.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kitelib.config import SamplingParams
from kitelib.errors import InvalidSamplingError, MissingExtraError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["Constraint", "ConstraintFactory"]

# White space between JSON tokens. Bounded, because small models otherwise tend to go on with it for ever; enough for
# a line break and a deep indentation.
_JSON_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
_MAX_CACHED_GRAMMARS = 64


class Constraint:
    """Where one choice stands in its grammar. Not thread-safe."""

    __slots__ = ("_bits", "_matcher", "_name", "_vocab_size")

    def __init__(self, matcher: LLMatcher, name: str, vocab_size: int) -> None:
        """Use `ConstraintFactory.compile`."""
        self._matcher = matcher
        self._name = name
        self._vocab_size = vocab_size
        # One bit per token, in words of 32.
        self._bits = np.zeros((vocab_size + 31) // 32, dtype=np.int32)

    def mask(self) -> npt.NDArray[np.bool_]:
        """Shape (vocab_size,), True where a token may follow; a new array. End tokens are allowed exactly where the
        text is complete.

        Raises:
            InvalidSamplingError: no token of the vocabulary leads on from here and the text is not complete, or the
                grammar got too large to follow.
        """
        self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        self._check()
        return np.unpackbits(self._bits.view(np.uint8), count=self._vocab_size, bitorder="little").view(np.bool_)

    def advance(self, token_id: int) -> None:
        """Moves past a token.

        Raises:
            InvalidSamplingError: the token is not one that `mask` allows here.
        """
        if not self._matcher.consume_token(token_id):
            self._check()
            raise InvalidSamplingError(f"token {token_id} does not fit the {self._name} here; choose from the mask")

    def fork(self) -> Constraint:
        """An independent constraint at the same place."""
        return Constraint(self._matcher.deep_copy(), self._name, self._vocab_size)

    @property
    def finished(self) -> bool:
        """Whether the text is complete and nothing but an end token may follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def complete(self) -> bool:
        """Whether the text fits the constraint as it stands; more may follow unless `finished`."""
        return self._matcher.is_accepting()

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().strip().partition("\n")[0]
            raise InvalidSamplingError(
                f"the {self._name} can't be followed any further with this model's vocabulary "
                f"({self._matcher.stop_reason()}: {reason}); simplify it"
            )


class ConstraintFactory:
    """Compiles constraints for one vocabulary. Thread-safe; keep `compile` off the event loop (up to a second).

    The first use builds llguidance's tokenizer, which holds the interpreter lock throughout (0.13 s for 49 thousand
    tokens, 1.1 s for 262 thousand), so not even other threads run; `prepare` does it at a time of choice.

    Args:
        vocab_bytes: token id -> the bytes it stands for in a text; b"" for none. As long as the logits.
        end_token_ids: ids that end a text; at least one.
        special_ids: further ids that must never be part of the text, whatever their bytes.
        tokenize: the model's tokenizer, adding no special tokens. Where a constraint leaves a single way on, the text
            is split as it would split it, which keeps the model on familiar ground; without it, or where its tokens
            don't spell the text, the longest tokens are taken first.
    """

    def __init__(
        self,
        vocab_bytes: Sequence[bytes],
        end_token_ids: Collection[int],
        special_ids: Collection[int] = (),
        tokenize: Callable[[str], Sequence[int]] | None = None,
    ) -> None:
        self._vocab_bytes = vocab_bytes
        self._end_token_ids = sorted(end_token_ids)
        self._special_ids = frozenset(special_ids) | frozenset(end_token_ids)
        self._tokenize = tokenize
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[tuple[str, str], Constraint] = OrderedDict()

    def compile(self, params: SamplingParams) -> Constraint | None:
        """The constraint that `params` asks for, at its start; None if it asks for none.

        Raises:
            InvalidSamplingError: the schema or the expression is invalid or uses what llguidance can't enforce.
            MissingExtraError: llguidance is not installed.
        """
        if params.json_schema is not None:
            name, text = "json_schema", _schema_text(params.json_schema)
        elif params.regex is not None:
            name, text = "regex", params.regex
        else:
            return None
        with self._lock:
            known = self._compiled.get((name, text))
            if known is None:
                known = self._compiled[name, text] = self._compile(name, text)
                if len(self._compiled) > _MAX_CACHED_GRAMMARS:
                    self._compiled.popitem(last=False)
            else:
                self._compiled.move_to_end((name, text))
            return known.fork()

    def prepare(self) -> None:
        """Builds what every constraint needs; does nothing the second time.

        Raises:
            MissingExtraError: llguidance is not installed.
        """
        with self._lock:
            self._prepared("structured output")

    def _prepared(self, purpose: str) -> LLTokenizer:
        if self._tokenizer is None:
            try:
                self._tokenizer = self._build_tokenizer()
            except ImportError as error:
                raise MissingExtraError("llguidance", "guided", purpose) from error
        return self._tokenizer

    def _compile(self, name: str, text: str) -> Constraint:
        tokenizer = self._prepared(f"the option {name}")
        from llguidance import LLMatcher, LLParserLimits

        if name == "regex":
            grammar = LLMatcher.grammar_from_regex(text)
        else:
            # Defaults only: the schema's own "x-guidance" key goes first.
            grammar = LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": _JSON_WHITESPACE})
        # Errors without the parser's state, which quotes the text.
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
        if matcher.is_error():
            raise InvalidSamplingError(f"{name} can't be used: {matcher.get_error().strip()}\nin: {_shorten(text)}")
        return Constraint(matcher, name, len(self._vocab_bytes))

    def _build_tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        tokens = [b"" if i in self._special_ids else data for i, data in enumerate(self._vocab_bytes)]
        vocabulary = _Vocabulary(tokens, self._end_token_ids[0], self._tokenize)
        # The ready-made slices for JSON speed up masks inside strings, which allow most of the vocabulary.
        return LLTokenizer(
            vocabulary,  # type: ignore[arg-type]  # a duck-typed TokenizerWrapper, which only adds probing
            n_vocab=len(tokens),
            eos_token=self._end_token_ids,
            slices=LLTokenizer.json_slices(),
        )


@dataclasses.dataclass
class _Vocabulary:
    """What `LLTokenizer` asks of a tokenizer."""

    tokens: list[bytes]
    eos_token_id: int
    tokenize: Callable[[str], Sequence[int]] | None
    bos_token_id: int | None = None
    special_token_ids: Sequence[int] = ()
    is_tokenizer_wrapper: bool = True

    def __post_init__(self) -> None:
        self._ids = {data: token for token, data in reversed(list(enumerate(self.tokens))) if data}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str) -> list[int]:
        data = text.encode()
        if self.tokenize is not None:
            ids = list(self.tokenize(text))
            if b"".join(self.tokens[token] for token in ids) == data and all(self.tokens[token] for token in ids):
                return ids
        return self._split(data)

    def _split(self, data: bytes) -> list[int]:
        """Longest tokens first; stops where no token fits."""
        ids: list[int] = []
        start = 0
        while start < len(data):
            for end in range(min(len(data), start + self._longest), start, -1):
                token = self._ids.get(data[start:end])
                if token is not None:
                    ids.append(token)
                    start = end
                    break
            else:
                break
        return ids


def _schema_text(schema: Mapping[str, Any] | str) -> str:
    try:
        value = json.loads(schema) if isinstance(schema, str) else dict(schema)
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise InvalidSamplingError(f"json_schema is not JSON: {error}; in: {_shorten(str(schema))}") from error
    if not isinstance(value, dict):
        raise InvalidSamplingError(f"json_schema is {_shorten(text)}; give a JSON object or its text")
    return text


def _shorten(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:197]}..."
