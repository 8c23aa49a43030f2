"""Handing on what is hot: a node that leaves asks its peers to pull its bodies while it still serves.

Each body goes to the peer that comes first for its key among those that stay, or to the second where
the first will not have it. They pull like any reader, so nothing new can go wrong: a body that does not
get across is a miss later, as it would be had the node been killed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from p2pcache.core.membership import View
from p2pcache.core.ring import Ring
from p2pcache.core.wire import ADOPT_MAX
from p2pcache.io.ports import Control
from p2pcache.node.puller import Puller
from p2pcache.node.residency import Residency
from p2pcache.node.wireform import body_to_wire
from p2pcache.types import BodyInfo, ExactKey, Holder, RemoteError

HEIR_SHARE = 0.25
"""Of an heir's host tier, what one leaver may push out of it; free room comes on top."""
LEAVERS_MAX = 64


async def hand_over(
    bodies: Sequence[BodyInfo], me: str, view: View, control: Control, deadline_s: float
) -> dict[str, int]:
    """Offer bodies, hottest first, until the deadline. Returns counts: `bodies` and `bytes` taken over."""
    heirs = Ring([name for name in view.members if name != me])
    loop = asyncio.get_running_loop()
    taken: set[ExactKey] = set()

    async def offer(heir: str, queue: list[BodyInfo]) -> None:
        for i in range(0, len(queue), ADOPT_MAX):
            left_s = deadline_s - loop.time()
            if left_s <= 0:
                return
            batch = queue[i : i + ADOPT_MAX]
            request = {"bodies": [body_to_wire(b) for b in batch], "deadline_s": left_s}
            try:
                reply = await control.request(view.members[heir], "adopt", request, deadline_s)
            except RemoteError:
                return  # it is gone, or takes no more
            came = {b.exact for b in batch} & set(reply["adopted"])
            if not came:
                return
            taken.update(came)

    for rank in range(2):
        queues: dict[str, list[BodyInfo]] = {}
        for body in bodies:
            owners = heirs.owners(body.content)
            if body.exact not in taken and rank < len(owners):
                queues.setdefault(owners[rank], []).append(body)
        await asyncio.gather(*(offer(heir, queue) for heir, queue in queues.items()))
    over = [b for b in bodies if b.exact in taken]
    return {"bodies": len(over), "bytes": sum(b.nbytes for b in over)}


class Heir:
    """The other end: takes over from nodes that leave, hottest first, and never more than a share.

    What comes first is hottest, so it has to end up as the last to go, and what comes later must not push it
    out again. Belongs to the node's loop.
    """

    def __init__(self, residency: Residency, puller: Puller):
        self._residency = residency
        self._puller = puller
        self._room_bytes: dict[tuple[str, int], int] = {}  # leaver -> what it may still bring
        self._came: dict[tuple[str, int], dict[ExactKey, None]] = {}  # ... and brought, in its order
        self._one_at_a_time = asyncio.Lock()

    async def adopt(self, bodies: Sequence[BodyInfo], leaver: Holder, deadline_s: float) -> list[ExactKey]:
        """Bring bodies here as far as there is room for this leaver; returns those that are here now."""
        try:
            async with asyncio.timeout_at(deadline_s), self._one_at_a_time:
                return await self._adopt(bodies, leaver, deadline_s)
        except TimeoutError:
            return [b.exact for b in bodies if self._residency.where(b.exact) is not None]

    async def _adopt(self, bodies: Sequence[BodyInfo], leaver: Holder, deadline_s: float) -> list[ExactKey]:
        who, tier = (leaver.node, leaver.incarnation), self._residency.tier
        if who not in self._room_bytes:
            while len(self._room_bytes) >= LEAVERS_MAX:
                self._came.pop(oldest := next(iter(self._room_bytes)), None)
                del self._room_bytes[oldest]
            free = tier.capacity_bytes - tier.taken_bytes
            self._room_bytes[who] = max(free, int(HEIR_SHARE * tier.capacity_bytes))
        wanted = []
        for body in bodies:
            if self._residency.where(body.exact) is None:
                size = tier.extent_bytes(body.nbytes)
                if size > self._room_bytes[who]:
                    break
                self._room_bytes[who] -= size
            wanted.append(body)
        await asyncio.gather(*(self._bring(body, leaver, deadline_s) for body in wanted))
        here = [b.exact for b in wanted if self._residency.where(b.exact) is not None]
        came = self._came.setdefault(who, {})
        came.update(dict.fromkeys(here))
        for exact in reversed(came):
            tier.warm(exact)
        return here

    async def _bring(self, body: BodyInfo, leaver: Holder, deadline_s: float) -> None:
        if self._residency.where(body.exact) is None:
            await self._puller.pull(body, (leaver,), deadline_s)
            self._residency.tier.warm(body.exact)  # at once: as a replica it would be the next to go
