"""The host tier against a model: bytes conserved, no slot freed under a reader, LRU, pins, quarantine."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from p2pcache.core.eviction import POLICIES
from p2pcache.core.tiers import ALIGN_BYTES, HostTier, Slot, SlotState
from p2pcache.types import KEY_BYTES, BodyInfo, ContentKey, ExactKey, InvariantError, Provenance, TierFull


def body(number: int, nbytes: int = ALIGN_BYTES) -> BodyInfo:
    """Three bodies share a content key."""
    content = ContentKey(bytes([number // 3]) * 16)
    return BodyInfo(content, ExactKey(bytes([number]) * 16), 16, nbytes)


def filled(tier: HostTier, number: int, nbytes: int = ALIGN_BYTES) -> Slot:
    slot = tier.reserve(body(number, nbytes), "writer")
    assert slot is not None
    return tier.commit(slot, (number,))


class HostTierMachine(RuleBasedStateMachine):
    @initialize(pages=st.integers(0, 12), rest=st.integers(0, ALIGN_BYTES - 1))
    def open(self, pages: int, rest: int) -> None:
        self.tier = HostTier(pages * ALIGN_BYTES + rest, weighs_cost=False)
        self.pages = pages
        self.now_s = 0.0
        self.reserved: list[Slot] = []
        self.quarantined: list[Slot] = []
        self.lru: dict[ExactKey, Slot] = {}  # least recently used first
        self.leases: list[Slot] = []
        self.generations: set[int] = set()

    def slots(self) -> list[Slot]:
        return [*self.reserved, *self.quarantined, *self.lru.values()]

    def largest_gap(self) -> int:
        at, largest = 0, 0
        for slot in sorted(self.slots(), key=lambda s: s.offset):
            largest = max(largest, slot.offset - at)
            at = slot.offset + slot.extent_bytes
        return max(largest, self.pages * ALIGN_BYTES - at)

    @rule(number=st.integers(0, 8), nbytes=st.integers(0, 5 * ALIGN_BYTES))
    def reserve(self, number: int, nbytes: int) -> None:
        need = max(1, -(-nbytes // ALIGN_BYTES)) * ALIGN_BYTES
        if need > self.pages * ALIGN_BYTES:
            with pytest.raises(TierFull):
                self.tier.reserve(body(number, nbytes), "writer")
            return
        largest = self.largest_gap()
        slot = self.tier.reserve(body(number, nbytes), "writer")
        assert (slot is None) == (need > largest), "refused exactly where no gap is wide enough"
        if slot is not None:
            assert slot.generation not in self.generations
            assert slot.extent_bytes == need and slot.nbytes == nbytes
            self.generations.add(slot.generation)
            self.reserved.append(slot)

    def take(self, data, slots: list[Slot]) -> Slot:
        return slots.pop(data.draw(st.integers(0, len(slots) - 1)))

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def commit(self, data) -> None:
        slot = self.take(data, self.reserved)
        serves = self.tier.commit(slot, (1,), b"meta")
        assert serves is self.lru.setdefault(slot.body.exact, slot), "the first writer's copy stays"

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def abort(self, data) -> None:
        self.tier.abort(self.take(data, self.reserved))

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def quarantine(self, data) -> None:
        slot = self.take(data, self.reserved)
        self.tier.quarantine(slot)
        self.quarantined.append(slot)

    @precondition(lambda self: self.quarantined)
    @rule(data=st.data())
    def release_quarantine(self, data) -> None:
        self.tier.release_quarantine(self.take(data, self.quarantined))

    @rule(number=st.integers(0, 8))
    def lease(self, number: int) -> None:
        exact = body(number).exact
        slot = self.tier.lease(exact)
        assert slot is self.lru.get(exact)
        if slot is not None:
            self.leases.append(slot)
            self.lru[exact] = self.lru.pop(exact)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data) -> None:
        self.tier.release(self.take(data, self.leases))

    @rule(number=st.integers(0, 8), ahead_s=st.integers(0, 3))
    def pin(self, number: int, ahead_s: int) -> None:
        exact = body(number).exact
        assert self.tier.pin(exact, self.now_s + ahead_s) == (exact in self.lru)

    @rule()
    def let_a_second_pass(self) -> None:
        self.now_s += 1

    @rule()
    def evict_the_victim(self) -> None:
        free = (s for s in self.lru.values() if s not in self.leases and s.pinned_until_s <= self.now_s)
        expected = next(free, None)
        assert self.tier.victim(self.now_s) is expected
        if expected is not None:
            self.tier.evict(expected)
            del self.lru[expected.body.exact]

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def evicting_under_a_lease_is_our_fault(self, data) -> None:
        slot = data.draw(st.sampled_from(self.leases))
        with pytest.raises(InvariantError):
            self.tier.evict(slot)

    @invariant()
    def the_tier_is_what_the_model_says(self) -> None:
        self.tier.validate()
        assert self.tier.taken_bytes == sum(s.extent_bytes for s in self.slots()) <= self.tier.capacity_bytes
        assert self.tier.capacity_bytes == self.pages * ALIGN_BYTES
        assert list(self.tier.resident()) == list(self.lru.values())
        assert len(self.tier) == len(self.lru)
        assert self.tier.leases() == len(self.leases)
        for slot in self.leases:
            assert self.tier.current(slot.body.exact, slot.generation), "a slot was freed under a lease"
        for third in range(3):
            content = ContentKey(bytes([third]) * 16)
            siblings = [s for s in self.lru.values() if s.body.content == content]
            assert {id(s) for s in self.tier.by_content(content)} == {id(s) for s in siblings}


HostTierMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestHostTier = HostTierMachine.TestCase


def test_a_body_larger_than_the_tier_is_refused_with_a_reason():
    tier = HostTier(3 * ALIGN_BYTES)
    with pytest.raises(TierFull, match="larger than the host tier"):
        tier.reserve(body(1, 3 * ALIGN_BYTES + 1), "writer")
    assert tier.reserve(body(1, 3 * ALIGN_BYTES), "writer") is not None


def test_a_lease_released_twice_is_our_fault():
    tier = HostTier(ALIGN_BYTES)
    filled(tier, 1)
    slot = tier.lease(body(1).exact)
    tier.release(slot)
    with pytest.raises(InvariantError):
        tier.release(slot)


@pytest.mark.parametrize("ended", ["commit", "abort", "quarantine", "evict"])
@pytest.mark.parametrize("again", ["commit", "abort", "quarantine", "release_quarantine", "evict"])
def test_a_slot_cannot_end_twice(ended: str, again: str):
    tier = HostTier(2 * ALIGN_BYTES)
    slot = tier.reserve(body(1), "writer")
    steps = {
        "commit": lambda: tier.commit(slot, ()),
        "abort": lambda: tier.abort(slot),
        "quarantine": lambda: tier.quarantine(slot),
        "release_quarantine": lambda: tier.release_quarantine(slot),
        "evict": lambda: tier.evict(slot),
    }
    if ended == "evict":
        steps["commit"]()
    steps[ended]()
    if (ended, again) in {("commit", "evict"), ("quarantine", "release_quarantine")}:
        steps[again]()
        assert tier.taken_bytes == 0
    else:
        with pytest.raises(InvariantError):
            steps[again]()
    tier.validate()


def test_the_slot_of_a_second_writer_is_freed_and_stays_ended():
    tier = HostTier(2 * ALIGN_BYTES)
    late = tier.reserve(body(1), "late")
    first = filled(tier, 1)
    assert tier.commit(late, ()) is first
    with pytest.raises(InvariantError):
        tier.abort(late)
    assert tier.taken_bytes == ALIGN_BYTES


def test_a_quarantined_slot_is_not_reused_until_it_is_released():
    tier = HostTier(ALIGN_BYTES)
    slot = tier.reserve(body(1), "writer")
    tier.quarantine(slot)
    assert slot.state is SlotState.QUARANTINED
    assert tier.reserve(body(2), "writer") is None and tier.victim(0) is None
    tier.release_quarantine(slot)
    assert tier.reserve(body(2), "writer").offset == slot.offset


def test_a_small_body_does_not_break_up_a_large_gap():
    tier = HostTier(8 * ALIGN_BYTES)
    large, _, small, _ = [filled(tier, i, n * ALIGN_BYTES) for i, n in enumerate((4, 1, 1, 1))]
    tier.evict(large), tier.evict(small)
    assert tier.reserve(body(5), "writer").offset in (small.offset, 7 * ALIGN_BYTES)
    assert tier.reserve(body(6, 4 * ALIGN_BYTES), "writer") is not None


def test_a_remembered_offset_is_refused_once_its_slot_is_reused():
    tier = HostTier(ALIGN_BYTES)
    old = filled(tier, 1)
    tier.evict(old)
    new = filled(tier, 1)
    assert new.offset == old.offset
    assert tier.current(new.body.exact, new.generation)
    assert not tier.current(old.body.exact, old.generation)


def test_looking_is_not_a_use_and_leasing_is():
    tier = HostTier(2 * ALIGN_BYTES)
    filled(tier, 1), filled(tier, 2)
    tier.get(body(1).exact), tier.by_content(body(1).content)
    assert tier.victim(0).body == body(1)
    tier.release(tier.lease(body(1).exact))
    assert tier.victim(0).body == body(2)


@given(
    st.builds(
        BodyInfo,
        st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES),
        st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES),
        st.integers(0, 2**32 - 1),
        st.integers(0, 2**63 - 1),
        st.sampled_from(Provenance),
        st.integers(0, 2**32 - 1),
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=32),
    ),
    st.lists(st.integers(0, 2**64 - 1), max_size=1024).map(tuple),
    st.binary(max_size=64),
    st.integers(0, 2**32 - 1),
    st.integers(1, 2**63),
)
def test_a_slot_gives_back_what_was_packed_into_it(what, sums, meta, page, generation):
    slot = Slot(what, page * ALIGN_BYTES, generation)
    for told, wanted in (((), b""), (sums, meta)):
        slot.fill(told, wanted)
        slot.leases += 1
        assert (slot.body, slot.offset, slot.generation) == (what, page * ALIGN_BYTES, generation)
        assert (slot.content, slot.exact, slot.nbytes) == (what.content, what.exact, what.nbytes)
        assert (slot.checksums, slot.meta) == (told, wanted)
    slot.pinned_until_s, slot.state = 5.0, SlotState.RESIDENT
    assert (slot.state, slot.leases, slot.pinned_until_s) == (SlotState.RESIDENT, 2, 5.0)
    slot.leases, slot.pinned_until_s = 0, 0.0
    assert (slot.state, slot.leases, slot.pinned_until_s) == (SlotState.RESIDENT, 0, 0.0)


def test_a_pin_ends_with_its_time():
    tier = HostTier(ALIGN_BYTES)
    filled(tier, 1)
    assert tier.pin(body(1).exact, until_s=5.0)
    assert tier.victim(now_s=4.9) is None
    assert tier.victim(now_s=5.0).body == body(1)


def test_validate_sees_a_leak_and_an_overlap():
    leaky, overlapping = HostTier(4 * ALIGN_BYTES), HostTier(4 * ALIGN_BYTES)
    leaky._free.take(ALIGN_BYTES)
    filled(leaky, 1), filled(overlapping, 1)
    overlapping._free.add(0, ALIGN_BYTES)
    filled(overlapping, 2)
    for tier in (leaky, overlapping):
        with pytest.raises(InvariantError):
            tier.validate()


@pytest.mark.parametrize("policy", POLICIES.values(), ids=list(POLICIES))
def test_the_coldest_are_told_without_a_look_at_the_others(policy):
    looked = []

    class Counted(policy):
        def __iter__(self):
            for entry in super().__iter__():
                looked.append(entry)
                yield entry

    tier = HostTier(50 * ALIGN_BYTES, Counted)
    for number in range(50):
        filled(tier, number)
    order = list(tier.resident())
    looked.clear()
    assert tier.coldest(3 * ALIGN_BYTES - 1) == order[:3] == looked
    assert tier.coldest(0) == tier.coldest(-1) == [] and len(looked) == 3
    assert tier.coldest(1 << 40) == order


@given(
    st.integers(-16, 15), st.integers(0, 300), st.sampled_from(SlotState), st.floats(0, 1e9), st.booleans()
)
def test_what_changes_in_a_slot_shares_one_integer_and_nothing_else(cost, leases, state, until_s, pin_first):
    slot = Slot(body(1), 0, 1)
    assert (slot.cost, slot.leases, slot.state, slot.pinned_until_s, slot.used) == (
        -16,
        0,
        SlotState.RESERVED,
        0.0,
        False,
    )
    if pin_first:
        slot.pinned_until_s = until_s
    slot.leases, slot.cost, slot.state = leases, cost, state
    slot.pinned_until_s = until_s
    assert (slot.cost, slot.leases, slot.state, slot.pinned_until_s) == (cost, leases, state, until_s)
    assert slot.held(until_s) == (leases > 0) and (slot.held(until_s - 1) or not until_s or until_s > 1e8)
    slot.take_lease()
    assert (slot.cost, slot.leases, slot.state, slot.used) == (cost, leases + 1, state, True)
    assert slot.held(until_s)
    for wrong in (-17, 16):
        with pytest.raises(InvariantError):
            slot.cost = wrong
