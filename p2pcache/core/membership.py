"""Who is in the mesh: join and leave events in, immutable Views out.

A View is the set of live `(name, incarnation)` members. `view_id` is a hash of that set, so two
nodes with the same id agree on every owner, without any of them having counted versions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from blake3 import blake3

from p2pcache.core.ring import Ring

VIEW_ID_BYTES = 8


@dataclass(frozen=True)
class Member:
    """A live node, as it described itself when it came up.

    incarnation: random, new at every start; compared for equality only.
    control: `host:port` of its control socket.
    boot_id: names the running kernel; equal ids can share memory.
    transports: transport name -> address, only those it listens on.
    directory: where its shard is asked, as `io/lookups.py` says; "" where by the control plane.
    """

    name: str
    incarnation: int
    control: str
    boot_id: str = ""
    transports: Mapping[str, str] = field(default_factory=dict)
    directory: str = ""

    def to_wire(self) -> dict:
        return {
            "name": self.name,
            "incarnation": self.incarnation,
            "control": self.control,
            "boot_id": self.boot_id,
            "transports": dict(self.transports),
            "directory": self.directory,
        }

    @staticmethod
    def from_wire(raw: Mapping) -> Member:
        return Member(
            raw["name"],
            raw["incarnation"],
            raw["control"],
            raw["boot_id"],
            dict(raw["transports"]),
            raw["directory"],
        )


@dataclass(frozen=True)
class View:
    """The live members at one moment. Immutable; its ring is computed once, when first asked."""

    members: Mapping[str, Member] = field(default_factory=dict)

    @staticmethod
    def of(members: Iterable[Member]) -> View:
        return View({m.name: m for m in members})

    @cached_property
    def view_id(self) -> bytes:
        hasher = blake3(b"view")
        for name in sorted(self.members):
            encoded = name.encode()
            hasher.update(len(encoded).to_bytes(4, "big") + encoded)
            hasher.update(self.members[name].incarnation.to_bytes(8, "big"))
        return hasher.digest(VIEW_ID_BYTES)

    @cached_property
    def ring(self) -> Ring:
        return Ring(list(self.members))

    def has(self, name: str, incarnation: int) -> bool:
        """Whether exactly this incarnation is live. Older and newer ones are strangers (law 6)."""
        member = self.members.get(name)
        return member is not None and member.incarnation == incarnation

    def changed_since(self, old: View) -> tuple[frozenset[str], frozenset[str]]:
        """Names that came (or came back as a new incarnation), and names that went (or restarted)."""
        came = frozenset(n for n, m in self.members.items() if not old.has(n, m.incarnation))
        went = frozenset(n for n, m in old.members.items() if not self.has(n, m.incarnation))
        return came, went
