"""The directory shard: whatever order hints arrive in, the newest of each holder counts."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from p2pcache.core.directory import BODIES_PER_KEY_MAX, Directory
from p2pcache.types import BodyInfo, ContentKey, ExactKey, Found, Holder, Tier

TTL_S, TOMBSTONE_S = 10.0, 4.0
CONTENTS = [ContentKey(bytes([i]) * 16) for i in range(2)]


def body(number: int) -> BodyInfo:
    """Even numbers lie under one content key, odd ones under the other."""
    return BodyInfo(CONTENTS[number % 2], ExactKey(bytes([number]) * 16), 16, 4096)


BODIES = [body(i) for i in range(4)]


@dataclass(frozen=True)
class Hint:
    """A message of one holder about one body; `tier` is None in a withdrawal."""

    node: str
    incarnation: int
    body: BodyInfo
    tier: Tier | None
    seq: int

    def arrive(self, directory: Directory, now_s: float) -> int:
        holder = Holder(self.node, self.incarnation, self.tier if self.tier is not None else Tier.HOST)
        if self.tier is None:
            return directory.withdraw(holder, [(self.body.content, self.body.exact, self.seq)], now_s)
        return directory.publish(holder, [(self.body, self.seq)], now_s)


def holdings(found: list[Found]) -> set[tuple[ExactKey, Holder]]:
    pairs = [(f.body.exact, h) for f in found for h in f.holders]
    assert len(pairs) == len(set(pairs)) and all(f.holders for f in found)
    return set(pairs)


def make(**changes) -> Directory:
    return Directory(**{"ttl_s": TTL_S, "tombstone_s": TOMBSTONE_S, **changes})


def anyone(node: str, incarnation: int) -> bool:
    return True


class DirectoryMachine(RuleBasedStateMachine):
    """Three holders publish, withdraw and restart; the network delays, repeats, reorders and loses."""

    @initialize()
    def open(self) -> None:
        self.directory = make()
        self.now_s = 0.0
        self.live = dict.fromkeys("abc", 1)
        self.seq = 0
        self.network: list[Hint] = []
        # (node, incarnation, body) -> (newest hint that arrived, when it runs out)
        self.model: dict[tuple[str, int, ExactKey], tuple[Hint, float]] = {}

    @rule(node=st.sampled_from("abc"), what=st.sampled_from(BODIES), tier=st.none() | st.sampled_from(Tier))
    def send(self, node: str, what: BodyInfo, tier: Tier | None) -> None:
        self.seq += 1
        self.network.append(Hint(node, self.live[node], what, tier, self.seq))

    @precondition(lambda self: self.network)
    @rule(data=st.data(), again=st.booleans(), lost=st.sampled_from([False, False, False, True]))
    def arrive(self, data, again: bool, lost: bool) -> None:
        hint = data.draw(st.sampled_from(self.network))
        if not again:
            self.network.remove(hint)
        if lost:
            return
        key = (hint.node, hint.incarnation, hint.body.exact)
        newest = key not in self.model or self.model[key][0].seq < hint.seq
        assert hint.arrive(self.directory, self.now_s) == newest
        if newest:
            self.model[key] = (hint, self.now_s + (TOMBSTONE_S if hint.tier is None else TTL_S))

    @rule(node=st.sampled_from("abc"))
    def restart(self, node: str) -> None:
        self.live[node] += 1

    @rule(seconds=st.integers(1, 6))
    def wait(self, seconds: int) -> None:
        self.now_s += seconds

    @rule()
    def sweep(self) -> None:
        kept = {key: entry for key, entry in self.model.items() if entry[1] > self.now_s}
        assert self.directory.expire(self.now_s) == len(self.model) - len(kept)
        self.model = kept

    @invariant()
    def lookups_answer_the_newest_hint_of_each_live_holder(self) -> None:
        expected = {
            (hint.body.exact, Holder(hint.node, hint.incarnation, hint.tier))
            for hint, expires_s in self.model.values()
            if hint.tier is not None and expires_s > self.now_s and self.live[hint.node] == hint.incarnation
        }
        answered: set[tuple[ExactKey, Holder]] = set()
        for content in CONTENTS:
            found = self.directory.lookup(content, self.now_s, lambda n, i: self.live[n] == i)
            assert all(f.body.content == content for f in found)
            answered |= holdings(found)
        assert answered == expected

    def teardown(self) -> None:
        if hasattr(self, "directory"):
            self.directory.expire(self.now_s + TTL_S + TOMBSTONE_S)
            assert len(self.directory) == 0, "nothing outlives its time"


DirectoryMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestDirectory = DirectoryMachine.TestCase


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_order_of_arrival_ends_in_the_state_of_the_highest_number(data):
    kinds = st.tuples(
        st.sampled_from("ab"), st.integers(1, 2), st.sampled_from(BODIES), st.none() | st.just(Tier.HOST)
    )
    hints = [Hint(*kind, seq) for seq, kind in enumerate(data.draw(st.lists(kinds, max_size=10)), 1)]
    delivered = data.draw(st.permutations(hints + hints[::2]))
    directory = make()
    for hint in delivered:
        hint.arrive(directory, 0.0)
    last = {(h.node, h.incarnation, h.body.exact): h for h in hints}
    expected = {
        (h.body.exact, Holder(h.node, h.incarnation, h.tier)) for h in last.values() if h.tier is not None
    }
    assert set().union(*(holdings(directory.lookup(c, 0.0, anyone)) for c in CONTENTS)) == expected


def test_a_withdrawal_stops_a_publish_that_it_overtook():
    directory, late = make(), Hint("a", 1, BODIES[0], Tier.HOST, 1)
    Hint("a", 1, BODIES[0], None, 2).arrive(directory, 0.0)
    assert late.arrive(directory, TOMBSTONE_S - 0.1) == 0
    assert directory.lookup(CONTENTS[0], 1.0, anyone) == []
    assert Hint("a", 1, BODIES[0], Tier.HOST, 3).arrive(directory, 1.0) == 1


def test_an_old_incarnations_last_words_do_not_hide_the_new_one():
    directory = make()
    Hint("a", 2, BODIES[0], Tier.HOST, 1).arrive(directory, 0.0)
    Hint("a", 1, BODIES[0], None, 99).arrive(directory, 0.0)
    Hint("a", 1, BODIES[0], Tier.NVME, 98).arrive(directory, 0.0)
    (found,) = directory.lookup(CONTENTS[0], 1.0, lambda node, incarnation: incarnation == 2)
    assert found.holders == (Holder("a", 2, Tier.HOST),)


def test_an_entry_lives_as_long_as_it_is_published_again():
    directory = make()
    for seq, now_s in enumerate((0.0, 8.0, 16.0), 1):
        Hint("a", 1, BODIES[0], Tier.HOST, seq).arrive(directory, now_s)
        directory.expire(now_s)
    assert directory.lookup(CONTENTS[0], 16.0 + TTL_S - 0.1, anyone)
    assert directory.lookup(CONTENTS[0], 16.0 + TTL_S, anyone) == []


def test_the_bodies_of_one_key_are_bounded_and_the_newest_stay():
    directory = make()
    bodies = [
        BodyInfo(CONTENTS[0], ExactKey(bytes([i]) * 16), 16, 4096) for i in range(BODIES_PER_KEY_MAX + 2)
    ]
    for seq, one in enumerate(bodies[:-1], 1):
        assert Hint("a", 1, one, Tier.HOST, seq).arrive(directory, seq / 10) == 1
    found = directory.lookup(CONTENTS[0], 1.0, anyone)
    assert [f.body for f in found] == bodies[1:-1], "the one heard of longest ago made room"

    Hint("a", 1, bodies[3], None, 100).arrive(directory, 2.0)
    assert Hint("b", 1, bodies[-1], Tier.HOST, 1).arrive(directory, 2.0) == 1
    found = {f.body.exact for f in directory.lookup(CONTENTS[0], 2.0, anyone)}
    assert found == {b.exact for b in bodies[1:] if b != bodies[3]}, "the withdrawn one made room"

    stranger = [(CONTENTS[0], ExactKey(b"never published."), 1)]
    assert directory.withdraw(Holder("c", 1, Tier.HOST), stranger, 3.0) == 0
    assert len(directory.lookup(CONTENTS[0], 3.0, anyone)) == BODIES_PER_KEY_MAX


def test_withdrawals_of_unknown_bodies_are_bounded_too():
    directory = make(bodies_max=2)
    gone = [(CONTENTS[0], ExactKey(bytes([i]) * 16), 1) for i in range(50)]
    directory.withdraw(Holder("a", 1, Tier.HOST), gone, 0.0)
    assert directory.expire(TOMBSTONE_S) == 2


def test_a_sweep_in_pieces_looks_at_every_key():
    directory = make()
    keys = [ContentKey(i.to_bytes(16, "big")) for i in range(10)]
    directory.publish(Holder("a", 1, Tier.HOST), [(BodyInfo(k, ExactKey(k), 16, 1), 1) for k in keys], 0.0)
    assert [directory.expire(TTL_S, keys_max=4) for _ in range(3)] == [4, 4, 2]
    assert len(directory) == 0
    assert directory.expire(TTL_S, keys_max=4) == 0
