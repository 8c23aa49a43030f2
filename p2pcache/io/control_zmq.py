"""Control plane: msgpack messages over zmq, one ROUTER to be asked on and one DEALER a peer to ask.

A DEALER belongs to one incarnation of a peer; messages to one that has gone are dropped with it.
Linger is 0 and queues are bounded: a message that cannot go out is a deadline missed, never a
process that cannot end.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import zmq
import zmq.asyncio

from p2pcache.core import wire
from p2pcache.core.membership import Member
from p2pcache.io.ports import Handler
from p2pcache.types import (
    ConfigError,
    DeadlineExceeded,
    Fenced,
    P2PCacheError,
    RemoteError,
    VersionMismatch,
)

_log = logging.getLogger(__name__)
_QUEUE_MAX = 4096
_HANDLERS_MAX = 1024
_ERRORS: dict[str, type[RemoteError]] = {
    "version": VersionMismatch,
    "deadline": DeadlineExceeded,
    "fenced": Fenced,
}


class ZmqControl:
    """Implements the `Control` port. Lives on one event loop."""

    def __init__(self, host: str, port: int, identity: Callable[[], tuple[str, int, bytes]]):
        """identity: returns this node's (name, incarnation, view_id), stamped on every message."""
        self._host, self._port = host, port
        self._identity = identity
        self._context = zmq.asyncio.Context()
        self._router: zmq.asyncio.Socket | None = None
        self._dealers: dict[str, tuple[int, str, zmq.asyncio.Socket, asyncio.Task]] = {}
        self._waiting: dict[int, asyncio.Future[wire.Message]] = {}
        self._ids = itertools.count(1)
        self._tasks: set[asyncio.Task] = set()
        self._handlers = 0
        self.address = ""

    async def start(self, handler: Handler) -> None:
        self._handler = handler
        router = self._context.socket(zmq.ROUTER)
        _bound(router)
        shown = f"[{self._host}]" if ":" in self._host else self._host
        router.setsockopt(zmq.IPV6, ":" in self._host)
        try:
            if self._port:
                router.bind(f"tcp://{shown}:{self._port}")
                port = self._port
            else:
                port = router.bind_to_random_port(f"tcp://{shown}")
        except zmq.ZMQError as error:
            router.close(0)
            raise ConfigError(f"control socket cannot bind {shown}:{self._port}: {error.strerror}") from None
        self._router = router
        self.address = f"{shown}:{port}"
        self._spawn(self._serve(router))

    async def request(
        self, peer: Member, op: str, body: Mapping[str, Any], deadline_s: float
    ) -> Mapping[str, Any]:
        loop = asyncio.get_running_loop()
        id_ = next(self._ids)
        reply: asyncio.Future[wire.Message] = loop.create_future()
        self._waiting[id_] = reply
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._dealer(peer).send(self._encode("q", id_, op, body, to=peer.incarnation))
                answer = await reply
        except TimeoutError:
            raise DeadlineExceeded(f"{peer.name} did not answer {op} in time") from None
        except zmq.ZMQError as error:
            raise RemoteError(f"{peer.name} cannot be asked at {peer.control!r}: {error.strerror}") from None
        finally:
            del self._waiting[id_]
        if answer.kind == "e":
            error = _ERRORS.get(answer.body["code"], RemoteError)
            raise error(f"{peer.name}: {answer.body['text']}")
        if peer.incarnation and answer.sender_incarnation != peer.incarnation:
            raise RemoteError(f"{peer.name} answered as another incarnation")
        if answer.kind != "r" or answer.op != op:
            raise wire.WireError(f"{peer.name} answered {op} with something else")
        return answer.body

    async def close(self) -> None:
        for name in list(self._dealers):
            self._drop(name)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._router is not None:
            self._router.close(0)
        self._context.term()

    # -- asking ----------------------------------------------------------------------------------

    def _dealer(self, peer: Member) -> zmq.asyncio.Socket:
        known = self._dealers.get(peer.name)
        if known is not None and known[:2] == (peer.incarnation, peer.control):
            return known[2]
        if known is not None:
            self._drop(peer.name)
        dealer = self._context.socket(zmq.DEALER)
        _bound(dealer)
        dealer.setsockopt(zmq.IPV6, peer.control.startswith("["))
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        try:
            dealer.connect(f"tcp://{peer.control}")
        except zmq.ZMQError:
            dealer.close(0)
            raise
        task = self._spawn(self._collect(dealer))
        self._dealers[peer.name] = (peer.incarnation, peer.control, dealer, task)
        return dealer

    def _drop(self, name: str) -> None:
        _, _, dealer, task = self._dealers.pop(name)
        task.cancel()
        dealer.close(0)

    async def _collect(self, dealer: zmq.asyncio.Socket) -> None:
        """Hand replies to whoever waits for them; late ones find nobody and are dropped."""
        while True:
            raw = await dealer.recv()
            try:
                message = wire.decode(raw)
            except RemoteError as error:
                waiting = self._waiting.get(wire.peek_id(raw))
                if waiting is not None and not waiting.done():
                    waiting.set_exception(error)
                continue
            waiting = self._waiting.get(message.id)
            if waiting is not None and not waiting.done():
                waiting.set_result(message)

    # -- being asked -----------------------------------------------------------------------------

    async def _serve(self, router: zmq.asyncio.Socket) -> None:
        while True:
            frames = await router.recv_multipart()
            if len(frames) != 2:
                continue
            if self._handlers >= _HANDLERS_MAX:
                busy = self._error(wire.peek_id(frames[1]), "", "busy", "too many requests under way")
                await self._answer(router, frames[0], busy)
                continue
            self._handlers += 1
            self._spawn(self._handle(router, *frames))

    async def _handle(self, router: zmq.asyncio.Socket, who: bytes, raw: bytes) -> None:
        id_, op = 0, ""
        try:
            message = wire.decode(raw)
            id_, op = message.id, message.op
            if message.kind != "q":
                raise wire.WireError("only requests are answered here")
            _, incarnation, _ = self._identity()
            if message.to not in (0, incarnation):
                raise RemoteError("that incarnation is gone; another runs here")
            body = await self._handler(op, message.body, message.sender, message.sender_incarnation)
            answer = self._encode("r", id_, op, body)
        except VersionMismatch as error:
            answer = self._error(wire.peek_id(raw), op, "version", str(error))
        except DeadlineExceeded as error:
            answer = self._error(id_, op, "deadline", str(error))
        except Fenced as error:
            answer = self._error(id_, op, "fenced", str(error))
        except P2PCacheError as error:
            answer = self._error(id_ or wire.peek_id(raw), op, "refused", str(error))
        except asyncio.CancelledError:
            raise
        except Exception:
            _log.exception("op %s failed", op)
            answer = self._error(id_, op, "internal", "the peer met an error of its own")
        finally:
            self._handlers -= 1
        await self._answer(router, who, answer)

    async def _answer(self, router: zmq.asyncio.Socket, who: bytes, raw: bytes) -> None:
        try:
            await router.send_multipart([who, raw])
        except zmq.ZMQError:  # the asker has gone
            pass

    def _encode(self, kind: str, id_: int, op: str, body: Mapping[str, Any], to: int = 0) -> bytes:
        name, incarnation, view_id = self._identity()
        return wire.encode(wire.Message(kind, id_, op, body, to, name, incarnation, view_id))

    def _error(self, id_: int, op: str, code: str, text: str) -> bytes:
        return self._encode("e", id_, op, {"code": code, "text": text[:4096]})

    def _spawn(self, coroutine: Any) -> asyncio.Task:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _bound(socket: zmq.asyncio.Socket) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, _QUEUE_MAX)
    socket.setsockopt(zmq.RCVHWM, _QUEUE_MAX)
    socket.setsockopt(zmq.MAXMSGSIZE, wire.MESSAGE_BYTES_MAX)
