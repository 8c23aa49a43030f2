"""Metrics: every branch of a plan has a series, what a node counts adds up, and Ray's endpoint shows it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import socket
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from p2pcache import EmbeddedMesh, FixedChunker, KVLayout, Miss, Namespace, NodeConfig, Source
from p2pcache.core.histogram import BOUNDS_S
from p2pcache.core.membership import Member, View
from p2pcache.core.plans import Tally
from p2pcache.metrics import METRICS, Sample, render, samples
from p2pcache.node.sight import HOT_SHOWN, RECENT_FETCHES_MAX, RECENT_MAX, WORDS, Sight, explain
from p2pcache.types import BodyInfo, ContentKey, ExactKey
from tests.fault.node_process import PATIENCE_S, until

ROOT = Path(__file__).parents[2]
LAYOUT = KVLayout(layers=4, kv_heads=2, head_dim=16, dtype="float32")  # 1 KiB a token
NAMESPACE = Namespace("model", "weights", LAYOUT)
CHUNKS = FixedChunker(64)
KIB = 1024


def tokens(seed: int, chunks: int = 1) -> torch.Tensor:
    return torch.arange(64 * chunks) + 100_000 * seed


def value(found: list[Sample], name: str, **labels: str) -> float:
    """The sum of all series of one name that have these labels."""
    return sum(
        s.value for s in found if s.name == "p2pcache_" + name and labels.items() <= dict(s.labels).items()
    )


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedMesh]:
    """Two nodes; the second has a small host tier above an NVMe tier."""
    folder = tmp_path_factory.mktemp("nvme")
    configs = [
        NodeConfig(name="n0", host_bytes_max=8 << 20, resync_s=0.0),
        NodeConfig(
            name="n1",
            host_bytes_max=256 * KIB,
            nvme_path=str(folder),
            nvme_bytes_max=16 << 20,
            nvme_codec="lossless",
            resync_s=0.0,
        ),
    ]
    with EmbeddedMesh(configs) as mesh:
        yield mesh


@pytest.fixture
def caches(mesh: EmbeddedMesh) -> Iterator[list[Any]]:
    with mesh.client(0, PATIENCE_S) as one, mesh.client(1, PATIENCE_S) as two:
        yield [client.open(NAMESPACE) for client in (one, two)]


def lookup_and_fetch(cache: Any, run: torch.Tensor, **how: Any) -> None:
    found = cache.lookup(run, chunker=CHUNKS, budget_s=PATIENCE_S, **how)
    with cache.fetch(found, budget_s=PATIENCE_S):
        pass


def keep(cache: Any, run: torch.Tensor, kv: Callable[..., torch.Tensor] = torch.zeros) -> None:
    stored = cache.store(cache.chunks(run, CHUNKS), kv(LAYOUT.shape(len(run))))
    assert stored.published(PATIENCE_S)


# -- sums ------------------------------------------------------------------------------------------

_operations = st.lists(
    st.tuples(
        st.sampled_from(["store", "lookup", "fetch", "exact-only", "no time", "too big", "restart view"]),
        st.integers(0, 1),
        st.lists(st.integers(0, 5), min_size=1, max_size=3),
    ),
    max_size=10,
)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(_operations)
def test_hits_and_misses_add_up_to_chunks_whatever_was_done(
    mesh: EmbeddedMesh, caches: list[Any], operations: list[tuple[str, int, list[int]]]
):
    for what, node, seeds in operations:
        cache, run = caches[node], torch.cat([tokens(seed) for seed in seeds])
        if what == "store":
            keep(cache, run)
        elif what == "lookup":
            cache.lookup(run, chunker=CHUNKS, budget_s=PATIENCE_S)
        elif what == "exact-only":
            lookup_and_fetch(cache, run, content_reuse=False)
        elif what == "no time":
            cache.fetch(cache.lookup(run, chunker=CHUNKS, budget_s=PATIENCE_S), budget_s=0.0).release()
        elif what == "too big":
            cache.store(cache.chunks(tokens(9, 8), FixedChunker(512)), torch.zeros(LAYOUT.shape(512)))
        elif what == "restart view":
            mesh.share_view()
        else:
            lookup_and_fetch(cache, run)
    for runtime in mesh.nodes:
        check_sums(runtime.status())


def check_sums(status: dict[str, Any]) -> None:
    found = samples(status)
    assert value(found, "hits_total") + value(found, "misses_total") == value(found, "lookup_chunks_total")
    assert value(found, "served_total") + value(found, "fetch_misses_total") == value(
        found, "fetch_chunks_total"
    )
    assert value(found, "fetch_duration_seconds_count") == value(found, "served_total")
    assert value(found, "lookup_duration_seconds_count") == value(found, "lookups_total")
    assert value(found, "hits_total", match="exact") == status["counters"]["hits_exact"]
    assert value(found, "lookup_chunks_total") == status["counters"]["chunks"]
    by_reason: Counter[str] = Counter()
    for sample in found:
        if sample.name in ("p2pcache_misses_total", "p2pcache_fetch_misses_total"):
            by_reason[dict(sample.labels)["reason"]] += int(sample.value)
    assert by_reason == {
        name.removeprefix("miss_"): n
        for name, n in status["counters"].items()
        if name.startswith("miss_") and n
    }


# -- the table -------------------------------------------------------------------------------------


def test_names_units_and_labels_follow_the_conventions_of_prometheus():
    for name, metric in METRICS.items():
        assert re.fullmatch(r"p2pcache_[a-z_]+", name) and metric.kind in ("counter", "gauge", "histogram")
        assert name.endswith("_total") == (metric.kind == "counter"), name
        assert all(re.fullmatch("[a-z]+", label) and label not in ("node", "le") for label in metric.labels)
        if metric.unit in ("bytes", "seconds", "ratio"):
            assert name.removesuffix("_total").endswith("_" + metric.unit), name
        assert metric.help and metric.help[-1] not in ".!", name
        assert metric.kind != "histogram" or metric.unit in ("seconds", "ratio")


def test_every_series_has_the_labels_of_its_row_and_every_row_a_series(mesh: EmbeddedMesh, caches: list[Any]):
    found = samples(everything(mesh, caches))
    seen = defaultdict(set)
    for sample in found:
        labels = [name for name, _ in sample.labels]
        assert labels == ["node", *sample.metric.labels, *(["le"] if sample.suffix == "_bucket" else [])]
        assert (sample.suffix != "") == (sample.metric.kind == "histogram")
        seen[sample.metric.name].add((sample.suffix, sample.labels))
    assert sum(map(len, seen.values())) == len(found), "no series comes twice"
    only_on_faults = {"p2pcache_pull_failures_total"}
    assert seen.keys() >= METRICS.keys() - only_on_faults


_times = itertools.count(1)


def everything(mesh: EmbeddedMesh, caches: list[Any]) -> dict[str, Any]:
    """n1's status after hits from everywhere, misses, refusals and evictions."""
    base = 1000 * next(_times)
    keep(caches[0], tokens(base, 4))
    keep(caches[1], tokens(base + 50), torch.randn)  # no codec makes it any smaller
    for seed in range(base + 10, base + 16):
        keep(caches[1], tokens(seed, 2))  # more than its host tier takes
    lookup_and_fetch(caches[1], tokens(base + 10, 2))  # from NVMe
    lookup_and_fetch(caches[1], tokens(base + 10, 2))  # at hand
    moved = torch.cat([tokens(base + 20), tokens(base, 4)])
    lookup_and_fetch(caches[1], moved)  # one absent, four by content from the peer
    caches[1].store(caches[1].chunks(tokens(base + 30, 8), FixedChunker(512)), torch.zeros(LAYOUT.shape(512)))
    keep(caches[0], tokens(base + 40))
    found = caches[1].lookup(tokens(base + 40), chunker=CHUNKS, budget_s=PATIENCE_S)
    caches[1].fetch(found, budget_s=0.0).release()
    caches[1].fetch(found, budget_s=PATIENCE_S).release()
    return mesh.nodes[1].status()


def test_every_branch_of_a_plan_has_its_series(mesh: EmbeddedMesh, caches: list[Any]):
    before = samples(mesh.nodes[1].status())
    status = everything(mesh, caches)
    after = samples(status)

    def more(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    assert more("hits_total", match="exact", source="local") >= 2
    assert (
        more("hits_total", match="content", source="peer")
        == 4
        == more("hit_tokens_total", match="content") / 64
    )
    assert more("hits_total", match="exact", source="peer") == 1
    assert more("misses_total", reason="absent") >= 1
    for source in ("local", "nvme", "peer"):
        assert more("served_total", source=source) >= 1, source
        assert more("served_bytes_total", source=source) == 64 * KIB * more("served_total", source=source)
        assert more("fetch_duration_seconds_count", source=source) == more("served_total", source=source)
    assert more("served_tokens_total", provenance="in_context") == 64 * more("served_total")
    assert more("pulls_total", transport="shm") == more("pull_duration_seconds_count", transport="shm") >= 1
    assert more("stores_refused_total", reason="no-room") == 1
    assert more("evictions_total", tier="host") >= 1 and more("demotions_total") >= 1
    assert value(after, "tier_capacity_bytes", tier="nvme") > value(after, "tier_used_bytes", tier="nvme") > 0
    assert value(after, "tier_capacity_bytes", tier="host") == 256 * KIB
    assert value(after, "members") == 2 and value(after, "up") == 1
    assert value(after, "ring_share_ratio") == pytest.approx(0.5, abs=0.1)
    assert more("deadlines_missed_total", step="fetch") == more("fetch_misses_total", reason="deadline")


def test_a_node_that_is_down_is_only_not_up():
    assert samples({"name": "a", "error": "gone"}) == [Sample(METRICS["p2pcache_up"], (("node", "a"),), 0)]


def test_the_text_format_is_read_by_prometheus_own_parser(mesh: EmbeddedMesh, caches: list[Any]):
    parser = pytest.importorskip("prometheus_client.parser")
    status = everything(mesh, caches)
    evil = dict(status, name='a"b\\c\nd')
    found = [*samples(status), *samples(evil), *samples({"name": "down", "error": "gone"})]
    families = {f.name: f for f in parser.text_string_to_metric_families(render(found))}
    assert {f.type for f in families.values()} == {"counter", "gauge", "histogram"}
    read = {(s.name, tuple(sorted(s.labels.items()))): s.value for f in families.values() for s in f.samples}
    assert read == {(s.name, tuple(sorted(s.labels))): pytest.approx(s.value) for s in found}
    buckets = [s for s in families["p2pcache_lookup_duration_seconds"].samples if s.name.endswith("_bucket")]
    ours = [s.value for s in buckets if s.labels["node"] == "n1"]
    assert ours == sorted(ours) and len(ours) == len(BOUNDS_S) + 1 and ours[-1] > 0


# -- what a node remembers -------------------------------------------------------------------------


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_memory_is_bounded_and_a_status_stays_small():
    clock = Clock()
    sight, rng = Sight(clock), Random(1)
    body = BodyInfo(ContentKey(b"c" * 16), ExactKey(b"e" * 16), 64, 64 * KIB)
    grants: Any = [
        type(
            "Grant",
            (),
            {"miss": miss, "peer": "p" * 128, "source": Source.PEER, "transport": "", "seconds": 0.0},
        )
        for miss in Miss
    ]
    for _ in range(500):
        clock.now_s += 1
        sight.looked_up(Tally(999 * len(Miss), {}, {}, dict.fromkeys(Miss, 999)), 0.1)
        sight.fetched([body] * len(grants), grants, 0.1, chunks=len(grants))
        sight.reserved([*map(str, Miss), "resident"])
        for transport in ("shm", "tcp", "ucx"):
            served: Any = type(
                "Grant", (), {"miss": None, "source": Source.PEER, "transport": transport, "seconds": 1 / 3}
            )
            other = BodyInfo(ContentKey(rng.randbytes(16)), body.exact, 2**31, 2**62)
            sight.fetched([other], [served], 0.1, chunks=1)
    plain = sight.plain()
    assert RECENT_MAX / 2 < len(plain["recent"]) <= RECENT_MAX + RECENT_FETCHES_MAX
    assert len(plain["hottest"]) == HOT_SHOWN
    assert len(json.dumps(plain)) < 32 * KIB
    assert [m["ago_s"] for m in plain["recent"]] == sorted(m["ago_s"] for m in plain["recent"])


def test_usual_misses_are_remembered_to_the_last_of_them():
    clock = Clock()
    sight = Sight(clock)
    for _ in range(100):
        clock.now_s += 1
        sight.looked_up(Tally(200, {}, {}, {Miss.OWNER_UNREACHABLE: 200}), 0.1)
    recent = sight.plain()["recent"]
    assert [m["ago_s"] for m in recent] == list(range(RECENT_MAX))


def test_every_reason_is_put_into_words():
    assert WORDS.keys() == {miss.value for miss in Miss}
    assert explain(12, {"absent": 3}) == "3 of 12: no node holds them"
    words = explain(12, {"absent": 3, "deadline": 4, "busy": 1, "corrupt": 1}, ["n1", "n2", "n3"])
    assert words.startswith(
        "4 of 12: the caller's time was up; 3 of 12: no node holds them; 2 for other reasons"
    )
    assert words.endswith("asked n1, n2 and 1 more")


def test_a_recent_miss_says_when_how_much_and_why(mesh: EmbeddedMesh, caches: list[Any]):
    keep(caches[0], tokens(60))
    caches[0].lookup(torch.cat([tokens(60), tokens(61), tokens(62)]), chunker=CHUNKS, budget_s=PATIENCE_S)
    newest = mesh.nodes[0].status()["sight"]["recent"][0]
    assert newest["step"] == "lookup" and newest["misses"] == {"absent": 2}
    assert newest["chunks"] == 3 and newest["why"] == "2 of 3: no node holds them"
    assert 0 <= newest["ago_s"] < PATIENCE_S and 0 < newest["seconds"] < PATIENCE_S


def test_the_hottest_chunk_is_the_one_most_served(mesh: EmbeddedMesh, caches: list[Any]):
    keep(caches[0], tokens(70))
    key = caches[0].chunks(tokens(70), CHUNKS)[0].content
    for _ in range(40):
        lookup_and_fetch(caches[0], tokens(70))
    hottest = mesh.nodes[0].status()["sight"]["hottest"][0]
    assert hottest["key"] == key.hex() and hottest["served"] >= 40
    assert hottest["bytes"] == 64 * KIB * hottest["served"] and hottest["tokens"] == 64 * hottest["served"]


def test_shares_of_the_ring_follow_the_view_and_add_up():
    members = [Member(name, i, "127.0.0.1:1") for i, name in enumerate("abcde")]
    views = [View(), View.of(members[:1]), View.of(members)]
    sight = Sight(Clock())
    assert sight.ring("a", views[0]) == {"share": 0.0, "balance": 0.0}
    assert sight.ring("a", views[1]) == {"share": 1.0, "balance": 1.0}
    assert sum(Sight(Clock()).ring(m.name, views[2])["share"] for m in members) == pytest.approx(1.0)
    assert sight.ring("a", views[2])["balance"] == pytest.approx(1.0, abs=0.1)


def test_a_status_travels_between_nodes(mesh: EmbeddedMesh, caches: list[Any]):
    nodes = caches[0].client.mesh()
    assert [n["name"] for n in nodes] == ["n0", "n1"] and all("sight" in n and "ring" in n for n in nodes)
    for node in nodes:
        check_sums(node)


# -- Ray -------------------------------------------------------------------------------------------


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An exporter over stand-ins for Ray's metrics, and what they were told: (name, tags) -> value."""
    metrics_ray = pytest.importorskip("p2pcache.metrics_ray")
    told: dict[tuple[str, str], float] = defaultdict(float)

    class Series:
        def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]):
            self.name, self.tag_keys = name, tag_keys

        def key(self, tags: dict[str, str]) -> tuple[str, str]:
            assert tuple(tags) == self.tag_keys
            return self.name, json.dumps(tags, sort_keys=True)

    class Counts(Series):
        def inc(self, value: float, tags: dict[str, str]) -> None:
            assert value > 0, "Ray refuses anything else"
            told[self.key(tags)] += value

    class Level(Series):
        def set(self, value: float, tags: dict[str, str]) -> None:
            told[self.key(tags)] = value

    monkeypatch.setattr(metrics_ray, "Counter", Counts)
    monkeypatch.setattr(metrics_ray, "Gauge", Level)
    return metrics_ray.RayExporter(), told


def test_the_exporter_adds_up_to_the_status_and_survives_a_restart(
    mesh: EmbeddedMesh, caches: list[Any], exported: Any
):
    exporter, told = exported
    first = everything(mesh, caches)
    exporter.update(first)
    exporter.update(first)
    second = everything(mesh, caches)
    exporter.update(second)
    for sample in samples(second):
        key = sample.name, json.dumps(dict(sample.labels), sort_keys=True)
        assert told.get(key, 0.0) == pytest.approx(sample.value), key
    chunks = ("p2pcache_lookup_chunks_total", json.dumps({"node": "n1"}))
    before, again = told[chunks], value(samples(first), "lookup_chunks_total")
    exporter.update(dict(first, incarnation=7))  # another life, with counts of its own
    assert told[chunks] == before + again
    exporter.update(dict(second, incarnation=8))  # and one that has already counted more than the last
    assert told[chunks] == 2 * before + again
    exporter.update({"name": "n1", "error": "gone"})
    node = json.dumps({"node": "n1"})
    assert told["p2pcache_up", node] == told["p2pcache_members", node] == told["p2pcache_sessions", node] == 0
    assert told[chunks] == 2 * before + again and told["p2pcache_lookup_duration_seconds_count", node] > 0


def test_the_exporters_loop_outlives_a_fault_and_ends(exported: Any):
    exporter, told = exported
    stopping, turns = threading.Event(), iter(range(10**6))

    def read() -> dict[str, Any]:
        if next(turns) == 0:
            raise RuntimeError("a fault")
        return {"name": "a", "error": "gone"}

    thread = threading.Thread(target=exporter.run, args=(read, stopping, 0.01))
    thread.start()
    until(lambda: len(told) > 0, "something was exported")
    stopping.set()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


@pytest.mark.cluster
@pytest.mark.timeout(180)
def test_the_series_appear_on_rays_own_endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # Ray's ports on loopback
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    done = _in_a_process(_ray_program(_free_port(), tmp_path))
    lines = [line for line in done.splitlines() if line.startswith("ray_p2pcache_")]
    there = {re.match(r"[a-z0-9_]+", line)[0].removeprefix("ray_") for line in lines}
    for name in ("hits_total", "misses_total", "stored_total", "up", "tier_used_bytes", "served_bytes_total"):
        assert f"p2pcache_{name}" in there, sorted(there)
    assert {"p2pcache_lookup_duration_seconds" + s for s in ("_bucket", "_sum", "_count")} <= there
    (stored,) = [line for line in lines if line.startswith("ray_p2pcache_stored_total{")]
    assert 'node="m0"' in stored and float(stored.rpartition(" ")[2]) == 4
    (hits,) = [line for line in lines if line.startswith("ray_p2pcache_hits_total{")]
    assert 'match="exact"' in hits and 'source="local"' in hits and float(hits.rpartition(" ")[2]) == 12
    assert "# TYPE ray_p2pcache_hits_total counter" in done.splitlines()


def _free_port() -> int:
    """Below the range from which Ray gives ports to its workers."""
    for port in range(8790, 9900):
        with contextlib.closing(socket.socket()) as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    pytest.skip("no free port")


def _ray_program(port: int, folder: Path) -> str:
    """A Ray of one node with an actor that holds a p2pcache node; prints the endpoint's answer."""
    return f"""
import logging, sys, time, urllib.request
import ray
from ray.cluster_utils import Cluster
sys.path.insert(0, {str(ROOT)!r})
cluster = Cluster(initialize_head=True, head_node_args={{
    "num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False,
    "metrics_export_port": {port}}})
try:
    ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)

    @ray.remote(num_cpus=0)
    class Holds:
        def __init__(self):
            import sys, threading
            sys.path.insert(0, {str(ROOT)!r})
            from p2pcache.config import NodeConfig
            from p2pcache.metrics_ray import RayExporter
            from p2pcache.runtime import NodeRuntime
            config = NodeConfig(name="m0", host_bytes_max=4 << 20, runtime_dir={str(folder / "run")!r})
            self.runtime, self.stopping = NodeRuntime.start(config), threading.Event()
            threading.Thread(
                target=RayExporter().run, args=(self.runtime.status, self.stopping, 0.5), daemon=True).start()

        def work(self):
            import torch
            from p2pcache import FixedChunker, KVLayout, Namespace
            from p2pcache.api import Client
            layout = KVLayout(4, 2, 16, "float32")
            with Client(self.runtime.socket_path, 20.0) as client:
                cache = client.open(Namespace("m", "w", layout))
                run = torch.arange(256)
                cache.store(cache.chunks(run, FixedChunker(64)), torch.zeros(layout.shape(256)))
                for _ in range(2):
                    cache.lookup(torch.arange(320), chunker=FixedChunker(64), budget_s=20.0)
                with cache.fetch(cache.lookup(run, chunker=FixedChunker(64))):
                    pass

        def stop(self):
            self.stopping.set()
            self.runtime.close()

    actor = Holds.remote()
    ray.get(actor.work.remote())
    end_s = time.monotonic() + 60
    while True:
        text = urllib.request.urlopen("http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
        if "ray_p2pcache_hits_total" in text or time.monotonic() > end_s:
            break
        time.sleep(0.5)
    print(text)
    ray.get(actor.stop.remote())
finally:
    ray.shutdown()
    cluster.shutdown()
"""


def _in_a_process(program: str) -> str:
    """Ray of its own, apart from any other test's."""
    import subprocess
    import sys

    environ = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=150, env=environ
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


# -- Grafana ---------------------------------------------------------------------------------------

BOARD = json.loads((ROOT / "cluster" / "grafana-dashboard.json").read_text())
QUERIES = [
    (panel["title"], target["expr"], target["legendFormat"])
    for panel in BOARD["panels"]
    for target in panel.get("targets", [])
]


def asked(expression: str) -> Iterator[tuple[str, str, str]]:
    """(metric, suffix, selector) of each series that an expression names."""
    for name, selector in re.findall(r"\$\{prefix\}(\w+)(?:\{([^}]*)\})?", expression):
        base = re.sub("_(bucket|sum|count)$", "", name)
        histogram = base in METRICS and METRICS[base].kind == "histogram"
        yield (base, name[len(base) :], selector) if histogram else (name, "", selector)


@pytest.mark.parametrize(("title", "expression", "legend"), QUERIES)
def test_the_board_asks_for_metrics_and_labels_that_exist(title: str, expression: str, legend: str):
    series = list(asked(expression))
    assert series and expression.count("p2pcache_") == len(series), "every name stands behind ${prefix}"
    labels = {"node"}
    for name, suffix, selector in series:
        metric = METRICS[name]
        own = {"node", *metric.labels, *(["le"] if suffix == "_bucket" else [])}
        labels |= own
        assert set(re.findall(r"(\w+)\s*=~?\s*\"", selector)) <= own, name
        assert 'node=~"$node"' in selector
        counts = metric.kind != "gauge"
        assert bool(re.search(r"(rate|increase)\(\$\{prefix\}" + name, expression)) == counts, name
    grouped = {label.strip() for by in re.findall(r"by \(([^)]*)\)", expression) for label in by.split(",")}
    assert grouped <= labels
    shown = set(re.findall(r"\{\{(\w+)\}\}", legend))
    assert shown <= (grouped), "a legend shows what is grouped by"
    assert ("histogram_quantile" in expression) == ("le" in grouped)


def test_the_board_shows_every_metric_and_asks_the_chosen_source():
    shown = {name for _, expression, _ in QUERIES for name, _, _ in asked(expression)}
    assert shown == METRICS.keys()
    assert BOARD["schemaVersion"] >= 38
    variables = {v["name"]: v for v in BOARD["templating"]["list"]}
    assert (
        variables["datasource"]["type"] == "datasource" and variables["datasource"]["query"] == "prometheus"
    )
    (named,) = asked(variables["node"]["definition"])
    assert named[0] in METRICS
    for panel in BOARD["panels"]:
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}" and panel["description"]
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)
    cells = Counter(
        (x, y)
        for p in BOARD["panels"]
        for x in range(p["gridPos"]["x"], p["gridPos"]["x"] + p["gridPos"]["w"])
        for y in range(p["gridPos"]["y"], p["gridPos"]["y"] + p["gridPos"]["h"])
    )
    assert max(cells.values()) == 1 and max(x for x, _ in cells) == 23, "no two panels overlap"
