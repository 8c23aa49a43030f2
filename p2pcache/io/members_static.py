"""Membership from addresses: meshes without Ray.

Every known address is greeted again and again, and whoever greets us is greeted back, so it is enough
that one of two nodes knows the other. A node that has answered stays a member, as the incarnation
that answered last, also while it is silent: a list knows of no death, and readers lean on their
deadlines and on a key's second owner.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from p2pcache.core.membership import Member
from p2pcache.io.ports import Control
from p2pcache.types import RemoteError

_log = logging.getLogger(__name__)
GREET_S = 1.0
MEMBERS_MAX = 1024


async def greet(control: Control, address: str, me: Member, timeout_s: float = GREET_S) -> Member:
    """Ask the node behind `host:port` who it is. Raises VersionMismatch, DeadlineExceeded, RemoteError."""
    stranger = Member(address, 0, address)  # incarnation 0: whoever runs there now
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    reply = await control.request(stranger, "hello", {"member": me.to_wire()}, deadline_s)
    return Member.from_wire(reply["member"])


class Greeter:
    """Keeps the list of one node. Belongs to the node's loop."""

    def __init__(
        self,
        control: Control,
        addresses: Sequence[str],
        me: Member,
        on_members: Callable[[list[Member]], None],
    ):
        """addresses: control addresses to begin with. on_members: gets all members, this node among them."""
        self._control = control
        self._addresses = dict.fromkeys(a for a in addresses if a != me.control)
        self._me = me
        self._on_members = on_members
        self._known: dict[str, Member] = {}
        self._said: set[str] = set()

    def met(self, stranger: Member) -> None:
        """Somebody has greeted us: greet back from now on."""
        if stranger.control != self._me.control and len(self._addresses) < MEMBERS_MAX:
            self._addresses.setdefault(stranger.control)

    async def run(self) -> None:
        """Greet for ever."""
        while True:
            addresses = list(self._addresses)
            answers = await asyncio.gather(
                *(greet(self._control, a, self._me) for a in addresses), return_exceptions=True
            )
            for address, answer in zip(addresses, answers, strict=True):
                if isinstance(answer, Member):
                    self._known[address] = answer
                elif isinstance(answer, RemoteError):
                    self._say_once(address, f"{address} is no member yet: {answer}")
                else:
                    raise answer
            others = {m.name: m for m in self._known.values()}
            if self._me.name in others:
                self._say_once("name", f"another node calls itself {self._me.name!r} too and is left out")
                del others[self._me.name]
            self._on_members([self._me, *others.values()])
            await asyncio.sleep(GREET_S)

    def _say_once(self, about: str, words: str) -> None:
        if about not in self._said:
            self._said.add(about)
            _log.warning("%s", words)
