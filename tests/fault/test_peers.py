"""Peers, owners and engines that die, freeze, restart or spoil bytes, in processes of their own."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from p2pcache import EmbeddedMesh, Match, Miss, NodeConfig
from p2pcache.api import Cache, Client
from p2pcache.core.chunking import FixedChunker
from p2pcache.io import _pulls
from p2pcache.io.transport_ucx import ucx_available
from p2pcache.results import Lookup
from p2pcache.runtime import NodeRuntime
from tests.fault.node_process import (
    MIB,
    NAMESPACE,
    PATIENCE_S,
    EngineProcess,
    NodeProcess,
    at_rest,
    check,
    kv_of,
    mesh,
    share_view,
    state,
    tokens,
    until,
)

UCX = pytest.param(
    "ucx", marks=[pytest.mark.ucx, pytest.mark.skipif(bool(ucx_available()), reason="UCX is not installed")]
)
LARGE = 128 << 10  # tokens of a body of 128 MiB: far from its end when its first bytes are told
ROOM = 160 * MIB
GRACE_S = 1.5  # what an answer may take beyond its budget on a loaded machine


@pytest.fixture
def opened() -> Iterator[Callable[[NodeRuntime | NodeProcess], Cache]]:
    """A cache at a node, for the test's length."""
    clients = []

    def connect(node: NodeRuntime | NodeProcess) -> Cache:
        clients.append(Client(node.socket_path, PATIENCE_S))
        return clients[-1].open(NAMESPACE)

    yield connect
    for client in clients:
        client.close()


@pytest.fixture
def at_first_bytes(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Do something once, when the first bytes of the next pull have arrived."""
    todo: list[Callable[[], None]] = []
    original = _pulls.LoopPull._report

    def report(pull: _pulls.LoopPull, nbytes: int) -> None:
        if todo:
            assert nbytes < pull.ticket.nbytes
            todo.pop()()
        original(pull, nbytes)

    monkeypatch.setattr(_pulls.LoopPull, "_report", report)
    return todo.append


def find(cache: Cache, count: int, chunk: int, seed: int = 0) -> Lookup:
    return cache.lookup(tokens(count, seed), chunker=FixedChunker(chunk), budget_s=PATIENCE_S)


def fetch(cache: Cache, lookup: Lookup, budget_s: float) -> tuple[list[Miss | None], bool]:
    """The misses, and whether what came was right. The answer must come within its budget."""
    started_s = time.monotonic()
    with cache.fetch(lookup, budget_s=budget_s) as fetched:
        took_s = time.monotonic() - started_s
        assert took_s < budget_s + GRACE_S
        misses = [c.miss for c in fetched]
        run = torch.from_numpy(lookup.tokens.astype("int64"))
        sound = all(
            c.kv is None or torch.equal(c.kv, kv_of(run[c.found.keys.start : c.found.keys.stop]))
            for c in fetched
        )
        assert all((c.kv is None) == (c.miss is not None) for c in fetched)
    return misses, sound


# -- holders ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["tcp", UCX])
def test_a_holder_killed_in_the_middle_of_a_pull_is_a_miss_and_others_go_on(
    tmp_path: Path, opened: Callable, at_first_bytes: Callable, transport: str
) -> None:
    common = {"host_bytes_max": ROOM, "transports": [transport]}
    with mesh(
        tmp_path, [common | {"name": "reader"}], [common | {"name": "victim"}, common | {"name": "other"}]
    ) as (
        (reader,),
        (victim, other),
    ):
        victim.store(LARGE, LARGE)
        other.store(1000, 256, seed=1)
        cache = opened(reader)
        large, small = find(cache, LARGE, LARGE), find(cache, 1000, 256, seed=1)
        assert large.chunks[0].peer == "victim" and {c.peer for c in small.chunks} == {"other"}
        at_first_bytes(lambda: os.kill(victim.process.pid, signal.SIGKILL))

        assert fetch(cache, large, 10.0) == ([Miss.HOLDER_UNREACHABLE], True)
        assert fetch(cache, small, 10.0) == ([None] * 4, True)
        assert state(reader)["host"]["bodies"] == 4
        until(lambda: at_rest(other.state()), "the other holder at rest")


def test_a_holder_killed_in_the_middle_of_a_shm_pull_gives_right_bytes_or_a_miss(
    tmp_path: Path, opened: Callable, at_first_bytes: Callable
) -> None:
    common = {"host_bytes_max": ROOM, "transports": ["shm"]}
    with mesh(tmp_path, [common | {"name": "reader"}], [common | {"name": "victim"}]) as (
        (reader,),
        (victim,),
    ):
        victim.store(LARGE, LARGE)
        victim.store(256, 256, seed=1)
        cache = opened(reader)
        large, small = find(cache, LARGE, LARGE), find(cache, 256, 256, seed=1)
        at_first_bytes(lambda: os.kill(victim.process.pid, signal.SIGKILL))

        (miss,), sound = fetch(cache, large, 10.0)
        assert sound and miss in (None, Miss.HOLDER_UNREACHABLE)
        assert fetch(cache, small, 0.5)[0][0] in (Miss.DEADLINE, Miss.HOLDER_UNREACHABLE)


@pytest.mark.parametrize("transport", ["tcp", "shm", UCX])
def test_a_frozen_holder_is_a_miss_at_the_deadline_and_serves_again_once_it_goes_on(
    tmp_path: Path, opened: Callable, transport: str
) -> None:
    common = {"host_bytes_max": 64 * MIB, "transports": [transport], "remote_lease_s": 1.0}
    with mesh(tmp_path, [common | {"name": "reader"}], [common | {"name": "victim"}]) as (
        (reader,),
        (victim,),
    ):
        victim.store(512, 256)
        cache = opened(reader)
        lookup = find(cache, 512, 256)
        victim.freeze()
        assert fetch(cache, lookup, 0.5)[0] == [Miss.DEADLINE] * 2
        until(lambda: at_rest(state(reader)), "the reader's slots free again")
        victim.thaw()
        assert fetch(cache, lookup, 10.0) == ([None] * 2, True)
        until(lambda: at_rest(victim.state()), "the tickets of the time it was frozen closed")


def test_a_frozen_holder_costs_one_deadline_and_not_one_a_fetch(tmp_path: Path, opened: Callable) -> None:
    common = {"host_bytes_max": 64 * MIB, "transports": ["tcp"], "silent_retry_s": 600.0}
    with mesh(tmp_path, [common | {"name": "reader"}], [common | {"name": "victim"}]) as (
        (reader,),
        (victim,),
    ):
        victim.store(256, 256)
        cache = opened(reader)
        lookup = find(cache, 256, 256)
        victim.freeze()
        assert fetch(cache, lookup, 1.0)[0] == [Miss.DEADLINE]
        started_s = time.monotonic()
        assert fetch(cache, lookup, 20.0)[0] == [Miss.HOLDER_UNREACHABLE]
        assert time.monotonic() - started_s < 10
        victim.thaw()


def test_what_came_is_kept_where_one_of_several_holders_is_frozen(tmp_path: Path, opened: Callable) -> None:
    common = {"host_bytes_max": 64 * MIB, "transports": ["tcp"]}
    with mesh(
        tmp_path, [common | {"name": "reader"}], [common | {"name": "victim"}, common | {"name": "other"}]
    ) as ((reader,), (victim, other)):
        run = tokens(1024)
        victim.store(512, 256)  # the run's first half
        other.store(1024, 256)
        cache = opened(reader)
        lookup = cache.lookup(run, chunker=FixedChunker(256), budget_s=PATIENCE_S)
        from_victim = tuple(
            dataclasses.replace(f, holders=tuple(h for h in f.holders if h.node == "victim") or f.holders)
            for f in (c.found[0] for c in lookup.chunks)
        )
        chunks = tuple(
            dataclasses.replace(c, found=(f,)) for c, f in zip(lookup.chunks, from_victim, strict=True)
        )
        victim.freeze()
        misses, sound = fetch(cache, dataclasses.replace(lookup, chunks=chunks), 1.0)
        assert misses == [Miss.DEADLINE, Miss.DEADLINE, None, None] and sound
        nodes = {n["name"]: n for n in cache.client.mesh(1.0)}
        assert "error" in nodes["victim"] and "error" not in nodes["other"]
        victim.thaw()


@pytest.mark.parametrize("transport", ["tcp", UCX])
def test_a_holder_frozen_in_the_middle_of_a_pull_frees_the_destination_and_serves_again(
    tmp_path: Path, opened: Callable, at_first_bytes: Callable, transport: str
) -> None:
    common = {"host_bytes_max": ROOM, "transports": [transport]}
    with mesh(tmp_path, [common | {"name": "reader"}], [common | {"name": "victim"}]) as (
        (reader,),
        (victim,),
    ):
        victim.store(LARGE, LARGE)
        cache = opened(reader)
        lookup = find(cache, LARGE, LARGE)
        at_first_bytes(lambda: os.kill(victim.process.pid, signal.SIGSTOP))
        assert fetch(cache, lookup, 1.0)[0] == [Miss.DEADLINE]
        until(lambda: state(reader)["host"]["bytes"] == 0, "the destination free again")
        victim.thaw()
        assert fetch(cache, lookup, 20.0) == ([None], True)
        until(lambda: at_rest(victim.state()), "the holder at rest")


@pytest.mark.parametrize("fault", ["killed", "frozen"])
def test_a_dead_holder_leaves_time_for_another_one(tmp_path: Path, opened: Callable, fault: str) -> None:
    common = {"host_bytes_max": 64 * MIB, "transports": ["tcp"]}
    others = [common | {"name": "a"}, common | {"name": "b"}]
    with mesh(tmp_path, [common | {"name": "reader"}], others) as ((reader,), (a, b)):
        a.store(512, 256)
        b.store(512, 256)
        cache = opened(reader)
        lookup = find(cache, 512, 256)
        assert all({h.node for h in c.found[0].holders} == {"a", "b"} for c in lookup.chunks)
        chosen = {"a": a, "b": b}[lookup.chunks[0].peer]
        chosen.kill() if fault == "killed" else chosen.freeze()
        assert fetch(cache, lookup, 4.0) == ([None] * 2, True)


def test_spoilt_bytes_at_the_holder_are_a_miss_and_counted_and_never_served(
    tmp_path: Path, opened: Callable
) -> None:
    common = {"host_bytes_max": 64 * MIB}
    for transport in ("tcp", "shm"):
        folder = tmp_path / transport
        folder.mkdir()
        here = common | {"transports": [transport]}
        with mesh(folder, [here | {"name": "reader"}], [here | {"name": "victim"}]) as ((reader,), (victim,)):
            victim.store(512, 256)
            with opened(victim).fetch(find(opened(victim), 512, 256)) as mapped:
                last = mapped[1].kv[-1].view(-1).view(torch.uint8)
                last[-1] ^= 1  # an engine's mapping of the holder's slab is writable
            cache = opened(reader)
            assert fetch(cache, find(cache, 512, 256), 10.0) == ([None, Miss.CORRUPT], True)
            status = state(reader)
            assert status["counters"]["corrupt"] == 1 and status["host"]["bodies"] == 1


# -- owners ----------------------------------------------------------------------------------------


def test_a_lookup_goes_on_to_the_second_owner_and_without_any_says_why(
    tmp_path: Path, opened: Callable
) -> None:
    common = {"host_bytes_max": 16 * MIB, "resync_s": 0.0}
    others = [common | {"name": "x"}, common | {"name": "y"}]
    with mesh(tmp_path, [common | {"name": "holder"}, common | {"name": "reader"}], others) as (
        (holder, reader),
        (x, y),
    ):
        writer, cache = opened(holder), opened(reader)
        ring = reader.node.view.ring
        seed = next(
            s
            for s in range(1000)
            if set(ring.owners(cache.chunks(tokens(64, s), FixedChunker(64))[0].content)) == {"x", "y"}
        )
        run, chunks = tokens(64, seed), cache.chunks(tokens(64, seed), FixedChunker(64))
        assert writer.store(chunks, kv_of(run)).published(PATIENCE_S)
        first, second = ({"x": x, "y": y}[o] for o in ring.owners(chunks[0].content))

        first.kill()
        lookup = timed_lookup(cache, run, budget_s=2.0)
        assert [c.match for c in lookup.chunks] == [Match.EXACT] and lookup.chunks[0].peer == "holder"
        assert fetch(cache, lookup, 5.0) == ([None], True)
        second.kill()
        other = next(
            s
            for s in range(seed + 1, 1000)
            if set(ring.owners(cache.chunks(tokens(64, s), FixedChunker(64))[0].content)) == {"x", "y"}
        )
        lookup = timed_lookup(cache, tokens(64, other), budget_s=0.5)
        assert lookup.chunks[0].miss in (Miss.DEADLINE, Miss.OWNER_UNREACHABLE)


def timed_lookup(cache: Cache, run: torch.Tensor, budget_s: float) -> Lookup:
    started_s = time.monotonic()
    lookup = cache.lookup(run, chunker=FixedChunker(64), budget_s=budget_s)
    assert time.monotonic() - started_s < budget_s + GRACE_S
    return lookup


# -- restarts --------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def test_a_restarted_node_is_a_new_member_and_its_old_entries_are_refused(
    tmp_path: Path, opened: Callable
) -> None:
    common = {"host_bytes_max": 16 * MIB, "resync_s": 0.0}
    victim = common | {"name": "victim", "control_port": free_port(), "runtime_dir": str(tmp_path)}
    with mesh(tmp_path, [common | {"name": "reader"}], [victim]) as ((reader,), (first,)):
        first.store(256, 256)
        cache = opened(reader)
        old = find(cache, 256, 256)
        assert old.chunks[0].match is Match.EXACT
        first.kill()
        again = NodeProcess(victim).ready()
        try:
            assert again.member.control == first.member.control
            assert again.member.incarnation != first.member.incarnation
            # Nobody has told the reader yet, and the restarted node sits on the same port.
            started_s = time.monotonic()
            assert fetch(cache, old, 10.0)[0] == [Miss.HOLDER_UNREACHABLE]
            assert time.monotonic() - started_s < 5, "a wrong incarnation is refused, not waited for"

            share_view([reader], [again])
            assert fetch(cache, old, 10.0)[0] == [Miss.HOLDER_GONE]
            assert find(cache, 256, 256).chunks[0].miss is Miss.ABSENT
            again.store(256, 256)
            lookup = find(cache, 256, 256)
            assert lookup.chunks[0].found[0].holders[0].incarnation == again.member.incarnation
            assert fetch(cache, lookup, 10.0) == ([None], True)
        finally:
            again.kill()


def test_an_engine_whose_node_is_frozen_or_gone_gets_misses_within_its_budget(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    node = NodeProcess({"name": "n", "host_bytes_max": 16 * MIB, "runtime_dir": str(tmp_path)}).ready()
    try:
        node.store(256, 256)
        with Client(node.socket_path, 2.0) as client:
            cache = client.open(NAMESPACE)
            lookup = find(cache, 256, 256)
            fetched = cache.fetch(lookup)
            node.freeze()
            assert timed_lookup(cache, tokens(256), budget_s=0.25).chunks[0].miss is Miss.DEADLINE
            assert fetch(cache, lookup, 0.25)[0] == [Miss.DEADLINE]
            node.kill()
            assert timed_lookup(cache, tokens(256), budget_s=0.25).chunks[0].miss is Miss.NODE_DOWN
            assert fetch(cache, lookup, 0.25)[0] == [Miss.NODE_DOWN]
            stored = cache.store(cache.chunks(tokens(256)), kv_of(tokens(256)))
            assert stored.stored == 0 and stored.refused[Miss.NODE_DOWN] and not stored.published()
            # The slab lives until its last engine lets go.
            assert torch.equal(fetched[0].kv, kv_of(tokens(256)))
            fetched.release()
    finally:
        node.kill()


# -- engines ---------------------------------------------------------------------------------------

HOLD = """
from p2pcache.node.wireform import body_to_wire
from p2pcache.types import Provenance
cache = client.open(NAMESPACE)
run = tokens(512)
cache.store(cache.chunks(run, FixedChunker(256)), kv_of(run))
fetched = cache.fetch(cache.lookup(run, chunker=FixedChunker(256)))
wanted = cache.chunks(tokens(512, 1), FixedChunker(256))
bodies = [body_to_wire(cache.body(c, Provenance.IN_CONTEXT)) for c in wanted]
slots = client.link().call("reserve", {"bodies": bodies, "deadline_s": 5.0}, 5.0)["slots"]
say([[c.miss for c in fetched], [s[0] for s in slots]])
hear()
"""


def test_what_a_killed_engine_held_is_free_again(tmp_path: Path, opened: Callable) -> None:
    with mesh(tmp_path, [{"name": "n", "host_bytes_max": 4 * MIB}], []) as ((node,), _):
        engine = EngineProcess(node.socket_path, HOLD)
        try:
            assert engine.read() == [[None, None], ["ok", "ok"]]
            held = state(node)
            assert (held["leases"], held["unfinished"], held["sessions"]) == (2, 2, 1)
        finally:
            engine.kill()
        until(lambda: state(node)["sessions"] == 0, "the session ended")
        assert at_rest(state(node)) and state(node)["host"]["bodies"] == 2
        # All of the tier can be had again.
        cache, run = opened(node), tokens(4096, 2)
        assert cache.store(cache.chunks(run, FixedChunker(512)), kv_of(run)).stored == 8


STORE = """
cache = client.open(NAMESPACE)
run = tokens(4096)
chunks, kv = cache.chunks(run, FixedChunker(256)), kv_of(run)
say("ready")
hear()
stored = cache.store(chunks, kv)
say([stored.stored + stored.resident, sum(stored.refused.values())])
hear()
"""


def test_engines_that_store_the_same_chunks_at_once_all_succeed_and_one_body_stays(
    tmp_path: Path, opened: Callable
) -> None:
    with mesh(tmp_path, [{"name": "n", "host_bytes_max": 32 * MIB}], []) as ((node,), _):
        engines = [EngineProcess(node.socket_path, STORE) for _ in range(3)]
        try:
            assert [e.read() for e in engines] == ["ready"] * 3
            for engine in engines:
                engine.write("go")
            assert [e.read() for e in engines] == [[16, 0]] * 3
            status = check(node)
            assert status["host"] == {"bytes": 4 * MIB, "bytes_max": 32 * MIB, "bodies": 16}
            cache = opened(node)
            assert fetch(cache, find(cache, 4096, 256), 10.0) == ([None] * 16, True)
        finally:
            for engine in engines:
                engine.kill()


CONTACT = """
failures, start = [], threading.Barrier(16)
def contact(seed):
    try:
        start.wait(PATIENCE_S)
        with Client(sys.argv[1], PATIENCE_S) as mine:
            cache = mine.open(NAMESPACE)
            for _ in range(3):
                lookup = cache.lookup(tokens(1024), chunker=FixedChunker(256), budget_s=PATIENCE_S)
                with cache.fetch(lookup, budget_s=PATIENCE_S) as fetched:
                    for c in fetched:
                        assert c.miss is None, c.miss
                        assert torch.equal(c.kv, kv_of(tokens(1024)[c.found.keys.start : c.found.keys.stop]))
    except BaseException as error:
        failures.append(repr(error))
say("ready")
hear()
threads = [threading.Thread(target=contact, args=(i,)) for i in range(16)]
[t.start() for t in threads]
[t.join() for t in threads]
say(failures)
hear()
"""


def test_many_threads_of_several_processes_in_first_contact_at_once_all_get_right_bytes(
    tmp_path: Path, opened: Callable
) -> None:
    tmp_path.chmod(0o700)
    transports = [("shm",), ("tcp",), ("shm", "tcp")]
    configs = [
        NodeConfig(name=f"n{i}", host_bytes_max=16 * MIB, runtime_dir=str(tmp_path), transports=t)
        for i, t in enumerate(transports)
    ]
    with EmbeddedMesh([*configs, NodeConfig(name="holder", host_bytes_max=16 * MIB)]) as nodes:
        holder = opened(nodes.nodes[-1])
        run = tokens(1024)
        assert holder.store(holder.chunks(run, FixedChunker(256)), kv_of(run)).published(PATIENCE_S)
        engines = [EngineProcess(node.socket_path, CONTACT) for node in nodes.nodes[:-1]]
        try:
            assert [e.read() for e in engines] == ["ready"] * 3
            for engine in engines:
                engine.write("go")
            assert [e.read() for e in engines] == [[]] * 3
        finally:
            for engine in engines:
                engine.kill()
        for node in nodes.nodes:
            until(lambda node=node: at_rest(state(node)), f"{node.member.name} at rest")
        pulled = [
            sum(v for k, v in state(n)["counters"].items() if k.startswith("pulls_")) for n in nodes.nodes
        ]
        assert pulled == [4, 4, 4, 0], "each body is pulled once a node, whoever asks"
        assert (
            state(nodes.nodes[0])["counters"]["served_peer"]
            + state(nodes.nodes[0])["counters"]["served_local"]
            == 192
        )
