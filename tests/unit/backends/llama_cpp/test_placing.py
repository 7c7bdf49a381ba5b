"""Tokens of a step are placed so that every sequence ascends, and no hole is left that a row could fill."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kitelib.backends.llama_cpp.placing import Piece, Placement, place

NEXT = 40

PIECES = st.integers(1, 6).flatmap(
    lambda tokens: st.builds(Piece, st.integers(-1, NEXT - 1), st.just(tokens), st.integers(0, tokens - 1))
)
HOLES = st.sets(st.integers(0, NEXT - 1), max_size=12).map(sorted)


def most_filled(pieces: list[Piece], holes: list[int]) -> int:
    """As many holes as can be filled: a matching of holes and rows, made larger along augmenting paths."""
    rows = [piece.top for piece in pieces for _ in range(piece.tokens)]
    taken: dict[int, int] = {}  # row -> hole

    def fits(hole: int, tried: set[int]) -> bool:
        for row, top in enumerate(rows):
            if top < hole and row not in tried:
                tried.add(row)
                if row not in taken or fits(taken[row], tried):
                    taken[row] = hole
                    return True
        return False

    return sum(fits(hole, set()) for hole in holes)


@settings(max_examples=150, deadline=None)
@given(st.lists(PIECES, min_size=1, max_size=6), HOLES)
def test_rows_ascend_and_fill_what_can_be_filled(pieces: list[Piece], holes: list[int]) -> None:
    found = place(pieces, holes, NEXT)
    total = sum(piece.tokens for piece in pieces)
    assert sorted(row for rows in found.rows for row in rows) == list(range(total))
    filled = [cell for cell in found.cells if cell < NEXT]
    # The library gives the rows the lowest free cells; what is neither filled nor free any more is as it should be.
    assert list(found.cells) == [*filled, *range(NEXT, NEXT + total - len(filled))]
    assert sorted([*filled, *found.unfilled]) == holes
    assert len(filled) == most_filled(pieces, holes)
    for piece, rows in zip(pieces, found.rows, strict=True):
        assert len(rows) == piece.tokens
        assert list(rows) == sorted(rows)
        assert found.cells[rows[0]] > piece.top


def test_steps_without_guesses_and_holes_go_one_piece_after_the_other() -> None:
    found = place([Piece(3, 2), Piece(-1, 3), Piece(7, 1)], [], 8)
    assert found == Placement([range(2), range(2, 5), range(5, 6)], range(8, 14), [])


def test_guesses_come_last_the_first_of_each_piece_before_the_second() -> None:
    found = place([Piece(3, 3, 2), Piece(7, 2), Piece(5, 4, 2)], [], 8)
    assert found.rows == [[0, 5, 7], [1, 2], [3, 4, 6, 8]]


def test_what_stays_fills_holes_before_guesses_do() -> None:
    found = place([Piece(2, 3, 2), Piece(3, 2)], [4, 5], 9)
    assert [[found.cells[row] for row in rows] for rows in found.rows] == [[4, 10, 11], [5, 9]]
