"""Who owns a key: weighted rendezvous hashing of 16,384 slots over a View.

Every (slot, member) pair has a score; a slot's owners are the members with the k highest. There
are no virtual nodes to collide, the top k *is* the replica list, and a member that joins or leaves
moves only the slots that it wins or loses. Scores hash the member's *name*: one that restarts
under its name gets the same slots back.

Source: Thaler and Ravishankar, "Using name-based mappings to increase hit rates" (1998); the
logarithmic weighting is Schindelhauer and Schomaker, "Weighted distributed hash tables" (2005).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from blake3 import blake3

from p2pcache import _native
from p2pcache.types import ContentKey

SLOTS = 16_384
REPLICAS = 2


def slot_of(key: ContentKey) -> int:
    """The slot of a content key: its first 14 bits."""
    return int.from_bytes(key[:2], "big") >> 2


class Ring:
    """The owners of every slot for one View. Immutable; computed once a View."""

    def __init__(
        self, names: Sequence[str], weights: Sequence[float] | None = None, replicas: int = REPLICAS
    ):
        """names: distinct member names. weights: relative shares, all above 0 (default: equal)."""
        self.names = tuple(sorted(names))
        if len(set(self.names)) != len(self.names):
            raise ValueError("member names must be distinct")
        by_name = dict(zip(names, weights or [1.0] * len(names), strict=True))
        if not all(0 < weight < float("inf") for weight in by_name.values()):
            raise ValueError("a member's weight must be above 0 and finite")
        count = min(replicas, len(self.names))
        slots = np.arange(SLOTS, dtype=np.uint64)
        scores = np.empty((len(self.names), SLOTS))
        for row, name in enumerate(self.names):
            salt = np.uint64(int.from_bytes(blake3(name.encode()).digest(8), "little"))
            # 53 bits in (0, 1): -w / ln(u) orders members as a race of exponential clocks does.
            unit = ((_mix(_mix(slots) ^ salt) >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53
            scores[row] = -by_name[name] / np.log(unit)
        # A stable sort by (score, name) makes equal scores resolve alike in every process.
        self._owners = np.argsort(-scores, axis=0, kind="stable")[:count].T.astype(np.int32, order="C")

    def owners(self, key: ContentKey) -> tuple[str, ...]:
        """The key's owners, the first asked first. Empty where the View is empty.

        Which of a slot's owners is asked first is up to the key: so each gets its share of the
        questions of all slots that it owns, which evens out the load as twice the slots would.
        """
        if not self.names:
            return ()
        slot = self._owners[slot_of(key)]
        first = key[2] % len(slot)
        return tuple(self.names[i] for i in (*slot[first:], *slot[:first]))

    def split(self, keys: np.ndarray, rank: int) -> list[tuple[str, np.ndarray]]:
        """Many keys by the owner that is asked at this rank, 0 first: each with the places of its keys.

        keys: u8 `[n, 16]`. Empty where keys have no such owner.
        """
        count = self._owners.shape[1]
        if rank >= count or not len(keys):
            return []
        slots = (keys[:, 0].astype(np.int64) << 8 | keys[:, 1]) >> 2
        owner = self._owners[slots, (keys[:, 2] % count + rank) % count]
        order = np.argsort(owner, kind="stable")
        cuts = np.flatnonzero(np.diff(owner[order])) + 1
        return [(self.names[owner[places[0]]], places) for places in np.split(order, cuts)]

    def split_keys(self, keys: bytes, rank: int) -> list[tuple[str, np.ndarray, bytes]]:
        """`split` of keys, joined, in one native pass: each owner with the places of its keys, and these."""
        count = self._owners.shape[1]
        if rank >= count or not keys:
            return []
        split = _native.split_by_owner(keys, self._owners, count, len(self.names), rank)
        return [(self.names[owner], np.frombuffer(places, np.int64), own) for owner, places, own in split]

    def share(self) -> dict[str, float]:
        """Each member's share of the entries and questions over an equal one: 1.0 is perfect balance."""
        if not self.names:
            return {}
        counts = np.bincount(self._owners.ravel(), minlength=len(self.names))
        return {
            n: float(c) * len(self.names) / self._owners.size for n, c in zip(self.names, counts, strict=True)
        }


def _mix(x: np.ndarray) -> np.ndarray:
    """A 64-bit finaliser (Stafford's variant 13 of MurmurHash3's)."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
