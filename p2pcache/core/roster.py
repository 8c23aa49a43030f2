"""Who belongs to the mesh: what Ray says of its nodes and what the nodes say of themselves, as a View.

The supervisor's memory without its hands: it is told what was seen, heard and what failed, and says
whom to ask, which View holds and who has to be told of it. A name belongs to one node; a second one
that claims it is kept out until the first has gone. A supervisor that has just started (again) says
nothing before it has heard every node, or has waited `settle_s`: else its first words would throw
members out of a mesh that is well. A member that does not answer stays one: whether a host is alive is
Ray's to say, and a node that is dead is told by another incarnation in its place, or by none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from p2pcache.core.membership import Member, View

Told = tuple[bytes, tuple[tuple[str, str], ...]]
"""What a member follows: a View's id, and who is absent from it and why."""


@dataclass(slots=True)
class _Entry:
    """One live host."""

    name: str
    had_node: bool = False  # a node was there already when this supervisor first saw the host
    member: Member | None = None
    told: Told | None = None
    error: str = ""
    failures: int = 0  # in a row
    retry_s: float = 0.0  # not before
    hopeless: bool = False
    drained: bool = False

    @property
    def known(self) -> bool:
        """Whether it has said, or shown, what it is."""
        return self.member is not None or self.drained or bool(self.error)


@dataclass
class Roster:
    """All times are on one clock of the caller's, in seconds."""

    settle_s: float = 5.0
    retry_s: float = 10.0
    _first_s: float | None = None  # when hosts were first seen
    _entries: dict[str, _Entry] = field(default_factory=dict)

    # -- what happened ---------------------------------------------------------------------------

    def seen(self, names: Mapping[str, str], now_s: float, with_node: Collection[str] = ()) -> list[str]:
        """These hosts (id -> name) are alive, and no others. Returns the ids of those that have gone.

        with_node: ids of hosts that have a node already, which keeps its name against newcomers.
        """
        if self._first_s is None:
            self._first_s = now_s
        gone = [i for i in self._entries if i not in names]
        for node_id in gone:
            del self._entries[node_id]
        for node_id in sorted(names):
            self._entries.setdefault(node_id, _Entry(names[node_id], node_id in with_node))
        self._settle_names()
        return gone

    def heard(self, node_id: str, member: Member, told: Told | None) -> None:
        """A node described itself and what it follows."""
        entry = self._entries.get(node_id)
        if entry is not None:
            entry.member, entry.told = member, told
            entry.error, entry.hopeless, entry.drained, entry.failures = "", False, False, 0

    def failed(self, node_id: str, why: str, *, hopeless: bool, now_s: float) -> None:
        """A node did not come up, or has died. hopeless: it cannot come up with the settings it has."""
        entry = self._entries.get(node_id)
        if entry is not None:
            entry.member = entry.told = None
            entry.error, entry.hopeless = why or "it does not come up", hopeless
            # The first failure of a node that was up is the rule at a restart; more of them are a pattern.
            wait_s = self.retry_s if hopeless else min(2.0**entry.failures - 1.0, self.retry_s)
            entry.failures += 1
            entry.retry_s = now_s + wait_s

    def drained(self, node_id: str) -> None:
        """A node has left the mesh of its own, and its host is still there."""
        entry = self._entries.get(node_id)
        if entry is not None:
            entry.member = entry.told = None
            entry.error, entry.hopeless, entry.drained = "", False, True

    # -- what follows from it --------------------------------------------------------------------

    def due(self, now_s: float) -> list[str]:
        """Ids of the hosts whose node should be asked, or started, now."""
        return [i for i, e in self._entries.items() if e.retry_s <= now_s and not self._clashes(i)]

    def settled(self, now_s: float) -> bool:
        """Whether the View may be told to anybody."""
        if self._first_s is None:
            return False
        return now_s >= self._first_s + self.settle_s or all(e.known for e in self._entries.values())

    def view(self) -> View:
        return View.of(e.member for e in self._entries.values() if e.member is not None)

    def absent(self) -> dict[str, str]:
        """Hosts that have no node in the mesh, and why; a host still on its way is not among them."""
        found: dict[str, str] = {}
        for node_id, entry in self._entries.items():
            if entry.drained:
                found[entry.name] = "drained"
            elif entry.error:
                name = entry.name if not self._clashes(node_id) else f"{entry.name} ({node_id[:6]})"
                found[name] = entry.error
        return found

    def hopeless(self) -> list[str]:
        return [e.name for e in self._entries.values() if e.hopeless]

    def told(self) -> Told:
        """What every member should follow now."""
        return self.view().view_id, tuple(sorted(self.absent().items()))

    def behind(self) -> list[str]:
        """Ids of the members that follow something else."""
        now = self.told()
        return [i for i, e in self._entries.items() if e.member is not None and e.told != now]

    def agreed(self) -> bool:
        """Whether all members follow the same View."""
        view_id = self.view().view_id
        members = [e for e in self._entries.values() if e.member is not None]
        return bool(members) and all(e.told is not None and e.told[0] == view_id for e in members)

    def id_of(self, name: str) -> str | None:
        """The host whose node has this name."""
        return next((i for i, e in self._entries.items() if e.name == name and not self._clashes(i)), None)

    def names(self) -> list[str]:
        return sorted({e.name for e in self._entries.values()})

    # -- names -----------------------------------------------------------------------------------

    def _settle_names(self) -> None:
        for node_id, entry in self._entries.items():
            if self._clashes(node_id):
                entry.member = entry.told = None
                entry.error = f"another host's node has the name {entry.name!r}"
                entry.hopeless = True
            elif entry.error.startswith("another host's node"):
                entry.error, entry.hopeless = "", False

    def _clashes(self, node_id: str) -> bool:
        """Whether another host came first with this name: a member, one with a node, or one seen before."""
        mine = self._entries[node_id]
        same = [i for i, e in self._entries.items() if e.name == mine.name]
        if len(same) == 1:
            return False
        first = max(same, key=lambda i: (self._entries[i].member is not None, self._entries[i].had_node))
        return node_id != first
