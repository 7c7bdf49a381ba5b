"""Plain-text tables and the figures in them."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

__all__ = ["counted", "format_factor", "format_seconds", "format_table", "shorten"]

_GAP = "  "


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[int] = ()) -> str:
    """The rows as aligned columns under a ruled header.

    Args:
        header: column titles.
        rows: cells, one per title.
        left: indexes of the columns to align left; the others are aligned right, as figures are.

    Raises:
        ValueError: a row has another number of cells than the header.
    """
    for row in rows:
        if len(row) != len(header):
            raise ValueError(f"a row has {len(row)} cells, but the header has {len(header)}")
    widths = [max(len(line[column]) for line in (header, *rows)) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return _GAP.join(padded).rstrip()

    rule = _GAP.join("-" * width for width in widths)
    return "\n".join([line(header), rule, *(line(row) for row in rows)])


def counted(count: int, noun: str) -> str:
    """``1 block``, ``2 blocks``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_seconds(seconds: float) -> str:
    """Seconds with a unit that keeps two or three digits: ``7 ms``, ``0.35 s``, ``12.4 s``."""
    if seconds < 0.1:
        return f"{seconds * 1000:.1f} ms" if seconds < 0.01 else f"{seconds * 1000:.0f} ms"
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"


def format_factor(slow_s: float, fast_s: float) -> str:
    """How many times longer `slow_s` is than `fast_s`, as ``1.0x`` or ``85x``; ``-`` if that has no meaning."""
    if fast_s <= 0:
        return "-"
    factor = slow_s / fast_s
    return f"{factor:.1f}x" if factor < 10 else f"{factor:,.0f}x"


def shorten(text: str, width: int) -> str:
    """`text` on one line of at most `width` characters, cut between words."""
    return textwrap.shorten(text, width=width, placeholder="...")
