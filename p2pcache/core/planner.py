"""Where each chunk comes from: hits, places and costs in, a choice per chunk out.

A cost is seconds until the bytes can be used: a latency and bytes over a bandwidth, both measured
as the node runs. A chunk is recomputed where that is faster than the fastest way to fetch it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from p2pcache.types import BodyInfo, ExactKey, Found, Holder, Match, Miss, Provenance, Source, Tier

_PRIOR = {
    # (seconds, bytes a second) before anything was measured; deliberately modest
    "local": (2e-6, 5e9),
    "nvme": (2e-4, 1e9),
    "shm": (5e-4, 3e9),
    "tcp": (1e-3, 1e9),
    "ucx": (1e-3, 1e9),
}
_SMOOTHING = 0.2


@dataclass(slots=True)
class Rate:
    """Latency and bandwidth of one way to get bytes, smoothed exponentially."""

    latency_s: float
    bytes_per_s: float

    def cost_s(self, nbytes: int) -> float:
        return self.latency_s + nbytes / self.bytes_per_s

    def observe(self, nbytes: int, seconds: float) -> None:
        """Learn from one transfer: large ones tell the bandwidth, small ones the latency."""
        if seconds <= 0:
            return
        if nbytes >= 64 * 1024:
            measured = nbytes / max(seconds - self.latency_s, seconds * 0.1)
            self.bytes_per_s += _SMOOTHING * (measured - self.bytes_per_s)
        else:
            self.latency_s += _SMOOTHING * (seconds - self.latency_s)


@dataclass(slots=True)
class Costs:
    """What this node has measured. `prefill_tokens_per_s` is its engine's; 0 means not known."""

    rates: dict[tuple[str, str], Rate] = field(default_factory=dict)  # (way, peer) -> Rate
    prefill_tokens_per_s: float = 0.0

    def rate(self, way: str, peer: str = "") -> Rate:
        found = self.rates.get((way, peer))
        if found is None:
            found = self.rates[way, peer] = Rate(*_PRIOR[way])
        return found

    def recompute_s(self, tokens: int) -> float:
        return tokens / self.prefill_tokens_per_s if self.prefill_tokens_per_s > 0 else float("inf")


@dataclass(frozen=True, slots=True)
class Choice:
    """The plan for one chunk. `miss` says why where `source` is RECOMPUTE."""

    match: Match
    source: Source
    body: BodyInfo | None = None
    holders: tuple[Holder, ...] = ()  # peers to try, the chosen one first
    cost_s: float = 0.0
    miss: Miss | None = None


def rank_bodies(found: Iterable[Found], exact: ExactKey) -> list[Found]:
    """Bodies of one content key, best first: the exact one, then by how clean their context is.

    In context before isolated, because attention statistics of a full prompt were the better ones
    where it was measured; approximate last, since what it attended to was itself moved.
    """
    order = {Provenance.IN_CONTEXT: 1, Provenance.ISOLATED: 2, Provenance.APPROXIMATE: 3}
    return sorted(
        found, key=lambda f: (0 if f.body.exact == exact else order[f.body.provenance], f.body.exact)
    )


def plan_chunk(
    exact: ExactKey,
    found: Iterable[Found],
    *,
    me: str,
    ways: Mapping[str, str],
    busy_bytes: Mapping[str, int],
    costs: Costs,
    content_reuse: bool,
    absent: Miss = Miss.ABSENT,
) -> Choice:
    """Choose a source for one chunk.

    ways: peer -> the transport that this node would use with it; a peer that is not in it cannot
    be reached. busy_bytes: peer -> bytes already under way from it. absent: what an empty result
    means.
    """
    bodies = rank_bodies(found, exact)
    if not bodies:
        return Choice(Match.NONE, Source.RECOMPUTE, miss=absent)
    only_moved = bodies[0].body.exact != exact
    why = Miss.EXACT_ONLY if only_moved and not content_reuse else Miss.HOLDER_UNREACHABLE
    for candidate in bodies:
        body = candidate.body
        match = Match.EXACT if body.exact == exact else Match.CONTENT
        if match is Match.CONTENT and not content_reuse:
            continue
        priced = sorted(
            (_price(body, h, me, ways, busy_bytes, costs) for h in candidate.holders),
            key=lambda p: (p[0], p[1].node),
        )
        priced = [p for p in priced if p[0] < float("inf")]
        if not priced:
            continue
        cost_s, best = priced[0]
        if cost_s > costs.recompute_s(body.tokens):
            why = Miss.CHEAPER_TO_RECOMPUTE
            continue
        holders = tuple(h for _, h in priced)
        source = Source.PEER if best.node != me else Source.NVME if best.tier is Tier.NVME else Source.LOCAL
        return Choice(match, source, body, holders, cost_s)
    return Choice(Match.NONE, Source.RECOMPUTE, miss=why)


def _price(
    body: BodyInfo, holder: Holder, me: str, ways: Mapping[str, str], busy: Mapping[str, int], costs: Costs
) -> tuple[float, Holder]:
    nvme_s = costs.rate("nvme").cost_s(body.nbytes) if holder.tier is Tier.NVME else 0.0
    if holder.node == me:
        return (nvme_s or costs.rate("local").cost_s(0)), holder
    way = ways.get(holder.node)
    if way is None:
        return float("inf"), holder
    rate = costs.rate(way, holder.node)
    return nvme_s + rate.cost_s(body.nbytes + busy.get(holder.node, 0)), holder
