"""Chunkers: exact cover, size bounds, and cuts that follow the content wherever it stands."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pcache._native import gear_cuts
from p2pcache.core.chunking import (
    ContentChunker,
    FixedChunker,
    SegmentChunker,
    as_tokens,
    gear_cuts_py,
)
from p2pcache.types import ConfigError

VOCABULARY = 128_256


def prose(seed: int, count: int) -> np.ndarray:
    """Token ids with a Zipf-like distribution, as text has: frequent ids recur all the time."""
    rng = np.random.default_rng(seed)
    return np.minimum(rng.zipf(1.1, count), VOCABULARY - 1).astype(np.uint32)


def uniform(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, count, dtype=np.uint32)


@st.composite
def token_runs(draw: st.DrawFn) -> np.ndarray:
    """Varied, repetitive and constant runs; hypothesis's own lists would never reach a second chunk."""
    ids = draw(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=8))
    seed, count = draw(st.integers(0, 2**32 - 1)), draw(st.integers(0, 3000))
    few = np.random.default_rng(seed).choice(np.array(ids, np.uint32), count)
    return draw(st.sampled_from([few, uniform(seed, count), prose(seed, count)]))


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, int, int]:
    low, middle, high = sorted(draw(st.sets(st.integers(1, 600), min_size=3, max_size=3)))
    return low, middle, high


@st.composite
def chunkers(draw: st.DrawFn, count: int):
    boundaries = sorted(draw(st.sets(st.integers(0, count), max_size=6)))
    return draw(
        st.sampled_from(
            [
                FixedChunker(draw(st.integers(1, 600))),
                SegmentChunker(boundaries, max_tokens=draw(st.integers(1, 600))),
                ContentChunker(*draw(sizes())),
            ]
        )
    )


@given(token_runs(), st.data())
def test_spans_cover_the_prompt_in_order_without_gaps(tokens: np.ndarray, data: st.DataObject) -> None:
    chunker = data.draw(chunkers(len(tokens)))
    spans = chunker.spans(tokens)
    assert all(start < end for start, end in spans)
    assert [end for _, end in spans[:-1]] == [start for start, _ in spans[1:]]
    assert (spans[0][0], spans[-1][1]) == (0, len(tokens)) if len(tokens) else spans == []
    if isinstance(chunker, SegmentChunker):
        starts = chunker.segment_starts
        assert starts[0] == 0 and set(starts) - {len(tokens)} <= {start for start, _ in spans}


@pytest.mark.parametrize(
    "chunker", [FixedChunker(), SegmentChunker(()), SegmentChunker((0,)), ContentChunker()]
)
def test_no_tokens_have_no_span_and_one_token_has_one(chunker) -> None:
    assert chunker.spans(as_tokens([])) == []
    assert chunker.spans(as_tokens([7])) == [(0, 1)]


# ---- SegmentChunker


def test_a_long_segment_is_cut_from_its_own_start() -> None:
    chunker = SegmentChunker([100, 350], max_tokens=100)
    assert chunker.spans(uniform(0, 380)) == [(0, 100), (100, 200), (200, 300), (300, 350), (350, 380)]
    assert chunker.segment_starts == (0, 100, 350)
    assert chunker == SegmentChunker((np.int64(100), 350), max_tokens=100)


def test_a_segment_that_begins_at_the_end_is_empty() -> None:
    assert SegmentChunker((0, 10)).spans(uniform(0, 10)) == [(0, 10)]


def test_a_boundary_beyond_the_prompt_is_refused() -> None:
    with pytest.raises(ConfigError, match="begins at 11, behind a prompt of 10"):
        SegmentChunker((3, 11)).spans(uniform(0, 10))


# ---- ContentChunker


@given(token_runs(), sizes())
def test_native_cuts_equal_the_twins(tokens: np.ndarray, sizes: tuple[int, int, int]) -> None:
    low, _, high = sizes
    threshold = ContentChunker(*sizes).threshold
    cuts = gear_cuts(tokens, low, threshold, high)
    assert cuts.dtype == np.int64
    assert cuts.tolist() == gear_cuts_py(tokens, low, threshold, high)
    assert ContentChunker(*sizes).spans(tokens) == list(itertools.pairwise([0, *cuts.tolist()]))


@given(token_runs(), sizes())
def test_chunk_sizes_keep_their_bounds_but_for_the_last(
    tokens: np.ndarray, sizes: tuple[int, int, int]
) -> None:
    low, _, high = sizes
    lengths = [end - start for start, end in ContentChunker(*sizes).spans(tokens)]
    assert all(low <= length <= high for length in lengths[:-1])
    assert all(length <= high for length in lengths)


@given(st.integers(0, 2**32 - 1), st.integers(8, 300), st.integers(0, 3000), st.integers(0, 3000))
def test_where_a_cut_may_be_depends_on_the_last_8_tokens_only(seed: int, low: int, a: int, b: int) -> None:
    """Without a maximum, a cut in one prompt is one in the other, unless its minimum forbids it there."""
    document, chunker = prose(seed, 4000), ContentChunker(low, low + 100, 1_000_000)
    cuts = [
        [-before]
        + [end - before for _, end in chunker.spans(np.concatenate([uniform(before, before), document]))]
        for before in (a, b)
    ]
    for mine, other in (cuts, cuts[::-1]):
        for cut in (c for c in mine if 8 <= c < len(document)):
            assert cut in other or any(0 < cut - earlier < low for earlier in other)


@given(st.integers(0, 2**32 - 1), st.integers(0, 5000), st.integers(0, 500))
@settings(derandomize=True)  # how soon two cuttings meet is a matter of chance: the same draws in every run
def test_a_document_is_found_again_at_any_offset(seed: int, before: int, after: int) -> None:
    document = prose(seed, 8000)
    alone = ContentChunker().spans(document)
    prompt = np.concatenate([uniform(seed + 1, before), document, uniform(seed + 2, after)])
    moved = {(start - before, end - before) for start, end in ContentChunker().spans(prompt)}
    shared = [span for span in alone if span in moved]
    # Once the two have a cut in common they stay together, up to the document's end.
    assert shared == alone[alone.index(shared[0]) : alone.index(shared[-1]) + 1]
    assert sum(end - start for start, end in shared) > 0.6 * len(document)


def test_cuts_resynchronise_soon_after_a_seam() -> None:
    """A token inserted, removed or changed costs the chunks around it and no more."""
    lost = []
    for seed in range(200):
        tokens = prose(seed, 12_000)
        at = 3000 + 7 * seed
        edited = [
            np.insert(tokens, at, 5),
            np.delete(tokens, at),
            np.where(np.arange(12_000) == at, 5, tokens),
        ]
        kept = {tokens[a:b].tobytes() for a, b in ContentChunker().spans(tokens)}
        for prompt in edited:
            spans = ContentChunker().spans(prompt.astype(np.uint32))
            changed = [(a, b) for a, b in spans if prompt[a:b].astype(np.uint32).tobytes() not in kept]
            lost.append(changed[-1][1] - changed[0][0] if changed else 0)
    assert np.median(lost) <= 2 * 256
    assert np.percentile(lost, 95) <= 1024 + 256
    assert max(lost) <= 4 * 1024


@pytest.mark.parametrize("sizes", [(64, 256, 1024), (16, 64, 256)])
def test_documents_in_a_new_order_lose_about_one_chunk_at_each_of_their_ends(
    sizes: tuple[int, int, int],
) -> None:
    chunker, rng = ContentChunker(*sizes), np.random.default_rng(1)
    documents = [prose(seed, 2000) for seed in range(12)]

    def contents(order: np.ndarray) -> list[bytes]:
        prompt = np.concatenate([documents[i] for i in order])
        return [prompt[a:b].tobytes() for a, b in chunker.spans(prompt)]

    known = set(contents(np.arange(12)))
    lost = edges = 0
    for _ in range(50):
        lost += sum(content not in known for content in contents(rng.permutation(12)[:6]))
        edges += 7  # in front of each document, and behind the last
    assert lost / edges <= 1.05


@pytest.mark.parametrize("make", [prose, uniform])
@pytest.mark.parametrize(
    "sizes", [(64, 256, 1024), (64, 200, 1024), (64, 512, 4096), (16, 100, 1000), (200, 201, 400)]
)
def test_the_average_is_the_nominal_one(make, sizes: tuple[int, int, int]) -> None:
    tokens = make(3, 1_000_000)
    average = len(tokens) / len(ContentChunker(*sizes).spans(tokens))
    assert average == pytest.approx(sizes[1], rel=0.05)


def test_cuts_are_the_same_in_every_process_and_every_release() -> None:
    """A change here makes every stored content-defined chunk unfindable: it needs a new key version."""
    script = (
        "import hashlib, numpy as np; from p2pcache._native import gear_cuts;"
        "tokens = (np.arange(100_000, dtype=np.uint64) * 2654435761 % 128256).astype(np.uint32);"
        "cuts = gear_cuts(tokens, 64, 2**64 // 192, 1024);"
        "print(hashlib.sha256(cuts.tobytes()).hexdigest()[:16], len(cuts))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert outputs == {"6af337ff2e51a553 435\n"}


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 0), (3, 2)])
def test_native_refuses_sizes_out_of_order(low: int, high: int) -> None:
    with pytest.raises(ValueError, match="1 <= min_tokens <= max_tokens"):
        gear_cuts(uniform(0, 4), low, 1 << 60, high)


@pytest.mark.parametrize(
    "tokens", [[1, 2], np.zeros(4, np.int64), np.zeros((2, 2), np.uint32), np.zeros(8, np.uint32)[::2]]
)
def test_native_takes_contiguous_uint32_only(tokens) -> None:
    """No silent conversion: a copy would hide a caller that skipped `as_tokens`."""
    with pytest.raises(TypeError):
        gear_cuts(tokens, 64, 1 << 56, 1024)


# ---- settings and input


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FixedChunker(0), "tokens must be a whole number above 0, not 0"),
        (lambda: FixedChunker(True), "not True"),
        (lambda: FixedChunker(2.0), "not 2.0"),
        (lambda: SegmentChunker((), max_tokens=-1), "max_tokens must be a whole number"),
        (lambda: SegmentChunker((5, 5)), "ascending offsets"),
        (lambda: SegmentChunker((5, 4)), "ascending offsets"),
        (lambda: SegmentChunker((-1, 4)), "ascending offsets"),
        (lambda: SegmentChunker((1.5,)), "token offset, not 1.5"),
        (lambda: ContentChunker(min_tokens=0), "min_tokens must be a whole number"),
        (lambda: ContentChunker(average_tokens=256.5), "average_tokens must be a whole number"),
        (lambda: ContentChunker(min_tokens=300), "min_tokens < average_tokens < max_tokens"),
        (lambda: ContentChunker(average_tokens=2000), "min_tokens < average_tokens < max_tokens"),
    ],
)
def test_impossible_settings_are_refused_in_words(make, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_as_tokens_takes_what_engines_have() -> None:
    expected = np.array([0, 7, 128_255], np.uint32)
    for given_as in (
        [0, 7, 128_255],
        (0, np.int32(7), 128_255),
        expected,
        expected.astype(np.int64),
        expected.astype(">u4"),
        np.repeat(expected, 2)[::2],
        torch.tensor([0, 7, 128_255]),
        torch.tensor([0, 7, 128_255], dtype=torch.int32),
    ):
        tokens = as_tokens(given_as)
        assert tokens.dtype == np.uint32 and tokens.flags.c_contiguous
        assert tokens.tolist() == expected.tolist()
    assert as_tokens(np.array([2**32 - 1])).tolist() == [2**32 - 1]
    assert as_tokens(np.array([], np.int64)).size == as_tokens(()).size == 0


def test_as_tokens_copies_neither_uint32_nor_int32() -> None:
    frozen = uniform(0, 16)
    frozen.flags.writeable = False
    assert as_tokens(frozen) is frozen
    assert np.shares_memory(as_tokens(frozen.view(np.int32)), frozen)
    tensor = torch.arange(16, dtype=torch.int32)
    assert np.shares_memory(as_tokens(tensor), tensor.numpy())
    assert ContentChunker().spans(frozen) == [(0, 16)]


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([[1, 2], [3, 4]], r"one row of integers, not int64 of shape \[2, 2\]"),
        (5, "one row of integers"),
        ("text", "one row of integers"),
        ({1: 2}, "one row of integers"),
        ([1, [2, 3]], "one row of integers"),
        ([1, 2.0], "not float64"),
        (np.array([1], np.float32), "not float32"),
        ([True, False], "a bool among them"),
        ([7, True], "a bool among them"),
        (np.array([True]), "not bool"),
        (["1", "2"], "one row of integers"),
        ([None], "one row of integers"),
        ([2**70], "one row of integers"),
        ([3, -1], "from 0 to"),
        (np.array([-1], np.int32), "from 0 to"),
        (np.array([2**32]), "from 0 to"),
    ],
)
def test_as_tokens_refuses_in_words(tokens, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        as_tokens(tokens)
