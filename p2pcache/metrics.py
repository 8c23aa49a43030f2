"""Metrics of a node: what they mean, and how they follow from its status. Pure.

Every series carries the label `node`. Names, units and suffixes follow Prometheus: base units, counters
end in `_total`, a histogram becomes `_bucket`, `_sum` and `_count`. Ray's endpoint puts `ray_` in front.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

PREFIX = "p2pcache_"


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table. kind: `counter`, `gauge` or `histogram`. labels: besides `node`."""

    name: str
    kind: str
    unit: str
    help: str
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of one series. suffix: `_bucket`, `_sum` or `_count` of a histogram, else empty."""

    metric: Metric
    labels: tuple[tuple[str, str], ...]
    value: float
    suffix: str = ""

    @property
    def name(self) -> str:
        return self.metric.name + self.suffix


def _table(*rows: tuple[str, str, str, str, tuple[str, ...]]) -> dict[str, Metric]:
    return {name: Metric(PREFIX + name, kind, unit, text, labels) for name, kind, unit, text, labels in rows}


_C, _G, _H = "counter", "gauge", "histogram"
_TABLE = _table(
    ("up", _G, "", "1 where the node answers, 0 where it does not", ()),
    ("members", _G, "nodes", "members of the mesh, as this node knows it", ()),
    ("directory_warm", _G, "", "1 where what the node's shard does not know is really absent", ()),
    ("draining", _G, "", "1 while the node hands its bodies over and leaves", ()),
    ("cut_off", _G, "", "1 while the node has lost contact and tells nobody what it holds", ()),
    ("directory_keys", _G, "keys", "content keys in the node's shard of the directory", ()),
    ("ring_share_ratio", _G, "ratio", "share of all directory entries that this node owns", ()),
    ("ring_balance_ratio", _G, "ratio", "that share over an equal one; 1 is perfect balance", ()),
    # lookups: chunks = hits + misses
    ("lookups_total", _C, "lookups", "lookups asked by the node's engines", ()),
    ("lookup_chunks_total", _C, "chunks", "chunks of the lookups that have ended", ()),
    ("hits_total", _C, "chunks", "chunks found, by kind and by the source planned for", ("match", "source")),
    ("hit_tokens_total", _C, "tokens", "tokens of the chunks found", ("match",)),
    ("misses_total", _C, "chunks", "chunks of lookups that were not found, by reason", ("reason",)),
    ("lookup_duration_seconds", _H, "seconds", "how long a lookup took within the node", ()),
    ("directory_requests_total", _C, "requests", "requests to directory owners for lookups", ()),
    # fetches: fetched = served + missed
    ("fetch_chunks_total", _C, "chunks", "chunks of the fetches that have ended", ()),
    ("served_total", _C, "chunks", "chunks that engines got, by where they came from", ("source",)),
    ("served_bytes_total", _C, "bytes", "bytes of those", ("source",)),
    (
        "served_tokens_total",
        _C,
        "tokens",
        "tokens of those, by what they attended to: approximate ones saw reused KV",
        ("provenance",),
    ),
    ("fetch_misses_total", _C, "chunks", "chunks of fetches that did not come, by reason", ("reason",)),
    ("fetch_duration_seconds", _H, "seconds", "how long a chunk took to come, by source", ("source",)),
    ("pull_duration_seconds", _H, "seconds", "how long a chunk of a peer took to come", ("transport",)),
    ("pulls_total", _C, "bodies", "bodies brought from peers", ("transport",)),
    ("pull_failures_total", _C, "bodies", "pulls that failed on their transport", ("transport",)),
    ("pulls_joined_total", _C, "bodies", "pulls saved: the same body was already under way", ()),
    ("pulls_in_flight", _G, "bodies", "bodies being brought from peers now", ()),
    ("deadlines_missed_total", _C, "chunks", "chunks for which the caller's time was up", ("step",)),
    # what the planner goes by; a way is a transport, or `nvme`
    ("way_latency_seconds", _G, "seconds", "until bytes begin to come, by way, as measured", ("way",)),
    ("way_bytes_per_second", _G, "bytes/second", "how fast they come then, from one peer", ("way",)),
    ("prefill_tokens_per_second", _G, "tokens/second", "the engine's, of a short prompt; 0: unknown", ()),
    # stores and tiers
    ("stored_total", _C, "bodies", "bodies committed by engines", ()),
    ("stores_resident_total", _C, "bodies", "bodies offered by engines that were there already", ()),
    ("stores_refused_total", _C, "bodies", "bodies offered by engines and refused, by reason", ("reason",)),
    ("evictions_total", _C, "bodies", "bodies that left a tier", ("tier",)),
    ("demotions_total", _C, "bodies", "bodies copied from the host to the NVMe tier", ()),
    (
        "demotions_refused_total",
        _C,
        "bodies",
        "bodies dropped unwritten: over the NVMe tier's write rate, or never used",
        (),
    ),
    # bodies encoded on their way to NVMe or to a peer, and decoded on their way back
    ("codec_bodies_total", _C, "bodies", "bodies en- or decoded", ("tier", "codec", "direction")),
    ("codec_raw_bytes_total", _C, "bytes", "bytes of those, decoded", ("tier", "codec", "direction")),
    ("codec_encoded_bytes_total", _C, "bytes", "bytes of those, encoded", ("tier", "codec", "direction")),
    ("codec_seconds_total", _C, "seconds", "time of threads at those", ("tier", "codec", "direction")),
    ("codec_error_ratio", _H, "ratio", "worst channel's relative error of each encode", ("tier", "codec")),
    ("codec_error_max_ratio", _G, "ratio", "the largest of those so far", ("tier", "codec")),
    ("codec_kept_raw_total", _C, "bodies", "bodies a codec was not used for, by reason", ("tier", "reason")),
    ("tier_used_bytes", _G, "bytes", "bytes taken in a tier", ("tier",)),
    ("tier_capacity_bytes", _G, "bytes", "bytes that a tier may take", ("tier",)),
    ("tier_bodies", _G, "bodies", "whole bodies in a tier", ("tier",)),
    # peers and engines
    ("tickets_total", _C, "bodies", "bodies leased to peers", ()),
    ("tickets_refused_total", _C, "bodies", "bodies that peers asked for and did not get", ()),
    ("pulls_retried_total", _C, "times", "times that busy holders of a body were asked again later", ()),
    ("tickets_open", _G, "bodies", "bodies leased to peers now", ()),
    ("leases", _G, "leases", "leases on the slab, of engines and peers", ()),
    ("sessions", _G, "engines", "engines connected", ()),
    ("unpublished_total", _C, "batches", "batches to directory owners that were lost", ()),
    # what must not happen often
    ("corrupt_total", _C, "bodies", "bodies whose bytes did not match their checksum; none was served", ()),
    ("quarantined_total", _C, "slots", "slots kept out of use since a late write was possible", ()),
)
METRICS: Mapping[str, Metric] = {metric.name: metric for metric in _TABLE.values()}
"""Every metric by its full name."""

# Counters of a status that are a series without labels.
_PLAIN_COUNTERS = {
    "lookups_total": "lookups",
    "directory_requests_total": "lookup_rpcs",
    "pulls_joined_total": "joined",
    "stored_total": "stored",
    "demotions_total": "demoted",
    "demotions_refused_total": "nvme_refused",
    "tickets_total": "tickets",
    "tickets_refused_total": "tickets_refused",
    "pulls_retried_total": "retried_pulls",
    "unpublished_total": "unpublished",
    "corrupt_total": "corrupt",
    "quarantined_total": "quarantined",
}
_PLAIN_GAUGES = {
    "directory_warm": "warm",
    "draining": "draining",
    "cut_off": "cut_off",
    "directory_keys": "directory_keys",
    "pulls_in_flight": "pulls_under_way",
    "tickets_open": "tickets",
    "leases": "leases",
    "sessions": "sessions",
}
_BY_REASON = {
    "misses_total": "misses",
    "fetch_misses_total": "fetch_misses",
    "stores_refused_total": "refused",
}


def samples(status: Mapping[str, Any]) -> list[Sample]:
    """Every series of one node's status. Of a node that does not answer, only that it is not up."""
    node = str(status["name"])
    if "error" in status:
        return [_sample("up", node, 0)]
    parts = (_states, _counts, _sights, _planner, _codecs)
    return [_sample("up", node, 1), *(sample for part in parts for sample in part(status, node))]


def _sample(key: str, node: str, value: float, **labels: str) -> Sample:
    return Sample(_TABLE[key], (("node", node), *labels.items()), value)


def _states(status: Mapping[str, Any], node: str) -> Iterator[Sample]:
    yield _sample("members", node, len(status["members"]))
    for key, field in _PLAIN_GAUGES.items():
        yield _sample(key, node, int(status.get(field, 0)))
    for key, value in status.get("ring", {}).items():
        yield _sample(f"ring_{key}_ratio", node, value)
    for tier, held in status.get("tier_bytes", {}).items():
        yield _sample("tier_used_bytes", node, held["used"], tier=tier)
        yield _sample("tier_capacity_bytes", node, held["capacity"], tier=tier)
        yield _sample("tier_bodies", node, held["bodies"], tier=tier)


def _counts(status: Mapping[str, Any], node: str) -> Iterator[Sample]:
    counters: Mapping[str, int] = status["counters"]
    for key, field in _PLAIN_COUNTERS.items():
        yield _sample(key, node, counters.get(field, 0))
    yield _sample("evictions_total", node, counters.get("evicted", 0), tier="host")
    yield _sample("evictions_total", node, counters.get("nvme_evicted", 0), tier="nvme")
    for source in ("local", "nvme", "peer"):
        yield _sample("served_total", node, counters.get(f"served_{source}", 0), source=source)
        yield _sample("served_bytes_total", node, counters.get(f"bytes_{source}", 0), source=source)
    for name, value in counters.items():
        word, _, transport = name.partition("_")
        if word == "pulls":
            yield _sample("pulls_total", node, value, transport=transport)
        elif word == "failed":
            yield _sample("pull_failures_total", node, value, transport=transport)


def _sights(status: Mapping[str, Any], node: str) -> Iterator[Sample]:
    sight: Mapping[str, Any] | None = status.get("sight")
    if sight is None:  # a node of an older version
        return
    yield _sample("lookup_chunks_total", node, sight["chunks"])
    for match, by_source in sight["hits"].items():
        for source, value in by_source.items():
            yield _sample("hits_total", node, value, match=match, source=source)
    for match, value in sight["hit_tokens"].items():
        yield _sample("hit_tokens_total", node, value, match=match)
    yield _sample("fetch_chunks_total", node, sight["fetched"])
    for provenance, value in sight["served_tokens"].items():
        yield _sample("served_tokens_total", node, value, provenance=provenance)
    yield _sample("stores_resident_total", node, sight["resident"])
    for key, field in _BY_REASON.items():
        for reason, value in sight[field].items():
            yield _sample(key, node, value, reason=reason)
    for step, value in sight["deadlines"].items():
        yield _sample("deadlines_missed_total", node, value, step=step)
    yield from _histogram("lookup_duration_seconds", node, sight["lookup_seconds"])
    for source, plain in sight["fetch_seconds"].items():
        yield from _histogram("fetch_duration_seconds", node, plain, source=source)
    for transport, plain in sight["pull_seconds"].items():
        yield from _histogram("pull_duration_seconds", node, plain, transport=transport)


def _planner(status: Mapping[str, Any], node: str) -> Iterator[Sample]:
    planner: Mapping[str, Any] | None = status.get("planner")
    if planner is None:  # a node of an older version
        return
    for row in planner["usual"]:
        yield _sample("way_latency_seconds", node, row["latency_s"], way=row["way"])
        yield _sample("way_bytes_per_second", node, row["bytes_per_s"], way=row["way"])
    yield _sample("prefill_tokens_per_second", node, planner["prefill"]["tokens_per_s"])


def _codecs(status: Mapping[str, Any], node: str) -> Iterator[Sample]:
    codecs: Mapping[str, Any] | None = status.get("codecs")
    if codecs is None:  # a node of an older version
        return
    for row in codecs["coded"]:
        labels = {label: row[label] for label in ("tier", "codec", "direction")}
        yield _sample("codec_bodies_total", node, row["bodies"], **labels)
        yield _sample("codec_raw_bytes_total", node, row["raw_bytes"], **labels)
        yield _sample("codec_encoded_bytes_total", node, row["encoded_bytes"], **labels)
        yield _sample("codec_seconds_total", node, row.get("seconds", 0.0), **labels)
    for row in codecs.get("errors", ()):
        own = {"tier": row["tier"], "codec": row["codec"]}
        yield from _histogram("codec_error_ratio", node, row, **own)
        yield _sample("codec_error_max_ratio", node, row["worst"], **own)
    for row in codecs["kept_raw"]:
        yield _sample("codec_kept_raw_total", node, row["bodies"], tier=row["tier"], reason=row["reason"])


def _histogram(key: str, node: str, plain: Mapping[str, Any], **labels: str) -> Iterator[Sample]:
    """Cumulative buckets, sum and count of a histogram's plain form (`core.histogram`)."""
    metric, own, total = _TABLE[key], (("node", node), *labels.items()), 0
    for bound, count in zip([*(f"{b:g}" for b in plain["bounds"]), "+Inf"], plain["counts"], strict=True):
        total += count
        yield Sample(metric, (*own, ("le", bound)), total, "_bucket")
    yield Sample(metric, own, plain["sum"], "_sum")
    yield Sample(metric, own, total, "_count")


def render(found: Iterable[Sample]) -> str:
    """Samples of any number of nodes in Prometheus' text exposition format, version 0.0.4."""
    by_metric: dict[Metric, list[Sample]] = {}
    for sample in found:
        by_metric.setdefault(sample.metric, []).append(sample)
    lines: list[str] = []
    for metric, rows in by_metric.items():
        lines.append(f"# HELP {metric.name} {_escape(metric.help)}")
        lines.append(f"# TYPE {metric.name} {metric.kind}")
        for row in rows:
            labels = ",".join(f'{name}="{_escape(value, quoted=True)}"' for name, value in row.labels)
            lines.append(f"{row.name}{{{labels}}} {_number(row.value)}")
    return "\n".join(lines) + "\n"


def _escape(text: str, quoted: bool = False) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quoted else text


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))
