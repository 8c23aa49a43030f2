"""This node as a holder: leases to peers, one ticket a body, and the bytes behind a ticket.

A ticket is a right to read one slot for a short time. It ends when the reader closes it or when its
time is up, whichever is first. A read that ends renews it, within limits: a large body over a slow
link is read span by span. While a transport is sending from the slot, the slot stays leased
even past that time, so a slow send can never carry bytes of the slot's next life.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from p2pcache.config import NodeConfig
from p2pcache.core.checksum import CorruptBody
from p2pcache.core.flight import Serving
from p2pcache.core.tiers import Slot
from p2pcache.io.ports import NO_TOKEN
from p2pcache.node.coder import WIRE_CODEC, Coder
from p2pcache.node.counters import Counters
from p2pcache.node.outbox import Outbox, Parcel
from p2pcache.node.residency import Residency
from p2pcache.node.wireform import leave_to_wire
from p2pcache.types import ExactKey, Miss, RemoteError, TierFull

_log = logging.getLogger(__name__)
RETRY_MIN_S, RETRY_MAX_S = 0.005, 1.0
SMOOTHING = 0.2
OPENED_MAX = 4096  # by one message: others have a turn before the next
RENEWED_LEASES_MAX = 6  # a ticket's whole life, in leases: a reader that asks on and on is stopped there


@dataclass(slots=True)
class _Open:
    slot: Slot
    bytes: memoryview
    reader: str
    issued_s: float
    expires_s: float
    parcel: Parcel | None = None
    reading: int = 0
    closed: bool = False


class TicketOffice:
    """Implements the `Tickets` port. `begin` and `end` come from transport threads, the rest does not."""

    def __init__(
        self, config: NodeConfig, loop: asyncio.AbstractEventLoop, residency: Residency, outbox: Outbox
    ):
        self._config = config
        self._loop = loop
        self._residency = residency
        self._outbox = outbox
        self._lock = threading.Lock()
        self._open: dict[bytes, _Open] = {}
        self._serving = Serving(
            bytes_max=config.serve_bytes_in_flight_max, reader_bytes_max=config.serve_bytes_per_peer_max
        )
        self._usual_s = RETRY_MIN_S  # how long a ticket stays open, smoothed
        self._emptied = asyncio.Event()
        self._emptied.set()
        self.watchers: list[Callable[[bytes], None]] = []

    def __len__(self) -> int:
        return len(self._open)

    @property
    def retry_after_s(self) -> float:
        """When somebody who was refused for want of room may well get it."""
        oldest = next(iter(self._open.values()), None)  # one that takes long says so before it has ended
        age_s = 0.0 if oldest is None else self._loop.time() - oldest.issued_s
        return min(max(self._usual_s, age_s / 2, RETRY_MIN_S), RETRY_MAX_S)

    @property
    def leased_bytes(self) -> int:
        return self._serving.nbytes

    def admit(self, reader: str, exact: ExactKey, nbytes: int) -> bool:
        """Count a body towards the limits; `dismiss`, or the end of its ticket, takes it off again."""
        return self._serving.admit(reader, exact, nbytes, self._loop.time())

    def dismiss(self, reader: str, nbytes: int) -> None:
        """No ticket came of what was admitted, or it has ended."""
        self._serving.dismiss(reader, nbytes)

    def issue(
        self,
        slot: Slot,
        reader: str,
        expires_s: float,
        parcel: Parcel | None = None,
        token: bytes = NO_TOKEN,
    ) -> bytes:
        """A ticket for an admitted slot that the caller has leased; the lease is the ticket's now.

        parcel: the body encoded, which is sent in its place; the ticket's too. token: the reader's choice.
        """
        if token == NO_TOKEN or token in self._open:
            token = secrets.token_bytes(16)
        if parcel is None or parcel.packed is None:
            view = self._residency.slab.view(slot.offset, slot.nbytes).toreadonly()
        else:
            view = parcel.packed.data
        with self._lock:
            self._open[token] = _Open(slot, view, reader, self._loop.time(), expires_s, parcel)
        self._emptied.clear()
        return token

    def decided(self, token: bytes) -> None:
        """Whoever asks for bytes by a token of the reader's choice need not wait for its ticket any more."""
        if token != NO_TOKEN:
            for watcher in self.watchers:
                watcher(token)

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
            renewed_s = min(self._loop.time() + self._config.remote_lease_s, self._last_s(ticket))
            ticket.expires_s = max(ticket.expires_s, renewed_s)
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
            self._usual_s += SMOOTHING * (self._loop.time() - ticket.issued_s - self._usual_s)
            self.dismiss(ticket.reader, ticket.slot.nbytes)
            self._residency.tier.release(ticket.slot)
            if ticket.parcel is not None:
                self._outbox.give_back(ticket.parcel)
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
            over = [
                token
                for token, t in self._open.items()
                if not t.closed and (self._last_s(t) if t.reading else t.expires_s) <= now_s
            ]
        self.close(over)
        return len(over)

    def _last_s(self, ticket: _Open) -> float:
        """When it ends however much it is read."""
        return ticket.issued_s + RENEWED_LEASES_MAX * self._config.remote_lease_s


class Holder:
    """Answers peers that want bodies."""

    def __init__(self, config: NodeConfig, residency: Residency, coder: Coder, counters: Counters):
        self._config = config
        self._residency = residency
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self.outbox = Outbox(WIRE_CODEC, coder, residency.slab, config.wire_codec_bytes_max)
        self.office = TicketOffice(config, self._loop, residency, self.outbox)

    def open(
        self,
        bodies: Sequence[ExactKey],
        reader: str,
        deadline_s: float,
        *,
        transport: str,
        codecs: Sequence[str] = (),
        tokens: Sequence[bytes] = (),
    ) -> Mapping[str, Any] | Awaitable[Mapping[str, Any]]:
        """The reply to `pull.open`: a ticket or a reason for each body, in order.

        Bodies of the host tier as they are need no wait; one from NVMe is promoted first. codecs: those that
        the reader takes. Over shm, which copies from the slab, bodies are raw. tokens: the reader's choice.
        """
        encodes = transport != "shm" and self._config.wire_codec != "none"
        encoded = encodes and WIRE_CODEC in codecs
        if len(bodies) > OPENED_MAX:
            raise RemoteError(f"a reader opens at most {OPENED_MAX} bodies with one message")
        if len(tokens) != len(bodies):
            tokens = [NO_TOKEN] * len(bodies)
        if not encoded and all(self._residency.tier.get(exact) is not None for exact in bodies):
            each = zip(bodies, tokens, strict=True)
            return {"tickets": [self._ticket_at_once(exact, token, reader) for exact, token in each]}
        return self._open_later(bodies, tokens, reader, deadline_s, encoded)

    async def _open_later(
        self,
        bodies: Sequence[ExactKey],
        tokens: Sequence[bytes],
        reader: str,
        deadline_s: float,
        encoded: bool,
    ) -> Mapping[str, Any]:
        each = zip(bodies, tokens, strict=True)
        made = [self._ticket(exact, token, reader, deadline_s, encoded) for exact, token in each]
        tickets = await asyncio.gather(*made, return_exceptions=True)
        broken = [ticket for ticket in tickets if isinstance(ticket, BaseException)]
        if broken:  # a fault of our own: the reader hears of no ticket, so none may stay open
            self.office.close([t[1][0] for t in tickets if isinstance(t, list) and t[0] == "ok"])
            raise broken[0]
        return {"tickets": tickets}

    def _ticket_at_once(self, exact: ExactKey, token: bytes, reader: str) -> list[Any]:
        """A ticket for a body of the host tier, raw."""
        slot = self._residency.tier.get(exact)
        assert slot is not None
        if not self.office.admit(reader, exact, slot.nbytes):
            return self._refusal(Miss.BUSY, self.office.retry_after_s, token)
        self._residency.tier.lease(exact)
        return self._issue(slot, reader, None, token)

    async def _ticket(
        self, exact: ExactKey, token: bytes, reader: str, deadline_s: float, encoded: bool
    ) -> list[Any]:
        body = self._residency.body(exact)
        if body is None:
            return self._refusal(Miss.HOLDER_GONE, token=token)
        if not self.office.admit(reader, exact, body.nbytes):
            return self._refusal(Miss.BUSY, self.office.retry_after_s, token)
        slot: Slot | None = None
        issued = False
        try:
            async with asyncio.timeout_at(deadline_s):
                got = await self._residency.lease(exact)
                if got is None:
                    return self._refusal(Miss.HOLDER_GONE, token=token)
                slot = got[0]
                if slot.nbytes != body.nbytes:  # it came back as another one meanwhile
                    return self._refusal(Miss.HOLDER_GONE, token=token)
                parcel = await self.outbox.take(slot) if encoded else None
            ticket = self._issue(slot, reader, parcel, token)
            issued = True
            return ticket
        except TimeoutError:
            return self._refusal(Miss.DEADLINE, token=token)
        except TierFull:
            return self._refusal(Miss.NO_ROOM, token=token)
        except CorruptBody:
            return self._refusal(Miss.CORRUPT, token=token)
        finally:
            if not issued:
                self.office.dismiss(reader, body.nbytes)
                if slot is not None:
                    self._residency.tier.release(slot)

    def _issue(self, slot: Slot, reader: str, parcel: Parcel | None, token: bytes) -> list[Any]:
        expires_s = self._loop.time() + self._config.remote_lease_s
        given = self.office.issue(slot, reader, expires_s, parcel, token)
        self.office.decided(token)
        self._counters["tickets"] += 1
        coding = None if parcel is None or parcel.packed is None else parcel.packed.coding
        return ["ok", leave_to_wire(given, slot, coding)]

    def _refusal(self, why: Miss, retry_after_s: float | None = None, token: bytes = NO_TOKEN) -> list[Any]:
        self.office.decided(token)
        self._counters["tickets_refused"] += 1
        return [why.value, retry_after_s]
