"""Residency of the host tier: which bytes of the slab hold which body, and who may read them.

A slot's life:

    reserve -> RESERVED -> commit -> RESIDENT -> evict -> free
                  |                     |
                  +-> abort -> free     +-> leased: cannot be evicted until the last lease ends
                  +-> quarantine -> release_quarantine -> free

A slot in quarantine belongs to a writer that may still write (law 5): it is counted, never reused,
and comes back only when its transport says that nothing will write there again. Every reserve gets
a new *generation*; a reader that holds an offset compares generations before it trusts the bytes.

Which body goes first is the policy's word (`eviction`). Which bodies go *together*, so that what they leave
is one piece and wide enough, is decided here (`HostTier.victims`).

Pure: bytes are never touched here, time and clients are arguments.
"""

from __future__ import annotations

import bisect
import math
import operator
from collections.abc import Container, Iterator
from dataclasses import dataclass, field

from p2pcache._native import KeyIndex
from p2pcache.core.eviction import Lru, Policy
from p2pcache.core.slot import ALIGN_BYTES, Slot, SlotState, extent_bytes
from p2pcache.types import BodyInfo, ContentKey, ExactKey, InvariantError, TierFull

COLD_TRIED = 16
"""Of the coldest bodies, around how many the cheapest piece is looked for before the whole slab is."""


@dataclass(slots=True)
class _FreeList:
    """Free extents of the slab, coalesced; best fit keeps large ones large. All in O(log n) comparisons."""

    offsets: list[int] = field(default_factory=list)  # sorted
    sizes: dict[int, int] = field(default_factory=dict)  # offset -> bytes
    by_size: list[tuple[int, int]] = field(default_factory=list)  # (bytes, offset), sorted

    def add(self, offset: int, size: int) -> None:
        i = bisect.bisect_left(self.offsets, offset)
        if i < len(self.offsets) and offset + size == self.offsets[i]:
            size += self._remove(self.offsets[i])
        if i > 0 and self.offsets[i - 1] + self.sizes[self.offsets[i - 1]] == offset:
            offset = self.offsets[i - 1]
            size += self._remove(offset)
        bisect.insort(self.offsets, offset)
        bisect.insort(self.by_size, (size, offset))
        self.sizes[offset] = size

    def take(self, size: int) -> int | None:
        i = bisect.bisect_left(self.by_size, (size, 0))
        if i == len(self.by_size):
            return None
        offset = self.by_size[i][1]
        rest = self._remove(offset) - size
        if rest:
            self.add(offset + size, rest)
        return offset

    def _remove(self, offset: int) -> int:
        size = self.sizes.pop(offset)
        self.offsets.pop(bisect.bisect_left(self.offsets, offset))
        self.by_size.pop(bisect.bisect_left(self.by_size, (size, offset)))
        return size


class HostTier:
    """Residency of one slab. `free + taken == capacity` always (law 4); `validate` checks it."""

    def __init__(self, capacity_bytes: int, policy: type[Policy] = Lru, weighs_cost: bool = True):
        """policy, weighs_cost: which bodies go first, see `eviction`."""
        self.capacity_bytes = capacity_bytes // ALIGN_BYTES * ALIGN_BYTES
        self._policy = policy(self.capacity_bytes, weighs_cost)
        self._free = _FreeList()
        if self.capacity_bytes:
            self._free.add(0, self.capacity_bytes)
        self._taken_bytes = 0
        self._generation = 0
        self._resident = KeyIndex()  # exact key -> slot
        self._by_content = KeyIndex()  # content key -> its slot; where there are several, a tuple of them
        self._others: dict[int, Slot] = {}  # generation -> slot that is reserved or in quarantine
        self._writers: dict[int, str] = {}  # ... and who writes it
        self._slots: list[Slot] = []  # all of them, by offset
        self._walled: tuple[int, float] | None = None  # (bytes for which there was no room, until when)

    # -- reading ---------------------------------------------------------------------------------

    @property
    def taken_bytes(self) -> int:
        return self._taken_bytes

    def __len__(self) -> int:
        return len(self._resident)

    def get(self, exact: ExactKey) -> Slot | None:
        """The resident slot of a body, without counting as a use."""
        return self._resident.get(exact)

    def by_content(self, content: ContentKey) -> list[Slot]:
        return list(self._siblings(content))

    @property
    def contents(self) -> Container[ContentKey]:
        """The content keys of resident bodies, as they are now."""
        return self._by_content

    def resident(self) -> Iterator[Slot]:
        """Resident slots, those that go first first."""
        return iter(list(self._policy))  # type: ignore[arg-type]

    def coldest(self, nbytes: int) -> list[Slot]:
        """The resident slots that go first, as many as take `nbytes`; no others are looked at."""
        found: list[Slot] = []
        if nbytes <= 0:
            return found
        for slot in self._policy:
            found.append(slot)  # type: ignore[arg-type]
            nbytes -= slot.extent_bytes
            if nbytes <= 0:
                break
        return found

    def current(self, exact: ExactKey, generation: int) -> bool:
        """Whether an offset that somebody remembers still holds the body it did."""
        slot = self._resident.get(exact)
        return slot is not None and slot.generation == generation

    # -- a slot's life ---------------------------------------------------------------------------

    def extent_bytes(self, nbytes: int) -> int:
        return extent_bytes(nbytes)

    def reserve(self, body: BodyInfo, owner: str) -> Slot | None:
        """A slot to write `body` into, or None where something must be evicted first.

        Raises TierFull where the body is larger than the whole tier.
        """
        need = self.extent_bytes(body.nbytes)
        if need > self.capacity_bytes:
            raise TierFull(
                f"a body of {body.nbytes:,} bytes is larger than the host tier of {self.capacity_bytes:,}"
            )
        offset = self._free.take(need)
        if offset is None:
            return None
        self._generation += 1
        slot = Slot(body, offset, self._generation)
        self._taken_bytes += need
        self._others[slot.generation] = slot
        self._writers[slot.generation] = owner
        bisect.insort(self._slots, slot, key=_offset)
        return slot

    def commit(
        self, slot: Slot, checksums: tuple[int, ...], meta: bytes = b"", replica: bool = False
    ) -> Slot:
        """The bytes are whole: make the slot resident. Returns the slot that now serves the body.

        replica: it was pulled from a peer, which still has it.
        Where another writer was first, theirs stays and this slot is freed.
        """
        self._expect(slot, SlotState.RESERVED)
        first = self._resident.get(slot.exact)
        if first is not None:
            self._release(slot)
            return first
        del self._others[slot.generation], self._writers[slot.generation]
        self._note_change()
        slot.fill(checksums, meta)
        slot.state = SlotState.RESIDENT
        self._resident[slot.exact] = slot
        self._by_content[slot.content] = _one_or_all((*self._siblings(slot.content), slot))
        self._policy.admit(slot, replica)
        return slot

    def abort(self, slot: Slot) -> None:
        """The writer gave up and will not write again."""
        self._expect(slot, SlotState.RESERVED)
        self._release(slot)

    def quarantine(self, slot: Slot) -> None:
        """The writer gave up but may still write: keep the bytes out of use (law 5)."""
        self._expect(slot, SlotState.RESERVED)
        slot.state = SlotState.QUARANTINED

    def release_quarantine(self, slot: Slot) -> None:
        """Nothing will write there again."""
        self._expect(slot, SlotState.QUARANTINED)
        self._release(slot)

    def lease(self, exact: ExactKey) -> Slot | None:
        """Take a right to read a resident body; it counts as a use. None where it is not here."""
        slot = self._resident.get(exact)
        if slot is not None:
            slot.take_lease()
            self._policy.touch(slot)
        return slot

    def release(self, slot: Slot) -> None:
        """End one lease."""
        if slot.leases <= 0:
            raise InvariantError(f"a lease of slot {slot.offset} was released twice")
        slot.leases -= 1
        if not slot.leases:
            self._policy.settled(slot)
            self._note_change()

    def warm(self, exact: ExactKey) -> None:
        """Make a body the last to go, as it was for the node that it came from."""
        slot = self._resident.get(exact)
        if slot is not None:
            self._policy.warm(slot)

    def pin(self, exact: ExactKey, until_s: float) -> bool:
        """Keep a body from eviction until then. False where it is not here."""
        slot = self._resident.get(exact)
        if slot is None:
            return False
        slot.pinned_until_s = until_s
        self._note_change()
        return True

    def victim(self, now_s: float) -> Slot | None:
        """The body to evict next: the first in the policy's order that nobody reads or has pinned."""
        return self._policy.victim(now_s)  # type: ignore[return-value]

    def victims(self, nbytes: int, now_s: float) -> list[Slot]:
        """Bodies to evict together so that `nbytes` fit in one piece; none where nothing would do.

        The coldest alone where that makes room. Else the cheapest run of neighbours around one of the
        `COLD_TRIED` coldest; and where these are walled in by what is leased, pinned or being written, the
        cheapest run of the whole slab, in time linear in its slots. So a body is refused only where no
        stretch of the slab that is wide enough is free of such walls.
        """
        need = self.extent_bytes(nbytes)
        best: list[Slot] = []
        for count in (1, COLD_TRIED):
            for cold in self._policy.coldest(now_s, count):
                i = bisect.bisect_left(self._slots, cold.offset, key=_offset)  # type: ignore[attr-defined]
                if self._gap(i, i) >= need:
                    return [self._slots[i]]
                run = self._cheapest_run(*self._around(i, need, now_s), need, i) if count > 1 else []
                if run and (not best or self._worth(run) < self._worth(best)):
                    best = run
        return best or self._cheapest_anywhere(need, now_s)

    def _note_change(self) -> None:
        """A slot came, went, or is held no longer: what had no room may have it now."""
        self._walled = None

    def _cheapest_anywhere(self, need: int, now_s: float) -> list[Slot]:
        if self._walled is not None and need >= self._walled[0] and now_s < self._walled[1]:
            return []  # nothing has changed since so much was looked for in vain
        best: list[Slot] = []
        first = 0
        while first < len(self._slots):
            last = first
            while last < len(self._slots) and self._evictable(last, now_s):
                last += 1
            run = self._cheapest_run(first, last - 1, need)
            if run and (not best or self._worth(run) < self._worth(best)):
                best = run
            first = last + 1
        if not best:
            pins = (slot.pinned_until_s for slot in self._slots if slot.pinned_until_s > now_s)
            self._walled = need, min(pins, default=math.inf)
        return best

    def _around(self, i: int, need: int, now_s: float) -> tuple[int, int]:
        """First and last slot that a run of `need` bytes with slot i in it could begin and end with."""
        first = last = i
        while self._gap(first, i) < need and self._evictable(first - 1, now_s):
            first -= 1
        while self._gap(i, last) < need and self._evictable(last + 1, now_s):
            last += 1
        return first, last

    def _cheapest_run(self, first: int, last: int, need: int, seed: int | None = None) -> list[Slot]:
        """Of slots first to last the consecutive ones, with the seed, whose end would free `need` bytes."""
        best, best_worth = range(0), 0.0
        start, worth = first, 0.0
        for stop in range(first, last + 1):
            worth += self._worth(self._slots[stop : stop + 1])
            while start < (stop if seed is None else min(seed, stop)) and self._gap(start + 1, stop) >= need:
                worth -= self._worth(self._slots[start : start + 1])
                start += 1
            fits = (seed is None or stop >= seed) and self._gap(start, stop) >= need
            if fits and (not best or worth < best_worth):
                best, best_worth = range(start, stop + 1), worth
        return [self._slots[i] for i in best]

    def _gap(self, first: int, last: int) -> int:
        """Bytes in one piece once slots first to last are gone."""
        begin = _end(self._slots[first - 1]) if first else 0
        return (self._slots[last + 1].offset if last + 1 < len(self._slots) else self.capacity_bytes) - begin

    def _worth(self, slots: list[Slot]) -> float:
        return sum(map(self._policy.worth, slots))

    def _evictable(self, i: int, now_s: float) -> bool:
        if not 0 <= i < len(self._slots):
            return False
        return self._slots[i].state is SlotState.RESIDENT and not self._slots[i].held(now_s)

    def evict(self, slot: Slot) -> None:
        """Free a resident slot. The caller has withdrawn it from the directory first (law 2)."""
        self._expect(slot, SlotState.RESIDENT)
        if slot.leases:
            raise InvariantError(f"slot {slot.offset} was to be freed under {slot.leases} leases")
        del self._resident[slot.exact]
        others = tuple(s for s in self._siblings(slot.content) if s is not slot)
        if others:
            self._by_content[slot.content] = _one_or_all(others)
        else:
            del self._by_content[slot.content]
        self._policy.remove(slot)
        self._free_extent(slot)

    # -- checks ----------------------------------------------------------------------------------

    def leases(self) -> int:
        return sum(slot.leases for slot in self._slots)

    def validate(self) -> None:
        """Raise InvariantError unless bytes are conserved and no two extents overlap."""
        extents = [(s.offset, s.extent_bytes) for s in self._slots]
        if len(extents) != len(self._resident) + len(self._others):
            raise InvariantError("there are slots that are neither resident nor written, or that are missing")
        if sum(size for _, size in extents) != self._taken_bytes:
            raise InvariantError("taken bytes are not the sum of the slots")
        end = 0
        for offset, size in sorted(extents + list(self._free.sizes.items())):
            if offset != end:
                raise InvariantError(f"a hole or an overlap at byte {min(offset, end)} of the slab")
            end = offset + size
        if end != self.capacity_bytes:
            raise InvariantError(f"the slab ends at {end}, not at {self.capacity_bytes}")

    def _siblings(self, content: ContentKey) -> tuple[Slot, ...]:
        """Resident slots of one content key, in the order in which they came."""
        found = self._by_content.get(content, ())
        return found if isinstance(found, tuple) else (found,)

    def _expect(self, slot: Slot, state: SlotState) -> None:
        known = (
            self._resident.get(slot.exact)
            if state is SlotState.RESIDENT
            else self._others.get(slot.generation)
        )
        if slot.state is not state or known is not slot:
            of = self._writers.get(slot.generation, "nobody")
            raise InvariantError(
                f"slot {slot.offset}, which {of} writes, is {slot.state.value}, expected {state.value}"
            )

    def _release(self, slot: Slot) -> None:
        del self._others[slot.generation], self._writers[slot.generation]
        self._free_extent(slot)

    def _free_extent(self, slot: Slot) -> None:
        self._note_change()
        self._slots.pop(bisect.bisect_left(self._slots, slot.offset, key=_offset))
        self._free.add(slot.offset, slot.extent_bytes)
        self._taken_bytes -= slot.extent_bytes


def _one_or_all(slots: tuple[Slot, ...]) -> Slot | tuple[Slot, ...]:
    return slots[0] if len(slots) == 1 else slots


_offset = operator.attrgetter("offset")


def _end(slot: Slot) -> int:
    return slot.offset + slot.extent_bytes
