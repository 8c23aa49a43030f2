"""The NVMe log's index conserves bytes and keys, evicts first in first out, and reuses nothing early."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from p2pcache.core.nvmeindex import Already, LogIndex, NeedsReclaim, Placement, segment_bytes_for
from p2pcache.core.nvmelog import PAGE_BYTES, Header, Record, State
from p2pcache.types import BodyInfo, ConfigError, ContentKey, ExactKey, InvariantError, TierFull

SEGMENT_PAGES = 8


def make_record(number: int, pages: int = 1, content: int | None = None) -> Record:
    """A record whose body takes `pages` pages, with a header of one page."""
    name = number if content is None else content
    body = BodyInfo(
        content=ContentKey(name.to_bytes(16, "big")),
        exact=ExactKey(number.to_bytes(16, "big")),
        tokens=16,
        nbytes=pages * PAGE_BYTES - 64,
    )
    return Record(body, checksums=(0,))


def make_index(segments: int = 3) -> LogIndex:
    return LogIndex(segments * SEGMENT_PAGES * PAGE_BYTES, SEGMENT_PAGES * PAGE_BYTES)


def put(index: LogIndex, record: Record) -> list[ExactKey]:
    """Place and commit, reclaiming as often as need be. Returns the keys that went."""
    evicted: list[ExactKey] = []
    while isinstance(needs := index.place(record), NeedsReclaim):
        evicted += needs.evicted
        index.reclaim(needs.segment, index.next_epoch(0))
    if isinstance(needs, Placement):
        index.commit(needs)
    index.validate()
    return evicted


class TestLogIndex:
    """Segments of 8 pages: one header page, then for instance two records of 3 pages each."""

    def test_a_record_is_visible_from_commit_on_only(self):
        index, record = make_index(), make_record(1)
        placement = index.place(record)
        assert index.lookup(record.body.exact) is None and len(index) == 0
        assert index.place(record) == Already(committed=False)
        index.commit(placement)
        assert index.lookup(record.body.exact).record == record
        assert index.place(record) == Already(committed=True)
        assert index.by_content(record.body.content) == [record]
        index.validate()

    def test_an_aborted_record_leaves_dead_bytes_and_can_be_placed_again(self):
        index, record = make_index(), make_record(1)
        first = index.place(record)
        index.abort(first)
        second = index.place(record)
        assert second.offset == first.offset + record.record_bytes
        with pytest.raises(InvariantError):
            index.commit(first)
        index.validate()

    def test_eviction_is_first_in_first_out_by_segment(self):
        index = make_index(3)
        evicted = [put(index, make_record(n, pages=2)) for n in range(10)]
        names = [[int.from_bytes(key, "big") for key in keys] for keys in evicted]
        assert names == [[], [], [], [], [], [], [0, 1], [], [2, 3], []]
        assert sorted(int.from_bytes(r.body.exact, "big") for r in index) == [4, 5, 6, 7, 8, 9]

    def test_condemned_records_are_hidden_at_once_and_named_until_reclaimed(self):
        index = make_index(2)
        for n in range(4):
            put(index, make_record(n, pages=2))
        record = make_record(9, pages=2)
        needs = index.room(record)
        assert needs == index.room(record) == index.place(record)
        assert len(needs.evicted) == 2 and all(index.lookup(key) is None for key in needs.evicted)
        assert all(index.pin(key) is None for key in needs.evicted)
        index.validate()
        assert index.reclaim(needs.segment, index.next_epoch(5)) == 2
        assert index.room(record) is None and isinstance(index.place(record), Placement)

    def test_a_segment_with_readers_is_passed_over(self):
        index = make_index(3)
        for n in range(6):
            put(index, make_record(n, pages=2))
        oldest = index.pin(make_record(0).body.exact)
        assert index.room(make_record(9, pages=2)).evicted[0] == make_record(2).body.exact
        index.unpin(oldest)
        with pytest.raises(InvariantError):
            index.unpin(oldest)

    def test_nothing_is_evicted_while_all_is_read_or_written(self):
        index = make_index(2)
        put(index, make_record(0, pages=6))
        in_flight = index.place(make_record(1, pages=6))
        pinned = index.pin(make_record(0).body.exact)
        with pytest.raises(TierFull, match="read or written"):
            index.place(make_record(2))
        index.abort(in_flight)
        assert index.room(make_record(2)).evicted == ()  # the aborted one's segment
        index.unpin(pinned)

    def test_a_reader_outlives_the_drop_of_its_record(self):
        index = make_index(2)
        record = make_record(0, pages=6)
        put(index, record)
        location = index.pin(record.body.exact)
        assert index.drop(record.body.exact) is location and index.drop(record.body.exact) is None
        assert index.by_content(record.body.content) == [] and index.live_bytes == 0
        put(index, make_record(1, pages=6))
        assert index.room(make_record(2)).segment != location.segment
        index.unpin(location)
        index.validate()

    def test_a_record_larger_than_a_segment_is_refused(self):
        put(make_index(), make_record(1, pages=SEGMENT_PAGES - 2))
        with pytest.raises(TierFull, match="fits no NVMe segment"):
            make_index().place(make_record(1, pages=SEGMENT_PAGES - 1))

    def test_several_bodies_of_one_content_are_all_named(self):
        index = make_index()
        first, second = make_record(1, content=5), make_record(2, content=5)
        put(index, first)
        put(index, second)
        assert index.by_content(first.body.content) == [first, second]
        index.drop(first.body.exact)
        assert index.by_content(first.body.content) == [second]

    def test_a_retired_segment_is_never_used_again(self):
        index = make_index(2)
        for n in range(4):
            put(index, make_record(n, pages=2))
        needs = index.room(make_record(9))
        assert index.retire(needs.segment) == 2
        for n in range(10, 20):
            put(index, make_record(n, pages=2))
        assert {index.lookup(record.body.exact).segment for record in index} == {1 - needs.segment}

    def test_a_lower_epoch_or_an_uncondemned_segment_is_our_own_fault(self):
        index = make_index()
        with pytest.raises(InvariantError, match="not condemned"):
            index.reclaim(0, 1)
        with pytest.raises(InvariantError, match="not condemned"):
            index.retire(0)

    def test_epochs_only_rise_whatever_their_random_bits(self):
        index = make_index()
        index.saw_epoch(5 << 32 | 0xFFFFFFFF)
        assert index.next_epoch(0) == 6 << 32
        assert index.next_epoch(0xFFFFFFFF) == 7 << 32 | 0xFFFFFFFF

    @pytest.mark.parametrize(
        ("capacity", "segment"), [(1 << 20, 1 << 20), (1 << 20, 5000), (1 << 20, 4096), (1 << 40, 1 << 20)]
    )
    def test_sizes_that_make_no_ring_are_a_config_error(self, capacity, segment):
        with pytest.raises(ConfigError, match="segment"):
            LogIndex(capacity, segment)

    @given(st.integers(1 << 16, 1 << 50))
    def test_a_segment_size_can_be_chosen_for_any_cap(self, capacity):
        index = LogIndex(capacity, segment_bytes_for(capacity))
        assert index.segment_count * index.segment_bytes > capacity / 2


class TestRestore:
    def entries(self, epoch, *laid, state=State.COMMITTED):
        offset, entries = PAGE_BYTES, []
        for record in laid:
            entries.append((offset, Header(record, epoch, state)))
            offset += record.record_bytes
        return entries

    def test_usage_counts_at_once_and_the_next_place_evicts_the_oldest(self):
        index = make_index(3)
        for number, epoch in ((0, 30), (1, 10), (2, 20)):
            index.restore(
                number, epoch, self.entries(epoch, make_record(epoch, 2), make_record(epoch + 1, 2))
            )
        index.validate()
        assert index.used_bytes == 3 * 7 * PAGE_BYTES and len(index) == 6
        assert index.room(make_record(9, pages=2)) == NeedsReclaim(
            1, (make_record(10).body.exact, make_record(11).body.exact)
        )
        assert index.next_epoch(0) > 30

    def test_the_youngest_segment_goes_on_being_filled(self):
        index = make_index(3)
        index.restore(0, 20, self.entries(20, make_record(1, 2)))
        index.restore(1, 10, self.entries(10, make_record(2, 2)))
        index.restore(2, 30, [])
        placement = index.place(make_record(3, 2))
        assert (placement.segment, placement.epoch, placement.offset) == (0, 20, 4 * PAGE_BYTES)

    def test_dead_records_take_room_and_are_not_found(self):
        index = make_index(3)
        index.restore(0, 1, self.entries(1, make_record(1, 2), state=State.DEAD))
        assert len(index) == 0 and index.used_bytes == 6 * PAGE_BYTES
        assert index.place(make_record(1, 2)).offset == 4 * PAGE_BYTES

    @pytest.mark.parametrize("order", [(0, 1), (1, 0)])
    def test_of_two_records_of_one_key_the_younger_counts(self, order):
        index = make_index(3)
        for number in order:
            index.restore(number, number + 1, self.entries(number + 1, make_record(7, pages=number + 1)))
            index.validate()
        assert index.lookup(make_record(7).body.exact).segment == 1 and len(index) == 1

    @pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
    @pytest.mark.parametrize("again", [State.DEAD, State.COMMITTED])
    def test_a_dead_record_hides_older_ones_of_its_key_and_no_younger(self, order, again):
        index = make_index(4)
        for number in order:
            state = (State.COMMITTED, State.DEAD, again)[number]
            index.restore(number, number + 1, self.entries(number + 1, make_record(7), state=state))
            index.validate()
        found = index.lookup(make_record(7).body.exact)
        assert found.segment == 2 if again is State.COMMITTED else found is None

    def test_overlapping_records_are_our_own_fault(self):
        index = make_index(3)
        first, second = self.entries(1, make_record(1, 2), make_record(2, 2))
        with pytest.raises(InvariantError, match="does not follow"):
            index.restore(0, 1, [second, first])


class IndexAgainstModel(RuleBasedStateMachine):
    """The model: which keys are live, by where they went; nothing else may be visible."""

    def __init__(self):
        super().__init__()
        self.index = make_index(4)
        self.live: dict[ExactKey, Placement] = {}
        self.in_flight: list[Placement] = []
        self.pinned = []
        self.needs: NeedsReclaim | None = None

    @rule(number=st.integers(0, 30), pages=st.integers(1, 6))
    def place(self, number, pages):
        record = make_record(number, pages, content=number % 5)
        exact = record.body.exact
        busy = {place.segment for place in self.in_flight} | {place.segment for place in self.pinned}
        try:
            result = self.index.place(record)
        except TierFull:
            assert busy  # only readers and writers can keep room from being made
            return
        if isinstance(result, Already):
            assert result.committed == (exact in self.live)
            assert result.committed or exact in {p.record.body.exact for p in self.in_flight}
        elif isinstance(result, NeedsReclaim):
            assert result.segment not in busy
            if self.needs is None:
                assert set(result.evicted) == {k for k, p in self.live.items() if p.segment == result.segment}
                others = [p.epoch for p in self.live.values() if p.segment not in busy]
                assert all(self.live[key].epoch <= min(others) for key in result.evicted)
            assert self.needs in (None, result)
            for key in result.evicted:
                self.live.pop(key, None)
            self.needs = result
        else:
            taken = [*self.live.values(), *self.in_flight, *self.pinned]
            start, end = result.offset, result.offset + record.record_bytes
            for other in (p for p in taken if p.segment == result.segment and p.epoch == result.epoch):
                assert end <= other.offset or start >= other.offset + other.record.record_bytes
            assert start >= PAGE_BYTES and end <= SEGMENT_PAGES * PAGE_BYTES
            self.in_flight.append(result)

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), whole=st.booleans())
    def land(self, data, whole):
        placement = self.in_flight.pop(data.draw(st.integers(0, len(self.in_flight) - 1)))
        if whole:
            self.index.commit(placement)
            self.live[placement.record.body.exact] = placement
        else:
            self.index.abort(placement)

    @precondition(lambda self: self.needs is not None)
    @rule()
    def reclaim(self):
        self.index.reclaim(self.needs.segment, self.index.next_epoch(0))
        self.needs = None

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def drop(self, data):
        exact = data.draw(st.sampled_from(sorted(self.live)))
        assert self.index.drop(exact) is self.live.pop(exact)

    @precondition(lambda self: self.live and len(self.pinned) < 3)
    @rule(data=st.data())
    def pin(self, data):
        self.pinned.append(self.index.pin(data.draw(st.sampled_from(sorted(self.live)))))

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data):
        self.index.unpin(self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1))))

    @invariant()
    def conserves(self):
        self.index.validate()
        assert self.index.used_bytes <= self.index.capacity_bytes
        assert {record.body.exact for record in self.index} == self.live.keys()
        assert all(self.index.lookup(exact) is place for exact, place in self.live.items())
        for number in range(5):
            names = {record.body.exact for record in self.index.by_content(make_record(number).body.content)}
            assert names == {key for key in self.live if int.from_bytes(key, "big") % 5 == number}


TestIndexAgainstModel = IndexAgainstModel.TestCase
TestIndexAgainstModel.settings = settings(max_examples=120, stateful_step_count=60, deadline=None)
