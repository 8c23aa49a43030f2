"""An engine's end of the unix socket: blocking calls with a budget, from any thread.

One reader thread hands replies to whoever waits. A reply that comes after its asker has given up
may carry leases; they are sent back at once, so that giving up never leaks one.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import struct
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager, suppress
from typing import Any

from p2pcache.core import wire
from p2pcache.core.membership import Member
from p2pcache.core.records import leased
from p2pcache.io.slab import MappedSlab, attach, receive_frame, send_frame
from p2pcache.types import ConfigError, DeadlineExceeded, NodeDown, RemoteError

_log = logging.getLogger(__name__)
_GRACE_S = 0.5
BUDGET_MAX_S = 7 * 86_400.0  # whoever gives more has all the time in the world
_SEND_TIMEOUT_S = 1


def seconds(budget_s: float) -> float:
    """A budget as it may go over a wire and into a clock. Raises ConfigError for NaN."""
    if budget_s != budget_s:
        raise ConfigError("a budget is a number of seconds, not NaN")
    return min(budget_s, BUDGET_MAX_S)


class Link:
    """One connection to one node. When it breaks it stays broken: make another."""

    def __init__(self, path: str, timeout_s: float):
        """Raises NodeDown where no node listens, RemoteError where it refuses."""
        try:
            self._sock, self.member, self.slab = attach(path, "engine", timeout_s)
        except OSError as error:
            raise NodeDown(f"no p2pcache node answers on {path}: {error.strerror or error}") from None
        self.member: Member
        self.slab: MappedSlab
        self._sock.settimeout(None)
        # A node that was stopped by a signal must not hold up a sender for ever (law 3).
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_TIMEOUT_S, 0))
        self._sending = threading.Lock()
        self._writers = 0  # threads that write into slots of the slab now
        self._writers_lock = threading.Lock()
        self._hung_up = False
        self._waiting: dict[int, Future[Mapping[str, Any]]] = {}
        self._ids = itertools.count(1)
        self._to_release: deque[list[int]] = deque()
        self.broken = False
        self.bytes_sent = self.bytes_received = 0  # messages without their frames, since the attach
        self._reader = threading.Thread(target=self._read, name="p2pcache-link", daemon=True)
        self._reader.start()
        _links.add(self)

    def call(self, op: str, body: Mapping[str, Any], budget_s: float) -> Mapping[str, Any]:
        """Ask the node. Raises NodeDown, DeadlineExceeded, or RemoteError with the node's words."""
        budget_s = seconds(budget_s)
        if "deadline_s" in body:
            body = {**body, "deadline_s": seconds(body["deadline_s"])}
        self._send_releases()
        id_ = next(self._ids)
        reply: Future[Mapping[str, Any]] = Future()
        self._waiting[id_] = reply
        try:
            self._send("q", id_, op, body)
            return reply.result(budget_s + _GRACE_S)
        except FutureTimeout:
            if self._waiting.pop(id_, None) is None:
                return reply.result(_GRACE_S)  # the reader has it already and is about to set it
            raise DeadlineExceeded(f"the node did not answer {op} within {budget_s} s") from None
        finally:
            self._waiting.pop(id_, None)

    def notify(self, op: str, body: Mapping[str, Any]) -> None:
        """Tell the node something that needs no answer. A broken link has nobody left to tell."""
        try:
            self._send("n", 0, op, body)
        except NodeDown:
            pass

    def release(self, generations: list[int], now: bool = True) -> None:
        """End one lease on each slot; not `now`: with the next message, for callers that may not send."""
        if generations:
            self._to_release.append(generations)
        if now:
            self._send_releases()

    def _send_releases(self) -> None:
        while self._to_release:
            try:
                held = self._to_release.popleft()
            except IndexError:  # another thread was faster
                return
            self.notify("release", {"generations": held})

    def close(self) -> None:
        """Give back everything: the node sees the end of file, once no thread writes to a slot any more."""
        self._break()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Around every write into a reserved slot. Raises NodeDown on a broken link.

        The node gives a slot to somebody else as soon as this connection ends, so the connection must
        outlast whoever is still writing.
        """
        with self._writers_lock:
            if self.broken:
                raise NodeDown("the connection to this process's node is broken")
            self._writers += 1
        try:
            yield
        finally:
            with self._writers_lock:
                self._writers -= 1
            self._hang_up_if_idle()

    def _break(self) -> None:
        self.broken = True
        self._hang_up_if_idle()

    def _hang_up_if_idle(self) -> None:
        with self._writers_lock:
            if not self.broken or self._writers or self._hung_up:
                return
            self._hung_up = True
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._reader:
            self._reader.join()
        self._sock.close()
        self.slab.unmap()

    def _send(self, kind: str, id_: int, op: str, body: Mapping[str, Any]) -> None:
        raw = wire.encode(wire.Message(kind, id_, op, body))
        try:
            with self._sending:
                if self.broken:
                    raise NodeDown("the connection to this process's node is broken")
                send_frame(self._sock, raw)
                self.bytes_sent += len(raw)
        except OSError as error:
            self._break()
            raise NodeDown(f"this process's node does not take messages: {error}") from None

    def _read(self) -> None:
        error: Exception = NodeDown("this process's node has gone")
        try:
            while (raw := receive_frame(self._sock)) is not None:
                self.bytes_received += len(raw)
                try:
                    self._hand_over(wire.decode(raw))
                except RemoteError as refused:  # one bad reply costs the call that asked for it
                    waiting = self._waiting.pop(wire.peek_id(raw), None)
                    if waiting is not None:
                        waiting.set_exception(refused)
        except (OSError, RemoteError) as caught:
            error = NodeDown(f"the connection to this process's node broke: {caught}")
        self._break()
        for waiting in list(self._waiting.values()):
            if not waiting.done():
                waiting.set_exception(error)

    def _hand_over(self, message: wire.Message) -> None:
        waiting = self._waiting.pop(message.id, None)
        if waiting is None:
            self._give_back(message)
        elif message.kind == "e":
            waiting.set_exception(RemoteError(message.body["text"]))
        else:
            waiting.set_result(message.body)

    def _give_back(self, late: wire.Message) -> None:
        if late.kind != "r":
            return
        if late.op == "fetch":
            self.notify("release", {"generations": leased(late.body["grants"])})
        elif late.op == "reserve":
            held = [generation for status, _, generation in late.body["slots"] if status == "ok"]
            self.notify("abort", {"generations": held})


_links: weakref.WeakSet[Link] = weakref.WeakSet()


def _let_go_in_child() -> None:
    """A forked child must not keep a connection open: the node would take a dead engine for alive."""
    for link in list(_links):
        with suppress(OSError):
            os.close(link._sock.detach())


os.register_at_fork(after_in_child=_let_go_in_child)
