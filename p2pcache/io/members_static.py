"""Membership from a list of addresses: meshes without Ray.

Every node of the list is greeted again and again; one that has answered stays a member, as the
incarnation that answered last, also while it is silent. A list knows of no death: readers lean on
their deadlines and on a key's second owner.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from p2pcache.core.membership import Member
from p2pcache.io.ports import Control
from p2pcache.types import RemoteError, VersionMismatch

_log = logging.getLogger(__name__)
GREET_S = 1.0


async def greet(control: Control, address: str, me: Member, timeout_s: float = GREET_S) -> Member:
    """Ask the node behind `host:port` who it is. Raises VersionMismatch, DeadlineExceeded, RemoteError."""
    stranger = Member(address, 0, address)  # incarnation 0: whoever runs there now
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    reply = await control.request(stranger, "hello", {"member": me.to_wire()}, deadline_s)
    return Member.from_wire(reply["member"])


async def follow(
    control: Control, addresses: Sequence[str], me: Member, on_members: Callable[[list[Member]], None]
) -> None:
    """Greet the list for ever; `on_members` gets all known members, this node among them, each time."""
    known: dict[str, Member] = {}
    refused: set[str] = set()
    while True:
        answers = await asyncio.gather(*(greet(control, a, me) for a in addresses), return_exceptions=True)
        for address, answer in zip(addresses, answers, strict=True):
            if isinstance(answer, Member):
                known[address] = answer
                refused.discard(address)
            elif isinstance(answer, VersionMismatch) and address not in refused:
                refused.add(address)
                _log.warning("%s is no member: %s", address, answer)
            elif not isinstance(answer, RemoteError):
                raise answer
        on_members([me, *(m for m in known.values() if m.name != me.name)])
        await asyncio.sleep(GREET_S)
