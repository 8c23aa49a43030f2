"""Law 6 at both ends: old incarnations are refused here, and this node holds its tongue when it may be one.

A cut-off node outlives its death: the rest of the mesh has gone on without it, and what it would
publish on its return is about a member that no longer exists. So it stops publishing when its
supervisor has not been heard for a while, and peers refuse by number what comes of an incarnation that
they have seen leave. Serving engines on its own host does no harm: those bytes are still what they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from p2pcache.core.membership import View
from p2pcache.types import Fenced

_PAST_MAX = 4096
_TOLD_OFF_S = 30.0


class Fence:
    """Belongs to the node's loop; `clock` is that loop's."""

    def __init__(self, contact_lost_s: float, clock: Callable[[], float]):
        """contact_lost_s: 0 for a node without a supervisor, or one that shall never fall silent."""
        self._lost_s = contact_lost_s
        self._clock = clock
        self._view = View()
        self._past: dict[tuple[str, int], None] = {}  # incarnations that were members, oldest first
        self._heard_s: float | None = None  # None: no supervisor has ever spoken to this node
        self._told_off_s: float | None = None

    def on_view(self, view: View) -> None:
        _, went = view.changed_since(self._view)
        for name in went:
            self._past[name, self._view.members[name].incarnation] = None
        while len(self._past) > _PAST_MAX:
            del self._past[next(iter(self._past))]
        self._view = view
        self._told_off_s = None  # whoever hands out Views counts this incarnation in

    def check(self, sender: str, incarnation: int) -> None:
        """Raises Fenced for an incarnation that has left. One that is not known yet may be joining."""
        if (sender, incarnation) in self._past and not self._view.has(sender, incarnation):
            raise Fenced(f"incarnation {incarnation:016x} of {sender} is not a member any more")

    @property
    def past(self) -> Iterable[tuple[str, int]]:
        """(name, incarnation) of those that have left."""
        return self._past.keys()

    def contact(self) -> None:
        """The supervisor spoke to this node."""
        self._heard_s, self._told_off_s = self._clock(), None

    def told_off(self) -> None:
        """A peer says that this incarnation is not a member any more. It is believed for a while."""
        self._told_off_s = self._clock()

    @property
    def cut_off(self) -> bool:
        """Whether this node may have been left out of the mesh: it must not publish then."""
        if self._told_off_s is not None and self._clock() < self._told_off_s + _TOLD_OFF_S:
            return True
        if not self._lost_s or self._heard_s is None:
            return False
        return self._clock() > self._heard_s + self._lost_s
