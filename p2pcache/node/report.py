"""What a node says of itself and of the mesh to people. Plain values only."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from p2pcache.types import RemoteError

if TYPE_CHECKING:
    from p2pcache.node.node import Node


def status(node: Node) -> dict[str, Any]:
    """What `p2pcache status` shows of this node."""
    tier, nvme = node.residency.tier, node.ports.nvme
    return {
        "name": node.name,
        "incarnation": node.incarnation,
        "view_id": node.view.view_id.hex(),
        "host_address": node.config.host,
        "members": sorted(node.view.members),
        "cut_off": node.fence.cut_off,
        "draining": node.draining,
        "transports": {t.name: t.description() for t in node.ports.transports},
        "host": {"bytes": tier.taken_bytes, "bytes_max": tier.capacity_bytes, "bodies": len(tier)},
        "nvme": nvme.status() if nvme is not None else None,
        "directory_keys": len(node.shard.directory),
        "warm": node.shard.warm,
        "leases": tier.leases(),
        "tickets": len(node.desk.office),
        "sessions": len(node.sessions),
        "pulls_under_way": len(node.puller.flights),
        "fetch_queue_bytes": node.waiting.nbytes,
        "pull_line_bytes": node.puller.flights.bytes_in_line,
        "counters": node.counters.snapshot(),
        "codecs": node.coder.plain(),
        "wire_codec_bytes": {"out": node.desk.outbox.nbytes, "in": node.puller.inbox.nbytes},
        "planner": node.costs.plain(node.now_s),
        "ring": node.sight.ring(node.name, node.view),
        "tier_bytes": node.residency.tier_bytes(),
        "sight": node.sight.plain(),
    }


async def mesh_status(node: Node, deadline_s: float) -> list[dict[str, Any]]:
    """The status of every member; of one that does not answer, its name and why."""
    members = sorted(node.view.members.values(), key=lambda m: m.name)
    peers = [m for m in members if m.name != node.name]
    replies = await asyncio.gather(
        *(node.ports.control.request(p, "status", {}, deadline_s) for p in peers), return_exceptions=True
    )
    out = [status(node)]
    for peer, reply in zip(peers, replies, strict=True):
        if isinstance(reply, RemoteError):
            out.append({"name": peer.name, "error": str(reply)})
        elif isinstance(reply, BaseException):
            raise reply
        else:
            out.append(dict(reply))
    out += [{"name": name, "error": why} for name, why in node.absent.items()]
    return sorted(out, key=lambda s: s["name"])
