"""The holder's end of the ucx transport: readers' connections, and bodies on their way out."""

from __future__ import annotations

import logging
import time
from collections import deque

from p2pcache.io._ucp import Request, UcpError
from p2pcache.io._ucx_engine import Engine, Link
from p2pcache.io._ucx_pulls import (
    ANSWER,
    BAD_LENGTH,
    GONE,
    MAGIC,
    OK,
    PIECE_BYTES,
    REQUEST,
    VERSION,
)
from p2pcache.io.ports import Tickets

log = logging.getLogger(__name__)

STALLED_S = 10.0  # a reader that took no piece for so long is dropped, and its lease ends
HOLDER_IDLE_S = 60.0  # a connection without a request is closed after so long


class Reception:
    """Accepts readers, up to a number; a new one takes the place of the one idle longest."""

    def __init__(self, engine: Engine, tickets: Tickets, connections_max: int) -> None:
        self._engine, self._tickets = engine, tickets
        self._connections_max = connections_max
        self._readers: list[Reader] = []

    def accept(self, connection: int) -> None:
        engine = self._engine
        if engine.closing:
            return engine.reject(connection)
        try:
            link = engine.accept(connection)
        except UcpError as exc:
            log.debug("a ucx reader went away at once: %s", exc)
            return
        self._readers = [reader for reader in self._readers if not reader.over]
        if len(self._readers) >= self._connections_max:
            idle = [reader for reader in self._readers if not reader.sending]
            if not idle:
                return engine.discard(link)
            min(idle, key=lambda reader: reader.moved_s).drop(ConnectionAbortedError("too many"))
        reader = Reader(engine, self._tickets, link)
        self._readers.append(reader)
        engine.add(reader)


class Reader:
    """An activity: one reader's connection. Every `begin` gets its `end` when no send reads the slab."""

    def __init__(self, engine: Engine, tickets: Tickets, link: Link) -> None:
        self._engine, self._tickets, self._link = engine, tickets, link
        self._sends: deque[Request] = deque()
        self._token: bytes | None = None  # of the body being sent
        self._message = bytearray(REQUEST.size)
        self._request = engine.receive_stream(link, self._message)
        self._closing: Exception | None = None
        self._stopping = False
        self.over = False
        self.moved_s = time.monotonic()

    @property
    def sending(self) -> bool:
        return bool(self._sends) or self._token is not None

    def step(self, now_s: float) -> bool:
        if not (self._stopping or self.over):
            try:
                self._advance(now_s)
                if self._closing is not None and not self._engine.listening:
                    raise self._closing
            except ConnectionError as exc:
                self.drop(exc)
            except Exception as exc:
                log.exception("serving a ucx reader failed on our side")
                self.drop(exc)
        if self._stopping and not self.over and self._engine.is_quiet(self._link):
            self.over = True
            self._end()
        return not self.over

    def stop(self, error: Exception) -> None:
        # Once nobody listens: a reader would connect again at once, and wait for an answer.
        self._closing = error

    def drop(self, error: Exception) -> None:
        if self._stopping or self.over:
            return
        log.debug("a ucx reader is dropped: %s", error)
        self._stopping = True
        self._engine.force_close(self._link)

    def _advance(self, now_s: float) -> None:
        alive = self._link.alive
        if self.sending:
            while self._sends and self._sends[0].completed:
                self._sends[0].check_error()
                self._sends.popleft()
                self.moved_s = now_s
            if not self._sends and self._engine.is_quiet(self._link):
                self._end()
                self._request = self._engine.receive_stream(self._link, self._message)
            elif self.moved_s < now_s - STALLED_S:
                raise ConnectionAbortedError("the reader has stalled")
        elif self._request.completed:
            self._request.check_error()
            self.moved_s = now_s
            self._serve()
        if self.moved_s < now_s - HOLDER_IDLE_S:
            raise ConnectionAbortedError("idle")
        if not alive:
            raise ConnectionResetError(f"the reader has gone: {self._link.failure}")

    def _serve(self) -> None:
        magic, version, token, nbytes, tag = REQUEST.unpack(self._message)
        if magic != MAGIC or version != VERSION:
            raise ConnectionAbortedError("the reader speaks another protocol, or version of it")
        body = self._tickets.begin(token)
        if body is None:
            return self._say(tag, GONE, 0)
        self._token = token
        if body.nbytes != nbytes:
            return self._say(tag, BAD_LENGTH, body.nbytes)
        if not nbytes:
            return self._say(tag, OK, 0)
        for number, start in enumerate(range(0, nbytes, PIECE_BYTES), 1):
            piece = body[start : start + PIECE_BYTES]
            self._sends.append(self._engine.send(self._link, piece, tag + number))

    def _say(self, tag: int, status: int, nbytes: int) -> None:
        answer = ANSWER.pack(MAGIC, VERSION, status, nbytes)
        self._sends.append(self._engine.send(self._link, answer, tag))

    def _end(self) -> None:
        token, self._token = self._token, None
        self._sends.clear()
        if token is not None:
            self._tickets.end(token)
