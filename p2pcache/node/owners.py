"""Asking the directory: one request an owner for a whole prompt, and what all answers add up to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from p2pcache.core.directory import BODIES_PER_KEY_MAX
from p2pcache.core.membership import View
from p2pcache.core.planner import rank_bodies
from p2pcache.io.ports import Control
from p2pcache.node.counters import Counters
from p2pcache.node.shard import Shard
from p2pcache.node.wireform import found_from_wire
from p2pcache.types import BodyInfo, ContentKey, ExactKey, Found, Holder, Miss, RemoteError


class Sightings:
    """Bodies and their holders as far as anybody has said so, by content key."""

    def __init__(self, me: str, holds: Callable[[ExactKey], bool]):
        """holds: whether this node has a body now; what others say of this node counts only then."""
        self._me = me
        self._holds = holds
        self._bodies: dict[ContentKey, dict[ExactKey, BodyInfo]] = {}
        self._holders: dict[ExactKey, dict[str, Holder]] = {}

    def add(self, content: ContentKey, found: Iterable[Found]) -> None:
        """Take in what was said under a content key. A body of another content is nonsense and left out."""
        for one in found:
            if one.body.content != content:
                continue
            for holder in one.holders:
                if holder.node == self._me and not self._holds(one.body.exact):
                    continue
                # The first word stands: this node speaks first of itself, and knows its own tier best.
                self._holders.setdefault(one.body.exact, {}).setdefault(holder.node, holder)
                self._bodies.setdefault(content, {})[one.body.exact] = one.body

    def has(self, content: ContentKey, exact: ExactKey) -> bool:
        return exact in self._bodies.get(content, {})

    def under(self, content: ContentKey, exact: ExactKey) -> tuple[Found, ...]:
        """What is known of a chunk, best first, a bounded few: popular passages stand in many contexts."""
        bodies = self._bodies.get(content, {})
        found = (Found(body, tuple(self._holders[key].values())) for key, body in bodies.items())
        return tuple(rank_bodies(found, exact)[:BODIES_PER_KEY_MAX])


class Owners:
    """The other owners and this node's own shard, behind one question."""

    def __init__(self, control: Control, shard: Shard, counters: Counters):
        self._control = control
        self._shard = shard
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self.view = View()

    async def ask(
        self, contents: Iterable[ContentKey], sightings: Sightings, deadline_s: float
    ) -> dict[ContentKey, Miss]:
        """Add what the owners know to `sightings`; returns what it means where they know nothing.

        Each key's first owner is asked, and the second where the first does not answer.
        """
        absent: dict[ContentKey, Miss] = dict.fromkeys(contents, Miss.OWNER_UNREACHABLE)
        pending = list(absent)
        for rank in range(2):
            by_owner: dict[str, list[ContentKey]] = {}
            for content in pending:
                owners = self.view.ring.owners(content)
                if rank < len(owners):
                    by_owner.setdefault(owners[rank], []).append(content)
            results = await asyncio.gather(
                *(self._ask_one(owner, keys, deadline_s) for owner, keys in by_owner.items())
            )
            pending = []
            for keys, result in zip(by_owner.values(), results, strict=True):
                if isinstance(result, Miss):
                    absent.update(dict.fromkeys(keys, result))
                    pending += keys
                    continue
                lists, unknown = result
                for content, found in zip(keys, lists, strict=True):
                    absent[content] = Miss.UNKNOWN if unknown else Miss.ABSENT
                    sightings.add(content, found)
        return absent

    async def _ask_one(
        self, owner: str, contents: list[ContentKey], deadline_s: float
    ) -> tuple[list[list[Found]], bool] | Miss:
        if owner == self._shard.me:
            return self._shard.lookup(contents)
        peer = self.view.members.get(owner)
        if peer is None:  # it left while we were getting here
            return Miss.OWNER_UNREACHABLE
        self._counters["lookup_rpcs"] += 1
        # Half of what is left, so that a silent first owner leaves time for the second.
        by_s = self._loop.time() + (deadline_s - self._loop.time()) / 2
        try:
            reply = await self._control.request(peer, "directory.lookup", {"contents": contents}, by_s)
        except RemoteError:
            return Miss.DEADLINE if self._loop.time() >= by_s else Miss.OWNER_UNREACHABLE
        if len(reply["found"]) != len(contents):
            return Miss.OWNER_UNREACHABLE
        return [[found_from_wire(f) for f in found] for found in reply["found"]], reply["unknown"]
