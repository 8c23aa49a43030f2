"""What an engine process asks of its node: wire form in, node calls, wire form out."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from p2pcache.core.coding import is_layout_meta
from p2pcache.core.records import (
    MISS_CODE,
    SOURCE_CODE,
    Bodies,
    Names,
    pack_leased,
    unpack_asked,
    unpack_starts,
)
from p2pcache.core.tiers import Slot
from p2pcache.core.wire import GRANT
from p2pcache.node.node import Grant, Node
from p2pcache.node.report import mesh_status
from p2pcache.node.session import Session
from p2pcache.node.wireform import body_from_wire
from p2pcache.types import ExactKey, RemoteError, Source

AT_HAND_S = 0.001  # who wants bytes sooner is not served from anywhere


class EngineDesk:
    """Implements the `EngineHandler` port for one node. Budgets arrive as seconds that are left."""

    def __init__(self, node: Node):
        self._node = node
        self._loop = asyncio.get_running_loop()

    def open_session(self) -> Session:
        return self._node.open_session()

    def end_session(self, session: Session) -> None:
        self._node.end_session(session)

    def attach_reply(self) -> dict[str, Any]:
        slab = self._node.ports.slab
        return {"member": self._node.member().to_wire(), "nonce": slab.nonce, "slab_bytes": slab.nbytes}

    async def handle(self, session: Session, op: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """One request of an engine. `wire.decode` has checked its shape."""
        method = getattr(self, "_on_" + op, None)
        if method is None:
            raise RemoteError(f"a node does not answer {op!r} to an engine")
        return await method(session, body)

    def _deadline_s(self, body: Mapping[str, Any]) -> float:
        return self._loop.time() + max(body["deadline_s"], 0.0)

    async def _on_lookup(self, session: Session, body: Mapping[str, Any]) -> dict[str, Any]:
        keys, starts = body["chunks"], unpack_starts(body["starts"])
        chunks = unpack_asked(keys)
        if len(starts) != len(chunks):
            raise RemoteError("a lookup says of every chunk where it begins")
        within_s = body["bytes_within_s"]
        if not body["everywhere"] and (within_s is None or within_s > AT_HAND_S):
            at_home = self._node.home.lookup(chunks)
            if at_home is not None:
                return at_home
        return await self._node.lookup(
            keys,
            chunks,
            content_reuse=body["content_reuse"],
            everywhere=body["everywhere"],
            deadline_s=self._deadline_s(body),
            starts=starts,
            bytes_by_s=self._loop.time() + within_s if within_s is not None else float("inf"),
        )

    async def _on_fetch(self, session: Session, body: Mapping[str, Any]) -> dict[str, Any]:
        wants = Bodies(body["names"], body["wants"], body["holders"])
        admitted = self._node.waiting.admit(wants.count)
        try:
            grants = await self._node.fetch(session, wants.first(admitted), self._deadline_s(body))
        finally:
            self._node.waiting.leave(admitted)
        beyond = wants.count - admitted
        return _grants_to_wire([*grants, *[self._node.refuse(beyond)] * beyond])

    async def _on_release(self, session: Session, body: Mapping[str, Any]) -> dict[str, Any]:
        for generation in body["generations"]:
            session.release(generation)
        return {}

    async def _on_reserve(self, session: Session, body: Mapping[str, Any]) -> dict[str, Any]:
        bodies = [body_from_wire(b) for b in body["bodies"]]
        slots = await self._node.reserve(session, bodies, self._deadline_s(body))
        return {"slots": [[s, 0, 0] if isinstance(s, str) else ["ok", s.offset, s.generation] for s in slots]}

    async def _on_commit(self, session: Session, body: Mapping[str, Any]) -> dict[str, Any]:
        lost = self._node.publisher.lost
        done = [self._node.commit(session, g, tuple(sums), meta) for g, sums, meta in body["slots"]]
        return {"committed": sum(done), "lost": lost}

    async def _on_abort(self, session: Session, body: Mapping[str, Any]) -> dict[str, Any]:
        for generation in body["generations"]:
            self._node.abort(session, generation)
        return {}

    async def _on_forget(self, session: Session, body: Mapping[str, Any]) -> dict[str, Any]:
        for exact in body["bodies"]:
            await self._node.residency.forget(ExactKey(exact))
        return {}

    async def _on_published(self, session: Session, body: Mapping[str, Any]) -> dict[str, Any]:
        sent = await self._node.publisher.flushed(self._deadline_s(body))
        return {"told": sent and self._node.publisher.lost == body["lost"]}

    async def _on_pin(self, session: Session, body: Mapping[str, Any]) -> dict[str, Any]:
        return {"pinned": sum(self._node.pin(ExactKey(e), body["ttl_s"]) for e in body["bodies"])}

    async def _on_open(self, session: Session, body: Mapping[str, Any]) -> dict[str, Any]:
        deadline_s = self._loop.time() + self._node.config.rpc_timeout_s
        await self._node.namespaces.announce(body["descriptor"], self._node.others, deadline_s)
        return {}

    async def _on_siblings(self, session: Session, body: Mapping[str, Any]) -> dict[str, Any]:
        return {"descriptors": [d for d in self._node.namespaces if d != body["descriptor"]]}

    async def _on_mesh(self, session: Session, body: Mapping[str, Any]) -> dict[str, Any]:
        return {"nodes": await mesh_status(self._node, self._deadline_s(body))}

    async def _on_report(self, session: Session, body: Mapping[str, Any]) -> dict[str, Any]:
        prefill = self._node.costs.prefill
        if body["prefill_tokens_per_s"] is not None:
            prefill.say(body["prefill_tokens_per_s"])
        for tokens, attended, seconds in body["prefills"]:
            prefill.observe(tokens, attended, seconds)
        return {}


def _grants_to_wire(grants: Sequence[Slot | Grant]) -> dict[str, Any]:
    names, rows, metas = Names(), [], []
    for i, grant in enumerate(grants):
        slot = grant if isinstance(grant, Slot) else grant.slot
        if slot is not None and (meta := slot.meta) and not is_layout_meta(meta):
            metas.append([i, meta])
        rows.append(pack_leased(grant) if isinstance(grant, Slot) else _grant(grant, names))
    return {"names": names.texts, "grants": b"".join(rows), "metas": metas}


def _grant(g: Grant, names: Names) -> bytes:
    if g.slot is None:
        source, place = Source.RECOMPUTE, (0, 0, 0)
    else:
        source, place = g.source, (g.slot.offset, g.slot.nbytes, g.slot.generation)
    peer, transport = names.code(g.peer), names.code(g.transport)
    return GRANT.pack(SOURCE_CODE[source], peer, transport, MISS_CODE[g.miss], *place, g.seconds)
