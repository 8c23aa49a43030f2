"""What an engine process asks of its node: wire form in, node calls, wire form out."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from p2pcache.node.node import Answer, Grant, Node
from p2pcache.node.session import Session
from p2pcache.node.wireform import body_from_wire, body_to_wire, found_to_wire, holder_from_wire
from p2pcache.types import BodyInfo, ContentKey, ExactKey, RemoteError, Source


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
        if len(body["starts"]) != len(body["chunks"]):
            raise RemoteError("a lookup says of every chunk where it begins")
        within_s = body["bytes_within_s"]
        found = await self._node.lookup(
            [(ContentKey(c), ExactKey(e)) for c, e in body["chunks"]],
            content_reuse=body["content_reuse"],
            everywhere=body["everywhere"],
            deadline_s=self._deadline_s(body),
            starts=body["starts"],
            bytes_by_s=self._loop.time() + within_s if within_s is not None else float("inf"),
        )
        return {"answers": [_answer_to_wire(a) for a in found.answers], "patience_s": found.patience_s}

    async def _on_fetch(self, session: Session, body: Mapping[str, Any]) -> dict[str, Any]:
        wants = [
            (body_from_wire(b), tuple(holder_from_wire(h) for h in holders)) for b, holders in body["wants"]
        ]
        grants = await self._node.fetch(session, wants, self._deadline_s(body))
        return {"grants": [_grant_to_wire(g) for g in grants]}

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
        await self._node.publisher.flushed()
        return {"told": self._node.publisher.lost == body["lost"]}

    async def _on_pin(self, session: Session, body: Mapping[str, Any]) -> dict[str, Any]:
        return {"pinned": sum(self._node.pin(ExactKey(e), body["ttl_s"]) for e in body["bodies"])}

    async def _on_open(self, session: Session, body: Mapping[str, Any]) -> dict[str, Any]:
        deadline_s = self._loop.time() + self._node.config.rpc_timeout_s
        await self._node.announce(body["descriptor"], deadline_s)
        return {}

    async def _on_siblings(self, session: Session, body: Mapping[str, Any]) -> dict[str, Any]:
        return {"descriptors": [d for d in self._node.descriptors if d != body["descriptor"]]}

    async def _on_mesh(self, session: Session, body: Mapping[str, Any]) -> dict[str, Any]:
        return {"nodes": await self._node.mesh_status(self._deadline_s(body))}

    async def _on_report(self, session: Session, body: Mapping[str, Any]) -> dict[str, Any]:
        prefill = self._node.costs.prefill
        if body["prefill_tokens_per_s"] is not None:
            prefill.say(body["prefill_tokens_per_s"])
        for tokens, attended, seconds in body["prefills"]:
            prefill.observe(tokens, attended, seconds)
        return {}


def _answer_to_wire(answer: Answer) -> list[Any]:
    choice = answer.choice
    body: BodyInfo | None = choice.body
    return [
        choice.match.value,
        choice.source.value,
        choice.holders[0].node if choice.holders else "",
        None if body is None else body_to_wire(body),
        [found_to_wire(f) for f in answer.found],
        choice.cost_s,
        "" if choice.miss is None else choice.miss.value,
    ]


def _grant_to_wire(grant: Grant) -> list[Any]:
    slot, source = grant.slot, grant.source if grant.slot is not None else Source.RECOMPUTE
    return [
        source.value,
        grant.peer,
        grant.transport,
        None if slot is None else [slot.offset, slot.nbytes, slot.generation],
        b"" if slot is None else slot.meta,
        "" if grant.miss is None else grant.miss.value,
        grant.seconds,
    ]
