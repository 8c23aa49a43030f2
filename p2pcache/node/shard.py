"""This node as an owner: its shard of the directory, and when it may say *absent*.

After a View change an owner may be asked about keys that it has only just got. Until every member
has told it what it holds, or a bound has passed, what it does not know is *unknown*, not *absent*.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from p2pcache.config import NodeConfig
from p2pcache.core.directory import Directory
from p2pcache.core.found import Table
from p2pcache.core.membership import View
from p2pcache.node.wireform import body_from_wire
from p2pcache.types import Holder, RemoteError, Tier


class Shard:
    """The owner's side. Belongs to the node's loop; `clock` is that loop's.

    on_unknown_until: told until when what it does not know is unknown, whenever that changes.
    """

    def __init__(self, me: str, config: NodeConfig, clock: Callable[[], float]):
        self.me = me
        self._clock = clock
        self._resync_s = config.resync_s
        self.directory = Directory(ttl_s=config.directory_ttl_s, tombstone_s=config.tombstone_s)
        self._view = View()
        self._marks: dict[str, bytes] = {}  # member -> the view_id it last re-published for
        self._unknown_until_s = 0.0
        self.on_unknown_until: Callable[[float], None] = lambda until_s: None

    def on_view(self, view: View) -> None:
        self._view = view
        self._marks = {name: mark for name, mark in self._marks.items() if name in view.members}
        self._unknown_until_s = self._clock() + self._resync_s
        self._tell()

    @property
    def warm(self) -> bool:
        """Whether what this shard does not know is really absent."""
        return self._clock() >= self._unknown_until_s or self._all_told()

    def _all_told(self) -> bool:
        others = (name for name in self._view.members if name != self.me)
        return all(self._marks.get(name) == self._view.view_id for name in others)

    def _tell(self) -> None:
        """Whoever answers for this shard on another thread learns when it is warm."""
        self.on_unknown_until(0.0 if self._all_told() else self._unknown_until_s)

    def lookup(self, contents: bytes) -> tuple[Table, bool]:
        """What is known under keys, joined, and whether the rest is unknown rather than absent."""
        return self.directory.table(contents, self._clock(), self._view.has), not self.warm

    def handle(self, op: str, body: Mapping[str, Any], sender: str, incarnation: int) -> dict[str, Any]:
        """A holder's publish or withdraw."""
        if not sender:
            raise RemoteError("a publish names its sender")
        now_s, accepted = self._clock(), 0
        if op == "directory.withdraw":
            gone = Holder(sender, incarnation, Tier.HOST)
            return {"accepted": self.directory.withdraw(gone, map(tuple, body["bodies"]), now_s)}
        by_tier: dict[int, list] = {}
        for raw, tier, seq in body["bodies"]:
            by_tier.setdefault(tier, []).append((body_from_wire(raw), seq))
        for tier, bodies in by_tier.items():
            accepted += self.directory.publish(Holder(sender, incarnation, Tier(tier)), bodies, now_s)
        if body["resync"] is not None:
            self._marks[sender] = body["resync"]
            self._tell()
        return {"accepted": accepted}

    def sweep(self) -> int:
        return self.directory.expire(self._clock())
