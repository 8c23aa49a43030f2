"""The planner: the cheapest reachable source of the best body, and a reason for every recompute."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pcache.core.planner import Choice, Costs, Rate, plan_chunk, rank_bodies
from p2pcache.types import (
    BodyInfo,
    ContentKey,
    ExactKey,
    Found,
    Holder,
    Match,
    Miss,
    Provenance,
    Source,
    Tier,
)

MIB = 1 << 20
ASKED = ExactKey(b"asked exact key.")
CONTENT = ContentKey(b"the content key.")


def found(
    *holders: tuple[str, Tier] | str,
    exact: bytes = ASKED,
    provenance=Provenance.IN_CONTEXT,
    nbytes: int = MIB,
) -> Found:
    body = BodyInfo(CONTENT, ExactKey(exact), 256, nbytes, provenance)
    pairs = [(h, Tier.HOST) if isinstance(h, str) else h for h in holders]
    return Found(body, tuple(Holder(name, 1, tier) for name, tier in pairs))


def plan(*bodies: Found, **changes) -> Choice:
    defaults = dict(
        me="me",
        ways={"near": "shm", "far": "tcp", "other": "tcp"},
        busy_bytes={},
        costs=Costs(),
        content_reuse=True,
    )
    return plan_chunk(ASKED, bodies, **{**defaults, **changes})


def test_the_exact_body_comes_before_any_other_context():
    other = found("near", exact=b"another context.")
    choice = plan(other, found("far", provenance=Provenance.ISOLATED))
    assert (choice.match, choice.body.exact) == (Match.EXACT, ASKED)


def test_another_context_serves_where_the_exact_body_cannot_be_had():
    other = found("near", exact=b"other context...")
    choice = plan(found("unreachable"), other)
    assert (choice.match, choice.source, choice.body) == (Match.CONTENT, Source.PEER, other.body)


def test_other_contexts_are_ranked_by_how_clean_they_are():
    bodies = [
        found("far", exact=p.name.encode().ljust(16, b"."), provenance=p)
        for p in (Provenance.APPROXIMATE, Provenance.ISOLATED, Provenance.IN_CONTEXT)
    ]
    order = [f.body.provenance for f in rank_bodies([*bodies, found("far")], ASKED)[1:]]
    assert order == [Provenance.IN_CONTEXT, Provenance.ISOLATED, Provenance.APPROXIMATE]


def test_content_is_refused_where_it_is_not_wanted():
    choice = plan(found("me", exact=b"other context..."), content_reuse=False)
    assert (choice.source, choice.miss) == (Source.RECOMPUTE, Miss.EXACT_ONLY)


def test_a_holder_without_a_way_to_it_is_unreachable():
    assert plan(found("stranger")).miss is Miss.HOLDER_UNREACHABLE


def test_nothing_found_is_missed_for_the_reason_that_its_owner_gave():
    assert plan().miss is Miss.ABSENT
    assert plan(absent=Miss.UNKNOWN).miss is Miss.UNKNOWN


def test_what_is_slower_than_prefill_is_recomputed():
    body = found("far", nbytes=100 * MIB)
    slow = Rate(1e-3, 1e9).cost_s(100 * MIB)
    assert plan(body, costs=Costs(prefill_tokens_per_s=256 / slow * 1.01)).miss is Miss.CHEAPER_TO_RECOMPUTE
    assert plan(body, costs=Costs(prefill_tokens_per_s=256 / slow * 0.99)).source is Source.PEER
    assert plan(body, costs=Costs(prefill_tokens_per_s=0)).source is Source.PEER, "an unknown rate is no rate"


def test_local_comes_before_a_peer_and_that_before_a_dearer_one():
    choice = plan(found("far", "near", "me"))
    assert choice.source is Source.LOCAL
    assert [h.node for h in choice.holders] == ["me", "near", "far"]
    assert plan(found("far", "near")).holders[0].node == "near"


def test_the_own_disk_is_a_source_of_its_own_and_a_peers_disk_costs_extra():
    assert plan(found(("me", Tier.NVME))).source is Source.NVME
    choice = plan(found(("far", Tier.NVME), ("other", Tier.HOST)))
    assert [h.node for h in choice.holders] == ["other", "far"]


def test_a_busy_peer_is_avoided():
    assert plan(found("far", "other")).holders[0].node == "far"
    assert plan(found("far", "other"), busy_bytes={"far": 1}).holders[0].node == "other"
    assert plan(found("far", "near"), busy_bytes={"near": 64 * MIB}).holders[0].node == "far"


@settings(max_examples=40, deadline=None)
@given(st.floats(1e-5, 1e-2), st.floats(1e7, 1e10))
def test_a_rate_converges_on_what_is_measured(latency_s: float, bytes_per_s: float):
    rate = Rate(1e-3, 1e9)
    for _ in range(80):
        rate.observe(1, latency_s)
        rate.observe(256 * MIB, latency_s + 256 * MIB / bytes_per_s)
    assert rate.latency_s == pytest.approx(latency_s, rel=0.01)
    assert rate.bytes_per_s == pytest.approx(bytes_per_s, rel=0.01)


@given(
    st.lists(
        st.tuples(st.integers(0, 1 << 40), st.just(-1.0) | st.just(0.0) | st.floats(1e-9, 1e6)), max_size=50
    )
)
def test_no_measurement_makes_a_rate_useless(seen: list[tuple[int, float]]):
    rate = Rate(1e-3, 1e9)
    for nbytes, seconds in seen:
        rate.observe(nbytes, seconds)
    assert 0 < rate.cost_s(MIB) < math.inf


names = st.sampled_from(["me", "near", "far", "other", "stranger"])
bodies = st.lists(
    st.builds(
        lambda holders, exact, provenance, nbytes: found(
            *holders, exact=exact, provenance=provenance, nbytes=nbytes
        ),
        st.lists(st.tuples(names, st.sampled_from(Tier)), max_size=4),
        st.sampled_from([ASKED, b"other context...", b"third context..."]),
        st.sampled_from(Provenance),
        st.integers(0, 1 << 34),
    ),
    max_size=5,
)


@settings(max_examples=200, deadline=None)
@given(
    bodies,
    st.booleans(),
    st.sampled_from([0.0, 10.0, 1e4, 1e9]),
    st.dictionaries(names, st.integers(0, 1 << 34)),
)
def test_every_choice_is_whole(given_bodies, content_reuse: bool, prefill: float, busy):
    costs = Costs(prefill_tokens_per_s=prefill)
    choice = plan(*given_bodies, content_reuse=content_reuse, costs=costs, busy_bytes=busy)
    recompute = choice.source is Source.RECOMPUTE
    assert (choice.miss is not None) == recompute == (choice.body is None) == (choice.match is Match.NONE)
    assert bool(choice.holders) != recompute
    if recompute:
        return
    assert choice.cost_s <= costs.recompute_s(choice.body.tokens)
    assert content_reuse or choice.match is Match.EXACT
    assert (choice.match is Match.EXACT) == (choice.body.exact == ASKED)
    assert "stranger" not in {h.node for h in choice.holders}
    assert (choice.holders[0].node == "me") == (choice.source is not Source.PEER)
    assert any(f.body == choice.body and set(choice.holders) <= set(f.holders) for f in given_bodies)
