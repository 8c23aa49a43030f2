"""The web page of a mesh: its history is sound, its server gives away nothing else, a browser shows it."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import html
import http.client
import json
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from p2pcache import EmbeddedMesh, FixedChunker, KVLayout, Namespace, NodeConfig
from p2pcache.dashboard import server
from p2pcache.dashboard.history import History, changes, counts, group, remember
from p2pcache.dashboard.server import Dashboard
from p2pcache.dashboard.summary import checked, hottest, recent_misses, summary
from p2pcache.types import ConfigError
from tests.fault.node_process import PATIENCE_S, until

LAYOUT = KVLayout(layers=4, kv_heads=2, head_dim=16, dtype="float32")
CHUNKS = FixedChunker(64)
CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))),
    None,
)


@pytest.fixture(scope="module")
def mesh() -> Iterator[EmbeddedMesh]:
    configs = [NodeConfig(name=f"n{i}", host_bytes_max=8 << 20, resync_s=0.0) for i in range(3)]
    with EmbeddedMesh(configs) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def statuses(mesh: EmbeddedMesh) -> list[dict[str, Any]]:
    """After n0 stored 4 chunks, and n1 found them at n0 with 2 more that nobody has."""
    traffic(mesh)
    return [node.status() for node in mesh.nodes]


def traffic(mesh: EmbeddedMesh, seed: int = 0) -> None:
    with mesh.client(0, PATIENCE_S) as one, mesh.client(1, PATIENCE_S) as two:
        caches = [c.open(Namespace("m", "w", LAYOUT)) for c in (one, two)]
        run = torch.arange(384) + 100_000 * seed
        assert (
            caches[0]
            .store(caches[0].chunks(run[:256], CHUNKS), torch.zeros(LAYOUT.shape(256)))
            .published(PATIENCE_S)
        )
        with caches[1].fetch(caches[1].lookup(run, chunker=CHUNKS, budget_s=PATIENCE_S)):
            pass


def node(
    name: str = "a", incarnation: int = 1, hits: int = 0, missed: int = 0, served: int = 0
) -> dict[str, Any]:
    """A status with as much as rates need."""
    return {
        "name": name,
        "incarnation": incarnation,
        "counters": {"bytes_local": served, "pulls_shm": hits},
        "sight": {
            "chunks": hits + missed,
            "hits": {"exact": {"local": hits}},
            "misses": {"absent": missed},
        },
    }


# -- history ---------------------------------------------------------------------------------------

_one = st.one_of(
    st.none(),
    st.just("down"),
    st.tuples(st.integers(1, 2), st.integers(0, 50), st.integers(0, 50), st.integers(0, 1000)),
)


@given(st.lists(st.tuples(st.lists(_one, min_size=2, max_size=2), st.floats(0, 20)), max_size=30))
def test_rates_are_never_negative_whatever_nodes_do(readings: list):
    history, now_s = History(points_max=10), 0.0
    for nodes, pause_s in readings:
        now_s += pause_s
        seen = []
        for name, one in zip("ab", nodes, strict=True):
            if one == "down":
                seen.append({"name": name, "error": "gone"})
            elif one is not None:
                seen.append(node(name, *one))
        history.observe(seen, now_s)
        assert all(rate >= 0 for of_node in history.rates.values() for rate in of_node.values())
    assert len(history.points) <= 10
    series = history.series(now_s)
    assert {len(column) for column in series.values()} == {len(series["ago_s"])}
    assert all(value >= 0 for column in series.values() for value in column)
    assert series["ago_s"] == sorted(series["ago_s"], reverse=True)


@given(st.integers(0, 400), st.integers(2, 50))
def test_a_long_history_is_shown_in_few_points_that_add_up(length: int, shown_max: int):
    history = History()
    for i in range(length + 1):
        history.observe([node(hits=3 * i, missed=i, served=100 * i)], float(i))
    series = history.series(float(length), shown_max)
    assert len(series["ago_s"]) <= shown_max
    assert (sum(series["local"]), sum(series["missed"])) == (3 * length, length)
    assert sum(series["bytes"]) == 100 * length and sum(series["seconds"]) == length
    total, seconds = history.total(-1.0)
    assert total["chunks:"] == 4 * length and seconds == length


def test_what_was_counted_before_the_first_reading_is_no_spike():
    history = History()
    history.observe([node(hits=1_000_000)], 0.0)
    history.observe([node(hits=1_000_002), node("b", hits=5_000)], 2.0)
    assert history.rates["a"]["hits:local"] == 1.0 and history.rates["b"] == {}


def test_a_restarted_node_counts_from_zero_and_one_that_was_down_from_where_it_was():
    last = remember({}, [node(hits=10)])
    last = remember(last, [{"name": "a", "error": "gone"}])
    assert changes(last, [node(hits=12)])["a"]["hits:local"] == 2
    assert changes(last, [node(incarnation=2, hits=12)])["a"]["hits:local"] == 12
    assert changes(last, [node(hits=3)])["a"]["hits:local"] == 3, "a count that fell has started anew"


def test_a_node_that_has_left_the_mesh_is_forgotten():
    assert remember(remember({}, [node("a"), node("b")]), [node("b")]).keys() == {"b"}


def test_counts_of_a_real_node(statuses: list[dict[str, Any]]):
    of = counts(statuses[1])
    assert group(of, "hits") == {"local": 0, "nvme": 0, "peer": 4} and group(of, "miss") == {"absent": 2}
    assert (
        of["chunks:"] == 6 and group(of, "bytes")["peer"] == 256 * 1024 and group(of, "pulls") == {"shm": 4}
    )


# -- summary ---------------------------------------------------------------------------------------

_nonsense = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(data=st.data())
def test_a_status_that_is_nonsense_in_one_place_is_shown_or_named_and_harms_no_other(
    data: st.DataObject, statuses: list
):
    broken = json.loads(json.dumps(statuses[1]))
    where: Any = broken
    for _ in range(data.draw(st.integers(1, 4))):
        key = data.draw(st.sampled_from(sorted(where) if isinstance(where, dict) else range(len(where))))
        inner = where[key]
        if not inner or not isinstance(inner, dict | list) or data.draw(st.booleans()):
            where[key] = data.draw(_nonsense)
            break
        where = inner
    history = History()
    for now_s in (1.0, 2.0):
        seen = checked([statuses[0], broken, statuses[2]])
        history.observe(seen, now_s)
        shown = summary(seen, history, now_s)
    json.dumps(shown, allow_nan=False)
    assert len(shown["nodes"]) == 3 and shown["nodes"][0]["name"] == "n0" and "error" not in shown["nodes"][0]


@pytest.mark.parametrize("nonsense", [None, [], 5, {}, {"name": 3}, {"error": None}])
def test_what_is_no_status_at_all_is_a_node_with_an_error(nonsense: Any):
    (shown,) = checked([nonsense])
    assert shown["error"] and isinstance(shown["name"], str)


def test_the_hottest_of_all_nodes_are_added_up(statuses: list[dict[str, Any]]):
    one = {"key": "aa", "served": 3, "error": 1, "bytes": 10, "tokens": 5}
    nodes = [dict(statuses[0], sight={"hottest": [one, dict(one, key="bb", served=9)]})] * 2
    assert [(h["key"], h["served"], h["nodes"]) for h in hottest(nodes)] == [("bb", 18, 2), ("aa", 6, 2)]


def test_misses_with_the_same_reasons_are_one_row():
    def missed(ago_s: float, reason: str) -> dict[str, Any]:
        return {
            "ago_s": ago_s,
            "step": "lookup",
            "chunks": 4,
            "misses": {reason: 1},
            "why": f"{ago_s} {reason}",
        }

    recent = [missed(1, "absent"), missed(2, "busy"), missed(3, "absent"), missed(4, "absent")]
    rows = recent_misses([{"name": "a", "sight": {"recent": recent}}])
    assert [(r["why"], r["times"]) for r in rows] == [("1 absent", 3), ("2 busy", 1)]


def test_the_mesh_is_small_enough_to_be_asked_for_often(statuses: list[dict[str, Any]]):
    many = [dict(statuses[1], name=f"node-{i}") for i in range(64)]
    history = History()
    for now_s in range(300):
        history.observe(many, float(now_s))
    assert len(json.dumps(summary(checked(many), history, 300.0))) < 128 << 10


# -- server ----------------------------------------------------------------------------------------


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Dashboard]]:
    with contextlib.ExitStack() as stack:
        yield lambda read, **how: stack.enter_context(Dashboard(read, **how))


def get(dashboard: Dashboard, path: str, method: str = "GET", **headers: str) -> tuple[int, Any, bytes]:
    port = int(dashboard.url.rstrip("/").rpartition(":")[2])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    with contextlib.closing(connection):
        connection.request(method, path, headers=headers)
        reply = connection.getresponse()
        return reply.status, reply.headers, reply.read()


def test_it_serves_the_page_and_the_mesh_and_nothing_else(serve: Callable, statuses: list):
    dashboard = serve(lambda: statuses)
    assert dashboard.url.startswith("http://127.0.0.1:")
    status, headers, page = get(dashboard, "/")
    assert status == 200 and headers["Content-Type"] == "text/html; charset=utf-8" and b"<title>" in page
    status, headers, body = get(dashboard, "/api/mesh.json")
    mesh = json.loads(body)
    assert status == 200 and headers["Content-Type"] == "application/json"
    assert [n["name"] for n in mesh["nodes"]] == ["n0", "n1", "n2"] and 0 <= mesh["age_s"] < PATIENCE_S
    for path in (
        "/index.html",
        "/api",
        "/api/mesh.json?x=<b>",
        "/../server.py",
        "/%2e%2e/",
        "/?<script>",
    ):
        status, headers, body = get(dashboard, path)
        assert status == 404 and b"<" not in body and headers["Content-Type"] == "text/plain", path
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "<b>"):
        status, _, body = get(dashboard, "/", method)
        assert status >= 400 and b"<" not in body
    status, headers, body = get(dashboard, "/", "HEAD")
    assert status == 200 and int(headers["Content-Length"]) == len(page) and body == b""


def test_a_browser_is_told_to_run_the_pages_own_script_only(serve: Callable):
    _, headers, page = get(serve(list), "/")
    policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    assert headers["X-Content-Type-Options"] == "nosniff" and headers["Cache-Control"] == "no-store"
    text = page.decode()
    assert not re.search(r"(innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\()", text)
    urls = set(re.findall(r"https?://[^'\"\s]+", text))
    assert urls == {"http://www.w3.org/2000/svg"}, "no resource from elsewhere"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:80", 200),
        ("127.0.0.1", 200),
        ("[::1]:9", 200),
        ("evil.example", 421),
        ("evil.example:80", 421),
        ("10.0.0.1", 421),
        ("", 421),
        ("[::1", 421),
        ("localhost.evil.example", 421),
    ],
)
def test_on_loopback_only_names_of_loopback_are_answered(serve: Callable, host: str, status: int):
    for path in ("/", "/api/mesh.json"):
        found, _, body = get(serve(list), path, Host=host)
        assert found == status and b"evil" not in body


def test_a_mesh_that_cannot_be_asked_is_shown_as_it_was_with_the_reason(
    serve: Callable, statuses: list, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(server, "POLL_S", 0.02)
    faults: list[str] = []

    def read() -> list[dict[str, Any]]:
        if faults:
            raise RuntimeError(faults[0])
        return statuses

    dashboard = serve(read)
    until(lambda: len(json.loads(dashboard.mesh_json())["nodes"]) == 3, "a first reading")
    faults.append("the GCS <does> not answer")
    until(lambda: "error" in json.loads(dashboard.mesh_json()), "the fault is told")
    mesh = json.loads(dashboard.mesh_json())
    assert mesh["error"] == "the mesh cannot be asked: RuntimeError: the GCS <does> not answer"
    assert [n["name"] for n in mesh["nodes"]] == ["n0", "n1", "n2"]
    until(lambda: json.loads(dashboard.mesh_json())["age_s"] > 0.1, "what is shown grows old")
    faults.clear()
    until(lambda: "error" not in json.loads(dashboard.mesh_json()), "it is asked again")


def test_the_mesh_is_asked_seldom_and_more_often_only_while_somebody_watches(
    serve: Callable, monkeypatch: pytest.MonkeyPatch
):
    for name, value in (("POLL_S", 0.1), ("IDLE_POLL_S", 0.8), ("WATCHED_S", 0.5)):
        monkeypatch.setattr(server, name, value)
    asked_s: list[float] = []
    dashboard = serve(lambda: asked_s.append(time.monotonic()) or [])
    until(lambda: len(asked_s) >= 3, "the background readings")
    end_s = time.monotonic() + 0.5
    watched_from = len(asked_s)
    while time.monotonic() < end_s:  # as fast as a browser gone mad
        dashboard.mesh_json()
    watched = asked_s[watched_from:]
    idle = [b - a for a, b in zip(asked_s[:3], asked_s[1:3], strict=False)]
    assert min(idle) >= 0.6, "nobody watched"
    assert len(watched) >= 2 and min(b - a for a, b in zip(asked_s, asked_s[1:], strict=False)) >= 0.09


def test_who_comes_while_the_mesh_hangs_is_answered_and_close_does_not_wait(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server, "_FRESH_WAIT_S", 0.05)
    go = threading.Event()
    dashboard = Dashboard(lambda: go.wait(PATIENCE_S) and []).start()
    try:
        assert json.loads(get(dashboard, "/api/mesh.json")[2]) == {"age_s": None, "nodes": []}
        started_s = time.monotonic()
        dashboard.close()
        dashboard.close()
        assert time.monotonic() - started_s < 5
    finally:
        go.set()


def test_it_says_where_it_is_once_it_is_there_and_frees_its_port():
    dashboard = Dashboard(list)
    with pytest.raises(ConfigError, match="not been started"):
        _ = dashboard.url
    dashboard.start()
    port = int(dashboard.url.rstrip("/").rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
        Dashboard(list, port=port).start()
    dashboard.close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=1)
    with Dashboard(list, port=port) as again:
        assert again.url.endswith(f":{port}/")
    with pytest.raises(ConfigError):
        Dashboard(list, host="no.such.host.invalid").start()


def test_half_a_request_and_garbage_harm_nobody(serve: Callable):
    dashboard = serve(list)
    port = int(dashboard.url.rstrip("/").rpartition(":")[2])
    sockets = []
    for start in (b"GET /", b"\x00\xff\r\n\r\n", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 70_000):
        sockets.append(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S))
        with contextlib.suppress(OSError):
            sockets[-1].sendall(start)
    assert get(dashboard, "/")[0] == 200
    for one in sockets:
        one.close()
    assert urllib.request.urlopen(dashboard.url, timeout=PATIENCE_S).status == 200


# -- in a browser ----------------------------------------------------------------------------------


class Text(HTMLParser):
    """A page's text without its script and style, and its tags."""

    def __init__(self, page: str):
        super().__init__()
        self.text, self.tags, self._hidden = "", [], 0
        self.feed(page)
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append((tag, dict(attrs)))
        self._hidden += tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.text += " " + data


def browse(url: str, folder: Path, *options: str) -> Text:
    """The page as headless Chromium has it after a few seconds of its own time."""
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}"]
    command += ["--window-size=1280,800", "--virtual-time-budget=6000", *options, "--dump-dom", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0 and "<html" in done.stdout, done.stderr[-2000:]
    return Text(done.stdout)


def test_a_browser_shows_the_nodes_and_numbers_of_a_real_mesh(
    serve: Callable, mesh: EmbeddedMesh, statuses: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(server, "POLL_S", 0.2)
    seeds = iter(range(1, 10**6))
    steady = [status_after(mesh, next(seeds)) for _ in range(2)]
    dashboard = serve(lambda: steady.pop(0) if len(steady) > 1 else steady[0])
    until(lambda: len(json.loads(dashboard.mesh_json())["history"]["ago_s"]) > 0, "a point of history")
    page = browse(dashboard.url, tmp_path)
    assert "3 nodes, all agree on the members" in page.text and "up to date" in page.text
    for name in ("n0", "n1", "n2"):
        assert name in page.text
    assert "4 of 6 chunks" in page.text and "a peer 67 %" in page.text and "missed 33 %" in page.text
    assert "2 of 6: no node holds them" in page.text and "of 8 MiB" in page.text
    assert f"shm {steady[0][1]['counters']['pulls_shm']} pulls" in page.text
    for hot in json.loads(dashboard.mesh_json())["hottest"][:6]:
        assert hot["key"][:12] in page.text
    drawn = [attributes for tag, attributes in page.tags if tag == "svg"]
    assert len(drawn) == 2 and all(a["role"] == "img" and a["aria-label"] for a in drawn)


def status_after(mesh: EmbeddedMesh, seed: int) -> list[dict[str, Any]]:
    traffic(mesh, seed)
    return [n.status() for n in mesh.nodes]


def test_a_browser_shows_html_in_names_and_errors_as_text(serve: Callable, statuses: list, tmp_path: Path):
    evil = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    recent = [{"ago_s": 1.0, "step": evil, "chunks": 1, "misses": {evil: 1}, "seconds": 0.1, "why": evil}]
    heavy = [{"key": evil, "served": 1, "error": 0, "bytes": 1, "tokens": 1}]
    bad = dict(
        statuses[1], name=evil, view_id=evil, tier_bytes={evil: {"used": 1, "capacity": 2, "bodies": 1}}
    )
    bad["sight"] = bad["sight"] | {"recent": recent, "hottest": heavy, "misses": {evil: 3}}
    bad["counters"] = bad["counters"] | {f"pulls_{evil}": 3, f"failed_{evil}": 1}
    dashboard = serve(lambda: [bad, {"name": evil + "2", "error": evil}, statuses[0]])
    page = browse(dashboard.url, tmp_path)
    assert page.text.count("<script>document.title='owned'</script>") >= 4, "it is there to be read"
    assert "img" not in [tag for tag, _ in page.tags] and len([t for t, _ in page.tags if t == "script"]) == 1
    assert "1 of 3 nodes does not answer" in page.text
    titles = [a.get("title", "") for _, a in page.tags]
    assert not any("owned" in html.unescape(t) and "<" not in t for t in titles)


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "There is no node in the mesh"), (1, "One node owns all of it."), (64, "64 in all")],
)
def test_a_browser_shows_meshes_of_any_size(
    serve: Callable, statuses: list, tmp_path: Path, count: int, words: str
):
    many = [
        dict(statuses[2], name=f"node-{i:02d}", ring={"share": 1 / count, "balance": 1.0 + i / 1000})
        for i in range(count)
    ]
    if count > 9:
        many[9] = {"name": "node-09", "error": "DeadlineExceeded"}
    page = browse(serve(lambda: many).url, tmp_path, "--window-size=400,800")
    assert words in page.text
    assert all(f"node-{i:02d}" in page.text for i in range(count))
    assert ("no answer: DeadlineExceeded" in page.text) == (count > 9)


def test_a_browser_says_when_the_mesh_cannot_be_asked(serve: Callable, tmp_path: Path):
    def read() -> list[dict[str, Any]]:
        raise RuntimeError("no GCS")

    assert "the mesh cannot be asked: RuntimeError: no GCS" in browse(serve(read).url, tmp_path).text
