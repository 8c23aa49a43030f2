"""Pulls between nodes: bytes are asked for with the ticket; nothing is remembered or awaited for ever."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
import torch

from p2pcache import EmbeddedMesh, FixedChunker, KVLayout, Namespace, NodeConfig
from p2pcache.api import Cache
from p2pcache.io.ports import RemoteError
from p2pcache.io.transport_tcp import TcpTransport
from p2pcache.runtime import NodeRuntime
from tests.fault.node_process import PATIENCE_S, at_rest, state, until

LAYOUT = KVLayout(layers=4, kv_heads=2, head_dim=16, dtype="float32")  # 1 KiB a token
NAMESPACE = Namespace("model", "weights", LAYOUT)
CHUNK = 64
CHUNKS = FixedChunker(CHUNK)
COMMON = {"host_bytes_max": 8 << 20, "resync_s": 0.0, "transports": ("tcp",)}


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[list[NodeRuntime], list[Cache]]]:
    """A holder, with the settings of the test's parameter, and a reader."""
    own = getattr(request, "param", {})
    with EmbeddedMesh([NodeConfig(**COMMON, name="n0", **own), NodeConfig(**COMMON, name="n1")]) as mesh:
        with mesh.client(0, PATIENCE_S) as first, mesh.client(1, PATIENCE_S) as second:
            yield mesh.nodes, [first.open(NAMESPACE), second.open(NAMESPACE)]
            for node in mesh.nodes:
                until(lambda node=node: at_rest(state(node)), "at rest")


def keep(cache: Cache, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    run, kv = torch.arange(count), torch.randn(LAYOUT.shape(count))
    assert cache.store(cache.chunks(run, CHUNKS), kv).published(PATIENCE_S)
    return run, kv


def fetch_one_by_one(cache: Cache, run: torch.Tensor, kv: torch.Tensor) -> None:
    for count in range(CHUNK, len(run) + 1, CHUNK):
        lookup = cache.lookup(run[:count], chunker=CHUNKS, budget_s=PATIENCE_S)
        with cache.fetch(lookup, budget_s=PATIENCE_S) as fetched:
            assert [c.miss for c in fetched] == [None] * (count // CHUNK)
            assert torch.equal(torch.cat([c.kv for c in fetched], 2), kv[:, :, :count])


def leftovers(nodes: list[NodeRuntime]) -> list[object]:
    """Early requests, of readers and at holders."""
    transports = [transport for node in nodes for transport in node.node.ports.transports]
    return [one for t in transports for one in (*t._early, *t._holder._early)]


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> list[bytes | None]:
    """What `ask_early` returned, each time."""
    real, asked = TcpTransport.ask_early, []
    monkeypatch.setattr(TcpTransport, "ask_early", lambda *args: asked.append(real(*args)) or asked[-1])
    return asked


def test_from_the_second_pull_on_bytes_are_asked_for_with_the_ticket(pair: tuple, early: list) -> None:
    nodes, caches = pair
    run, kv = keep(caches[0], 6 * CHUNK)
    fetch_one_by_one(caches[1], run, kv)
    assert early[0] is None and len(early) == 6 and None not in early[1:]
    until(lambda: not leftovers(nodes), "nothing left over")
    pool = nodes[1].node.ports.transports[0]._pool
    assert sum(map(len, pool._idle.values())) == 1


@pytest.mark.parametrize("pair", [{"serve_bytes_in_flight_max": CHUNK << 10}], indirect=True)
def test_a_refused_pull_leaves_no_early_request_and_comes_in_its_time(pair: tuple, early: list) -> None:
    nodes, caches = pair
    run, kv = keep(caches[0], 8 * CHUNK)
    fetch_one_by_one(caches[1], run[:CHUNK], kv)
    lookup = caches[1].lookup(run, chunker=CHUNKS, budget_s=PATIENCE_S)
    with caches[1].fetch(lookup, budget_s=PATIENCE_S) as fetched:  # at once, where one at a time may
        assert [c.miss for c in fetched] == [None] * 8
        assert torch.equal(torch.cat([c.kv for c in fetched], 2), kv)
    assert state(nodes[0])["counters"]["tickets_refused"] > 0
    until(lambda: not leftovers(nodes), "nothing left over")


def test_a_holder_that_chooses_its_own_token_is_pulled_from_all_the_same(
    pair: tuple, early: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, caches = pair
    run, kv = keep(caches[0], 3 * CHUNK)
    issue = nodes[0].node.desk.office.issue
    monkeypatch.setattr(nodes[0].node.desk.office, "issue", lambda *args: issue(*args[:4]))
    fetch_one_by_one(caches[1], run, kv)
    assert any(early)
    until(lambda: not leftovers(nodes), "nothing left over")


def test_a_token_that_is_taken_is_not_given_twice(pair: tuple) -> None:
    nodes, caches = pair
    run, _ = keep(caches[0], 2 * CHUNK)
    bodies = [chunk.exact for chunk in caches[0].chunks(run, CHUNKS)]
    token = b"the reader's own"

    async def ask(op: str, body: dict) -> dict:
        deadline_s = asyncio.get_running_loop().time() + PATIENCE_S
        return await nodes[1].node.ports.control.request(nodes[0].member, op, body, deadline_s)

    request = {"bodies": bodies, "transport": "tcp", "deadline_s": 5.0, "tokens": [token, token]}
    tickets = nodes[1].call(ask("pull.open", request))["tickets"]
    tokens = [lease[0] for status, lease in tickets if status == "ok"]
    assert len(tokens) == 2 and tokens[0] == token != tokens[1]
    nodes[1].call(ask("pull.close", {"tokens": tokens}))
    with pytest.raises(RemoteError, match="at most"):
        nodes[1].call(ask("pull.open", request | {"bodies": bodies * 2500, "tokens": []}))


def test_what_is_known_of_peers_that_have_left_is_forgotten(pair: tuple) -> None:
    nodes, _ = pair
    puller, there = nodes[1].node.puller, nodes[0].member

    async def remember() -> None:
        for incarnation in (there.incarnation, there.incarnation + 1):
            puller._silent[there.name, incarnation] = puller._broken[there.name, incarnation, "tcp"] = 1e9

    async def known() -> list[int]:
        return sorted([i for _, i in puller._silent] + [i for _, i, _ in puller._broken])

    nodes[1].call(remember())
    nodes[1].apply_view([nodes[1].member])
    until(lambda: nodes[1].call(known()) == [], "those that have left forgotten")
    nodes[1].apply_view([nodes[1].member, there])
    nodes[1].call(remember())
    nodes[1].apply_view([nodes[1].member, there, _another(nodes[1])])
    until(lambda: nodes[1].call(known()) == [there.incarnation] * 2, "those that are here kept")


def _another(node: NodeRuntime):
    return type(node.member)("another", 7, "127.0.0.1:9", "", {})


def test_waiting_for_what_is_published_ends_at_its_deadline(
    pair: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, caches = pair
    publisher, may_send = nodes[0].node.publisher, asyncio.Event()
    send = publisher._send

    async def late(*args: object) -> None:
        await may_send.wait()
        await send(*args)

    monkeypatch.setattr(publisher, "_send", late)
    run = torch.arange(CHUNK) + 5000
    stored = caches[0].store(caches[0].chunks(run, CHUNKS), torch.randn(LAYOUT.shape(CHUNK)))
    began_s = time.monotonic()
    assert not stored.published(0.2)
    assert 0.2 <= time.monotonic() - began_s < 2.0

    async def flushed() -> bool:
        return await publisher.flushed(asyncio.get_running_loop().time() + 0.1)

    assert nodes[0].call(flushed()) is False
    nodes[0]._loop.call_soon_threadsafe(may_send.set)
    assert stored.published(PATIENCE_S)
