"""Pulls under way: one a body and node, within limits on their number and bytes.

Many engines may ask for one body at once. The first asker's pull flies; the others join it and
read what it brought. A flight that cannot start yet waits in line, first come first served, and one
that nobody waits for any more is taken out of the line. The line is bounded too, in bytes of bodies here
and in memory by `Waiting`: whoever asks beyond that hears so at once.
"""

from __future__ import annotations

import enum
import itertools
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from p2pcache.types import ExactKey, InvariantError


class Ticket(enum.Enum):
    """What an asker has to do."""

    FLY = "fly"  # pull it yourself, now, and say `landed` in the end, whatever happens
    QUEUE = "queue"  # you will pull it, but wait for your turn first
    JOIN = "join"  # somebody is on it: wait for them
    BUSY = "busy"  # the line is full: you are not in it


@dataclass(slots=True)
class _Flight:
    nbytes: int
    peer: str
    flying: bool
    pilot: Any
    passengers: list[Any] = field(default_factory=list)


class Flights:
    """The table. `pilot` and passengers are opaque to it: the shell's futures."""

    def __init__(self, *, flights_max: int, bytes_max: int, line_bytes_max: int):
        """line_bytes_max: bodies that wait in line; those under way do not count."""
        self._flights_max = flights_max
        self._bytes_max = bytes_max
        self._line_bytes_max = line_bytes_max
        self._table: OrderedDict[ExactKey, _Flight] = OrderedDict()
        self._flying = 0
        self._bytes = 0
        self._line_bytes = 0

    def __len__(self) -> int:
        return len(self._table)

    @property
    def bytes_in_flight(self) -> int:
        return self._bytes

    @property
    def bytes_in_line(self) -> int:
        return self._line_bytes

    def bytes_by_peer(self) -> dict[str, int]:
        """Bytes under way or in line from each peer."""
        out: dict[str, int] = {}
        for flight in self._table.values():
            out[flight.peer] = out.get(flight.peer, 0) + flight.nbytes
        return out

    def ask(self, key: ExactKey, nbytes: int, peer: str, who: Any) -> Ticket:
        """Ask for a body. `who` becomes its pilot (FLY, QUEUE) or a passenger (JOIN)."""
        flight = self._table.get(key)
        if flight is not None:
            flight.passengers.append(who)
            return Ticket.JOIN
        flight = _Flight(nbytes, peer, False, who)
        in_line = len(self._table) > self._flying
        if not in_line and self._may_fly(flight):
            self._table[key] = flight
            self._start(flight)
            return Ticket.FLY
        if self._line_bytes + nbytes > self._line_bytes_max:
            return Ticket.BUSY
        self._table[key] = flight
        self._line_bytes += nbytes
        return Ticket.QUEUE

    def leave(self, key: ExactKey, who: Any) -> None:
        """A passenger does not wait any more."""
        flight = self._table.get(key)
        if flight is not None and who in flight.passengers:
            flight.passengers.remove(who)

    def landed(self, key: ExactKey) -> tuple[list[Any], list[Any]]:
        """A flight ended, well or not, or left the line. Returns (its passengers, pilots to start)."""
        flight = self._table.pop(key, None)
        if flight is None:
            raise InvariantError("a flight landed twice")
        if flight.flying:
            self._flying -= 1
            self._bytes -= flight.nbytes
        else:
            self._line_bytes -= flight.nbytes
        started = []
        for waiting in self._table.values():
            if waiting.flying:
                continue
            if not self._may_fly(waiting):
                break  # first come, first served: a small one must not starve a large one
            self._line_bytes -= waiting.nbytes
            self._start(waiting)
            started.append(waiting.pilot)
        return flight.passengers, started

    def _may_fly(self, flight: _Flight) -> bool:
        # A body over the limit on bytes flies alone rather than never.
        fits = self._bytes + flight.nbytes <= self._bytes_max or self._flying == 0
        return fits and self._flying < self._flights_max

    def _start(self, flight: _Flight) -> None:
        flight.flying = True
        self._flying += 1
        self._bytes += flight.nbytes


@dataclass(slots=True)
class _Refused:
    """A body in line at its holder. Whom it holds back once it has been overtaken often enough:"""

    asked_s: float
    everybody: bool  # it wants for room in all ...
    reader: bool  # ... or for room of its reader's own
    overtaken: int = 0


class Serving:
    """Bytes that a holder leases to readers at once, in all and to each. Not thread-safe.

    A body over a limit goes alone rather than never. Who is refused asks again; meanwhile others that fit may
    go first, but so often only. Then room is kept for it until it comes, or has not asked again for so long.
    """

    OVERTAKEN_MAX = 16
    ASKS_AGAIN_S = 2.0
    LINE_MAX, LINE_EACH_MAX = 256, 32  # who is beyond that is refused all the same, but not remembered

    def __init__(self, *, bytes_max: int, reader_bytes_max: int):
        self._bytes_max = bytes_max
        self._reader_bytes_max = reader_bytes_max
        self.nbytes = 0
        self._leased_to: dict[str, int] = {}
        self._line: OrderedDict[tuple[str, ExactKey], _Refused] = OrderedDict()

    def admit(self, reader: str, key: ExactKey, nbytes: int, now_s: float) -> bool:
        """Count a body; `dismiss` takes it off again. False: refused, and in line if there is room in it."""
        for who in [who for who, waits in self._line.items() if waits.asked_s < now_s - self.ASKS_AGAIN_S]:
            del self._line[who]
        mine = self._leased_to.get(reader, 0)
        full = bool(self.nbytes) and self.nbytes + nbytes > self._bytes_max
        mine_full = bool(mine) and mine + nbytes > self._reader_bytes_max
        ahead = list(itertools.takewhile(lambda one: one[0] != (reader, key), self._line.items()))
        if full or mine_full or any(self._holds_back(who, waits, reader) for who, waits in ahead):
            waits = self._line.get((reader, key))
            places = self.LINE_MAX - len(self._line)
            if waits is None and min(places, self.LINE_EACH_MAX - self._in_line(reader)) > 0:
                waits = self._line[reader, key] = _Refused(now_s, full, mine_full)
            if waits is not None:
                waits.asked_s, waits.everybody, waits.reader = now_s, full, mine_full
            return False
        self._line.pop((reader, key), None)
        for _, waits in ahead:
            waits.overtaken += 1
        self.nbytes += nbytes
        self._leased_to[reader] = mine + nbytes
        return True

    def dismiss(self, reader: str, nbytes: int) -> None:
        """What was admitted has been served, or not."""
        self.nbytes -= nbytes
        left = self._leased_to[reader] - nbytes
        if left:
            self._leased_to[reader] = left
        else:
            del self._leased_to[reader]

    def _in_line(self, reader: str) -> int:
        return sum(who == reader for who, _ in self._line)

    def _holds_back(self, who: tuple[str, ExactKey], waits: _Refused, reader: str) -> bool:
        in_its_way = waits.everybody or (waits.reader and who[0] == reader)
        return in_its_way and waits.overtaken >= self.OVERTAKEN_MAX


class Waiting:
    """Who waits, in memory: bytes of bookkeeping of all that was asked and has not been answered.

    A cap on it holds against a flood of askers that do not wait for answers. Not thread-safe.
    """

    def __init__(self, bytes_max: int, bytes_each: int):
        self._count_max = bytes_max // bytes_each
        self._bytes_each = bytes_each
        self._count = 0

    @property
    def nbytes(self) -> int:
        return self._count * self._bytes_each

    def admit(self, count: int) -> int:
        """How many of `count` may wait, those asked for first; `leave` them when they have been answered."""
        admitted = min(count, self._count_max - self._count)
        self._count += admitted
        return admitted

    def leave(self, count: int) -> None:
        if not 0 <= count <= self._count:
            raise InvariantError(f"{count} of {self._count} that wait were to leave")
        self._count -= count
