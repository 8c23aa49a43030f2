"""Durations counted in fixed buckets, so that histograms of nodes and of times add up."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

BOUNDS_S = tuple(float(f"{digit}e{power}") for power in range(-5, 1) for digit in (1, 2.5, 5)) + (10.0,)
"""Upper bounds in seconds, inclusive: three a decade from 10 microseconds to 10 seconds."""


class Histogram:
    """How many durations fell into each bucket; the last bucket is of those above every bound."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float] = BOUNDS_S):
        """bounds: upper bounds of the buckets in seconds, ascending."""
        if not bounds or any(low >= high for low, high in zip(bounds, bounds[1:], strict=False)):
            raise ValueError("a histogram needs ascending bounds")
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, seconds: float, count: int = 1) -> None:
        """Count a duration, so many times. One below zero, as of a clock that went back, counts as zero."""
        if seconds < 0:
            seconds = 0.0
        self.counts[bisect_left(self.bounds, seconds)] += count
        self.sum += seconds * count

    @property
    def count(self) -> int:
        return sum(self.counts)

    def plain(self) -> dict[str, Any]:
        """As plain values: `bounds`, `counts` (one more than bounds, not cumulative) and `sum`."""
        return {"bounds": list(self.bounds), "counts": list(self.counts), "sum": self.sum}


def quantile(plain: Mapping[str, Any], q: float) -> float | None:
    """The q-quantile in seconds of a histogram's plain form, linear within a bucket; None where it is empty.

    What lies above every bound counts as the highest bound, as Prometheus has it.
    """
    bounds, counts = plain["bounds"], plain["counts"]
    rank = q * sum(counts)
    if not rank:
        return None
    below, low = 0, 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if count and below + count >= rank:
            return low + (bound - low) * (rank - below) / count
        below, low = below + count, bound
    return bounds[-1]
