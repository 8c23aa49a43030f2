"""The reader's end of the tcp transport: one body over one stream or several.

A large body is cut into spans of whole layers. Each stream asks for the next span that nobody has taken, and
asks for one more before it receives, so that the holder never waits for a question. One TCP stream carries a
fraction of what a fast network card does; on loopback one is best.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from p2pcache.core.checksum import LayerCheck, layer_check
from p2pcache.io._pulls import ThreadPull, check_sound
from p2pcache.io._tcp_sockets import (
    ANSWER,
    BAD_RANGE,
    BAD_VERSION,
    GONE,
    MAGIC,
    OK,
    PIECE_BYTES,
    VERSION,
    ask,
)
from p2pcache.io.ports import Ticket, TicketGone, TransportError

SPAN_BYTES = 8 << 20  # about; a body of two of them is worth a second stream
ASKED_AHEAD = 2  # spans a stream has asked for, the one that it receives among them
PROGRESS_BYTES = 4 << 20  # each report wakes the loop, which costs this thread the GIL for a moment


@dataclass(slots=True)
class Span:
    """Bytes [start, stop) of a body: `layers` layers from `layer` on."""

    start: int
    stop: int
    layer: int
    layers: int
    begun: bool = False  # the holder has answered
    landed_bytes: int = 0  # here, right or not, once it is no longer received
    good_bytes: int = 0  # here and right
    check: LayerCheck | None = None  # while it is received


def cut(nbytes: int, layers: int, streams_max: int) -> list[Span]:
    """Spans of whole layers, in order. layers: 0 where none are known. At least one span."""
    count = min(nbytes // SPAN_BYTES, layers) if layers and streams_max > 1 else 1
    if count < 2:
        return [Span(0, nbytes, 0, layers)]
    layer_bytes, spans, first = nbytes // layers, [], 0
    for index in range(1, count + 1):
        last = layers * index // count
        spans.append(Span(first * layer_bytes, last * layer_bytes, first, last - first))
        first = last
    return spans


class TcpPull(ThreadPull):
    """Below `ThreadPull`: what its reader threads do, and how they are woken."""

    def __init__(
        self,
        peer: str,
        ticket: Ticket,
        dest: memoryview,
        progress: Callable[[int], None],
        streams_max: int,
    ) -> None:
        super().__init__(peer, ticket, dest, progress)
        self._spans = cut(ticket.nbytes, len(ticket.checksums), streams_max)
        self.streams = min(len(self._spans), streams_max)
        self._left = deque(self._spans)
        self._sockets: set[socket.socket] = set()
        self._whole = 0  # spans from the first on that have come
        self._telling = threading.Lock()
        self.early: socket.socket | None = None  # that all of the body has been asked for on already
        self.settled.add_done_callback(lambda _: self._hang_up_early())

    @property
    def landed_bytes(self) -> int:
        """Bytes that have come, right or not, also between two reports of progress."""
        return sum(s.landed_bytes if (check := s.check) is None else check.landed_bytes for s in self._spans)

    def take(self) -> Span | None:
        """The next span that no stream has; None where there is none left."""
        with self._lock:
            return self._left.popleft() if self._left and not self._stopped else None

    def take_early(self, taken: list[Span]) -> socket.socket | None:
        """The connection that the body has been asked for on, which the caller owns from now on."""
        with self._lock:
            self.check_wanted()
            early, self.early = self.early, None
            if early is not None:
                taken.append(self._left.popleft())
            return early

    def _hang_up_early(self) -> None:
        with self._lock:
            early, self.early = self.early, None
        if early is not None:
            early.close()

    @contextlib.contextmanager
    def using(self, sock: socket.socket) -> Iterator[None]:
        """While inside, `abandon` shuts this socket down."""
        with self._lock:
            self.check_wanted()
            self._sockets.add(sock)
        try:
            yield
        finally:
            with self._lock:  # no shutdown may reach a descriptor that has been closed and reused
                self._sockets.discard(sock)

    def fetch(self, sock: socket.socket, taken: list[Span], asked: bool = False) -> None:
        """Ask for spans and receive them until none is left. taken: those that are to come first.

        asked: those have been asked for on this connection. Raises TransportError, TicketGone, CorruptBody,
        OSError.
        """
        for index, span in enumerate(() if asked else taken):
            self._ask(sock, span, ahead=index > 0)
        while True:
            while len(taken) < ASKED_AHEAD and (span := self.take()) is not None:
                taken.append(span)
                self._ask(sock, span, ahead=len(taken) > 1)
            if not taken:
                return
            self._hear_answer(sock)
            self._receive(sock, taken[0])
            del taken[0]

    def _ask(self, sock: socket.socket, span: Span, ahead: bool) -> None:
        """ahead: another answer is to come first."""
        ticket, count = self.ticket, span.stop - span.start
        try:
            ask(sock, ticket.token, ticket.nbytes, span.start, count)
        except ConnectionError:
            if not ahead:
                raise
            # A holder that refuses hangs up, and the answer that it gave says why.

    def _hear_answer(self, sock: socket.socket) -> None:
        """Raises TransportError, TicketGone, or OSError where the connection ended."""
        raw = sock.recv(ANSWER.size, socket.MSG_WAITALL)
        if len(raw) < ANSWER.size:
            raise ConnectionResetError("connection closed before an answer")
        magic, version, status, nbytes = ANSWER.unpack(raw)
        if magic != MAGIC:
            raise TransportError(f"{self.peer} does not speak p2pcache's tcp protocol")
        if version != VERSION or status == BAD_VERSION:
            raise TransportError(f"{self.peer} speaks version {version} of the tcp protocol, not {VERSION}")
        if status == GONE:
            raise TicketGone(f"{self.peer} no longer honours the ticket")
        if status == BAD_RANGE:
            raise TransportError(f"{self.peer} holds {nbytes:,} bytes, not {self.ticket.nbytes:,}")
        if status != OK or nbytes != self.ticket.nbytes:
            raise TransportError(f"{self.peer} answered nonsense: status {status}, {nbytes:,} bytes")

    def _receive(self, sock: socket.socket, span: Span) -> None:
        assert self.dest is not None
        span.begun = True
        ticket, nbytes = self.ticket, span.stop - span.start
        sums = ticket.checksums[span.layer : span.layer + span.layers]
        body = self.dest[span.start : span.stop]
        check = span.check = layer_check(body, ticket.exact, sums, span.layer)
        try:
            for upto in range(min(PROGRESS_BYTES, nbytes), nbytes + PROGRESS_BYTES, PROGRESS_BYTES):
                self.check_wanted()
                if _receive_into(sock, body, check, min(upto, nbytes)):
                    raise ConnectionResetError(
                        f"connection closed after {check.landed_bytes:,} of {nbytes:,} bytes"
                    )
                check_sound(check, self.peer)
                self._tell(span, check.good_bytes)
        finally:
            span.landed_bytes = check.landed_bytes
            span.check = None  # it refers to the destination, which the pull lets go of as it settles

    def _tell(self, span: Span, good_bytes: int) -> None:
        with self._telling:
            span.good_bytes = good_bytes
            spans = self._spans
            while self._whole < len(spans) - 1 and _is_whole(spans[self._whole]):
                self._whole += 1
            first = spans[self._whole]
            good_bytes = first.start + first.good_bytes
            if good_bytes < self.ticket.nbytes:  # the end is told with `done`
                self.landed(good_bytes)

    def _is_left(self) -> bool:
        return bool(self._left)

    def _interrupt(self) -> None:
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # its thread wakes up at once


def _is_whole(span: Span) -> bool:
    return span.good_bytes == span.stop - span.start


def _receive_into(sock: socket.socket, body: memoryview, check: LayerCheck, upto: int) -> bool:
    """Receive up to byte `upto` of the span, checked on the way; whether the other side ended before."""
    if not isinstance(check, LayerCheck):
        return check.receive(sock.fileno(), upto)
    while check.landed_bytes < upto:
        with body[check.landed_bytes : min(upto, check.landed_bytes + PIECE_BYTES)] as piece:
            count = sock.recv_into(piece, 0, socket.MSG_WAITALL)
        if not count:
            return True
        check.advance(check.landed_bytes + count)
    return False
