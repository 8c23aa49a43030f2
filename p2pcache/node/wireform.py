"""Between the types and their wire form (lists of plain values; see `core/wire.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from p2pcache.core.coding import Coding
from p2pcache.core.nvmelog import Record
from p2pcache.core.tiers import Slot
from p2pcache.io.ports import Ticket
from p2pcache.types import BodyInfo, Holder, LayoutError, Provenance, Tier


def body_to_wire(body: BodyInfo) -> list[Any]:
    b = body
    return [b.content, b.exact, b.tokens, b.nbytes, int(b.provenance), b.base_position, b.codec]


def body_from_wire(raw: Sequence[Any]) -> BodyInfo:
    content, exact, tokens, nbytes, provenance, base_position, codec = raw
    return BodyInfo(content, exact, tokens, nbytes, Provenance(provenance), base_position, codec)


def holder_to_wire(holder: Holder) -> list[Any]:
    return [holder.node, holder.incarnation, int(holder.tier)]


def holder_from_wire(raw: Sequence[Any]) -> Holder:
    return Holder(raw[0], raw[1], Tier(raw[2]))


class Leave(NamedTuple):
    """A holder's leave to pull a body.

    ticket: for the transport; its bytes and checksums are those of the encoded body where there is a coding.
    checksums: of the raw layers.
    """

    ticket: Ticket
    checksums: tuple[int, ...]
    coding: Coding | None = None


def leave_to_wire(token: bytes, slot: Slot, coding: Coding | None) -> list[Any]:
    leave = [
        token,
        slot.offset,
        slot.generation,
        list(slot.checksums),
        slot.meta,
        body_to_wire(slot.body),
    ]
    return leave if coding is None else [*leave, [coding.codec, coding.nbytes, list(coding.checksums)]]


def leave_from_wire(raw: Sequence[Any], body: BodyInfo, codecs: Sequence[str]) -> Leave | None:
    """A stranger's leave to pull `body`, or None where it is for something else than was asked for.

    The directory's word on a body is a hint; the holder's is not. Where its keys stand (its base position) is
    part of what makes the bytes right, so it has to be what was asked for. codecs: those we take.
    """
    token, offset, generation, checksums, meta, held, *coded = raw
    sums, layers = tuple(checksums), len(checksums)
    if body_from_wire(held) != body or not layers or body.nbytes < layers or body.nbytes % layers:
        return None
    try:
        Record(body, sums, meta)  # what no tier could keep is refused before it comes
    except LayoutError:
        return None
    if not coded:
        return Leave(Ticket(token, offset, body.nbytes, generation, sums, body.exact, meta), sums)
    codec, nbytes, part_sums = coded[0]
    try:
        coding = Coding(codec, nbytes, tuple(part_sums))
        coding.check_fits(body, layers)
    except LayoutError:
        return None
    if codec not in codecs:
        return None
    return Leave(Ticket(token, offset, nbytes, generation, coding.checksums, body.exact, meta), sums, coding)
