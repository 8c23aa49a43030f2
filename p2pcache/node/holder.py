"""This node as a holder: leases to peers, one ticket a body, and the bytes behind a ticket.

A ticket is a right to read one slot for a short time. It ends when the reader closes it or when its
time is up, whichever is first; while a transport is sending from the slot, the slot stays leased
even past that time, so a slow send can never carry bytes of the slot's next life.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from p2pcache.config import NodeConfig
from p2pcache.core.checksum import CorruptBody
from p2pcache.core.tiers import Slot
from p2pcache.node.counters import Counters
from p2pcache.node.residency import Residency
from p2pcache.node.wireform import body_to_wire
from p2pcache.types import ExactKey, Miss, TierFull

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Open:
    slot: Slot
    bytes: memoryview
    expires_s: float
    reading: int = 0
    closed: bool = False


class TicketOffice:
    """Implements the `Tickets` port. `begin` and `end` come from transport threads, the rest does not."""

    def __init__(self, loop: asyncio.AbstractEventLoop, residency: Residency):
        self._loop = loop
        self._residency = residency
        self._lock = threading.Lock()
        self._open: dict[bytes, _Open] = {}
        self.leased_bytes = 0
        self._emptied = asyncio.Event()
        self._emptied.set()

    def __len__(self) -> int:
        return len(self._open)

    def issue(self, slot: Slot, expires_s: float) -> bytes:
        """A ticket for a slot that the caller has leased; the lease is the ticket's from now on."""
        token = secrets.token_bytes(16)
        view = self._residency.slab.view(slot.offset, slot.nbytes).toreadonly()
        with self._lock:
            self._open[token] = _Open(slot, view, expires_s)
        self._emptied.clear()
        self.leased_bytes += slot.nbytes
        return token

    def begin(self, token: bytes) -> memoryview | None:
        with self._lock:
            ticket = self._open.get(bytes(token))
            if ticket is None or ticket.closed or ticket.expires_s <= self._loop.time():
                return None
            ticket.reading += 1
            return ticket.bytes

    def end(self, token: bytes) -> None:
        with self._lock:
            ticket = self._open[bytes(token)]
            ticket.reading -= 1
            over = ticket.closed and not ticket.reading
        if over:
            self._loop.call_soon_threadsafe(self.close, [bytes(token)])

    def close(self, tokens: Iterable[bytes]) -> None:
        """The readers are done; an unknown ticket has ended already."""
        for token in tokens:
            with self._lock:
                ticket = self._open.get(token)
                if ticket is None:
                    continue
                ticket.closed = True
                if ticket.reading:
                    continue  # `end` comes back here
                del self._open[token]
            self.leased_bytes -= ticket.slot.nbytes
            self._residency.tier.release(ticket.slot)
        if not self._open:
            self._emptied.set()

    async def empty(self, budget_s: float) -> bool:
        """Wait until no ticket is open. False where one still was at the end."""
        try:
            async with asyncio.timeout(budget_s):
                await self._emptied.wait()
        except TimeoutError:
            return False
        return True

    def sweep(self) -> int:
        """Close what has run out. Returns how many."""
        now_s = self._loop.time()
        with self._lock:
            over = [token for token, t in self._open.items() if t.expires_s <= now_s and not t.closed]
        self.close(over)
        return len(over)


class Holder:
    """Answers peers that want bodies."""

    def __init__(self, config: NodeConfig, residency: Residency, counters: Counters):
        self._config = config
        self._residency = residency
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self.office = TicketOffice(self._loop, residency)

    async def open(self, bodies: list[ExactKey], deadline_s: float) -> list[list[Any]]:
        """A ticket or a reason for each body, in order; one from NVMe is promoted first."""
        return list(await asyncio.gather(*(self._ticket(exact, deadline_s) for exact in bodies)))

    async def _ticket(self, exact: ExactKey, deadline_s: float) -> list[Any]:
        miss: Miss | None = None
        try:
            if self.office.leased_bytes >= self._config.serve_bytes_in_flight_max:
                miss = Miss.BUSY
            else:
                async with asyncio.timeout_at(deadline_s):
                    got = await self._residency.lease(exact)
                if got is None:
                    miss = Miss.HOLDER_GONE
        except TimeoutError:
            miss = Miss.DEADLINE
        except TierFull:
            miss = Miss.NO_ROOM
        except CorruptBody:
            miss = Miss.CORRUPT
        if miss is not None:
            self._counters["tickets_refused"] += 1
            return [miss.value, None]
        slot = got[0]
        token = self.office.issue(slot, self._loop.time() + self._config.remote_lease_s)
        self._counters["tickets"] += 1
        body = body_to_wire(slot.body)
        lease = [token, slot.offset, slot.generation, list(slot.checksums), slot.meta, body]
        return ["ok", lease]
