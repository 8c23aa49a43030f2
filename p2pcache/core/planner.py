"""Where each chunk of a prompt comes from: what was found and what was measured in, a choice per chunk out.

All chunks are planned together, because they share lines: of two pulls from one peer the second is there
after both, and pulls from different peers share this node's inlet. An engine starts to compute what is
missing when the last byte has come, so a plan takes *the time of the slowest line plus the time to compute
the rest*. The planner gives each chunk to the line that would have it first, orders all by the time at which
they would be here, and waits as long as waiting pays. Waiting for nothing and waiting for everything are two
of the plans compared, so the plan is never worse than either, by its own estimates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

from p2pcache.core.rates import Inlet, Meter, Prefill, Rate
from p2pcache.types import BodyInfo, ExactKey, Found, Holder, Match, Miss, Provenance, Source, Tier

_PRIOR = {
    # (seconds, bytes a second) before anything was measured; deliberately modest
    "nvme": (2e-4, 1e9),
    "shm": (5e-4, 3e9),
    "tcp": (1e-3, 1e9),
    "ucx": (1e-3, 1e9),
}
LINES = ("tcp", "ucx")  # ways that share this node's inlet
LOCAL_S = 2e-6
PATIENCE = 1.5
"""A fetch is given up after so many times what computing its chunks would take: then the plan was wrong."""
PATIENCE_MIN_S = 0.02
PEERS_SHOWN = 32


class Costs:
    """What this node has measured: a rate for each (way, peer), and its engine's prefill.

    The ways are the transports, and `nvme`: this node's own tier. A peer's is taken to be as fast.
    """

    def __init__(self, prefill_tokens_per_s: float = 0.0):
        self.prefill = Prefill(prefill_tokens_per_s)
        self.inlet = Inlet()
        self._meters: dict[tuple[str, str], Meter] = {}

    def meter(self, way: str, peer: str = "") -> Meter:
        """What measures one way. Before a peer's was used, it is taken for what is usual of that way."""
        found = self._meters.get((way, peer))
        if found is None:
            usual = self.meter(way).rate if peer else None
            rate = Rate(*_PRIOR[way], usual)
            learners = (rate, usual) if usual is not None else (rate,)
            found = Meter(learners, self.inlet if way in LINES and peer else None)
            self._meters[way, peer] = found
        return found

    def rate(self, way: str, peer: str = "") -> Rate:
        return self.meter(way, peer).rate

    def keep(self, peers: Iterable[str]) -> None:
        """Forget those who are not in the mesh any more, except where a transfer is under way."""
        stay = {"", *peers}
        self._meters = {
            key: meter for key, meter in self._meters.items() if key[1] in stay or meter.period.active
        }

    def plain(self, now_s: float) -> dict[str, Any]:
        """For a status: `usual`, a rate a way; `peers`, those most used; the inlet's, None if unknown."""
        rows = [{"way": way, "peer": peer, **m.rate.plain(now_s)} for (way, peer), m in self._meters.items()]
        rows.sort(key=lambda row: (-row["bodies"], row["way"], row["peer"]))
        inlet = self.inlet.rate
        return {
            "prefill": self.prefill.plain(),
            "usual": [row for row in rows if not row["peer"]],
            "peers": [row for row in rows if row["peer"]][:PEERS_SHOWN],
            "inlet_bytes_per_s": None if inlet is None else 1 / inlet.at(now_s)[1],
        }


@dataclass(frozen=True, slots=True)
class Choice:
    """The plan for one chunk. `miss` says why where `source` is RECOMPUTE."""

    match: Match
    source: Source
    body: BodyInfo | None = None
    holders: tuple[Holder, ...] = ()  # peers to try, the chosen one first
    cost_s: float = 0.0  # until its bytes are here, behind all that the plan puts before them
    miss: Miss | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A chunk of the prompt and what was found of it. absent: what it means where nothing was.

    start: its place in the prompt in tokens, since what stands later costs more to compute.
    """

    exact: ExactKey
    start: int
    found: Sequence[Found]
    absent: Miss = Miss.ABSENT


@dataclass(frozen=True, slots=True)
class Plan:
    """A choice a chunk, in order. fetch_s: until all bytes are expected here.

    patience_s: once a fetch takes so long, computing would have been faster: give up what is still missing.
    None where the engine's prefill is unknown.
    """

    choices: list[Choice]
    fetch_s: float
    patience_s: float | None


def rank_bodies(found: Iterable[Found], exact: ExactKey) -> list[Found]:
    """Bodies of one content key, best first: the exact one, then by how clean their context is.

    In context before isolated, because attention statistics of a full prompt were the better ones
    where it was measured; approximate last, since what it attended to was itself moved.
    """
    order = {Provenance.IN_CONTEXT: 1, Provenance.ISOLATED: 2, Provenance.APPROXIMATE: 3}
    return sorted(
        found, key=lambda f: (0 if f.body.exact == exact else order[f.body.provenance], f.body.exact)
    )


def plan(
    asked: Sequence[Asked],
    *,
    me: str,
    ways: Mapping[str, str],
    busy_bytes: Mapping[str, int],
    costs: Costs,
    content_reuse: bool,
    now_s: float,
    within_s: float = float("inf"),
) -> Plan:
    """Choose a source for every chunk of a prompt.

    ways: peer -> the transport that this node would use with it; a peer that is not in it cannot be
    reached. busy_bytes: peer -> bytes already under way from it. within_s: the caller's deadline, seconds
    from now until the bytes have to be here; what is not expected by then, with some caution, is recomputed.
    """
    lines = _Lines(me, ways, busy_bytes, costs, now_s)
    choices = [_first_choice(chunk, lines, content_reuse, within_s) for chunk in asked]
    coming = [i for i, choice in enumerate(choices) if choice.source in (Source.PEER, Source.NVME)]
    if not coming:
        return Plan(choices, 0.0, None)
    if not costs.prefill.known:
        return Plan(choices, max(choices[i].cost_s for i in coming), None)
    coming.sort(key=lambda i: choices[i].cost_s)
    compute_s = {i: costs.prefill.seconds(choices[i].body.tokens, asked[i].start) for i in coming}
    worth, fetch_s = _worth_waiting([(choices[i].cost_s, compute_s[i]) for i in coming])
    for i in coming[worth:]:
        choices[i] = _at_hand(asked[i], me, content_reuse) or Choice(
            Match.NONE, Source.RECOMPUTE, miss=Miss.CHEAPER_TO_RECOMPUTE
        )
    patience_s = max(PATIENCE * reduce(add, (compute_s[i] for i in coming[:worth]), 0.0), PATIENCE_MIN_S)
    return Plan(choices, fetch_s, patience_s if worth else None)


def _worth_waiting(coming: Sequence[tuple[float, float]]) -> tuple[int, float]:
    """How many of what is coming to wait for: (count, seconds until they are here).

    coming: per chunk (seconds until it is here, seconds to compute it), ascending by the first.
    """
    compute_s = reduce(add, (s for _, s in coming), 0.0)  # in order, unlike `sum` since Python 3.12
    best, best_s, wait_s = 0, compute_s, 0.0
    for count, (here_s, saved_s) in enumerate(coming, 1):
        compute_s -= saved_s
        if here_s + compute_s <= best_s:
            best, best_s, wait_s = count, here_s + compute_s, here_s
    return best, wait_s


def _first_choice(chunk: Asked, lines: _Lines, content_reuse: bool, within_s: float) -> Choice:
    """The best body that comes in time and faster than it is computed, else the best that comes in time."""
    bodies = rank_bodies(chunk.found, chunk.exact) if len(chunk.found) > 1 else chunk.found
    if not bodies:
        return Choice(Match.NONE, Source.RECOMPUTE, miss=chunk.absent)
    only_moved = bodies[0].body.exact != chunk.exact
    why = Miss.EXACT_ONLY if only_moved and not content_reuse else Miss.HOLDER_UNREACHABLE
    slow: list[_Offer] | None = None
    for candidate in bodies:
        body = candidate.body
        if body.exact != chunk.exact and not content_reuse:
            continue
        offers = lines.offers(candidate)
        in_time = [o for o in offers if o.late_s <= within_s]
        if not in_time:
            why = Miss.DEADLINE if offers else why
        elif in_time[0].alone_s <= lines.costs.prefill.seconds(body.tokens, chunk.start):
            return lines.take(in_time, chunk.exact)
        else:
            slow = slow or in_time
    return lines.take(slow, chunk.exact) if slow else Choice(Match.NONE, Source.RECOMPUTE, miss=why)


def _at_hand(chunk: Asked, me: str, content_reuse: bool) -> Choice | None:
    """A body that is in this node's host tier, where the best one is not worth its way."""
    for found in rank_bodies(chunk.found, chunk.exact):
        match = Match.EXACT if found.body.exact == chunk.exact else Match.CONTENT
        mine = tuple(h for h in found.holders if h.node == me and h.tier is not Tier.NVME)
        if mine and (content_reuse or match is Match.EXACT):
            return Choice(match, Source.LOCAL, found.body, mine, LOCAL_S)
    return None


@dataclass(slots=True)
class _Line:
    """What is already promised to come over one line. All in seconds."""

    latency_s: float
    pace: float  # a byte
    caution: float
    taken_s: float = 0.0

    def by_s(self, nbytes: int) -> float:
        return self.latency_s + self.taken_s + nbytes * self.pace


@dataclass(frozen=True, slots=True)
class _Offer:
    """One holder's: seconds until the body is here; the same with caution; and what it takes of its line."""

    body: BodyInfo
    holder: Holder
    here_s: float
    late_s: float
    alone_s: float
    line: _Line | None  # None: at hand
    shared: bool = False


class _Lines:
    """The lines into this node during one plan."""

    def __init__(self, me: str, ways: Mapping[str, str], busy: Mapping[str, int], costs: Costs, now_s: float):
        self.costs = costs
        self._me, self._ways, self._busy, self._now_s = me, ways, busy, now_s
        self._open: dict[tuple[str, str], _Line] = {}
        rate = costs.inlet.rate
        self._inlet = self._line(rate, sum(busy.values())) if rate is not None else None

    def offers(self, found: Found) -> list[_Offer]:
        """What every holder that can be reached would take, the fastest first."""
        offers = [o for h in found.holders if (o := self._offer(found.body, h)) is not None]
        return sorted(offers, key=lambda o: (o.here_s, o.holder.node)) if len(offers) > 1 else offers

    def take(self, offers: Sequence[_Offer], exact: ExactKey) -> Choice:
        """Promise the first of these offers; the others stay as second choices."""
        best = offers[0]
        if best.line is not None:
            best.line.taken_s += best.body.nbytes * best.line.pace
            if best.shared and self._inlet is not None:
                self._inlet.taken_s += best.body.nbytes * self._inlet.pace
        source = Source.PEER
        if best.holder.node == self._me:
            source = Source.NVME if best.line is not None else Source.LOCAL
        match = Match.EXACT if best.body.exact == exact else Match.CONTENT
        return Choice(match, source, best.body, tuple(o.holder for o in offers), best.here_s)

    def _offer(self, body: BodyInfo, holder: Holder) -> _Offer | None:
        nbytes = body.nbytes
        if holder.node == self._me:
            if holder.tier is not Tier.NVME:
                return _Offer(body, holder, LOCAL_S, LOCAL_S, LOCAL_S, None)
            line = self._at("nvme", "")
            here_s = line.by_s(nbytes)
            return _Offer(body, holder, here_s, here_s * line.caution, nbytes * line.pace, line)
        way = self._ways.get(holder.node)
        if way is None:
            return None
        line = self._at(way, holder.node)
        here_s, alone_s, shared = line.by_s(nbytes), nbytes * line.pace, way in LINES
        if shared and self._inlet is not None:
            here_s = max(here_s, self._inlet.by_s(nbytes))
        if holder.tier is Tier.NVME:
            # Read in full before its first byte is sent, beside what the line carries meanwhile.
            here_s += self.costs.rate("nvme").cost_s(nbytes, self._now_s)
        return _Offer(body, holder, here_s, here_s * line.caution, alone_s, line, shared)

    def _at(self, way: str, peer: str) -> _Line:
        line = self._open.get((way, peer))
        if line is None:
            rate = self.costs.rate(way, peer)
            line = self._open[way, peer] = self._line(rate, self._busy.get(peer, 0) if peer else 0)
        return line

    def _line(self, rate: Rate, busy_bytes: int) -> _Line:
        latency_s, pace = rate.at(self._now_s)
        return _Line(latency_s, pace, rate.caution_at(self._now_s), busy_bytes * pace)
