"""Which units a `kite pool` command means, and how their figures are written."""

from __future__ import annotations

import argparse
import dataclasses
import re
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kitelib.cli.pool_tiers import Found

__all__ = ["Filter", "add_filter_options", "age", "filter_of", "format_age", "format_bytes", "format_date", "printable"]

_KINDS: Final = ("kv", "logits", "completion", "lora")
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@dataclasses.dataclass(frozen=True, slots=True)
class Filter:
    """Units that meet all of what is set. A time that is not known meets no bound.

    Attributes:
        model: start of the model's key; "" means any.
        kind: kind of unit; None means any.
        older_than_s: seconds since it was written, at least.
        idle_s: seconds since it was last read or written, at least.
    """

    model: str = ""
    kind: str | None = None
    older_than_s: float | None = None
    idle_s: float | None = None

    def __bool__(self) -> bool:
        return self != Filter()

    @property
    def ageless(self) -> Filter:
        """The same without `older_than_s`, the only part that may need a unit's head."""
        return dataclasses.replace(self, older_than_s=None)

    def fits(self, found: Found, now: float) -> bool:
        """Whether the filter means this value, at the time `now`, seconds since 1970."""
        return (
            found.model.startswith(self.model)
            and self.kind in (None, found.kind)
            and _passed(found.written_at, self.older_than_s, now)
            and _passed(found.used_at, self.idle_s, now)
        )


def _passed(since: float | None, bound_s: float | None, now: float) -> bool:
    return bound_s is None or (since is not None and now - since >= bound_s)


def add_filter_options(parser: argparse.ArgumentParser, *, times: bool) -> None:
    """Adds the options of a `Filter`, those about time if `times`."""
    group = parser.add_argument_group("which units")
    group.add_argument(
        "--model", type=_model_prefix, metavar="PREFIX", help="start of a model's key, as `stats` shows it"
    )
    group.add_argument("--kind", choices=_KINDS, help="kind of unit")
    if times:
        group.add_argument("--older-than", type=_duration, metavar="TIME", help="written that long ago: 30s, 90m, 7d")
        group.add_argument("--idle", type=_duration, metavar="TIME", help="neither read nor written for that long")


def filter_of(args: argparse.Namespace) -> Filter:
    """The filter that the options mean."""
    return Filter(args.model or "", args.kind, getattr(args, "older_than", None), getattr(args, "idle", None))


def _model_prefix(text: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{1,16}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not the start of a model's key: 1 to 16 hexadecimal digits")
    return text


def _duration(text: str) -> float:
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smhdw])", text)
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; give a number and s, m, h, d or w, like 7d")
    return float(match[1]) * _UNITS[match[2]]


def age(since: float | None, now: float) -> float | None:
    """Seconds from `since` to `now`; None if that is not known. A clock that is behind gives 0."""
    return None if since is None else max(0.0, now - since)


def format_age(seconds: float | None) -> str:
    """A time in its largest fitting unit: ``12 s``, ``3 h``, ``7 d``; ``-`` if it is not known."""
    if seconds is None:
        return "-"
    for suffix in ("d", "h", "m"):
        if seconds >= 2 * _UNITS[suffix]:
            return f"{seconds / _UNITS[suffix]:.0f} {suffix}"
    return f"{seconds:.0f} s"


def format_bytes(num_bytes: int) -> str:
    """Bytes in a unit that keeps three or four digits: ``512 B``, ``1.5 MiB``, ``20.0 GiB``."""
    size = float(num_bytes)
    for suffix in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if suffix == "B" else f"{size:.1f} {suffix}"
        size /= 1024
    return f"{size:.1f} TiB"


def format_date(seconds: float) -> str:
    """A time since 1970 as date and time in UTC; what can't be one stays a number."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):  # a unit may say anything
        return str(seconds)


def printable(text: str) -> str:
    """`text` without what could steer a terminal: keys and names in a shared store may be anybody's."""
    return "".join(character if character.isprintable() else "?" for character in text)
