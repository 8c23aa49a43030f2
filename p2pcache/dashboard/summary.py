"""The mesh as the page shows it: statuses and their history in, one JSON-ready mapping out. Pure.

A status may come from a node of another version, or be nonsense: such a node is shown with an error and
costs the others nothing. Texts are cut to a length here and never become HTML (the page sets text only).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from p2pcache.dashboard.history import History, counts, group

NODES_MAX = 1024
HOTTEST_MAX = 12
RECENT_MAX = 40
WINDOW_S = 60.0
_TEXT_MAX = 300


def checked(statuses: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The same statuses, with an error in place of those that cannot be shown. At most NODES_MAX."""
    out: list[Mapping[str, Any]] = []
    for status in islice(statuses, NODES_MAX):
        name = text(status.get("name", "?")) if isinstance(status, Mapping) else "?"
        try:
            if "error" in status:
                out.append({"name": name, "error": text(status["error"]) or "no answer"})
                continue
            node_row(status, {}), hottest([status]), recent_misses([status])
            for count in counts(status).values():
                number(count)
            out.append({**status, "name": name, "view_id": text(status["view_id"])})
        except Exception:  # whatever a stranger's values are made of
            out.append({"name": name, "error": "its status is not one that this version understands"})
    return out


def summary(statuses: Sequence[Mapping[str, Any]], history: History, now_s: float) -> dict[str, Any]:
    """What `/api/mesh.json` says. statuses: `checked` ones. now_s: on the history's clock.

    `nodes`: by name, those that do not answer with an `error`. `views`: how many different Views the
    answering nodes follow; 1 is agreement. `window`: totals of the last WINDOW_S seconds. `since_start`:
    totals of all answering nodes since each of them started.
    """
    nodes = [node_row(s, history.rates.get(s["name"], {})) for s in statuses]
    sound = [s for s in statuses if "error" not in s]
    since_start: Counter[str] = Counter()
    for status in sound:
        since_start.update(counts(status))
    recent, seconds = history.total(now_s - WINDOW_S)
    return {
        "nodes": nodes,
        "views": len({s.get("view_id") for s in sound}),
        "window": {"seconds": seconds} | grouped(recent),
        "since_start": grouped(since_start),
        "history": history.series(now_s),
        "hottest": hottest(sound),
        "recent": recent_misses(sound),
    }


def grouped(of: Mapping[str, float]) -> dict[str, Any]:
    """Counts by group, as plain values."""
    return {
        "chunks": of.get("chunks:", 0),
        "hits": group(of, "hits"),
        "match": group(of, "match"),
        "misses": group(of, "miss"),
        "fetch_misses": group(of, "fetch-miss"),
        "bytes": group(of, "bytes"),
        "served": group(of, "served"),
        "pulls": group(of, "pulls"),
        "failed": group(of, "failed"),
    }


def node_row(status: Mapping[str, Any], rates: Mapping[str, float]) -> dict[str, Any]:
    """One node. rates: growth of its counts a second. Raises on a status that is none."""
    name = status["name"]
    if "error" in status:
        return {"name": name, "error": status["error"]}
    now = counts(status)
    return {
        "name": name,
        "view": text(status["view_id"]),
        "members": len(status["members"]),
        "warm": bool(status["warm"]),
        "state": "cut off" if status.get("cut_off") else "draining" if status.get("draining") else "",
        "tiers": {
            text(tier): {key: number(held[key]) for key in ("used", "capacity", "bodies")}
            for tier, held in status.get("tier_bytes", {}).items()
        },
        "leases": number(status["leases"]),
        "tickets": number(status["tickets"]),
        "sessions": number(status["sessions"]),
        "pulling": number(status["pulls_under_way"]),
        "keys": number(status["directory_keys"]),
        "ring": {key: number(value) for key, value in status.get("ring", {}).items()},
        "corrupt": number(status["counters"].get("corrupt", 0)),
        "hits": sum(group(now, "hits").values()),
        "chunks": number(now["chunks:"]),
        "chunks_per_s": round(rates.get("chunks:", 0.0), 3),
        "bytes_per_s": round(sum(group(rates, "bytes").values()), 1),
    }


def hottest(statuses: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The content keys most served in the mesh, with how many nodes name them among their hottest."""
    by_key: dict[str, dict[str, Any]] = {}
    for status in statuses:
        for heavy in status.get("sight", {}).get("hottest", []):
            row = by_key.setdefault(
                text(heavy["key"]), {"served": 0, "error": 0, "bytes": 0, "tokens": 0, "nodes": 0}
            )
            for key in ("served", "error", "bytes", "tokens"):
                row[key] += number(heavy[key])
            row["nodes"] += 1
    ranked = sorted(by_key.items(), key=lambda item: (-item[1]["served"], item[0]))
    return [{"key": key} | row for key, row in ranked[:HOTTEST_MAX]]


def recent_misses(statuses: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The latest lookups and fetches that missed something, newest first, over all nodes.

    Those of one node with the same reasons are one row, `times` many: the usual does not hide the rare.
    """
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for status in statuses:
        for missed in status.get("sight", {}).get("recent", []):
            reasons = sorted(map(text, missed["misses"]))
            row = {
                "node": status["name"],
                "ago_s": number(missed["ago_s"]),
                "step": text(missed["step"]),
                "why": text(missed["why"]),
                "times": 1,
            }
            key = (row["node"], row["step"], *reasons)
            same = rows.setdefault(key, row)
            if same is not row:
                times, newest = same["times"] + 1, min(same, row, key=lambda r: r["ago_s"])
                rows[key] = newest | {"times": times}
    return sorted(rows.values(), key=lambda row: row["ago_s"])[:RECENT_MAX]


def text(value: Any) -> str:
    return str(value)[:_TEXT_MAX]


def number(value: Any) -> float:
    """A finite number. Raises TypeError, ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("not a finite number")
    return value
