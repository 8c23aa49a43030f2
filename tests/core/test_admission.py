"""What may be written to the NVMe tier: never more than the rate for long, and only what was used."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcache.core.admission import BURST_S, Admission

ASKED = st.lists(st.tuples(st.integers(1, 5_000), st.floats(0, 3)), min_size=1, max_size=60)


@given(ASKED, st.integers(1, 3_000))
def test_over_any_span_no_more_is_written_than_the_rate_a_burst_and_one_body(asked, rate):
    admission, now_s, written = Admission(rate, used_only=False), 0.0, []
    for nbytes, pause_s in asked:
        now_s += pause_s
        if admission.admits(nbytes, now_s, used=False):
            written.append((now_s, nbytes))
    for first, (start_s, _) in enumerate(written):
        for last in range(first, len(written)):
            span = written[first : last + 1]
            allowed = rate * (span[-1][0] - start_s + BURST_S) + max(nbytes for _, nbytes in span)
            assert sum(nbytes for _, nbytes in span) <= allowed * (1 + 1e-9)


@given(ASKED, st.integers(1, 3_000))
def test_a_refused_body_is_admitted_when_it_has_waited_for_what_came_before(asked, rate):
    admission, now_s = Admission(rate, used_only=False), 0.0
    for nbytes, pause_s in asked:
        now_s += pause_s
        admission.admits(nbytes, now_s, used=False)
    debt_s = max(nbytes for nbytes, _ in asked) / rate
    assert admission.admits(1, now_s + debt_s + 1, used=False)


@given(ASKED)
def test_without_a_rate_all_is_admitted(asked):
    admission = Admission(0, used_only=False)
    assert all(admission.admits(nbytes, at_s, used=False) for nbytes, at_s in asked)


def test_a_body_larger_than_a_seconds_worth_is_paid_for_afterwards():
    admission = Admission(1_000, used_only=False)
    assert admission.admits(5_000, 0.0, used=False)
    assert not admission.admits(1, 3.9, used=False)
    assert admission.admits(1, 4.1, used=False)


@pytest.mark.parametrize("rate", [0, 1_000])
def test_what_was_not_used_is_refused_on_demand_and_costs_no_credit(rate):
    admission = Admission(rate, used_only=True)
    assert not any(admission.admits(5_000, 0.0, used=False) for _ in range(3))
    assert admission.admits(5_000, 0.0, used=True)


def test_a_clock_that_goes_back_gives_no_credit():
    admission = Admission(1_000, used_only=False)
    assert admission.admits(1_000, 10.0, used=False)
    assert not admission.admits(1, 5.0, used=False) and not admission.admits(1, 10.0, used=False)


def test_what_encoding_saves_may_be_written_by_others_and_is_never_more_than_a_burst():
    admission = Admission(1000, used_only=False)
    assert admission.admits(1500, 0.0, used=False)
    assert not admission.admits(1, 0.0, used=False)
    admission.give_back(800)
    assert admission.admits(300, 0.0, used=False)
    assert not admission.admits(1, 0.0, used=False)
    admission.give_back(10_000)
    assert admission.admits(1000, 0.0, used=False) and not admission.admits(1, 0.0, used=False)
    unlimited = Admission(0, used_only=False)
    unlimited.give_back(5)
    assert unlimited.admits(1 << 40, 0.0, used=False)
