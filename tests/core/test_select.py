"""Which tokens are recomputed: properties over random layouts of pieces."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pcache.blend.select import Piece, Rank, Selection, recompute_positions
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


@st.composite
def selections(draw: st.DrawFn) -> Selection:
    head = draw(st.sampled_from([0, 0, 1, 16]))
    rank = draw(st.sampled_from(Rank))
    if rank is Rank.NONE:
        return Selection(head)
    share = draw(st.integers(1, 1000)) / 1000
    layer = draw(st.sampled_from([None, 1, 7])) if rank is not Rank.RANDOM else None
    return Selection(head, share, rank, layer, seed=draw(st.integers(0, 9)) if rank is Rank.RANDOM else 0)


@settings(deadline=None)  # shared cores: wall time says nothing
@given(selections())
def test_a_selection_reads_what_it_writes(selection: Selection) -> None:
    assert Selection.parse(str(selection)) == selection


@settings(deadline=None)  # shared cores: wall time says nothing
@given(prompts(), selections(), st.integers(0, 1000))
def test_a_share_of_inexact_tokens_with_the_highest_scores(prompt, selection, seed: int) -> None:
    total, pieces = prompt
    scores = np.random.default_rng(seed).integers(0, 20, total).astype(float)
    got = set(selection.positions(total, pieces, scores).tolist())
    fixed = set(recompute_positions(total, pieces, selection.head_tokens).tolist())
    assert selection.fixed_positions(total, pieces).tolist() == sorted(fixed) and got >= fixed
    inexact = {t for p in pieces if not p.exact for t in range(p.start, p.stop)}
    candidates, extra = inexact - fixed, got - fixed
    assert extra <= candidates
    assert len(extra) == min(round(selection.share * len(inexact)), len(candidates))
    if selection.needs_kv and extra and candidates - extra:
        left = candidates - extra
        assert min(scores[t] for t in extra) >= max(scores[t] for t in left)
        least = min(scores[t] for t in extra)
        equal = [t for t in candidates if scores[t] == least]
        assert sorted(set(equal) & extra) == sorted(equal)[: len(set(equal) & extra)]  # the earlier ones


def test_what_is_known_before_any_byte_arrives() -> None:
    early = {text: not Selection.parse(text).needs_kv for text in ("none", "head-4", "random-1%", "query-1%")}
    assert early == {"none": True, "head-4": True, "random-1%": True, "query-1%": False}
    assert Selection.parse("deviation-v-15%@3") == Selection(0, 0.15, Rank.DEVIATION_V, 3)
    assert Selection.parse("head-16+query-10%") == Selection(16, 0.1, Rank.QUERY)


@pytest.mark.parametrize(
    "text",
    ["", "head", "head-", "query", "query-10", "query-x%", "query-1.1.1%", "tail-4", "deviation-0%",
     "random-101%", "head-4+", "head-4query-1%", "+query-1%", "deviation-5%@0", "none+head-4"],
)  # fmt: skip
def test_refuses_text_that_is_no_selection(text: str) -> None:
    with pytest.raises(ConfigError):
        Selection.parse(text)


def test_refuses_a_ranking_without_scores() -> None:
    with pytest.raises(ConfigError, match="score"):
        Selection(0, 0.1, Rank.QUERY).positions(10, [Piece(0, 5, 3, exact=False)])
    for fields in ((-1,), (0, 1.5, Rank.QUERY), (0, 0.1), (0, 0.0, Rank.QUERY), (0, 0.1, Rank.RANDOM, 3)):
        with pytest.raises(ConfigError):
            Selection(*fields)
