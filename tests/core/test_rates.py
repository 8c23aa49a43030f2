"""What a node measures: robust against strays and company, still under noise, not for ever."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pcache.core.planner import Costs
from p2pcache.core.rates import FADE_S, FRESH_S, HOLD, MEASURABLE_BYTES, Prefill, Rate, attended

MIB = 1 << 20
PRIOR = (1e-3, 1e9)


def pace(rate: Rate, now_s: float = 0.0) -> float:
    return rate.at(now_s)[1]


# -- one rate --------------------------------------------------------------------------------------


@given(st.floats(1e-5, 1e-1), st.floats(1e5, 1e11))
def test_a_rate_is_what_is_measured(latency_s: float, bytes_per_s: float):
    rate = Rate(*PRIOR)
    rate.observe_latency(latency_s, 0.0)
    rate.observe(256 * MIB, 256 * MIB / bytes_per_s, 0.0)
    assert rate.cost_s(MIB, 0.0) == pytest.approx(latency_s + MIB / bytes_per_s)


@given(
    st.lists(st.floats(0.5e-9, 2e-9), min_size=5, max_size=5), st.lists(st.floats(1e-12, 1e-3), max_size=2)
)
def test_two_strays_do_not_move_it_beyond_what_is_usual(paces: list[float], strays: list[float]):
    rate = Rate(*PRIOR)
    for each in (*paces, *strays):
        rate.observe(64 * MIB, 64 * MIB * each, 0.0)
    assert min(paces) / (1 + HOLD) <= pace(rate) <= max(paces) * (1 + HOLD)


@given(st.floats(1.2, 100.0) | st.floats(0.01, 0.8))
def test_a_lasting_change_is_followed(change: float):
    rate = Rate(*PRIOR)
    for _ in range(5):
        rate.observe(64 * MIB, 0.06, 0.0)
    for _ in range(3):
        rate.observe(64 * MIB, 0.06 * change, 0.0)
    assert pace(rate) == pytest.approx(0.06 * change / (64 * MIB))


@given(st.lists(st.floats(-HOLD / 2.1, HOLD / 2.1), max_size=30))
def test_noise_does_not_move_it_at_all(noise: list[float]):
    rate = Rate(*PRIOR)
    rate.observe(64 * MIB, 0.06, 0.0)
    before = rate.at(0.0)
    for deviation in noise:
        rate.observe(64 * MIB, 0.06 * (1 + deviation), 0.0)
    assert rate.at(0.0) == before


@given(
    st.lists(
        st.tuples(
            st.integers(-1, 1 << 40),
            st.integers(0, 1 << 40),
            st.just(-1.0) | st.just(0.0) | st.floats(1e-9, 1e6),
        ),
        max_size=50,
    )
)
def test_no_measurement_makes_a_rate_useless(seen: list[tuple[int, int, float]]):
    rate = Rate(*PRIOR)
    for nbytes, lost, seconds in seen:
        rate.observe(nbytes, seconds, 0.0)
        rate.observe_latency(seconds, 0.0)
        rate.observe_late(max(nbytes, 0), lost, seconds, 0.0)
        rate.observe_shared(nbytes, seconds, 0.0)
        assert 0 < rate.cost_s(MIB, 0.0) < math.inf and 1 <= rate.caution_at(0.0) < math.inf
        assert rate.plain(0.0)["bytes_per_s"] > 0


@given(st.floats(1e-12, 1e-5), st.floats(0.0, 3600.0), st.floats(0.0, 3600.0))
def test_an_old_estimate_drifts_to_what_is_usual(measured: float, age_s: float, more_s: float):
    rate = Rate(*PRIOR)
    rate.observe(64 * MIB, 64 * MIB * measured, 0.0)
    prior = 1 / PRIOR[1]
    assert pace(rate, FRESH_S) == pytest.approx(measured)
    now, later = (abs(math.log(pace(rate, t) / prior)) for t in (age_s, age_s + more_s))
    assert later <= now + 1e-9
    assert pace(rate, FRESH_S + FADE_S) == pytest.approx(math.sqrt(measured * prior))
    assert pace(rate, FRESH_S + 60 * FADE_S) == pytest.approx(prior)


def test_being_late_halves_an_estimate_until_it_is_right():
    rate, surprises = Rate(*PRIOR), 0
    while pace(rate) < 1 / 12.5e6:  # nothing is ever reported of what came
        rate.observe_late(0, int(0.1 / pace(rate)), 0.1, 0.0)
        surprises += 1
    assert surprises <= 8
    before = pace(rate)
    rate.observe_late(0, MIB, 0.01, 0.0)
    assert pace(rate) == before, "a caller in a hurry shows nothing"


def test_a_stall_is_forgotten_sooner_than_a_slow_line():
    stalled, slow = Rate(*PRIOR), Rate(*PRIOR)
    stalled.observe_late(0, 64 * MIB, 10.0, 0.0)
    slow.observe_late(32 * MIB, 0, 10.0, 0.0)
    assert pace(stalled) == pace(slow)
    assert pace(stalled, FRESH_S + 300) < 1.1 / PRIOR[1] < 10 / PRIOR[1] < pace(slow, FRESH_S + 300)


def test_caution_follows_how_far_transfers_stray():
    steady, wild = Rate(*PRIOR), Rate(*PRIOR)
    for i in range(40):
        steady.observe(64 * MIB, 0.06, 0.0)
        wild.observe(64 * MIB, 0.06 * (3 if i % 10 == 0 else 1), 0.0)
    assert steady.caution_at(0.0) < wild.caution_at(0.0) and 2.9 < wild.caution_at(0.0) < 3.1


def test_caution_fades_with_the_age_of_what_was_measured():
    usual = Rate(*PRIOR)
    rate = Rate(*PRIOR, usual)
    for one in (usual, rate):
        one.observe(64 * MIB, 0.06, 0.0)
        one.observe(64 * MIB, 0.36, 0.0)
    assert rate.caution_at(0.0) == rate.caution_at(FRESH_S) == 4.0
    assert rate.caution_at(FRESH_S + FADE_S) == pytest.approx(math.sqrt(4.0 * 1.25))
    assert rate.caution_at(30 * 86_400.0) == Rate(*PRIOR, usual).caution_at(30 * 86_400.0) == 1.25


# -- many at once ----------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 16), st.floats(1e7, 1e10), st.integers(1, 8), st.booleans())
def test_side_by_side_a_line_measures_as_fast_as_it_is(
    count: int, bytes_per_s: float, reports: int, tell: bool
):
    """Transfers that share one line, each in `reports` parts, whether or not its transport reports them."""
    costs, body = Costs(), 4 * MIB
    meter, now_s = costs.meter("tcp", "far"), 0.0
    for _ in range(count):
        meter.begin(now_s)
    for part in range(reports):
        for _ in range(count):
            now_s += body / reports / bytes_per_s
            if tell:
                meter.came(body // reports, now_s)
            if part == reports - 1:
                meter.came(body - (body // reports * reports if tell else 0), now_s)
                meter.end(now_s)
    assert 1 / pace(meter.rate) == pytest.approx(bytes_per_s, rel=0.15)


def test_a_stream_of_transfers_without_a_pause_is_measured_all_the_same():
    meter, now_s = Costs().meter("tcp", "far"), 0.0
    meter.begin(now_s)
    for _ in range(40):  # the next has begun before the last has ended
        meter.begin(now_s)
        now_s += 0.1
        meter.came(10 * MIB, now_s)
        meter.end(now_s)
    assert 1 / pace(meter.rate) == pytest.approx(100 * MIB, rel=0.06)


def test_peers_that_share_the_inlet_tell_of_the_inlet_and_not_of_themselves():
    costs = Costs()
    far, other = costs.meter("tcp", "far"), costs.meter("tcp", "other")
    far.begin(0.0)
    far.came(100 * MIB, 1.0)
    far.end(1.0)
    far.begin(2.0)
    other.begin(2.0)
    for meter in (far, other):
        meter.came(50 * MIB, 3.0)
    for meter in (far, other):
        meter.end(3.0)
    assert 1 / pace(far.rate) == pytest.approx(100 * MIB), "half of a line is no news of it"
    assert costs.inlet.rate is not None and 1 / pace(costs.inlet.rate) == pytest.approx(100 * MIB)
    far.begin(4.0)
    far.came(100 * MIB, 4.5)
    far.end(4.5)
    assert not costs.inlet.using and not costs.inlet.period.active


def test_shared_memory_is_no_line():
    costs = Costs()
    costs.meter("shm", "near").begin(0.0)
    assert not costs.inlet.using and not costs.inlet.period.active


def test_a_fault_says_nothing_of_the_line():
    costs = Costs()
    meter = costs.meter("tcp", "far")
    before = meter.rate.at(0.0)
    meter.begin(0.0)
    meter.came(MIB, 1.0)
    meter.end(1.0, fault=True)
    assert meter.rate.at(1.0) == before
    meter.begin(2.0)
    meter.came(100 * MIB, 3.0)
    meter.end(3.0)
    assert 1 / pace(meter.rate, 3.0) == pytest.approx(100 * MIB), "and the next is measured again"


def test_bytes_that_did_not_come_in_time_make_a_line_slower():
    meter = Costs().meter("tcp", "far")
    for _ in range(8):
        meter.begin(0.0)
    for _ in range(8):
        meter.came(1 * MIB, 0.9)
        meter.end(1.0, lost=9 * MIB)
    assert 1 / pace(meter.rate, 1.0) == pytest.approx(8 * MIB, rel=0.15)


def test_few_bytes_say_nothing_of_a_bandwidth():
    meter = Costs().meter("tcp", "far")
    before = meter.rate.at(0.0)
    meter.begin(0.0)
    meter.came(MEASURABLE_BYTES - 1, 5.0)
    meter.end(5.0)
    assert meter.rate.at(5.0) == before


# -- the engine ------------------------------------------------------------------------------------


def engine_s(start_s: float, token_s: float, pair_s: float, tokens: int, before: int = 0) -> float:
    return start_s + token_s * tokens + pair_s * attended(tokens, before)


@settings(max_examples=50, deadline=None)
@given(
    st.floats(0.0, 0.05),
    st.floats(1e-5, 1e-2),
    st.floats(0.0, 10.0),  # attention over everything else, at 8k tokens
    st.lists(
        st.tuples(st.sampled_from([256, 1024, 4096, 8192]), st.floats(0.97, 1.03)), min_size=60, max_size=80
    ),
)
def test_an_engine_is_known_from_its_reports(start_s, token_s, attention, reports):
    pair_s = attention * token_s / 4096
    prefill = Prefill()
    for tokens in (256, 1024, 4096, 8192) * 3:
        prefill.observe(tokens, int(attended(tokens, 0)), engine_s(start_s, token_s, pair_s, tokens))
    for tokens, noise in reports:
        seconds = engine_s(start_s, token_s, pair_s, tokens) * noise
        prefill.observe(tokens, int(attended(tokens, 0)), seconds)
    for tokens in (1024, 8192):
        saved_s = engine_s(0.0, token_s, pair_s, tokens)
        assert prefill.seconds(tokens) == pytest.approx(saved_s, rel=0.25, abs=0.5 * start_s)


def test_later_chunks_cost_more_and_one_length_alone_is_laid_to_the_tokens():
    prefill = Prefill()
    for _ in range(20):
        prefill.observe(2048, int(attended(2048, 0)), 0.2048)
    assert prefill.seconds(256) == pytest.approx(0.0256, rel=0.1)
    for tokens in (256, 8192) * 20:
        prefill.observe(tokens, int(attended(tokens, 0)), engine_s(0.0, 1e-4, 2e-8, tokens))
    assert prefill.seconds(256, 8192) > 2 * prefill.seconds(256, 0)


def test_one_stray_report_does_not_change_what_is_known():
    prefill = Prefill()
    for _ in range(40):
        prefill.observe(1024, int(attended(1024, 0)), 0.1)
    prefill.observe(1024, int(attended(1024, 0)), 60.0)
    assert prefill.seconds(1024) < 0.13


def test_a_stated_rate_replaces_what_was_reported():
    prefill = Prefill()
    assert not prefill.known and prefill.seconds(1) == math.inf
    prefill.observe(1024, int(attended(1024, 0)), 0.1)
    assert prefill.known
    prefill.say(1000.0)
    assert prefill.seconds(100, 5000) == pytest.approx(0.1)
    prefill.say(0.0)
    assert not prefill.known and prefill.plain() == {"tokens_per_s": 0.0, "reports": 0}


@given(
    st.lists(
        st.tuples(st.integers(-1, 1 << 31), st.integers(-1, 1 << 62), st.floats(allow_nan=True)), max_size=20
    )
)
def test_no_report_breaks_it(reports):
    prefill = Prefill()
    for tokens, pairs, seconds in reports:
        prefill.observe(tokens, pairs, seconds)
        assert prefill.seconds(256, 1000) >= 0 and prefill.plain()["tokens_per_s"] >= 0
