"""What changed between successive statuses of a mesh: rates now, and a bounded history. Pure.

Statuses carry counts since a node's start. A restarted node counts from zero again, a node that is down
says nothing for a while, and one that is met for the first time has a past that is not ours: `changes`
deals with all three, so no rate is ever negative and no start of a page shows a spike.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

Counts = Counter[str]
"""Counts by `group:name`, such as `hits:peer`, `miss:absent`, `bytes:local`, `pulls:shm`."""

SOURCES = ("local", "nvme", "peer")
POINTS_MAX = 1800
SHOWN_MAX = 180


def counts(status: Mapping[str, Any]) -> Counts:
    """The counts of one node's status that rates are made of. Empty for a node that does not answer."""
    out: Counts = Counter()
    if "error" in status:
        return out
    counters, sight = status["counters"], status.get("sight") or {}
    out["chunks:"] = sight.get("chunks", 0)
    for match, by_source in sight.get("hits", {}).items():
        for source, value in by_source.items():
            out[f"hits:{source}"] += value
            out[f"match:{match}"] += value
    for reason, value in sight.get("misses", {}).items():
        out[f"miss:{reason}"] += value
    for reason, value in sight.get("fetch_misses", {}).items():
        out[f"fetch-miss:{reason}"] += value
    for source in SOURCES:
        out[f"bytes:{source}"] = counters.get(f"bytes_{source}", 0)
        out[f"served:{source}"] = counters.get(f"served_{source}", 0)
    for name, value in counters.items():
        word, _, transport = name.partition("_")
        if word in ("pulls", "failed"):
            out[f"{word}:{transport}"] = value
    return out


def group(of: Mapping[str, float], name: str) -> dict[str, float]:
    """The members of one group: `group(c, "miss")` is misses by reason."""
    return {key[len(name) + 1 :]: value for key, value in of.items() if key.startswith(name + ":")}


@dataclass(frozen=True, slots=True)
class Seen:
    """A node as it last answered."""

    incarnation: Any
    counts: Counts


def remember(last: Mapping[str, Seen], statuses: Iterable[Mapping[str, Any]]) -> dict[str, Seen]:
    """What to compare the next statuses with. Nodes that do not answer keep what they last said."""
    now = {str(s["name"]): s for s in statuses}
    out = {name: seen for name, seen in last.items() if name in now}
    for name, status in now.items():
        if "error" not in status:
            out[name] = Seen(status.get("incarnation"), counts(status))
    return out


def changes(last: Mapping[str, Seen], statuses: Iterable[Mapping[str, Any]]) -> dict[str, Counts]:
    """By node, how much each count grew since `last`. Never negative."""
    out: dict[str, Counts] = {}
    for status in statuses:
        name = str(status["name"])
        before, now = last.get(name), counts(status)
        if before is None or "error" in status:
            out[name] = Counter()
        elif before.incarnation != status.get("incarnation"):
            out[name] = now  # another life of the node: all of it is new
        else:
            grown = {key: value - before.counts[key] for key, value in now.items()}
            out[name] = Counter({key: more if more >= 0 else now[key] for key, more in grown.items()})
    return out


@dataclass(slots=True)
class Point:
    """What happened in the mesh in `seconds` up to `at_s`."""

    at_s: float
    seconds: float
    counts: Counts


@dataclass(slots=True)
class History:
    """Successive statuses as a time series of at most `points_max` points, the oldest dropped first."""

    points_max: int = POINTS_MAX
    points: deque[Point] = field(default_factory=deque)
    rates: dict[str, dict[str, float]] = field(default_factory=dict)
    """By node, the growth a second of each count between the last two observations."""
    _last: dict[str, Seen] = field(default_factory=dict)
    _last_s: float | None = None
    _dropped: int = 0

    def observe(self, statuses: Sequence[Mapping[str, Any]], now_s: float) -> None:
        """Take in the statuses of all nodes at one time. now_s: on any clock that does not go back."""
        grown = changes(self._last, statuses)
        if self._last_s is not None and now_s > self._last_s:
            seconds = now_s - self._last_s
            total: Counts = Counter()
            for of_node in grown.values():
                total.update(of_node)
            self.points.append(Point(now_s, seconds, total))
            while len(self.points) > self.points_max:
                self.points.popleft()
                self._dropped += 1
            self.rates = {
                name: {key: value / seconds for key, value in of_node.items()}
                for name, of_node in grown.items()
            }
        self._last, self._last_s = remember(self._last, statuses), now_s

    def total(self, since_s: float) -> tuple[Counts, float]:
        """Counts of all points after `since_s`, and the seconds they cover."""
        out, seconds = Counter[str](), 0.0
        for point in self.points:
            if point.at_s > since_s:
                out.update(point.counts)
                seconds += point.seconds
        return out, seconds

    def series(self, now_s: float, shown_max: int = SHOWN_MAX) -> dict[str, list[float]]:
        """Columns of equal length, oldest first; neighbours are added up where there are too many.

        `ago_s`: when a point ended. `seconds`: how long it lasted. `local`, `nvme`, `peer`, `missed`:
        chunks of lookups by where they were found. `bytes`: handed to engines, of all sources.
        """
        columns: dict[str, list[float]] = {
            name: [] for name in ("ago_s", "seconds", *SOURCES, "missed", "bytes")
        }
        step = 1
        while len(self.points) > (shown_max - 1) * step:
            step *= 2
        # Grouped by a point's number since the start, so that a group stays one while time goes on.
        numbered = enumerate(self.points, self._dropped)
        for _, members in groupby(numbered, lambda numbered_point: numbered_point[0] // step):
            part = [point for _, point in members]
            total: Counts = Counter()
            for point in part:
                total.update(point.counts)
            columns["ago_s"].append(round(now_s - part[-1].at_s, 2))
            columns["seconds"].append(round(sum(p.seconds for p in part), 3))
            for source in SOURCES:
                columns[source].append(total[f"hits:{source}"])
            columns["missed"].append(sum(group(total, "miss").values()))
            columns["bytes"].append(sum(group(total, "bytes").values()))
        return columns
