"""Whether encoding pays on a line: the right choice, and one that holds still."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcache.core.wirechoice import MARGIN, WireChoice

RATIO = 0.75
GBIT_S = 8e-9  # seconds a byte over 1 Gbit/s


def settled(choice: WireChoice, line_s: float, coding_s: float, noise: list[float]) -> list[bool]:
    """Choices over pulls of which each is measured as it was made. noise: factors of the measured pace."""
    chosen = []
    for factor in noise:
        pace_s = line_s * (RATIO if choice.encoded else 1.0) * factor
        chosen.append(choice.update(pace_s, RATIO, coding_s))
    return chosen


@pytest.mark.parametrize(
    ("gbit_per_s", "encoded"), [(0.1, True), (1, True), (2.5, True), (10, False), (100, False)]
)
def test_a_slow_line_is_worth_encoding_and_a_fast_one_is_not(gbit_per_s: float, encoded: bool) -> None:
    coding_s = 1 / 1e9  # encoded at 1 GB/s, decoded faster
    assert settled(WireChoice(), GBIT_S / gbit_per_s, coding_s, [1.0] * 4) == [encoded] * 4


@given(st.floats(1e-11, 1e-6), st.floats(1e-11, 1e-6), st.lists(st.floats(0.97, 1.03), min_size=9))
def test_noise_does_not_turn_a_choice_over_and_back(
    line_s: float, coding_s: float, noise: list[float]
) -> None:
    chosen = settled(WireChoice(), line_s, coding_s, noise)
    assert sum(a != b for a, b in zip(chosen, chosen[1:], strict=False)) <= 1
    saved = 1 - max(RATIO, coding_s / line_s)  # share of the time
    if saved > MARGIN + 0.05:
        assert all(chosen)
    if saved < -0.05:
        assert not any(chosen)


@given(st.floats(1e-11, 1e-6), st.floats(1e-11, 1e-6), st.floats(1e-11, 1e-6))
def test_a_line_that_changes_is_chosen_for_anew(before_s: float, after_s: float, coding_s: float) -> None:
    choice = WireChoice()
    settled(choice, before_s, coding_s, [1.0] * 3)
    chosen = settled(choice, after_s, coding_s, [1.0] * 3)
    saved = 1 - max(RATIO, coding_s / after_s)
    if saved > MARGIN + 1e-6 or saved < -1e-6:
        assert chosen[-1] is (saved > MARGIN)


def test_an_old_pace_right_after_a_change_does_not_turn_it_back() -> None:
    """Estimates are medians: they go on telling of the way before."""
    choice, coding_s = WireChoice(), 0.1 * GBIT_S
    assert choice.update(GBIT_S, RATIO, coding_s)
    assert all(choice.update(GBIT_S, RATIO, coding_s) for _ in range(3))
    fast_s = 0.05 * GBIT_S
    assert not choice.update(RATIO * fast_s, RATIO, coding_s)
    assert not any(choice.update(RATIO * fast_s, RATIO, coding_s) for _ in range(3))
