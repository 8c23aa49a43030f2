"""The NVMe log's format: every damaged header is refused, and a scan loses nothing beside it."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pcache.core import nvmelog
from p2pcache.core.coding import Coding
from p2pcache.core.layout import LAYERS_MAX
from p2pcache.core.nvmelog import (
    HEADER_BYTES_MAX,
    META_BYTES_MAX,
    PAGE_BYTES,
    Damage,
    Header,
    Record,
    State,
    decode_header,
    decode_segment,
    encode_header,
    encode_segment,
    scan,
)
from p2pcache.types import BodyInfo, ContentKey, ExactKey, LayoutError, Provenance

EPOCH = 7 << 32 | 0xABCDEF01


def make_record(number: int, pages: int = 1, layers: int = 1, meta: bytes = b"") -> Record:
    """A record whose body takes `pages` pages and whose header takes one, for few layers."""
    body = BodyInfo(
        content=ContentKey(number.to_bytes(16, "big")),
        exact=ExactKey(number.to_bytes(16, "big")),
        tokens=16,
        nbytes=(pages * PAGE_BYTES - 64) // layers * layers,
    )
    return Record(body, tuple(range(layers)), meta)


@st.composite
def records(draw):
    layers = draw(st.integers(1, 40) | st.just(LAYERS_MAX))
    body = BodyInfo(
        content=draw(st.binary(min_size=16, max_size=16)),
        exact=draw(st.binary(min_size=16, max_size=16)),
        tokens=draw(st.integers(1, 2**32 - 1)),
        nbytes=layers * draw(st.integers(1, 1 << 20)),
        provenance=draw(st.sampled_from(Provenance)),
        base_position=draw(st.integers(0, 2**63 - 1)),
        codec=draw(st.text(st.characters(min_codepoint=1, max_codepoint=127), min_size=1, max_size=32)),
    )
    sums = draw(st.integers(0, 2**64 - layers))
    meta = draw(st.binary(max_size=64) | st.just(b"m" * META_BYTES_MAX))
    coding = None
    if body.nbytes > layers and draw(st.booleans()):
        name = draw(st.text(st.characters(min_codepoint=1, max_codepoint=127), min_size=1, max_size=32))
        part_bytes = draw(st.integers(1, body.nbytes // layers - 1))
        coding = Coding(name, layers * part_bytes, tuple(range(layers)))
    return Record(body, tuple(range(sums, sums + layers)), meta, coding)


class TestHeader:
    @given(records(), st.integers(1, 2**64 - 1), st.sampled_from(State))
    def test_round_trip(self, record, epoch, state):
        encoded = encode_header(record, epoch, state)
        assert len(encoded) == record.header_bytes <= HEADER_BYTES_MAX
        assert len(encoded) % PAGE_BYTES == 0 and record.record_bytes % PAGE_BYTES == 0
        assert decode_header(encoded) == Header(record, epoch, state)
        assert decode_header(memoryview(encoded + b"body")) == Header(record, epoch, state)

    @given(records(), st.data())
    def test_a_truncated_header_is_refused(self, record, data):
        encoded = encode_header(record, EPOCH)
        kept = data.draw(st.integers(0, len(encoded) - 1))
        assert decode_header(encoded[:kept]) in (Damage.FOREIGN, Damage.TRUNCATED)

    @settings(max_examples=300)
    @given(records(), st.data())
    def test_a_mutated_header_is_refused_or_equal(self, record, data):
        encoded = bytearray(encode_header(record, EPOCH))
        at = data.draw(st.integers(0, 200) | st.integers(0, len(encoded) - 1))
        patch = data.draw(st.binary(min_size=1, max_size=16))[: len(encoded) - at]
        changed = bytes(encoded[:at]) + patch + bytes(encoded[at + len(patch) :])
        decoded = decode_header(changed)
        assert isinstance(decoded, Damage) or decoded == Header(record, EPOCH, State.COMMITTED)
        assert (changed == bytes(encoded)) == isinstance(decoded, Header)

    def test_every_flipped_bit_of_the_fields_is_refused(self):
        encoded = encode_header(make_record(1, layers=3, meta=b"meta"), EPOCH)
        for bit in itertools.chain(range(8 * 160), range(8 * 4080, 8 * 4096)):
            flipped = bytearray(encoded)
            flipped[bit // 8] ^= 1 << bit % 8
            assert isinstance(decode_header(flipped), Damage), bit

    def test_every_flipped_bit_of_an_encoded_bodys_fields_is_refused(self):
        coding = Coding("lossless", 3 * 100, (4, 5, 6))
        encoded = encode_header(dataclasses.replace(make_record(1, layers=3), coding=coding), EPOCH)
        for bit in range(8 * 240):
            flipped = bytearray(encoded)
            flipped[bit // 8] ^= 1 << bit % 8
            assert isinstance(decode_header(flipped), Damage), bit

    @pytest.mark.parametrize("flags", [0, 2, 3, 1 << 31])
    def test_flags_say_what_follows_and_nothing_else(self, flags):
        record = make_record(1, layers=3)
        coded = dataclasses.replace(record, coding=Coding("lossless", 3 * 100, (4, 5, 6)))
        encoded = bytearray(encode_header(coded, EPOCH))
        encoded[60:64] = flags.to_bytes(4, "little")
        assert decode_header(nvmelog._sealed(bytes(encoded[:-8]), len(encoded))) is Damage.FIELDS
        plain = bytearray(encode_header(record, EPOCH))
        plain[60:64] = (1).to_bytes(4, "little")  # no coding follows: its length is zero
        assert decode_header(nvmelog._sealed(bytes(plain[:-8]), len(plain))) is Damage.FIELDS

    @given(records(), st.data())
    def test_what_stands_of_an_encoded_body_is_not_trusted_even_under_a_right_checksum(self, record, data):
        layers = len(record.checksums)
        encoded = bytearray(encode_header(record, EPOCH))
        at = data.draw(st.integers(124 + 8 * layers, 128 + 8 * layers + 40))
        encoded[at : at + 4] = data.draw(st.binary(min_size=4, max_size=4))
        resealed = nvmelog._sealed(bytes(encoded[:-8]), len(encoded))
        decoded = decode_header(resealed)
        if isinstance(decoded, Header):
            assert encode_header(decoded.record, decoded.epoch, decoded.state) == resealed

    @given(records(), st.data())
    def test_lengths_are_not_trusted_even_under_a_right_checksum(self, record, data):
        """A writer gone wrong, rather than a flipped bit: any field may be anything, and be sealed."""
        encoded = bytearray(encode_header(record, EPOCH))
        at = data.draw(st.integers(18, 127))
        encoded[at : at + 4] = data.draw(st.binary(min_size=4, max_size=4))
        resealed = nvmelog._sealed(bytes(encoded[:-8]), len(encoded))
        decoded = decode_header(resealed)
        if isinstance(decoded, Header):  # then it is the canonical form of what it decodes to
            assert encode_header(decoded.record, decoded.epoch, decoded.state) == resealed

    @given(st.binary(max_size=300), st.booleans())
    def test_arbitrary_bytes_are_refused(self, data, magic):
        padded = (nvmelog.RECORD_MAGIC + data if magic else data).ljust(2 * PAGE_BYTES, b"\xa5")
        assert isinstance(decode_header(padded), Damage)

    def test_a_record_that_reaches_past_the_segment_is_refused(self):
        record = make_record(1, pages=4)
        encoded = encode_header(record, EPOCH)
        assert isinstance(decode_header(encoded, record.record_bytes), Header)
        assert decode_header(encoded, record.record_bytes - 1) is Damage.TRUNCATED

    def test_another_format_version_is_refused_by_name(self):
        encoded = bytearray(encode_header(make_record(1), EPOCH))
        encoded[16] = 2
        assert decode_header(encoded) is Damage.VERSION

    @pytest.mark.parametrize(
        "change",
        [
            {"content": b"short"},
            {"exact": b"far too long for a key"},
            {"tokens": 0},
            {"nbytes": 0},
            {"nbytes": 5},
            {"base_position": -1},
            {"codec": ""},
            {"codec": "ünknown"},
            {"codec": "x" * 33},
        ],
    )
    def test_a_record_that_the_format_cannot_hold_is_a_typed_error(self, change):
        good = make_record(1, layers=2)
        with pytest.raises(LayoutError):
            Record(dataclasses.replace(good.body, **change), good.checksums)

    @pytest.mark.parametrize(
        ("codec", "nbytes", "parts"),
        [
            ("", 100, 2),
            ("x" * 33, 100, 2),
            ("null\0", 100, 2),
            ("lossless", 101, 2),  # parts that are not equal
            ("lossless", 0, 2),
            ("lossless", -2, 2),
            ("lossless", 99, 3),  # not a part a layer
            ("lossless", PAGE_BYTES - 64, 2),  # no shorter than raw
            ("lossless", 1 << 62, 2),
            ("lossless", 0, 0),
        ],
    )
    def test_an_encoded_form_out_of_bounds_is_a_typed_error(self, codec, nbytes, parts):
        with pytest.raises(LayoutError):
            dataclasses.replace(make_record(1, layers=2), coding=Coding(codec, nbytes, tuple(range(parts))))
        with pytest.raises(LayoutError):
            Coding("lossless", 100, (-1, 1))

    def test_too_many_layers_or_too_much_meta_is_a_typed_error(self):
        body = dataclasses.replace(make_record(1).body, nbytes=LAYERS_MAX + 1)
        for checksums, meta in [
            ((), b""),
            ((0,) * (LAYERS_MAX + 1), b""),
            ((0,), bytes(META_BYTES_MAX + 1)),
            ((-1,), b""),
        ]:
            with pytest.raises(LayoutError):
                Record(body, checksums, meta)


class TestSegmentHeader:
    @given(st.integers(1, 2**64 - 1))
    def test_round_trip(self, epoch):
        assert decode_segment(encode_segment(epoch, 1 << 20), 1 << 20) == epoch

    def test_every_flipped_bit_and_every_truncation_is_refused(self):
        page = encode_segment(EPOCH, 1 << 20)
        for bit in itertools.chain(range(8 * 40), range(8 * 4080, 8 * 4096)):
            flipped = bytearray(page)
            flipped[bit // 8] ^= 1 << bit % 8
            assert isinstance(decode_segment(flipped, 1 << 20), Damage)
        assert decode_segment(page[:-1], 1 << 20) is Damage.TRUNCATED

    def test_another_segment_size_is_refused(self):
        assert decode_segment(encode_segment(EPOCH, 1 << 20), 1 << 21) is Damage.FIELDS


class TestScan:
    """A segment in memory; `lay` writes records as the store does."""

    SEGMENT_BYTES = 64 * PAGE_BYTES

    def setup_method(self):
        self.segment = bytearray(self.SEGMENT_BYTES)
        self.tail = PAGE_BYTES

    def lay(self, record: Record, epoch: int = EPOCH, state: State = State.COMMITTED) -> int:
        offset, self.tail = self.tail, self.tail + record.record_bytes
        self.segment[offset : offset + record.header_bytes] = encode_header(record, epoch, state)
        self.segment[offset + record.header_bytes : self.tail] = b"\xee" * (
            record.record_bytes - record.header_bytes
        )
        return offset

    def scan(self, epoch: int = EPOCH) -> nvmelog.Scan:
        return scan(
            lambda offset, nbytes: bytes(self.segment[offset : offset + nbytes]), self.SEGMENT_BYTES, epoch
        )

    def test_finds_all_records_and_their_states(self):
        laid = [(self.lay(make_record(n, pages=n), state=State(n)), n) for n in (2, 3)]
        found = self.scan()
        assert [(offset, int(header.state)) for offset, header in found.entries] == laid
        assert (found.torn, found.flipped, found.epoch_max) == (0, 0, EPOCH)

    def test_an_empty_segment_holds_nothing(self):
        assert self.scan() == nvmelog.Scan([])

    def test_a_record_up_to_the_last_byte_is_found(self):
        self.lay(make_record(1, pages=62))
        assert self.tail == self.SEGMENT_BYTES
        assert len(self.scan().entries) == 1

    @pytest.mark.parametrize("bit", [0, 63, 64, 100, 150, 200, 8 * 130, 8 * 4095])
    @pytest.mark.parametrize("victim", [0, 1, 2])
    def test_a_flipped_header_costs_one_record_and_is_counted(self, bit, victim):
        offsets = [self.lay(make_record(n, pages=3)) for n in range(3)]
        self.segment[offsets[victim] + bit // 8] ^= 1 << bit % 8
        found = self.scan()
        assert [offset for offset, _ in found.entries] == offsets[:victim] + offsets[victim + 1 :]
        assert found.flipped == 1

    def test_a_record_whose_header_never_came_to_disk_is_torn_and_hides_no_other(self):
        offsets = [self.lay(make_record(n, pages=3)) for n in range(2)]
        self.segment[offsets[0] : offsets[0] + PAGE_BYTES] = bytes(PAGE_BYTES)
        found = self.scan()
        assert [offset for offset, _ in found.entries] == offsets[1:]
        assert (found.torn, found.flipped) == (1, 0)

    def test_records_of_an_earlier_life_are_not_found_but_their_epoch_is(self):
        for n in range(4):
            self.lay(make_record(n, pages=2), epoch=EPOCH - 1)
        self.tail = PAGE_BYTES
        offset = self.lay(make_record(9, pages=3))
        found = self.scan()
        assert [at for at, _ in found.entries] == [offset] and found.flipped == 0
        assert self.scan(epoch=0) == nvmelog.Scan([], epoch_max=EPOCH)

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.data())
    def test_any_damage_outside_a_header_hides_nothing_and_inside_only_that_record(self, sizes, data):
        self.setup_method()
        laid = [(self.lay(make_record(n, pages=pages)), pages) for n, pages in enumerate(sizes)]
        at = data.draw(st.integers(PAGE_BYTES, self.SEGMENT_BYTES - 1))
        self.segment[at] ^= data.draw(st.integers(1, 255))
        hit = [offset for offset, _ in laid if offset <= at < offset + PAGE_BYTES]
        assert [offset for offset, _ in self.scan().entries] == [o for o, _ in laid if o not in hit]
