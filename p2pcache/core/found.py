"""What is known of many content keys, as a table of fixed-size records: what owners tell nodes.

A prompt has hundreds of chunks, and an object for each body and holder costs more than the network that
brings them. So they stay bytes from the owner's shard on, and only who looks at one makes it an object.

    names         [name, ...]               who holds anything
    incarnations  a u64 a name              and which incarnation of it
    codecs        [name, ...]
    counts        a byte a key              how many bodies are known under it
    bodies        36 bytes a body, key by key
                  exact key [16], tokens u32, base position u32, nbytes u64, provenance u8, codec u8 (its
                  place in `codecs`), holders u16 (how many)
    holders       3 bytes a holder, body by body
                  member u16 (its place in `names`), tier u8

All numbers are little endian. A body names a holder once. A body's content key is the key it was asked by.
The fields' limits are those of `core/wire.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from p2pcache import _native
from p2pcache.types import KEY_BYTES, BodyInfo, ContentKey, Found, Holder, Provenance, Tier

BODIES_MAX = 8
HOLDERS_MAX = 1024
MEMBERS_MAX = 1 << 16
CODECS_MAX = 1 << 8

_BODY, _HOLDER = struct.Struct("<16sIIQBBH"), struct.Struct("<HB")
_PROVENANCES, _TIERS = tuple(Provenance), tuple(Tier)


class Table(NamedTuple):
    """The columns. As a list it is the wire form; `defect` says what is wrong with a stranger's."""

    names: Sequence[str]
    incarnations: bytes
    codecs: Sequence[str]
    counts: bytes
    bodies: bytes
    holders: bytes

    def members(self) -> list[tuple[str, int]]:
        return list(zip(self.names, struct.unpack(f"<{len(self.names)}Q", self.incarnations), strict=True))

    def objects(self, contents: Iterable[ContentKey]) -> Iterator[tuple[Found, ...]]:
        """The same as objects, key by key. contents: the keys that the table is of."""
        members = self.members()
        rows = list(_HOLDER.iter_unpack(self.holders))
        each = {(member, tier): Holder(*members[member], _TIERS[tier]) for member, tier in set(rows)}
        holders = [each[row] for row in rows]
        bodies = _BODY.iter_unpack(self.bodies)
        at = 0
        for content, count in zip(contents, self.counts, strict=True):
            found = []
            for _ in range(count):
                exact, tokens, base, nbytes, provenance, codec, held = next(bodies)
                body = BodyInfo(
                    content, exact, tokens, nbytes, _PROVENANCES[provenance], base, self.codecs[codec]
                )
                found.append(Found(body, tuple(holders[at : at + held])))
                at += held
            yield tuple(found)


class Writer:
    """Writes a table key by key, as the directory does natively. What it has no room for is left out."""

    def __init__(self) -> None:
        self._members: dict[tuple[str, int], int] = {}
        self._codecs: dict[str, int] = {}
        self._counts = bytearray()
        self._bodies: list[bytes] = []
        self._holders: list[bytes] = []

    def add(self, found: Iterable[Found]) -> None:
        """The next key, and what is known of it."""
        count = 0
        for one in found:
            if count == BODIES_MAX:
                break
            count += self._write(one.body, one.holders)
        self._counts.append(count)

    def _write(self, b: BodyInfo, holders: Iterable[Holder]) -> bool:
        codec = self._codecs.get(b.codec, len(self._codecs))
        carried = not (b.tokens | b.base_position) >> 31 and not b.nbytes >> 63
        if not carried or b.provenance not in _PROVENANCES or codec >= CODECS_MAX:
            return False
        held = []
        for h in holders:
            member = self._members.get((h.node, h.incarnation), len(self._members))
            if h.tier in _TIERS and member < MEMBERS_MAX and len(held) < HOLDERS_MAX:
                self._members[h.node, h.incarnation] = member
                held.append(_HOLDER.pack(member, h.tier))
        if held:
            self._codecs[b.codec] = codec
            numbers = b.tokens, b.base_position, b.nbytes, b.provenance
            self._bodies.append(_BODY.pack(b.exact, *numbers, codec, len(held)))
            self._holders += held
        return bool(held)

    def table(self) -> Table:
        return _table(
            self._members,
            list(self._codecs),
            bytes(self._counts),
            b"".join(self._bodies),
            b"".join(self._holders),
        )


def _table(members: Collection[tuple[str, int]], codecs: list[str], *columns: bytes) -> Table:
    incarnations = struct.pack(f"<{len(members)}Q", *(incarnation for _, incarnation in members))
    return Table([name for name, _ in members], incarnations, codecs, *columns)


def defect(table: Table) -> str:
    """What is wrong with the records of a table whose columns have the right types; empty: nothing."""
    t = table
    if len(t.incarnations) != 8 * len(t.names) or max(t.incarnations[7::8], default=0) > 127:
        return "not an incarnation a name"
    return _native.found_defect(t.counts, t.bodies, t.holders, len(t.names), len(t.codecs), HOLDERS_MAX)


def records_defect(
    counts: bytes, bodies: bytes, holders: bytes, members: int, codecs: int, holders_max: int
) -> str:
    """The twin of `_native.found_defect`: the first defect of the records, by the docstring above."""
    if len(bodies) != _BODY.size * sum(counts) or len(holders) % _HOLDER.size:
        return "the records are not as many as the counts say"
    if any(count > BODIES_MAX for count in counts):
        return "too many bodies under a key"
    body, at = _BODY.iter_unpack(bodies), 0
    held = list(_HOLDER.iter_unpack(holders))
    for _, tokens, base, nbytes, provenance, codec, count in body:
        if tokens >> 31 or base >> 31 or nbytes >> 63 or provenance > 2 or codec >= codecs:
            return "a body's field is out of range"
        if not 0 < count <= holders_max or at + count > len(held):
            return "a body has too few or too many holders"
        named = set()
        for member, tier in held[at : at + count]:
            if member >= members or tier > 2:
                return "a holder's field is out of range"
            if member in named:
                return "a body names a holder twice"
            named.add(member)
        at += count
    return "" if at == len(held) else "the records are not as many as the counts say"


def split_keys(joined: bytes) -> list[Any]:
    """Keys that were joined, of whichever kind, one by one."""
    return [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]
