"""Residency of the host tier: which bytes of the slab hold which body, and who may read them.

A slot's life:

    reserve -> RESERVED -> commit -> RESIDENT -> evict -> free
                  |                     |
                  +-> abort -> free     +-> leased: cannot be evicted until the last lease ends
                  +-> quarantine -> release_quarantine -> free

A slot in quarantine belongs to a writer that may still write (law 5): it is counted, never reused,
and comes back only when its transport says that nothing will write there again. Every reserve gets
a new *generation*; a reader that holds an offset compares generations before it trusts the bytes.

Pure: bytes are never touched here, time and clients are arguments.
"""

from __future__ import annotations

import bisect
import enum
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from p2pcache.types import BodyInfo, ContentKey, ExactKey, InvariantError, TierFull

ALIGN_BYTES = 4096
"""Slots start and end on pages: O_DIRECT and huge transfers want that."""


class SlotState(enum.Enum):
    RESERVED = "reserved"
    RESIDENT = "resident"
    QUARANTINED = "quarantined"


@dataclass(slots=True, eq=False)
class Slot:
    """A part of the slab: `nbytes` of body at `offset`, `extent_bytes` taken. Owned by the tier."""

    body: BodyInfo
    offset: int
    extent_bytes: int
    generation: int
    owner: str  # who writes it while it is RESERVED
    state: SlotState = SlotState.RESERVED
    checksums: tuple[int, ...] = ()
    meta: bytes = b""
    leases: int = 0
    pinned_until_s: float = 0.0
    used: bool = False  # leased since it was committed

    @property
    def nbytes(self) -> int:
        return self.body.nbytes


@dataclass(slots=True)
class _FreeList:
    """Free extents of the slab, coalesced; best fit keeps large ones large."""

    offsets: list[int] = field(default_factory=list)  # sorted
    sizes: dict[int, int] = field(default_factory=dict)  # offset -> bytes

    def add(self, offset: int, size: int) -> None:
        i = bisect.bisect_left(self.offsets, offset)
        if i < len(self.offsets) and offset + size == self.offsets[i]:
            size += self.sizes.pop(self.offsets.pop(i))
        if i > 0 and self.offsets[i - 1] + self.sizes[self.offsets[i - 1]] == offset:
            self.sizes[self.offsets[i - 1]] += size
            return
        self.offsets.insert(i, offset)
        self.sizes[offset] = size

    def take(self, size: int) -> int | None:
        best = min(
            (o for o, s in self.sizes.items() if s >= size), key=lambda o: (self.sizes[o], o), default=None
        )
        if best is None:
            return None
        rest = self.sizes.pop(best) - size
        self.offsets.pop(bisect.bisect_left(self.offsets, best))
        if rest:
            self.add(best + size, rest)
        return best


class HostTier:
    """Residency of one slab. `free + taken == capacity` always (law 4); `validate` checks it."""

    def __init__(self, capacity_bytes: int):
        self.capacity_bytes = capacity_bytes // ALIGN_BYTES * ALIGN_BYTES
        self._free = _FreeList()
        if self.capacity_bytes:
            self._free.add(0, self.capacity_bytes)
        self._taken_bytes = 0
        self._generation = 0
        self._resident: OrderedDict[ExactKey, Slot] = OrderedDict()  # least recently used first
        self._by_content: dict[ContentKey, dict[ExactKey, Slot]] = {}
        self._others: dict[int, Slot] = {}  # generation -> slot that is reserved or in quarantine

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
        return list(self._by_content.get(content, {}).values())

    def resident(self) -> Iterator[Slot]:
        """Resident slots, least recently used first."""
        return iter(list(self._resident.values()))

    def current(self, exact: ExactKey, generation: int) -> bool:
        """Whether an offset that somebody remembers still holds the body it did."""
        slot = self._resident.get(exact)
        return slot is not None and slot.generation == generation

    # -- a slot's life ---------------------------------------------------------------------------

    def extent_bytes(self, nbytes: int) -> int:
        return -(-max(nbytes, 1) // ALIGN_BYTES) * ALIGN_BYTES

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
        slot = Slot(body, offset, need, self._generation, owner)
        self._taken_bytes += need
        self._others[slot.generation] = slot
        return slot

    def commit(self, slot: Slot, checksums: tuple[int, ...], meta: bytes = b"") -> Slot:
        """The bytes are whole: make the slot resident. Returns the slot that now serves the body.

        Where another writer was first, theirs stays and this slot is freed.
        """
        self._expect(slot, SlotState.RESERVED)
        first = self._resident.get(slot.body.exact)
        if first is not None:
            self._release(slot)
            return first
        del self._others[slot.generation]
        slot.state, slot.checksums, slot.meta = SlotState.RESIDENT, checksums, meta
        self._resident[slot.body.exact] = slot
        self._by_content.setdefault(slot.body.content, {})[slot.body.exact] = slot
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
            slot.leases += 1
            slot.used = True
            self._resident.move_to_end(exact)
        return slot

    def release(self, slot: Slot) -> None:
        """End one lease."""
        if slot.leases <= 0:
            raise InvariantError(f"a lease of slot {slot.offset} was released twice")
        slot.leases -= 1

    def touch(self, exact: ExactKey) -> None:
        """Count a use, without a lease."""
        if exact in self._resident:
            self._resident.move_to_end(exact)

    def pin(self, exact: ExactKey, until_s: float) -> bool:
        """Keep a body from eviction until then. False where it is not here."""
        slot = self._resident.get(exact)
        if slot is None:
            return False
        slot.pinned_until_s = until_s
        return True

    def victim(self, now_s: float) -> Slot | None:
        """The body to evict next: the least recently used that nobody reads or has pinned."""
        for slot in self._resident.values():
            if not slot.leases and slot.pinned_until_s <= now_s:
                return slot
        return None

    def evict(self, slot: Slot) -> None:
        """Free a resident slot. The caller has withdrawn it from the directory first (law 2)."""
        self._expect(slot, SlotState.RESIDENT)
        if slot.leases:
            raise InvariantError(f"slot {slot.offset} was to be freed under {slot.leases} leases")
        del self._resident[slot.body.exact]
        siblings = self._by_content[slot.body.content]
        del siblings[slot.body.exact]
        if not siblings:
            del self._by_content[slot.body.content]
        self._free.add(slot.offset, slot.extent_bytes)
        self._taken_bytes -= slot.extent_bytes

    # -- checks ----------------------------------------------------------------------------------

    def leases(self) -> int:
        return sum(slot.leases for slot in self._resident.values())

    def validate(self) -> None:
        """Raise InvariantError unless bytes are conserved and no two extents overlap."""
        extents = [(s.offset, s.extent_bytes) for s in self._resident.values()]
        extents += [(s.offset, s.extent_bytes) for s in self._others.values()]
        if sum(size for _, size in extents) != self._taken_bytes:
            raise InvariantError("taken bytes are not the sum of the slots")
        end = 0
        for offset, size in sorted(extents + list(self._free.sizes.items())):
            if offset != end:
                raise InvariantError(f"a hole or an overlap at byte {min(offset, end)} of the slab")
            end = offset + size
        if end != self.capacity_bytes:
            raise InvariantError(f"the slab ends at {end}, not at {self.capacity_bytes}")

    def _expect(self, slot: Slot, state: SlotState) -> None:
        known = (
            self._resident.get(slot.body.exact)
            if state is SlotState.RESIDENT
            else self._others.get(slot.generation)
        )
        if slot.state is not state or known is not slot:
            raise InvariantError(f"slot {slot.offset} is {slot.state.value}, expected {state.value}")

    def _release(self, slot: Slot) -> None:
        del self._others[slot.generation]
        self._free.add(slot.offset, slot.extent_bytes)
        self._taken_bytes -= slot.extent_bytes
