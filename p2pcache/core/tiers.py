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
import functools
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from p2pcache._native import KeyIndex, KeyMap
from p2pcache.types import BodyInfo, ContentKey, ExactKey, InvariantError, Provenance, TierFull

ALIGN_BYTES = 4096
"""Slots start and end on pages: O_DIRECT and huge transfers want that."""


class SlotState(enum.Enum):
    RESERVED = "reserved"
    RESIDENT = "resident"
    QUARANTINED = "quarantined"


_FIXED = struct.Struct("<16s16sQQIIIHB")
_PLACE = struct.Struct("<QQI")  # generation, bytes of the body, page: what a transfer asks for
_SHAPE = struct.Struct("<HB")  # provenance and layers, bytes of the codec
_PLACE_AT, _SHAPE_AT = 32, _FIXED.size - _SHAPE.size
_LAYERS_BITS = 11  # LAYERS_MAX is 1024
_CODEC = "raw"  # the one that takes no room
_BODIES_KEPT = 512


class Slot:
    """A part of the slab: `nbytes` of body at `offset`, `extent_bytes` taken. Owned by the tier.

    What never changes (the body, the place, and from `commit` on checksums and meta) is packed into one
    `bytes`: a node has a hundred thousand of these, and as objects they would take 2.5 kB each.
    """

    __slots__ = ("_packed", "state", "leases", "pinned_until_s", "used")

    def __init__(self, body: BodyInfo, offset: int, generation: int):
        self._packed = _pack(body, offset, generation)
        self.state = SlotState.RESERVED
        self.leases = 0
        self.pinned_until_s = 0.0
        self.used = False  # leased since it was committed

    @property
    def body(self) -> BodyInfo:
        return _unpack_body(self._packed)

    @property
    def content(self) -> ContentKey:
        return ContentKey(self._packed[:16])

    @property
    def exact(self) -> ExactKey:
        return ExactKey(self._packed[16:32])

    @property
    def offset(self) -> int:
        return _PLACE.unpack_from(self._packed, _PLACE_AT)[2] * ALIGN_BYTES

    @property
    def generation(self) -> int:
        return _PLACE.unpack_from(self._packed, _PLACE_AT)[0]

    @property
    def nbytes(self) -> int:
        return _PLACE.unpack_from(self._packed, _PLACE_AT)[1]

    @property
    def extent_bytes(self) -> int:
        return extent_bytes(self.nbytes)

    @property
    def checksums(self) -> tuple[int, ...]:
        """One a layer; none before `commit`."""
        layers, start = _sums_at(self._packed)
        return struct.unpack_from(f"<{layers}Q", self._packed, start)

    @property
    def meta(self) -> bytes:
        layers, start = _sums_at(self._packed)
        return self._packed[start + 8 * layers :]

    def fill(self, checksums: tuple[int, ...], meta: bytes) -> None:
        """The bytes are whole: this is what they are checked by."""
        self._packed = _pack(self.body, self.offset, self.generation, checksums, meta)


def _pack(
    body: BodyInfo, offset: int, generation: int, sums: tuple[int, ...] = (), meta: bytes = b""
) -> bytes:
    """Fixed fields, codec, checksums, meta. Tokens and positions have 32 bits, as on the wire."""
    b, codec = body, b"" if body.codec == _CODEC else body.codec.encode()
    shape = b.provenance << _LAYERS_BITS | len(sums)
    numbers = generation, b.nbytes, offset // ALIGN_BYTES, b.base_position, b.tokens, shape, len(codec)
    return _FIXED.pack(b.content, b.exact, *numbers) + codec + struct.pack(f"<{len(sums)}Q", *sums) + meta


@functools.lru_cache(_BODIES_KEPT)  # a hot body is asked for again and again
def _unpack_body(packed: bytes) -> BodyInfo:
    content, exact, _, nbytes, _, base_position, tokens, shape, codec_bytes = _FIXED.unpack_from(packed)
    codec = packed[_FIXED.size : _FIXED.size + codec_bytes].decode() or _CODEC
    return BodyInfo(content, exact, tokens, nbytes, Provenance(shape >> _LAYERS_BITS), base_position, codec)


def _sums_at(packed: bytes) -> tuple[int, int]:
    """How many checksums there are, and where they begin."""
    shape, codec_bytes = _SHAPE.unpack_from(packed, _SHAPE_AT)
    return shape & (1 << _LAYERS_BITS) - 1, _FIXED.size + codec_bytes


def extent_bytes(nbytes: int) -> int:
    """What a body of `nbytes` takes of the slab: whole pages, at least one."""
    return -(-max(nbytes, 1) // ALIGN_BYTES) * ALIGN_BYTES


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
        self._resident = KeyMap()  # exact key -> slot, least recently used first
        self._by_content = KeyIndex()  # content key -> its slot; where there are several, a tuple of them
        self._others: dict[int, Slot] = {}  # generation -> slot that is reserved or in quarantine
        self._writers: dict[int, str] = {}  # ... and who writes it

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

    def resident(self) -> Iterator[Slot]:
        """Resident slots, least recently used first."""
        return iter(list(self._resident.values()))

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
        return slot

    def commit(self, slot: Slot, checksums: tuple[int, ...], meta: bytes = b"") -> Slot:
        """The bytes are whole: make the slot resident. Returns the slot that now serves the body.

        Where another writer was first, theirs stays and this slot is freed.
        """
        self._expect(slot, SlotState.RESERVED)
        first = self._resident.get(slot.exact)
        if first is not None:
            self._release(slot)
            return first
        del self._others[slot.generation], self._writers[slot.generation]
        slot.fill(checksums, meta)
        slot.state = SlotState.RESIDENT
        self._resident[slot.exact] = slot
        self._by_content[slot.content] = _one_or_all((*self._siblings(slot.content), slot))
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
        del self._resident[slot.exact]
        others = tuple(s for s in self._siblings(slot.content) if s is not slot)
        if others:
            self._by_content[slot.content] = _one_or_all(others)
        else:
            del self._by_content[slot.content]
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
        self._free.add(slot.offset, slot.extent_bytes)
        self._taken_bytes -= slot.extent_bytes


def _one_or_all(slots: tuple[Slot, ...]) -> Slot | tuple[Slot, ...]:
    return slots[0] if len(slots) == 1 else slots
