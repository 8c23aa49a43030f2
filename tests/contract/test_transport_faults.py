"""Faults of transports that only show where the host runs short, or where a peer means no good."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import struct
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from p2pcache.core.checksum import CorruptBody
from p2pcache.core.membership import Member
from p2pcache.io import _tcp_holder, slab, transport_shm
from p2pcache.io._pulls import Workers, join
from p2pcache.io._tcp_pull import TcpPull
from p2pcache.io._tcp_sockets import ANSWER, GONE, MAGIC, REQUEST, VERSION
from p2pcache.io.ports import TicketGone, TransportError
from p2pcache.io.slab import HostSlab
from p2pcache.io.transport_shm import ShmTransport
from p2pcache.io.transport_tcp import TcpTransport
from p2pcache.node.holder import RENEWED_LEASES_MAX, TicketOffice
from tests.contract.test_transports import check_works, kind, run, start
from tests.contract.transports import (
    BOOT_ID,
    KINDS,
    PATIENCE_S,
    FakeTickets,
    Kind,
    Memory,
    Watched,
    member,
    mesh,
)

__all__ = ["kind"]  # the fixture
MIB = 1 << 20
THREADS = {"shm": "p2pcache-shm", "tcp": "p2pcache-tcp-pull", "ucx": "p2pcache-ucx-check"}


@contextlib.contextmanager
def no_thread(monkeypatch: pytest.MonkeyPatch, prefix: str, since: int = 0) -> Iterator[None]:
    """Threads so named cannot be started, from the `since`th on."""
    started, real = 0, threading.Thread.start

    def start_thread(self: threading.Thread) -> None:
        nonlocal started
        if self.name.startswith(prefix):
            started += 1
            if started > since:
                raise RuntimeError("can't start new thread")
        real(self)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_thread)
        yield


# Threads that cannot be had.


def test_workers_make_do_with_the_threads_they_get(monkeypatch: pytest.MonkeyPatch) -> None:
    async def case() -> None:
        workers, ran = Workers("p2pcache-made", 4), threading.Semaphore(0)
        with no_thread(monkeypatch, "p2pcache-made"), pytest.raises(RuntimeError):
            workers.submit(ran.release)
        with no_thread(monkeypatch, "p2pcache-made", since=1):
            for _ in range(3):
                workers.submit(ran.release)
            for _ in range(3):
                assert await asyncio.to_thread(ran.acquire, timeout=PATIENCE_S)
        assert not ran.acquire(blocking=False), "a job that was refused has run"
        await join(workers.stop())

    run(case)


def test_join_ends_whatever_its_threads_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # the waiter's complaint

    async def case() -> None:
        await join([threading.Thread(target=print)])  # never started

    run(case)


def test_a_pull_without_a_thread_fails_or_works_and_the_next_works(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def case() -> None:
        async with mesh(kind, 4 * MIB) as m:
            with no_thread(monkeypatch, THREADS[kind.name]):
                watched = start(m, m.tickets.grant(4 * MIB, layers=4))
                outcome = await watched.done()
                assert outcome is None if kind.name == "ucx" else isinstance(outcome, TransportError)
                await watched.settled()
            await check_works(m)

    run(case)


def test_a_pull_goes_on_with_fewer_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    async def case() -> None:
        async with mesh(KINDS["tcp of 4 streams"], 64 * MIB) as m:
            with no_thread(monkeypatch, "p2pcache-tcp-pull", since=1):
                watched = start(m, m.tickets.grant(64 * MIB, layers=8))
                assert await watched.done() is None
                assert watched.dest[:] == m.memory[:]
                await watched.settled()

    run(case)


def test_tcp_holder_without_a_thread_drops_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    async def case() -> None:
        async with mesh(KINDS["tcp"], MIB) as m:
            with no_thread(monkeypatch, "p2pcache-tcp-send"):
                watched = start(m, m.tickets.grant(MIB))
                assert isinstance(await watched.done(), TransportError)
                await watched.settled()
            await check_works(m)

    run(case)


# Holders over tcp.


def test_tcp_reader_that_asks_on_and_on_waits_in_line() -> None:
    """With one worker, and a reader that has always asked for more already."""
    asked = 64

    async def case() -> None:
        tickets = _Gate(Memory(MIB).view)
        holder, reader = TcpTransport("127.0.0.1", threads_max=1), TcpTransport("127.0.0.1")
        known_as = member("tcp", await holder.start(tickets))
        host, _, port = known_as.transports["tcp"].rpartition(":")
        greedy, fair = tickets.grant(1), tickets.grant(2)
        with socket.create_connection((host, int(port))) as flood:
            flood.sendall(REQUEST.pack(MAGIC, VERSION, 0, greedy.token, 1, 0, 1) * asked)
            assert await asyncio.to_thread(tickets.begun.acquire, timeout=PATIENCE_S)
            watched = Watched(reader, known_as, fair)
            assert await asyncio.to_thread(_until, lambda: len(holder._holder._serving) == 2)
            tickets.opened.set()
            assert await watched.done() is None
            flood.settimeout(PATIENCE_S)
            assert await asyncio.to_thread(_receive, flood, asked * (ANSWER.size + 1))
        assert tickets.order.index(fair.token) < asked // 2
        await reader.close()
        await holder.close()

    run(case)


class _Gate(FakeTickets):
    """Tickets whose first use waits until `opened`; `order` is that of their use."""

    def __init__(self, memory: memoryview) -> None:
        super().__init__(memory)
        self.begun, self.opened = threading.Semaphore(0), threading.Event()
        self.order: list[bytes] = []

    def begin(self, token: bytes) -> memoryview | None:
        self.order.append(token)
        self.begun.release()
        self.opened.wait(PATIENCE_S)
        return super().begin(token)


def _until(condition: Callable[[], bool]) -> bool:
    """Of another thread's state that nothing tells of."""
    limit_s = time.monotonic() + PATIENCE_S
    while not condition() and time.monotonic() < limit_s:
        os.sched_yield()
    return condition()


def _receive(sock: socket.socket, nbytes: int) -> bytes:
    return sock.recv(nbytes, socket.MSG_WAITALL)


def test_tcp_reader_without_a_ticket_is_told_and_dropped() -> None:
    async def case() -> None:
        async with mesh(KINDS["tcp"], MIB) as m:
            host, _, port = m.member.transports["tcp"].rpartition(":")
            with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as stranger:
                stranger.sendall(REQUEST.pack(MAGIC, VERSION, 0, bytes(16), MIB, 0, MIB))
                answer = await asyncio.to_thread(_receive, stranger, ANSWER.size)
                assert ANSWER.unpack(answer) == (MAGIC, VERSION, GONE, 0)
                assert await asyncio.to_thread(_receive, stranger, 1) == b""

    run(case)


def test_tcp_stream_that_asked_ahead_learns_why_the_holder_hung_up() -> None:
    class HungUp:
        asked = 0

        def sendall(self, request: bytes) -> None:
            self.asked += 1
            if self.asked > 1:
                raise BrokenPipeError

        def recv(self, nbytes: int, flags: int) -> bytes:
            return ANSWER.pack(MAGIC, VERSION, GONE, 0)

    async def case() -> None:
        ticket = FakeTickets(Memory(64 * MIB).view).grant(64 * MIB, layers=8)
        pull = TcpPull("holder", ticket, Memory(64 * MIB).view, lambda _: None, streams_max=2)
        sock: Any = HungUp()
        with pytest.raises(TicketGone):
            pull.fetch(sock, [])
        assert sock.asked == 2

    run(case)


def test_tcp_listener_outlives_a_socket_that_cannot_be_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tcp_holder, "SWEEP_S", 0.01)
    monkeypatch.setattr(_tcp_holder, "IDLE_S", 0.0)

    async def case() -> None:
        async with mesh(KINDS["tcp"], MIB) as m:
            selector = m.holder._holder._selector
            real, refused = selector.register, []

            def register(*args: Any) -> Any:
                if not refused:
                    refused.append(args)
                    raise OSError(errno.ENOSPC, "no space left on device")
                return real(*args)

            selector.register = register
            host, _, port = m.member.transports["tcp"].rpartition(":")
            with contextlib.suppress(ConnectionError):
                with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as stranger:
                    assert await asyncio.to_thread(_receive, stranger, 1) == b""
            # A second one is swept away, by a listener that is still there.
            with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as stranger:
                assert await asyncio.to_thread(_receive, stranger, 1) == b""
            assert refused

    run(case)


def test_tcp_pull_that_failed_lets_go_of_its_destination() -> None:
    async def case() -> None:
        async with mesh(KINDS["tcp"], 8 * MIB) as m:
            ticket = m.tickets.grant(8 * MIB, layers=8)
            m.memory[4 * MIB] ^= 1
            ours = bytearray(8 * MIB)
            pull = m.reader.pull(m.member, ticket, memoryview(ours), lambda _: None)
            with pytest.raises(CorruptBody):
                await pull.done
            await pull.settled
            assert 4 * MIB < pull.landed_bytes <= 8 * MIB
            ours.append(0)  # BufferError while somebody refers to it

    run(case)


# Tickets.


def test_a_ticket_in_use_lives_on_but_not_for_ever() -> None:
    async def case() -> None:
        clock = types.SimpleNamespace(time=lambda: clock.now_s, now_s=0.0)
        memory = HostSlab(4096)
        released: list[object] = []
        residency: Any = types.SimpleNamespace(
            slab=memory, tier=types.SimpleNamespace(release=released.append)
        )
        config: Any = types.SimpleNamespace(
            remote_lease_s=10.0, serve_bytes_in_flight_max=MIB, serve_bytes_per_peer_max=MIB
        )
        clock.call_soon_threadsafe = lambda call, *args: call(*args)
        office = TicketOffice(config, clock, residency, None)  # type: ignore[arg-type]
        slot: Any = types.SimpleNamespace(exact=bytes(16), offset=0, nbytes=4096)
        assert office.admit("reader", slot.exact, 4096)
        token = office.issue(slot, "reader", expires_s=10.0)
        while clock.now_s < 10 * RENEWED_LEASES_MAX:  # spans of 9 s each
            assert office.begin(token) is not None
            clock.now_s += 9.0
            office.sweep()
            office.end(token)
        assert office.begin(token) is None
        office.sweep()
        assert released == [slot] and not len(office) and not office.leased_bytes
        memory.close()

    run(case)


# Peers over shm.


@pytest.fixture
def frozen(tmp_path: Path) -> Iterator[Member]:
    """A peer that is connected to and never answers."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen(16)
        yield Member("frozen", 1, "", BOOT_ID, {"shm": str(tmp_path / "socket")})


def test_shm_frozen_peer_holds_up_nobody(frozen: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport_shm, "_ATTACH_TIMEOUT_S", 600.0)

    async def case() -> None:
        async with mesh(KINDS["shm"], MIB) as m:
            stuck = [Watched(m.reader, frozen, m.tickets.grant(MIB)) for _ in range(8)]
            await check_works(m)
            stuck[0].pull.abandon()
            await stuck[0].settled()
            await m.reader.close()  # interrupts the attach
            for watched in stuck:
                assert isinstance(await watched.done(), TransportError)
                await watched.settled()

    run(case)


def test_shm_frozen_peer_is_tried_once_a_while(frozen: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[str] = []

    def attach(path: str, *args: Any) -> Any:
        tries.append(path)
        return slab.attach(path, *args)

    monkeypatch.setattr(transport_shm, "attach", attach)
    monkeypatch.setattr(transport_shm, "_ATTACH_TIMEOUT_S", 0.05)
    monkeypatch.setattr(transport_shm, "_SHUNNED_S", 600.0)

    async def case() -> None:
        reader = ShmTransport("", BOOT_ID)
        tickets = FakeTickets(Memory(MIB).view)
        for _ in range(2):  # the second time it is known
            for watched in [Watched(reader, frozen, tickets.grant(MIB)) for _ in range(6)]:
                assert isinstance(await watched.done(), TransportError)
                await watched.settled()
        assert len(tries) == 1
        await reader.close()

    run(case)


def test_attach_takes_its_timeout_in_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A peer that sends a byte each second: no single wait is long."""
    now_s = 0.0
    monkeypatch.setattr(slab.time, "monotonic", lambda: now_s)
    ours, theirs = socket.socketpair(socket.AF_UNIX)

    class Trickle(socket.socket):
        def connect(self, path: object) -> None:
            self.sent = 0

        def recv_into(self, buffer: memoryview, *args: Any) -> int:
            nonlocal now_s
            now_s += 1.0
            self.sent += 1
            assert self.sent < 10, "it goes on"
            return 1

    theirs.sendall(struct.pack("<I", 100_000))
    monkeypatch.setattr(slab.socket, "socket", lambda *_: Trickle(fileno=os.dup(ours.fileno())))
    with ours, theirs, pytest.raises(TimeoutError):
        slab.attach("anywhere", "peer", 2.0)


def test_threads_are_joined_also_where_no_thread_can_be_had_for_it(monkeypatch):
    async def scenario():
        go_on = threading.Event()
        working = threading.Thread(target=go_on.wait, args=(30,), daemon=True)
        working.start()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            joining = asyncio.ensure_future(join([working]))
            ended, _ = await asyncio.wait([joining], timeout=0.05)
            assert not ended
            go_on.set()
            await asyncio.wait_for(joining, 30)
        assert not working.is_alive()

    def refuse(_thread):
        raise RuntimeError("can't start new thread")

    asyncio.run(scenario())
