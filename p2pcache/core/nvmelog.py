"""The format of the NVMe log: segments of fixed size, records with a checksummed header.

All integers are little endian; a page is 4096 bytes. Every header and every body starts on a page,
so that the log can be written with O_DIRECT.

**A segment** is one page of segment header, then records back to back, then free space.

    offset  bytes  segment header
    0       8      magic "p2pcSEG\\0"
    8       8      epoch of this life of the segment
    16      4      format version, 1
    20      8      segment_bytes, the size of the whole segment
    28      4060   zero
    4088    8      XXH3-64 (seed 0) of the bytes before it

**A record** is a header of 1 to 4 pages and a body, padded with zeros to a page.

    offset  bytes  record header
    0       8      magic "p2pcREC\\0"
    8       8      epoch of the segment's life that the record belongs to
    16      2      format version, 1
    18      1      state: 2 committed, 3 dead
    19      1      provenance
    20      4      header_bytes, a multiple of 4096
    24      8      record_bytes = header_bytes + bytes stored, rounded up to 4096
    32      8      nbytes, length of the raw body
    40      4      tokens
    44      4      layers; a body is that many equal parts
    48      8      base_position
    56      4      meta_bytes
    60      4      flags: 1 where the bytes stored are the body encoded, else zero
    64      32     codec, ASCII, padded with zeros
    96      16     content key
    112     16     exact key
    128     8 each layers times: XXH3-64 of the raw layer (see `core.checksum`)
    ...            of an encoded body (see `core.coding`), and of no other:
            8      bytes stored, fewer than nbytes, in `layers` equal parts
            32     how it is encoded, ASCII, padded with zeros
            8 each layers times: XXH3-64 of the part
    ...     meta_bytes, opaque
    ...     zero
    last 8         XXH3-64 (seed 0) of the header's bytes before it

**Life of a record**: first all of its body but a piece at the start, which may be all of it; when that has
ended, this piece and the header before it, in one write. So a writer that dies leaves a whole record or a
hole, in which no header of this epoch stands; records written at the same time behind it are still found.
`dead` marks a record whose body was found damaged, or that was dropped. Nothing is flushed: after a power
loss a header may stand before a torn body. The layers' checksums, which stand in the header, find that when
the body is read, and the youngest bodies are read at every start. A program that knows no encoded bodies
takes their headers for damaged ones, and so drops them.

**Life of a segment**: when it is reused, its header is written with a new, higher epoch *before*
any other byte; the records of the life before then no longer count, wherever they lie. An epoch is
a counter in the high 32 bits and random bits in the low 32: bytes inside a body that was sent to us
can then not pass for a record of ours. The order of epochs is the order in which segments fill.

**Scan**: from page 1, a valid header of the segment's epoch is a record, and the scan goes on behind
it. Anything else is passed over one page at a time, so a damaged header costs one record only.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable
from dataclasses import dataclass

import xxhash

from p2pcache.core.coding import CODEC_BYTES_MAX, Coding
from p2pcache.core.layout import LAYERS_MAX
from p2pcache.types import KEY_BYTES, BodyInfo, ContentKey, ExactKey, LayoutError, Provenance

PAGE_BYTES = 4096
FORMAT_VERSION = 1
NBYTES_MAX = 1 << 40
META_BYTES_MAX = 4096
ENCODED = 1
SEGMENT_MAGIC = b"p2pcSEG\0"
RECORD_MAGIC = b"p2pcREC\0"

_SEGMENT = struct.Struct("<8sQIQ")
_FIXED = struct.Struct("<8sQHBBIQQIIQII32s16s16s")
_CODING = struct.Struct("<Q32s")
_DIGEST = struct.Struct("<Q")
_EPOCH_AT = 8


def round_up(nbytes: int) -> int:
    """`nbytes` rounded up to whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


HEADER_BYTES_MAX = round_up(_FIXED.size + _CODING.size + 16 * LAYERS_MAX + META_BYTES_MAX + _DIGEST.size)


class State(enum.IntEnum):
    """What a header says of its record. No state is zero, so a blank page is none."""

    COMMITTED = 2
    DEAD = 3


class Damage(enum.StrEnum):
    """Why bytes are not a header."""

    FOREIGN = "foreign"  # no magic: free space, or the inside of a body
    TRUNCATED = "truncated"  # the header or its record would reach past the bytes that are there
    VERSION = "version"  # of a format that this code does not read
    CHECKSUM = "checksum"
    FIELDS = "fields"  # whole, yet a field is out of bounds or contradicts another


@dataclass(frozen=True, slots=True)
class Record:
    """A body's name, checksums and caller's data; all of a record but the body's bytes.

    `checksums` has one XXH3-64 a raw layer. `meta` is opaque to the log. `coding`: how the bytes stored are
    encoded; None where they are the body as it is. Raises LayoutError when the format cannot hold it.
    """

    body: BodyInfo
    checksums: tuple[int, ...]
    meta: bytes = b""
    coding: Coding | None = None

    def __post_init__(self) -> None:
        body, layers = self.body, len(self.checksums)
        if len(body.content) != KEY_BYTES or len(body.exact) != KEY_BYTES:
            raise LayoutError(f"content and exact key must have {KEY_BYTES} bytes each")
        if not 1 <= layers <= LAYERS_MAX:
            raise LayoutError(f"a body has 1 to {LAYERS_MAX} layers and a checksum for each, not {layers}")
        if not layers <= body.nbytes <= NBYTES_MAX or body.nbytes % layers:
            raise LayoutError(f"a body of {body.nbytes} bytes is not {layers} equal layers")
        if not 1 <= body.tokens < 1 << 32 or not 0 <= body.base_position < 1 << 63:
            raise LayoutError(f"tokens {body.tokens} or base position {body.base_position} out of range")
        if not body.codec.isascii() or "\0" in body.codec or not 1 <= len(body.codec) <= CODEC_BYTES_MAX:
            raise LayoutError(f"codec {body.codec!r} is not 1 to {CODEC_BYTES_MAX} ASCII characters")
        if len(self.meta) > META_BYTES_MAX:
            raise LayoutError(f"meta has {len(self.meta)} bytes, more than {META_BYTES_MAX}")
        if not all(0 <= checksum < 1 << 64 for checksum in self.checksums):
            raise LayoutError("a layer's checksum is an unsigned 64-bit integer")
        if self.coding is not None:
            self.coding.check_fits(body, layers)

    @property
    def stored_bytes(self) -> int:
        """Length of the body as it is stored."""
        return self.body.nbytes if self.coding is None else self.coding.nbytes

    @property
    def stored_checksums(self) -> tuple[int, ...]:
        """Of the equal parts of what is stored."""
        return self.checksums if self.coding is None else self.coding.checksums

    @property
    def header_bytes(self) -> int:
        coding_bytes = 0 if self.coding is None else _CODING.size + 8 * len(self.checksums)
        return round_up(_FIXED.size + 8 * len(self.checksums) + coding_bytes + len(self.meta) + _DIGEST.size)

    @property
    def record_bytes(self) -> int:
        """What the record takes in a segment: header and body, in whole pages."""
        return self.header_bytes + round_up(self.stored_bytes)


@dataclass(frozen=True, slots=True)
class Header:
    """A decoded record header."""

    record: Record
    epoch: int
    state: State


def encode_header(record: Record, epoch: int, state: State = State.COMMITTED) -> bytes:
    """`record.header_bytes` bytes, ready to be written at the record's offset."""
    body, coding, layers = record.body, record.coding, len(record.checksums)
    fixed = _FIXED.pack(
        RECORD_MAGIC,
        epoch,
        FORMAT_VERSION,
        state,
        body.provenance,
        record.header_bytes,
        record.record_bytes,
        body.nbytes,
        body.tokens,
        layers,
        body.base_position,
        len(record.meta),
        0 if coding is None else ENCODED,
        body.codec.encode("ascii"),
        body.content,
        body.exact,
    )
    sums = struct.pack(f"<{layers}Q", *record.checksums)
    if coding is not None:
        sums += _CODING.pack(coding.nbytes, coding.codec.encode("ascii"))
        sums += struct.pack(f"<{layers}Q", *coding.checksums)
    return _sealed(fixed + sums + record.meta, record.header_bytes)


def decode_header(buf: bytes | memoryview, room_bytes: int = NBYTES_MAX) -> Header | Damage:
    """The record header at the start of `buf`, or why there is none. Never raises.

    `buf` should hold HEADER_BYTES_MAX bytes where there are so many; `room_bytes` is what lies
    between the start of `buf` and the end of the segment. No length in `buf` is trusted before it has
    been checked against these two. The caller compares the epoch.
    """
    if bytes(buf[: len(RECORD_MAGIC)]) != RECORD_MAGIC:
        return Damage.FOREIGN
    if len(buf) < PAGE_BYTES:
        return Damage.TRUNCATED
    fields = _FIXED.unpack_from(buf)
    (_, epoch, version, state, provenance, header_bytes, record_bytes, nbytes, tokens, layers) = fields[:10]
    (base_position, meta_bytes, flags, codec, content, exact) = fields[10:]
    if version != FORMAT_VERSION:
        return Damage.VERSION
    if not PAGE_BYTES <= header_bytes <= HEADER_BYTES_MAX or header_bytes % PAGE_BYTES:
        return Damage.FIELDS
    if header_bytes > len(buf):
        return Damage.TRUNCATED
    if not _is_sealed(buf[:header_bytes]):
        return Damage.CHECKSUM
    coding_at = _FIXED.size + 8 * layers
    meta_at = coding_at + (_CODING.size + 8 * layers if flags == ENCODED else 0)
    pad_at = meta_at + meta_bytes
    if layers > LAYERS_MAX or meta_bytes > META_BYTES_MAX or pad_at > header_bytes - _DIGEST.size:
        return Damage.FIELDS
    pad = bytes(buf[pad_at : header_bytes - _DIGEST.size])
    if flags not in (0, ENCODED) or pad != bytes(len(pad)):
        return Damage.FIELDS
    try:
        record = Record(
            BodyInfo(
                content=ContentKey(content),
                exact=ExactKey(exact),
                tokens=tokens,
                nbytes=nbytes,
                provenance=Provenance(provenance),
                base_position=base_position,
                codec=codec.rstrip(b"\0").decode("ascii"),
            ),
            checksums=struct.unpack_from(f"<{layers}Q", buf, _FIXED.size),
            meta=bytes(buf[meta_at:pad_at]),
            coding=_decode_coding(buf, coding_at, layers) if flags else None,
        )
        header = Header(record, epoch, State(state))
    except (ValueError, LayoutError):  # an enum's value, the codec's ASCII, or a bound of Record
        return Damage.FIELDS
    if (header_bytes, record_bytes) != (record.header_bytes, record.record_bytes):
        return Damage.FIELDS
    return header if record_bytes <= room_bytes else Damage.TRUNCATED


def _decode_coding(buf: bytes | memoryview, at: int, layers: int) -> Coding:
    """Raises ValueError, LayoutError."""
    nbytes, codec = _CODING.unpack_from(buf, at)
    sums = struct.unpack_from(f"<{layers}Q", buf, at + _CODING.size)
    return Coding(codec.rstrip(b"\0").decode("ascii"), nbytes, sums)


def encode_segment(epoch: int, segment_bytes: int) -> bytes:
    """The first page of a segment."""
    return _sealed(_SEGMENT.pack(SEGMENT_MAGIC, epoch, FORMAT_VERSION, segment_bytes), PAGE_BYTES)


def decode_segment(page: bytes | memoryview, segment_bytes: int) -> int | Damage:
    """The epoch that a segment's first page states, or why it cannot be used as it is."""
    if len(page) < PAGE_BYTES:
        return Damage.TRUNCATED
    magic, epoch, version, stated_bytes = _SEGMENT.unpack_from(page)
    if magic != SEGMENT_MAGIC:
        return Damage.FOREIGN
    if version != FORMAT_VERSION:
        return Damage.VERSION
    if not _is_sealed(page[:PAGE_BYTES]):
        return Damage.CHECKSUM
    return epoch if epoch > 0 and stated_bytes == segment_bytes else Damage.FIELDS


@dataclass(slots=True)
class Scan:
    """What a scan found in one segment."""

    entries: list[tuple[int, Header]]  # (offset, header) of this epoch, by offset, of every state
    torn: int = 0  # holes: appends that never ended
    flipped: int = 0  # damaged headers, each a record lost
    epoch_max: int = 0  # highest epoch of any valid header, stale ones too


def scan(read: Callable[[int, int], bytes | memoryview], segment_bytes: int, epoch: int) -> Scan:
    """Find the records of one segment's life `epoch` (0: of none, only look for epochs).

    `read(offset, nbytes)` returns exactly that part of the segment; an error of its own passes
    through. Only headers are read where all is well.
    """
    result = Scan([])
    offset, gap_bytes, counted = PAGE_BYTES, 0, False
    while offset < segment_bytes:
        room_bytes = segment_bytes - offset
        window = read(offset, min(HEADER_BYTES_MAX, room_bytes))
        header = decode_header(window, room_bytes)
        if isinstance(header, Header):
            result.epoch_max = max(result.epoch_max, header.epoch)
            if header.epoch == epoch:
                # A hole: its append never ended, and had a place before this one's.
                result.torn += gap_bytes > 0 and not counted
                result.entries.append((offset, header))
                offset += header.record.record_bytes
                gap_bytes, counted = 0, False
                continue
        elif epoch and _was_header(window, header, epoch):
            result.flipped += 1
            counted = True
        offset += PAGE_BYTES
        gap_bytes += PAGE_BYTES
    return result


def _was_header(window: bytes | memoryview, damage: Damage, epoch: int) -> bool:
    """Whether damaged bytes were a header of this epoch: a flipped bit spares the magic or the epoch."""
    stated = bytes(window[_EPOCH_AT : _EPOCH_AT + 8])
    return damage is not Damage.FOREIGN or stated == epoch.to_bytes(8, "little")


def _sealed(content: bytes, nbytes: int) -> bytes:
    padded = content.ljust(nbytes - _DIGEST.size, b"\0")
    return padded + _DIGEST.pack(xxhash.xxh3_64_intdigest(padded))


def _is_sealed(buf: bytes | memoryview) -> bool:
    digest_at = len(buf) - _DIGEST.size
    return bytes(buf[digest_at:]) == _DIGEST.pack(xxhash.xxh3_64_intdigest(buf[:digest_at]))
