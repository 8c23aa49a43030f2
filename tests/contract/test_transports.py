"""The contract of `ports.Transport`, run on every implementation."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

import numpy as np
import pytest

from p2pcache.core.checksum import CorruptBody
from p2pcache.core.membership import Member
from p2pcache.io import _tcp_holder, _ucx_sends, transport_ucx
from p2pcache.io._tcp_sockets import MAGIC, REQUEST, VERSION
from p2pcache.io._ucx_pulls import IdleLinks
from p2pcache.io.ports import Ticket, TicketGone, TransportError
from p2pcache.io.transport_tcp import TcpTransport
from p2pcache.io.transport_ucx import UcxTransport, ucx_available
from p2pcache.types import ConfigError, InvariantError
from tests.contract.transports import (
    KINDS,
    PATIENCE_S,
    POISON,
    TOKEN,
    Kind,
    Mesh,
    Watched,
    child,
    member,
    mesh,
)

MIB = 1 << 20
LARGE = 1024 * MIB  # sparse; far from its end when the first progress is told, on a loaded machine too


@pytest.fixture(params=[pytest.param(kind, id=name, marks=kind.marks) for name, kind in KINDS.items()])
def kind(request: pytest.FixtureRequest) -> Kind:
    reason = request.param.unavailable()
    if reason:
        pytest.skip(reason)
    return request.param


@pytest.fixture
def sending(kind: Kind) -> Kind:
    if not kind.holder_sends:
        pytest.skip("its reader maps the memory; the holder takes no part in a pull")
    return kind


def run(case: Callable[..., Coroutine], *args: object) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await case(*args)

    asyncio.run(bounded())


def start(m: Mesh, ticket: Ticket, **kwargs: object) -> Watched:
    return Watched(m.reader, m.member, ticket, **kwargs)


async def check_works(m: Mesh, nbytes: int = 100_000) -> None:
    ticket = m.tickets.grant(nbytes)
    watched = start(m, ticket)
    assert await watched.done() is None
    assert watched.dest[:nbytes] == m.memory[:nbytes]
    await watched.settled()


# Bytes.


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, MIB + 1, 16 * MIB])
def test_arrives_equal(kind: Kind, nbytes: int) -> None:
    async def case() -> None:
        async with mesh(kind, nbytes + 64) as m:
            ticket = m.tickets.grant(nbytes, offset=64)
            for _ in range(2):  # the second on a connection that is already there
                watched = start(m, ticket)
                assert await watched.done() is None
                assert watched.dest[:nbytes] == m.memory[64 : 64 + nbytes]
                assert watched.told[-1:] == ([nbytes] if nbytes else []) and not watched.problems
                await watched.settled()

    run(case)


def test_many_pulls_at_once(kind: Kind) -> None:
    count, nbytes = 40, 300_001

    async def case() -> None:
        async with mesh(kind, count * nbytes) as m:
            watches = [start(m, m.tickets.grant(nbytes, i * nbytes)) for i in range(count)]
            for i, watched in enumerate(watches):
                assert await watched.done() is None
                assert watched.dest[:nbytes] == m.memory[i * nbytes : (i + 1) * nbytes]
                await watched.settled()

    run(case)


def test_progress_grows_and_never_promises_too_much(kind: Kind) -> None:
    nbytes = 40 * MIB + 5

    async def case() -> None:
        async with mesh(kind, nbytes) as m:
            source = np.frombuffer(m.memory, np.uint8)

            def check(dest: memoryview, since: int, upto: int) -> None:
                assert np.array_equal(np.frombuffer(dest, np.uint8)[since:upto], source[since:upto])

            watched = start(m, m.tickets.grant(nbytes), check=check)
            assert await watched.done() is None
            assert not watched.problems
            assert watched.told[-1] == nbytes and len(watched.told) > 2
            await watched.settled()

    run(case)


# Checksums.


@pytest.mark.parametrize("layers, layer_bytes", [(1, 1), (3, 100), (7, 4096), (32, MIB + 12), (3, 9 * MIB)])
def test_layers_are_checked_and_told_of_as_they_come(kind: Kind, layers: int, layer_bytes: int) -> None:
    nbytes = layers * layer_bytes

    async def case() -> None:
        async with mesh(kind, nbytes + 8) as m:
            ticket = m.tickets.grant(nbytes, offset=8, layers=layers)
            watched = start(m, ticket)
            assert await watched.done() is None
            assert watched.dest[:nbytes] == m.memory[8 : 8 + nbytes]
            assert watched.told[-1] == nbytes and not watched.problems
            assert all(told % layer_bytes == 0 for told in watched.told)
            await watched.settled()

    run(case)


@pytest.mark.parametrize("layers, layer_bytes", [(3, 100), (8, 4096), (32, MIB + 12)])
def test_a_flipped_bit_is_corrupt_and_no_layer_from_there_on_is_told_of(
    kind: Kind, layers: int, layer_bytes: int
) -> None:
    nbytes, bad = layers * layer_bytes, layers // 2

    async def case() -> None:
        async with mesh(kind, nbytes) as m:
            ticket = m.tickets.grant(nbytes, layers=layers)
            m.memory[bad * layer_bytes + layer_bytes // 3] ^= 0x10
            watched = start(m, ticket)
            assert isinstance(await watched.done(), CorruptBody)
            assert all(told <= bad * layer_bytes for told in watched.told)
            await watched.settled()
            await check_works(m, min(nbytes, 100_000))

    run(case)


def test_whole_bytes_of_another_body_are_corrupt(kind: Kind) -> None:
    nbytes = 5 * MIB

    async def case() -> None:
        async with mesh(kind, nbytes) as m:
            ticket = m.tickets.grant(nbytes, layers=5)
            other = dataclasses.replace(ticket, exact=b"another body's n")
            watched = start(m, other)
            assert isinstance(await watched.done(), CorruptBody)
            assert not watched.told
            await watched.settled()

    run(case)


# Refusals.


def test_unknown_ticket_is_gone(sending: Kind) -> None:
    async def case() -> None:
        async with mesh(sending, 4096) as m:
            gone = m.tickets.grant(4096)
            m.tickets.revoke(gone)
            for _ in range(2):
                watched = start(m, gone)
                assert isinstance(await watched.done(), TicketGone)
                await watched.settled()
                assert watched.dest[:] == bytes([POISON]) * 4096
            await check_works(m, 4096)

    run(case)


def test_wrong_length_is_refused(sending: Kind) -> None:
    async def case() -> None:
        async with mesh(sending, 8192) as m:
            held = m.tickets.grant(4096)
            for nbytes in (4000, 8192):
                watched = start(m, Ticket(held.token, 0, nbytes, 1, ()))
                assert isinstance(await watched.done(), TransportError)
                await watched.settled()
                assert watched.dest[:nbytes] == bytes([POISON]) * nbytes
            await check_works(m, 4096)

    run(case)


def test_destination_must_fit(kind: Kind) -> None:
    async def case() -> None:
        async with mesh(kind, 4096) as m:
            for dest in (bytearray(4095), bytes(4096)):
                with pytest.raises(InvariantError):
                    m.reader.pull(m.member, m.tickets.grant(4096), memoryview(dest), lambda _: None)

    run(case)


def test_nobody_there_is_known_soon(sending: Kind) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"

        async def case() -> None:
            reader = sending.reader()
            nobody = member(sending.name, address)
            began_s = time.monotonic()
            watched = Watched(reader, nobody, Ticket(TOKEN, 0, 4096, 1, ()))
            assert isinstance(await watched.done(within_s=2), TransportError)
            await watched.settled(within_s=2)
            assert time.monotonic() - began_s < 2
            await reader.close()

        run(case)


def test_address_must_be_a_literal(sending: Kind) -> None:
    async def case() -> None:
        reader = sending.reader()
        for address in ("", "nowhere", "localhost:80", "127.0.0.1:", "127.0.0.1:65536", "::1:80"):
            peer = member(sending.name, address)
            assert not reader.reaches(peer)
            watched = Watched(reader, peer, Ticket(TOKEN, 0, 16, 1, ()))
            assert isinstance(await watched.done(), TransportError)
            await watched.settled()
        assert not reader.reaches(Member("other", 1, "", transports={}))
        assert reader.reaches(member(sending.name, "127.0.0.1:80"))
        await reader.close()

    run(case)


# Giving up, and ends.


def test_abandon_in_mid_transfer_leaves_the_destination_alone(kind: Kind) -> None:
    async def case() -> None:
        async with mesh(kind, LARGE, fill=False) as m:
            watched = start(m, m.tickets.grant(LARGE))
            await watched.until_moving(LARGE)
            watched.pull.abandon()
            assert isinstance(await watched.done(), TransportError)
            await watched.settled()
            told = len(watched.told)
            # A late write would bring the source's zeros.
            window = np.frombuffer(watched.dest, np.uint8)[: watched.told[-1] + 64 * MIB]
            window[:] = POISON
            for _ in range(5):  # there is no event for "nothing happens"
                await asyncio.sleep(0.1)
                assert (window == POISON).all()
            assert len(watched.told) == told
            await m.tickets.until_balanced(begins_min=1 if kind.holder_sends else 0)
            await check_works(m)

    run(case)


def test_abandon_at_any_moment(kind: Kind) -> None:
    """Queued, connecting, asking, receiving, ended: every pull ends and settles, and twice is once."""

    async def case() -> None:
        async with mesh(kind, 4 * MIB) as m:
            ticket = m.tickets.grant(4 * MIB)
            for round_ in range(12):
                watches = [start(m, ticket) for _ in range(20)]
                for _ in range(round_ * 3):
                    await asyncio.sleep(0)
                for watched in watches:
                    watched.pull.abandon()
                    watched.pull.abandon()
                for watched in watches:
                    assert isinstance(await watched.done(), TransportError | None)
                    await watched.settled()
            await m.tickets.until_balanced()
            await check_works(m)

    run(case)


def test_cancelled_futures_do_no_harm(kind: Kind) -> None:
    async def case() -> None:
        async with mesh(kind, 4 * MIB) as m:
            watched = start(m, m.tickets.grant(4 * MIB))
            watched.pull.done.cancel()
            await watched.settled()
            await check_works(m)

    run(case)


def test_reader_closes_in_mid_transfer(kind: Kind) -> None:
    async def case() -> None:
        async with mesh(kind, LARGE, fill=False) as m:
            watched = start(m, m.tickets.grant(LARGE))
            await watched.until_moving(LARGE)
            await m.reader.close()
            assert watched.pull.settled.done()
            assert isinstance(await watched.done(), TransportError)
            await m.tickets.until_balanced(begins_min=1 if kind.holder_sends else 0)
            late = start(m, m.tickets.grant(16))
            assert isinstance(await late.done(), TransportError)
            await late.settled()

    run(case)


def test_holder_closes_in_mid_transfer(sending: Kind) -> None:
    async def case() -> None:
        async with mesh(sending, LARGE, fill=False) as m:
            watched = start(m, m.tickets.grant(LARGE))
            await watched.until_moving(LARGE)
            await m.holder.close()
            assert m.tickets.begins == m.tickets.ends == 1
            assert isinstance(await watched.done(), TransportError)
            await watched.settled()

    run(case)


def test_holder_closes_as_a_reader_comes(sending: Kind) -> None:
    async def case() -> None:
        async with mesh(sending, 4096) as m:
            for _ in range(15):
                await m.holder.close()
                m.holder, m.member = await sending.serve(m.source, m.tickets, 0)
                watched = start(m, m.tickets.grant(4096))
                await m.holder.close()
                assert isinstance(await watched.done(), TransportError | None)
                await watched.settled()
            m.holder, m.member = await sending.serve(m.source, m.tickets, 0)
            await check_works(m, 4096)

    run(case)


@pytest.mark.parametrize("same_incarnation", [True, False])
def test_holder_restarts_on_the_same_port(sending: Kind, same_incarnation: bool) -> None:
    async def case() -> None:
        async with mesh(sending, 100_000) as m:
            await check_works(m)
            port = int(m.member.transports[sending.name].rpartition(":")[2])
            await m.holder.close()
            m.holder, restarted = await sending.serve(m.source, m.tickets, port)
            if not same_incarnation:
                m.member = restarted
            await check_works(m)

    run(case)


# Death.


def test_holder_is_killed_in_mid_transfer(kind: Kind) -> None:
    async def case() -> None:
        with child("holder", kind.name, LARGE, 0) as holder:
            peer = Member.from_wire(holder.answer())
            reader = kind.reader()
            watched = Watched(reader, peer, Ticket(TOKEN, 0, LARGE, 1, ()))
            await watched.until_moving(LARGE)
            holder.signal(signal.SIGKILL)
            if kind.holder_sends:
                assert isinstance(await watched.done(), TransportError)
            await watched.settled()
            await reader.close()

    run(case)


def test_holder_is_frozen_and_thaws(kind: Kind) -> None:
    async def case() -> None:
        with child("holder", kind.name, LARGE, 0) as holder:
            peer = Member.from_wire(holder.answer())
            reader = kind.reader()
            ticket = Ticket(TOKEN, 0, LARGE, 1, ())
            watched = Watched(reader, peer, ticket)
            await watched.until_moving(LARGE)
            holder.signal(signal.SIGSTOP)
            late = Watched(reader, peer, ticket)  # its first contact is with a frozen holder
            if kind.holder_sends:
                await asyncio.wait({watched.pull.done, late.pull.done}, timeout=0.5)
                assert not watched.pull.done.done()
            for frozen in (watched, late):
                frozen.pull.abandon()
                await frozen.settled(within_s=5)
                assert frozen.pull.done.done()
            holder.signal(signal.SIGCONT)
            again = Watched(reader, peer, ticket)
            await again.until_moving(LARGE)
            began_s = time.monotonic()
            await reader.close()
            assert time.monotonic() - began_s < 5
            await again.settled()

    run(case)


def test_reader_is_killed_in_mid_transfer(sending: Kind) -> None:
    async def case() -> None:
        async with mesh(sending, LARGE, fill=False) as m:
            ticket = m.tickets.grant(LARGE)
            peer = json.dumps(m.member.to_wire())
            with child("reader", sending.name, peer, ticket.token.hex(), LARGE) as reader:
                await asyncio.to_thread(reader.answer)
                reader.signal(signal.SIGKILL)
                await m.tickets.until_balanced(begins_min=1)
            await check_works(m)

    run(case)


# Strangers.


def test_strangers_garbage_harms_nobody(sending: Kind) -> None:
    async def case() -> None:
        async with mesh(sending, 100_000) as m:
            host, _, port = m.member.transports[sending.name].rpartition(":")
            messages = [b"", b"\0", b"GET / HTTP/1.1\r\n\r\n", b"P2PK", b"P2PK\xff", b"P2PK\1" * 999]
            messages.append(bytes(4096))
            strangers = [socket.create_connection((host, int(port))) for _ in messages]
            for stranger, message in zip(strangers, messages, strict=True):
                with contextlib.suppress(ConnectionError):
                    stranger.sendall(message)
            await check_works(m)
            for stranger in strangers:
                stranger.close()
            await check_works(m)

    run(case)


def test_listens_on_its_host_alone(sending: Kind) -> None:
    async def case() -> None:
        before = listening()
        async with mesh(sending, 4096) as m:
            await check_works(m, 4096)  # the reader may open ports of its own
            opened = listening() - before
            assert m.member.transports[sending.name] in opened
            assert {address.rpartition(":")[0] for address in opened} == {"127.0.0.1"}

    run(case)


def listening() -> set[str]:
    """What this process listens on, by the kernel's own tables."""
    inodes = set()
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists them
            inodes.add(os.readlink(fd))
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in inodes:
                host, port = local.split(":")
                words = struct.unpack(f">{len(host) // 8}I", bytes.fromhex(host))
                packed = struct.pack(f"={len(words)}I", *words)  # printed as numbers of this machine
                found.add(f"{socket.inet_ntop(family, packed)}:{int(port, 16)}")
    return found


def test_port_taken_is_the_users_fault(sending: Kind) -> None:
    async def case() -> None:
        async with mesh(sending, 16) as m:
            host, _, port = m.member.transports[sending.name].rpartition(":")
            with pytest.raises(ConfigError, match=f"{host}.*{port}"):
                await sending.serve(m.source, m.tickets, int(port))

    run(case)


# One kind's own.


def test_shm_ticket_outside_the_slab_is_gone() -> None:
    async def case() -> None:
        async with mesh(KINDS["shm"], 8192) as m:
            watched = start(m, Ticket(TOKEN, 8000, 4096, 1, ()))
            assert isinstance(await watched.done(), TicketGone)
            await watched.settled()
            await check_works(m, 4096)

    run(case)


def test_shm_another_incarnation_is_refused() -> None:
    async def case() -> None:
        async with mesh(KINDS["shm"], 4096) as m:
            await check_works(m, 4096)
            current, m.member = m.member, member("shm", m.member.transports["shm"])
            watched = start(m, m.tickets.grant(4096))
            assert isinstance(await watched.done(), TransportError)
            await watched.settled()
            m.member = current
            await check_works(m, 4096)

    run(case)


def test_shm_lets_go_of_the_slab_of_a_peer_that_has_gone() -> None:
    async def case() -> None:
        with child("holder", "shm", MIB, 0) as holder:
            peer = Member.from_wire(holder.answer())
            reader = KINDS["shm"].reader()
            ticket = Ticket(TOKEN, 0, MIB, 1, ())
            assert await Watched(reader, peer, ticket).done() is None
            assert mapped_slabs() == 1
            holder.kill()
            async with asyncio.timeout(5):
                while mapped_slabs():
                    await asyncio.sleep(0.01)
            assert isinstance(await Watched(reader, peer, ticket).done(), TransportError)
            await reader.close()

    def mapped_slabs() -> int:
        gc.collect()
        with open("/proc/self/maps") as file:
            return sum("p2pcache-slab" in line for line in file)

    run(case)


def test_shm_is_for_one_host() -> None:
    here = member("shm", "/somewhere")
    reader = KINDS["shm"].reader()
    assert reader.reaches(here)
    assert not reader.reaches(dataclasses.replace(here, boot_id="another"))
    assert not reader.reaches(dataclasses.replace(here, boot_id=""))
    assert not reader.reaches(dataclasses.replace(here, transports={}))


def test_tcp_drops_the_longest_idle_when_full() -> None:
    async def case() -> None:
        async with mesh(KINDS["tcp"], 100_000) as m:
            await m.holder.close()
            m.holder = TcpTransport("127.0.0.1", connections_max=4)
            address = await m.holder.start(m.tickets)
            m.member = member("tcp", address)
            host, _, port = address.rpartition(":")
            strangers = [socket.create_connection((host, int(port))) for _ in range(20)]
            await check_works(m)
            strangers[0].settimeout(5)
            assert strangers[0].recv(1) == b""
            for stranger in strangers:
                stranger.close()

    run(case)


def test_tcp_reader_that_stops_reading_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tcp_holder, "STALLED_S", 1.0)

    async def case() -> None:
        async with mesh(KINDS["tcp"], LARGE, fill=False) as m:
            ticket = m.tickets.grant(LARGE)
            host, _, port = m.member.transports["tcp"].rpartition(":")
            with socket.create_connection((host, int(port))) as lazy:
                lazy.sendall(REQUEST.pack(MAGIC, VERSION, 0, ticket.token, LARGE, 0, LARGE))
                await m.tickets.until_balanced(begins_min=1)

    run(case)


def test_tcp_reader_that_trickles_is_dropped_and_a_slow_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes some bytes now and then, always before it would count as stalled."""
    monkeypatch.setattr(_tcp_holder, "STALLED_S", 1.0)

    async def case() -> None:
        async with mesh(KINDS["tcp"], LARGE, fill=False) as m:
            await m.holder.close()
            m.holder = TcpTransport("127.0.0.1", bytes_per_s_min=64 * MIB)
            m.member = member("tcp", await m.holder.start(m.tickets))
            ticket = m.tickets.grant(LARGE)
            host, _, port = m.member.transports["tcp"].rpartition(":")
            over = threading.Event()

            def trickle() -> None:
                with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as lazy:
                    lazy.sendall(REQUEST.pack(MAGIC, VERSION, 0, ticket.token, LARGE, 0, LARGE))
                    with contextlib.suppress(ConnectionError):
                        while lazy.recv(2 * MIB, socket.MSG_WAITALL) and not over.wait(0.1):
                            pass

            trickling = asyncio.create_task(asyncio.to_thread(trickle))
            try:
                await m.tickets.until_balanced(begins_min=1)
                assert time.monotonic() - began_s > 1.0, "it was dropped before it could show how slow it is"
            finally:
                over.set()
                await trickling
            await check_works(m)

    began_s = time.monotonic()
    run(case)


def test_tcp_over_ipv6() -> None:
    async def case() -> None:
        memory = bytearray(b"kv" * 5000)
        async with mesh(KINDS["tcp"], 10_000) as m:
            await m.holder.close()
            m.holder = TcpTransport("::1")
            try:
                address = await m.holder.start(m.tickets)
            except ConfigError as exc:
                pytest.skip(f"no IPv6 here: {exc}")
            assert address.startswith("[::1]:")
            m.member = member("tcp", address)
            await check_works(m, len(memory))

    run(case)


def test_tcp_refuses_a_wildcard() -> None:
    with pytest.raises(ConfigError, match="wildcard"):
        run(TcpTransport("0.0.0.0").start, None)


@pytest.fixture
def ucx() -> Kind:
    reason = KINDS["ucx"].unavailable()
    if reason:
        pytest.skip(reason)
    return KINDS["ucx"]


@pytest.mark.ucx
def test_ucx_thread_that_fails_ends_its_pulls(ucx: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    async def case() -> None:
        async with mesh(ucx, LARGE, fill=False) as m:
            watched = start(m, m.tickets.grant(LARGE))
            await watched.until_moving(LARGE)

            def fail(self: object, now_s: float) -> bool:
                raise RuntimeError("on purpose")

            monkeypatch.setattr(IdleLinks, "step", fail)  # of the reader's engine, the holder has none
            assert isinstance(await watched.done(), TransportError)
            await watched.settled()
            monkeypatch.undo()
            late = start(m, m.tickets.grant(16))
            assert isinstance(await late.done(), TransportError)
            await late.settled()
            with pytest.raises(ConfigError):
                await m.reader.start(m.tickets)

    run(case)


@pytest.mark.ucx
def test_ucx_ports_of_its_own_survive_garbage(ucx: Kind) -> None:
    async def case() -> None:
        before = listening()
        async with mesh(ucx, 100_000) as m:
            await check_works(m)
            for address in listening() - before:
                for message in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(4096), b"P2PK\1" * 999):
                    host, _, port = address.rpartition(":")
                    with socket.create_connection((host, int(port))) as stranger:
                        with contextlib.suppress(ConnectionError):
                            stranger.sendall(message)
                    await check_works(m)

    run(case)


@pytest.mark.ucx
def test_ucx_readers_come_and_go(ucx: Kind) -> None:
    async def case() -> None:
        async with mesh(ucx, 4096) as m:
            for count in range(100):
                await check_works(m, 4096)
                await m.reader.close()
                m.reader = ucx.reader()
                if count == 10:
                    settled_fds = len(os.listdir("/proc/self/fd"))
            assert len(os.listdir("/proc/self/fd")) < settled_fds + 20

    run(case)


def test_ucx_refuses_what_it_cannot_listen_on_alone() -> None:
    for host in ("0.0.0.0", "::", "localhost", "192.0.2.1", "127.0.0.9"):
        with pytest.raises(ConfigError, match=host):
            run(UcxTransport(host).start, None)


@pytest.mark.ucx
def test_ucx_describes_itself(ucx: Kind) -> None:
    async def case() -> None:
        async with mesh(ucx, 16) as m:
            described = m.holder.description()
            assert described["available"] and "libucp" in described["library"]
            assert described["version"].startswith("1.") and described["verbs"] in (True, False)
            assert "tcp/lo" in described["resources"] and described["devices"] == "lo"

    run(case)


@pytest.mark.ucx
def test_ucx_reader_that_is_frozen_is_dropped_and_others_are_served(
    ucx: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_ucx_sends, "STALLED_S", 1.0)

    async def case() -> None:
        async with mesh(ucx, LARGE, fill=False) as m:
            ticket = m.tickets.grant(LARGE)
            peer = json.dumps(m.member.to_wire())
            with child("reader", "ucx", peer, ticket.token.hex(), LARGE) as reader:
                await asyncio.to_thread(reader.answer)
                reader.signal(signal.SIGSTOP)
                await check_works(m)
                assert m.tickets.begins == 2 and m.tickets.ends < 2, "the frozen one was dropped too soon"
                await m.tickets.until_balanced(begins_min=2)
                await check_works(m)
                reader.signal(signal.SIGCONT)

    run(case)


@pytest.mark.ucx
def test_ucx_settings_of_the_user_win(ucx: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = UcxTransport("127.0.0.1").description()
    assert ours["devices"] == ours["settings"]["NET_DEVICES"] == "lo" and "TLS" in ours["settings"]
    users = {"UCX_NET_DEVICES": "lo,another", "UCX_TLS": "tcp", "UCX_RNDV_THRESH": "1m"}
    monkeypatch.setattr(transport_ucx, "_USERS_ENVIRONMENT", users)
    for name, value in users.items():
        monkeypatch.setenv(name, value)

    async def case() -> None:
        async with mesh(ucx, 100_000) as m:
            await check_works(m)
            theirs = m.holder.description()
            assert theirs["devices"] == theirs["settings"]["NET_DEVICES"] == "lo,another"
            assert not theirs["settings"].keys() & {"TLS", "RNDV_THRESH"}
            assert theirs["settings"]["TCP_TX_SEG_SIZE"] == ours["settings"]["TCP_TX_SEG_SIZE"]
            assert theirs["resources"] == ["tcp/lo"]
        named = UcxTransport("127.0.0.1", devices="lo")  # by code, which is explicit too
        assert named.description()["devices"] == "lo"

    run(case)


@pytest.mark.ucx
def test_ucx_asks_a_holder_that_closed_its_connection_over_a_fresh_one(
    ucx: Kind,
) -> None:
    """And what was posted on the old one has let go of the destination by then."""

    async def case() -> None:
        async with mesh(ucx, 8 * MIB) as m:
            for _ in range(5):
                await check_works(m, 8 * MIB)
                await m.holder.close()
                port = int(m.member.transports["ucx"].rpartition(":")[2])
                m.holder, _ = await ucx.serve(m.source, m.tickets, port)
            gone = m.tickets.grant(8 * MIB)
            m.tickets.revoke(gone)
            watched = start(m, gone)
            assert isinstance(await watched.done(), TicketGone)
            await watched.settled()
            assert watched.dest[:] == bytes([POISON]) * (8 * MIB)
            await check_works(m, 8 * MIB)

    run(case)


def test_ucx_that_is_not_installed_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ucxx", None)
    monkeypatch.setitem(sys.modules, "ucxx._lib", None)
    reason = ucx_available()
    assert reason is not None and "p2pcache[ucx-cu13]" in reason

    async def case() -> None:
        transport = UcxTransport("127.0.0.1")
        peer = member("ucx", "127.0.0.1:80")
        watched = Watched(transport, peer, Ticket(TOKEN, 0, 16, 1, ()))
        assert isinstance(await watched.done(), TransportError)
        await watched.settled()
        with pytest.raises(ConfigError, match="ucx-cu13"):
            await UcxTransport("127.0.0.1").start(None)
        assert transport.description() == {"available": False, "reason": reason}
        await transport.close()

    run(case)
