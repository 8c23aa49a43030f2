"""Plain sockets: the transport that works wherever IP does.

Bytes go from the holder's slab into a socket and from a socket into the reader's slab. Python
never copies them, and the GIL is released while the kernel does.

Wire format, big-endian; requests are answered in order, and the connection is then used again:

    request  4s magic "P2PK" | B version | B early | 2x | 16s token | Q body bytes | Q start | Q count
    answer   4s magic "P2PK" | B version | B status | 2x | Q body bytes
             then, where the status is OK, `count` bytes of the body from `start` on

A request that is early (1) may be here before its ticket: the reader chose the token, and asks for the ticket
by another way meanwhile. The answer then comes as soon as the ticket is issued. Where none is in time, the
connection ends.

The address is `host:port`, or `[host]:port` for IPv6; the host is a literal, so that no pull waits
for a name service.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from p2pcache.core.membership import Member
from p2pcache.io._pulls import PeerKey, Workers, join, parse_address
from p2pcache.io._tcp_holder import Holder
from p2pcache.io._tcp_pull import SPAN_BYTES, Span, TcpPull
from p2pcache.io._tcp_sockets import ANSWER, EARLY, SILENT_S, ask, close_all, listen, readable, reader_socket
from p2pcache.io.ports import Ticket, Tickets, TransportError

CONNECT_S = 1.5
AT_ONCE_BYTES = 512 << 10  # of a body that the loop itself may receive: a tenth of a millisecond
IDLE_S = 30.0  # a pooled connection is not used after so long: the holder closes it after 60 s


class TcpTransport:
    """Pulls over TCP, and serves them.

    streams_max: connections that carry parts of one large body at once.
    threads_max: streams received at once, and as many sent at once; more wait their turn.
    connections_max: readers' connections held open; a new one takes the place of the one that
    has been idle longest, so strangers cannot lock the mesh out.
    bytes_per_s_min: a reader that takes an answer slower than that is dropped, after a while; 0: none is.
    """

    name = "tcp"

    def __init__(
        self,
        host: str,
        port: int = 0,
        streams_max: int = 1,
        threads_max: int = 16,
        connections_max: int = 512,
        bytes_per_s_min: int = 0,
    ) -> None:
        self._host, self._port = host, port
        self._streams_max = streams_max
        self._connections_max = connections_max
        self._threads_max = threads_max
        self._bytes_per_s_min = bytes_per_s_min
        self._holder: Holder | None = None
        self._readers = Workers("p2pcache-tcp-pull", threads_max)
        self._pool = _Pool(per_peer_max=threads_max)
        self._pulls: set[TcpPull] = set()
        self._early: dict[bytes, socket.socket] = {}  # asked already, by token
        self._closed = False

    async def start(self, tickets: Tickets) -> str:
        listener = listen(self._host, self._port)
        self._holder = Holder(
            listener, tickets, self._threads_max, self._connections_max, self._bytes_per_s_min
        )
        tickets.watchers.append(self._holder.look_again)
        host, port = listener.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def reaches(self, peer: Member) -> bool:
        return parse_address(peer.transports.get(self.name, "")) is not None

    def pull(
        self, peer: Member, ticket: Ticket, dest: memoryview, progress: Callable[[int], None]
    ) -> TcpPull:
        """See `ports.Transport`. `dest` is held until `settled`."""
        pull = TcpPull(peer.name, ticket, dest, progress, self._streams_max)
        advertised = peer.transports.get(self.name, "")
        address = parse_address(advertised)
        if self._closed or address is None:
            why = "the transport is closed" if self._closed else f"no tcp address: {advertised!r}"
            pull.finish(TransportError(f"{peer.name}: {why}"))
            return pull
        self._pulls.add(pull)
        pull.settled.add_done_callback(lambda _: self._pulls.discard(pull))
        pull.early = self._early.pop(ticket.token, None)
        key = (peer.name, peer.incarnation, address)
        if self._is_here(pull):
            pull.work(partial(self._take_early, pull, key))
            return pull
        pull.run_on(self._readers, partial(pull.work, partial(self._run, pull, key)), pull.streams)
        return pull

    def ask_early(self, peer: Member, nbytes: int) -> bytes | None:
        """See `ports.Transport`. Only where a connection is at hand, and a thread to receive at once."""
        address = parse_address(peer.transports.get(self.name, ""))
        busy = len(self._pulls) + len(self._early) >= self._threads_max
        several = self._streams_max > 1 and nbytes >= 2 * SPAN_BYTES  # the spans follow from the layers
        if self._closed or address is None or busy or several:
            return None
        sock = self._pool.take((peer.name, peer.incarnation, address))
        if sock is None:
            return None
        token = secrets.token_bytes(16)
        try:
            ask(sock, token, nbytes, 0, nbytes, EARLY)
        except OSError:
            sock.close()
            return None
        self._early[token] = sock
        return token

    def forget_early(self, token: bytes) -> None:
        sock = self._early.pop(token, None)
        if sock is not None:
            sock.close()

    def description(self) -> dict[str, Any]:
        return {}

    async def close(self) -> None:
        self._closed = True
        for token in list(self._early):
            self.forget_early(token)
        for pull in list(self._pulls):
            pull.abandon()
        await join(self._readers.stop())
        self._pool.close()
        holder, self._holder = self._holder, None
        if holder is not None:
            await holder.close()

    def _is_here(self, pull: TcpPull) -> bool:
        """Whether all of a small body waits in its socket: a thread would cost more than copy and check."""
        early, nbytes = pull.early, pull.ticket.nbytes
        return early is not None and nbytes <= AT_ONCE_BYTES and readable(early) >= ANSWER.size + nbytes

    def _take_early(self, pull: TcpPull, key: PeerKey) -> None:
        """On the loop, without a wait. Raises RemoteError, CorruptBody, OSError."""
        taken: list[Span] = []
        early = pull.take_early(taken)
        assert early is not None
        self._exchange(pull, key, early, taken, asked=True)

    def _run(self, pull: TcpPull, key: PeerKey) -> None:
        """One stream of a pull, on a reader thread. Raises RemoteError, CorruptBody, OSError."""
        try:
            self._stream(pull, key)
        except BlockingIOError:  # how the kernel says that a socket's timeout has passed
            raise TransportError(f"{pull.peer}: silent for {SILENT_S:.0f} s") from None

    def _stream(self, pull: TcpPull, key: PeerKey) -> None:
        taken: list[Span] = []
        early = pull.take_early(taken)
        pooled = early or self._pool.take(key)
        if pooled is not None:
            try:
                return self._exchange(pull, key, pooled, taken, asked=early is not None)
            except ConnectionError:
                if not taken or taken[0].begun:
                    raise
                # The holder closed it or restarted before it answered: a fresh one tells.
        sock = reader_socket(key[2])
        try:
            with pull.using(sock):
                sock.settimeout(CONNECT_S)
                sock.connect(key[2])
                sock.settimeout(None)
        except BaseException:
            sock.close()
            raise
        self._exchange(pull, key, sock, taken)

    def _exchange(
        self, pull: TcpPull, key: PeerKey, sock: socket.socket, taken: list[Span], asked: bool = False
    ) -> None:
        """Owns `sock`: it goes (back) to the pool in a known state, or is closed."""
        clean = False
        try:
            with pull.using(sock):
                pull.fetch(sock, taken, asked)
                clean = True
        finally:
            if clean and not self._closed:
                self._pool.give(key, sock)
            else:
                sock.close()


class _Pool:
    """Idle connections to holders, by peer incarnation; used from the reader threads."""

    def __init__(self, per_peer_max: int) -> None:
        self._per_peer_max = per_peer_max
        self._lock = threading.Lock()
        self._idle: dict[PeerKey, list[tuple[socket.socket, float]]] = {}

    def take(self, key: PeerKey) -> socket.socket | None:
        """The connection used last, if it still seems open. The caller owns it."""
        while True:
            with self._lock:
                stale = self._expired()
                idle = self._idle.get(key)
                sock = idle.pop()[0] if idle else None
            close_all(stale)
            if sock is None or _is_quiet(sock):
                return sock
            sock.close()

    def give(self, key: PeerKey, sock: socket.socket) -> None:
        with self._lock:
            stale = self._expired()
            idle = self._idle.setdefault(key, [])
            idle.append((sock, time.monotonic()))
            if len(idle) > self._per_peer_max:
                stale.append(idle.pop(0)[0])
        close_all(stale)

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, {}
        close_all(sock for kept in idle.values() for sock, _ in kept)

    def _expired(self) -> list[socket.socket]:
        oldest, stale = time.monotonic() - IDLE_S, []
        for key, idle in list(self._idle.items()):
            while idle and idle[0][1] < oldest:
                stale.append(idle.pop(0)[0])
            if not idle:
                del self._idle[key]
        return stale


def _is_quiet(sock: socket.socket) -> bool:
    """Whether an idle connection is open and has nothing to say, as it should."""
    try:
        sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False
