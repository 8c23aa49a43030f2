"""The most frequent keys of a stream in bounded memory: Space-Saving.

At most `capacity` keys are counted. A key that is not among them takes the place of the least frequent
one and inherits its count as its possible error. So no count is too low, none is too high by more than
its `error`, and every key seen more than `total / capacity` times is among those counted.

Source: Metwally, Agrawal and El Abbadi, "Efficient computation of frequent and top-k elements in data
streams" (2005). Keys of one count stand in one bucket, so that each observation takes constant time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K")


@dataclass(slots=True)
class Heavy(Generic[K]):
    """A counted key. It was seen at least `count - error` and at most `count` times.

    bytes, tokens: what came with it since it has been counted, so never too much.
    """

    key: K
    count: int
    error: int = 0
    bytes: int = 0
    tokens: int = 0


class SpaceSaving(Generic[K]):
    """Counts the heavy hitters of a stream of keys."""

    def __init__(self, capacity: int):
        """capacity: keys counted at a time, at least 1."""
        if capacity < 1:
            raise ValueError("a count of heavy hitters needs room for one key at least")
        self.capacity = capacity
        self.total = 0
        self._entries: dict[K, Heavy[K]] = {}
        self._buckets: dict[int, dict[K, None]] = {}  # count -> its keys, the first to get there first
        self._least = 0  # the smallest count there is

    def __len__(self) -> int:
        return len(self._entries)

    def observe(self, key: K, nbytes: int = 0, tokens: int = 0) -> None:
        """One more occurrence of `key`, with its bytes and tokens."""
        self.total += 1
        entry = self._entries.get(key)
        if entry is not None:
            self._leave(entry)
        elif len(self._entries) < self.capacity:
            entry = self._entries[key] = Heavy(key, 0)
            self._least = 1
        else:
            least = self._least
            loser = next(iter(self._buckets[least]))
            self._leave(self._entries.pop(loser))
            entry = self._entries[key] = Heavy(key, least, least)
        entry.count += 1
        entry.bytes += nbytes
        entry.tokens += tokens
        self._buckets.setdefault(entry.count, {})[key] = None

    def top(self, count: int) -> list[Heavy[K]]:
        """The most frequent keys, most frequent first. The entries are live: read them at once."""
        ranked = sorted(self._entries.values(), key=lambda e: (-e.count, e.error))
        return ranked[:count]

    def _leave(self, entry: Heavy[K]) -> None:
        """Take an entry out of its bucket; it comes back with a count that is one higher."""
        bucket = self._buckets[entry.count]
        del bucket[entry.key]
        if not bucket:
            del self._buckets[entry.count]
            if entry.count == self._least:  # nothing is less than where this one goes
                self._least += 1
