"""Asking the directory: one request an owner for a whole prompt."""

from __future__ import annotations

import asyncio

import numpy as np

from p2pcache.core.found import Table
from p2pcache.core.membership import Member, View
from p2pcache.core.records import MISS_CODE
from p2pcache.core.ring import REPLICAS
from p2pcache.io.ports import Lookups
from p2pcache.node.counters import Counters
from p2pcache.node.gather import Heard
from p2pcache.node.shard import Shard
from p2pcache.types import KEY_BYTES, DeadlineExceeded, Miss, RemoteError

Said = tuple[Table, bool] | Miss
"""What an owner knows and whether the rest is unknown to it rather than absent, or why it said nothing."""


class Owners:
    """The other owners and this node's own shard, behind one question."""

    def __init__(self, lookups: Lookups, shard: Shard, counters: Counters):
        self._lookups = lookups
        self._shard = shard
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self.view = View()

    async def ask(self, contents: bytes, deadline_s: float) -> tuple[list[Heard], np.ndarray]:
        """What the owners know of keys, joined, by their place among them; and what it means where they
        know nothing: u8 `[keys]`, as MISS_CODE.

        Each key's first owner is asked, and the second where the first does not answer.
        """
        absent = np.full(len(contents) // KEY_BYTES, MISS_CODE[Miss.OWNER_UNREACHABLE], np.uint8)
        heard: list[Heard] = []
        pending = np.arange(len(absent))
        for rank in range(REPLICAS):
            split = self.view.ring.split_keys(contents, rank)
            unheard = [pending[:0]]
            for at, said in await self._ask_each(split, deadline_s):
                places = pending[at]
                if isinstance(said, Miss):
                    absent[places] = MISS_CODE[said]
                    unheard.append(places)
                else:
                    table, unknown = said
                    absent[places] = MISS_CODE[Miss.UNKNOWN if unknown else Miss.ABSENT]
                    heard.append(Heard(places, table))
            left = np.sort(np.concatenate(unheard))
            if not len(left):
                break
            keys = np.frombuffer(contents, f"V{KEY_BYTES}")
            contents, pending = keys[np.searchsorted(pending, left)].tobytes(), left
        return heard, absent

    async def _ask_each(
        self, by_owner: list[tuple[str, np.ndarray, bytes]], deadline_s: float
    ) -> list[tuple[np.ndarray, Said]]:
        """What each owner says of its keys, with their places. by_owner: as `Ring.split_keys` has them."""
        # Half of what is left, so that a silent first owner leaves time for the second.
        by_s = self._loop.time() + (deadline_s - self._loop.time()) / 2
        out: list[tuple[np.ndarray, Said]] = []
        mine: list[tuple[np.ndarray, bytes]] = []
        asked: list[np.ndarray] = []
        requests: list[tuple[Member, bytes]] = []
        for owner, places, keys in by_owner:
            peer = self.view.members.get(owner)
            if owner == self._shard.me:
                mine.append((places, keys))
            elif peer is None:  # it left while we were getting here
                out.append((places, Miss.OWNER_UNREACHABLE))
            else:
                asked.append(places)
                requests.append((peer, keys))
        self._counters["lookup_rpcs"] += len(requests)
        answers = self._lookups.ask(requests, by_s) if requests else None
        out += [(places, self._shard.lookup(keys)) for places, keys in mine]  # while the others are at it
        for places, said in zip(asked, await answers if answers is not None else (), strict=True):
            if isinstance(said, RemoteError):
                late = isinstance(said, DeadlineExceeded) or self._loop.time() >= by_s
                out.append((places, Miss.DEADLINE if late else Miss.OWNER_UNREACHABLE))
            else:
                out.append((places, said))
        return out
