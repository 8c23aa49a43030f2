"""The holder's end of the ucx transport: readers' connections, and bodies on their way out."""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import Any

from p2pcache.io._ucx_engine import Engine, Link
from p2pcache.io._ucx_pulls import (
    ANSWER,
    BAD_LENGTH,
    GONE,
    HELLO,
    MAGIC,
    OK,
    PIECE_BYTES,
    REQUEST,
    VERSION,
)
from p2pcache.io.ports import Tickets

log = logging.getLogger(__name__)

STALLED_S = 10.0  # a reader that took no piece for so long is dropped, and its lease ends
LAST_SENDS_S = 0.02  # at close, for what is nearly through
HOLDER_IDLE_S = 60.0  # a connection without a request is closed after so long


class Reception:
    """Accepts readers, up to a number; a new one takes the place of the one idle longest."""

    def __init__(self, engine: Engine, tickets: Tickets, connections_max: int) -> None:
        self._engine, self._tickets = engine, tickets
        self._connections_max = connections_max
        self._readers: list[Reader] = []

    def accept(self, connection: int) -> None:
        engine = self._engine
        if engine.closing or engine.listener is None:
            return
        try:
            link = Link(engine.listener.create_endpoint_from_conn_request(connection, True))
        except engine.ucx.UCXError as exc:
            log.debug("a ucx reader went away at once: %s", exc)
            return
        self._readers = [reader for reader in self._readers if not reader.over]
        if len(self._readers) >= self._connections_max:
            idle = [reader for reader in self._readers if not reader.sending]
            if not idle:
                return engine.discard(link)
            min(idle, key=lambda reader: reader.moved_s).stop(ConnectionAbortedError("too many"))
        reader = Reader(engine, self._tickets, link)
        self._readers.append(reader)
        engine.add(reader)


class Reader:
    """An activity: one reader's connection. Every `begin` gets its `end` when no send reads the slab."""

    def __init__(self, engine: Engine, tickets: Tickets, link: Link) -> None:
        self._engine, self._tickets, self._link = engine, tickets, link
        self._sends: deque[Any] = deque()
        self._token: bytes | None = None  # of the body being sent
        self._hello = bytearray(HELLO.size)
        self._greeted: Any = engine.receive_hello(link, self._hello)  # until it has come
        self._message = bytearray(REQUEST.size)
        self._request: Any = None  # receives `_message`
        self._stop_at_s = float("inf")
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
                if self._engine.closing and (not self.sending or now_s > self._stop_at_s):
                    raise ConnectionAbortedError("the transport is closed")
            except (ConnectionError, self._engine.ucx.UCXError) as exc:
                self._force_close(exc)
            except Exception as exc:
                log.exception("serving a ucx reader failed on our side")
                self._force_close(exc)
        if self._stopping and not self.over and self._engine.is_quiet(self._link):
            self.over = True
            # An endpoint keeps its listener alive, and so the port.
            self._link = self._request = self._greeted = None
            self._end()
        return not self.over

    def stop(self, error: Exception) -> None:
        # Closing an endpoint with a send on it keeps its listener in UCXX, so the port, till exit.
        if self.sending:
            self._stop_at_s = min(self._stop_at_s, time.monotonic() + LAST_SENDS_S)
        else:
            self._force_close(error)

    def _force_close(self, error: Exception) -> None:
        if self._stopping or self.over:
            return
        log.debug("a ucx reader is dropped: %s", error)
        self._stopping = True
        self._engine.force_close(self._link)

    def _advance(self, now_s: float) -> None:
        alive = self._link.alive
        if self._greeted is not None:
            if self._greeted.completed:
                self._greeted.check_error()
                self._greeted = None
                self._be_greeted()
        elif self.sending:
            while self._sends and self._sends[0].completed:
                self._sends[0].check_error()
                self._sends.popleft()
                self.moved_s = now_s
            if not self._sends and self._engine.is_quiet(self._link):
                self._end()
                self._await_request()
            elif self.moved_s < now_s - STALLED_S:
                raise ConnectionAbortedError("the reader has stalled")
        elif self._request.completed:
            self._request.check_error()
            self.moved_s = now_s
            self._serve()
        if self.moved_s < now_s - HOLDER_IDLE_S:
            raise ConnectionAbortedError("idle")
        if not alive:
            raise ConnectionResetError("the reader has gone")

    def _be_greeted(self) -> None:
        magic, version, self._link.request_tag = HELLO.unpack(self._hello)
        if magic != MAGIC or version != VERSION:
            raise ConnectionAbortedError("the reader speaks another protocol, or version of it")
        self._await_request()

    def _await_request(self) -> None:
        self._request = self._engine.receive(self._link, self._message, self._link.request_tag)

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
        self._say(tag, OK, nbytes)
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
