"""Where the records of the NVMe log lie, which bytes are free, and what must go to make room.

The log is a ring of segments of equal size. One is open and takes records back to back; a full one
is sealed; when none is free the oldest is given up whole (FIFO: no record is ever moved, so nothing
is written twice). Giving up takes two steps, because of law 2, *withdraw before the bytes are reused*:

    FREE --place--> OPEN --full--> SEALED --room, place--> CONDEMNED --reclaim--> FREE

Condemning hides the segment's records at once and names them. Their bytes stay whole until the
caller, having withdrawn them, calls `reclaim`. A segment with readers (pins) or appends in flight is
passed over. A segment that cannot be written any more is RETIRED, for good.

Every byte of a segment is its header page, live, dead, in flight or free; `validate` counts them.
Nothing here is thread-safe: it belongs to one event loop.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from p2pcache.core.nvmelog import PAGE_BYTES, Header, Record, State
from p2pcache.types import BodyInfo, ConfigError, ContentKey, ExactKey, InvariantError, TierFull

SEGMENTS_MIN = 2
SEGMENTS_MAX = 512
"""One open file each: well under the usual limit of 1024 open files a process."""
EPOCH_RANDOM_BITS = 32
SEGMENT_BYTES_USUAL_MIN = 64 << 20


def segment_bytes_for(capacity_bytes: int) -> int:
    """A segment size for a cap: a power of two that makes 64 to 127 segments, or fewer in a small cap.

    So about 1 % of the tier is given up at a time, and a cap that is changed a little keeps its log.
    Below 256 MiB the segments are a quarter of the cap or less; else they hold at least 64 MiB.
    """
    if capacity_bytes < 4 * SEGMENT_BYTES_USUAL_MIN:
        return 1 << max(capacity_bytes // 4, 4 * PAGE_BYTES).bit_length() - 1
    return max(SEGMENT_BYTES_USUAL_MIN, 1 << (capacity_bytes // 64).bit_length() - 1)


class Use(enum.Enum):
    FREE = "free"
    OPEN = "open"
    SEALED = "sealed"
    CONDEMNED = "condemned"
    RETIRED = "retired"


@dataclass(frozen=True, slots=True)
class Location:
    """Where a record lies. `offset` is that of its header, in bytes from the segment's start."""

    segment: int
    epoch: int
    offset: int
    record: Record

    @property
    def body_offset(self) -> int:
        return self.offset + self.record.header_bytes


class Placement(Location):
    """A place reserved for a record that is being written. Ends with `commit` or `abort`."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Already:
    """The exact key is here (committed), or on its way here. Nothing was reserved."""

    committed: bool


@dataclass(frozen=True, slots=True)
class NeedsReclaim:
    """Withdraw `evicted` (already hidden here), then `reclaim` the segment, then ask again."""

    segment: int
    evicted: tuple[ExactKey, ...]


@dataclass(slots=True)
class _Segment:
    number: int
    epoch: int = 0
    use: Use = Use.FREE
    tail: int = PAGE_BYTES  # where the next record goes; everything behind it is free
    live_bytes: int = 0
    dead_bytes: int = 0
    in_flight_bytes: int = 0
    pins: int = 0
    live: dict[ExactKey, Location] = field(default_factory=dict)

    @property
    def busy(self) -> bool:
        return self.pins > 0 or self.in_flight_bytes > 0


class LogIndex:
    """The index of one log of `capacity_bytes // segment_bytes` segments.

    A fresh index is empty; after a restart it is fed with `restore`, and is from then on as full as
    the log on disk. Raises ConfigError when the sizes make no ring.
    """

    def __init__(self, capacity_bytes: int, segment_bytes: int) -> None:
        if segment_bytes % PAGE_BYTES or segment_bytes < 3 * PAGE_BYTES:
            raise ConfigError(
                f"NVMe segment_bytes {segment_bytes} must be a multiple of {PAGE_BYTES}, "
                f"at least {3 * PAGE_BYTES}"
            )
        count = capacity_bytes // segment_bytes
        if not SEGMENTS_MIN <= count <= SEGMENTS_MAX:
            raise ConfigError(
                f"NVMe capacity_bytes {capacity_bytes} holds {count} segments of {segment_bytes} bytes; "
                f"{SEGMENTS_MIN} to {SEGMENTS_MAX} are needed: change segment_bytes"
            )
        self.capacity_bytes = capacity_bytes
        self.segment_bytes = segment_bytes
        self._segments = [_Segment(number) for number in range(count)]
        self._open: _Segment | None = None
        self._epoch_max = 0
        self._live: dict[ExactKey, Location] = {}
        self._by_content: dict[ContentKey, dict[ExactKey, Record]] = {}
        self._in_flight: dict[ExactKey, Placement] = {}
        # Until the first `place`: the youngest dead record of each key, as (epoch, offset).
        self._dead: dict[ExactKey, tuple[int, int]] = {}

    def __len__(self) -> int:
        """Committed records."""
        return len(self._live)

    def __iter__(self) -> Iterator[Record]:
        """Committed records, oldest first. The index must not change meanwhile."""
        return (location.record for location in self._live.values())

    @property
    def segment_count(self) -> int:
        return len(self._segments)

    @property
    def used_bytes(self) -> int:
        """Bytes that hold something: segment headers, live, dead and in flight. Never over capacity."""
        return sum(segment.tail for segment in self._segments)

    @property
    def live_bytes(self) -> int:
        """Bytes of committed records that can be looked up, headers and padding included."""
        return sum(segment.live_bytes for segment in self._segments if segment.use is not Use.CONDEMNED)

    def lookup(self, exact: ExactKey) -> Location | None:
        return self._live.get(exact)

    def by_content(self, content: ContentKey) -> list[Record]:
        return list(self._by_content.get(content, {}).values())

    def room(self, record: Record) -> NeedsReclaim | None:
        """What must be withdrawn and reclaimed before `record` can be placed; None: nothing.

        Reserves nothing. Condemns a segment if need be, and names that same one until it is
        reclaimed. Raises TierFull when the record fits no segment, or all are being read or written.
        """
        need_bytes = record.record_bytes
        if need_bytes > self.segment_bytes - PAGE_BYTES:
            raise TierFull(
                f"a record of {need_bytes} bytes fits no NVMe segment of {self.segment_bytes} bytes"
            )
        if record.body.exact in self._live or record.body.exact in self._in_flight:
            return None
        if self._open is not None and need_bytes <= self.segment_bytes - self._open.tail:
            return None
        if self._oldest(Use.FREE):
            return None
        victim = self._oldest(Use.CONDEMNED) or self._oldest(Use.SEALED) or self._oldest(Use.OPEN)
        if victim is None:
            raise TierFull("every NVMe segment is being read or written")
        if victim.use is not Use.CONDEMNED:
            self._condemn(victim)
        return NeedsReclaim(victim.number, tuple(victim.live))

    def place(self, record: Record) -> Placement | Already | NeedsReclaim:
        """Reserve a place for `record` behind the last one. Errors as for `room`."""
        exact = record.body.exact
        self._dead.clear()
        needs = self.room(record)
        if exact in self._live or exact in self._in_flight:
            return Already(committed=exact in self._live)
        if needs is not None:
            return needs
        segment = self._open
        if segment is None or record.record_bytes > self.segment_bytes - segment.tail:
            if segment is not None:
                segment.use = Use.SEALED
            segment = self._oldest(Use.FREE)
            if segment is None:
                raise InvariantError("room was promised in a free segment, and none is free")
            segment.use = Use.OPEN
            self._open = segment
        placement = Placement(segment.number, segment.epoch, segment.tail, record)
        segment.tail += record.record_bytes
        segment.in_flight_bytes += record.record_bytes
        self._in_flight[exact] = placement
        return placement

    def commit(self, placement: Placement) -> None:
        """The record is whole on disk: make it visible."""
        segment = self._land(placement)
        self._add(segment, placement)

    def abort(self, placement: Placement) -> None:
        """The record was not written: its bytes are dead until the segment is reclaimed."""
        segment = self._land(placement)
        segment.dead_bytes += placement.record.record_bytes

    def drop(self, exact: ExactKey) -> Location | None:
        """Forget a record, for instance a damaged one. Its bytes are dead; readers may go on."""
        location = self._live.get(exact)
        if location is not None:
            segment = self._segments[location.segment]
            self._hide(location)
            del segment.live[exact]
            segment.live_bytes -= location.record.record_bytes
            segment.dead_bytes += location.record.record_bytes
        return location

    def pin(self, exact: ExactKey) -> Location | None:
        """Keep a record's bytes from reuse until `unpin` of the returned location; None: not here."""
        location = self._live.get(exact)
        if location is not None:
            self._segments[location.segment].pins += 1
        return location

    def unpin(self, location: Location) -> None:
        segment = self._segments[location.segment]
        if segment.pins < 1 or segment.epoch != location.epoch:
            raise InvariantError(f"NVMe segment {location.segment} was unpinned more often than pinned")
        segment.pins -= 1

    def next_epoch(self, random_bits: int) -> int:
        """A new epoch, above all there were. `random_bits` is a random integer below 2**32."""
        counter = (self._epoch_max >> EPOCH_RANDOM_BITS) + 1
        self._epoch_max = counter << EPOCH_RANDOM_BITS | random_bits
        return self._epoch_max

    def saw_epoch(self, epoch: int) -> None:
        """An epoch found on disk, in use or stale: no new one will be at or below it."""
        self._epoch_max = max(self._epoch_max, epoch)

    def condemned(self, segment: int) -> list[BodyInfo]:
        """The bodies of a segment that is about to be reclaimed, to be withdrawn from the directory."""
        return [location.record.body for location in self._segments[segment].live.values()]

    def reclaim(self, number: int, epoch: int) -> int:
        """A condemned segment is free, its new header with `epoch` being on disk.

        Returns the number of records that went with it.
        """
        segment = self._condemned(number)
        if epoch <= segment.epoch:
            raise InvariantError(f"NVMe segment {number}: epoch {epoch} is not above {segment.epoch}")
        evicted = len(segment.live)
        self._segments[number] = _Segment(number, epoch)
        self.saw_epoch(epoch)
        return evicted

    def retire(self, number: int) -> int:
        """A condemned segment cannot be written: never use it again. Returns its number of records."""
        segment = self._condemned(number)
        evicted = len(segment.live)
        dead_bytes = self.segment_bytes - PAGE_BYTES
        self._segments[number] = _Segment(
            number, segment.epoch, Use.RETIRED, self.segment_bytes, dead_bytes=dead_bytes
        )
        return evicted

    def restore(self, number: int, epoch: int, entries: Iterable[tuple[int, Header]]) -> None:
        """Take in one segment as a scan found it: (offset, header) of that epoch, by offset.

        Called at most once a segment, in any order, before the first `place`. The youngest segment
        that holds anything goes on being filled. Of two records of one exact key the younger counts, also
        where it is dead: the older is an append that was cancelled when it was whole already.
        """
        segment = self._segments[number]
        segment.epoch = epoch
        self.saw_epoch(epoch)
        for offset, header in entries:
            record = header.record
            end = offset + record.record_bytes
            if header.epoch != epoch or offset < segment.tail or end > self.segment_bytes:
                raise InvariantError(f"NVMe segment {number}: record at {offset} does not follow the last")
            segment.dead_bytes += end - segment.tail  # what a scan passed over, and this record for now
            segment.tail = end
            exact, place = record.body.exact, (epoch, offset)
            known = self._live.get(exact)
            if known is not None and place < (known.epoch, known.offset):
                continue
            if header.state is State.DEAD:
                self.drop(exact)
                self._dead[exact] = max(self._dead.get(exact, place), place)
            elif header.state is State.COMMITTED and self._dead.get(exact, place) <= place:
                self.drop(exact)
                segment.dead_bytes -= record.record_bytes
                self._add(segment, Location(number, epoch, offset, record))
        if segment.tail == PAGE_BYTES:
            return
        segment.use = Use.SEALED
        if self._open is None or self._open.epoch < epoch:
            if self._open is not None:
                self._open.use = Use.SEALED
            segment.use = Use.OPEN
            self._open = segment

    def validate(self) -> None:
        """Raise InvariantError unless bytes are conserved, the cap holds and all tables agree."""
        for segment in self._segments:
            parts = (segment.live_bytes, segment.dead_bytes, segment.in_flight_bytes)
            live_bytes = sum(location.record.record_bytes for location in segment.live.values())
            in_flight_bytes = sum(
                placement.record.record_bytes
                for placement in self._in_flight.values()
                if placement.segment == segment.number
            )
            if (live_bytes, in_flight_bytes) != (segment.live_bytes, segment.in_flight_bytes):
                raise InvariantError(f"counters disagree with the records: {segment}")
            if PAGE_BYTES + sum(parts) != segment.tail or segment.tail > self.segment_bytes:
                raise InvariantError(f"bytes are not conserved: {segment}")
            if min(*parts, segment.pins) < 0:
                raise InvariantError(f"a count is negative: {segment}")
            if segment.use is Use.FREE and segment.tail != PAGE_BYTES:
                raise InvariantError(f"a free segment holds something: {segment}")
            if segment.use is Use.CONDEMNED and segment.busy:
                raise InvariantError(f"a condemned segment is in use: {segment}")
            if (segment.use is Use.OPEN) != (segment is self._open):
                raise InvariantError(f"not the one open segment: {segment}")
        if self.segment_bytes * len(self._segments) > self.capacity_bytes:
            raise InvariantError("the segments are larger than the cap")
        visible = {
            exact: location
            for segment in self._segments
            if segment.use is not Use.CONDEMNED
            for exact, location in segment.live.items()
        }
        names = {exact for bodies in self._by_content.values() for exact in bodies}
        if visible != self._live or names != self._live.keys() or self._live.keys() & self._in_flight.keys():
            raise InvariantError("the tables by exact key, by content key and by segment disagree")

    def _oldest(self, use: Use) -> _Segment | None:
        """The one with the lowest epoch. Busy ones do not count: they are only ever open or sealed."""
        fitting = (segment for segment in self._segments if segment.use is use and not segment.busy)
        return min(fitting, key=lambda segment: (segment.epoch, segment.number), default=None)

    def _condemn(self, segment: _Segment) -> None:
        segment.use = Use.CONDEMNED
        if segment is self._open:
            self._open = None
        for location in segment.live.values():
            self._hide(location)

    def _condemned(self, number: int) -> _Segment:
        segment = self._segments[number]
        if segment.use is not Use.CONDEMNED or segment.busy:
            raise InvariantError(f"NVMe segment {number} is {segment.use.value}, not condemned and idle")
        return segment

    def _land(self, placement: Placement) -> _Segment:
        exact = placement.record.body.exact
        if self._in_flight.get(exact) is not placement:
            raise InvariantError(f"no append of {exact.hex()} is in flight at {placement.offset}")
        del self._in_flight[exact]
        segment = self._segments[placement.segment]
        segment.in_flight_bytes -= placement.record.record_bytes
        return segment

    def _add(self, segment: _Segment, location: Location) -> None:
        body = location.record.body
        segment.live[body.exact] = location
        segment.live_bytes += location.record.record_bytes
        self._live[body.exact] = location
        self._by_content.setdefault(body.content, {})[body.exact] = location.record

    def _hide(self, location: Location) -> None:
        body = location.record.body
        del self._live[body.exact]
        bodies = self._by_content[body.content]
        del bodies[body.exact]
        if not bodies:
            del self._by_content[body.content]
