"""Space-Saving against an exact count: its bounds hold for every stream."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcache.core.heavy import SpaceSaving

streams = st.lists(st.integers(0, 12), max_size=200)
capacities = st.integers(1, 8)


def counted(stream: list[int], capacity: int) -> SpaceSaving[int]:
    heavy: SpaceSaving[int] = SpaceSaving(capacity)
    for key in stream:
        heavy.observe(key, nbytes=10 * key, tokens=1)
    return heavy


@given(streams, capacities)
def test_no_count_is_too_low_nor_too_high_by_more_than_its_error(stream: list[int], capacity: int):
    exact = Counter(stream)
    for entry in counted(stream, capacity).top(capacity):
        assert entry.count - entry.error <= exact[entry.key] <= entry.count


@given(streams, capacities)
def test_every_key_that_is_frequent_enough_is_counted(stream: list[int], capacity: int):
    there = {entry.key for entry in counted(stream, capacity).top(capacity)}
    assert {key for key, n in Counter(stream).items() if n > len(stream) / capacity} <= there


@given(streams, capacities)
def test_counts_add_up_to_the_stream_and_memory_is_bounded(stream: list[int], capacity: int):
    heavy = counted(stream, capacity)
    assert sum(e.count for e in heavy.top(capacity)) == len(stream) == heavy.total
    assert len(heavy) == min(capacity, len(set(stream)))


@given(streams)
def test_with_room_for_all_it_is_exact(stream: list[int]):
    top = counted(stream, 13).top(13)
    assert {e.key: (e.count, e.error) for e in top} == {k: (n, 0) for k, n in Counter(stream).items()}
    assert [e.count for e in top] == sorted((e.count for e in top), reverse=True)
    assert all((e.bytes, e.tokens) == (10 * e.key * e.count, e.count) for e in top)


@given(streams, capacities)
def test_bytes_and_tokens_are_never_too_many(stream: list[int], capacity: int):
    exact = Counter(stream)
    for entry in counted(stream, capacity).top(capacity):
        assert entry.count - entry.error <= entry.tokens <= exact[entry.key]
        assert entry.bytes == 10 * entry.key * entry.tokens


@given(streams, capacities)
def test_the_least_count_is_known_without_a_search(stream: list[int], capacity: int):
    heavy = counted(stream, capacity)
    if stream:
        assert heavy._least == min(heavy._buckets) == min(e.count for e in heavy.top(capacity))
        assert sum(map(len, heavy._buckets.values())) == len(heavy)


def test_a_hot_key_is_found_among_many_that_come_once():
    heavy: SpaceSaving[str] = SpaceSaving(16)
    for i in range(5000):
        heavy.observe(f"once {i}")
        if i % 10 == 0:
            heavy.observe("hot")
    assert heavy.top(1)[0].key == "hot" and len(heavy) == 16


def test_there_has_to_be_room():
    with pytest.raises(ValueError, match="one key"):
        SpaceSaving(0)
