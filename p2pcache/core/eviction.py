"""What goes first when the host tier is full: S3-FIFO or LRU, both by bytes and by what a body costs.

A policy orders the resident bodies; the tier asks it for a victim. Bodies that are leased or pinned are
passed over in O(log n) amortised: one that is met at the cold end of its queue is set aside once, and
comes back to that end when its last lease or its pin ends.

*Replicas.* A body that was pulled from a peer goes before all others until it is used a second time here:
its peer still has it, and a mesh that keeps every body once keeps the most.

*Cost.* What a byte saves is `tokens / bytes`, in steps of two: of two bodies used alike, the one that is
coded in half the bytes is kept twice as long. The position is left out, although a chunk far behind in a
prompt costs more to recompute: such chunks are used again less often, and keeping them costs more hits
than it saves (`bench.replay`).

Memory: 32 bytes in each entry, 24 more for LRU's credit, and up to 12 bytes each for two ghosts of an entry.
"""

from __future__ import annotations

import heapq
import itertools
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from typing import Any

from p2pcache.core.ghosts import PAGE_BYTES, Ghosts
from p2pcache.types import BodyInfo

WEIGHT_MAX = 4
"""How many times as much as the cheapest body of the tier one can count in S3-FIFO."""
COST_CLASS_MIN, COST_CLASS_MAX = -16, 15


class Entry:
    """What a policy keeps in each body's own slot: its place in a queue, and its credit.

    The slot adds the others. An entry is in one queue at most.
    """

    __slots__ = ("credit", "newer", "older", "queue")

    body: BodyInfo
    extent_bytes: int
    leases: int
    pinned_until_s: float
    cost: int  # its class, see `Policy.cost_class`
    credit: float
    newer: Any
    older: Any
    queue: Queue | None

    def held(self, now_s: float) -> bool:
        """Whether it is being read, or pinned: then it must stay."""
        return self.leases > 0 or self.pinned_until_s > now_s


class Queue:
    """Entries from the coldest to the hottest, linked through the entries themselves.

    Invariant: what was set aside is colder than all that is linked, in the order of its number.
    """

    __slots__ = ("_ends", "_number", "_pinned", "_ready", "_returned", "_timed", "_waiting", "nbytes")

    def __init__(self) -> None:
        self._ends: Any = Entry()  # of a ring: its `newer` is the coldest, its `older` the hottest
        self._ends.newer = self._ends.older = self._ends
        self._number = itertools.count()
        self._waiting: dict[Entry, int] = {}  # set aside for a lease or a pin -> its number
        self._returned: dict[Entry, int] = {}  # ... which has ended
        self._ready: list[tuple[int, Entry]] = []  # heap of what returned
        self._pinned: list[tuple[float, int, Entry]] = []  # heap of pins' ends
        self._timed: set[tuple[float, int]] = set()  # what is in it, without the entries
        self.nbytes = 0

    def __iter__(self) -> Iterator[Entry]:
        """All entries, coldest first. The queue must not change meanwhile."""
        aside = self._waiting | self._returned
        yield from sorted(aside, key=aside.__getitem__)
        yield from self.linked()

    def linked(self) -> Iterator[Entry]:
        """Entries that were not set aside, coldest first."""
        entry = self._ends.newer
        while entry is not self._ends:
            yield entry
            entry = entry.newer

    def push(self, entry: Entry) -> None:
        """Put an entry that is in no queue at the hot end."""
        entry.queue, entry.newer, entry.older = self, self._ends, self._ends.older
        self._ends.older.newer = entry
        self._ends.older = entry
        self.nbytes += entry.extent_bytes

    def remove(self, entry: Entry) -> None:
        if self._waiting.pop(entry, None) is None and self._returned.pop(entry, None) is None:
            self._unlink(entry)
        entry.queue = None
        self.nbytes -= entry.extent_bytes

    def settled(self, entry: Entry) -> None:
        """The last lease of an entry has ended."""
        number = self._waiting.pop(entry, None)
        if number is not None:
            self._returned[entry] = number
            heapq.heappush(self._ready, (number, entry))

    def coldest(self, now_s: float) -> Entry | None:
        """The coldest entry that is not held, left where it is."""
        while self._pinned and self._pinned[0][0] <= now_s:
            until_s, number, entry = heapq.heappop(self._pinned)
            self._timed.remove((until_s, number))
            if self._waiting.get(entry) == number:
                self.settled(entry)
        while self._ready:
            number, entry = self._ready[0]
            current = self._returned.get(entry) == number
            if current and not entry.held(now_s):
                return entry
            heapq.heappop(self._ready)
            if current:
                del self._returned[entry]
                self._set_aside(entry, number)
        entry = self._ends.newer
        while entry is not self._ends and entry.held(now_s):
            following = entry.newer
            self._unlink(entry)
            self._set_aside(entry, next(self._number))
            entry = following
        return None if entry is self._ends else entry

    def _set_aside(self, entry: Entry, number: int) -> None:
        self._waiting[entry] = number
        timed = entry.pinned_until_s, number
        if not entry.leases and timed not in self._timed:
            self._timed.add(timed)
            heapq.heappush(self._pinned, (entry.pinned_until_s, number, entry))

    def _unlink(self, entry: Entry) -> None:
        entry.older.newer, entry.newer.older = entry.newer, entry.older
        entry.newer = entry.older = None  # no reference cycle is left behind


class Policy(ABC):
    """The order in which resident bodies go. Belongs to one tier; never frees anything by itself."""

    def __init__(self, capacity_bytes: int, weighs_cost: bool = True):
        """weighs_cost: whether bodies with more tokens a byte are kept longer."""
        self.capacity_bytes = capacity_bytes
        self._weighs_cost = weighs_cost
        self._replicas = Queue()

    def admit(self, entry: Entry, replica: bool = False) -> None:
        """A body is resident now. replica: a peer has it too."""
        entry.cost = self.cost_class(entry)
        if replica:
            entry.credit = -1  # its first use is what it came for
            self._replicas.push(entry)
        else:
            self._admit(entry)

    def touch(self, entry: Entry) -> None:
        """Count a use."""
        if entry.queue is not self._replicas:
            self._touch(entry)
        elif entry.credit < 0:
            entry.credit = 0
        else:
            self._replicas.remove(entry)
            self._admit(entry)
            self._touch(entry)

    def settled(self, entry: Entry) -> None:
        """The last lease of a body has ended."""
        if entry.queue is not None:
            entry.queue.settled(entry)

    def remove(self, entry: Entry) -> None:
        """A body is gone."""
        if entry.queue is not None:
            entry.queue.remove(entry)

    def victim(self, now_s: float) -> Entry | None:
        """The body to go next, which nobody reads or has pinned; None where there is none."""
        return self._replicas.coldest(now_s) or self._victim(now_s)

    def coldest(self, now_s: float, count: int) -> list[Entry]:
        """The victim and up to `count - 1` that may go as well, cold ones first."""
        victim = self.victim(now_s)
        if victim is None or victim.queue is None:
            return []
        some = itertools.islice(victim.queue.linked(), count)
        return [victim, *(e for e in some if e is not victim and not e.held(now_s))][:count]

    def worth(self, entry: Entry) -> float:
        """What it would cost to lose a body, in bytes of a cold one. For choosing between neighbours."""
        return entry.extent_bytes * (_REPLICA_WORTH if entry.queue is self._replicas else self._heat(entry))

    @abstractmethod
    def warm(self, entry: Entry) -> None:
        """Make a body the hottest of all, whatever it was."""

    @abstractmethod
    def __iter__(self) -> Iterator[Entry]:
        """All bodies, coldest first. The policy must not change meanwhile."""

    @abstractmethod
    def _admit(self, entry: Entry) -> None: ...

    @abstractmethod
    def _touch(self, entry: Entry) -> None: ...

    @abstractmethod
    def _victim(self, now_s: float) -> Entry | None: ...

    @abstractmethod
    def _heat(self, entry: Entry) -> float:
        """From 1 for a cold body upwards."""

    def cost_class(self, entry: Entry) -> int:
        """log2 of the tokens that a page saves, rounded, and within bounds."""
        if not self._weighs_cost:
            return 0
        saved = round(math.log2((entry.body.tokens or 1) * PAGE_BYTES / entry.extent_bytes))
        return min(max(saved, COST_CLASS_MIN), COST_CLASS_MAX)


class Lru(Policy):
    """Least recently used first; where bodies differ in cost, GreedyDual: a use is worth its cost a byte.

    A body's credit is the credit of the last victim plus its own cost, renewed by each use; the lowest goes.
    Bodies of one cost class are in LRU order by that, so a queue a class is all it takes.

    Source: Young, "The k-server dual and loose competitiveness for paging" (1994); the queues are those of
    Li and Cox, "GD-Wheel" (EuroSys 2015), in their simplest form.
    """

    def __init__(self, capacity_bytes: int, weighs_cost: bool = True):
        super().__init__(capacity_bytes, weighs_cost)
        self._queues: dict[int, Queue] = {}
        self._gone_credit = 0.0  # of the last victim

    def __iter__(self) -> Iterator[Entry]:
        yield from self._replicas
        yield from heapq.merge(*self._queues.values(), key=lambda entry: entry.credit)

    def warm(self, entry: Entry) -> None:
        self.remove(entry)
        self._admit(entry)

    def _admit(self, entry: Entry) -> None:
        cost = entry.cost
        entry.credit = self._gone_credit + 2.0**cost
        self._queues.setdefault(cost, Queue()).push(entry)

    def _touch(self, entry: Entry) -> None:
        self.warm(entry)

    def _victim(self, now_s: float) -> Entry | None:
        cold = [entry for queue in self._queues.values() if (entry := queue.coldest(now_s)) is not None]
        victim = min(cold, key=lambda entry: entry.credit, default=None)
        if victim is not None:
            self._gone_credit = max(self._gone_credit, victim.credit)
        return victim

    def _heat(self, entry: Entry) -> float:
        return 1 + max(entry.credit - self._gone_credit, 0) / 2.0 ** min(self._queues)


class S3Fifo(Policy):
    """Three FIFO queues: *small* for what is new, *main* for what was used, *ghosts* of what has gone.

    A new body is in small. At its cold end, used bodies move on to main and others go; at main's cold end a
    used body goes round again for each use, up to three. A body that comes back while its ghost is there
    enters main. So what is used once passes through without pushing out what is used often.

    A body that costs w times as much a byte as the cheapest one goes round w - 1 times more, in either queue.

    Unlike the original, small's share is not fixed at 10 %: documents want it small, conversations, whose
    next turn comes late, want half of the tier and more (`bench.replay`). A ghost that is met tells which
    queue was too short, and moves the border by the body's size, as ARC does.

    Source: Yang et al., "FIFO queues are all you need for cache eviction" (SOSP 2023); Megiddo and Modha,
    "ARC: a self-tuning, low overhead replacement cache" (FAST 2003).
    """

    SHARE_AT_FIRST = 0.5
    SHARE_MIN = 0.02
    SHARE_MAX = 0.9
    USES_MAX = 3
    STEP_MAX = 8.0

    def __init__(self, capacity_bytes: int, weighs_cost: bool = True):
        super().__init__(capacity_bytes, weighs_cost)
        self._small, self._main = Queue(), Queue()
        self._small_bytes = self.SHARE_AT_FIRST * capacity_bytes
        self._ghosts = Ghosts(capacity_bytes)
        self._classes: Counter[int] = Counter()  # bodies of each cost class

    def __iter__(self) -> Iterator[Entry]:
        yield from self._replicas
        yield from self._small
        yield from self._main

    def admit(self, entry: Entry, replica: bool = False) -> None:
        self._classes[self.cost_class(entry)] += 1
        super().admit(entry, replica)

    def remove(self, entry: Entry) -> None:
        if entry.queue in (self._small, self._main):
            self._ghosts.add(_fingerprint(entry), entry.extent_bytes, entry.queue is self._main)
        cost = entry.cost
        self._classes[cost] -= 1
        if not self._classes[cost]:
            del self._classes[cost]
        super().remove(entry)

    def warm(self, entry: Entry) -> None:
        if entry.queue is not None:
            entry.queue.remove(entry)
        entry.credit = self.USES_MAX * self._weight(entry)
        self._main.push(entry)

    def _weight(self, entry: Entry) -> int:
        return min(1 << (entry.cost - min(self._classes)), WEIGHT_MAX)

    def _admit(self, entry: Entry) -> None:
        entry.credit = self._weight(entry) - 1
        was_main = self._ghosts.take(_fingerprint(entry))
        if was_main is None:
            self._small.push(entry)
            return
        self._adapt(entry.extent_bytes, was_main)
        self._main.push(entry)

    def _adapt(self, nbytes: int, was_main: bool) -> None:
        """A body came back after it had gone from main, or from small: that one should have been longer."""
        small, main = (max(count, 1) for count in self._ghosts.counts)
        step = nbytes * min(max(1.0, small / main if was_main else main / small), self.STEP_MAX)
        wanted = self._small_bytes + (-step if was_main else step)
        low, high = self.SHARE_MIN * self.capacity_bytes, self.SHARE_MAX * self.capacity_bytes
        self._small_bytes = min(max(wanted, low), high)

    def _touch(self, entry: Entry) -> None:
        weight = self._weight(entry)
        entry.credit = min(entry.credit + weight, self.USES_MAX * weight)

    def _victim(self, now_s: float) -> Entry | None:
        while True:
            order = (self._small, self._main)
            if self._small.nbytes <= self._small_bytes:
                order = (self._main, self._small)
            entry = order[0].coldest(now_s) or order[1].coldest(now_s)
            if entry is None or entry.credit <= 0:
                return entry
            self._go_on(entry)

    def _heat(self, entry: Entry) -> float:
        return 1 + entry.credit + (entry.queue is self._main)

    def _go_on(self, entry: Entry) -> None:
        """An entry at a cold end that has credit: it moves on to main, or goes round."""
        queue, weight = entry.queue, self._weight(entry)
        assert queue is not None
        queue.remove(entry)
        if queue is self._small and entry.credit >= weight:
            entry.credit = weight - 1
            self._main.push(entry)
        else:
            entry.credit -= 1
            queue.push(entry)


POLICIES: dict[str, type[Policy]] = {"s3-fifo": S3Fifo, "lru": Lru}


_REPLICA_WORTH = 0.5  # a peer has it as well


def _fingerprint(entry: Entry) -> int:
    """Exact keys are hashes: any eight bytes of one will do."""
    return int.from_bytes(entry.body.exact[:8], "little") or 1
