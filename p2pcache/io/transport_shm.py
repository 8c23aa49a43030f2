"""`shm`: a peer on the same host. Map its slab once, read-only, then copy body by body.

The holder's lease says how long the bytes stay put; the copy is over in milliseconds, and a body
that was replaced under a reader that slept through its lease fails its checksum.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from p2pcache.core.membership import Member
from p2pcache.io.ports import Ticket, TicketGone, Tickets, TransportError
from p2pcache.io.slab import MappedSlab, attach
from p2pcache.types import RemoteError

_PIECE_BYTES = 1 << 20
_ATTACH_TIMEOUT_S = 2.0


class ShmTransport:
    """Pulls by copying out of a peer's mapped slab. Serves nothing itself: the node's socket does."""

    name = "shm"

    def __init__(self, socket_path: str, boot_id: str):
        """socket_path: this node's engine socket, which also hands the slab to peers."""
        self._socket_path = socket_path
        self._boot_id = boot_id
        self._slabs: dict[str, tuple[int, socket.socket, MappedSlab]] = {}  # peer -> its incarnation's slab
        self._lock = threading.Lock()  # first contact from several threads at once
        self._copiers = ThreadPoolExecutor(2, thread_name_prefix="p2pcache-shm")

    async def start(self, tickets: Tickets) -> str:
        return self._socket_path

    def reaches(self, peer: Member) -> bool:
        return bool(peer.boot_id) and peer.boot_id == self._boot_id and "shm" in peer.transports

    def pull(
        self, peer: Member, ticket: Ticket, dest: memoryview, progress: Callable[[int], None]
    ) -> _Copy:
        copy = _Copy(asyncio.get_running_loop())
        self._copiers.submit(self._run, copy, peer, ticket, dest, progress)
        return copy

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self._copiers.shutdown)
        for _, sock, _ in self._slabs.values():
            sock.close()
        self._slabs.clear()

    def _run(
        self, copy: _Copy, peer: Member, ticket: Ticket, dest: memoryview, progress: Callable[[int], None]
    ) -> None:
        try:
            source = self._slab(peer).view(ticket.offset, ticket.nbytes)
            into, outof = np.frombuffer(dest, np.uint8), np.frombuffer(source, np.uint8)
            for start in range(0, ticket.nbytes, _PIECE_BYTES):
                if copy.abandoned.is_set():
                    break
                stop = min(start + _PIECE_BYTES, ticket.nbytes)
                np.copyto(into[start:stop], outof[start:stop])  # numpy lets go of the GIL
                copy.tell(progress, stop)
            copy.end(TransportError("abandoned") if copy.abandoned.is_set() else None)
        except ValueError as error:
            copy.end(TicketGone(f"the ticket does not fit the slab of {peer.name}: {error}"))
        except (OSError, RemoteError) as error:
            copy.end(TransportError(f"shm to {peer.name}: {error}"))
        except BaseException as error:  # a thread must never leave a pull without an end
            copy.end(TransportError(f"shm to {peer.name}: {error!r}"))

    def _slab(self, peer: Member) -> MappedSlab:
        with self._lock:
            known = self._slabs.get(peer.name)
            if known is not None and known[0] == peer.incarnation:
                return known[2]
            sock, member, slab = attach(peer.transports["shm"], "peer", _ATTACH_TIMEOUT_S)
            if member.incarnation != peer.incarnation:
                sock.close()
                raise TransportError(f"{peer.name} has restarted")
            if known is not None:
                known[1].close()
            self._slabs[peer.name] = (peer.incarnation, sock, slab)
            return slab


class _Copy:
    """One copy under way, and its futures (the loop's)."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self.done: asyncio.Future[None] = loop.create_future()
        self.settled: asyncio.Future[None] = loop.create_future()
        self.abandoned = threading.Event()

    def abandon(self) -> None:
        self.abandoned.set()

    def tell(self, progress: Callable[[int], None], nbytes: int) -> None:
        self._loop.call_soon_threadsafe(progress, nbytes)

    def end(self, error: Exception | None) -> None:
        self._loop.call_soon_threadsafe(self._end, error)

    def _end(self, error: Exception | None) -> None:
        if not self.done.done():
            if error is None:
                self.done.set_result(None)
            else:
                self.done.set_exception(error)
        if not self.settled.done():
            self.settled.set_result(None)
