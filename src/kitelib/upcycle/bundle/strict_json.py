"""JSON from files that nobody vouches for: parsed only if what it takes in memory is in proportion to its length.

Python's parser makes objects of 50 to 300 bytes out of 2 to 7 characters (``[],``, ``"ab":1,``), nests until the stack
ends, and takes numbers of any length. Nothing a bundle says needs that, so it is refused before it is parsed.

The parser, and what else is written in C, keeps the interpreter's lock until it is done, whatever thread it runs in. A
header has megabytes, so whatever is large is read and written in pieces; between them other threads have their turn.
Texts grow by ``+=``, which takes new memory bit by bit where a join takes all of it in one call.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NoReturn, TypeVar

from kitelib.errors import FormatError

__all__ = ["MAX_TEXT", "dump", "elements", "members", "object_pieces", "parse", "text_pieces"]

MAX_TEXT: Final = 4096
"""Most characters of a free-form text."""
_SLACK: Final = 4096  # short texts may be dense
# Bytes of JSON for each of these, at least: what a bundle says has no more than a third as many.
_SPARSE: Final = ((b"[", 32), (b"{", 32), (b":", 20), (b'"', 8))
_AS_ZERO: Final = bytes.maketrans(b"123456789", b"000000000")
_PIECE: Final = 2**16  # characters; takes some 0.2 ms
_SCAN: Final = 2**20  # bytes; takes about a millisecond
_SPACE: Final = re.compile(r"[ \t\n\r]*")
_IN_TEXT: Final = re.compile(r'[^"\\]*(?:\\(?:u.{4}|[^u])[^"\\]*)*', re.DOTALL)  # ends in front of a cut-off escape
_T = TypeVar("_T")
_LONG_NUMBER: Final = b"0" * (MAX_TEXT + 1)  # a text may have digits only; int() takes 4300


def dump(value: Any) -> str:
    """The canonical text: ASCII, no spaces, keys sorted by code point."""
    return json.dumps(value, allow_nan=False, ensure_ascii=True, separators=(",", ":"), sort_keys=True)


def text_pieces(text: str) -> Iterator[str]:
    """`dump` of a text, in pieces."""
    yield '"'
    for at in range(0, len(text), _PIECE):
        yield dump(text[at : at + _PIECE])[1:-1]
    yield '"'


def object_pieces(members: Iterable[tuple[str, Iterable[str]]]) -> Iterator[str]:
    """`dump` of an object, in pieces: of its members, sorted by name, each with the pieces of its value."""
    before = "{"
    for name, pieces in members:
        yield f"{before}{dump(name)}:"
        yield from pieces
        before = ","
    yield "}" if before == "," else "{}"


def parse(raw: bytes, what: str) -> Any:
    """The value of a short JSON text.

    Args:
        raw: the text; must be ASCII.
        what: names it in messages.

    Raises:
        FormatError: it is no JSON, too dense or too deep, has a key twice, a number that is none, or is not ASCII.
    """
    with _readable(what):
        return _DECODER.decode(_sparse_text([raw], len(raw), what))


def members(pieces: Iterable[bytes], num_bytes: int, what: str, *, large: str) -> Iterator[tuple[str, Any]]:
    """Name and value of the members of a JSON object, one after the other.

    Args:
        pieces: the text in pieces of at most a mebibyte, which have `num_bytes` together.
        what: as of `parse`.
        large: the member of this name, if it is an object, is read one by one too, and its texts in pieces.

    Raises:
        FormatError: as `parse`; or it is no object.
    """
    with _readable(what):
        reader = _Reader(_sparse_text(pieces, num_bytes, what))
        seen = set()
        for name, value in reader.each("{}", lambda: reader.member(large)):
            if name in seen:
                raise ValueError(_twice(name))
            seen.add(name)
            yield name, value
        reader.end()


def elements(text: str, what: str) -> Iterator[Any]:
    """The elements of a JSON list, one after the other.

    Args:
        text: of ASCII characters.
        what: as of `parse`.

    Raises:
        FormatError: as `parse`; or it is no list.
    """
    with _readable(what):
        reader = _Reader(text)
        for _ in _sparse_pieces(
            (text[at : at + _SCAN].encode("ascii") for at in range(0, len(text), _SCAN)), len(text), what
        ):
            pass
        yield from reader.each("[]", reader.value)
        reader.end()


@contextlib.contextmanager
def _readable(what: str) -> Iterator[None]:
    try:
        yield
    except RecursionError:
        raise FormatError(f"{what} is nested too deep") from None
    except MemoryError:
        raise FormatError(f"there is no memory to read {what}") from None
    except ValueError as error:  # UnicodeDecodeError is one too
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"{what} can't be read: {error}") from None


def _sparse_text(pieces: Iterable[bytes], num_bytes: int, what: str) -> str:
    text = ""
    for piece in _sparse_pieces(pieces, num_bytes, what):
        text += piece.decode("ascii")
    return text


def _sparse_pieces(pieces: Iterable[bytes], num_bytes: int, what: str) -> Iterator[bytes]:
    """The pieces, while what they hold so far is not too dense."""
    counts = dict.fromkeys(_SPARSE, 0)
    before = b""
    for piece in pieces:
        for character, per_bytes in _SPARSE:
            counts[character, per_bytes] += piece.count(character)
            count, most = counts[character, per_bytes], _SLACK + num_bytes // per_bytes
            if count > most:
                raise FormatError(
                    f"{what} has {count} times {character.decode()!r} or more in {num_bytes} bytes; {most} may be"
                )
        zeros = (before + piece).translate(_AS_ZERO)
        if _LONG_NUMBER in zeros:
            raise FormatError(f"{what} has a number of more than {MAX_TEXT} digits")
        before = zeros[-MAX_TEXT:]
        yield piece


class _Reader:
    """Reads a JSON text from left to right. Raises ValueError."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def value(self) -> Any:
        """Any value, at once."""
        self._peek()
        value, self._at = _DECODER.raw_decode(self._text, self._at)
        return value

    def each(self, brackets: str, one: Callable[[], _T]) -> Iterator[_T]:
        """Everything in a list or an object."""
        opening, closing = brackets[0], brackets[1]
        self._expect(opening)
        if self._peek() == closing:
            self._at += 1
            return
        while True:
            yield one()
            if self._expect("," + closing) == closing:
                return

    def member(self, large: str | None = None) -> tuple[str, Any]:
        """Name and value; those of the member `large` are read in pieces."""
        name = self._text_value()
        self._expect(":")
        if name != large or self._peek() != "{":
            return name, self._text_value() if self._peek() == '"' else self.value()
        return name, _object([*self.each("{}", self.member)])

    def end(self) -> None:
        """Nothing may follow."""
        if self._peek():
            raise ValueError(f"there is more from character {self._at} on")

    def _text_value(self) -> str:
        self._expect('"')
        text = ""
        while True:
            match = _IN_TEXT.match(self._text, self._at, self._at + _PIECE)
            assert match is not None  # it matches nothing as well
            start, self._at = self._at, match.end()
            piece: str = _DECODER.decode(f'"{self._text[start : self._at]}"')
            text += piece
            if self._text[self._at : self._at + 1] == '"':
                self._at += 1
                return text
            if self._at == start:
                raise ValueError(f"the text before character {start} does not end")

    def _peek(self) -> str:
        """The next character that is no space; "" at the end."""
        match = _SPACE.match(self._text, self._at)
        assert match is not None
        self._at = match.end()
        return self._text[self._at : self._at + 1]

    def _expect(self, characters: str) -> str:
        found = self._peek()
        if not found or found not in characters:
            raise ValueError(f"character {self._at} is {found!a}, not one of {characters}")
        self._at += 1
        return found


def _twice(name: str) -> str:
    return f"the key {name[:200]!r} is there twice"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(_twice(next(name for name in made if names.count(name) > 1)))
    return made


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


_DECODER: Final = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant)
