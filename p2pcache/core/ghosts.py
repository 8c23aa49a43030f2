"""What an eviction policy remembers of bodies that have gone: 8-byte fingerprints, 12 bytes each in all.

A table of sets of eight. A ghost has the time at which it came, counted in pages that went before: that ends
it, and no queue is needed. A set that is full of living ones grows the table, up to `ENTRIES_MAX`, and then
loses its oldest. To be forgotten early, or taken for another, is harmless: it is a hint.
"""

from __future__ import annotations

from array import array

PAGE_BYTES = 4096
_STAMP_MASK = 2**32 - 1


class Ghosts:
    """Of two queues, `small` and `main`; a ghost lasts until `capacity_bytes` more have left its queue."""

    WAYS = 8
    ENTRIES_MAX = 1 << 20  # 12 MiB

    def __init__(self, capacity_bytes: int):
        self._pages = max(capacity_bytes // PAGE_BYTES, 1)
        self._clocks = [0, 0]  # pages that went from small, from main
        self.counts = [0, 0]
        """Ghosts of small and of main; those that have ended count until they are overwritten."""
        self._allocate(self.WAYS)

    def __len__(self) -> int:
        return sum(1 for i, stamp in enumerate(self._stamps) if self._prints[i] and self._lives(stamp))

    @property
    def nbytes(self) -> int:
        return len(self._prints) * (self._prints.itemsize + self._stamps.itemsize)

    def add(self, fingerprint: int, nbytes: int, from_main: bool) -> None:
        """Remember a body that went. fingerprint: 64 bits, not 0."""
        self._clocks[from_main] += -(-nbytes // PAGE_BYTES)
        self._put(fingerprint, self._clocks[from_main] << 1 & _STAMP_MASK | from_main)

    def take(self, fingerprint: int) -> bool | None:
        """Forget a body. Returns whether it went from main, None where it is not known."""
        at = self._find(fingerprint)
        if at is None:
            return None
        stamp = self._stamps[at]
        self._clear(at)
        return bool(stamp & 1) if self._lives(stamp) else None

    def _allocate(self, entries: int) -> None:
        self._prints = array("Q", bytes(8 * entries))
        self._stamps = array("I", bytes(4 * entries))
        self.counts[:] = 0, 0

    def _age(self, stamp: int) -> int:
        """Pages that went from the same queue since."""
        return (self._clocks[stamp & 1] - (stamp >> 1)) & (_STAMP_MASK >> 1)

    def _lives(self, stamp: int) -> bool:
        return self._age(stamp) < self._pages

    def _set(self, fingerprint: int) -> range:
        first = fingerprint % (len(self._prints) // self.WAYS) * self.WAYS
        return range(first, first + self.WAYS)

    def _find(self, fingerprint: int) -> int | None:
        ways = self._set(fingerprint)
        try:
            return self._prints.index(fingerprint, ways.start, ways.stop)
        except ValueError:
            return None

    def _clear(self, at: int) -> None:
        if self._prints[at]:
            self.counts[self._stamps[at] & 1] -= 1
            self._prints[at] = 0

    def _put(self, fingerprint: int, stamp: int) -> None:
        at = self._find(fingerprint)
        if at is None:
            ways = self._set(fingerprint)
            at = next((i for i in ways if not self._prints[i] or not self._lives(self._stamps[i])), None)
        if at is None and len(self._prints) < self.ENTRIES_MAX:
            self._grow()
            return self._put(fingerprint, stamp)
        if at is None:
            at = max(ways, key=lambda i: self._age(self._stamps[i]))
        self._clear(at)
        self._prints[at], self._stamps[at] = fingerprint, stamp
        self.counts[stamp & 1] += 1

    def _grow(self) -> None:
        known = [(p, s) for p, s in zip(self._prints, self._stamps, strict=True) if p and self._lives(s)]
        self._allocate(2 * len(self._prints))
        for fingerprint, stamp in known:
            self._put(fingerprint, stamp)
