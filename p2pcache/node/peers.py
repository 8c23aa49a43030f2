"""What peers ask of a node over the control plane, by operation."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import TYPE_CHECKING, Any

from p2pcache.core.membership import Member
from p2pcache.node.report import status
from p2pcache.node.wireform import body_from_wire
from p2pcache.types import Holder, RemoteError, Tier

if TYPE_CHECKING:
    from p2pcache.node.node import Node


class Peers:
    """Answers for one node, on its loop."""

    def __init__(self, node: Node):
        self._node = node

    def answer(
        self, op: str, body: Mapping[str, Any], sender: str, incarnation: int
    ) -> Mapping[str, Any] | Awaitable[Mapping[str, Any]]:
        """The reply to one message, at once where nothing has to be waited for. `wire.decode` has checked its
        shape.
        """
        node = self._node
        node.fence.check(sender, incarnation)
        if op == "directory.lookup":
            table, unknown = node.shard.lookup(body["contents"])
            return {"found": table, "unknown": unknown}
        if op in ("directory.publish", "directory.withdraw"):
            return node.shard.handle(op, body, sender, incarnation)
        if op == "pull.open":
            how = {name: body[name] for name in ("transport", "codecs", "tokens") if name in body}
            return node.desk.open(body["bodies"], sender, self._until_s(body), **how)
        if op == "pull.close":
            node.desk.office.close(body["tokens"])
            return {}
        if op == "namespaces":
            node.namespaces.learn(body["descriptors"])
            return {"descriptors": list(node.namespaces)}
        if op == "hello":
            node.on_hello(Member.from_wire(body["member"]))
            return {"member": node.member().to_wire()}
        if op == "adopt":
            return self._adopt(body, Holder(sender, incarnation, Tier.HOST))
        if op == "status":
            return status(node)
        raise RemoteError(f"nodes do not answer {op!r} to each other")

    async def _adopt(self, body: Mapping[str, Any], leaver: Holder) -> Mapping[str, Any]:
        if self._node.draining:
            return {"adopted": []}
        bodies = [body_from_wire(b) for b in body["bodies"]]
        return {"adopted": await self._node.heirs.adopt(bodies, leaver, self._until_s(body))}

    def _until_s(self, body: Mapping[str, Any]) -> float:
        """Until when a peer's question has to be answered: as it says, but no longer than a lease."""
        return self._node.now_s + min(max(body["deadline_s"], 0.0), self._node.config.remote_lease_s)
