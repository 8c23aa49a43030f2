"""`shm`: a peer on the same host. Map its slab once, read-only, then copy body by body.

The holder's lease says how long the bytes stay put; the copy is over in milliseconds, and a body
that was replaced under a reader that slept through its lease fails its checksum. The holder takes
no part in a copy, so a frozen one does not delay it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from p2pcache.core.checksum import layer_check
from p2pcache.core.membership import Member
from p2pcache.io._pulls import ThreadPull, Workers, check_sound, join
from p2pcache.io.ports import Ticket, TicketGone, Tickets, TransportError
from p2pcache.io.slab import MappedSlab, attach
from p2pcache.types import RemoteError

log = logging.getLogger(__name__)

_PIECE_BYTES = 4 << 20  # of one copy, and the step of progress
_ATTACH_TIMEOUT_S = 2.0
_SHUNNED_S = 2.0  # a peer that did not answer in time is not asked again for so long
_COPIERS = 2  # more only share the memory's bandwidth
_ATTACHERS = 4  # peers attached to at once

_PeerKey = tuple[str, int]  # name, incarnation


@dataclass(frozen=True, slots=True)
class _Peer:
    """A peer's slab, mapped. The socket's end of file says that the peer has gone."""

    incarnation: int
    sock: socket.socket
    slab: MappedSlab


class ShmTransport:
    """Pulls by copying out of a peer's mapped slab. Serves nothing itself: the node's socket does."""

    name = "shm"

    def __init__(self, socket_path: str, boot_id: str):
        """socket_path: this node's engine socket, which also hands the slab to peers."""
        self._socket_path = socket_path
        self._boot_id = boot_id
        self._lock = threading.Lock()  # guards the five below
        self._peers: dict[str, _Peer] = {}
        self._waiting: dict[_PeerKey, list[ThreadPull]] = {}  # for a peer that is being attached to
        self._shunned: dict[_PeerKey, float] = {}  # until when
        self._attaching: set[socket.socket] = set()
        self._closed = False
        self._copiers = Workers("p2pcache-shm", _COPIERS)
        self._attachers = Workers("p2pcache-shm-attach", _ATTACHERS)  # a frozen peer holds up no copy
        self._pulls: set[ThreadPull] = set()

    async def start(self, tickets: Tickets) -> str:
        return self._socket_path

    def reaches(self, peer: Member) -> bool:
        return bool(peer.boot_id) and peer.boot_id == self._boot_id and "shm" in peer.transports

    def pull(
        self, peer: Member, ticket: Ticket, dest: memoryview, progress: Callable[[int], None]
    ) -> ThreadPull:
        """See `ports.Transport`. `dest` is held until `settled`."""
        pull = ThreadPull(peer.name, ticket, dest, progress)
        if self._closed or not self.reaches(peer):
            why = "the transport is closed" if self._closed else "not on this host, or without shm"
            pull.finish(TransportError(f"{peer.name}: {why}"))
            return pull
        self._pulls.add(pull)
        pull.settled.add_done_callback(lambda _: self._pulls.discard(pull))
        self._queue(pull, peer)
        return pull

    def ask_early(self, peer: Member, nbytes: int) -> bytes | None:
        return None

    def forget_early(self, token: bytes) -> None:
        pass

    def description(self) -> dict[str, Any]:
        return {}

    async def close(self) -> None:
        with self._lock:
            self._closed = True
            for sock in self._attaching:
                with contextlib.suppress(OSError):  # not connected
                    sock.shutdown(socket.SHUT_RDWR)
        for pull in list(self._pulls):
            pull.abandon()
        await join(self._attachers.stop())
        await join(self._copiers.stop())  # after the attachers, which submit to them
        for name, known in list(self._peers.items()):
            self._forget(name, known)

    def _queue(self, pull: ThreadPull, peer: Member) -> None:
        """With the copiers where the peer's slab is mapped; else it waits for that. On the loop."""
        key = (peer.name, peer.incarnation)
        with self._lock:
            known = self._peers.get(peer.name)
            if known is not None and known.incarnation == peer.incarnation:
                return pull.run_on(self._copiers, partial(pull.work, partial(self._copy, pull, known.slab)))
            now_s = time.monotonic()
            self._shunned = {k: until_s for k, until_s in self._shunned.items() if until_s > now_s}
            if key in self._shunned:
                return pull.finish(TransportError(f"{peer.name}: did not answer a moment ago"))
            if key in self._waiting:
                return self._waiting[key].append(pull)
            self._waiting[key] = [pull]
        try:
            self._attachers.submit(partial(self._attach, peer, asyncio.get_running_loop()))
        except RuntimeError as exc:
            self._attached(key, None, str(exc))

    # On an attacher's thread.

    def _attach(self, peer: Member, loop: asyncio.AbstractEventLoop) -> None:
        """Map a peer's slab, for the pulls that wait for it."""
        slab, problem, shunned_until_s = None, "", 0.0
        try:
            slab = self._map(peer, loop)
        except (TransportError, OSError, RemoteError) as exc:
            problem = str(exc)
            if isinstance(exc, TimeoutError):
                shunned_until_s = time.monotonic() + _SHUNNED_S
        except Exception as exc:
            log.exception("attaching to a peer's slab failed on our side")
            problem = repr(exc)
        self._attached((peer.name, peer.incarnation), slab, problem, shunned_until_s)

    def _attached(
        self, key: _PeerKey, slab: MappedSlab | None, problem: str, shunned_until_s: float = 0.0
    ) -> None:
        with self._lock:
            if shunned_until_s:
                self._shunned[key] = shunned_until_s
            waiting = self._waiting.pop(key)
        for pull in waiting:
            if slab is None:
                pull.finish(TransportError(f"{pull.peer}: {problem}"))
            else:
                pull.run_on(self._copiers, partial(pull.work, partial(self._copy, pull, slab)))

    def _map(self, peer: Member, loop: asyncio.AbstractEventLoop) -> MappedSlab:
        """Raises TransportError, OSError, RemoteError."""
        sock, member, slab = attach(peer.transports["shm"], "peer", _ATTACH_TIMEOUT_S, self._using)
        made = _Peer(member.incarnation, sock, slab)
        with self._lock:
            wanted = (member.name, member.incarnation) == (peer.name, peer.incarnation)
            if not wanted or self._closed:
                sock.close()
                raise TransportError("it has restarted" if not wanted else "closed")
            replaced, self._peers[peer.name] = self._peers.get(peer.name), made
        with contextlib.suppress(RuntimeError):  # the loop has gone
            if replaced is not None:
                loop.call_soon_threadsafe(self._forget, peer.name, replaced)
            loop.call_soon_threadsafe(self._watch, peer.name, made)
        return slab

    @contextlib.contextmanager
    def _using(self, sock: socket.socket) -> Iterator[None]:
        """While inside, `close` shuts this socket down."""
        with self._lock:
            if self._closed:
                raise TransportError("closed")
            self._attaching.add(sock)
        try:
            yield
        finally:
            with self._lock:  # no shutdown may reach a descriptor that has been closed and reused
                self._attaching.discard(sock)

    # On a copier's thread.

    def _copy(self, pull: ThreadPull, slab: MappedSlab) -> None:
        """Raises TransportError, TicketGone, CorruptBody."""
        ticket = pull.ticket
        try:
            source = slab.view(ticket.offset, ticket.nbytes)
        except ValueError as exc:
            raise TicketGone(f"the ticket does not fit the slab of {pull.peer}: {exc}") from None
        assert pull.dest is not None
        check = layer_check(pull.dest, ticket.exact, ticket.checksums)
        for start in range(0, ticket.nbytes, _PIECE_BYTES):
            pull.check_wanted()
            check.copy(source, min(start + _PIECE_BYTES, ticket.nbytes))
            check_sound(check, pull.peer)
            if check.good_bytes < ticket.nbytes:  # the end is told with `done`
                pull.landed(check.good_bytes)

    # On the loop.

    def _watch(self, name: str, known: _Peer) -> None:
        """A slab outlives its node while somebody maps it, so let go of it as the node goes."""
        if self._peers.get(name) is known:
            loop = asyncio.get_running_loop()
            loop.add_reader(known.sock.fileno(), self._forget, name, known)

    def _forget(self, name: str, known: _Peer) -> None:
        with self._lock:
            if self._peers.get(name) is known:
                del self._peers[name]
        if known.sock.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(known.sock.fileno())
            known.sock.close()
