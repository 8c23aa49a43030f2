"""The reader's end of the ucx transport: a pull as its caller sees it, and as it arrives."""

from __future__ import annotations

import logging
import secrets
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from p2pcache.core.checksum import CorruptBody, layer_check
from p2pcache.io._pulls import LoopPull, PeerKey, Workers, check_sound
from p2pcache.io._ucp import Request
from p2pcache.io._ucx_engine import Engine, Link
from p2pcache.io.ports import Ticket, TicketGone, TransportError

log = logging.getLogger(__name__)

MAGIC = b"P2PK"
VERSION = 2
REQUEST = struct.Struct(">4sB3x16sQQ")
ANSWER = struct.Struct(">4sBB2xQ")
OK, GONE, BAD_LENGTH = range(3)

PIECE_BYTES = 4 << 20  # one message of a body, and the step of progress
PIECES_POSTED = 4  # receives posted at once; enough to keep the fabric busy
READER_IDLE_S = 30.0
CHECKED_AT_ONCE_BYTES = 1 << 20  # by the engine itself: a thread would cost more than the check


class UcxPull(LoopPull):
    """Below `LoopPull`: how to reach the engine, and the checking of what it brings.

    The engine's thread moves the bytes of all pulls, so long bodies are checked on another.
    """

    stop: Callable[[], object]  # tells the engine to give up; set before the pull is handed out

    def __init__(
        self,
        peer: str,
        ticket: Ticket,
        dest: memoryview,
        progress: Callable[[int], None],
        checkers: Workers,
    ) -> None:
        super().__init__(peer, ticket, dest, progress)
        self._checkers = checkers
        self._check: Any = layer_check(dest, ticket.exact, ticket.checksums)
        self._lock = threading.Lock()  # guards the three below
        self._arrived_bytes = 0
        self._checking = False
        self._ended: tuple[Exception | None] | None = None

    @property
    def landed_bytes(self) -> int:
        """Bytes that have come, right or not, also between two reports of progress."""
        return self._arrived_bytes

    def _stop(self) -> None:
        self.stop()

    # On the engine's thread.

    def arrived(self, nbytes: int) -> None:
        """The first `nbytes` are in the destination, right or not."""
        with self._lock:
            self._arrived_bytes = nbytes
            if self._checking:
                return
            self._checking = True
        if self.ticket.nbytes > CHECKED_AT_ONCE_BYTES:
            try:
                return self._checkers.submit(self._check_arrived)
            except RuntimeError as exc:
                log.warning("the engine checks what arrives itself: %s", exc)
        self._check_arrived()

    def finish(self, error: Exception | None) -> None:
        with self._lock:
            self._ended = (error,)
            if self._checking:
                return  # the checker still reads the destination, and finishes when it is done
        self._finish_checked(error)

    # On a checker's, or the engine's.

    def _check_arrived(self) -> None:
        while True:
            with self._lock:
                arrived_bytes, ended = self._arrived_bytes, self._ended
                if arrived_bytes == self._check.landed_bytes:
                    self._checking = False
                    break
            # Piece by piece, also where many have come meanwhile: what is right is told of as soon as can be.
            self._check.advance(min(arrived_bytes, self._check.landed_bytes + PIECE_BYTES))
            if self._check.good_bytes < self.ticket.nbytes:  # the end is told with `done`
                self.landed(self._check.good_bytes)
        if ended is not None:
            self._finish_checked(*ended)

    def _finish_checked(self, error: Exception | None) -> None:
        try:
            check_sound(self._check, self.peer)
        except CorruptBody as corrupt:
            error = error or corrupt
        self._check = None  # and with it the hold on the destination
        super().finish(error)


class IdleLinks:
    """An activity that keeps links to holders, by peer incarnation, for the next pull."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._idle: dict[PeerKey, list[Link]] = {}
        self._stopped = False

    def take(self, key: PeerKey) -> Link | None:
        idle = self._idle.get(key, [])
        while idle:
            link = idle.pop()
            if link.alive:
                return link
            self._engine.discard(link)
        return None

    def give(self, key: PeerKey, link: Link) -> None:
        if self._stopped:
            self._engine.discard(link)
        else:
            link.idle_since_s = time.monotonic()
            self._idle.setdefault(key, []).append(link)

    def step(self, now_s: float) -> bool:
        for key, idle in list(self._idle.items()):
            while idle and idle[0].idle_since_s < now_s - READER_IDLE_S:
                self._engine.discard(idle.pop(0))
            if not idle:
                del self._idle[key]
        return not self._stopped

    def stop(self, error: Exception) -> None:
        self._stopped = True
        for idle in self._idle.values():
            for link in idle:
                self._engine.discard(link)
        self._idle.clear()


class Arrival:
    """An activity: one pull, from the request until nothing can write to its destination."""

    def __init__(self, engine: Engine, idle: IdleLinks, pull: UcxPull, key: PeerKey) -> None:
        self._engine, self._idle, self._pull, self._key = engine, idle, pull, key
        self._dest: memoryview | None = pull.dest
        self._nbytes = pull.ticket.nbytes
        self._tag = 0
        self._link: Link | None = None
        self._pooled = False
        self._answer = bytearray(ANSWER.size)
        self._answered: Request | None = None
        self._pieces: deque[tuple[Request, int]] = deque()  # receives under way, and where each ends
        self._posted_bytes = self._landed_bytes = 0
        self._redialling = self._stopping = self._over = False

    def begin(self) -> None:
        if self._over:
            return  # abandoned before the engine came to it
        self._engine.add(self)
        if self._engine.closing:
            return self.stop(self._engine.error or TransportError("the transport is closed"))
        self._guarded(self._ask)

    def step(self, now_s: float) -> bool:
        if not (self._stopping or self._over):
            self._guarded(self._advance)
        if self._stopping and not self._over and self._is_quiet():
            self._let_go()
            self._pull.finish(None)  # `done` has its error already
        return not self._over

    def stop(self, error: Exception) -> None:
        if self._over or self._stopping:
            return
        self._stopping = True
        self._pull.fail(error if isinstance(error, TransportError) else self._blame(error))
        if self._link is None:
            self._let_go()
            self._pull.finish(None)
        else:
            self._engine.force_close(self._link)

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except (TransportError, ConnectionError) as exc:
            self.stop(exc)
        except Exception as exc:
            log.exception("a pull over ucx failed on our side")
            self.stop(exc)

    def _is_quiet(self) -> bool:
        return self._link is None or self._engine.is_quiet(self._link)

    def _blame(self, error: Exception) -> TransportError:
        return TransportError(f"{self._pull.peer}: {error}")

    def _ask(self) -> None:
        """What may come is awaited before it is asked for: it then needs no copy, and no second wait."""
        engine, ticket = self._engine, self._pull.ticket
        self._link = None  # a former one is quiet
        link = self._idle.take(self._key)
        self._pooled, self._redialling = link is not None, False
        self._link = link = link or engine.connect(*self._key[2])
        self._tag = _random_tag()
        self._answered = engine.receive(link, self._answer, self._tag)
        self._pieces.clear()
        self._posted_bytes = 0
        self._post_pieces()
        engine.send_stream(link, REQUEST.pack(MAGIC, VERSION, ticket.token, ticket.nbytes, self._tag))

    def _advance(self) -> None:
        assert self._link is not None
        if self._redialling:
            if self._is_quiet():
                self._ask()
            return
        alive = self._link.alive  # before the look at the requests, so that none is overlooked
        try:
            self._take_pieces()
            if self._landed_bytes == self._nbytes and self._nbytes:
                self._answered.cancel()  # no answer comes where a body does
                if self._is_quiet():
                    return self._conclude(None)
            elif self._answered.completed:
                return self._hear_answer()
            if not alive:
                raise ConnectionResetError(f"{self._link.failure} after {self._landed_bytes:,} bytes")
        except ConnectionError:
            if not self._pooled or self._landed_bytes:
                raise
            # The holder closed it or restarted before it was asked: a fresh one tells.
            self._redialling = True
            self._engine.force_close(self._link)

    def _hear_answer(self) -> None:
        """No body comes, or an empty one. Raises TransportError, UcpError."""
        self._answered.check_error()
        magic, version, status, nbytes = ANSWER.unpack(self._answer)
        if magic != MAGIC or version != VERSION:
            raise TransportError(f"{self._pull.peer} does not speak version {VERSION} of the protocol")
        if status == BAD_LENGTH:
            raise TransportError(f"{self._pull.peer} holds {nbytes:,} bytes, not {self._nbytes:,}")
        if status not in (OK, GONE) or nbytes or (status == OK and self._nbytes):
            raise TransportError(f"{self._pull.peer} answered nonsense: status {status}")
        for request, _ in self._pieces:
            request.cancel()
        self._pieces.clear()
        self._posted_bytes = self._nbytes
        if self._is_quiet():  # or the request itself is still being sent
            gone = TicketGone(f"{self._pull.peer} no longer honours the ticket")
            self._conclude(gone if status == GONE else None)

    def _take_pieces(self) -> None:
        landed_bytes = self._landed_bytes
        while self._pieces and self._pieces[0][0].completed:
            request, stop = self._pieces[0]
            request.check_error()
            self._landed_bytes = stop
            self._pieces.popleft()
        if self._landed_bytes > landed_bytes:
            self._pull.arrived(self._landed_bytes)
        self._post_pieces()

    def _post_pieces(self) -> None:
        while len(self._pieces) < PIECES_POSTED and self._posted_bytes < self._nbytes:
            start, stop = self._posted_bytes, min(self._posted_bytes + PIECE_BYTES, self._nbytes)
            tag = self._tag + 1 + start // PIECE_BYTES
            request = self._engine.receive(self._link, self._dest[start:stop], tag)
            self._pieces.append((request, stop))
            self._posted_bytes = stop

    def _conclude(self, error: Exception | None) -> None:
        self._idle.give(self._key, self._link)
        self._let_go()
        self._pull.finish(error)

    def _let_go(self) -> None:
        self._over = True
        self._link = self._dest = self._answered = None
        self._pieces.clear()


def _random_tag() -> int:
    """Tags are the worker's, not the endpoint's: nobody else must guess one. Room for 2**20 pieces."""
    return secrets.randbits(44) << 20
