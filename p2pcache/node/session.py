"""What one engine process holds at its node: leases, and slots that it is writing.

It ends when the engine's socket does, never by the clock, so that a slow engine never reads a slot
that was given to somebody else.
"""

from __future__ import annotations

import itertools

from p2pcache.core.tiers import HostTier, Slot
from p2pcache.types import InvariantError, TierFull

_ids = itertools.count(1)


class Session:
    """One engine's holdings. Belongs to the node's loop."""

    def __init__(self, tier: HostTier, leases_max: int):
        self.name = f"engine-{next(_ids)}"
        self._tier = tier
        self._leases_max = leases_max
        self._leases: dict[int, list[Slot]] = {}  # generation -> one entry a lease
        self._writing: dict[int, Slot] = {}
        self._count = 0

    @property
    def leases(self) -> int:
        return self._count

    def adopt(self, slot: Slot) -> None:
        """Take over a lease that the node took for this engine. Raises TierFull over the limit."""
        if self._count >= self._leases_max:
            self._tier.release(slot)
            raise TierFull(f"this engine already holds {self._count} leases (client_leases_max)")
        self._leases.setdefault(slot.generation, []).append(slot)
        self._count += 1

    def release(self, generation: int) -> None:
        """End one lease of a slot; an unknown one is the engine's mistake and is ignored."""
        slots = self._leases.get(generation)
        if not slots:
            return
        self._tier.release(slots.pop())
        self._count -= 1
        if not slots:
            del self._leases[generation]

    def write(self, slot: Slot) -> None:
        """The engine may now write this slot."""
        self._writing[slot.generation] = slot

    def written(self, generation: int) -> Slot | None:
        """The engine says that it is done with this slot; None where it never had it."""
        return self._writing.pop(generation, None)

    def end(self) -> None:
        """The engine's process is gone: nothing of its own can write or read any more."""
        for slots in self._leases.values():
            for slot in slots:
                self._tier.release(slot)
        for slot in self._writing.values():
            self._tier.abort(slot)
        self._leases.clear()
        self._writing.clear()
        self._count = 0

    def validate(self) -> None:
        if self._count != sum(len(s) for s in self._leases.values()):
            raise InvariantError("a session miscounts its leases")
