"""What a node remembers for people: why lookups missed, what is hot, how long things took.

Everything here is bounded, is told once a lookup, fetch or reserve, and only ever shown: nothing the
node does depends on it. `Node.status` carries it as `sight`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from p2pcache.core.heavy import SpaceSaving
from p2pcache.core.histogram import Histogram
from p2pcache.core.membership import View
from p2pcache.core.plans import Tally
from p2pcache.core.tiers import Slot
from p2pcache.types import BodyInfo, ContentKey, Match, Miss, Provenance, Source

if TYPE_CHECKING:
    from p2pcache.node.node import Grant

RECENT_MAX = 64
RECENT_FETCHES_MAX = 16
"""Lookups and fetches that missed something; kept apart, so that floods of one do not hide the other."""
_RECENT_BYTES_MAX = 24 << 10
_ROW_BYTES, _REASON_BYTES = 110, 30  # of a recent miss as JSON: its frame, and each reason at most
HOT_COUNTED = 256
HOT_SHOWN = 16
_REASONS_IN_WORDS = 2
_PEERS_IN_WORDS = 2
_PEER_TEXT_MAX = 32

WORDS: Mapping[str, str] = {
    Miss.ABSENT.value: "no node holds them",
    Miss.UNKNOWN.value: "their owner has just taken over and has not heard from every holder",
    Miss.OWNER_UNREACHABLE.value: "no directory owner of theirs answered",
    Miss.HOLDER_GONE.value: "the holder had evicted them, or restarted",
    Miss.HOLDER_UNREACHABLE.value: "held by a peer that no transport reaches now",
    Miss.DEADLINE.value: "the caller's time was up",
    Miss.CORRUPT.value: "the bytes did not match their checksum and were dropped",
    Miss.NO_ROOM.value: "nothing in the host tier could be evicted for them",
    Miss.BUSY.value: "a limit on work in flight was reached",
    Miss.LAYOUT.value: "held, but in another dtype or layout",
    Miss.EXACT_ONLY.value: "held at another position, and only exact reuse was asked for",
    Miss.CHEAPER_TO_RECOMPUTE.value: "recomputing them is faster than fetching them",
    Miss.NODE_DOWN.value: "the engine had lost its node",
}
"""What each reason of a miss means, said of chunks."""


def explain(chunks: int, misses: Mapping[str, int], peers: Sequence[str] = ()) -> str:
    """Why some of `chunks` were missed, in words: the most frequent reasons, and the peers asked."""
    ranked = sorted(misses.items(), key=lambda m: (-m[1], m[0]))
    parts = [f"{n} of {chunks}: {WORDS.get(reason, reason)}" for reason, n in ranked[:_REASONS_IN_WORDS]]
    rest = sum(n for _, n in ranked[_REASONS_IN_WORDS:])
    if rest:
        parts.append(f"{rest} for other reasons")
    if peers:
        names = [name[:_PEER_TEXT_MAX] for name in peers[:_PEERS_IN_WORDS]]
        more = len(peers) - len(names)
        parts.append(f"asked {', '.join(names)}" + (f" and {more} more" if more else ""))
    return "; ".join(parts)


@dataclass(frozen=True, slots=True)
class Missed:
    """One lookup or fetch that did not get everything. at_s: on the node's clock."""

    at_s: float
    step: str
    chunks: int
    misses: dict[str, int]
    seconds: float
    peers: tuple[str, ...] = ()

    def plain(self, now_s: float) -> dict[str, Any]:
        """For a status. Clocks of hosts differ, so it says how long ago and not when."""
        return {
            "ago_s": round(now_s - self.at_s, 3),
            "step": self.step,
            "chunks": self.chunks,
            "misses": dict(self.misses),
            "seconds": round(self.seconds, 6),
            "why": explain(self.chunks, self.misses, self.peers),
        }


class Sight:
    """One node's memory of what went on. Belongs to the node's loop; `clock` is that loop's."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._chunks = 0
        self._hits: Counter[tuple[Match, Source]] = Counter()
        self._hit_tokens: Counter[Match] = Counter()
        self._misses: Counter[str] = Counter()
        self._fetched = 0
        self._served_tokens: Counter[Provenance] = Counter()
        self._fetch_misses: Counter[str] = Counter()
        self._resident = 0
        self._refused: Counter[str] = Counter()
        self._deadlines = {"lookup": 0, "fetch": 0, "store": 0}
        self._lookup_s = Histogram()
        self._fetch_s = {source: Histogram() for source in (Source.LOCAL, Source.NVME, Source.PEER)}
        self._pull_s: dict[str, Histogram] = {}  # transport -> ...
        self._hot: SpaceSaving[ContentKey] = SpaceSaving(HOT_COUNTED)
        self._ring: tuple[bytes, dict[str, float]] = (b"", {})  # of which View, and what is said of it
        self._recent: deque[Missed] = deque(maxlen=RECENT_MAX)
        self._recent_fetches: deque[Missed] = deque(maxlen=RECENT_FETCHES_MAX)

    # -- what happens ----------------------------------------------------------------------------

    def looked_up(self, plan: Tally, seconds: float) -> None:
        """A lookup has ended with this plan."""
        self._chunks += plan.chunks
        self._lookup_s.observe(seconds)
        self._hits.update(plan.hits)
        self._hit_tokens.update(plan.tokens)
        if plan.misses:
            misses = {reason.value: chunks for reason, chunks in plan.misses.items()}
            self._misses.update(misses)
            self._deadlines["lookup"] += misses.get(Miss.DEADLINE.value, 0)
            self._recent.append(Missed(self._clock(), "lookup", plan.chunks, misses, seconds))

    def looked_up_at_home(self, chunks: int, tokens: int, seconds: float) -> None:
        """A lookup has ended with the exact body of each of its chunks in the host tier."""
        self._chunks += chunks
        self._lookup_s.observe(seconds)
        self._hits[Match.EXACT, Source.LOCAL] += chunks
        self._hit_tokens[Match.EXACT] += tokens

    def fetched_at_home(self, slots: Sequence[Slot], seconds: float) -> None:
        """These were leased out of the host tier, together in so many seconds."""
        self._fetched += len(slots)
        hot, tokens = self._hot, self._served_tokens
        for slot in slots:
            content, _, count, nbytes, provenance, *_ = slot.facts
            hot.observe(content, nbytes, count)
            tokens[provenance] += count
        self._fetch_s[Source.LOCAL].observe(seconds, len(slots))

    def fetched(
        self, bodies: Iterable[BodyInfo], grants: Sequence[Grant], seconds: float, *, chunks: int
    ) -> None:
        """What was not at home of a fetch of `chunks` has ended with a grant for each body, in order."""
        self._fetched += len(grants)
        hot, tokens, fetch_s = self._hot, self._served_tokens, self._fetch_s
        for body, grant in zip(bodies, grants, strict=True):
            if grant.miss is not None:
                continue
            hot.observe(body.content, body.nbytes, body.tokens)
            tokens[body.provenance] += body.tokens
            fetch_s[grant.source].observe(grant.seconds)
            if grant.transport:
                self._pulls_by(grant.transport).observe(grant.seconds)
        misses = _by_reason(g.miss for g in grants if g.miss is not None)
        if misses:
            peers = dict.fromkeys(g.peer for g in grants if g.miss is not None and g.peer)
            self._fetch_misses.update(misses)
            self._deadlines["fetch"] += misses.get(Miss.DEADLINE.value, 0)
            entry = Missed(self._clock(), "fetch", chunks, misses, seconds, tuple(peers))
            self._recent_fetches.append(entry)

    def refused(self, chunks: int, why: Miss) -> None:
        """A fetch, or what of it was over a limit, was answered at once."""
        self._fetched += chunks
        misses = {why.value: chunks}
        self._fetch_misses.update(misses)
        self._recent_fetches.append(Missed(self._clock(), "fetch", chunks, misses, 0.0))

    def reserved(self, answers: Iterable[object]) -> None:
        """A store was answered: slots to write into, `resident`, or reasons for a refusal."""
        for answer in answers:
            if answer == "resident":
                self._resident += 1
            elif isinstance(answer, str):
                self._refused[str(answer)] += 1
                self._deadlines["store"] += answer == Miss.DEADLINE.value

    def _pulls_by(self, transport: str) -> Histogram:
        found = self._pull_s.get(transport)
        if found is None:
            found = self._pull_s[transport] = Histogram()
        return found

    # -- what is shown ---------------------------------------------------------------------------

    def ring(self, me: str, view: View) -> dict[str, float]:
        """`share`: of all entries of the directory, those this node owns. `balance`: that over an equal one.

        Computed once a View.
        """
        if self._ring[0] != view.view_id:
            balance = view.ring.share().get(me, 0.0)
            share = balance / len(view.members) if view.members else 0.0
            self._ring = view.view_id, {"share": share, "balance": balance}
        return dict(self._ring[1])

    def plain(self) -> dict[str, Any]:
        """All of it as plain values, below 32 KiB as JSON. Counts are since the node started.

        Of the lookups: `chunks` = the sum of `hits` + the sum of `misses`. Of the fetches: `fetched` =
        chunks served + the sum of `fetch_misses`. `hottest`: content keys most often served, see
        `core.heavy.Heavy`. `recent`: lookups and fetches that missed something, newest first.
        """
        now_s = self._clock()
        recent: list[dict[str, Any]] = []
        room = _RECENT_BYTES_MAX
        for missed in sorted([*self._recent, *self._recent_fetches], key=lambda m: -m.at_s):
            row = missed.plain(now_s)
            room -= _ROW_BYTES + len(row["why"]) + _REASON_BYTES * len(row["misses"])
            if room < 0:  # rows with every reason there is; the oldest go
                break
            recent.append(row)
        return {
            "chunks": self._chunks,
            "hits": {
                match.value: {
                    source.value: self._hits[match, source]
                    for source in (Source.LOCAL, Source.NVME, Source.PEER)
                }
                for match in (Match.EXACT, Match.CONTENT)
            },
            "hit_tokens": {m.value: self._hit_tokens[m] for m in (Match.EXACT, Match.CONTENT)},
            "misses": dict(self._misses),
            "fetched": self._fetched,
            "served_tokens": {p.name.lower(): self._served_tokens[p] for p in Provenance},
            "fetch_misses": dict(self._fetch_misses),
            "resident": self._resident,
            "refused": dict(self._refused),
            "deadlines": dict(self._deadlines),
            "lookup_seconds": self._lookup_s.plain(),
            "fetch_seconds": {s.value: h.plain() for s, h in self._fetch_s.items()},
            "pull_seconds": {name: h.plain() for name, h in self._pull_s.items()},
            "hottest": [
                {
                    "key": heavy.key.hex(),
                    "served": heavy.count,
                    "error": heavy.error,
                    "bytes": heavy.bytes,
                    "tokens": heavy.tokens,
                }
                for heavy in self._hot.top(HOT_SHOWN)
            ],
            "recent": recent,
        }


def _by_reason(missed: Iterable[Miss]) -> dict[str, int]:
    return {reason.value: n for reason, n in Counter(missed).items()}
