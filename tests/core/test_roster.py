"""The supervisor's memory: names, Views, who is told, and a start that says nothing too early."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from p2pcache.core.membership import Member
from p2pcache.core.roster import Roster


def member(name: str, incarnation: int = 1) -> Member:
    return Member(name, incarnation, "127.0.0.1:1")


def names(roster: Roster) -> set[str]:
    return set(roster.view().members)


def test_a_view_is_of_those_that_described_themselves():
    roster = Roster()
    roster.seen({"1": "a", "2": "b"}, 0.0)
    assert roster.due(0.0) == ["1", "2"] and names(roster) == set() and not roster.agreed()
    roster.heard("1", member("a"), None)
    assert names(roster) == {"a"} and roster.behind() == ["1"]
    roster.heard("1", member("a"), roster.told())
    assert roster.agreed() and roster.behind() == []


def test_nothing_is_said_before_all_were_heard_or_the_time_is_up():
    roster = Roster(settle_s=5.0)
    assert not roster.settled(10.0), "nobody has been seen yet"
    roster.seen({"1": "a", "2": "b", "3": "c"}, 10.0)
    roster.heard("1", member("a"), None)
    assert not roster.settled(10.5)
    roster.failed("2", "no memory", hopeless=True, now_s=10.5)
    assert not roster.settled(14.9) and roster.settled(15.0)
    roster.drained("3")
    assert roster.settled(10.6)


def test_a_host_that_is_gone_is_forgotten_with_all_that_was_known():
    roster = Roster()
    roster.seen({"1": "a", "2": "b"}, 0.0)
    roster.heard("1", member("a"), None)
    roster.failed("2", "why", hopeless=True, now_s=0.0)
    assert roster.seen({"1": "a"}, 0.0) == ["2"]
    assert roster.absent() == {} and roster.hopeless() == [] and names(roster) == {"a"}


def test_a_failure_is_told_with_the_view_and_asked_again_at_its_time():
    roster = Roster(retry_s=10.0)
    roster.seen({"1": "a", "2": "b"}, 0.0)
    roster.heard("1", member("a"), None)
    roster.heard("1", member("a"), roster.told())
    roster.failed("2", "no memory", hopeless=True, now_s=1.0)
    assert roster.behind() == ["1"], "who is absent, and why, is part of what members are told"
    assert roster.agreed(), "but not of the View"
    assert roster.due(10.9) == ["1"] and roster.due(11.0) == ["1", "2"]


def test_who_fails_again_and_again_is_asked_less_and_less():
    roster = Roster(retry_s=10.0)
    roster.seen({"1": "a"}, 0.0)
    waits = []
    for _ in range(6):
        roster.failed("1", "why", hopeless=False, now_s=0.0)
        waits.append(next(s for s in (0, 1, 3, 7, 10) if roster.due(float(s))))
    assert waits == [0, 1, 3, 7, 10, 10]
    roster.heard("1", member("a"), None)
    roster.failed("1", "why", hopeless=False, now_s=0.0)
    assert roster.due(0.0) == ["1"]


def test_a_new_supervisor_gives_a_name_to_the_host_that_has_a_node():
    for real, twin in (("1", "9"), ("9", "1")):
        roster = Roster()
        roster.seen({real: "a", twin: "a"}, 0.0, with_node={real})
        assert roster.due(0.0) == [real] and roster.id_of("a") == real


def test_a_drained_host_is_absent_and_comes_back():
    roster = Roster()
    roster.seen({"1": "a", "2": "b"}, 0.0)
    roster.heard("1", member("a"), None)
    roster.heard("2", member("b"), None)
    roster.drained("2")
    assert names(roster) == {"a"} and roster.absent() == {"b": "drained"} and roster.hopeless() == []
    roster.heard("2", member("b", 2), None)
    assert names(roster) == {"a", "b"} and roster.absent() == {}


def test_a_second_host_of_the_same_name_waits_until_the_first_has_gone():
    roster = Roster()
    roster.seen({"9": "a"}, 0.0)
    roster.heard("9", member("a", 9), None)
    roster.seen({"9": "a", "1": "a"}, 0.0)
    assert roster.due(0.0) == ["9"]
    roster.heard("1", member("a", 1), None)  # it was asked before the name was taken
    roster.seen({"9": "a", "1": "a"}, 0.0)
    assert roster.view().members["a"].incarnation in (1, 9)
    assert len(roster.absent()) == 1 and "has the name 'a'" in next(iter(roster.absent().values()))
    roster.seen({"1": "a"}, 0.0)
    roster.heard("1", member("a", 1), None)
    assert roster.due(0.0) == ["1"] and roster.absent() == {}
    assert roster.view().members["a"].incarnation == 1


@given(st.lists(st.sampled_from(["a", "b"]), min_size=1, max_size=6))
def test_each_name_has_exactly_one_host(claims: list[str]):
    roster = Roster()
    roster.seen({str(i): name for i, name in enumerate(claims)}, 0.0)
    due = roster.due(0.0)
    assert sorted(claims[int(i)] for i in due) == sorted(set(claims))
    assert all(roster.id_of(name) in due for name in set(claims))
    assert roster.id_of("c") is None


class RosterMachine(RuleBasedStateMachine):
    """Whatever happens in whatever order, members are live hosts that were heard last."""

    def __init__(self) -> None:
        super().__init__()
        self.roster = Roster()
        self.alive: dict[str, str] = {}
        self.now_s = 0.0

    @rule(alive=st.dictionaries(st.sampled_from("123456"), st.sampled_from("abc"), max_size=6))
    def see(self, alive: dict[str, str]) -> None:
        alive = {i: self.alive.get(i, name) for i, name in alive.items()}  # a host keeps its name
        self.roster.seen(alive, self.now_s)
        self.alive = alive

    @rule(node_id=st.sampled_from("123456"), incarnation=st.integers(1, 3), follows=st.booleans())
    def hear(self, node_id: str, incarnation: int, follows: bool) -> None:
        if node_id in self.roster.due(self.now_s):
            name = self.alive[node_id]
            self.roster.heard(node_id, member(name, incarnation), self.roster.told() if follows else None)

    @rule(node_id=st.sampled_from("123456"), hopeless=st.booleans())
    def fail(self, node_id: str, hopeless: bool) -> None:
        self.roster.failed(node_id, "why", hopeless=hopeless, now_s=self.now_s)

    @rule(node_id=st.sampled_from("123456"))
    def drain(self, node_id: str) -> None:
        self.roster.drained(node_id)

    @rule(seconds=st.floats(0.1, 20))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @invariant()
    def members_are_alive_and_absence_has_a_reason(self) -> None:
        view = self.roster.view()
        assert set(view.members) <= set(self.alive.values())
        assert all(self.roster.absent().values())
        assert set(self.roster.due(self.now_s + 1e9)) <= set(self.alive)
        assert {self.alive[i] for i in self.roster.due(self.now_s + 1e9)} == set(self.alive.values())


TestRoster = RosterMachine.TestCase
