"""Between the types and their wire form (lists of plain values; see `core/wire.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from p2pcache.types import BodyInfo, Holder, Provenance, Tier


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
