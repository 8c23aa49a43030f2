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
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from p2pcache.core.checksum import CorruptBody, layer_check
from p2pcache.core.membership import Member
from p2pcache.io._pulls import ThreadPull, Workers, check_sound, join
from p2pcache.io.ports import Ticket, TicketGone, Tickets, TransportError
from p2pcache.io.slab import MappedSlab, attach
from p2pcache.types import RemoteError

log = logging.getLogger(__name__)

_PIECE_BYTES = 1 << 20  # of one copy, and the step of progress
_ATTACH_TIMEOUT_S = 2.0
_COPIERS = 2  # more only share the memory's bandwidth


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
        self._lock = threading.Lock()  # guards the two below
        self._peers: dict[str, _Peer] = {}
        self._closed = False
        self._copiers = Workers("p2pcache-shm", _COPIERS)
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
        loop = asyncio.get_running_loop()
        self._copiers.submit(partial(self._run, pull, peer, loop))
        return pull

    def description(self) -> dict[str, Any]:
        return {}

    async def close(self) -> None:
        with self._lock:
            self._closed = True
        for pull in list(self._pulls):
            pull.abandon()
        await join(self._copiers.stop())
        for name, known in list(self._peers.items()):
            self._forget(name, known)

    # On a copier's thread.

    def _run(self, pull: ThreadPull, peer: Member, loop: asyncio.AbstractEventLoop) -> None:
        """One pull. What has begun ends in `end`, so that `settled` always comes."""
        if not pull.begin():
            return
        error: Exception | None = None
        try:
            self._copy(pull, self._slab(peer, loop))
        except (TransportError, TicketGone, CorruptBody) as exc:
            error = exc
        except (OSError, RemoteError) as exc:
            error = TransportError(f"{pull.peer}: {exc}")
        except Exception as exc:
            log.exception("a pull over shm failed on our side")
            error = TransportError(f"{pull.peer}: {exc!r}")
        finally:
            pull.end(error)

    def _copy(self, pull: ThreadPull, slab: MappedSlab) -> None:
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

    def _slab(self, peer: Member, loop: asyncio.AbstractEventLoop) -> MappedSlab:
        """Mapped at first contact. Raises OSError or RemoteError."""
        known = self._peers.get(peer.name)
        if known is not None and known.incarnation == peer.incarnation:
            return known.slab
        # Without the lock, so that one frozen peer does not hold up the others.
        sock, member, slab = attach(peer.transports["shm"], "peer", _ATTACH_TIMEOUT_S)
        made = _Peer(member.incarnation, sock, slab)
        with self._lock:
            wanted = (member.name, member.incarnation) == (peer.name, peer.incarnation)
            if not wanted or self._closed:
                sock.close()
                raise TransportError(f"{peer.name} has restarted" if not wanted else "closed")
            replaced, self._peers[peer.name] = self._peers.get(peer.name), made
        with contextlib.suppress(RuntimeError):  # the loop has gone
            if replaced is not None:
                loop.call_soon_threadsafe(self._forget, peer.name, replaced)
            loop.call_soon_threadsafe(self._watch, peer.name, made)
        return slab

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
