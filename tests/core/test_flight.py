"""Flights: one a key, within limits, first come first served, and everybody told exactly once."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from p2pcache.core.flight import Flights, Serving, Ticket, Waiting
from p2pcache.types import ExactKey, InvariantError

KEYS = [ExactKey(bytes([i]) * 16) for i in range(8)]


class FlightsMachine(RuleBasedStateMachine):
    @initialize(
        flights_max=st.integers(1, 4), bytes_max=st.integers(0, 20), line_bytes_max=st.integers(0, 60)
    )
    def open(self, flights_max: int, bytes_max: int, line_bytes_max: int) -> None:
        self.flights_max, self.bytes_max, self.line_bytes_max = flights_max, bytes_max, line_bytes_max
        self.flights = Flights(flights_max=flights_max, bytes_max=bytes_max, line_bytes_max=line_bytes_max)
        self.flying: dict[ExactKey, int] = {}
        self.line: dict[ExactKey, tuple[int, int]] = {}  # key -> (bytes, pilot), in order of asking
        self.passengers: dict[ExactKey, list[int]] = {}
        self.people = itertools.count()
        self.told: list[int] = []
        self.joined = 0

    def fits(self, nbytes: int) -> bool:
        within = sum(self.flying.values()) + nbytes <= self.bytes_max
        return len(self.flying) < self.flights_max and (within or not self.flying)

    def line_bytes(self) -> int:
        return sum(nbytes for nbytes, _ in self.line.values())

    @rule(key=st.sampled_from(KEYS), nbytes=st.integers(0, 30))
    def ask(self, key: ExactKey, nbytes: int) -> None:
        who = next(self.people)
        ticket = self.flights.ask(key, nbytes, f"peer-{nbytes % 2}", who)
        if key in self.passengers:
            assert ticket is Ticket.JOIN
            self.passengers[key].append(who)
            self.joined += 1
            return
        if (self.line or not self.fits(nbytes)) and self.line_bytes() + nbytes > self.line_bytes_max:
            assert ticket is Ticket.BUSY, "whoever is refused is not in the table"
            return
        self.passengers[key] = []
        if not self.line and self.fits(nbytes):
            assert ticket is Ticket.FLY
            self.flying[key] = nbytes
        else:
            assert ticket is Ticket.QUEUE
            self.line[key] = (nbytes, who)

    def end(self, key: ExactKey) -> None:
        self.flying.pop(key, None)
        self.line.pop(key, None)
        passengers, started = self.flights.landed(key)
        assert passengers == self.passengers.pop(key)
        expected = []
        while self.line:
            first = next(iter(self.line))
            nbytes, pilot = self.line[first]
            if not self.fits(nbytes):
                break
            del self.line[first]
            self.flying[first] = nbytes
            expected.append(pilot)
        assert started == expected, "the line moves in order, and as far as the limits let it"
        self.told += passengers + started

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def land(self, data) -> None:
        self.end(data.draw(st.sampled_from(sorted(self.flying))))

    @precondition(lambda self: self.line)
    @rule(data=st.data())
    def give_up_waiting(self, data) -> None:
        self.end(data.draw(st.sampled_from(sorted(self.line))))

    @rule(key=st.sampled_from(KEYS))
    def landing_what_does_not_fly_is_our_fault(self, key: ExactKey) -> None:
        if key not in self.passengers:
            with pytest.raises(InvariantError):
                self.flights.landed(key)

    @invariant()
    def limits_hold_and_nobody_is_forgotten(self) -> None:
        assert self.flights.bytes_in_flight == sum(self.flying.values())
        assert self.flights.bytes_in_line == self.line_bytes() <= self.line_bytes_max
        assert len(self.flying) <= self.flights_max
        assert self.flights.bytes_in_flight <= self.bytes_max or len(self.flying) == 1
        assert len(self.flights) == len(self.flying) + len(self.line)
        assert self.flying or not self.line, "a line in front of an empty sky would wait for ever"
        assert len(self.told) == len(set(self.told))
        by_peer = self.flights.bytes_by_peer()
        assert sum(by_peer.values()) == sum(self.flying.values()) + sum(n for n, _ in self.line.values())

    def teardown(self) -> None:
        if not hasattr(self, "flights"):
            return
        while self.flying:
            self.end(next(iter(self.flying)))
        assert len(self.flights) == 0 and not self.line


FlightsMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestFlights = FlightsMachine.TestCase


def test_a_body_over_the_limit_flies_alone_rather_than_never():
    flights = Flights(flights_max=4, bytes_max=10, line_bytes_max=1000)
    assert flights.ask(KEYS[0], 5, "p", "small") is Ticket.FLY
    assert flights.ask(KEYS[1], 99, "p", "huge") is Ticket.QUEUE
    assert flights.ask(KEYS[2], 1, "p", "tiny") is Ticket.QUEUE, "it must not overtake the huge one"
    assert flights.landed(KEYS[0]) == ([], ["huge"])
    assert flights.landed(KEYS[1]) == ([], ["tiny"])


def test_those_behind_one_that_leaves_the_line_move_up():
    flights = Flights(flights_max=4, bytes_max=10, line_bytes_max=1000)
    flights.ask(KEYS[0], 5, "p", "first")
    flights.ask(KEYS[1], 99, "p", "huge")
    flights.ask(KEYS[1], 99, "q", "huge's passenger")
    flights.ask(KEYS[2], 1, "p", "tiny")
    assert flights.landed(KEYS[1]) == (["huge's passenger"], ["tiny"])


@given(st.integers(0, 100), st.integers(1, 10), st.lists(st.integers(0, 12)), st.data())
def test_those_who_wait_never_take_more_memory_than_they_may(bytes_max, bytes_each, groups, data):
    waiting, inside = Waiting(bytes_max, bytes_each), []
    for count in groups:
        free = bytes_max // bytes_each - sum(inside)
        inside.append(waiting.admit(count))
        assert inside[-1] == min(count, free), "as many as there is room for, and no fewer"
        assert waiting.nbytes == sum(inside) * bytes_each <= bytes_max
        if data.draw(st.booleans()):
            waiting.leave(inside.pop(data.draw(st.integers(0, len(inside) - 1))))
    with pytest.raises(InvariantError):
        waiting.leave(sum(inside) + 1)


# A holder's limits.


@pytest.mark.parametrize("bytes_max, reader_bytes_max, readers", [(10, 100, 1), (100, 10, 1), (10, 10, 3)])
def test_a_large_body_is_not_overtaken_for_ever(bytes_max, reader_bytes_max, readers):
    """Small bodies come and go, one of them always there; a large one asks again each time."""
    serving = Serving(bytes_max=bytes_max, reader_bytes_max=reader_bytes_max)
    assert serving.admit("r0", KEYS[7], 4, 0.0)
    inside = ["r0"]
    for number in range(3 * Serving.OVERTAKEN_MAX):
        now_s = number * 0.1
        if serving.admit("r0", KEYS[0], 99, now_s):
            assert number > Serving.OVERTAKEN_MAX / 2, "small ones went first meanwhile"
            return
        reader = f"r{number % readers}"
        if serving.admit(reader, KEYS[1 + number % 4], 4, now_s):
            inside.append(reader)
        serving.dismiss(inside.pop(0), 4)
    pytest.fail("it starves")


def test_who_waits_for_room_of_its_own_holds_back_no_other_reader():
    serving = Serving(bytes_max=1000, reader_bytes_max=10)
    assert serving.admit("greedy", KEYS[0], 8, 0.0)
    assert not serving.admit("greedy", KEYS[1], 8, 0.0)
    for _ in range(3 * Serving.OVERTAKEN_MAX):
        assert serving.admit("other", KEYS[2], 8, 0.0)
        serving.dismiss("other", 8)
    assert not serving.admit("greedy", KEYS[3], 1, 0.0), "but of its own reader it is the first"


def test_who_does_not_ask_again_holds_nobody_back():
    serving = Serving(bytes_max=10, reader_bytes_max=1000)
    assert serving.admit("slow", KEYS[0], 4, 0.0)
    assert not serving.admit("gone", KEYS[1], 99, 0.0)
    taken = 0
    while serving.admit("other", KEYS[2], 4, 0.0):
        serving.dismiss("other", 4)
        taken += 1
    assert taken == Serving.OVERTAKEN_MAX
    assert serving.admit("other", KEYS[2], 4, Serving.ASKS_AGAIN_S + 0.1)


asks = st.tuples(st.integers(0, 2), st.integers(0, 7), st.integers(1, 30), st.floats(0, 1))


@given(st.integers(1, 40), st.integers(1, 40), st.lists(asks, max_size=60), st.data())
def test_limits_hold_and_an_empty_holder_lets_the_first_in_line_in(bytes_max, reader_bytes_max, asked, data):
    serving, inside, now_s = Serving(bytes_max=bytes_max, reader_bytes_max=reader_bytes_max), [], 0.0
    for number, key, nbytes, later_s in asked:
        now_s += later_s
        reader = f"r{number}"
        if serving.admit(reader, KEYS[key], nbytes, now_s):
            inside.append((reader, nbytes))
        for limit, mine in (
            (bytes_max, inside),
            (reader_bytes_max, [one for one in inside if one[0] == reader]),
        ):
            assert len(mine) <= 1 or sum(n for _, n in mine) <= limit
        assert serving.nbytes == sum(n for _, n in inside)
        if inside and data.draw(st.booleans()):
            serving.dismiss(*inside.pop(data.draw(st.integers(0, len(inside) - 1))))
    for one in inside:
        serving.dismiss(*one)
    line = list(serving._line)
    if line:
        reader, key = line[0]
        assert serving.admit(reader, key, 99, now_s), "nobody is before it, and all is free"
