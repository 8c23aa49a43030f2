"""Buckets: each duration in exactly one, on the side of a bound that Prometheus expects."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcache.core.histogram import BOUNDS_S, Histogram, quantile

seconds = st.floats(-1, 100, allow_nan=False)


def of(values: list[float], bounds: tuple[float, ...] = BOUNDS_S) -> Histogram:
    histogram = Histogram(bounds)
    for value in values:
        histogram.observe(value)
    return histogram


@given(st.lists(seconds, max_size=100))
def test_a_bucket_counts_what_is_at_most_its_bound(values: list[float]):
    histogram = of(values)
    values = [max(v, 0.0) for v in values]
    for i, bound in enumerate(BOUNDS_S):
        assert sum(histogram.counts[: i + 1]) == sum(v <= bound for v in values)
    assert histogram.count == len(values)
    assert histogram.sum == pytest.approx(sum(values))


@given(st.lists(st.floats(1e-5, 10), min_size=1, max_size=100), st.floats(0.01, 1.0))
def test_a_quantile_lies_in_the_bucket_of_the_true_one(values: list[float], q: float):
    found = quantile(of(values).plain(), q)
    rank = next(n for n in range(1, len(values) + 1) if n >= q * len(values))
    true = sorted(values)[rank - 1]
    high = next(b for b in BOUNDS_S if true <= b)
    low = max((b for b in BOUNDS_S if b < high), default=0.0)
    assert low <= found <= high * (1 + 1e-9)


def test_the_ends_of_quantiles():
    assert quantile(Histogram().plain(), 0.5) is None
    assert quantile(of([1e9]).plain(), 0.5) == BOUNDS_S[-1]


def test_bounds_ascend_and_are_written_as_people_write_them():
    assert list(BOUNDS_S) == sorted(set(BOUNDS_S)) and len(BOUNDS_S) == 19
    assert [f"{b:g}" for b in BOUNDS_S[:4]] == ["1e-05", "2.5e-05", "5e-05", "0.0001"]
    assert BOUNDS_S[0] == 1e-5 and BOUNDS_S[-1] == 10.0


@pytest.mark.parametrize("bounds", [(), (1.0, 1.0), (2.0, 1.0)])
def test_bounds_that_are_no_bounds_are_refused(bounds: tuple[float, ...]):
    with pytest.raises(ValueError, match="ascending"):
        Histogram(bounds)


def test_the_plain_form_is_a_copy():
    histogram = of([0.1])
    plain = histogram.plain()
    histogram.observe(0.1)
    assert sum(plain["counts"]) == 1 and len(plain["counts"]) == len(plain["bounds"]) + 1
