"""Where prompts go: to their KV, unless it is too busy there; cold ones spread, and stay where they went."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pcache.serve.route import Backlog, Candidate, Route, rank

RNG = Random(1)


def replicas(**waits: float) -> list[Candidate]:
    return [Candidate(name, "node-" + name, wait) for name, wait in waits.items()]


def first(route: Route | None, candidates: list[Candidate]) -> str:
    return rank(route, candidates, RNG)[0][0]


def test_a_prompt_goes_where_its_kv_is():
    route = Route(2000, held={"node-b": 1600}, anywhere=1600)
    assert first(route, replicas(a=0, b=0, c=0)) == "b"


@given(st.binary(min_size=1, max_size=4))
def test_no_key_outweighs_the_kv(key: bytes):
    """Pulling is cheap, but not free: what lies there decides, and not the rendezvous."""
    route = Route(1000, held={"node-b": 950}, anywhere=950, key=key)
    assert first(route, replicas(a=0, b=0)) == "b"
    assert first(route, replicas(a=0, b=40)) == "b"


def test_but_not_into_a_long_queue():
    route = Route(2000, held={"node-b": 1600}, anywhere=1600)
    assert first(route, replicas(a=0, b=50)) == "b", "pulling would take as long as waiting"
    assert first(route, replicas(a=0, b=500)) == "a"


@pytest.mark.parametrize("elsewhere", [0, 1600])
def test_what_can_be_pulled_costs_little(elsewhere: int):
    route = Route(2000, held={"node-b": elsewhere}, anywhere=elsewhere)
    assert route.work("node-a") == 2000 - elsewhere + 0.05 * elsewhere
    assert route.work("node-b") == 2000 - elsewhere


def test_cold_prompts_spread_and_the_same_one_goes_to_the_same_replica():
    candidates = replicas(a=0, b=0, c=0, d=0)
    routes = [Route(2000, held={}, key=i.to_bytes(16, "big")) for i in range(400)]
    chosen = Counter(first(r, candidates) for r in routes)
    assert len(chosen) == 4 and max(chosen.values()) < 140
    assert [first(r, candidates) for r in routes] == [first(r, candidates[::-1]) for r in routes]


def test_a_shared_system_prompt_does_not_gather_all_cold_prompts():
    routes = [Route(2000, held={"node-a": 40}, anywhere=40, key=i.to_bytes(16, "big")) for i in range(200)]
    chosen = Counter(first(r, replicas(a=0, b=0)) for r in routes)
    assert min(chosen.values()) > 60


def test_without_an_answer_two_random_replicas_are_compared():
    for route in (None, Route(2000, held=None)):
        ranks = [rank(route, replicas(a=0, b=0, c=0), RNG) for _ in range(100)]
        assert all(len(r[0]) == 2 and len(set(r[0])) == 2 and len(r[1]) == 1 for r in ranks)
        assert len({frozenset(r[0]) for r in ranks}) == 3
    assert rank(None, [], RNG) == []
    assert rank(None, replicas(a=0), RNG) == [["a"]]


def test_a_replica_that_has_just_failed_is_left_out_while_there_is_another():
    route = Route(2000, held={"node-b": 2000}, anywhere=2000, avoid=frozenset("b"))
    assert first(route, replicas(a=0, b=0)) == "a"
    assert first(route, replicas(b=0)) == "b"
    assert all(
        "b" not in rank(Route(1, avoid=frozenset("b")), replicas(a=0, b=0, c=0), RNG)[0] for _ in range(20)
    )


def test_a_backlog_counts_what_is_not_over():
    backlog = Backlog()
    one, two = Route(100, answer_tokens=10), Route(50)
    backlog.give("a", "node-a", one, 0.0)
    backlog.give("a", "node-a", two, 0.0)
    assert backlog.wait("a") == 160 and backlog.wait("b") == 0 and one.chosen == "a"
    one.over = True
    assert backlog.wait("a") == 50
    gone = Route(70, over=True)
    backlog.give("a", "node-a", gone, 0.0)  # it had ended before the router heard that it was accepted
    assert backlog.wait("a") == 50
    backlog.keep(["b"])
    assert backlog.wait("a") == 0


def test_locality_favours_one_replica_only_so_far():
    """Requests one by one, each with all its KV on one replica: the others get their share all the same."""
    backlog, counts = Backlog(), Counter()
    for i in range(300):
        now_s = float(i)
        route = Route(2000, held={"b": 2000}, anywhere=2000, key=bytes([i % 256]))
        candidates = [Candidate(r, r, backlog.wait(r), backlog.recent(r, now_s)) for r in "abc"]
        chosen = first(route, candidates)
        backlog.give(chosen, chosen, route, now_s)
        route.over = True
        counts[chosen] += 1
    assert max(counts, key=counts.get) == "b" and counts["b"] <= 1.3 * 100
    assert backlog.recent("b", 1e9) < 1e-6


def test_who_has_failed_is_left_alone_by_others_for_a_while():
    backlog = Backlog(suspect_s=10.0)
    backlog.suspect({"b"}, 100.0)
    assert backlog.suspects(109.9) == {"b"} and not backlog.suspects(110.0)
    held = Route(2000, held={"node-b": 2000}, anywhere=2000)
    assert rank(held, replicas(a=0, b=0), RNG, frozenset("b"))[0] == ["a"]
    assert rank(held, replicas(b=0), RNG, frozenset("b")) == [["b"]]
    failed = Route(2000, held={}, avoid=frozenset("a"))
    assert rank(failed, replicas(a=0, b=0), RNG, frozenset("b")) == [["b"]], (
        "a suspect before who just failed"
    )


@given(
    st.integers(1, 4000),
    st.dictionaries(st.sampled_from(["node-a", "node-b", "node-x"]), st.integers(0, 5000)),
    st.lists(st.floats(0, 1e5), min_size=1, max_size=6),
    st.binary(max_size=16),
)
def test_every_replica_is_tried_once_and_none_costs_more_than_it_must(tokens, held, waits, key):
    route = Route(tokens, held=held, anywhere=max(held.values(), default=0), key=key)
    candidates = [Candidate(f"r{i}", "node-" + "ab"[i % 2], wait) for i, wait in enumerate(waits)]
    ranks = rank(route, candidates, Random(0))
    assert sorted(r for part in ranks for r in part) == sorted(c.replica for c in candidates)
    cost = {c.replica: route.work(c.node_id) + c.wait for c in candidates}
    assert cost[ranks[0][0]] <= min(cost.values()) + 0.1 * tokens + 1e-6
    assert all(0 <= route.work(c.node_id) <= tokens for c in candidates)


@given(st.lists(st.integers(0, 10_000), min_size=30, max_size=60), st.integers(2, 5))
def test_equal_cold_work_is_shared_out_evenly(keys: list[int], count: int):
    """Requests that never end: the most loaded replica has at most one prompt more than the average."""
    backlog = Backlog()
    names = [f"r{i}" for i in range(count)]
    for key in keys:
        route = Route(2000, held={}, key=key.to_bytes(16, "big"))
        chosen = first(route, [Candidate(n, n, backlog.wait(n)) for n in names])
        backlog.give(chosen, chosen, route, 0.0)
    waits = [backlog.wait(n) for n in names]
    assert max(waits) - min(waits) <= 2000
