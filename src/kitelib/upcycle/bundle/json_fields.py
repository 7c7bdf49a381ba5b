"""Checks of single values and of columns of values that were read from JSON.

A column is checked as a whole, which costs a tenth of checking each value; only where that fails each is looked at, for
a message that shows the one at fault. All raise `FormatError`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence, Set
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kitelib.errors import FormatError
from kitelib.fingerprint import FINGERPRINT_BYTES
from kitelib.upcycle.bundle.strict_json import MAX_TEXT
from kitelib.upcycle.unit import MAX_TOKEN_IDS

__all__ = [
    "MAX_NAMES",
    "check_fields",
    "digest",
    "digests",
    "layout",
    "names",
    "number",
    "numbers",
    "shapes",
    "text",
    "texts",
    "token_ids",
    "typed",
    "whole",
    "wholes",
]

MAX_NAMES = 256
"""Most entries of a mapping of texts."""

_MAX_DIMS = 8
_T = TypeVar("_T")


def check_fields(plain: Any, names: Set[str], what: str) -> None:
    """An object with exactly these fields."""
    if not isinstance(plain, dict):
        raise FormatError(f"{what} is no JSON object")
    if plain.keys() != names:
        odd = min(plain.keys() ^ names)
        raise FormatError(f"{what} {'lacks' if odd in names else 'has the unknown'} field {odd[:200]!a}")


def typed(plain: Any, wanted: type[_T], what: str) -> _T:
    """A value of exactly this type."""
    if type(plain) is not wanted:
        raise FormatError(f"{what} is of type {type(plain).__name__}, not {wanted.__name__}")
    return plain


def whole(plain: Any, what: str, lowest: int, highest: int) -> int:
    """A whole number from `lowest` to `highest`."""
    if type(plain) is not int or not lowest <= plain <= highest:  # True is an int to isinstance
        raise FormatError(f"{what} is {plain!a:.200}, not a whole number from {lowest} to {highest}")
    return plain


def number(plain: Any, what: str, lowest: float = -math.inf) -> float:
    """A finite number."""
    if type(plain) is int and -(2**53) <= plain <= 2**53:
        plain = float(plain)
    if type(plain) is not float or not math.isfinite(plain) or plain < lowest:
        raise FormatError(f"{what} is {plain!a:.200}, not a finite number{' from 0' if lowest == 0 else ''}")
    return plain


def digest(plain: Any, what: str) -> bytes:
    """A digest: 32 bytes in lower-case hexadecimal digits."""
    if type(plain) is str and len(plain) == 2 * FINGERPRINT_BYTES:
        try:
            raw = bytes.fromhex(plain)
        except ValueError:
            raw = b""
        if raw.hex() == plain:  # fromhex takes spaces and capitals
            return raw
    raise FormatError(f"{what} is {plain!a:.200}, not {2 * FINGERPRINT_BYTES} lower-case hexadecimal digits")


def text(plain: Any, what: str) -> str:
    """A free-form text."""
    if type(plain) is not str or len(plain) > MAX_TEXT:
        raise FormatError(f"{what} is {plain!a:.200}, not a text of at most {MAX_TEXT} characters")
    return plain


def texts(plain: Any, what: str) -> dict[str, str]:
    """A mapping of texts."""
    found = typed(plain, dict, what)
    if len(found) > MAX_NAMES:
        raise FormatError(f"{what} has {len(found)} texts; at most {MAX_NAMES} may be")
    for name, value in found.items():
        text(name, f"a name in {what}")
        text(value, f"{what}[{name[:200]!a}]")
    return found


def layout(plain: Any) -> str:
    """The id of a layout."""
    if type(plain) is not str or not 0 < len(plain) <= 255 or not plain.isascii():
        raise FormatError(f"the layout is {plain!a:.200}; it must have 1 to 255 ASCII characters")
    return plain


def wholes(column: Sequence[Any], what: str, lowest: int, highest: int) -> Sequence[int]:
    """Whole numbers from `lowest` to `highest`."""
    if not _all_are(column, int) or min(column, default=lowest) < lowest or max(column, default=lowest) > highest:
        return [whole(each, what, lowest, highest) for each in column]
    return column


def numbers(column: Sequence[Any], what: str, lowest: float = -math.inf) -> Sequence[float]:
    """Finite numbers."""
    if not _all_are(column, float) or not all(map(math.isfinite, column)) or min(column, default=lowest) < lowest:
        return [number(each, what, lowest) for each in column]
    return column


def digests(column: Sequence[Any], what: str) -> list[bytes]:
    """Digests, 32 bytes each."""
    if _all_are(column, str) and set(map(len, column)) <= {2 * FINGERPRINT_BYTES}:
        joined = "".join(column)
        try:
            raw = bytes.fromhex(joined)
        except ValueError:
            raw = b""
        if raw.hex() == joined:
            return [raw[at : at + FINGERPRINT_BYTES] for at in range(0, len(raw), FINGERPRINT_BYTES)]
    return [digest(each, what) for each in column]


def names(column: Sequence[Any], what: str, check: Callable[[str], object]) -> Sequence[str]:
    """Texts of which many are the same; `check` raises for those that may not be."""
    for each in set(column) if _all_are(column, str) else column:
        check(typed(each, str, what))
    return column


def shapes(column: Sequence[Any]) -> list[tuple[int, ...]]:
    """Sizes of each dimension."""
    for each in column:
        if len(typed(each, list, "shape")) > _MAX_DIMS:
            raise FormatError(f"a shape has {len(each)} dimensions; at most {_MAX_DIMS} may be")
    wholes(list(itertools.chain.from_iterable(column)), "shape", 0, 2**63 - 1)
    return list(map(tuple, column))


def token_ids(column: Sequence[Any]) -> list[npt.NDArray[np.uint32]]:
    """Token ids, shape (num_tokens,) each."""
    for each in column:
        if len(typed(each, list, "token_ids")) > MAX_TOKEN_IDS:
            raise FormatError(f"a unit has {len(each)} token ids; at most {MAX_TOKEN_IDS} may be")
    flat = np.array(wholes(list(itertools.chain.from_iterable(column)), "a token id", 0, 2**32 - 1), "<u4")
    ends = list(itertools.accumulate(map(len, column), initial=0))
    return [flat[start:stop] for start, stop in itertools.pairwise(ends)]


def _all_are(column: Sequence[Any], wanted: type) -> bool:
    # Exactly that type: True is an int to isinstance.
    return set(map(type, column)) <= {wanted}
