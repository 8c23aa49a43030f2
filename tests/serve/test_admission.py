"""Admission by memory against a model: caps, conservation, bounded overtaking, and nobody starves."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from p2pcache.serve.admission import Admission, AdmissionConfig, Busy, Refused, TooLarge
from p2pcache.types import ConfigError, InvariantError, P2PCacheError

NEVER_S = 1e9


def admission(target_bytes: int = 100, **limits) -> Admission:
    return Admission(AdmissionConfig(target_bytes=target_bytes, **limits))


def filled(target_bytes: int, nbytes: int, **limits) -> Admission:
    """One sequence, "first", runs."""
    full = admission(target_bytes, **limits)
    full.submit("first", nbytes, 0)
    assert full.admit(0) == ["first"]
    return full


class AdmissionMachine(RuleBasedStateMachine):
    """Every step against what the docstrings promise."""

    @initialize(
        target_bytes=st.integers(1, 40),
        sequences_max=st.integers(1, 6),
        queue_max=st.integers(1, 8),
        overtake=st.none() | st.integers(0, 40),
        patience=st.integers(0, 12),
    )
    def open(self, target_bytes, sequences_max, queue_max, overtake, patience) -> None:
        self.config = AdmissionConfig(target_bytes, sequences_max, queue_max, overtake, patience)
        self.overtake = target_bytes if overtake is None else overtake
        self.admission = Admission(self.config)
        self.twin = Admission(self.config)  # is told the same, must do the same
        self.now = 0
        self.ids = itertools.count()
        self.nbytes: dict[int, int] = {}
        self.since: dict[int, int] = {}
        self.passed_by: dict[int, int] = {}  # waiting, in order of arrival -> bytes that passed it
        self.running: set[int] = set()
        self.peak = 0

    def used(self) -> int:
        return sum(self.nbytes[id] for id in self.running)

    def fits(self, id: int) -> bool:
        room = self.used() + self.nbytes[id] <= self.config.target_bytes
        return room and len(self.running) < self.config.sequences_max

    @rule(nbytes=st.integers(1, 45))
    def submit(self, nbytes: int) -> None:
        id = next(self.ids)
        too_large, busy = nbytes > self.config.target_bytes, len(self.passed_by) == self.config.queue_max
        for each in (self.admission, self.twin):
            if too_large or busy:
                with pytest.raises(TooLarge if too_large else Busy) as refused:
                    each.submit(id, nbytes, self.now)
                assert refused.value.limit == ("target_bytes" if too_large else "queue_max")
            else:
                each.submit(id, nbytes, self.now)
        if not (too_large or busy):
            self.nbytes[id], self.since[id], self.passed_by[id] = nbytes, self.now, 0

    @rule(later=st.integers(0, 5))
    def admit(self, later: int) -> None:
        self.now += later
        admitted = self.admission.admit(self.now)
        assert admitted == self.twin.admit(self.now), "deterministic"
        assert admitted == sorted(admitted), "in order of arrival"
        for id in admitted:
            assert self.fits(id), "over a cap"
            passed = [other for other in self.passed_by if other < id]
            for other in passed:
                waited = self.now - self.since[other]
                assert waited < self.config.patience_s, "a request that has waited long was passed"
                self.passed_by[other] += self.nbytes[id]
                assert self.passed_by[other] <= self.overtake, "a request was passed too often"
            del self.passed_by[id]
            self.running.add(id)
            self.peak = max(self.peak, self.used())
        if self.passed_by:
            head = min(self.passed_by)
            assert not self.fits(head), "work conserving: a head that fits is let in"

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def release(self, data) -> None:
        id = data.draw(st.sampled_from(sorted(self.running)))
        self.running.remove(id)
        for each in (self.admission, self.twin):
            each.release(id)
            with pytest.raises(InvariantError):
                each.release(id)

    @precondition(lambda self: self.nbytes)
    @rule(data=st.data())
    def cancel(self, data) -> None:
        id = data.draw(st.sampled_from(sorted(self.nbytes)))
        known = id in self.running or id in self.passed_by
        for each in (self.admission, self.twin):
            assert each.cancel(id) == known
            assert not each.cancel(id), "idempotent"
        self.running.discard(id)
        self.passed_by.pop(id, None)

    @invariant()
    def conserved(self) -> None:
        if not hasattr(self, "admission"):
            return
        self.admission.validate()
        assert self.admission.bytes == self.used() <= self.config.target_bytes
        assert self.admission.running == len(self.running) <= self.config.sequences_max
        assert self.admission.waiting == len(self.passed_by) <= self.config.queue_max
        assert self.admission.peak_bytes == self.peak


TestAdmission = AdmissionMachine.TestCase
TestAdmission.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


# (ticks since the arrival before, bytes, ticks that it runs once admitted)
ARRIVALS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 20), st.integers(1, 6)), min_size=1, max_size=60
)


def played(config: AdmissionConfig, arrivals) -> dict[int, tuple[int, int, int]]:
    """Run a pattern to its end, tick by tick. Returns id -> (requests ahead of it, arrival, admission)."""
    admission = Admission(config)
    due = list(itertools.accumulate(gap for gap, _, _ in arrivals))
    ends: dict[int, int] = {}
    seen: dict[int, tuple[int, int]] = {}
    out: dict[int, tuple[int, int, int]] = {}
    next_id = 0
    for now in itertools.count():
        for id in [id for id, end in ends.items() if end == now]:
            del ends[id]
            admission.release(id)
        while next_id < len(due) and due[next_id] == now:
            seen[next_id] = (admission.waiting, now)
            admission.submit(next_id, arrivals[next_id][1], now)
            next_id += 1
        for id in admission.admit(now):
            out[id] = (*seen[id], now)
            ends[id] = now + arrivals[id][2]
        admission.validate()
        if len(out) == len(due):
            return out
        assert now < 10_000, "somebody starves"


@settings(max_examples=300, deadline=None)
@given(arrivals=ARRIVALS, patience=st.integers(0, 20), sequences_max=st.integers(1, 8))
def test_patience_bounds_every_wait(arrivals, patience, sequences_max):
    """With p requests ahead, and nothing running longer than D: at most patience + (p + 1) D.

    Once a request has waited `patience`, so have all ahead of it, and nobody behind them passes any of
    them, nor they each other. Then within D their head is let in: else nothing was, so all that ran has
    ended, the whole target is free, and it fits. That happens p + 1 times at most.
    """
    config = AdmissionConfig(20, sequences_max, queue_max=60, overtake_bytes_max=10_000, patience_s=patience)
    longest = max(ticks for _, _, ticks in arrivals)
    for ahead, arrived, admitted in played(config, arrivals).values():
        assert admitted - arrived <= patience + (ahead + 1) * longest


@settings(max_examples=300, deadline=None)
@given(arrivals=ARRIVALS, overtake=st.integers(0, 60), sequences_max=st.integers(1, 8))
def test_overtaken_bytes_alone_bound_every_wait(arrivals, overtake, sequences_max):
    """However long patience is: at most (p + overtake / smallest + 1) D.

    In every D somebody is let in while anybody waits (by the argument above). Before a given request these
    are the p ahead of it, and of those behind it at most `overtake` bytes.
    """
    config = AdmissionConfig(20, sequences_max, 60, overtake_bytes_max=overtake, patience_s=NEVER_S)
    longest = max(ticks for _, _, ticks in arrivals)
    smallest = min(nbytes for _, nbytes, _ in arrivals)
    for ahead, arrived, admitted in played(config, arrivals).values():
        assert admitted - arrived <= (ahead + overtake // smallest + 1) * longest


@pytest.mark.parametrize("limits", [{"patience_s": 5}, {"overtake_bytes_max": 100, "patience_s": NEVER_S}])
def test_a_stream_of_small_requests_does_not_starve_a_large_one(limits):
    queue = admission(100, **limits)
    running: list[tuple[int, object]] = []
    for now in range(100):
        for end, id in [entry for entry in running if entry[0] == now]:
            running.remove((end, id))
            queue.release(id)
        for lane in range(4):
            queue.submit((now, lane), 10, now)
        if now == 3:
            queue.submit("large", 100, now)
        admitted = queue.admit(now)
        running += [(now + 3, id) for id in admitted]
        if "large" in admitted:
            assert now <= 3 + 5 + 2 * 100 // 10 * 3
            return
    pytest.fail("the large request starved")


def test_short_requests_run_in_large_batches_and_long_ones_in_small():
    batches = {}
    for nbytes in (5, 25, 60):
        queue = admission(100)
        for id in range(64):
            queue.submit(id, nbytes, 0)
        batches[nbytes] = len(queue.admit(0))
    assert batches == {5: 20, 25: 4, 60: 1}


def test_a_smaller_request_passes_a_head_that_does_not_fit():
    queue = filled(100, 60)
    queue.submit("large", 50, 0)
    queue.submit("small", 40, 0)
    assert queue.admit(0) == ["small"]
    queue.release("first")
    assert queue.admit(0) == ["large"]


def test_after_its_patience_nobody_passes_the_head():
    queue = filled(100, 60, patience_s=5)
    queue.submit("large", 50, 0)
    queue.submit("small", 10, 4)
    assert queue.admit(4.9) == ["small"]
    queue.submit("late", 10, 5)
    assert queue.admit(5) == []
    queue.release("first")
    assert queue.admit(5) == ["large", "late"]


def test_the_bytes_that_pass_a_request_are_counted_also_while_it_is_not_the_head():
    queue = filled(100, 50, overtake_bytes_max=20, patience_s=NEVER_S)
    queue.submit("head", 60, 0)
    queue.submit("second", 60, 0)
    for id in ("a", "b", "c"):
        queue.submit(id, 10, 0)
    assert queue.admit(0) == ["a", "b"]
    queue.cancel("head")
    assert queue.admit(0) == [], "`second` has been passed by its 20 bytes as well"


def test_a_request_too_large_to_pass_does_not_keep_a_smaller_one_from_it():
    queue = filled(100, 50, overtake_bytes_max=10, patience_s=NEVER_S)
    queue.submit("head", 60, 0)
    queue.submit("over the allowance", 11, 0)
    queue.submit("within it", 10, 0)
    assert queue.admit(0) == ["within it"]


@pytest.mark.parametrize("limits", [{"overtake_bytes_max": 0}, {"patience_s": 0}])
def test_strictly_in_order_where_no_overtaking_is_allowed(limits):
    queue = filled(100, 60, **limits)
    queue.submit("large", 50, 0)
    queue.submit("small", 1, 0)
    assert queue.admit(0) == []


def test_a_freed_place_goes_to_the_head_where_the_number_of_sequences_is_the_limit():
    queue = filled(100, 1, sequences_max=1)
    queue.submit("next", 90, 0)
    queue.submit("small", 1, 0)
    assert queue.admit(0) == []
    queue.release("first")
    assert queue.admit(0) == ["next"]


def test_a_refusal_names_its_limit_and_leaves_nothing_behind():
    queue = filled(100, 100, queue_max=1)
    queue.submit("waits", 1, 0)
    with pytest.raises(Busy, match="queue_max") as busy:
        queue.submit("more", 1, 0)
    with pytest.raises(TooLarge, match=r"target_bytes \(100\)") as large:
        queue.submit("more", 101, 0)
    assert (busy.value.limit, large.value.limit) == ("queue_max", "target_bytes")
    assert isinstance(busy.value, Refused) and isinstance(large.value, P2PCacheError)
    assert not queue.cancel("more")
    assert (queue.waiting, queue.running, queue.bytes) == (1, 1, 100)


def test_a_cancelled_request_frees_its_place_wherever_it_is():
    queue = filled(100, 100)
    queue.submit("waits", 100, 0)
    assert queue.cancel("first") and queue.cancel("waits")
    assert (queue.waiting, queue.running, queue.bytes, queue.peak_bytes) == (0, 0, 0, 100)
    assert not queue.cancel("first") and not queue.cancel("never seen")
    queue.submit("first", 100, 0)  # its name is free again
    assert queue.admit(0) == ["first"]


def test_misuse_is_an_invariant_error():
    queue = filled(100, 10)
    with pytest.raises(InvariantError, match="twice"):
        queue.submit("first", 10, 0)
    queue.submit("waits", 100, 0)
    with pytest.raises(InvariantError, match="twice"):
        queue.submit("waits", 10, 0)
    with pytest.raises(InvariantError, match="does not run"):
        queue.release("waits")


@pytest.mark.parametrize("nbytes", [0, -1, 1.0, True, "1"])
def test_a_request_without_a_size_is_refused(nbytes):
    with pytest.raises(ConfigError, match="kv_bytes"):
        admission().submit("x", nbytes, 0)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("target_bytes", 0),
        ("target_bytes", 1e9),
        ("sequences_max", 0),
        ("sequences_max", True),
        ("queue_max", 0),
        ("overtake_bytes_max", -1),
        ("overtake_bytes_max", 0.5),
        ("patience_s", -1),
        ("patience_s", math.inf),
        ("patience_s", math.nan),
        ("patience_s", "5"),
    ],
)
def test_a_bad_setting_is_named(setting, value):
    with pytest.raises(ConfigError, match=setting):
        AdmissionConfig(**{"target_bytes": 1, setting: value})
