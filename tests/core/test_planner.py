"""The planner: the cheapest reachable source of the best body, a whole prompt at once, and a reason for every
recompute."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from p2pcache.core.planner import PATIENCE, Asked, Choice, Costs, Plan, plan, rank_bodies
from p2pcache.core.rates import Rate, attended
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


def choose(*bodies: Found, within_s: float = math.inf, **changes) -> Choice:
    """The plan for a prompt of one chunk."""
    return prompt([Asked(ASKED, 0, bodies, changes.pop("absent", Miss.ABSENT))], within_s, **changes).choices[
        0
    ]


def prompt(asked: list[Asked], within_s: float = math.inf, **changes) -> Plan:
    defaults = dict(
        me="me",
        ways={"near": "shm", "far": "tcp", "other": "tcp"},
        busy_bytes={},
        costs=Costs(),
        content_reuse=True,
        now_s=0.0,
    )
    return plan(asked, within_s=within_s, **{**defaults, **changes})


def test_the_exact_body_comes_before_any_other_context():
    other = found("near", exact=b"another context.")
    choice = choose(other, found("far", provenance=Provenance.ISOLATED))
    assert (choice.match, choice.body.exact) == (Match.EXACT, ASKED)


def test_another_context_serves_where_the_exact_body_cannot_be_had():
    other = found("near", exact=b"other context...")
    choice = choose(found("unreachable"), other)
    assert (choice.match, choice.source, choice.body) == (Match.CONTENT, Source.PEER, other.body)


def test_other_contexts_are_ranked_by_how_clean_they_are():
    bodies = [
        found("far", exact=p.name.encode().ljust(16, b"."), provenance=p)
        for p in (Provenance.APPROXIMATE, Provenance.ISOLATED, Provenance.IN_CONTEXT)
    ]
    order = [f.body.provenance for f in rank_bodies([*bodies, found("far")], ASKED)[1:]]
    assert order == [Provenance.IN_CONTEXT, Provenance.ISOLATED, Provenance.APPROXIMATE]


def test_content_is_refused_where_it_is_not_wanted():
    choice = choose(found("me", exact=b"other context..."), content_reuse=False)
    assert (choice.source, choice.miss) == (Source.RECOMPUTE, Miss.EXACT_ONLY)


def test_a_holder_without_a_way_to_it_is_unreachable():
    assert choose(found("stranger")).miss is Miss.HOLDER_UNREACHABLE


def test_nothing_found_is_missed_for_the_reason_that_its_owner_gave():
    assert choose().miss is Miss.ABSENT
    assert choose(absent=Miss.UNKNOWN).miss is Miss.UNKNOWN


def test_what_is_slower_than_prefill_is_recomputed():
    body = found("far", nbytes=100 * MIB)
    slow = Costs().rate("tcp").cost_s(100 * MIB, 0.0)
    assert choose(body, costs=Costs(prefill_tokens_per_s=256 / slow * 1.01)).miss is Miss.CHEAPER_TO_RECOMPUTE
    assert choose(body, costs=Costs(prefill_tokens_per_s=256 / slow * 0.99)).source is Source.PEER
    assert choose(body, costs=Costs(prefill_tokens_per_s=0)).source is Source.PEER, (
        "an unknown rate is no rate"
    )


def test_local_comes_before_a_peer_and_that_before_a_dearer_one():
    choice = choose(found("far", "near", "me"))
    assert choice.source is Source.LOCAL
    assert [h.node for h in choice.holders] == ["me", "near", "far"]
    assert choose(found("far", "near")).holders[0].node == "near"


def test_the_own_disk_is_a_source_of_its_own_and_a_peers_disk_costs_extra():
    assert choose(found(("me", Tier.NVME))).source is Source.NVME
    choice = choose(found(("far", Tier.NVME), ("other", Tier.HOST)))
    assert [h.node for h in choice.holders] == ["other", "far"]


def test_a_busy_peer_is_avoided():
    assert choose(found("far", "other")).holders[0].node == "far"
    assert choose(found("far", "other"), busy_bytes={"far": 1}).holders[0].node == "other"
    assert choose(found("far", "near"), busy_bytes={"near": 64 * MIB}).holders[0].node == "far"


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
    choice = choose(*given_bodies, content_reuse=content_reuse, costs=costs, busy_bytes=busy)
    recompute = choice.source is Source.RECOMPUTE
    assert (choice.miss is not None) == recompute == (choice.body is None) == (choice.match is Match.NONE)
    assert bool(choice.holders) != recompute
    if recompute:
        return
    if choice.source is not Source.LOCAL:
        assert choice.cost_s <= costs.prefill.seconds(choice.body.tokens)
    assert content_reuse or choice.match is Match.EXACT
    assert (choice.match is Match.EXACT) == (choice.body.exact == ASKED)
    assert "stranger" not in {h.node for h in choice.holders}
    assert (choice.holders[0].node == "me") == (choice.source is not Source.PEER)
    assert any(f.body == choice.body and set(choice.holders) <= set(f.holders) for f in given_bodies)


# -- a prompt of many chunks -----------------------------------------------------------------------

TOKENS = 256


def chunks(holders: list[list[tuple[str, Tier]]], nbytes: int = MIB) -> list[Asked]:
    """A prompt of one exact body a chunk, held as said."""
    out = []
    for i, held in enumerate(holders):
        key = ExactKey(i.to_bytes(16, "big"))
        body = BodyInfo(ContentKey(key), key, TOKENS, nbytes, base_position=TOKENS * i)
        out.append(Asked(key, TOKENS * i, (Found(body, tuple(Holder(n, 1, t) for n, t in held)),)))
    return out


def measured(tokens_per_s: float, bytes_per_s: dict[str, float], pair_s: float = 0.0) -> Costs:
    """Costs of a node that has measured these peers' tcp, and its engine."""
    costs = Costs(tokens_per_s)
    for peer, rate in bytes_per_s.items():
        meter, seconds = costs.meter("tcp", peer), 64 * MIB / rate
        meter.begin(-seconds)
        meter.came(64 * MIB, 0.0)
        meter.end(0.0)
    if pair_s:
        costs.prefill.say(0.0)
        for tokens in (256, 1024, 4096, 16384) * 2:
            pairs = attended(tokens, 0)
            costs.prefill.observe(tokens, int(pairs), tokens / tokens_per_s + pairs * pair_s)
    return costs


def pulled(planned: Plan) -> list[int]:
    return [i for i, c in enumerate(planned.choices) if c.source is Source.PEER]


def total_s(asked: list[Asked], planned: Plan, costs: Costs) -> float:
    """Until the KV is ready, as the planner sees it."""
    return planned.fetch_s + sum(
        costs.prefill.seconds(TOKENS, a.start)
        for a, c in zip(asked, planned.choices, strict=True)
        if c.source is Source.RECOMPUTE
    )


held = st.lists(
    st.lists(
        st.tuples(st.sampled_from(["far", "other", "me"]), st.sampled_from([Tier.HOST, Tier.NVME])),
        max_size=3,
    ),
    min_size=1,
    max_size=24,
)
speeds = st.floats(1e6, 1e10)
prefills = st.floats(100.0, 1e6)


@settings(max_examples=150, deadline=None)
@given(held, speeds, speeds, prefills, st.sampled_from([0.0, 1e-9, 1e-7]))
def test_a_plan_is_never_worse_than_pulling_all_or_computing_all(holders, far, other, prefill, pair_s):
    costs = measured(prefill, {"far": far, "other": other}, pair_s)
    asked = chunks(holders)
    planned = total_s(asked, prompt(asked, costs=costs), costs)
    everything = prompt(asked, costs=measured(0.0, {"far": far, "other": other}))
    assert planned <= total_s(asked, everything, costs) * (1 + 1e-9)
    at_hand = {i for i, c in enumerate(everything.choices) if c.source is Source.LOCAL}
    compute_s = sum(costs.prefill.seconds(TOKENS, a.start) for i, a in enumerate(asked) if i not in at_hand)
    assert planned <= compute_s * (1 + 1e-9)


@settings(max_examples=150, deadline=None)
@given(held, speeds, speeds, st.sampled_from([0.0, 1e3, 1e5]), st.floats(0.0, 1.0))
def test_nothing_is_waited_for_that_is_not_expected_in_time(holders, far, other, prefill, within_s):
    costs = measured(prefill, {"far": far, "other": other})
    asked = chunks(holders)
    planned = prompt(asked, within_s, costs=costs)
    assert planned.fetch_s <= within_s
    for a, choice in zip(asked, planned.choices, strict=True):
        if choice.source in (Source.PEER, Source.NVME):
            assert choice.cost_s <= within_s
        elif choice.source is Source.RECOMPUTE and prefill == 0.0:
            assert choice.miss in ({Miss.DEADLINE} if a.found[0].holders else {Miss.HOLDER_UNREACHABLE})


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 40),
    speeds,
    st.floats(1.0, 100.0),
    prefills,
    st.sampled_from([0.0, 1e-9, 1e-7]),
    st.sampled_from([math.inf, 1.0, 0.1]),
)
def test_a_faster_link_never_means_fewer_bytes(count, speed, faster, prefill, pair_s, within_s):
    asked = chunks([[("far", Tier.HOST)]] * count)
    slow, fast = (
        prompt(asked, within_s, costs=measured(prefill, {"far": s}, pair_s)) for s in (speed, speed * faster)
    )
    assert set(pulled(slow)) <= set(pulled(fast))


def test_pulls_from_one_peer_are_behind_each_other():
    asked = chunks([[("far", Tier.HOST)]] * 4)
    costs = measured(0.0, {"far": 100 * MIB})
    here_s = [c.cost_s for c in prompt(asked, costs=costs).choices]
    gaps = [b - a for a, b in zip(here_s, here_s[1:], strict=False)]
    assert all(abs(gap - 0.01) < 1e-9 for gap in gaps)
    busy = prompt(asked, costs=costs, busy_bytes={"far": 100 * MIB}).choices[0]
    assert abs(busy.cost_s - here_s[0] - 1.0) < 1e-9


def test_two_peers_share_the_work_as_fast_as_each_is():
    asked = chunks([[("far", Tier.HOST), ("other", Tier.HOST)]] * 40)
    planned = prompt(asked, costs=measured(0.0, {"far": 300e6, "other": 100e6}))
    by_peer = [c.holders[0].node for c in planned.choices]
    assert 28 <= by_peer.count("far") <= 32 and by_peer.count("far") + by_peer.count("other") == 40


def test_peers_that_share_the_inlet_are_no_faster_than_that():
    asked = chunks([[("far", Tier.HOST)], [("other", Tier.HOST)]] * 10)
    costs = measured(0.0, {"far": 100 * MIB, "other": 100 * MIB})
    apart = prompt(asked, costs=costs).fetch_s
    costs.inlet.rate = Rate(0.0, 100 * MIB)
    assert prompt(asked, costs=costs).fetch_s > 1.9 * apart


def test_what_cannot_come_in_time_is_left_out_and_the_rest_still_comes():
    asked = chunks([[("far", Tier.HOST)]] * 20)
    planned = prompt(asked, 0.1, costs=measured(0.0, {"far": 100 * MIB}))
    assert 5 <= len(pulled(planned)) < 10 and pulled(planned) == list(range(len(pulled(planned))))
    assert {c.miss for c in planned.choices[len(pulled(planned)) :]} == {Miss.DEADLINE}


def test_a_slow_link_costs_the_chunks_that_only_it_has():
    asked = chunks([[("far", Tier.HOST)], [("other", Tier.HOST)]] * 4)
    planned = prompt(asked, costs=measured(10_000.0, {"far": 1e6, "other": 1e9}))
    assert pulled(planned) == [1, 3, 5, 7]
    assert {c.miss for c in planned.choices if c.miss} == {Miss.CHEAPER_TO_RECOMPUTE}


def test_what_is_not_worth_its_way_is_replaced_by_what_is_at_hand():
    exact, here = found("far", nbytes=100 * MIB), found("me", exact=b"other context...")
    costs = measured(1e5, {"far": 1e6})
    choice = choose(exact, here, costs=costs)
    assert (choice.match, choice.source, choice.body) == (Match.CONTENT, Source.LOCAL, here.body)
    assert choose(exact, here, costs=costs, content_reuse=False).miss is Miss.CHEAPER_TO_RECOMPUTE


def test_a_fetch_has_as_much_patience_as_computing_takes():
    asked = chunks([[("far", Tier.HOST)]] * 8)
    planned = prompt(asked, costs=measured(1000.0, {"far": 1e9}))
    assert planned.patience_s == PATIENCE * 8 * TOKENS / 1000.0
    assert prompt(asked, costs=measured(0.0, {"far": 1e9})).patience_s is None, "an unknown rate is no rate"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-0.024, 0.024), min_size=1, max_size=40))
def test_noise_does_not_turn_a_plan_over(noise):
    """At the very break-even, where any change of an estimate would change the plan."""
    asked = chunks([[("far", Tier.HOST)]] * 8)
    rate = 200 * MIB
    costs = measured(TOKENS * 200 * 1.001, {"far": rate})
    before = [c.source for c in prompt(asked, costs=costs).choices]
    for deviation in noise:
        costs.rate("tcp", "far").observe(64 * MIB, 64 * MIB / rate * (1 + deviation), 0.0)
        assert [c.source for c in prompt(asked, costs=costs).choices] == before


def test_a_peer_that_was_slow_once_is_tried_again_some_time():
    asked = chunks([[("far", Tier.HOST)]] * 8)
    costs = measured(10_000.0, {"far": 1e6})
    assert pulled(prompt(asked, costs=costs)) == []
    assert pulled(prompt(asked, costs=costs, now_s=20.0)) == [], "it is not forgotten at once"
    assert len(pulled(prompt(asked, costs=costs, now_s=3600.0))) == 8


def test_a_peer_that_was_never_used_is_taken_to_be_as_fast_as_the_others():
    asked = chunks([[("other", Tier.HOST)]] * 8)
    assert pulled(prompt(asked, costs=Costs(10_000.0)))
    assert not pulled(prompt(asked, costs=measured(10_000.0, {"far": 1e6})))


def test_peers_that_left_are_forgotten():
    costs = measured(10_000.0, {"far": 1e6, "other": 1e6})
    costs.meter("tcp", "near").begin(0.0)
    costs.keep(["far"])
    shown = costs.plain(0.0)
    assert {r["peer"] for r in shown["peers"]} == {"far", "near"}, "nothing under way loses its meter"
    assert {r["way"] for r in shown["usual"]} == {"tcp"} and shown["inlet_bytes_per_s"] is None
