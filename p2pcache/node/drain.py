"""Handing on what is hot: a node that leaves asks its peers to pull its bodies while it still serves.

Each body goes to the peer that comes first for its key among those that stay. They pull like any
reader, so nothing new can go wrong: a body that does not get across is a miss later, as it would be
had the node been killed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from p2pcache.core.membership import View
from p2pcache.core.ring import Ring
from p2pcache.io.ports import Control
from p2pcache.node.wireform import body_to_wire
from p2pcache.types import BodyInfo, RemoteError

BATCH = 32  # bodies a request: what is handed over before the deadline is the hottest


async def hand_over(
    bodies: Sequence[BodyInfo], me: str, view: View, control: Control, deadline_s: float
) -> dict[str, int]:
    """Offer bodies, hottest first, until the deadline. Returns counts: `bodies`, `bytes`, `left`."""
    heirs = Ring([name for name in view.members if name != me])
    queues: dict[str, list[BodyInfo]] = {}
    for body in bodies:
        for heir in heirs.owners(body.content)[:1]:
            queues.setdefault(heir, []).append(body)
    loop = asyncio.get_running_loop()

    async def offer(heir: str, queue: list[BodyInfo]) -> list[BodyInfo]:
        taken: list[BodyInfo] = []
        for i in range(0, len(queue), BATCH):
            left_s = deadline_s - loop.time()
            if left_s <= 0:
                break
            batch = queue[i : i + BATCH]
            request = {"bodies": [body_to_wire(b) for b in batch], "deadline_s": left_s}
            try:
                reply = await control.request(view.members[heir], "adopt", request, deadline_s)
            except RemoteError:
                break  # it is gone, or takes no more
            came = set(reply["adopted"])
            taken += [b for b in batch if b.exact in came]
        return taken

    taken = [b for part in await asyncio.gather(*(offer(h, q) for h, q in queues.items())) for b in part]
    return {"bodies": len(taken), "bytes": sum(b.nbytes for b in taken), "left": len(bodies) - len(taken)}
