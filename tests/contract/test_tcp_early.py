"""Bodies asked for over tcp before their ticket is issued: bytes come right behind it, or nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket
import threading
import time
from collections.abc import Callable

import pytest

from p2pcache.core.checksum import CorruptBody
from p2pcache.io import _tcp_holder
from p2pcache.io._tcp_sockets import (
    ANSWER,
    EARLY,
    GONE,
    MAGIC,
    OK,
    REQUEST,
    VERSION,
    ask,
    readable,
    set_timeouts,
)
from p2pcache.io.ports import Ticket, TicketGone, TransportError
from p2pcache.io.transport_tcp import TcpTransport
from tests.contract.test_transports import check_works, run, start
from tests.contract.transports import KINDS, PATIENCE_S, Mesh, mesh
from tests.contract.transports import member as known_as

MIB = 1 << 20


def grant(m: Mesh, nbytes: int, token: bytes) -> Ticket:
    """As a node does it: the ticket first, then whoever watches for it is told."""
    ticket = m.tickets.grant(nbytes, token=token, layers=4)
    for watcher in m.tickets.watchers:
        watcher(token)
    return ticket


async def asked_early(m: Mesh, nbytes: int) -> bytes:
    """The token of a request that waits at the holder."""
    token = m.reader.ask_early(m.member, nbytes)
    assert token is not None
    await until(lambda: token in waiting(m), "the request is there")
    return token


def waiting(m: Mesh) -> dict:
    return m.holder._holder._early


async def until(condition: Callable[[], bool], what: str) -> None:
    limit_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < limit_s, f"not within {PATIENCE_S} s: {what}"
        await asyncio.sleep(0.001)


def connect(m: Mesh) -> socket.socket:
    host, _, port = m.member.transports["tcp"].rpartition(":")
    sock = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
    set_timeouts(sock, PATIENCE_S, PATIENCE_S)
    return sock


def test_the_bytes_come_right_behind_the_ticket_on_the_same_connection() -> None:
    async def case() -> None:
        async with mesh(KINDS["tcp"], 4 * MIB) as m:
            assert m.reader.ask_early(m.member, MIB) is None, "no connection is at hand yet"
            await check_works(m)
            for nbytes in (MIB, 4 * MIB, MIB):
                token = await asked_early(m, nbytes)
                begins = m.tickets.begins
                ticket = grant(m, nbytes, token)
                await asyncio.to_thread(until_begun, m, begins)  # before anybody has a place for them
                watched = start(m, ticket)
                assert await watched.done() is None
                assert watched.dest[:nbytes] == m.memory[:nbytes]
                await watched.settled()
                m.reader.forget_early(token)  # of no consequence any more
            assert not waiting(m) and not m.reader._early
            assert sum(map(len, m.reader._pool._idle.values())) == 1, "it was one connection all the time"

    run(case)


def until_begun(m: Mesh, begins: int) -> None:
    with m.tickets._changed:
        assert m.tickets._changed.wait_for(lambda: m.tickets.begins > begins, PATIENCE_S)


def test_a_small_body_that_is_here_takes_no_thread_and_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    async def case() -> None:
        async with mesh(KINDS["tcp"], MIB) as m:
            await check_works(m)
            monkeypatch.setattr(m.reader._readers, "submit", None)  # no thread from here on
            for nbytes, wrong in ((4096, False), (256 << 10, False), (256 << 10, True)):
                token = await asked_early(m, nbytes)
                sock = m.reader._early[token]
                ticket = grant(m, nbytes, token)
                await until(lambda sock=sock, n=nbytes: readable(sock) == ANSWER.size + n, "all is here")
                if wrong:
                    ticket = dataclasses.replace(ticket, checksums=(*ticket.checksums[:3], 1))
                watched = start(m, ticket)
                outcome = await watched.done()
                await watched.settled()
                if wrong:
                    assert isinstance(outcome, CorruptBody) and not any(m.reader._pool._idle.values())
                else:
                    assert outcome is None and watched.dest[:nbytes] == m.memory[:nbytes]

    run(case)


def test_nonsense_that_is_here_ends_at_once() -> None:
    async def case() -> None:
        async with mesh(KINDS["tcp"], MIB) as m:
            await check_works(m)
            (ours, theirs), token = socket.socketpair(), b"some other token"
            theirs.sendall(ANSWER.pack(MAGIC, VERSION, OK, 7) + bytes(4096))
            m.reader._early[token] = ours
            watched = start(m, Ticket(token, 0, 4096, 1, ()))
            assert isinstance(await watched.done(), TransportError)
            await watched.settled()
            assert ours.fileno() == -1
            theirs.close()

    run(case)


def test_a_ticket_that_was_issued_before_the_request_came_is_as_good() -> None:
    async def case() -> None:
        async with mesh(KINDS["tcp"], MIB) as m:
            ticket = m.tickets.grant(MIB)
            with connect(m) as sock:
                ask(sock, ticket.token, MIB, 0, MIB, EARLY)
                answer = await asyncio.to_thread(sock.recv, ANSWER.size, socket.MSG_WAITALL)
                assert ANSWER.unpack(answer) == (MAGIC, VERSION, OK, MIB)
                body = await asyncio.to_thread(sock.recv, MIB, socket.MSG_WAITALL)
                assert body == bytes(m.memory[:MIB])

    run(case)


def test_an_early_request_behind_another_waits_as_well() -> None:
    async def case() -> None:
        async with mesh(KINDS["tcp"], MIB) as m:
            first, second = m.tickets.grant(MIB), b"a second ticket."
            with connect(m) as sock:
                ask(sock, first.token, MIB, 0, MIB)
                ask(sock, second, MIB, 0, MIB, EARLY)
                for token in (first.token, second):
                    if token == second:
                        await until(lambda: second in waiting(m), "it waits")
                        grant(m, MIB, second)
                    answer = await asyncio.to_thread(sock.recv, ANSWER.size, socket.MSG_WAITALL)
                    assert ANSWER.unpack(answer) == (MAGIC, VERSION, OK, MIB)
                    body = await asyncio.to_thread(sock.recv, MIB, socket.MSG_WAITALL)
                    assert body == bytes(m.memory[:MIB])

    run(case)


def test_what_is_refused_or_forgotten_leaves_nothing_behind() -> None:
    async def case() -> None:
        async with mesh(KINDS["tcp"], MIB) as m:
            await check_works(m)
            descriptors = len(os.listdir("/proc/self/fd"))
            for _ in range(5):
                token = await asked_early(m, MIB)
                m.reader.forget_early(token)
                for watcher in m.tickets.watchers:  # without a ticket: refused
                    watcher(token)
                assert not waiting(m)
                await check_works(m)
            await until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors, "connections are closed")

    run(case)


def test_a_reader_that_was_refused_is_told() -> None:
    async def case() -> None:
        async with mesh(KINDS["tcp"], MIB) as m:
            with connect(m) as sock:
                ask(sock, bytes(15) + b"1", MIB, 0, MIB, EARLY)
                await until(lambda: bool(waiting(m)), "it waits")
                for watcher in m.tickets.watchers:
                    watcher(bytes(15) + b"1")
                answer = await asyncio.to_thread(sock.recv, ANSWER.size, socket.MSG_WAITALL)
                assert ANSWER.unpack(answer) == (MAGIC, VERSION, GONE, 0)
                assert await asyncio.to_thread(sock.recv, 1) == b""

    run(case)


def test_a_ticket_that_comes_too_late_is_used_over_a_fresh_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_tcp_holder, "EARLY_S", 0.0)
    monkeypatch.setattr(_tcp_holder, "SWEEP_S", 0.01)

    async def case() -> None:
        async with mesh(KINDS["tcp"], MIB) as m:
            await check_works(m)
            token = m.reader.ask_early(m.member, MIB)
            assert token is not None
            sock = m.reader._early[token]
            assert await asyncio.to_thread(sock.recv, 1, socket.MSG_PEEK) == b"", "the holder hung up"
            watched = start(m, grant(m, MIB, token))
            assert await watched.done() is None
            assert watched.dest[:MIB] == m.memory[:MIB]
            await watched.settled()

    run(case)


def test_strangers_that_wait_for_no_ticket_lock_nobody_out() -> None:
    async def case() -> None:
        async with mesh(KINDS["tcp"], MIB) as m:
            await m.holder.close()
            m.holder = TcpTransport("127.0.0.1", threads_max=1, connections_max=4)
            m.member = known_as("tcp", await m.holder.start(m.tickets))
            with contextlib.ExitStack() as stack:
                for number in range(12):
                    stranger = stack.enter_context(connect(m))
                    ask(stranger, number.to_bytes(16, "big"), MIB, 0, MIB, EARLY)
                    await until(lambda number=number: number.to_bytes(16, "big") in waiting(m), "it waits")
                    assert len(waiting(m)) <= 4
                await check_works(m, MIB)
                # Two with one token: the second is none of ours.
                twice = stack.enter_context(connect(m))
                ask(twice, next(reversed(waiting(m))), MIB, 0, MIB, EARLY)
                assert await asyncio.to_thread(twice.recv, 1) == b""

    run(case)


@pytest.mark.parametrize("closed", ["reader", "holder"])
def test_closing_ends_what_waits(closed: str) -> None:
    async def case() -> None:
        async with mesh(KINDS["tcp"], MIB) as m:
            await check_works(m)
            token = await asked_early(m, MIB)
            await getattr(m, closed).close()
            for watcher in m.tickets.watchers:
                watcher(token)
            if closed == "holder":
                watched = start(m, Ticket(token, 0, MIB, 1, ()))
                assert isinstance(await watched.done(), TransportError)
                await watched.settled()
            assert not m.reader._early

    run(case)


def test_a_pull_that_was_given_up_in_line_hangs_up_and_writes_nothing() -> None:
    """What was asked for may be on its way; no later pull may take it for its own."""

    async def case() -> None:
        async with mesh(KINDS["tcp"], MIB) as m:
            await check_works(m)
            held = threading.Event()
            for _ in range(16):  # all threads of the reader
                m.reader._readers.submit(lambda: held.wait(PATIENCE_S))
            token = await asked_early(m, MIB)
            watched = start(m, grant(m, MIB, token))
            watched.pull.abandon()
            await watched.settled()
            assert isinstance(await watched.done(), TransportError)
            assert watched.dest[:] == b"\xa5" * MIB
            held.set()
            await check_works(m)
            assert watched.dest[:] == b"\xa5" * MIB

    run(case)


def test_a_request_that_is_not_early_is_answered_at_once() -> None:
    async def case() -> None:
        async with mesh(KINDS["tcp"], MIB) as m:
            await check_works(m)
            gone = m.tickets.grant(MIB)
            m.tickets.revoke(gone)
            watched = start(m, gone)
            assert isinstance(await watched.done(1.0), TicketGone)
            await watched.settled()
            assert REQUEST.size == 48

    run(case)
