"""Control plane: msgpack messages over zmq, one ROUTER to be asked on and one DEALER a peer to ask.

A DEALER belongs to one incarnation of a peer; messages to one that has gone are dropped with it.
Linger is 0 and queues are bounded: a message that cannot go out is a deadline missed, never a
process that cannot end.

The sockets are plain ones whose descriptors the loop watches, and a request is a future and not a task:
of a lookup that asks every owner at once, these turns of the loop are the larger part.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import zmq

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
_AT_ONCE_MAX = 64  # messages read from one socket before others have their turn
# As plain numbers: arithmetic on pyzmq's own is done by enum, and takes longer than the calls they are for.
_NOBLOCK, _MORE, _IN, _OUT = int(zmq.NOBLOCK), int(zmq.SNDMORE), int(zmq.POLLIN), int(zmq.POLLOUT)
_ERRORS: dict[str, type[RemoteError]] = {
    "version": VersionMismatch,
    "deadline": DeadlineExceeded,
    "fenced": Fenced,
}

Reply = asyncio.Future[Mapping[str, Any]]


class _Asked(NamedTuple):
    """A request that waits for its reply."""

    reply: Reply
    peer: Member
    op: str
    timer: asyncio.TimerHandle


class ZmqControl:
    """Implements the `Control` port. Lives on one event loop."""

    def __init__(self, host: str, port: int, identity: Callable[[], tuple[str, int, bytes]]):
        """identity: returns this node's (name, incarnation, view_id), stamped on every message."""
        self._host, self._port = host, port
        self._identity = identity
        self._context = zmq.Context()
        self._router: _Watched | None = None
        self._dealers: dict[str, tuple[int, str, _Watched]] = {}
        self._waiting: dict[int, _Asked] = {}
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
        self.address = f"{shown}:{port}"
        self._router = _Watched(router, lambda: self._on_request(router.recv_multipart(_NOBLOCK)))

    def ask(self, peer: Member, op: str, body: Mapping[str, Any], deadline_s: float) -> Reply:
        loop = asyncio.get_running_loop()
        reply: Reply = loop.create_future()
        id_ = next(self._ids)
        try:
            raw = self._encode("q", id_, op, body, to=peer.incarnation)
            dealer = self._dealer(peer)
        except zmq.ZMQError as error:
            why = f"{peer.name} cannot be asked at {peer.control!r}: {error.strerror}"
            reply.set_exception(RemoteError(why))
            return reply
        except RemoteError as error:
            reply.set_exception(error)
            return reply
        timer = loop.call_at(deadline_s, self._too_late, id_)
        self._waiting[id_] = _Asked(reply, peer, op, timer)
        dealer.send([raw], reply)
        return reply

    async def request(
        self, peer: Member, op: str, body: Mapping[str, Any], deadline_s: float
    ) -> Mapping[str, Any]:
        return await self.ask(peer, op, body, deadline_s)

    async def close(self) -> None:
        for _, _, dealer in self._dealers.values():
            dealer.close()
        self._dealers.clear()
        for asked in self._waiting.values():
            asked.timer.cancel()
            if not asked.reply.done():
                asked.reply.set_exception(RemoteError("this node's control plane has been closed"))
        self._waiting.clear()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._router is not None:
            self._router.close()
        self._context.term()

    # -- asking ----------------------------------------------------------------------------------

    def _dealer(self, peer: Member) -> _Watched:
        known = self._dealers.get(peer.name)
        if known is not None and known[:2] == (peer.incarnation, peer.control):
            return known[2]
        if known is not None:
            del self._dealers[peer.name]
            known[2].close()
        dealer = self._context.socket(zmq.DEALER)
        _bound(dealer)
        dealer.setsockopt(zmq.IPV6, peer.control.startswith("["))
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        try:
            dealer.connect(f"tcp://{peer.control}")
        except zmq.ZMQError:
            dealer.close(0)
            raise
        watched = _Watched(dealer, lambda: self._on_reply(dealer.recv(_NOBLOCK)))
        self._dealers[peer.name] = (peer.incarnation, peer.control, watched)
        return watched

    def _too_late(self, id_: int) -> None:
        asked = self._waiting.pop(id_)
        if not asked.reply.done():
            why = f"{asked.peer.name} did not answer {asked.op} in time"
            asked.reply.set_exception(DeadlineExceeded(why))

    def _on_reply(self, raw: bytes) -> None:
        """Hand a reply to whoever waits for it; a late one finds nobody and is dropped."""
        answer: wire.Message | RemoteError
        try:
            answer = wire.decode(raw)
            id_ = answer.id
        except RemoteError as error:
            answer, id_ = error, wire.peek_id(raw)
        asked = self._waiting.pop(id_, None)
        if asked is None:
            return
        asked.timer.cancel()
        if asked.reply.done():
            return
        outcome = answer if isinstance(answer, RemoteError) else _judge(asked, answer)
        if isinstance(outcome, RemoteError):
            asked.reply.set_exception(outcome)
        else:
            asked.reply.set_result(outcome)

    # -- being asked -----------------------------------------------------------------------------

    def _on_request(self, frames: list[bytes]) -> None:
        """Answer now where the handler does; a handler that waits is waited for in a task."""
        if len(frames) != 2:
            return
        who, raw = frames
        if self._handlers >= _HANDLERS_MAX:
            self._answer(who, self._error(wire.peek_id(raw), "", "busy", "too many requests under way"))
            return
        id_, op = 0, ""
        try:
            message = wire.decode(raw)
            id_, op = message.id, message.op
            if message.kind != "q":
                raise wire.WireError("only requests are answered here")
            _, incarnation, _ = self._identity()
            if message.to not in (0, incarnation):
                raise RemoteError("that incarnation is gone; another runs here")
            body = self._handler(op, message.body, message.sender, message.sender_incarnation)
            if inspect.isawaitable(body):
                self._handlers += 1
                task = asyncio.get_running_loop().create_task(self._wait_for(body, who, id_, op))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                return
            answer = self._encode("r", id_, op, body)
        except Exception as error:
            answer = self._refusal(error, id_ or wire.peek_id(raw), op)
        self._answer(who, answer)

    async def _wait_for(self, body: Awaitable[Mapping[str, Any]], who: bytes, id_: int, op: str) -> None:
        try:
            answer = self._encode("r", id_, op, await body)
        except Exception as error:
            answer = self._refusal(error, id_, op)
        finally:
            self._handlers -= 1
        self._answer(who, answer)

    def _answer(self, who: bytes, raw: bytes) -> None:
        if self._router is not None:
            self._router.send([who, raw])

    def _refusal(self, error: Exception, id_: int, op: str) -> bytes:
        match error:
            case VersionMismatch():
                code = "version"
            case DeadlineExceeded():
                code = "deadline"
            case Fenced():
                code = "fenced"
            case P2PCacheError():
                code = "refused"
            case _:
                _log.error("op %s failed", op, exc_info=error)
                return self._error(id_, op, "internal", "the peer met an error of its own")
        return self._error(id_, op, code, str(error))

    def _encode(self, kind: str, id_: int, op: str, body: Mapping[str, Any], to: int = 0) -> bytes:
        name, incarnation, view_id = self._identity()
        return wire.encode(wire.Message(kind, id_, op, body, to, name, incarnation, view_id))

    def _error(self, id_: int, op: str, code: str, text: str) -> bytes:
        return self._encode("e", id_, op, {"code": code, "text": text[:4096]})


def _judge(asked: _Asked, answer: wire.Message) -> Mapping[str, Any] | RemoteError:
    """What an answer is to whoever asked: its body, or whose fault it is that it has none."""
    peer = asked.peer
    if answer.kind == "e":
        error = _ERRORS.get(answer.body["code"], RemoteError)
        return error(f"{peer.name}: {answer.body['text']}")
    if peer.incarnation and answer.sender_incarnation != peer.incarnation:
        return RemoteError(f"{peer.name} answered as another incarnation")
    if answer.kind != "r" or answer.op != asked.op:
        return wire.WireError(f"{peer.name} answered {asked.op} with something else")
    return answer.body


class _Watched:
    """A zmq socket whose messages an event loop hands on.

    Its descriptor tells of a *change* only, and any call on the socket may use that up. So whoever is
    woken reads all there is, and after a send somebody looks again.
    """

    def __init__(self, socket: zmq.Socket, read: Callable[[], None]):
        """read: takes one message from the socket, which has one, and deals with it."""
        self._socket = socket
        self._read = read
        self._loop = asyncio.get_running_loop()
        self._unsent: deque[tuple[list[bytes], Reply | None]] = deque()  # the queue to the peer is full
        self._fd = socket.getsockopt(zmq.FD)
        self._again: asyncio.Handle | None = None
        self._loop.add_reader(self._fd, self._turn)

    def send(self, frames: list[bytes], wanted: Reply | None = None) -> None:
        """Send a message now, or when the queue has room again, unless `wanted` is done by then."""
        while self._unsent and (first := self._unsent[0][1]) is not None and first.done():
            self._unsent.popleft()  # so that what waits for a frozen peer is bounded by who waits for it
        if self._unsent or not self._try(frames):
            self._unsent.append((frames, wanted))
        self._look_again()

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        if self._again is not None:
            self._again.cancel()
        self._socket.close(0)

    def _try(self, frames: list[bytes]) -> bool:
        try:
            for frame in frames[:-1]:
                self._socket.send(frame, _NOBLOCK | _MORE)
            self._socket.send(frames[-1], _NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError:  # the other side has gone; whoever waits has a deadline
            pass
        return True

    def _look_again(self) -> None:
        if self._again is None:
            self._again = self._loop.call_soon(self._turn)

    def _looked(self) -> None:
        if self._again is not None:
            self._again.cancel()
            self._again = None

    def _turn(self) -> None:
        self._looked()
        for _ in range(_AT_ONCE_MAX):
            wanted = _IN | _OUT if self._unsent else _IN
            ready = zmq.zmq_poll([(self._socket, wanted)], 0)  # quicker than asking for zmq.EVENTS
            if not ready:
                self._looked()  # also for what was sent meanwhile
                return
            if ready[0][1] & _OUT:
                self._send_waiting()
            if ready[0][1] & _IN:
                self._read()
            if self._socket.closed:
                return
        self._look_again()

    def _send_waiting(self) -> None:
        while self._unsent:
            frames, wanted = self._unsent[0]
            if (wanted is None or not wanted.done()) and not self._try(frames):
                return
            self._unsent.popleft()


def _bound(socket: zmq.Socket) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, _QUEUE_MAX)
    socket.setsockopt(zmq.RCVHWM, _QUEUE_MAX)
    socket.setsockopt(zmq.MAXMSGSIZE, wire.MESSAGE_BYTES_MAX)
