"""The directory shard: whatever order hints arrive in, the newest of each holder counts.

All of it is asked of the native table and of its twin in Python, and both are compared over histories.
"""

from __future__ import annotations

import os
import struct
import time
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from p2pcache.core import wire
from p2pcache.core.directory import BODIES_PER_KEY_MAX, Directory
from p2pcache.core.directory_twin import PlainDirectory
from p2pcache.core.found import CODECS_MAX, HOLDERS_MAX, defect
from p2pcache.types import BodyInfo, ContentKey, ExactKey, Found, Holder, Provenance, Tier

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


BOTH = pytest.mark.parametrize("kind", [Directory, PlainDirectory])


def make(kind: type = Directory, **changes) -> Directory:
    return kind(**{"ttl_s": TTL_S, "tombstone_s": TOMBSTONE_S, **changes})


def anyone(node: str, incarnation: int) -> bool:
    return True


class DirectoryMachine(RuleBasedStateMachine):
    """Three holders publish, withdraw and restart; the network delays, repeats, reorders and loses."""

    kind: type = Directory

    @initialize()
    def open(self) -> None:
        self.directory = make(self.kind)
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


class PlainMachine(DirectoryMachine):
    kind = PlainDirectory


for machine in (DirectoryMachine, PlainMachine):
    machine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestDirectory = DirectoryMachine.TestCase
TestPlainDirectory = PlainMachine.TestCase


@BOTH
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_order_of_arrival_ends_in_the_state_of_the_highest_number(kind, data):
    kinds = st.tuples(
        st.sampled_from("ab"), st.integers(1, 2), st.sampled_from(BODIES), st.none() | st.just(Tier.HOST)
    )
    hints = [Hint(*kind, seq) for seq, kind in enumerate(data.draw(st.lists(kinds, max_size=10)), 1)]
    delivered = data.draw(st.permutations(hints + hints[::2]))
    directory = make(kind)
    for hint in delivered:
        hint.arrive(directory, 0.0)
    last = {(h.node, h.incarnation, h.body.exact): h for h in hints}
    expected = {
        (h.body.exact, Holder(h.node, h.incarnation, h.tier)) for h in last.values() if h.tier is not None
    }
    assert set().union(*(holdings(directory.lookup(c, 0.0, anyone)) for c in CONTENTS)) == expected


@BOTH
def test_a_withdrawal_stops_a_publish_that_it_overtook(kind):
    directory, late = make(kind), Hint("a", 1, BODIES[0], Tier.HOST, 1)
    Hint("a", 1, BODIES[0], None, 2).arrive(directory, 0.0)
    assert late.arrive(directory, TOMBSTONE_S - 0.1) == 0
    assert directory.lookup(CONTENTS[0], 1.0, anyone) == []
    assert Hint("a", 1, BODIES[0], Tier.HOST, 3).arrive(directory, 1.0) == 1


@BOTH
def test_an_old_incarnations_last_words_do_not_hide_the_new_one(kind):
    directory = make(kind)
    Hint("a", 2, BODIES[0], Tier.HOST, 1).arrive(directory, 0.0)
    Hint("a", 1, BODIES[0], None, 99).arrive(directory, 0.0)
    Hint("a", 1, BODIES[0], Tier.NVME, 98).arrive(directory, 0.0)
    (found,) = directory.lookup(CONTENTS[0], 1.0, lambda node, incarnation: incarnation == 2)
    assert found.holders == (Holder("a", 2, Tier.HOST),)


@BOTH
def test_an_entry_lives_as_long_as_it_is_published_again(kind):
    directory = make(kind)
    for seq, now_s in enumerate((0.0, 8.0, 16.0), 1):
        Hint("a", 1, BODIES[0], Tier.HOST, seq).arrive(directory, now_s)
        directory.expire(now_s)
    assert directory.lookup(CONTENTS[0], 16.0 + TTL_S - 0.1, anyone)
    assert directory.lookup(CONTENTS[0], 16.0 + TTL_S, anyone) == []


@BOTH
def test_the_bodies_of_one_key_are_bounded_and_the_newest_stay(kind):
    directory = make(kind)
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


@BOTH
def test_withdrawals_of_unknown_bodies_are_bounded_too(kind):
    directory = make(kind, bodies_max=2)
    gone = [(CONTENTS[0], ExactKey(bytes([i]) * 16), 1) for i in range(50)]
    directory.withdraw(Holder("a", 1, Tier.HOST), gone, 0.0)
    assert directory.expire(TOMBSTONE_S) == 2


@BOTH
def test_a_sweep_in_pieces_looks_at_every_key(kind):
    directory = make(kind)
    keys = [ContentKey(i.to_bytes(16, "big")) for i in range(10)]
    directory.publish(Holder("a", 1, Tier.HOST), [(BodyInfo(k, ExactKey(k), 16, 1), 1) for k in keys], 0.0)
    assert [directory.expire(TTL_S, batch_max=4) for _ in range(3)] == [4, 4, 2]
    assert len(directory) == 0
    assert directory.expire(TTL_S, batch_max=4) == 0


NAMES = ("a", "b", "ü" * 256)
CODECS = ("raw", "int8", "", "x" * 32)
SIGNED64 = st.integers(-(2**63), 2**63 - 1)
U31, U63 = st.integers(0, 2**31 - 1), st.integers(0, 2**63 - 1)
FEW_KEYS = st.integers(0, 3).map(lambda i: bytes(15) + bytes([i]))
HOLDERS = st.builds(Holder, st.sampled_from(NAMES), st.integers(1, 2), st.sampled_from(Tier))
SEQS = st.integers(1, 12) | SIGNED64
ANY_BODY = st.builds(
    BodyInfo,
    FEW_KEYS,
    FEW_KEYS,
    U31,
    U63,
    st.sampled_from(Provenance),
    U31,
    st.sampled_from(CODECS),
)
STEPS = st.one_of(
    st.tuples(st.just("publish"), HOLDERS, st.lists(st.tuples(ANY_BODY, SEQS), max_size=6)),
    st.tuples(st.just("withdraw"), HOLDERS, st.lists(st.tuples(FEW_KEYS, FEW_KEYS, SEQS), max_size=6)),
    st.tuples(st.just("wait"), st.integers(0, 8)),
    st.tuples(st.just("expire")),
    st.tuples(st.just("lookup"), st.sets(st.tuples(st.sampled_from(NAMES), st.integers(1, 2)))),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(STEPS, max_size=40), st.integers(1, 4))
def test_the_native_table_answers_like_its_twin(steps, bodies_max):
    """Also the order of bodies and holders, and which body makes room for which."""
    ours, twin = (make(kind, bodies_max=bodies_max) for kind in (Directory, PlainDirectory))
    keys = [bytes(15) + bytes([i]) for i in range(5)]
    now_s = 0.0
    for step in [*steps, ("lookup", {(name, i) for name in NAMES for i in (1, 2)})]:
        match step:
            case "wait", seconds:
                now_s += seconds
            case "expire", *_:
                assert ours.expire(now_s) == twin.expire(now_s)
            case "lookup", live:
                wanted = twin.lookup_many(keys, now_s, lambda n, i, live=live: (n, i) in live)
                assert ours.lookup_many(keys, now_s, lambda n, i, live=live: (n, i) in live) == wanted
                tables = [
                    kind.table(b"".join(keys), now_s, lambda n, i, live=live: (n, i) in live)
                    for kind in (ours, twin)
                ]
                assert tables[0] == tables[1] and defect(tables[0]) == ""
            case op, holder, bodies:
                assert getattr(ours, op)(holder, bodies, now_s) == getattr(twin, op)(holder, bodies, now_s)
        assert len(ours) == len(twin)


def test_many_keys_are_all_found_while_the_table_grows_and_shrinks():
    directory, twin = make(), make(PlainDirectory)
    keys = [ContentKey(bytes([i % 7]) * 8 + i.to_bytes(8, "little")) for i in range(3000)]
    for at, chunk in enumerate((keys[:2000], keys[500:1500], keys[1000:])):
        for kind in (directory, twin):
            bodies = [(BodyInfo(k, ExactKey(k[::-1]), 1, 1), 1 + at) for k in chunk]
            kind.publish(Holder(f"n{at}", 1, Tier.HOST), bodies, 6.0 * at)
        assert directory.lookup_many(keys, 6.0 * at, anyone) == twin.lookup_many(keys, 6.0 * at, anyone)
        assert directory.expire(6.0 * at) == twin.expire(6.0 * at)
        assert len(directory) == len(twin)
    taken = directory.nbytes
    assert directory.expire(99.0) and len(directory) == 0
    directory.publish(Holder("z", 1, Tier.HOST), [(BodyInfo(k, ExactKey(k), 1, 1), 1) for k in keys], 99.0)
    assert directory.nbytes == taken, "freed records are used again"


def test_each_holder_is_asked_about_once_a_lookup():
    directory, asked = make(), []
    keys = [ContentKey(bytes([i]) * 16) for i in range(50)]
    for name in "ab":
        directory.publish(
            Holder(name, 1, Tier.HOST), [(BodyInfo(k, ExactKey(k), 1, 1), 1) for k in keys], 0.0
        )

    def is_live(name: str, incarnation: int) -> bool:
        asked.append((name, incarnation))
        return name == "a"

    for _ in range(2):
        found = directory.lookup_many(keys, 1.0, is_live)
        assert all(h.node == "a" for per_key in found for f in per_key for h in f.holders)
    assert sorted(asked) == sorted([("a", 1), ("b", 1)] * 2)


GOOD = BODIES[0]


@pytest.mark.parametrize(
    ("error", "publish"),
    [
        (ValueError, [(BodyInfo(ContentKey(b"short"), GOOD.exact, 1, 1), 1)]),
        (ValueError, [(BodyInfo(GOOD.content, ExactKey(b"x" * 17), 1, 1), 1)]),
        (ValueError, [(BodyInfo("x" * 16, GOOD.exact, 1, 1), 1)]),
        (OverflowError, [(BodyInfo(GOOD.content, GOOD.exact, 2**63, 1), 1)]),
        (OverflowError, [(GOOD, 2**64)]),
        (OverflowError, [(GOOD, -(2**63) - 1)]),
        (TypeError, [(GOOD, 1.5)]),
        (TypeError, [(GOOD, None)]),
        (ValueError, [(BodyInfo(GOOD.content, GOOD.exact, 1, 1, 256), 1)]),
        (ValueError, [(BodyInfo(GOOD.content, GOOD.exact, 1, 1, codec="x" * 1025), 1)]),
        (ValueError, [(BodyInfo(GOOD.content, GOOD.exact, 1, 1, codec=b"raw"), 1)]),
        (UnicodeError, [(BodyInfo(GOOD.content, GOOD.exact, 1, 1, codec="\ud800"), 1)]),
        (AttributeError, [(None, 1)]),
        (IndexError, [()]),
        (TypeError, [3]),
        (TypeError, 3),
    ],
)
def test_nonsense_is_refused_and_changes_nothing(error: type, publish):
    directory = make()
    directory.publish(Holder("a", 1, Tier.HOST), [(GOOD, 5)], 0.0)
    before = directory.lookup(GOOD.content, 1.0, anyone)
    with pytest.raises(error):
        directory.publish(Holder("a", 1, Tier.HOST), publish, 1.0)
    assert directory.lookup(GOOD.content, 1.0, anyone) == before and len(directory) == 1


def test_bad_names_times_and_limits_are_refused():
    directory = make()
    for name, incarnation, now_s, error in (
        ("x" * 1025, 1, 0.0, ValueError),
        ("\ud800", 1, 0.0, UnicodeError),
        (None, 1, 0.0, TypeError),
        ("a", 2**63, 0.0, TypeError),
        ("a", 1, float("nan"), ValueError),
        ("a", 1, float("inf"), ValueError),
    ):
        for call in (directory.publish, directory.withdraw):
            with pytest.raises(error):
                call(Holder(name, incarnation, Tier.HOST), [], now_s)
    with pytest.raises(ValueError):
        directory.lookup(GOOD.content, float("nan"), anyone)
    with pytest.raises(ValueError):
        directory.lookup(b"short", 0.0, anyone)
    with pytest.raises(ValueError):
        make(bodies_max=0)


def test_who_is_live_is_told_by_any_truth():
    directory = make()
    directory.publish(Holder("a", 1, Tier.HOST), [(GOOD, 1)], 0.0)
    assert directory.lookup(GOOD.content, 1.0, lambda name, incarnation: 7)
    assert not directory.lookup(GOOD.content, 1.0, lambda name, incarnation: "")


def test_keys_that_were_chosen_to_collide_cost_no_more_than_others():
    def seconds(keys: list[bytes]) -> float:
        directory, before = make(), time.process_time()
        bodies = [(replace(GOOD, content=ContentKey(key)), 1) for key in keys]
        directory.publish(Holder("a", 1, Tier.HOST), bodies, 0.0)
        return time.process_time() - before

    halves = [(i * 0x9E3779B97F4A7C15 % 2**64, i) for i in range(1, 20_001)]  # equal where unseeded
    chosen = seconds([struct.pack("<QQ", *pair) for pair in halves])
    assert chosen < 8 * seconds([os.urandom(16) for _ in halves])


def test_what_says_who_is_live_cannot_change_what_is_being_read():
    directory = make()
    directory.publish(Holder("a", 1, Tier.HOST), [(b, 1) for b in BODIES], 0.0)

    def change(name: str, incarnation: int) -> bool:
        directory.publish(Holder("new", 1, Tier.HOST), [(BODIES[0], 1)], 0.0)
        return True

    with pytest.raises(RuntimeError, match="cannot change while a lookup runs"):
        directory.lookup(CONTENTS[0], 1.0, change)
    with pytest.raises(ZeroDivisionError):
        directory.lookup(CONTENTS[0], 1.0, lambda name, incarnation: 1 // 0)
    assert directory.publish(Holder("new", 1, Tier.HOST), [(BODIES[0], 1)], 0.0) == 1, "and it goes on"


def test_an_answer_of_a_full_key_passes_the_wires_own_check():
    directory = make()
    for i in range(BODIES_PER_KEY_MAX):
        one = BodyInfo(CONTENTS[0], ExactKey(bytes([i]) * 16), 2**31 - 1, 2**63 - 1, codec="x" * 32)
        directory.publish(Holder("a", 2**63 - 1, Tier.NVME), [(one, 2**63 - 1)], 0.0)
    body = {"found": list(directory.table(b"".join(CONTENTS), 0.0, anyone)), "unknown": False}
    assert list(body["found"][3]) == [BODIES_PER_KEY_MAX, 0]
    message = wire.Message("r", 1, "directory.lookup", body)
    assert wire.decode(wire.encode(message)).body == body


def test_what_a_table_cannot_carry_is_left_out_as_the_twin_does():
    ours, twin = make(bodies_max=99), make(PlainDirectory, bodies_max=99)
    wide = [
        dict(tokens=2**31),
        dict(base_position=2**31),
        dict(nbytes=-1),
        dict(provenance=3),
        dict(tokens=-1),
    ]
    bodies = [BodyInfo(CONTENTS[0], ExactKey(bytes([i]) * 16), **({"tokens": 1, "nbytes": 1} | changes))
              for i, changes in enumerate([*wide, *[{}] * 10])]  # fmt: skip
    codecs = [
        BodyInfo(ContentKey(bytes([9]) + i.to_bytes(15, "big")), ExactKey(bytes(16)), 1, 1, codec=str(i))
        for i in range(CODECS_MAX + 1)
    ]
    for directory in (ours, twin):
        for i in range(HOLDERS_MAX + 1):
            directory.publish(Holder(f"n{i}", 1, Tier.HOST), [(bodies[-1], 1)], 0.0)
        directory.publish(Holder("a", 1, 7), [(bodies[-2], 1)], 0.0)
        directory.publish(Holder("a", 1, Tier.NVME), [(b, 2) for b in [*bodies, *codecs]], 0.0)
    keys = b"".join([CONTENTS[0], *[b.content for b in codecs]])
    table = ours.table(keys, 1.0, anyone)
    assert table == twin.table(keys, 1.0, anyone) and defect(table) == ""
    assert table.counts[0] == 8 and sum(table.counts[1:]) == CODECS_MAX - 1


def test_names_that_nobody_uses_any_more_are_forgotten():
    """Holders that come and go under ever new names leave nothing behind."""
    directory = make()
    names = [f"holder-{i}" for i in range(200)]
    for name in names:
        directory.publish(Holder(name, 1, Tier.HOST), [(BODIES[0], 1)], 0.0)
    assert directory.native.holders == 200
    directory.expire(TTL_S)
    assert directory.native.holders == 0
