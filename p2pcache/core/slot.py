"""One slot of the host tier: a body's place in the slab, and all that is known of it, in few bytes."""

from __future__ import annotations

import enum
import struct

from p2pcache.core.eviction import COST_CLASS_MAX, COST_CLASS_MIN, Entry
from p2pcache.types import BodyInfo, ContentKey, ExactKey, InvariantError, Provenance

ALIGN_BYTES = 4096
"""Slots start and end on pages: O_DIRECT and huge transfers want that."""


class SlotState(enum.Enum):
    RESERVED = "reserved"
    RESIDENT = "resident"
    QUARANTINED = "quarantined"


_STATES = tuple(SlotState)
_STATE, _USED, _COST_AT, _COST, _LEASE = 3, 4, 3, COST_CLASS_MAX - COST_CLASS_MIN, 256
_FIXED = struct.Struct("<16s16sQQIIIHB")
_PLACE = struct.Struct("<QQI")  # generation, bytes of the body, page: what a transfer asks for
_SHAPE = struct.Struct("<HB")  # provenance and layers, bytes of the codec
_PLACE_AT, _SHAPE_AT = 32, _FIXED.size - _SHAPE.size
_LAYERS_BITS = 11  # LAYERS_MAX is 1024
_CODEC = "raw"  # the one that takes no room
Facts = tuple[ContentKey, ExactKey, int, int, int, int, str]


class _Pinned:
    """The bits of a slot that is pinned, or was."""

    __slots__ = ("bits", "until_s")

    def __init__(self, bits: int, until_s: float):
        self.bits = bits
        self.until_s = until_s


class Slot(Entry):
    """A part of the slab: `nbytes` of body at `offset`, `extent_bytes` taken. Owned by the tier.

    A node has a hundred thousand of these, and as objects they would take 2.5 kB each. So what never changes
    (the body, the place, and from `commit` on checksums and meta) is packed into one `bytes`, and what does
    into one integer, which Python shares with other slots unless leases are out.
    """

    __slots__ = ("_packed", "_status")

    _status: int | _Pinned

    def __init__(self, body: BodyInfo, offset: int, generation: int):
        self._packed = _pack(body, offset, generation)
        self._status = _STATES.index(SlotState.RESERVED)

    @property
    def _bits(self) -> int:
        """State, whether it was used, cost class, and leases from `_LEASE` upwards."""
        status = self._status
        return status if type(status) is int else status.bits

    @_bits.setter
    def _bits(self, bits: int) -> None:
        if type(self._status) is int:
            self._status = bits
        else:
            self._status.bits = bits

    @property
    def state(self) -> SlotState:
        return _STATES[self._bits & _STATE]

    @state.setter
    def state(self, state: SlotState) -> None:
        self._bits = self._bits & ~_STATE | _STATES.index(state)

    @property
    def used(self) -> bool:
        """Leased since it was committed."""
        return self._bits & _USED > 0

    @property
    def cost(self) -> int:
        return (self._bits >> _COST_AT & _COST) + COST_CLASS_MIN

    @cost.setter
    def cost(self, cost: int) -> None:
        if not COST_CLASS_MIN <= cost <= COST_CLASS_MAX:
            raise InvariantError(f"cost class {cost} is not {COST_CLASS_MIN} to {COST_CLASS_MAX}")
        self._bits = self._bits & ~(_COST << _COST_AT) | cost - COST_CLASS_MIN << _COST_AT

    @property
    def leases(self) -> int:
        return self._bits // _LEASE

    @leases.setter
    def leases(self, leases: int) -> None:
        self._bits = self._bits % _LEASE + leases * _LEASE

    def take_lease(self) -> None:
        """One lease more, which is a use."""
        self._bits = (self._bits | _USED) + _LEASE

    @property
    def pinned_until_s(self) -> float:
        status = self._status
        return 0.0 if type(status) is int else status.until_s

    @pinned_until_s.setter
    def pinned_until_s(self, until_s: float) -> None:
        self._status = _Pinned(self._bits, until_s) if until_s > 0 else self._bits

    def held(self, now_s: float) -> bool:
        status = self._status
        if type(status) is int:
            return status >= _LEASE
        return status.bits >= _LEASE or status.until_s > now_s

    @property
    def body(self) -> BodyInfo:
        content, exact, tokens, nbytes, provenance, base_position, codec = _facts(self._packed)
        return BodyInfo(content, exact, tokens, nbytes, Provenance(provenance), base_position, codec)

    @property
    def facts(self) -> Facts:
        """The fields of `body`, without an object."""
        return _facts(self._packed)

    @property
    def place(self) -> tuple[int, int, int]:
        """Generation, bytes of the body, offset: what a transfer asks for."""
        generation, nbytes, page = _PLACE.unpack_from(self._packed, _PLACE_AT)
        return generation, nbytes, page * ALIGN_BYTES

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


def _facts(packed: bytes) -> Facts:
    content, exact, _, nbytes, _, base_position, tokens, shape, codec_bytes = _FIXED.unpack_from(packed)
    codec = packed[_FIXED.size : _FIXED.size + codec_bytes].decode() if codec_bytes else _CODEC
    return content, exact, tokens, nbytes, shape >> _LAYERS_BITS, base_position, codec


def _sums_at(packed: bytes) -> tuple[int, int]:
    """How many checksums there are, and where they begin."""
    shape, codec_bytes = _SHAPE.unpack_from(packed, _SHAPE_AT)
    return shape & (1 << _LAYERS_BITS) - 1, _FIXED.size + codec_bytes


def extent_bytes(nbytes: int) -> int:
    """What a body of `nbytes` takes of the slab: whole pages, at least one."""
    return -(-max(nbytes, 1) // ALIGN_BYTES) * ALIGN_BYTES
