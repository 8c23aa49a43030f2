"""Which replica a prompt goes to: pure policy, without Ray.

All is weighed in one unit, prompt tokens of prefill. A replica's *work* for a prompt is what it would
have to compute, plus a small share of what it would have to pull; its *wait* is the work of what it was
given and has not ended. The least of work and wait wins; of replicas that come close to it, the one with
the least work, where one that has lately got more than its share of requests counts for more. Of equal
ones the choice falls by rendezvous hashing of the first chunk that nobody holds, so that cold prompts
spread over the replicas and the same cold prompt goes to the same one twice. (Not the prompt's first
chunk: a system prompt that all prompts share would send all of them to one replica.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from blake3 import blake3

PULL_SHARE = 0.05
"""Cost of a token that a peer holds, over one that must be computed. On fast networks it is less; what
matters is that moving costs something and computing costs more."""
DECODE_SHARE = 1.0
"""Cost of one answer token, over one token of prefill: short answers weigh little beside long prompts."""
NEAR_SHARE = 0.1
"""Replicas whose cost is within this share of the prompt from the least are about as soon ready."""
EQUAL_SHARE = 0.005
"""Of those, replicas whose work is within this share of the prompt from the least are equal."""
UNEVEN_SHARE = 0.2
"""A replica that has lately got this much more requests than the average counts as if it had to pull the
whole prompt: locality may favour one for a while, and not for ever."""
RECENT_S = 60.0
"""Half-life of what counts as lately."""
FEW = 5
"""Requests; as long as there have been no more, they say little of how even the load is."""


@dataclass
class Route:
    """What the ingress knows of one attempt at one prompt, for the router in its process.

    tokens: of the prompt. answer_tokens: at most. held: Ray node id -> prompt tokens whose KV lies there;
    None where the directory did not answer within its budget. anywhere: tokens held by anybody. key: the
    first chunk that nobody holds. avoid: replicas that have just failed with this request. chosen: the
    replica, as soon as the router has one. over: set by the ingress, however the attempt ended.
    """

    tokens: int
    answer_tokens: int = 0
    held: Mapping[str, int] | None = None
    anywhere: int = 0
    key: bytes = b""
    pull_share: float = PULL_SHARE
    avoid: frozenset[str] = frozenset()
    chosen: str = ""
    over: bool = False

    def work(self, node_id: str) -> float:
        """Prefill tokens that this prompt costs on a node."""
        if self.held is None:
            return float(self.tokens)
        here = min(self.held.get(node_id, 0), self.tokens)
        elsewhere = max(min(self.anywhere, self.tokens) - here, 0)
        return self.tokens - here - elsewhere + self.pull_share * elsewhere


@dataclass
class Backlog:
    """Work given to replicas and not over, as this router has seen it; and whom to leave alone for now.

    The routes themselves say when they are over, so nothing can be missed or come in another order.
    """

    suspect_s: float = 10.0
    _recent: dict[str, tuple[float, float]] = field(default_factory=dict)  # replica -> requests, as of when
    _given: dict[str, list[tuple[Route, float]]] = field(default_factory=dict)  # replica -> routes, work
    _suspects: dict[str, float] = field(default_factory=dict)  # replica -> until

    def give(self, replica: str, node_id: str, route: Route, now_s: float) -> None:
        self._recent[replica] = self.recent(replica, now_s) + 1.0, now_s
        work = route.work(node_id) + DECODE_SHARE * route.answer_tokens
        self._given.setdefault(replica, []).append((route, work))
        route.chosen = replica

    def suspect(self, replicas: Iterable[str], now_s: float) -> None:
        """These have just failed: others come first for a while, not only for the request that found out."""
        for replica in replicas:
            self._suspects[replica] = now_s + self.suspect_s

    def suspects(self, now_s: float) -> frozenset[str]:
        return frozenset(r for r, until_s in self._suspects.items() if until_s > now_s)

    def keep(self, replicas: Iterable[str]) -> None:
        """Forget replicas that have gone."""
        alive = set(replicas)
        for table in (self._given, self._suspects, self._recent):
            for gone in [r for r in table if r not in alive]:
                del table[gone]

    def recent(self, replica: str, now_s: float) -> float:
        """Requests that it got lately."""
        requests, as_of_s = self._recent.get(replica, (0.0, now_s))
        return requests * 0.5 ** ((now_s - as_of_s) / RECENT_S)

    def wait(self, replica: str) -> float:
        """Prefill tokens that it has before it."""
        given = self._given.get(replica)
        if not given:
            return 0.0
        given[:] = [(route, work) for route, work in given if not route.over]
        return sum(work for _, work in given)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that may be chosen."""

    replica: str
    node_id: str
    wait: float
    recent: float = 0.0  # requests that it got lately


def rank(
    route: Route | None,
    candidates: Sequence[Candidate],
    rng: Random,
    suspects: frozenset[str] = frozenset(),
) -> list[list[str]]:
    """Replicas to try, in ranks; of one rank the caller takes the least busy.

    Without knowledge of the prompt: two at random (power of two choices), then all others. Whoever has
    failed with this very prompt, or lately with others, is tried where there is nobody else.
    """
    avoided = route.avoid if route is not None else frozenset()
    usable = (
        [c for c in candidates if c.replica not in avoided | suspects]
        or [c for c in candidates if c.replica not in avoided]
        or list(candidates)
    )
    if not usable:
        return []
    if route is None or route.held is None:
        two = rng.sample(usable, min(2, len(usable)))
        rest = [c.replica for c in usable if c not in two]
        return [[c.replica for c in two], *([rest] if rest else [])]
    usual = sum(c.recent for c in usable) / len(usable) + FEW
    uneven = {c.replica: max((c.recent + FEW) / usual - 1, 0) / UNEVEN_SHARE for c in usable}
    work = {c.replica: route.work(c.node_id) for c in usable}
    work = {r: w + route.pull_share * route.tokens * uneven[r] for r, w in work.items()}
    cost = {c.replica: work[c.replica] + c.wait for c in usable}
    near = {r for r in cost if cost[r] <= min(cost.values()) + NEAR_SHARE * route.tokens}
    least = min(work[r] for r in near)
    equal = {r for r in near if work[r] <= least + EQUAL_SHARE * route.tokens}

    def order(replica: str) -> tuple[int, float, bytes]:
        if replica in equal:
            return 0, 0.0, _score(route.key, replica)
        return (1, work[replica], b"") if replica in near else (2, cost[replica], b"")

    return [[r] for r in sorted(cost, key=order)]


def _score(key: bytes, replica: str) -> bytes:
    """Rendezvous hashing: the lowest of these is the key's own replica."""
    return blake3(replica.encode(), key=blake3(key).digest()).digest(8)
