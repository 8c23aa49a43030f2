"""`planner.plan` for prompts of which one body at most is known of each chunk, over columns.

The choices, their costs and the waiting are the same, to the bit; the planner says why they are what they
are, and tests compare the two. A chunk takes no object from the owner's answer to the engine's socket.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from p2pcache import _native
from p2pcache.core.found import Columns
from p2pcache.core.planner import LINES, LOCAL_S, PATIENCE, PATIENCE_MIN_S, Choice, Costs
from p2pcache.core.rates import Rate
from p2pcache.core.records import (
    ANSWER_FIELDS,
    HOLDER_FIELDS,
    MATCH_CODE,
    MATCHES,
    MISS_CODE,
    MISSES,
    NONE,
    SOURCE_CODE,
    SOURCES,
    WANT_FIELDS,
)
from p2pcache.types import Match, Miss, Source

_MEMBER = np.dtype([("line", "<i4"), ("rank", "<i4")])
_LINE = np.dtype(
    [("latency_s", "<f8"), ("pace", "<f8"), ("caution", "<f8"), ("taken_s", "<f8"), ("shared", "<u8")]
)
_HERE, _OUT_OF_REACH = -1, -2
_OUTCOMES = np.array([0, MISS_CODE[Miss.DEADLINE], MISS_CODE[Miss.HOLDER_UNREACHABLE]], np.uint8)
_LOCAL, _PEER, _RECOMPUTE = (SOURCE_CODE[s] for s in (Source.LOCAL, Source.PEER, Source.RECOMPUTE))


class Tally(NamedTuple):
    """A plan in numbers: chunks by how they were found, tokens of those, and chunks by reason of the miss."""

    chunks: int
    hits: Mapping[tuple[Match, Source], int]
    tokens: Mapping[Match, int]
    misses: Mapping[Miss, int]

    @staticmethod
    def of(choices: Sequence[Choice]) -> Tally:
        found = [c for c in choices if c.body is not None]
        hits = Counter([(c.match, c.source) for c in found])  # counted in C, unlike one by one
        tokens: Counter[Match] = Counter()
        for c in found:
            tokens[c.match] += c.body.tokens if c.body is not None else 0
        return Tally(len(choices), hits, tokens, Counter([c.miss for c in choices if c.miss is not None]))


@dataclass(frozen=True, slots=True)
class SinglesPlan:
    """A plan over columns, a key a chunk. Arrays `[chunks]`: match, source and miss by their code in records.

    asked: content and exact key of each chunk, joined. known: of each chunk; of a body that is chosen, the
    chosen holder comes first. fetch_s, patience_s: as in `planner.Plan`.
    """

    asked: bytes
    known: Columns
    match: np.ndarray
    source: np.ndarray
    miss: np.ndarray
    cost_s: np.ndarray
    fetch_s: float
    patience_s: float | None

    def tally(self) -> Tally:
        hit = self.source != _RECOMPUTE
        tokens = np.zeros(len(self.match), np.int64)
        tokens[np.flatnonzero(self.known.counts)] = self.known.bodies["tokens"]
        pairs = np.bincount(
            (self.match * np.uint8(len(SOURCES)) + self.source)[hit], minlength=len(MATCHES) * len(SOURCES)
        )
        hits = {
            (MATCHES[code // len(SOURCES)], SOURCES[code % len(SOURCES)]): int(pairs[code])
            for code in np.flatnonzero(pairs).tolist()
        }
        by_match = {m: int(tokens[hit & (self.match == MATCH_CODE[m])].sum()) for m in {m for m, _ in hits}}
        misses = np.bincount(self.miss, minlength=len(MISSES)).tolist()
        reasons = {miss: n for miss, n in zip(MISSES, misses, strict=True) if n and miss is not None}
        return Tally(len(self.match), hits, by_match, reasons)

    def reply(self) -> dict[str, Any]:
        """A lookup's reply, as `records.pack_answers` makes it."""
        known = self.known
        chunk = np.flatnonzero(known.counts)
        hit = (self.source != _RECOMPUTE)[chunk]
        held = known.bodies["holders"].astype(np.int64)

        holders = np.empty(len(known.holders), HOLDER_FIELDS)
        member = known.holders["member"]
        holders["node"], holders["tier"] = member + 1, known.holders["tier"]  # behind the empty name
        holders["incarnation"] = np.array([i for _, i in known.members], np.uint64)[member]
        answers = np.zeros(len(self.match), ANSWER_FIELDS)
        answers["match"], answers["source"], answers["miss"] = self.match, self.source, self.miss
        answers["cost_s"], answers["chosen"], answers["found"] = self.cost_s, NONE, known.counts
        answers["chosen"][chunk[hit]] = 0
        answers["peer"][chunk[hit]] = holders["node"][(np.cumsum(held) - held)[hit]]
        found = np.empty(len(chunk), WANT_FIELDS)
        found["keys"] = self._keys(chunk)
        for field in ("tokens", "nbytes", "provenance", "holders"):
            found[field] = known.bodies[field]
        found["base_position"] = known.bodies["base"]
        found["codec"] = known.bodies["codec"] + np.uint16(1 + len(known.members))
        return {
            "names": ["", *[name for name, _ in known.members], *known.codecs],
            "answers": answers.tobytes(),
            "found": found.tobytes(),
            "holders": holders.tobytes(),
            "patience_s": self.patience_s,
        }

    def _keys(self, chunk: np.ndarray) -> np.ndarray:
        """Content and exact key of the bodies: V32 `[bodies]`."""
        keys = np.frombuffer(self.asked, "<u8").reshape(-1, 4)[chunk]
        keys[:, 2:] = self.known.bodies["exact"]
        return keys.view("V32").ravel()


def plan_singles(
    asked: bytes,
    starts: Sequence[int],
    known: Columns,
    absent: np.ndarray,
    *,
    me: str,
    ways: Mapping[str, str],
    busy_bytes: Mapping[str, int],
    costs: Costs,
    content_reuse: bool,
    now_s: float,
    within_s: float = float("inf"),
) -> SinglesPlan:
    """`planner.plan` for each key of `known`, of which each has one body or none.

    asked: content and exact key of each chunk, joined. starts: as in `planner.Asked`. absent: u8 `[chunks]`,
    what it means where nothing is known, as MISS_CODE. The others as there, and this node holds nothing of
    `known` but in its host tier, where nobody else holds it. Reorders the holders in `known`.
    """
    chunk = np.flatnonzero(known.counts)
    bodies = known.bodies
    exact_keys = np.frombuffer(asked, "<u8").reshape(-1, 4)[chunk, 2:]
    is_exact = (bodies["exact"] == exact_keys).all(1)
    wanted = is_exact | content_reuse
    outcome, cost_s = np.empty(len(bodies), np.int32), np.empty(len(bodies))
    members, lines, has_inlet = _lines(known.members, me, ways, busy_bytes, costs, now_s)
    nvme = costs.rate("nvme").at(now_s)
    _native.assign_lines(
        bodies, known.holders, members, lines, has_inlet, wanted.view(np.uint8), *nvme, LOCAL_S, within_s,
        outcome, cost_s,
    )  # fmt: skip
    held = bodies["holders"].astype(np.int64)
    first = known.holders["member"][np.cumsum(held) - held] if len(held) else held
    plan = SinglesPlan(
        asked,
        known,
        np.full(len(known.counts), MATCH_CODE[Match.NONE], np.uint8),
        np.full(len(known.counts), _RECOMPUTE, np.uint8),
        absent.astype(np.uint8),
        np.zeros(len(known.counts)),
        0.0,
        None,
    )
    hit = outcome == 0
    match = np.where(is_exact, MATCH_CODE[Match.EXACT], MATCH_CODE[Match.CONTENT])
    plan.match[chunk[hit]] = match[hit]
    plan.source[chunk[hit]] = np.where(members["line"][first] == _HERE, _LOCAL, _PEER)[hit]
    plan.miss[chunk] = np.where(wanted, _OUTCOMES[outcome], MISS_CODE[Miss.EXACT_ONLY])
    plan.cost_s[chunk] = cost_s
    return _with_waiting(plan, np.asarray(starts, np.int64), costs)


def _with_waiting(plan: SinglesPlan, starts: np.ndarray, costs: Costs) -> SinglesPlan:
    """The plan without what is not worth waiting for: `planner._worth_waiting`."""
    coming = np.flatnonzero(plan.source == _PEER)
    if not len(coming):
        return plan
    if not costs.prefill.known:
        return replace(plan, fetch_s=float(plan.cost_s[coming].max()))
    coming = coming[np.argsort(plan.cost_s[coming], kind="stable")]
    tokens = plan.known.bodies["tokens"].astype(np.int64)[np.cumsum(plan.known.counts)[coming] - 1]
    compute_s = costs.prefill.seconds(tokens, starts[coming])
    here_s = plan.cost_s[coming]
    left_s = np.subtract.accumulate(np.concatenate(([sum(compute_s.tolist())], compute_s)))
    total_s = left_s + np.concatenate(([0.0], here_s))
    worth = len(total_s) - 1 - int(np.argmin(total_s[::-1]))  # of equals the one that waits for most
    late = coming[worth:]
    plan.match[late], plan.source[late] = MATCH_CODE[Match.NONE], _RECOMPUTE
    plan.miss[late], plan.cost_s[late] = MISS_CODE[Miss.CHEAPER_TO_RECOMPUTE], 0.0
    if not worth:
        return plan
    patience_s = max(PATIENCE * sum(compute_s[:worth].tolist()), PATIENCE_MIN_S)
    return replace(plan, fetch_s=float(here_s[worth - 1]), patience_s=patience_s)


def _lines(
    holders: Sequence[tuple[str, int]],
    me: str,
    ways: Mapping[str, str],
    busy: Mapping[str, int],
    costs: Costs,
    now_s: float,
) -> tuple[np.ndarray, np.ndarray, bool]:
    """The lines into this node, as `planner._Lines` has them: `[holders]` of _MEMBER, `[lines]` of _LINE, and
    whether the last of these is this node's own inlet.
    """

    def line(rate: Rate, busy_bytes: int, shared: bool) -> tuple[float, float, float, float, bool]:
        latency_s, pace = rate.at(now_s)
        return latency_s, pace, rate.caution_at(now_s), busy_bytes * pace, shared

    lines, at = [], {me: _HERE}
    for name, _ in holders:
        way = ways.get(name)
        if name not in at:
            at[name] = _OUT_OF_REACH if way is None else len(lines)
            if way is not None:
                lines.append(line(costs.rate(way, name), busy.get(name, 0), way in LINES))
    inlet = costs.inlet.rate
    if inlet is not None:
        lines.append(line(inlet, sum(busy.values()), False))
    rank = {name: i for i, name in enumerate(sorted(at))}
    members = np.array([(at[name], rank[name]) for name, _ in holders], _MEMBER)
    return members, np.array(lines, _LINE), inlet is not None
