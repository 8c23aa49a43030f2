"""Views: one id per set of incarnations, and changes told by incarnation, not by name."""

from __future__ import annotations

import msgpack
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pcache.core.membership import Member, View

# Names that run into each other, so that an encoding without lengths would confuse two sets.
people = st.dictionaries(
    st.text("ab", max_size=3), st.sampled_from([0, 1, 0x61, 0x6162, 2**63 - 1]), max_size=4
)


def view(who: dict[str, int], control: str = "127.0.0.1:1") -> View:
    return View.of(Member(name, incarnation, control) for name, incarnation in who.items())


@settings(max_examples=300, deadline=None)
@given(people, people)
def test_view_ids_are_equal_exactly_where_the_sets_are(one: dict[str, int], other: dict[str, int]):
    assert (view(one).view_id == view(other).view_id) == (one == other)


@given(people)
def test_a_view_id_ignores_order_and_addresses(who: dict[str, int]):
    backwards = dict(reversed(who.items()))
    assert view(who).view_id == view(backwards, "10.0.0.1:2").view_id


def test_a_name_cannot_swallow_another_member():
    joined = b"a" + (5).to_bytes(8, "big") + b"b"
    assert view({"a": 5, "b": 6}).view_id != view({joined.decode("latin-1"): 6}).view_id


@given(people, people)
def test_changes_name_who_came_and_who_went(before: dict[str, int], after: dict[str, int]):
    came, went = view(after).changed_since(view(before))
    assert came == {name for name, _ in after.items() - before.items()}
    assert went == {name for name, _ in before.items() - after.items()}


@given(people, st.sampled_from(["", "a", "b"]), st.integers(0, 2))
def test_only_the_live_incarnation_is_a_member(who: dict[str, int], name: str, incarnation: int):
    assert view(who).has(name, incarnation) == ((name, incarnation) in who.items())


def test_a_restart_both_came_and_went_and_keeps_its_slots():
    before, after = view({"a": 1, "b": 2}), view({"a": 9, "b": 2})
    assert after.changed_since(before) == ({"a"}, {"a"})
    assert after.ring.share() == before.ring.share()
    assert not after.has("a", 1)


def test_the_ring_is_computed_once_a_view():
    seen = view({"a": 1})
    assert seen.ring is seen.ring


def test_a_member_survives_the_wire():
    member = Member("node", 2**63 - 1, "127.0.0.1:7", "boot", {"tcp": "127.0.0.1:8"})
    assert Member.from_wire(msgpack.unpackb(msgpack.packb(member.to_wire()))) == member
