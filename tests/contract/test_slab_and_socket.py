"""The host slab, and the unix socket over which a node hands it out."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import fcntl
import mmap
import os
import secrets
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from p2pcache import KVLayout, Miss, Namespace, NodeConfig
from p2pcache.api import Client
from p2pcache.core import wire
from p2pcache.core.chunking import FixedChunker
from p2pcache.core.membership import Member
from p2pcache.core.records import Bodies, GrantRow, pack_bodies, unpack_grants
from p2pcache.io import slab as slab_module
from p2pcache.io.engine_socket import EngineSocket, private_folder
from p2pcache.io.link import Link
from p2pcache.io.slab import HEADER_BYTES, HostSlab, MappedSlab, attach, receive_frame, send_frame
from p2pcache.node.wireform import body_to_wire
from p2pcache.runtime import NodeRuntime
from p2pcache.types import BodyInfo, ConfigError, DeadlineExceeded, NodeDown, Provenance, RemoteError
from tests.fault.node_process import PATIENCE_S, EngineProcess, at_rest, check, state, until

MIB = 1 << 20
SLAB = 4 * MIB


@pytest.fixture
def slab() -> Iterator[HostSlab]:
    made = HostSlab(SLAB)
    yield made
    made.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


class Desk:
    """An engine handler that remembers sessions and answers when it is told to."""

    def __init__(self, slab: HostSlab):
        self.slab = slab
        self.opened = self.ended = 0
        self.changed = threading.Condition()
        self.asked: list[str] = []
        self.cancelled: list[str] = []
        self.nonce = slab.nonce
        self.answers: dict[str, Mapping[str, Any]] = {"pin": {"pinned": 0}, "published": {"told": True}}
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    def attach_reply(self) -> dict[str, Any]:
        return {
            "member": Member("n", 7, "127.0.0.1:1").to_wire(),
            "nonce": self.nonce,
            "slab_bytes": self.slab.nbytes,
        }

    def _tell(self, change: Callable[[], None]) -> None:
        with self.changed:
            change()
            self.changed.notify_all()

    def open_session(self) -> object:
        self._tell(lambda: setattr(self, "opened", self.opened + 1))
        return object()

    def end_session(self, session: object) -> None:
        self._tell(lambda: setattr(self, "ended", self.ended + 1))

    async def handle(self, session: object, op: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        self._tell(lambda: self.asked.append(op))
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self._tell(lambda: self.cancelled.append(op))
            raise
        return self.answers.get(op, {})

    def wait(self, true: Callable[[], bool], what: str) -> None:
        with self.changed:
            assert self.changed.wait_for(true, PATIENCE_S), what


class Served:
    """A socket with a slab behind it, on an event loop thread of its own."""

    def __init__(self, path: Path, slab: HostSlab):
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self.path = str(path)
        self.desk: Desk
        self.run(self._start(slab))

    async def _start(self, slab: HostSlab) -> None:
        self.desk, self.socket = Desk(slab), EngineSocket(self.path, slab)
        await self.socket.start(self.desk)

    def run(self, coroutine: Any) -> Any:
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE_S)
        except ConfigError:
            self._end()
            raise

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        async def inside() -> None:
            function(*args)

        self.run(inside())

    def _end(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def close(self) -> None:
        self.run(self.socket.close())
        self._end()


@pytest.fixture
def served(folder: Path, slab: HostSlab) -> Iterator[Served]:
    made = Served(folder / "n.sock", slab)
    yield made
    made.close()


def connected(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(PATIENCE_S)
    sock.connect(path)
    return sock


# -- the slab --------------------------------------------------------------------------------------


def test_engines_and_the_node_see_each_others_bytes_and_a_peer_can_only_read(
    served: Served, slab: HostSlab
) -> None:
    ours, _, engine = attach(served.path, "engine", PATIENCE_S)
    theirs, _, peer = attach(served.path, "peer", PATIENCE_S)
    engine.view(100, 5)[:] = b"hello"
    assert bytes(slab.view(100, 5)) == bytes(peer.view(100, 5)) == b"hello"
    assert peer.view(0, 1).readonly and not engine.view(0, 1).readonly
    with pytest.raises(TypeError):
        peer.view(100, 5)[:] = b"oh no"
    ours.close()
    theirs.close()


def test_the_descriptor_that_a_peer_gets_cannot_be_mapped_for_writing(served: Served) -> None:
    sock = connected(served.path)
    send_frame(sock, wire.encode(wire.Message("q", 1, "attach", {"role": "peer"})))
    _, (fd,), _, _ = socket.recv_fds(sock, 4, 1)
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(fd, SLAB, access=mmap.ACCESS_WRITE)
        with pytest.raises(OSError):
            os.pwrite(fd, b"x", HEADER_BYTES)
        for resize in (0, 2 * SLAB):
            with pytest.raises(OSError):
                os.ftruncate(fd, resize)
    finally:
        os.close(fd)
        sock.close()


def test_nobody_can_resize_a_slab_under_its_mappings(slab: HostSlab) -> None:
    for size in (0, SLAB, 2 * SLAB):
        with pytest.raises(PermissionError):
            os.ftruncate(slab.fd, size)


@pytest.mark.parametrize("seals", [None, 0, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SHRINK])
def test_a_slab_that_its_owner_could_resize_is_refused(slab: HostSlab, tmp_path: Path, seals) -> None:
    if seals is None:  # a plain file
        fd = os.open(tmp_path / "slab", os.O_RDWR | os.O_CREAT)
    else:
        fd = os.memfd_create("slab", os.MFD_ALLOW_SEALING)
    try:
        os.pwrite(fd, os.pread(slab.fd, HEADER_BYTES, 0), 0)
        os.ftruncate(fd, SLAB + HEADER_BYTES)
        if seals:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        with pytest.raises(RemoteError, match="not sealed"):
            MappedSlab(fd, SLAB, slab.nonce, writable=False)
        if seals is not None:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            MappedSlab(fd, SLAB, slab.nonce, writable=False).unmap()
    finally:
        os.close(fd)


def test_a_slab_with_another_nonce_or_size_is_refused(slab: HostSlab) -> None:
    with pytest.raises(RemoteError, match="nonce"):
        MappedSlab(slab.fd, SLAB, secrets.token_bytes(16), writable=False)
    for nbytes in (SLAB - 4096, SLAB + 4096):
        with pytest.raises(RemoteError, match="size"):
            MappedSlab(slab.fd, nbytes, slab.nonce, writable=False)


def test_an_attach_that_is_told_another_nonce_fails_by_its_reason(served: Served) -> None:
    served.desk.nonce = bytes(16)
    with pytest.raises(RemoteError, match="nonce"):
        Link(served.path, PATIENCE_S)


@pytest.mark.parametrize("offset, nbytes", [(-1, 1), (0, SLAB + 1), (SLAB, 1), (SLAB + 1, 0), (5, -1)])
def test_a_view_outside_the_slab_is_an_error(slab: HostSlab, offset: int, nbytes: int) -> None:
    with pytest.raises(ValueError):
        slab.view(offset, nbytes)


def test_a_slab_larger_than_memory_is_a_config_error_with_both_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = 1 << 50
    with pytest.raises(ConfigError, match=f"{wanted:,}") as caught:
        HostSlab(wanted)
    figures = [word for word in str(caught.value).split() if "," in word and word[0].isdigit()]
    assert len(figures) == 2
    monkeypatch.setattr(slab_module, "available_bytes", lambda: 70 * MIB)
    with pytest.raises(ConfigError, match="73,400,320"):
        HostSlab(8 * MIB)


def test_a_slab_that_the_system_refuses_is_a_config_error_and_leaves_no_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ConfigError, match="No space left"):
        HostSlab(MIB)
    assert os.listdir("/proc/self/fd") == before


def test_a_slab_outlives_its_node_while_an_engine_holds_it(folder: Path) -> None:
    node = NodeRuntime.start(NodeConfig(name="n", host_bytes_max=SLAB, runtime_dir=str(folder)))
    sock, _, mapped = attach(node.socket_path, "engine", PATIENCE_S)
    mapped.view(4096, 4)[:] = b"kept"
    node.close()
    assert sock.recv(1) == b"", "the node is gone"
    assert bytes(mapped.view(4096, 4)) == b"kept"
    mapped.view(4096, 4)[:] = b"mine"
    sock.close()


# -- the folder and the socket file ----------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path, slab: HostSlab, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(ConfigError, match="0700"):
        Served(tmp_path / "n.sock", slab)
    with pytest.raises(ConfigError, match="0700"):
        NodeRuntime.start(NodeConfig(host_bytes_max=SLAB, runtime_dir=str(tmp_path)))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_made_private_and_a_file_in_its_place_is_an_error(tmp_path: Path) -> None:
    made = private_folder(tmp_path / "a" / "b")
    assert made.stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file"):
        private_folder(tmp_path / "file")


def test_the_socket_file_of_a_killed_node_is_replaced(folder: Path, slab: HostSlab) -> None:
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(folder / "n.sock"))
    stale.close()
    served = Served(folder / "n.sock", slab)
    Link(served.path, PATIENCE_S).close()
    served.close()
    assert list(folder.iterdir()) == []


def test_the_socket_of_a_live_node_is_not_taken_over(served: Served, slab: HostSlab) -> None:
    with pytest.raises(ConfigError, match="already listens"):
        Served(Path(served.path), slab)
    Link(served.path, PATIENCE_S).close()


def test_a_path_that_cannot_be_bound_is_a_config_error(folder: Path, slab: HostSlab) -> None:
    with pytest.raises(ConfigError, match="too long"):
        Served(folder / ("x" * 200), slab)
    (folder / "n.sock").mkdir()
    with pytest.raises(ConfigError):
        Served(folder / "n.sock", slab)


# -- strangers -------------------------------------------------------------------------------------


def framed(raw: bytes) -> bytes:
    return struct.pack("<I", len(raw)) + raw


STRANGERS = {
    "nothing": b"",
    "half a length": b"\x05\x00",
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "a huge length": struct.pack("<I", 2**32 - 1) + b"x",
    "an empty message": framed(b""),
    "not msgpack": framed(b"\xc1\xc1\xc1"),
    "half a message": framed(b"x" * 100)[:50],
    "another operation": framed(wire.encode(wire.Message("q", 1, "mesh", {"deadline_s": 1.0}))),
    "another role": framed(wire.encode(wire.Message("q", 1, "attach", {"role": "root"}))),
    "a reply": framed(wire.encode(wire.Message("e", 1, "attach", {"code": "x", "text": "y"}))),
}


@pytest.mark.parametrize("first", STRANGERS.values(), ids=STRANGERS.keys())
def test_a_strange_first_message_gets_no_slab_and_does_not_disturb_others(
    served: Served, first: bytes
) -> None:
    link = Link(served.path, PATIENCE_S)
    stranger = connected(served.path)
    stranger.sendall(first)
    stranger.shutdown(socket.SHUT_WR)
    fds: list[int] = []
    with contextlib.suppress(ConnectionResetError):  # it has not read all that we said
        while (part := socket.recv_fds(stranger, 4096, 4))[0]:
            fds += part[1]
    stranger.close()
    assert fds == []
    assert served.desk.opened == 1
    assert link.call("pin", {"bodies": [], "ttl_s": 1.0}, PATIENCE_S) == {"pinned": 0}
    link.close()


def test_another_version_is_refused_with_both_numbers(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = wire.PROTOCOL_VERSION
    sock = connected(served.path)
    monkeypatch.setattr(wire, "PROTOCOL_VERSION", ours + 41)
    hello = wire.encode(wire.Message("q", 1, "attach", {"role": "engine"}))
    monkeypatch.undo()
    send_frame(sock, hello)
    reply = wire.decode(receive_frame(sock))
    assert reply.kind == "e" and reply.body["code"] == "version"
    assert f"protocol {ours + 41}" in reply.body["text"] and f"speaks {ours}" in reply.body["text"]
    assert receive_frame(sock) is None
    sock.close()


def test_a_node_of_another_version_is_refused_with_both_numbers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = wire.PROTOCOL_VERSION
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "future.sock"))
    listener.listen()

    def answer() -> None:
        sock, _ = listener.accept()
        receive_frame(sock)
        send_frame(sock, b"\x99" + bytes([ours + 1]) + b"\xa1r\x01\xa6attach\x00\xa0\x00\xc4\x00\x80")
        sock.close()

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(RemoteError, match=f"protocol {ours + 1}, this one speaks {ours}"):
        Link(str(folder / "future.sock"), PATIENCE_S)
    thread.join()
    listener.close()


def test_garbage_after_attach_is_answered_by_an_error_or_ends_that_connection_alone(served: Served) -> None:
    link = Link(served.path, PATIENCE_S)
    sock, _, _ = attach(served.path, "engine", PATIENCE_S)
    reply = wire.encode(wire.Message("r", 5, "fetch", {"names": [], "grants": b"", "metas": []}))
    for raw in (b"", b"\xc1", wire.encode(wire.Message("q", 5, "open", {"descriptor": b""}))[:-1], reply):
        send_frame(sock, raw)
        reply = wire.decode(receive_frame(sock))
        assert reply.kind == "e" and reply.body["code"] == "refused"
    sock.sendall(struct.pack("<I", wire.MESSAGE_BYTES_MAX + 1))
    assert receive_frame(sock) is None
    sock.close()
    served.desk.wait(lambda: served.desk.ended == 1, "the session ended")
    assert link.call("pin", {"bodies": [], "ttl_s": 1.0}, PATIENCE_S) == {"pinned": 0}
    link.close()


def test_a_client_that_does_not_read_its_answers_cannot_fill_the_nodes_memory(served: Served) -> None:
    served.desk.answers["siblings"] = {"descriptors": [bytes(60_000)]}
    sock, _, _ = attach(served.path, "engine", PATIENCE_S)
    sock.settimeout(1.0)
    request = framed(wire.encode(wire.Message("q", 1, "siblings", {"descriptor": b""})))
    with pytest.raises(TimeoutError):  # nobody reads what we say either
        for _ in range(5000):
            sock.sendall(request)
    assert len(served.desk.asked) < 1000
    sock.close()
    served.desk.wait(lambda: served.desk.ended == 1, "the session ended")


def test_a_node_out_of_descriptors_serves_again_once_it_has_some(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, refused = served.loop.sock_accept, threading.Event()

    async def out_of_descriptors(listener: socket.socket) -> Any:
        if not refused.is_set():
            refused.set()
            raise OSError(24, "Too many open files")
        return await accept(listener)

    first = Link(served.path, PATIENCE_S)
    monkeypatch.setattr(served.loop, "sock_accept", out_of_descriptors)
    connected(served.path).close()  # lets the accept that is under way go by
    second = Link(served.path, PATIENCE_S)
    assert refused.is_set()
    for link in (first, second):
        assert link.call("pin", {"bodies": [], "ttl_s": 1.0}, PATIENCE_S) == {"pinned": 0}
        link.close()


# -- sessions --------------------------------------------------------------------------------------


def test_a_request_under_way_is_cancelled_before_its_session_ends(served: Served) -> None:
    served.call(served.desk.may_answer.clear)
    sock, _, _ = attach(served.path, "engine", PATIENCE_S)
    nothing = {"names": [], "wants": b"", "holders": b"", "deadline_s": 9.0}
    send_frame(sock, wire.encode(wire.Message("q", 1, "fetch", nothing)))
    served.desk.wait(lambda: served.desk.asked == ["fetch"], "the request arrived")
    sock.close()
    served.desk.wait(lambda: served.desk.ended == 1, "the session ended")
    assert served.desk.cancelled == ["fetch"]


def test_calls_of_many_threads_get_each_their_own_answer(served: Served) -> None:
    link = Link(served.path, PATIENCE_S)

    def ask(i: int) -> bool:
        op = ("pin", "published")[i % 2]
        body = {"bodies": [], "ttl_s": 1.0} if op == "pin" else {"lost": 0, "deadline_s": 1.0}
        return link.call(op, body, PATIENCE_S) == ({"pinned": 0} if op == "pin" else {"told": True})

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert all(pool.map(ask, range(400)))
    link.close()


def test_whoever_waits_when_the_node_goes_is_told_so(folder: Path, slab: HostSlab) -> None:
    served = Served(folder / "n.sock", slab)
    served.call(served.desk.may_answer.clear)
    link = Link(served.path, PATIENCE_S)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(link.call, "published", {"lost": 0, "deadline_s": PATIENCE_S}, PATIENCE_S)
        served.desk.wait(lambda: bool(served.desk.asked), "the request arrived")
        served.close()
        with pytest.raises(NodeDown):
            waiting.result(PATIENCE_S)
    with pytest.raises(NodeDown):
        link.call("published", {"lost": 0, "deadline_s": PATIENCE_S}, PATIENCE_S)
    link.close()


def test_no_node_on_a_path_is_node_down(folder: Path) -> None:
    with pytest.raises(NodeDown, match="nowhere.sock"):
        Link(str(folder / "nowhere.sock"), 1.0)


# -- leases, on a whole node -----------------------------------------------------------------------

LAYOUT = KVLayout(2, 1, 8, "float32")
NAMESPACE = Namespace("m", "w", LAYOUT)


@pytest.fixture
def node(folder: Path) -> Iterator[NodeRuntime]:
    made = NodeRuntime.start(NodeConfig(name="n", host_bytes_max=SLAB, runtime_dir=str(folder)))
    yield made
    made.close()


def kept(client: Client, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Store 64 tokens; returns them and their KV."""
    run = torch.arange(64) + 1000 * seed
    kv = torch.randn(LAYOUT.shape(64))
    cache = client.open(NAMESPACE)
    assert cache.store(cache.chunks(run, FixedChunker(32)), kv).stored == 2
    return run, kv


def fetch_of(link: Link, wants: Bodies) -> list[GrantRow]:
    request = {"names": wants.names, "wants": wants.bodies, "holders": wants.holders, "deadline_s": 5.0}
    reply = link.call("fetch", request, PATIENCE_S)
    return list(unpack_grants(reply["names"], reply["grants"]))


def test_what_is_not_as_told_is_a_miss_whichever_field_differs(node: NodeRuntime) -> None:
    with Client(node.socket_path, PATIENCE_S) as client:
        run, _ = kept(client)
        body, other = [c.body for c in client.open(NAMESPACE).lookup(run, chunker=FixedChunker(32)).chunks]
        for field, value in {
            "content": bytes(16),
            "tokens": body.tokens + 1,
            "nbytes": body.nbytes + 1,
            "provenance": Provenance.ISOLATED,
            "base_position": body.base_position + 1,
            "codec": "other",
        }.items():
            wrong = dataclasses.replace(body, **{field: value})
            first, second, third = fetch_of(
                client.link(), pack_bodies([(other, ()), (wrong, ()), (body, ())])
            )
            assert (first.miss, second.miss, third.miss) == (None, Miss.LAYOUT, None), field
            client.link().release([first.generation, third.generation])
        until(lambda: at_rest(state(node)), "no lease is left")


def test_a_table_of_bodies_that_does_not_add_up_is_refused_and_leaves_no_lease(node: NodeRuntime) -> None:
    with Client(node.socket_path, PATIENCE_S) as client:
        run, _ = kept(client)
        body, other = [c.body for c in client.open(NAMESPACE).lookup(run, chunker=FixedChunker(32)).chunks]
        wants = pack_bodies([(body, ()), (dataclasses.replace(other, exact=bytes(16)), ())])
        for wrong in (
            wants._replace(holders=wire.HOLDER_RECORD.pack(0, 0, 0)),
            wants._replace(bodies=wants.bodies[: wire.WANT.size] + b"\xff" * wire.WANT.size),
            wants._replace(names=wants.names[:-1]),
        ):
            with pytest.raises(RemoteError):
                fetch_of(client.link(), wrong)
            assert state(node)["leases"] == 0


@pytest.mark.parametrize("several", [False, True])
def test_the_short_way_of_a_lookup_says_what_the_long_one_does(
    node: NodeRuntime, monkeypatch: pytest.MonkeyPatch, several: bool
) -> None:
    with Client(node.socket_path, PATIENCE_S) as client:
        run, kv = kept(client)
        cache = client.open(NAMESPACE)
        if several:  # the second chunk's content behind other tokens, too
            again = torch.cat([run[:32] + 7, run[32:]])
            assert cache.store(cache.chunks(again, FixedChunker(32)), kv).stored == 2
        short = cache.lookup(run, chunker=FixedChunker(32))
        before = node.status()
        monkeypatch.setattr(node.node.home, "lookup", lambda chunks: None)
        long = cache.lookup(run, chunker=FixedChunker(32))
        after = node.status()
    assert tuple(short.chunks) == tuple(long.chunks)
    assert [len(c.found) for c in short.chunks] == [1, 1 + several]
    for name in ("lookups", "chunks", "hits_exact"):
        assert after["counters"][name] == 2 * before["counters"][name]
    for name in ("chunks", "hits", "hit_tokens"):
        assert str(after["sight"][name]) != str(before["sight"][name])
    assert after["sight"]["hits"]["exact"]["local"] == 4


def test_the_leases_of_a_client_that_hangs_up_end_and_those_of_others_stay(node: NodeRuntime) -> None:
    first, second = Client(node.socket_path, PATIENCE_S), Client(node.socket_path, PATIENCE_S)
    run, _ = kept(first)
    held = [
        c.open(NAMESPACE).fetch(c.open(NAMESPACE).lookup(run, chunker=FixedChunker(32)))
        for c in (first, second)
    ]
    assert state(node)["leases"] == 4
    first.close()
    until(lambda: state(node)["sessions"] == 1, "the first session ended")
    assert state(node)["leases"] == 2
    held[1].release()
    held[1].release()
    until(lambda: state(node)["leases"] == 0, "the second's leases ended")
    second.close()


def test_leases_that_come_after_the_client_gave_up_are_given_back(
    node: NodeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2pcache.io.link._GRACE_S", 0.0)
    client = Client(node.socket_path, PATIENCE_S)
    cache = client.open(NAMESPACE)
    run, _ = kept(client)
    lookup = cache.lookup(run, chunker=FixedChunker(32))
    desk, gate = node.node, asyncio.Event()
    original = desk.fetch

    async def late(*args: Any) -> Any:
        grants = await original(*args)
        await gate.wait()
        return grants

    monkeypatch.setattr(desk, "fetch", late)
    with cache.fetch(lookup, budget_s=0.05) as fetched:
        assert [c.miss for c in fetched] == [Miss.DEADLINE] * 2
    assert state(node)["leases"] == 2, "the answer is on its way"
    node._loop.call_soon_threadsafe(gate.set)
    until(lambda: at_rest(state(node)), "the leases came back")
    client.close()


def test_slots_that_come_after_the_client_gave_up_are_given_back(
    node: NodeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2pcache.io.link._GRACE_S", 0.0)
    link = Link(node.socket_path, PATIENCE_S)
    gate = asyncio.Event()
    original = node.node.reserve

    async def late(*args: Any) -> Any:
        slots = await original(*args)
        await gate.wait()
        return slots

    monkeypatch.setattr(node.node, "reserve", late)
    body = BodyInfo(b"c" * 16, b"e" * 16, 1, 4096)
    with pytest.raises(DeadlineExceeded):
        link.call("reserve", {"bodies": [body_to_wire(body)], "deadline_s": 1.0}, 0.05)
    assert state(node)["unfinished"] == 1
    node._loop.call_soon_threadsafe(gate.set)
    until(lambda: at_rest(state(node)), "the slot came back")
    assert check(node)["host"]["bytes"] == 0
    link.close()


def test_a_client_over_its_limit_of_leases_is_told_busy_and_loses_none(folder: Path) -> None:
    config = NodeConfig(name="n", host_bytes_max=SLAB, runtime_dir=str(folder), client_leases_max=1)
    node = NodeRuntime.start(config)
    client = Client(node.socket_path, PATIENCE_S)
    run, _ = kept(client)
    cache = client.open(NAMESPACE)
    with cache.fetch(cache.lookup(run, chunker=FixedChunker(32))) as fetched:
        assert {c.miss for c in fetched} == {None, Miss.BUSY}
        assert state(node)["leases"] == 1
    until(lambda: at_rest(state(node)), "no lease is left")
    client.close()
    node.close()


def test_a_mistaken_release_commit_or_abort_changes_nothing(node: NodeRuntime) -> None:
    link = Link(node.socket_path, PATIENCE_S)
    link.call("release", {"generations": [0, 1, 99, 2**63 - 1]}, PATIENCE_S)
    link.call("abort", {"generations": [1, 99]}, PATIENCE_S)
    assert link.call("commit", {"slots": [[1, [0], b""]]}, PATIENCE_S) == {"committed": 0, "lost": 0}
    assert at_rest(state(node))
    link.close()


def test_a_fetch_of_a_body_by_a_wrong_length_is_a_miss_and_the_others_come(node: NodeRuntime) -> None:
    with Client(node.socket_path, PATIENCE_S) as client:
        run, _ = kept(client)
        bodies = [c.body for c in client.open(NAMESPACE).lookup(run, chunker=FixedChunker(32)).chunks]
        wants = pack_bodies([(dataclasses.replace(bodies[0], nbytes=1), ()), (bodies[1], ())])
        grants = fetch_of(client.link(), wants)
        assert [(g.generation > 0, g.miss) for g in grants] == [(False, Miss.LAYOUT), (True, None)]
        assert state(node)["leases"] == 1


def test_another_engine_cannot_commit_or_abort_a_slot(node: NodeRuntime) -> None:
    mine, other = Link(node.socket_path, PATIENCE_S), Link(node.socket_path, PATIENCE_S)
    body = BodyInfo(b"c" * 16, b"e" * 16, 1, 4096)
    ((status, _, generation),) = mine.call("reserve", {"bodies": [body_to_wire(body)], "deadline_s": 1.0}, 5)[
        "slots"
    ]
    assert status == "ok"
    assert other.call("commit", {"slots": [[generation, [0], b""]]}, 5) == {"committed": 0, "lost": 0}
    other.call("abort", {"generations": [generation]}, 5)
    assert state(node)["unfinished"] == 1
    assert mine.call("commit", {"slots": [[generation, [0], b""]]}, 5) == {"committed": 1, "lost": 0}
    mine.close()
    other.close()


WRITES_AS_PEER = """
from p2pcache.io.slab import attach
import ctypes
_, _, slab = attach(sys.argv[1], "peer", PATIENCE_S)
import numpy as np
array = np.frombuffer(slab.view(0, 4096), np.uint8)
say("mapped")
ctypes.memset(array.ctypes.data, 1, 1)
say("wrote")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="signals are told apart by their Linux numbers")
def test_a_peer_that_writes_through_a_pointer_faults_and_not_the_node(node: NodeRuntime) -> None:
    peer = EngineProcess(node.socket_path, WRITES_AS_PEER)
    try:
        assert peer.read() == "mapped"
        assert peer.process.wait(PATIENCE_S) == -11
    finally:
        peer.kill()
    assert check(node)["name"] == "n"
