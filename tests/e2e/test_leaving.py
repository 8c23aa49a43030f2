"""A node that leaves hands on what is hot; one that was left out falls silent and is refused by number."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import p2pcache
from p2pcache import EmbeddedMesh, FixedChunker, KVLayout, Miss, Namespace, NodeConfig
from p2pcache.api import Cache
from p2pcache.core.membership import View
from p2pcache.discovery import SOCKET_VARIABLE
from p2pcache.node.fence import Fence
from p2pcache.runtime import NodeRuntime
from p2pcache.types import Fenced, NodeDown
from tests.fault.node_process import PATIENCE_S, until

MIB = 1 << 20
NAMESPACE = Namespace("model", "weights", KVLayout(layers=4, kv_heads=2, head_dim=16, dtype="float32"))
CHUNKS = FixedChunker(64)


@pytest.fixture
def mesh(request: pytest.FixtureRequest) -> Iterator[EmbeddedMesh]:
    common = {"host_bytes_max": 8 * MIB, "resync_s": 0.0} | getattr(request, "param", {})
    with EmbeddedMesh([NodeConfig(name=f"n{i}", **common) for i in range(3)]) as mesh:
        yield mesh


def cache(mesh: EmbeddedMesh, index: int) -> Cache:
    return mesh.client(index, PATIENCE_S).open(NAMESPACE)


def keep(cache: Cache, seed: int, count: int = 1024) -> tuple[torch.Tensor, torch.Tensor]:
    run = torch.arange(count) + 100_000 * seed
    kv = torch.randn(NAMESPACE.layout.shape(count))
    stored = cache.store(cache.chunks(run, CHUNKS), kv)
    assert stored.published(PATIENCE_S)
    return run, kv


def came(cache: Cache, run: torch.Tensor, kv: torch.Tensor) -> int:
    """How many chunks of a run a node can have; all of them with the right bytes."""
    lookup = cache.lookup(run, chunker=CHUNKS, budget_s=PATIENCE_S)
    with cache.fetch(lookup) as fetched:
        for c in fetched:
            if c.kv is not None:
                assert torch.equal(c.kv, kv[:, :, c.found.keys.start : c.found.keys.stop])
        return sum(c.kv is not None for c in fetched)


def test_what_a_drained_node_held_is_found_on_its_peers(mesh: EmbeddedMesh):
    leaving, other = cache(mesh, 0), cache(mesh, 1)
    run, kv = keep(leaving, 1)
    handed = mesh.nodes[0].drain(PATIENCE_S)
    assert handed == {"bodies": 16, "bytes": kv.numel() * 4, "left": 0}
    assert mesh.nodes[0].status()["draining"]
    left = [n.status()["host"]["bodies"] for n in mesh.nodes[1:]]
    assert sum(left) == 16 and min(left) > 0, "each peer takes a part"
    for node in mesh.nodes[1:]:
        node.apply_view([n.member for n in mesh.nodes[1:]])
    assert mesh.nodes[0].quiet(PATIENCE_S)
    mesh.nodes[0].close()
    for node in mesh.nodes[1:]:
        node.flush()
    assert came(other, run, kv) == 16


def test_the_hottest_go_first_and_the_deadline_ends_it(mesh: EmbeddedMesh):
    node = mesh.nodes[0]
    keep(cache(mesh, 0), 1)
    assert node.drain(0.0) == {"bodies": 0, "bytes": 0, "left": 16}
    hot = [slot.body.exact for slot in node.node.residency.tier.resident()][::-1]
    offered: dict[str, list[bytes]] = {}

    async def drain() -> None:
        control, request = node.node.ports.control, node.node.ports.control.request

        async def spy(peer, op, body, deadline_s):
            if op == "adopt":
                offered.setdefault(peer.name, []).extend(b[1] for b in body["bodies"])
            return await request(peer, op, body, deadline_s)

        control.request = spy
        await node.node.drain(PATIENCE_S)
        control.request = request

    node.call(drain())
    assert sorted(offered["n1"] + offered["n2"]) == sorted(hot)
    assert all(sorted(queue, key=hot.index) == queue for queue in offered.values())


def test_a_drain_without_peers_or_with_dead_ones_ends_and_says_what_is_left(mesh: EmbeddedMesh):
    run, kv = keep(cache(mesh, 0), 1)
    for node in mesh.nodes[1:]:
        node.close()
    assert mesh.nodes[0].drain(0.5)["left"] == 16
    mesh.nodes[0].apply_view([mesh.nodes[0].member])
    assert mesh.nodes[0].drain(0.5)["left"] == 16
    assert came(cache(mesh, 0), run, kv) == 16, "it goes on answering its engines"


def test_reading_goes_on_while_a_node_drains(mesh: EmbeddedMesh):
    run, kv = keep(cache(mesh, 0), 1)

    async def both() -> None:
        await asyncio.gather(
            asyncio.to_thread(mesh.nodes[0].drain, PATIENCE_S),
            *(asyncio.to_thread(came, cache(mesh, 2), run, kv) for _ in range(4)),
        )

    asyncio.run(both())
    assert came(cache(mesh, 2), run, kv) == 16


def test_an_incarnation_that_left_is_refused_by_number(mesh: EmbeddedMesh):
    run, kv = keep(cache(mesh, 0), 1)
    gone, stay = mesh.nodes[0], mesh.nodes[1:]
    for node in stay:
        node.apply_view([n.member for n in stay])
    assert came(cache(mesh, 1), run, kv) == 0
    # It does not know, publishes what it gets, and is told off by the first peer that hears it.
    cache_0 = cache(mesh, 0)
    more = torch.arange(1024) + 900_000
    stored = cache_0.store(cache_0.chunks(more, CHUNKS), torch.randn(NAMESPACE.layout.shape(1024)))
    assert stored.stored == 16 and not stored.published(PATIENCE_S)
    assert gone.status()["cut_off"]
    before = [n.status()["directory_keys"] for n in stay]
    keep_quiet = cache_0.store(
        cache_0.chunks(more + 5_000, CHUNKS), torch.randn(NAMESPACE.layout.shape(1024))
    )
    assert keep_quiet.stored == 16 and not keep_quiet.published(PATIENCE_S)
    assert [n.status()["directory_keys"] for n in stay] == before
    assert came(cache(mesh, 1), more, kv) == 0
    # The supervisor takes it in again: everything it holds is published anew.
    for node in mesh.nodes:
        node.contact()
        node.apply_view([n.member for n in mesh.nodes])
    gone.flush()
    assert came(cache(mesh, 2), run, kv) == 16


@pytest.mark.parametrize("mesh", [{"contact_lost_s": 0.2}], indirect=True)
def test_a_node_that_its_supervisor_left_alone_stops_publishing_and_comes_back(mesh: EmbeddedMesh):
    mesh.nodes[0].contact()
    until(lambda: mesh.nodes[0].status()["cut_off"], "the node takes itself for cut off")
    cache_0 = cache(mesh, 0)
    run = torch.arange(1024)
    kv = torch.randn(NAMESPACE.layout.shape(1024))
    stored = cache_0.store(cache_0.chunks(run, CHUNKS), kv)
    assert stored.stored == 16 and not stored.published(PATIENCE_S)
    assert came(cache_0, run, kv) == 16, "its own engines are served"
    assert came(cache(mesh, 1), run, kv) == 0
    mesh.nodes[0].contact()
    mesh.nodes[0].flush()
    assert came(cache(mesh, 1), run, kv) == 16


def test_a_fence_knows_members_past_and_present():
    def view(**incarnations: int) -> View:
        from p2pcache.core.membership import Member

        return View.of(Member(n, i, "127.0.0.1:1") for n, i in incarnations.items())

    now = [0.0]
    fence = Fence(5.0, lambda: now[0])
    fence.on_view(view(a=1, b=2))
    fence.check("a", 1)
    fence.check("stranger", 9)  # it may be joining
    fence.on_view(view(a=3, b=2))
    with pytest.raises(Fenced, match="0000000000000001 of a"):
        fence.check("a", 1)
    fence.check("a", 3)
    fence.on_view(view(a=1, b=2))  # it was only thought to be gone
    fence.check("a", 1)
    assert not fence.cut_off, "no supervisor has ever spoken to it"
    fence.contact()
    now[0] = 5.0
    assert not fence.cut_off
    now[0] = 5.1
    assert fence.cut_off
    fence.contact()
    assert not fence.cut_off
    fence.told_off()
    assert fence.cut_off


def test_hosts_without_a_node_are_shown_with_the_reason(mesh: EmbeddedMesh):
    mesh.nodes[0].apply_view([n.member for n in mesh.nodes], {"h9": "no memory"})
    with mesh.client(0) as client:
        assert {"name": "h9", "error": "no memory"} in client.mesh()


def test_a_closed_node_answers_nobody(mesh: EmbeddedMesh):
    mesh.nodes[0].close()
    with pytest.raises(NodeDown):
        mesh.nodes[0].drain(1.0)


def test_a_client_that_came_before_its_node_uses_it_once_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(SOCKET_VARIABLE, str(tmp_path / "here"))
    with pytest.raises(NodeDown):
        p2pcache.connect()
    with p2pcache.connect(required=False) as client:
        early = client.open(NAMESPACE)
        assert client.node == ""
        run = torch.arange(256)
        lookup = early.lookup(run, chunker=CHUNKS)
        assert {c.miss for c in lookup.chunks} == {Miss.NODE_DOWN}
        assert early.store(early.chunks(run, CHUNKS), torch.randn(NAMESPACE.layout.shape(256))).stored == 0
        with EmbeddedMesh([NodeConfig(name="late", host_bytes_max=8 * MIB)]) as mesh:
            (tmp_path / "here").symlink_to(mesh.nodes[0].socket_path)
            until(lambda: stored(early, run), "the client has found its node")
            assert client.node == "late"


def stored(cache: Cache, run: torch.Tensor) -> bool:
    kept = cache.store(cache.chunks(run, CHUNKS), torch.zeros(NAMESPACE.layout.shape(len(run))))
    return kept.stored + kept.resident == 4


def test_two_meshes_on_one_machine_are_not_mixed_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    from p2pcache import cli

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv(SOCKET_VARIABLE, raising=False)
    folder = tmp_path / f"p2pcache-{os.geteuid()}"
    config = NodeConfig(host_bytes_max=MIB, runtime_dir=str(folder))
    with EmbeddedMesh([config.replace(name="a"), config.replace(name="b")]) as one:
        assert cli.main(["status"]) == 0, "several nodes of one mesh are no question"
        assert capsys.readouterr().out.count("host ") == 2
        with EmbeddedMesh([config.replace(name="a")]) as two:
            assert cli.main(["status"]) == 2
            assert "several meshes run on this host; choose with --socket" in capsys.readouterr().err
            assert cli.main(["status", "--socket", two.nodes[0].socket_path]) == 0
            assert capsys.readouterr().out.count("host ") == 1
    assert one.nodes[0].member.name == "a"


@pytest.mark.parametrize("mesh", [{"host_bytes_max": 4 * MIB}], indirect=True)
def test_an_heir_keeps_most_of_its_own_and_of_the_leavers_the_hottest(mesh: EmbeddedMesh):
    leaving, heir = mesh.nodes[0], mesh.nodes[1]
    for node in mesh.nodes[:2]:
        node.apply_view([n.member for n in mesh.nodes[:2]])
    keep(cache(mesh, 1), 2, 3072)  # 48 bodies of 64 KiB: a quarter of its room is free
    keep(cache(mesh, 0), 1, 4096)  # 64 bodies

    def hottest_first(node: NodeRuntime) -> list[bytes]:
        return [slot.body.exact for slot in node.node.residency.tier.resident()][::-1]

    before, own = hottest_first(leaving), hottest_first(heir)
    handed = leaving.drain(PATIENCE_S)
    assert handed["bodies"] == 16 and handed["left"] == 48
    after = hottest_first(heir)
    assert after[:16] == before[:16], "the leaver's hottest, in its order"
    assert set(own) <= set(after), "there was room for them"
    again = leaving.drain(PATIENCE_S)
    assert again["bodies"] == 16, "what is there already counts, and nothing more is pushed out"
    assert hottest_first(heir)[16:] == own


def test_what_leaves_too_takes_nothing_over(mesh: EmbeddedMesh):
    for index in range(2):
        keep(cache(mesh, index), index + 1)
    mesh.nodes[1].call(mesh.nodes[1].node.drain(0.0))
    handed = mesh.nodes[0].drain(PATIENCE_S)
    assert handed["bodies"] == 16, "the third takes all"
    assert mesh.nodes[1].status()["host"]["bodies"] == 16
    mesh.nodes[1].stay()
    until(lambda: not mesh.nodes[1].status()["draining"], "it stays")


def test_a_batch_that_was_fenced_is_told_again(mesh: EmbeddedMesh):
    """Left out for a moment and taken in again, before any later batch: nothing may be lost for good."""
    stay = mesh.nodes[1:]
    for node in stay:
        node.apply_view([n.member for n in stay])
    cache_0 = cache(mesh, 0)
    run, kv = torch.arange(1024) + 77_000, torch.randn(NAMESPACE.layout.shape(1024))
    assert not cache_0.store(cache_0.chunks(run, CHUNKS), kv).published(PATIENCE_S)
    for node in stay:
        node.apply_view([n.member for n in mesh.nodes])
    mesh.nodes[0].contact()
    until(lambda: came(cache(mesh, 1), run, kv) == 16, "all of it is known")
