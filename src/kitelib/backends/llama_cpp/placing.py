"""In which order the tokens of a step go into the batch, and so into which cells of the KV cache.

llama.cpp gives the rows of a batch the free cells from the lowest on, in the order of the rows. Rejected drafts leave
free cells between live ones. They are filled again by whatever sequence of the step has all its cells below, so that
every sequence still ascends; and the guesses of all sequences go last, the first guesses before the second ones, so
that what is rejected next is mostly at the top, where it can be cut off.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence

__all__ = ["Piece", "Placement", "place"]


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of one sequence in a step.

    Attributes:
        top: highest cell of the sequence; -1 if it has none.
        tokens: how many tokens.
        drafts: how many of the last ones are guesses.
    """

    top: int
    tokens: int
    drafts: int = 0

    def depth(self, token: int) -> int:
        """0 for a token that stays; a draft counts from 1, since it only stays if those before it do."""
        return max(0, token + 1 + self.drafts - self.tokens)


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """Where the tokens of a step go.

    Attributes:
        rows: per piece, the row of the batch of each of its tokens, ascending.
        cells: per row, its cell, ascending.
        unfilled: free cells that no row may take; they have to be occupied before the step.
    """

    rows: list[Sequence[int]]
    cells: Sequence[int]
    unfilled: list[int]


def place(pieces: Sequence[Piece], holes: Sequence[int], next_cell: int) -> Placement:
    """Places the tokens of a step.

    As many holes are filled as can be: a sequence that may take a hole may take every higher one as well, so taking
    any of them for each hole, from the lowest on, is optimal.

    Args:
        pieces: what the step processes.
        holes: free cells below `next_cell`, ascending.
        next_cell: from here on all cells are free.
    """
    total = sum(piece.tokens for piece in pieces)
    order: list[tuple[int, int]] = []  # (piece, token) of each row
    filled: list[int] = []
    unfilled: list[int] = []
    started = [0] * len(pieces)
    waiting = sorted(range(len(pieces)), key=lambda index: pieces[index].top, reverse=True)
    ready: list[tuple[int, int]] = []  # (depth of its next token, piece)
    for hole in holes:
        while waiting and pieces[waiting[-1]].top < hole:
            index = waiting.pop()
            heapq.heappush(ready, (pieces[index].depth(0), index))
        if not ready:
            unfilled.append(hole)
            continue
        _, index = heapq.heappop(ready)
        order.append((index, started[index]))
        filled.append(hole)
        started[index] += 1
        if started[index] < pieces[index].tokens:
            heapq.heappush(ready, (pieces[index].depth(started[index]), index))
    if not filled and not any(piece.drafts for piece in pieces):
        return Placement(_in_turn(pieces), range(next_cell, next_cell + total), unfilled)
    rest = [(index, token) for index, piece in enumerate(pieces) for token in range(started[index], piece.tokens)]
    rest.sort(key=lambda each: pieces[each[0]].depth(each[1]))
    rows: list[list[int]] = [[] for _ in pieces]
    for row, (index, _) in enumerate([*order, *rest]):
        rows[index].append(row)
    return Placement(list(rows), [*filled, *range(next_cell, next_cell + len(rest))], unfilled)


def _in_turn(pieces: Sequence[Piece]) -> list[Sequence[int]]:
    """Rows one piece after the other, without guesses or holes: what most steps are."""
    rows: list[Sequence[int]] = []
    first = 0
    for piece in pieces:
        rows.append(range(first, first + piece.tokens))
        first += piece.tokens
    return rows
