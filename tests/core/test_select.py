"""Which tokens are recomputed: properties over random layouts of pieces."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pcache.blend.select import Piece, recompute_positions
from p2pcache.types import ConfigError


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, list[Piece]]:
    """`(total, pieces)`: spans with gaps, exact or moved, some of them stored as one run."""
    at, pieces = 0, []
    for _ in range(draw(st.integers(0, 6))):
        gap = draw(st.sampled_from([0, 0, 1, 7]))
        tokens = draw(st.integers(1, 40))
        start = at + gap
        before = pieces[-1] if pieces else None
        if before and not gap and not before.exact and draw(st.booleans()):
            piece = Piece(start, start + tokens, start - before.delta, exact=False, follows=True)
        elif draw(st.booleans()):
            piece = Piece(start, start + tokens, start, exact=True)
        else:
            piece = Piece(start, start + tokens, draw(st.integers(0, 500)), exact=False)
        pieces.append(piece)
        at = piece.stop
    return max(at + draw(st.integers(0, 9)), 1), pieces


@settings(deadline=None)  # shared cores: wall time says nothing
@given(prompts(), st.integers(0, 50))
def test_recomputes_what_is_uncovered_the_heads_and_the_last_token(prompt, head_tokens: int) -> None:
    total, pieces = prompt
    got = recompute_positions(total, pieces, head_tokens)
    want = set(range(total)) - {t for p in pieces for t in range(p.start, p.stop)} | {total - 1}
    for p in pieces:
        if not p.exact and not p.follows:
            want |= set(range(p.start, min(p.start + head_tokens, p.stop)))
    assert got.dtype == np.int64
    assert got.tolist() == sorted(want)


@settings(deadline=None)  # shared cores: wall time says nothing
@given(prompts())
def test_without_heads_nothing_of_a_piece_but_the_last_token_is_recomputed(prompt) -> None:
    total, pieces = prompt
    covered = {t for p in pieces for t in range(p.start, p.stop)} - {total - 1}
    assert covered.isdisjoint(recompute_positions(total, pieces, 0).tolist())


def test_a_whole_hit_still_computes_the_last_token() -> None:
    assert recompute_positions(10, [Piece(0, 10, 0, exact=True)]).tolist() == [9]


def test_a_stored_run_of_pieces_has_one_head() -> None:
    run = [Piece(10, 30, 90, exact=False), Piece(30, 50, 110, exact=False, follows=True)]
    assert recompute_positions(51, [Piece(0, 10, 0, exact=True), *run], 4).tolist() == [10, 11, 12, 13, 50]


@pytest.mark.parametrize(
    "pieces",
    [
        [Piece(0, 10, 0, exact=True), Piece(9, 12, 9, exact=True)],  # overlap
        [Piece(5, 10, 5, exact=True), Piece(0, 5, 0, exact=True)],  # out of order
        [Piece(0, 21, 0, exact=True)],  # past the end
        [Piece(0, 5, 9, exact=False, follows=True)],  # behind nothing
        [Piece(0, 5, 9, exact=False), Piece(6, 9, 15, exact=False, follows=True)],  # not adjacent
        [Piece(0, 5, 9, exact=False), Piece(5, 9, 99, exact=False, follows=True)],  # of another run
    ],
)
def test_refuses_pieces_that_contradict_each_other(pieces: list[Piece]) -> None:
    with pytest.raises(ConfigError):
        recompute_positions(20, pieces)


@pytest.mark.parametrize("fields", [(5, 5, 0, False), (-1, 3, 0, False), (0, 3, -1, False), (4, 8, 5, True)])
def test_refuses_a_piece_that_cannot_be(fields) -> None:
    with pytest.raises(ConfigError):
        Piece(*fields)


def test_refuses_an_empty_prompt_and_a_negative_head() -> None:
    with pytest.raises(ConfigError):
        recompute_positions(0, [])
    with pytest.raises(ConfigError):
        recompute_positions(3, [], head_tokens=-1)
