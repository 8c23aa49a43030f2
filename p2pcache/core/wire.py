"""The message format, between nodes (zmq) and between an engine and its node (unix socket).

A message is one msgpack array:

    [version, kind, id, op, to, sender, sender_incarnation, view_id, body]

    version   int      PROTOCOL_VERSION; the first field in every version, so that a stranger can
                       always be told apart and be refused by name
    kind      str      "q" a request, "r" its reply, "e" an error reply, "n" a notice (no reply)
    id        int      chosen by the asker, repeated in the reply
    op        str      what is asked; see OPS
    to        int      the incarnation that is meant, 0 for none in particular (law 6)
    sender    str      the asking or answering node's name, "" for an engine
    ...       int      and its incarnation
    view_id   bytes    hash of the sender's View, b"" where it has none
    body      map      per op and direction one schema, below; an error is {"code", "text"}

What there are hundreds of in a message, keys and what is known of them, are records of one size in one bytes
value: see `core/found.py` between nodes, `core/records.py` between an engine and its node.

Everything that arrives is a stranger's: sizes, depths, counts and types are bounded *before* a
value is used, an unknown field is refused, and every defect is a `WireError`, never another
exception. On the unix socket a message is preceded by its length as u32, little endian.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import msgpack

from p2pcache.core import found
from p2pcache.core.layout import LAYERS_MAX
from p2pcache.types import KEY_BYTES, RemoteError, VersionMismatch

PROTOCOL_VERSION = 4
MESSAGE_BYTES_MAX = 16 << 20
CHUNKS_MAX = 65_536
BODIES_MAX = found.BODIES_MAX
PREFILLS_MAX = 64  # of a report: each costs its reader about a millisecond
ADOPT_MAX = 32
HOLDERS_MAX = found.HOLDERS_MAX
META_BYTES_MAX = 4096
TEXT_MAX = 1024
NAME_MAX = 256
CODEC_MAX = 32


class WireError(RemoteError):
    """A message that does not follow the format."""


class Message(NamedTuple):
    kind: str
    id: int
    op: str
    body: Mapping[str, Any]
    to: int = 0
    sender: str = ""
    sender_incarnation: int = 0
    view_id: bytes = b""


# -- schemas: small checkers that raise WireError or return ----------------------------------------

Check = Callable[[Any], None]


def _int(low: int, high: int) -> Check:
    def check(value: Any) -> None:
        if type(value) is not int or not low <= value <= high:
            raise WireError(f"expected an integer from {low} to {high}")

    return check


def _number(value: Any) -> None:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise WireError("expected a finite number")


def _bool(value: Any) -> None:
    if type(value) is not bool:
        raise WireError("expected a bool")


def _text(limit: int = TEXT_MAX) -> Check:
    def check(value: Any) -> None:
        if type(value) is not str or len(value) > limit:
            raise WireError(f"expected text of at most {limit} characters")

    return check


def _bytes(low: int, high: int) -> Check:
    def check(value: Any) -> None:
        if type(value) is not bytes or not low <= len(value) <= high:
            raise WireError(f"expected {low} to {high} bytes")

    return check


def _list(item: Check, limit: int) -> Check:
    def check(value: Any) -> None:
        if type(value) is not list or len(value) > limit:
            raise WireError(f"expected a list of at most {limit}")
        for one in value:
            item(one)

    return check


def _tuple(*items: Check) -> Check:
    def check(value: Any) -> None:
        if type(value) is not list or len(value) != len(items):
            raise WireError(f"expected {len(items)} values")
        for item, one in zip(items, value, strict=True):
            item(one)

    return check


def _map(key: Check, item: Check, limit: int) -> Check:
    def check(value: Any) -> None:
        if type(value) is not dict or len(value) > limit:
            raise WireError(f"expected a map of at most {limit}")
        for k, v in value.items():
            key(k)
            item(v)

    return check


def _optional(item: Check) -> Check:
    def check(value: Any) -> None:
        if value is not None:
            item(value)

    return check


def _record(_may: Mapping[str, Check] = MappingProxyType({}), **fields: Check) -> Check:
    """_may: fields that may be left out."""
    known = {**fields, **_may}

    def check(value: Any) -> None:
        if type(value) is not dict or not fields.keys() <= value.keys() <= known.keys():
            raise WireError(f"expected the fields {', '.join(known) or '(none)'}")
        for name in value:
            try:
                known[name](value[name])
            except WireError as error:
                raise WireError(f"{name}: {error}") from None

    return check


def _table(record: struct.Struct, limit: int) -> Check:
    def check(value: Any) -> None:
        if type(value) is not bytes or len(value) % record.size or len(value) > limit * record.size:
            raise WireError(f"expected at most {limit} records of {record.size} bytes")

    return check


def _anything(value: Any) -> None:
    """Already bounded by the decoder; only ever shown to a person."""


U31, U63, U64 = _int(0, 2**31 - 1), _int(0, 2**63 - 1), _int(0, 2**64 - 1)
KEY = _bytes(KEY_BYTES, KEY_BYTES)
TOKEN = _bytes(16, 16)
NAME = _text(NAME_MAX)
TIER = _int(0, 2)
# content, exact, tokens, nbytes, provenance, base position, codec
BODY = _tuple(KEY, KEY, U31, U63, _int(0, 2), U31, _text(CODEC_MAX))
CHECKSUMS = _list(U64, LAYERS_MAX)
# An open ticket, or the reason why there is none: token, offset, generation, checksums, meta, body
_TICKET = (TOKEN, U63, U63, CHECKSUMS, _bytes(0, META_BYTES_MAX), BODY)
TICKET = _tuple(_text(32), _tuple(*_TICKET))
# One for an encoded body says besides how it is encoded: codec, bytes, a checksum a part
ENCODED_TICKET = _tuple(_text(32), _tuple(*_TICKET, _tuple(_text(32), U63, CHECKSUMS)))
NO_TICKET = _tuple(_text(32), _optional(_number))  # when to ask again, in seconds, where that may help
MEMBER = _record(
    name=NAME,
    incarnation=U63,
    control=_text(),
    boot_id=_text(64),
    transports=_map(_text(16), _text(), 16),
    directory=_text(),
)
DESCRIPTOR = _bytes(0, 1 << 16)
NONE = _record()


def _ticket(value: Any) -> None:
    if type(value) is not list or value[:1] != ["ok"]:
        NO_TICKET(value)
    elif type(value[-1]) is list and len(value[-1]) > len(_TICKET):
        ENCODED_TICKET(value)
    else:
        TICKET(value)


def _texts(value: Any, count: int, limit: int) -> None:
    """A list of texts, looked at all at once."""
    if type(value) is not list or len(value) > count:
        raise WireError(f"expected a list of at most {count}")
    if {*map(type, value)} - {str} or max(map(len, value), default=0) > limit:
        raise WireError(f"expected texts of at most {limit} characters")


def _found(value: Any) -> None:
    """A `found.Table`: the columns' types and lengths here, their records there."""
    if type(value) is not list or len(value) != len(found.Table._fields):
        raise WireError(f"expected {len(found.Table._fields)} columns")
    table = found.Table(*value)
    _texts(table.names, found.MEMBERS_MAX, NAME_MAX)
    _texts(table.codecs, found.CODECS_MAX, CODEC_MAX)
    if {*map(type, (table.incarnations, table.counts, table.bodies, table.holders))} != {bytes}:
        raise WireError("expected columns of bytes")
    if len(table.counts) > CHUNKS_MAX:
        raise WireError(f"expected at most {CHUNKS_MAX} keys")
    defect = found.defect(table)
    if defect:
        raise WireError(defect)


# Tables of packed records, between an engine and its node; `core/records.py` says what is in them.
KEYS = struct.Struct("<16s")
ASK = struct.Struct("<16s16s")
START = struct.Struct("<I")
WANT = struct.Struct("<16s16sIQBIHH")
HOLDER_RECORD = struct.Struct("<HQB")
ANSWER = struct.Struct("<BBHBBBd")
GRANT = struct.Struct("<BHHBQQQd")
NAMES = _list(NAME, 1 << 16)

OPS: dict[str, tuple[Check, Check]] = {
    # between nodes: (request, reply)
    "hello": (_record(member=MEMBER), _record(member=MEMBER)),
    "directory.lookup": (
        _record(contents=_table(KEYS, CHUNKS_MAX)),
        _record(found=_found, unknown=_bool),
    ),
    "directory.publish": (
        _record(bodies=_list(_tuple(BODY, TIER, U63), CHUNKS_MAX), resync=_optional(_bytes(8, 8))),
        _record(accepted=U31),
    ),
    "directory.withdraw": (
        _record(bodies=_list(_tuple(KEY, KEY, U63), CHUNKS_MAX)),
        _record(accepted=U31),
    ),
    "pull.open": (
        # codecs: those that the reader takes; without any it is given raw bodies
        # tokens: one a body, which its ticket may have, so that its bytes can be asked for meanwhile
        _record(
            {"codecs": _list(_text(32), 16), "tokens": _list(TOKEN, CHUNKS_MAX)},
            bodies=_list(KEY, CHUNKS_MAX),
            transport=_text(16),
            deadline_s=_number,
        ),
        _record(tickets=_list(_ticket, CHUNKS_MAX)),
    ),
    "adopt": (
        _record(bodies=_list(BODY, ADOPT_MAX), deadline_s=_number),
        _record(adopted=_list(KEY, ADOPT_MAX)),
    ),
    "pull.close": (_record(tokens=_list(TOKEN, CHUNKS_MAX)), NONE),
    "namespaces": (_record(descriptors=_list(DESCRIPTOR, 256)), _record(descriptors=_list(DESCRIPTOR, 256))),
    "status": (NONE, _anything),
    # between an engine and its node
    "attach": (_record(role=_text(16)), _record(member=MEMBER, nonce=TOKEN, slab_bytes=U63)),
    "lookup": (
        _record(
            chunks=_table(ASK, CHUNKS_MAX),
            starts=_table(START, CHUNKS_MAX),  # where each chunk begins in the prompt, in tokens
            content_reuse=_bool,
            everywhere=_bool,
            deadline_s=_number,
            bytes_within_s=_optional(_number),  # until the bytes must be here; none: no matter when
        ),
        _record(
            names=NAMES,
            answers=_table(ANSWER, CHUNKS_MAX),
            found=_table(WANT, CHUNKS_MAX * BODIES_MAX),
            holders=_table(HOLDER_RECORD, MESSAGE_BYTES_MAX),
            # a fetch that takes longer is slower than computing; none: the prefill is unknown
            patience_s=_optional(_number),
        ),
    ),
    "fetch": (
        _record(
            names=NAMES,
            wants=_table(WANT, CHUNKS_MAX),
            holders=_table(HOLDER_RECORD, MESSAGE_BYTES_MAX),
            deadline_s=_number,
        ),
        # metas: (index of the grant, what was stored beside the body), where there is something
        _record(
            names=NAMES,
            grants=_table(GRANT, CHUNKS_MAX),
            metas=_list(_tuple(U31, _bytes(0, META_BYTES_MAX)), CHUNKS_MAX),
        ),
    ),
    "release": (_record(generations=_list(U63, CHUNKS_MAX)), NONE),
    "reserve": (
        _record(bodies=_list(BODY, CHUNKS_MAX), deadline_s=_number),
        # per body: "ok" and (offset, generation), or the reason why not
        _record(slots=_list(_tuple(_text(32), U63, U63), CHUNKS_MAX)),
    ),
    "commit": (
        _record(slots=_list(_tuple(U63, CHECKSUMS, _bytes(0, META_BYTES_MAX)), CHUNKS_MAX)),
        _record(committed=U31, lost=U63),  # lost: batches to owners that were lost before these
    ),
    "abort": (_record(generations=_list(U63, CHUNKS_MAX)), NONE),
    # told: none was lost since, and all the rest has been sent by the deadline
    "published": (_record(lost=U63, deadline_s=_number), _record(told=_bool)),
    "forget": (_record(bodies=_list(KEY, CHUNKS_MAX)), NONE),
    "pin": (_record(bodies=_list(KEY, CHUNKS_MAX), ttl_s=_number), _record(pinned=U31)),
    "open": (_record(descriptor=DESCRIPTOR), NONE),
    "siblings": (_record(descriptor=DESCRIPTOR), _record(descriptors=_list(DESCRIPTOR, 4096))),
    "mesh": (_record(deadline_s=_number), _anything),
    # prefills: (tokens computed, tokens attended to in all, seconds) each
    "report": (
        _record(
            prefill_tokens_per_s=_optional(_number), prefills=_list(_tuple(U31, U63, _number), PREFILLS_MAX)
        ),
        NONE,
    ),
}
_ERROR = _record(code=_text(32), text=_text(4096))


def encode(message: Message) -> bytes:
    """A message as bytes. Raises WireError where ours would not pass `decode` by its size."""
    m = message
    raw = msgpack.packb(
        [PROTOCOL_VERSION, m.kind, m.id, m.op, m.to, m.sender, m.sender_incarnation, m.view_id, m.body],
        use_bin_type=True,
    )
    if len(raw) > MESSAGE_BYTES_MAX:
        raise WireError(f"a message of {len(raw):,} bytes is over the limit of {MESSAGE_BYTES_MAX:,}")
    return raw


def decode(raw: bytes | memoryview) -> Message:
    """Read a stranger's bytes. Raises WireError or VersionMismatch, nothing else."""
    if len(raw) > MESSAGE_BYTES_MAX:
        raise WireError(f"a message of {len(raw):,} bytes is over the limit of {MESSAGE_BYTES_MAX:,}")
    try:
        fields = msgpack.unpackb(
            raw,
            raw=False,
            use_list=True,
            strict_map_key=True,
            max_str_len=1 << 16,
            max_bin_len=MESSAGE_BYTES_MAX,
            max_array_len=min(CHUNKS_MAX, len(raw)),  # a value takes a byte at least
            max_map_len=4096,
            max_ext_len=0,
        )
    except (ValueError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise WireError(f"not a msgpack message within bounds: {type(error).__name__}") from None
    if type(fields) is not list or not fields or type(fields[0]) is not int:
        raise WireError("not a p2pcache message")
    if fields[0] != PROTOCOL_VERSION:
        raise VersionMismatch(
            f"the other side speaks p2pcache protocol {fields[0]}, this one speaks {PROTOCOL_VERSION}"
        )
    if len(fields) != 9:
        raise WireError("expected 9 values")
    _, kind, id_, op, to, sender, incarnation, view_id, body = fields
    texts, numbers = (kind, op, sender), (id_, to, incarnation)
    if {*map(type, texts)} != {str} or {*map(type, numbers)} != {int} or type(view_id) is not bytes:
        raise WireError("an envelope of other types")
    if len(kind) > 1 or len(op) > 32 or len(sender) > NAME_MAX or len(view_id) > 8:
        raise WireError("an envelope with a field that is too long")
    if min(numbers) < 0 or max(numbers) >= 2**63:
        raise WireError("an envelope with a number that is out of range")
    if kind == "e":
        _ERROR(body)
    elif kind not in ("q", "r", "n") or op not in OPS:
        raise WireError(f"unknown kind {kind!r} or operation {op[:32]!r}")
    else:
        OPS[op][kind == "r"](body)
    return Message(kind, id_, op, body, to, sender, incarnation, view_id)


def peek_id(raw: bytes | memoryview) -> int:
    """The id of a message that `decode` refused, of another version say; 0 where it has none.

    Only the first three fields are read, which stand where ours do in every version.
    """
    start = msgpack.Unpacker(max_buffer_size=64)
    start.feed(raw[:64])
    try:
        if start.read_array_header() < 3:
            return 0
        start.skip()
        start.skip()
        id_ = start.unpack()
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException):
        return 0
    return id_ if type(id_) is int and 0 <= id_ < 2**63 else 0
