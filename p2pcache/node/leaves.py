"""Asking holders for leave to pull bodies, and giving it back: many bodies a message.

No task waits for an answer: of a small pull these turns of the loop would be the larger part.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from p2pcache.core.membership import Member
from p2pcache.io.ports import NO_TOKEN, Control
from p2pcache.node.wireform import Leave, leave_from_wire
from p2pcache.types import BodyInfo, Miss, RemoteError

BATCH_MAX = 1024  # bodies; a holder refuses messages of too many
RETRY_MIN_S = 0.001  # whatever a holder says
_MISSES = {miss.value: miss for miss in Miss}


@dataclass(frozen=True, slots=True)
class Refusal:
    """A holder's no. retry_after_s: when to ask again, where that may help."""

    miss: Miss
    retry_after_s: float = 0.0


@dataclass(slots=True)
class _Batch:
    """Requests to one peer that gather during one turn of the loop and leave as one message."""

    peer: Member
    transport: str
    codecs: tuple[str, ...]
    bodies: list[bytes] = field(default_factory=list)
    tokens: list[bytes] = field(default_factory=list)
    waiting: list[asyncio.Future[Any]] = field(default_factory=list)
    deadline_s: float = 0.0  # the latest of those who wait

    def fail(self, error: RemoteError) -> None:
        for waiting in self.waiting:
            if not waiting.done():
                waiting.set_exception(error)


class Leaves:
    """A reader's leaves to pull. Belongs to the node's loop."""

    def __init__(self, control: Control, rpc_timeout_s: float):
        self._control = control
        self._rpc_timeout_s = rpc_timeout_s
        self._loop = asyncio.get_running_loop()
        self._gathering: dict[tuple[str, int, str], _Batch] = {}
        self._done_with: dict[tuple[str, int], list[bytes]] = {}
        self._asked: set[asyncio.Future[Mapping[str, Any]]] = set()

    async def ask(
        self,
        peer: Member,
        transport: str,
        body: BodyInfo,
        deadline_s: float,
        token: bytes = NO_TOKEN,
        codecs: tuple[str, ...] = (),
    ) -> Leave | Refusal:
        """A holder's leave to pull one body, or its refusal.

        token: that the ticket should have; the holder may choose another. codecs: those in which the body may
        come, apart from raw. Raises RemoteError, TimeoutError.
        """
        answer: asyncio.Future[list] = self._loop.create_future()
        batch = self._batch(peer, transport, codecs)
        batch.bodies.append(body.exact)
        batch.tokens.append(token)
        batch.waiting.append(answer)
        batch.deadline_s = max(batch.deadline_s, deadline_s)
        if codecs:  # each goes by itself: none waits until all others have been encoded
            self._send(batch)
        try:
            async with asyncio.timeout_at(deadline_s):
                status, lease = await answer
        except BaseException:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                status, lease = answer.result()  # it came in the very turn in which the time was up
                if status == "ok":
                    self.give_back(peer, lease[0])
            raise
        if status != "ok":
            miss = _MISSES.get(status, Miss.HOLDER_GONE)
            return Refusal(miss, max(lease or 0.0, RETRY_MIN_S) if miss is Miss.BUSY else 0.0)
        leave = leave_from_wire(lease, body, codecs)
        if leave is None:
            self.give_back(peer, lease[0])
            return Refusal(Miss.HOLDER_GONE)
        return leave

    def give_back(self, peer: Member, token: bytes) -> None:
        """Tell the holder, some time soon, that a ticket is no longer needed."""
        key = (peer.name, peer.incarnation)
        tokens = self._done_with.get(key)
        if tokens is None:
            tokens = self._done_with[key] = []
            self._loop.call_soon(self._send_back, peer, key)
        tokens.append(token)

    def close(self) -> None:
        """Whoever waits for an answer is told that none comes."""
        for reply in list(self._asked):
            reply.cancel()

    def _batch(self, peer: Member, transport: str, codecs: tuple[str, ...]) -> _Batch:
        if codecs:
            return _Batch(peer, transport, codecs)
        key = (peer.name, peer.incarnation, transport)
        batch = self._gathering.get(key)
        if batch is None:
            batch = self._gathering[key] = _Batch(peer, transport, codecs)
            self._loop.call_soon(self._send_gathered, key, batch)
        elif len(batch.bodies) >= BATCH_MAX:
            self._send(batch)
            batch = self._gathering[key] = _Batch(peer, transport, codecs)
            self._loop.call_soon(self._send_gathered, key, batch)
        return batch

    def _send_gathered(self, key: tuple[str, int, str], batch: _Batch) -> None:
        if self._gathering.get(key) is batch:
            del self._gathering[key]
            self._send(batch)

    def _send(self, batch: _Batch) -> None:
        request: dict[str, Any] = {
            "bodies": batch.bodies,
            "transport": batch.transport,
            "deadline_s": max(batch.deadline_s - self._loop.time(), 0.0),
        }
        if batch.codecs:
            request["codecs"] = list(batch.codecs)
        if any(token != NO_TOKEN for token in batch.tokens):
            request["tokens"] = batch.tokens
        self._ask(batch.peer, "pull.open", request, batch.deadline_s).add_done_callback(
            partial(self._answered, batch)
        )

    def _answered(self, batch: _Batch, reply: asyncio.Future[Mapping[str, Any]]) -> None:
        if reply.cancelled() or reply.exception() is not None:
            error = None if reply.cancelled() else reply.exception()
            return batch.fail(error if isinstance(error, RemoteError) else RemoteError(repr(error)))
        tickets = reply.result()["tickets"]
        if len(tickets) != len(batch.waiting):
            why = f"{batch.peer.name} answered {len(tickets)} tickets to {len(batch.waiting)}"
            batch.fail(RemoteError(why))
        for waiting, ticket in zip(batch.waiting, tickets, strict=False):
            if not waiting.done():
                waiting.set_result(ticket)
            elif ticket[0] == "ok":
                self.give_back(batch.peer, ticket[1][0])  # the asker has given up; so does the ticket

    def _send_back(self, peer: Member, key: tuple[str, int]) -> None:
        request = {"tokens": self._done_with.pop(key)}
        deadline_s = self._loop.time() + self._rpc_timeout_s
        # Where it gets lost, the ticket ends by its own clock.
        self._ask(peer, "pull.close", request, deadline_s).add_done_callback(
            lambda reply: reply.cancelled() or reply.exception()
        )

    def _ask(
        self, peer: Member, op: str, request: dict[str, Any], deadline_s: float
    ) -> asyncio.Future[Mapping[str, Any]]:
        reply = self._control.ask(peer, op, request, deadline_s)
        self._asked.add(reply)
        reply.add_done_callback(self._asked.discard)
        return reply
