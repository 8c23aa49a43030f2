"""`planner.plan` for prompts of which one body at most is known of each chunk, over records.

One native pass (`native/plans.cpp`) makes the choices and packs the reply, so a chunk takes no object from
the owner's answer to the engine's socket. Choices, costs and the waiting are the same, to the bit; the
planner says why they are what they are, and tests compare the two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from p2pcache import _native
from p2pcache.core.found import Table
from p2pcache.core.planner import LINES, LOCAL_S, PATIENCE, PATIENCE_MIN_S, Choice, Costs
from p2pcache.core.rates import Rate
from p2pcache.core.records import MATCH_CODE, MATCHES, MISS_CODE, MISSES, SOURCE_CODE, SOURCES
from p2pcache.types import Match, Miss, Source

_MEMBER = np.dtype([("line", "<i4"), ("rank", "<i4")])
_LINE = np.dtype(
    [("latency_s", "<f8"), ("pace", "<f8"), ("caution", "<f8"), ("taken_s", "<f8"), ("shared", "<u8")]
)
_HERE, _OUT_OF_REACH = -1, -2
_CODES = bytes(
    [
        *(MATCH_CODE[m] for m in (Match.EXACT, Match.CONTENT, Match.NONE)),
        *(SOURCE_CODE[s] for s in (Source.LOCAL, Source.PEER, Source.RECOMPUTE)),
        *(MISS_CODE[m] for m in (Miss.DEADLINE, Miss.HOLDER_UNREACHABLE, Miss.EXACT_ONLY)),
        MISS_CODE[Miss.CHEAPER_TO_RECOMPUTE],
    ]
)


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


class SinglesPlan(NamedTuple):
    """A plan, counted and as a lookup's reply. fetch_s, patience_s: as in `planner.Plan`."""

    tally: Tally
    reply: dict[str, Any]
    fetch_s: float
    patience_s: float | None


def plan_singles(
    asked: bytes,
    starts: np.ndarray,
    parts: Sequence[tuple[np.ndarray, Table]],
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
    """`planner.plan` of a prompt, and the reply, as `records.pack_answers` makes it.

    asked: content and exact key of each chunk, joined. starts: int64 `[chunks]`, as in `planner.Asked`.
    parts: tables, whose records have been checked, each with the chunks that it is of, int64 `[keys]`; a
    chunk is of one at most. absent: u8 `[chunks]`, what it means where nothing is known, as MISS_CODE. The
    others as there, and this node holds nothing of it all but in its host tier, where nobody else holds it.
    Raises ValueError where the parts do not fit together.
    """
    singles = _native.Singles(asked, list(parts))
    members, lines, has_inlet = _lines(singles.members, me, ways, busy_bytes, costs, now_s)
    compute_s = None
    if costs.prefill.known:
        compute_s = np.asarray(
            costs.prefill.seconds(np.frombuffer(singles.tokens, np.int64), starts), np.float64
        )
    names, answers, found, holders, fetch_s, patience_s, hits, misses = singles.plan(
        members, lines, has_inlet, *costs.rate("nvme").at(now_s), LOCAL_S, within_s, content_reuse, absent,
        compute_s, PATIENCE, PATIENCE_MIN_S, _CODES,
    )  # fmt: skip
    tally = Tally(
        len(absent),
        {(MATCHES[match], SOURCES[source]): count for match, source, count, _ in hits},
        {MATCHES[match]: tokens for match, _, _, tokens in hits},
        {why: count for miss, count in misses if (why := MISSES[miss]) is not None},
    )
    reply = {"names": names, "answers": answers, "found": found, "holders": holders, "patience_s": patience_s}
    return SinglesPlan(tally, reply, fetch_s, patience_s)


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
