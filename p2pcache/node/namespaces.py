"""The namespaces that the mesh knows of: they explain why something was not found, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence

from p2pcache.core.membership import Member
from p2pcache.io.ports import Control
from p2pcache.types import RemoteError

DESCRIPTORS_MAX = 256


class Namespaces:
    """Descriptors, a bounded number, oldest first."""

    def __init__(self, control: Control):
        self._control = control
        self._known: dict[bytes, None] = {}

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._known)

    def learn(self, descriptors: Sequence[bytes]) -> None:
        for descriptor in descriptors:
            self._known[descriptor] = None
        while len(self._known) > DESCRIPTORS_MAX:
            del self._known[next(iter(self._known))]

    async def announce(self, descriptor: bytes, peers: Sequence[Member], deadline_s: float) -> None:
        """An engine opened a namespace: tell the peers, and learn theirs."""
        self.learn([descriptor])
        requests = (
            self._control.request(p, "namespaces", {"descriptors": [descriptor]}, deadline_s) for p in peers
        )
        for reply in await asyncio.gather(*requests, return_exceptions=True):
            if isinstance(reply, Mapping):
                self.learn(reply["descriptors"])
            elif not isinstance(reply, RemoteError):
                raise reply
