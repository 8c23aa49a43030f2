"""Eviction: nothing that is held goes, scans pass through, ghosts are met again, one piece is made."""

from __future__ import annotations

import itertools
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from p2pcache.config import EVICTIONS
from p2pcache.core.eviction import POLICIES, Lru, S3Fifo
from p2pcache.core.ghosts import Ghosts
from p2pcache.core.tiers import ALIGN_BYTES, HostTier, Slot, SlotState
from p2pcache.types import BodyInfo, ContentKey, ExactKey

POLICY = pytest.mark.parametrize("policy", POLICIES.values(), ids=list(POLICIES))


def body(number: int, pages: int = 1, tokens: int = 16) -> BodyInfo:
    key = (number + 1).to_bytes(8, "little")
    return BodyInfo(ContentKey(key * 2), ExactKey(key * 2), tokens, pages * ALIGN_BYTES)


def put(tier: HostTier, number: int, pages: int = 1, tokens: int = 16, replica: bool = False) -> list[int]:
    """Store a body as a node does; returns the numbers of those that went for it."""
    wanted, gone = body(number, pages, tokens), []
    while (slot := tier.reserve(wanted, "writer")) is None:
        victims = tier.victims(wanted.nbytes, 0.0)
        assert victims, "nothing is held"
        for victim in victims:
            gone.append(number_of(victim))
            tier.evict(victim)
    tier.commit(slot, (1,), replica=replica)
    return gone


def number_of(slot: Slot) -> int:
    return int.from_bytes(slot.body.exact[:8], "little") - 1


def use(tier: HostTier, number: int) -> bool:
    slot = tier.lease(body(number).exact)
    if slot is not None:
        tier.release(slot)
    return slot is not None


def hottest_first(tier: HostTier) -> list[int]:
    return [number_of(slot) for slot in tier.resident()][::-1]


def test_the_settings_name_the_policies_there_are():
    assert set(EVICTIONS) == set(POLICIES)


class Tiers(RuleBasedStateMachine):
    """Any policy, against what is true of all of them."""

    PAGES = 12

    @initialize(policy=st.sampled_from(list(POLICIES.values())), weighs=st.booleans())
    def open(self, policy, weighs: bool) -> None:
        self.tier = HostTier(self.PAGES * ALIGN_BYTES, policy, weighs)
        self.now_s = 0.0
        self.leases: list[Slot] = []
        self.reserved: list[Slot] = []

    def evictable(self, slot: Slot) -> bool:
        return (
            slot.state is SlotState.RESIDENT and slot not in self.leases and slot.pinned_until_s <= self.now_s
        )

    def widest(self) -> int:
        """The longest stretch without a wall, found page by page."""
        walls = [s for s in [*self.tier.resident(), *self.reserved] if not self.evictable(s)]
        page_of = {p for s in walls for p in range(s.offset, s.offset + s.extent_bytes, ALIGN_BYTES)}
        free = [p * ALIGN_BYTES not in page_of for p in range(self.PAGES)]
        return max((len(list(run)) for yes, run in itertools.groupby(free) if yes), default=0)

    @rule(
        number=st.integers(0, 20),
        pages=st.integers(1, 6),
        tokens=st.sampled_from([1, 16, 64]),
        data=st.data(),
    )
    def reserve(self, number: int, pages: int, tokens: int, data) -> None:
        wanted = body(number, pages, tokens)
        if (slot := self.tier.reserve(wanted, "writer")) is None:
            victims = self.tier.victims(wanted.nbytes, self.now_s)
            assert bool(victims) == (self.widest() >= pages), "refused exactly where walls leave no room"
            assert all(self.evictable(victim) for victim in victims)
            if not victims:
                return
            for victim in victims:
                self.tier.evict(victim)
            slot = self.tier.reserve(wanted, "writer")
            assert slot is not None, "what goes together makes room"
        self.reserved.append(slot)

    @precondition(lambda self: self.reserved)
    @rule(replica=st.booleans())
    def commit(self, replica: bool) -> None:
        self.tier.commit(self.reserved.pop(0), (1,), replica=replica)

    @rule(number=st.integers(0, 20))
    def lease(self, number: int) -> None:
        slot = self.tier.lease(body(number).exact)
        if slot is not None:
            self.leases.append(slot)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data) -> None:
        self.tier.release(self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1))))

    @rule(number=st.integers(0, 20), ahead_s=st.integers(0, 3))
    def pin(self, number: int, ahead_s: int) -> None:
        self.tier.pin(body(number).exact, self.now_s + ahead_s)

    @rule(number=st.integers(0, 20))
    def warm(self, number: int) -> None:
        self.tier.warm(body(number).exact)
        if self.tier.get(body(number).exact) is not None:
            assert hottest_first(self.tier)[0] == number or isinstance(self.tier._policy, Lru)

    @rule()
    def let_a_second_pass(self) -> None:
        self.now_s += 1

    @rule()
    def victim(self) -> None:
        victim = self.tier.victim(self.now_s)
        assert (victim is None) == (not any(map(self.evictable, self.tier.resident())))
        assert victim is None or self.evictable(victim)
        if victim is not None:
            self.tier.evict(victim)

    @invariant()
    def the_policy_knows_what_is_resident(self) -> None:
        self.tier.validate()
        slots = list(self.tier.resident())
        assert len(set(slots)) == len(slots) == len(self.tier)
        queues = {slot.queue for slot in slots}
        assert sum(q.nbytes for q in queues) == sum(slot.extent_bytes for slot in slots)


Tiers.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestTiers = Tiers.TestCase


def test_a_scan_passes_through_s3_fifo_and_empties_an_lru():
    kept = {}
    for policy in (S3Fifo, Lru):
        tier = HostTier(64 * ALIGN_BYTES, policy)
        for number in range(16):
            put(tier, number)
            use(tier, number)
        for number in range(1000, 1300):
            put(tier, number)
        kept[policy] = sum(tier.get(body(number).exact) is not None for number in range(16))
    assert kept == {S3Fifo: 16, Lru: 0}


def test_a_ghost_that_is_met_again_enters_main():
    tier = HostTier(8 * ALIGN_BYTES, S3Fifo)
    for number in range(9):
        put(tier, number)
    assert tier.get(body(0).exact) is None
    put(tier, 0)
    assert hottest_first(tier)[0] == 0, "behind all of small, so the last to go"
    for number in range(100, 104):
        put(tier, number)
    assert tier.get(body(0).exact) is not None


@pytest.mark.parametrize("from_main", [False, True])
def test_the_border_moves_towards_the_queue_that_let_go_too_early(from_main: bool):
    tier = HostTier(32 * ALIGN_BYTES, S3Fifo)
    policy = tier._policy
    before = policy._small_bytes
    for number in range(4):
        policy._ghosts.add(number + 1, ALIGN_BYTES, from_main)
        put(tier, number)
    assert policy._small_bytes == before + (-4 if from_main else 4) * ALIGN_BYTES
    for number in range(100, 200):
        policy._ghosts.add(number + 1, ALIGN_BYTES, from_main)
        put(tier, number)
    low, high = S3Fifo.SHARE_MIN * tier.capacity_bytes, S3Fifo.SHARE_MAX * tier.capacity_bytes
    assert policy._small_bytes == (low if from_main else high)


@POLICY
def test_of_bodies_used_alike_those_that_save_more_tokens_a_byte_stay(policy):
    def stay(weighs: bool) -> tuple[int, int]:
        tier = HostTier(120 * ALIGN_BYTES, policy, weighs)
        for number in range(40):  # the even ones are coded in half the bytes
            put(tier, number, pages=2 if number % 2 == 0 else 4, tokens=64)
        for number in range(100, 110):
            put(tier, number, pages=2 if number % 2 == 0 else 4, tokens=64)
        left = [n for n in hottest_first(tier) if n < 40]
        return sum(n % 2 == 0 for n in left), sum(n % 2 for n in left)

    dense, sparse = stay(weighs=True)
    assert dense >= 19 and sparse < dense - 5
    dense, sparse = stay(weighs=False)
    assert abs(dense - sparse) <= 1


@POLICY
def test_a_replica_goes_first_until_its_second_use(policy):
    tier = HostTier(4 * ALIGN_BYTES, policy)
    put(tier, 1), put(tier, 2)
    put(tier, 3, replica=True), put(tier, 4, replica=True)
    use(tier, 3), use(tier, 4)  # what they came for
    assert put(tier, 5) == [3]
    use(tier, 4)
    assert put(tier, 6) != [4]


@POLICY
def test_what_is_warmed_is_hottest_whatever_it_was(policy):
    tier = HostTier(6 * ALIGN_BYTES, policy)
    for number in range(6):
        put(tier, number, replica=number % 2 == 1)
    for number in (3, 2, 1):
        tier.warm(body(number).exact)
    assert hottest_first(tier)[:3] == [1, 2, 3]


@POLICY
def test_held_bodies_are_passed_over_once_and_not_at_every_search(policy):
    tier = HostTier(4000 * ALIGN_BYTES, policy)
    for number in range(4000):
        put(tier, number)
    cold = [tier.lease(body(number).exact) for number in range(3000)]
    looked = 0
    held = Slot.held

    def counting(slot: Slot, now_s: float) -> bool:
        nonlocal looked
        looked += 1
        return held(slot, now_s)

    Slot.held = counting
    try:
        for number in range(5000, 5500):
            put(tier, number)
    finally:
        del Slot.held
    assert looked < 4 * 3000 + 500 * 40
    for slot in cold:
        tier.release(slot)
    while (victim := tier.victim(0.0)) is not None:
        tier.evict(victim)
    assert len(tier) == 0 and tier.taken_bytes == 0


def test_those_set_aside_come_back_in_their_order():
    tier = HostTier(8 * ALIGN_BYTES, Lru)
    for number in range(8):
        put(tier, number)
    for number in (0, 1, 2):
        tier.get(body(number).exact).leases += 1  # no use: the order stays
    assert number_of(tier.victim(0.0)) == 3
    for number in (2, 0, 1):
        tier.release(tier.get(body(number).exact))
    assert hottest_first(tier)[::-1] == list(range(8))
    assert [put(tier, number)[0] for number in range(100, 105)] == [0, 1, 2, 3, 4]


def test_using_a_pinned_body_again_and_again_takes_no_memory():
    tier = HostTier(8 * ALIGN_BYTES, Lru)
    put(tier, 0)
    slot = tier.get(body(0).exact)
    slot.pinned_until_s = 100.0
    for _ in range(1000):
        slot.leases += 1  # no use: it stays where it is
        assert tier.victim(0.0) is None
        tier.release(slot)
        assert tier.victim(0.0) is None
    assert len(slot.queue._pinned) == len(slot.queue._timed) == 1
    slot.pinned_until_s = 200.0
    assert tier.victim(100.0) is None
    assert tier.victim(200.0) is slot and not slot.queue._pinned and not slot.queue._timed


@POLICY
@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(1, 8), min_size=30, max_size=120))
def test_bodies_of_any_size_always_find_room(policy, sizes: list[int]):
    tier = HostTier(24 * ALIGN_BYTES, policy)
    for number, pages in enumerate(sizes):
        put(tier, number, pages)
    tier.validate()


def test_a_large_body_takes_the_place_of_cold_neighbours_and_spares_the_hot_ones():
    tier = HostTier(32 * ALIGN_BYTES, Lru)
    for number in range(32):
        put(tier, number)
    put(tier, 0)  # again: the first generation has begun to go
    cold = {5, 12, *range(20, 28)}
    for number in set(range(32)) - cold:
        use(tier, number)
    assert set(put(tier, 100, pages=8)) == set(range(20, 28))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=200), st.integers(1, 20))
def test_a_ghost_lasts_for_a_capacity_of_later_ones_of_its_queue(added, pages: int):
    ghosts = Ghosts(pages * ALIGN_BYTES)
    for fingerprint, from_main in added:
        ghosts.add(fingerprint, ALIGN_BYTES, from_main)
    later = {True: 0, False: 0}
    known: dict[int, bool | None] = {}
    for fingerprint, from_main in reversed(added):
        if fingerprint not in known:
            known[fingerprint] = from_main if later[from_main] < pages else None
        later[from_main] += 1
    assert {fingerprint: ghosts.take(fingerprint) for fingerprint in known} == known
    assert all(ghosts.take(fingerprint) is None for fingerprint in known)


def test_ghosts_are_bounded_however_many_go(monkeypatch):
    monkeypatch.setattr(Ghosts, "ENTRIES_MAX", 1 << 12)
    ghosts = Ghosts(1 << 40)
    for number in range(1, 20_000):
        ghosts.add(number * 0x9E3779B97F4A7C15 % 2**64, ALIGN_BYTES, number % 2 == 0)
    assert ghosts.nbytes == 12 << 12 and len(ghosts) <= 1 << 12


@POLICY
def test_a_policy_takes_less_than_a_hundred_bytes_a_body(policy):
    bodies = 20_000
    made = policy(bodies * ALIGN_BYTES)
    slots = [Slot(body(i), i * ALIGN_BYTES, i + 1000) for i in range(2 * bodies)]
    tracemalloc.start()
    for slot in slots[:bodies]:
        made.admit(slot)
    for slot in slots[bodies:]:
        made.remove(made.victim(0.0))
        made.admit(slot)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    links = 5 * 8  # older, newer, queue, credit and cost, in the slot
    assert taken / bodies + links < 100
