"""The holder's end of the tcp transport: a listener that sends bodies to whoever shows a ticket."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from functools import partial
from typing import NamedTuple

from p2pcache.io._pulls import Workers, join
from p2pcache.io._tcp_sockets import (
    ANSWER,
    BAD_RANGE,
    BAD_VERSION,
    GONE,
    MAGIC,
    OK,
    PIECE_BYTES,
    REQUEST,
    STALLED_S,
    VERSION,
    close_all,
    reset,
    set_timeouts,
    tune,
)
from p2pcache.io.ports import Tickets

log = logging.getLogger(__name__)

IDLE_S = 60.0  # a connection without a request is closed after so long
REQUEST_S = 5.0  # a started request must be whole by then
EARLY_S = 2.0  # and an early one is told off where its ticket is not issued by then
SWEEP_S = 1.0


class _Request(NamedTuple):
    early: int
    token: bytes
    nbytes: int  # of the whole body, as the reader was told
    start: int
    count: int


class _Connection:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.inbox = bytearray()
        self.deadline_s = time.monotonic() + IDLE_S

    def receive(self) -> _Request | None:
        """A request that is here in whole, without waiting. Raises OSError for nonsense, or at the end."""
        inbox = self.inbox
        try:
            part = self.sock.recv(REQUEST.size - len(inbox), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        inbox += part
        if not part or not inbox.startswith(MAGIC[: len(inbox)]):
            raise ConnectionAbortedError("the reader has gone, or is none of ours")
        if len(inbox) > 4 and inbox[4] != VERSION:
            answer = ANSWER.pack(MAGIC, VERSION, BAD_VERSION, 0)
            self.sock.send(answer, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            raise ConnectionAbortedError(f"a reader of version {inbox[4]}")
        if len(inbox) < REQUEST.size:
            return None
        _, _, *fields = REQUEST.unpack(inbox)
        inbox.clear()
        return _Request(*fields)


class Holder:
    """Sends bodies to whoever shows a ticket.

    One thread watches the listener and every connection that waits for a request. It reads
    requests without blocking, so half a frame from a stranger costs a descriptor for REQUEST_S and
    never a thread. A whole request goes to a worker, which gives the connection back afterwards.
    """

    def __init__(
        self,
        listener: socket.socket,
        tickets: Tickets,
        threads_max: int,
        connections_max: int,
        bytes_per_s_min: int = 0,
    ) -> None:
        self._listener = listener
        self._tickets = tickets
        self._connections_max = connections_max
        self._bytes_per_s_min = bytes_per_s_min
        self._workers = Workers("p2pcache-tcp-send", threads_max)
        self._selector = selectors.DefaultSelector()
        self._idle: dict[_Connection, None] = {}  # the watcher's alone; longest idle first
        self._lock = threading.Lock()  # guards the four below
        self._early: dict[bytes, tuple[_Connection, _Request]] = {}  # by the token whose ticket they await
        self._serving: set[_Connection] = set()
        self._served: deque[_Connection] = deque()
        self._closing = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake, selectors.EVENT_READ, self._take_back)
        self._watcher = threading.Thread(target=self._watch, name="p2pcache-tcp-listen", daemon=True)
        self._watcher.start()

    async def close(self) -> None:
        with self._lock:
            self._closing = True
            for connection in self._serving:
                with contextlib.suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)
            os.eventfd_write(self._wake, 1)
        await join([self._watcher])
        await join(self._workers.stop())  # after the watcher, which submits to them
        os.close(self._wake)

    def look_again(self, token: bytes) -> None:
        """A ticket has been issued, or refused: answer who asks for it already. From any thread."""
        with self._lock:
            waiting = None if self._closing else self._early.pop(token, None)
            if waiting is not None:
                self._hand_over(*waiting)

    # On the watcher's thread.

    def _watch(self) -> None:
        swept_s = time.monotonic()
        while not self._closing:
            for key, _ in self._selector.select(SWEEP_S):
                try:
                    key.data()
                except Exception:
                    log.exception("the tcp listener goes on after")
            if (now := time.monotonic()) >= swept_s + SWEEP_S:
                swept_s = now
                try:
                    for connection in [c for c in self._idle if c.deadline_s < now]:
                        self._drop(connection)
                    self._drop_early(now)
                except Exception:
                    log.exception("the tcp listener goes on after")
        self._selector.close()
        self._listener.close()
        early = [connection for connection, _ in self._early.values()]
        close_all(connection.sock for connection in [*self._idle, *self._served, *early])

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as exc:  # no descriptors: the listener stays readable, so do not spin
            log.warning("cannot accept a tcp reader: %s", exc)
            if not self._drop_longest_idle():
                time.sleep(SWEEP_S)
            return
        full = len(self._idle) + len(self._early) + len(self._serving) >= self._connections_max
        if full and not (self._drop_longest_idle() or self._drop_early()):
            sock.close()
            return
        tune(sock)
        set_timeouts(sock, receive_s=REQUEST_S, send_s=STALLED_S)
        self._await_request(_Connection(sock))

    def _await_request(self, connection: _Connection) -> None:
        connection.deadline_s = time.monotonic() + (REQUEST_S if connection.inbox else IDLE_S)
        try:
            self._selector.register(connection.sock, selectors.EVENT_READ, partial(self._read, connection))
        except OSError as exc:  # the kernel's memory or its limit on watches
            log.warning("cannot watch a tcp reader: %s", exc)
            return reset(connection.sock)
        self._idle[connection] = None

    def _take_back(self) -> None:
        os.eventfd_read(self._wake)
        while self._served and not self._closing:
            self._await_request(self._served.popleft())

    def _read(self, connection: _Connection) -> None:
        if connection not in self._idle:
            return  # dropped since `select` returned
        try:
            request = connection.receive()
        except OSError:
            return self._drop(connection)
        if request is None:
            connection.deadline_s = min(connection.deadline_s, time.monotonic() + REQUEST_S)
            return
        self._forget(connection)
        if request.early:
            return self._park(connection, request)
        with self._lock:
            self._hand_over(connection, request)

    def _park(self, connection: _Connection, request: _Request) -> None:
        """Until the ticket is issued, or has been. From any thread."""
        connection.deadline_s = time.monotonic() + EARLY_S
        with self._lock:
            if self._closing or request.token in self._early:  # two with one token: not by our readers
                connection.sock.close()
                return
            self._early[request.token] = connection, request
        if self._tickets.begin(request.token) is not None:
            self._tickets.end(request.token)
            self.look_again(request.token)

    def _hand_over(self, connection: _Connection, request: _Request) -> None:
        """To a worker. Under the lock."""
        self._serving.add(connection)
        try:
            self._workers.submit(partial(self._serve, connection, request))
        except RuntimeError as exc:
            log.warning("cannot serve a tcp reader: %s", exc)
            self._serving.discard(connection)
            reset(connection.sock)

    def _drop_early(self, before_s: float = float("inf")) -> bool:
        """Hang up on those whose time is up by then: all, or without a time the one that waits longest."""
        with self._lock:
            late = [token for token, (c, _) in self._early.items() if c.deadline_s < before_s]
            dropped = [self._early.pop(token) for token in (late if before_s < float("inf") else late[:1])]
        close_all(connection.sock for connection, _ in dropped)
        return bool(dropped)

    def _drop_longest_idle(self) -> bool:
        if not self._idle:
            return False
        self._drop(next(iter(self._idle)))
        return True

    def _drop(self, connection: _Connection) -> None:
        self._forget(connection)
        connection.sock.close()

    def _forget(self, connection: _Connection) -> None:
        del self._idle[connection]
        self._selector.unregister(connection.sock)

    # On a worker's thread.

    def _serve(self, connection: _Connection, request: _Request) -> None:
        """One answer. Who has asked again queues up again, so that nobody keeps a worker to himself."""
        clean, following, hang_up = False, None, reset
        try:
            if not self._closing:
                if self._answer(connection.sock, request):
                    following = connection.receive()  # a stream asks ahead, so it is often here
                    clean = True
                else:
                    hang_up = socket.socket.close  # which lets the refusal arrive
        except OSError as exc:
            log.debug("a tcp reader went away: %s", exc)
        except Exception:
            log.exception("serving a tcp reader failed on our side")
        with self._lock:
            clean = clean and not self._closing
            if clean and following is not None and not following.early:
                self._workers.submit(partial(self._serve, connection, following))
                return
            self._serving.discard(connection)
            if clean and following is None:
                self._served.append(connection)
                os.eventfd_write(self._wake, 1)
                return
        if clean and following is not None:
            self._park(connection, following)
        else:
            hang_up(connection.sock)

    def _answer(self, sock: socket.socket, request: _Request) -> bool:
        """False: refused. No reader of ours asks on after that, so the connection ends with it."""
        body = self._tickets.begin(request.token)
        if body is None:
            sock.sendall(ANSWER.pack(MAGIC, VERSION, GONE, 0), socket.MSG_NOSIGNAL)
            return False
        try:
            if body.nbytes == request.nbytes and request.start + request.count <= body.nbytes:
                _send(sock, body, request.start, request.start + request.count, self._bytes_per_s_min)
                return True
            sock.sendall(ANSWER.pack(MAGIC, VERSION, BAD_RANGE, body.nbytes), socket.MSG_NOSIGNAL)
            return False
        finally:
            del body  # before `end`: whoever waits for it may want to unmap the slab
            self._tickets.end(request.token)


def _send(sock: socket.socket, body: memoryview, start: int, stop: int, bytes_per_s_min: int) -> None:
    """Raises OSError when the reader has gone, or BlockingIOError when it took nothing for STALLED_S.

    One that takes some now and then holds a worker and a lease as well, so over time it has to be faster than
    `bytes_per_s_min`, where that is not 0: TimeoutError.
    """
    began_s, first = time.monotonic(), start
    header = ANSWER.pack(MAGIC, VERSION, OK, body.nbytes)
    with body[start : min(start + PIECE_BYTES, stop)] as piece:
        sent = sock.sendmsg([header, piece], [], socket.MSG_NOSIGNAL) - len(header)
    if sent < 0:
        raise BlockingIOError("the reader does not even take a header")
    start += sent
    while start < stop:
        with body[start : min(start + PIECE_BYTES, stop)] as piece:
            start += sock.send(piece, socket.MSG_NOSIGNAL)
        if (time.monotonic() - began_s - STALLED_S) * bytes_per_s_min > start - first:
            raise TimeoutError(f"the reader has taken {start - first:,} bytes of {stop - first:,} by now")
