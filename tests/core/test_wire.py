"""The wire format: what we say is understood, and nothing a stranger says can hurt."""

from __future__ import annotations

import struct
import tracemalloc

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pcache.core import wire
from p2pcache.core.found import Writer
from p2pcache.core.wire import CHUNKS_MAX, MESSAGE_BYTES_MAX, OPS, PROTOCOL_VERSION, Message, WireError
from p2pcache.types import BodyInfo, Found, Holder, Provenance, Tier, VersionMismatch


def lists(item, limit: int = 3):
    return st.lists(item, max_size=limit)


def row(*items):
    return st.tuples(*items).map(list)


def record(**fields):
    return st.fixed_dictionaries(fields)


u31, u63, u64 = st.integers(0, 2**31 - 1), st.integers(0, 2**63 - 1), st.integers(0, 2**64 - 1)
key = token = st.binary(min_size=16, max_size=16)
seconds = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-5, 5)
text = st.text(st.characters(codec="utf-8"), max_size=16)
meta = st.binary(max_size=8)
tier = st.integers(0, 2)
body = row(key, key, u31, u63, st.integers(0, 2), u31, text)
holder = row(text, u63, tier)


@st.composite
def tables(draw) -> list:
    """The wire form of a table of findings."""
    names = draw(st.lists(text, min_size=1, max_size=3, unique=True))
    writer = Writer()
    for _ in range(draw(st.integers(0, 3))):
        rest = st.tuples(u31, u63, st.sampled_from(Provenance), u31, text)
        infos = [BodyInfo(bytes(16), e, *draw(rest)) for e in draw(lists(key))]
        one = st.tuples(st.sampled_from(names), tier)
        held = st.lists(one, min_size=1, max_size=3, unique_by=lambda h: h[0])
        writer.add([Found(info, tuple(Holder(n, 7, Tier(t)) for n, t in draw(held))) for info in infos])
    return list(writer.table())


ticket = row(st.just("ok"), row(token, u63, u63, lists(u64), meta, body))
coding = row(text, u63, lists(u64))
encoded_ticket = row(st.just("ok"), row(token, u63, u63, lists(u64), meta, body, coding))
no_ticket = row(text.filter(lambda t: t != "ok"), st.none() | st.floats(0, 10))
member = record(
    name=text,
    incarnation=u63,
    control=text,
    boot_id=text,
    transports=st.dictionaries(text, text, max_size=3),
    directory=text,
)
descriptors = record(descriptors=lists(st.binary(max_size=20)))
anything = st.recursive(
    st.none() | st.booleans() | u63 | text | meta,
    lambda inner: lists(inner) | st.dictionaries(text, inner, max_size=3),
    max_leaves=5,
)
nothing = st.just({})
accepted = record(accepted=u31)
names = lists(text)


def table(record: struct.Struct):
    return st.integers(0, 3).flatmap(lambda n: st.binary(min_size=n * record.size, max_size=n * record.size))


SAMPLES = {
    "hello": (record(member=member), record(member=member)),
    "directory.lookup": (
        record(contents=lists(key).map(b"".join)),
        record(found=tables(), unknown=st.booleans()),
    ),
    "directory.publish": (
        record(bodies=lists(row(body, tier, u63)), resync=st.none() | st.binary(min_size=8, max_size=8)),
        accepted,
    ),
    "directory.withdraw": (record(bodies=lists(row(key, key, u63))), accepted),
    "pull.open": (
        record(bodies=lists(key), transport=text, deadline_s=seconds)
        | record(bodies=lists(key), transport=text, deadline_s=seconds, codecs=lists(text))
        | record(bodies=lists(key), transport=text, deadline_s=seconds, tokens=lists(token)),
        record(tickets=lists(ticket | encoded_ticket | no_ticket)),
    ),
    "adopt": (record(bodies=lists(body), deadline_s=seconds), record(adopted=lists(key))),
    "pull.close": (record(tokens=lists(token)), nothing),
    "namespaces": (descriptors, descriptors),
    "status": (nothing, anything),
    "attach": (record(role=text), record(member=member, nonce=token, slab_bytes=u63)),
    "lookup": (
        record(
            chunks=table(wire.ASK),
            starts=table(wire.START),
            content_reuse=st.booleans(),
            everywhere=st.booleans(),
            deadline_s=seconds,
            bytes_within_s=st.none() | seconds,
        ),
        record(
            names=names,
            answers=table(wire.ANSWER),
            found=table(wire.WANT),
            holders=table(wire.HOLDER_RECORD),
            patience_s=st.none() | seconds,
        ),
    ),
    "fetch": (
        record(names=names, wants=table(wire.WANT), holders=table(wire.HOLDER_RECORD), deadline_s=seconds),
        record(names=names, grants=table(wire.GRANT), metas=lists(row(u31, meta))),
    ),
    "release": (record(generations=lists(u63)), nothing),
    "reserve": (record(bodies=lists(body), deadline_s=seconds), record(slots=lists(row(text, u63, u63)))),
    "commit": (record(slots=lists(row(u63, lists(u64), meta))), record(committed=u31, lost=u63)),
    "abort": (record(generations=lists(u63)), nothing),
    "published": (record(lost=u63, deadline_s=seconds), record(told=st.booleans())),
    "forget": (record(bodies=lists(key)), nothing),
    "pin": (record(bodies=lists(key), ttl_s=seconds), record(pinned=u31)),
    "open": (record(descriptor=meta), nothing),
    "siblings": (record(descriptor=meta), descriptors),
    "mesh": (record(deadline_s=seconds), anything),
    "report": (
        record(prefill_tokens_per_s=st.none() | seconds, prefills=lists(row(u31, u63, seconds))),
        nothing,
    ),
}


@st.composite
def messages(draw, ops=tuple(OPS)) -> Message:
    op, kind = draw(st.sampled_from(ops)), draw(st.sampled_from("qrne"))
    if kind == "e":
        content = record(code=text, text=text)
    else:
        content = SAMPLES[op][kind == "r"]
    return Message(
        kind, draw(u63), op, draw(content), draw(u63), draw(text), draw(u63), draw(st.binary(max_size=8))
    )


def survives(raw: bytes) -> Message | None:
    """What `decode` makes of a stranger's bytes; any exception but its own two fails the test."""
    peeked = wire.peek_id(raw)
    assert 0 <= peeked < 2**63
    try:
        message = wire.decode(raw)
    except (WireError, VersionMismatch):
        return None
    assert peeked == message.id
    return message


def test_every_operation_has_a_sample():
    assert SAMPLES.keys() == OPS.keys()


@pytest.mark.parametrize("kind", "qrn")
@pytest.mark.parametrize("op", OPS)
def test_every_operation_makes_a_round_trip(op: str, kind: str):
    @settings(max_examples=8, deadline=None)
    @given(SAMPLES[op][kind == "r"], u63)
    def round_trip(content, id_: int):
        message = Message(kind, id_, op, content, 5, "node", 7, b"viewview")
        raw = wire.encode(message)
        assert wire.decode(raw) == wire.decode(memoryview(raw)) == message
        assert wire.peek_id(raw) == id_

    round_trip()


@settings(max_examples=250, deadline=None)
@given(messages(), st.data())
def test_damage_is_a_wire_error_or_another_valid_message(message: Message, data):
    raw = bytearray(wire.encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw)))
        damage = data.draw(st.sampled_from(["cut", "set", "insert", "delete"]))
        if damage == "cut":
            del raw[at:]
        elif damage == "set":
            raw[at : at + 1] = data.draw(st.binary(min_size=1, max_size=1))
        elif damage == "insert":
            raw[at:at] = data.draw(st.binary(min_size=1, max_size=6))
        else:
            del raw[at : at + data.draw(st.integers(1, 6))]
    got = survives(bytes(raw))
    if got is not None:
        assert wire.decode(wire.encode(got)) == got


@settings(max_examples=60, deadline=None)
@given(messages())
def test_every_truncation_is_refused(message: Message):
    raw = wire.encode(message)
    for stop in range(0, len(raw), max(1, len(raw) // 50)):
        with pytest.raises(WireError):
            wire.decode(raw[:stop])


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=80))
def test_random_bytes_are_refused(raw: bytes):
    assert survives(raw) is None


odd = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | text | meta,
    lambda inner: lists(inner) | st.dictionaries(text | meta | st.integers(0, 9), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=250, deadline=None)
@given(messages(), st.data())
def test_a_field_of_another_type_is_refused_or_another_valid_message(message: Message, data):
    """Well-formed msgpack, so that it is the schemas that are tried and not the decoder."""
    fields = msgpack.unpackb(wire.encode(message), strict_map_key=False)
    spot, at = fields, data.draw(st.integers(1, 8))
    while isinstance(spot[at], list | dict) and spot[at] and data.draw(st.booleans()):
        spot = spot[at]
        at = data.draw(st.sampled_from(list(spot) if isinstance(spot, dict) else range(len(spot))))
    spot[at] = data.draw(odd)
    survives(msgpack.packb(fields))


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1, -1, 2**63])
def test_another_version_is_refused_by_both_numbers(version: int):
    raw = msgpack.packb([version, "q", 77, {"whatever": "comes"}, *range(200)])
    with pytest.raises(VersionMismatch, match=rf"{version}\b.*\b{PROTOCOL_VERSION}\b"):
        wire.decode(raw)


def test_the_id_is_found_in_a_message_of_another_version():
    assert wire.peek_id(msgpack.packb([9, "q", 77])) == 77
    assert wire.peek_id(msgpack.packb([9, "q", 77, "op", {"list": list(range(5000))}])) == 77
    assert wire.peek_id(msgpack.packb([9, "q", 77, *range(200)])) == 77


@pytest.mark.parametrize("fields", [[], [1, "q"], [1, "q", -1], [1, "q", True], [1, "q", "7"], {"id": 7}, 7])
def test_what_has_no_id_has_id_zero(fields):
    assert wire.peek_id(msgpack.packb(fields)) == 0


# -- bounds ----------------------------------------------------------------------------------------

ANNOUNCED = {
    "4 GiB of text": b"\xdb\xff\xff\xff\xff",
    "4 GiB of bytes": b"\xc6\xff\xff\xff\xff",
    "2^31 values": b"\xdd\x80\x00\x00\x00",
    "2^32 pairs": b"\xdf\xff\xff\xff\xff",
    "4 GiB of an extension": b"\xc9\xff\xff\xff\xff\x01",
    "nesting 100,000 deep": b"\x91" * 100_000,
    "maps nested 100,000 deep": b"\x81\xa0" * 100_000,
}
HEADER = b"\x99" + bytes([PROTOCOL_VERSION]) + b"\xa1q\x07\xa6status\x00\xa0\x00\xc4\x00"


@pytest.mark.parametrize("prefix", [b"", HEADER], ids=["alone", "as a body"])
@pytest.mark.parametrize("announced", ANNOUNCED)
def test_what_is_only_announced_takes_no_memory(announced: str, prefix: bytes):
    raw = prefix + ANNOUNCED[announced] + b"x" * 64
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            wire.decode(raw)
        wire.peek_id(raw)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_nested_announcements_within_the_limits_are_bounded():
    """Each level may announce CHUNKS_MAX values: the worst that a small message can ask for."""
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            wire.decode(b"\xdc\xff\xff" * 5000)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 128 << 20


def said(op: str, kind: str, content) -> bytes:
    return wire.encode(Message(kind, 1, op, content))


BODY = [bytes(16), bytes(16), 1, 1, 0, 0, "raw"]
TICKET = [bytes(16), 0, 1, [], b"", BODY]
RECORD = struct.pack("<16sIIQBBH", bytes(16), 1, 0, 1, 0, 0, 1)
HELD = struct.pack("<HB", 0, 1)
TABLE = [["n"], bytes(8), ["raw"], b"\x01", RECORD, HELD]


def told(**changes) -> dict:
    """A directory's reply of one key, changed."""
    fields = "names incarnations codecs counts bodies holders".split()
    return {"found": [changes.get(f, was) for f, was in zip(fields, TABLE, strict=True)], "unknown": False}


def widest() -> dict:
    """Eight bodies of one key, each at its limits and with 1024 holders."""
    exacts = [bytes(15) + bytes([i]) for i in range(8)]
    bodies = [struct.pack("<16sIIQBBH", e, 2**31 - 1, 2**31 - 1, 2**63 - 1, 2, 255, 1024) for e in exacts]
    return told(
        names=["n" * 200] * 65_536,
        incarnations=(b"\xff" * 7 + b"\x7f") * 65_536,
        codecs=["c" * 32] * 256,
        counts=b"\x08",
        bodies=b"".join(bodies),
        holders=b"".join(struct.pack("<HB", 65_535 - i, 2) for i in range(1024)) * 8,
    )


OVER = {
    "codecs": (
        "pull.open",
        "q",
        {"bodies": [], "transport": "tcp", "deadline_s": 1, "codecs": ["lossless"] * 17},
    ),
    "encoded checksums": (
        "pull.open",
        "r",
        {"tickets": [["ok", [*TICKET, ["lossless", 1, [0] * 1025]]]]},
    ),
    "encoded bytes": ("pull.open", "r", {"tickets": [["ok", [*TICKET, ["lossless", -1, []]]]]}),
    "more than an encoded form": ("pull.open", "r", {"tickets": [["ok", [*TICKET, ["l", 1, []], 0]]]}),
    "list": ("release", "q", {"generations": [0] * (CHUNKS_MAX + 1)}),
    "prefills": ("report", "q", {"prefill_tokens_per_s": None, "prefills": [[1, 0, 1.0]] * 65}),
    "descriptors": ("namespaces", "q", {"descriptors": [b""] * 257}),
    "descriptor": ("open", "q", {"descriptor": bytes((1 << 16) + 1)}),
    "bodies of a key": ("directory.lookup", "r", told(counts=b"\x09", bodies=RECORD * 9, holders=HELD * 9)),
    "holders": (
        "directory.lookup",
        "r",
        told(
            names=["n"] * 1025,
            incarnations=bytes(8 * 1025),
            bodies=RECORD[:-2] + struct.pack("<H", 1025),
            holders=b"".join(struct.pack("<HB", i, 1) for i in range(1025)),
        ),
    ),
    "no holder": ("directory.lookup", "r", told(bodies=RECORD[:-2] + bytes(2), holders=b"")),
    "a column too few": ("directory.lookup", "r", {"found": TABLE[:5], "unknown": False}),
    "a column of another type": ("directory.lookup", "r", told(counts="\x01")),
    "a name that is none": ("directory.lookup", "r", told(names=[7])),
    "a name that is too long": ("directory.lookup", "r", told(names=["n" * 257])),
    "a codec that is too long": ("directory.lookup", "r", told(codecs=["c" * 33])),
    "keys of a table": ("directory.lookup", "r", told(counts=bytes(CHUNKS_MAX + 1), bodies=b"", holders=b"")),
    "members of a table": ("directory.lookup", "r", told(names=["n"] * 65_537)),
    "codecs of a table": ("directory.lookup", "r", told(codecs=["raw"] * 257)),
    "an incarnation too few": ("directory.lookup", "r", told(incarnations=b"")),
    "an incarnation over 63 bits": ("directory.lookup", "r", told(incarnations=bytes(7) + b"\x80")),
    "half a key": ("directory.lookup", "q", {"contents": bytes(24)}),
    "keys": ("directory.lookup", "q", {"contents": bytes(16 * (CHUNKS_MAX + 1))}),
    "keys as a list": ("directory.lookup", "q", {"contents": [bytes(16)]}),
    "records": (
        "lookup",
        "q",
        {
            "chunks": bytes(32 * (CHUNKS_MAX + 1)),
            "content_reuse": True,
            "everywhere": True,
            "deadline_s": 1,
        },
    ),
    "part of a record": ("fetch", "q", {"names": [], "wants": bytes(54), "holders": b"", "deadline_s": 1}),
    "list for a table": ("fetch", "q", {"names": [], "wants": [], "holders": b"", "deadline_s": 1}),
    "checksums": ("commit", "q", {"slots": [[1, [0] * 1025, b""]]}),
    "meta": ("commit", "q", {"slots": [[1, [], bytes(4097)]]}),
    "name": ("fetch", "q", {"names": ["n" * 257], "wants": b"", "holders": b"", "deadline_s": 1}),
    "codec": ("reserve", "q", {"bodies": [[*BODY[:6], "c" * 33]], "deadline_s": 1}),
    "key too short": ("forget", "q", {"bodies": [bytes(15)]}),
    "key too long": ("forget", "q", {"bodies": [bytes(17)]}),
    "tier": ("directory.publish", "q", {"bodies": [[BODY, 3, 1]], "resync": None}),
    "provenance": ("reserve", "q", {"bodies": [[*BODY[:4], 3, 0, "raw"]], "deadline_s": 1}),
    "number below zero": ("release", "q", {"generations": [-1]}),
    "number over 63 bits": ("release", "q", {"generations": [2**63]}),
    "bool for a number": ("release", "q", {"generations": [True]}),
    "number for a bool": ("directory.lookup", "r", {"found": TABLE, "unknown": 0}),
    "not a number": ("mesh", "q", {"deadline_s": float("nan")}),
    "infinity": ("mesh", "q", {"deadline_s": float("inf")}),
    "missing field": ("mesh", "q", {}),
    "unknown field": ("mesh", "q", {"deadline_s": 1, "more": 1}),
    "reply for a request": ("pin", "q", {"pinned": 1}),
    "request for a reply": ("pin", "r", {"bodies": [], "ttl_s": 1}),
    "body that is a list": ("published", "q", []),
    "unknown operation": ("directory.format", "q", {}),
    "unknown kind": ("published", "x", {}),
    "error text": ("pin", "e", {"code": "c", "text": "t" * 4097}),
    "pairs of a map": ("status", "r", {str(i): 0 for i in range(4097)}),
    "text": ("status", "r", "t" * ((1 << 16) + 1)),
}


@pytest.mark.parametrize("over", OVER)
def test_what_is_out_of_bounds_is_refused(over: str):
    op, kind, content = OVER[over]
    with pytest.raises(WireError):
        wire.decode(said(op, kind, content))


def test_what_is_at_the_bounds_is_not():
    for op, kind, content in (
        ("release", "q", {"generations": [2**63 - 1] * CHUNKS_MAX}),
        ("fetch", "r", {"names": [], "grants": b"\xff" * wire.GRANT.size * CHUNKS_MAX, "metas": []}),
        ("directory.lookup", "r", told()),
        ("directory.lookup", "r", widest()),
        ("directory.lookup", "q", {"contents": bytes(16 * CHUNKS_MAX)}),
        ("open", "q", {"descriptor": bytes(1 << 16)}),
        ("report", "q", {"prefill_tokens_per_s": None, "prefills": [[1, 0, 1.0]] * 64}),
        ("commit", "q", {"slots": [[1, [2**64 - 1] * 1024, bytes(4096)]]}),
    ):
        assert wire.decode(said(op, kind, content)).body == content


def test_a_message_over_the_limit_is_neither_sent_nor_read():
    with pytest.raises(WireError, match="over the limit"):
        said("status", "r", [bytes(1 << 20)] * 17)
    with pytest.raises(WireError, match="over the limit"):
        wire.decode(bytes(MESSAGE_BYTES_MAX + 1))


@pytest.mark.parametrize("ext", [-1, 1])
def test_msgpack_extensions_are_refused(ext: int):
    raw = msgpack.packb([PROTOCOL_VERSION, "r", 1, "status", 0, "", 0, b"", msgpack.ExtType(5, b"data")])
    with pytest.raises(WireError):
        wire.decode(raw.replace(b"\x05data", bytes([ext & 0xFF]) + b"data"))
