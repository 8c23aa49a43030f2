"""Bringing one body from a peer into a slot of ours: ticket, transfer, verify, commit.

One flight a body: whoever asks while it is under way joins it. Each holder is tried by the best
transport that both sides have, and by the next where that one fails; a holder that no longer has
the body costs one round trip. The deadline is the caller's and covers all of it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from p2pcache.config import NodeConfig
from p2pcache.core.checksum import CorruptBody
from p2pcache.core.flight import Flights
from p2pcache.core.flight import Ticket as FlightTicket
from p2pcache.core.membership import Member, View
from p2pcache.core.planner import Costs
from p2pcache.core.rates import Meter
from p2pcache.core.tiers import Slot
from p2pcache.io.ports import Control, Pull, Ticket, TicketGone, Transport, TransportError
from p2pcache.node.counters import Counters
from p2pcache.node.residency import Residency
from p2pcache.node.wireform import body_from_wire
from p2pcache.types import BodyInfo, DeadlineExceeded, Holder, Miss, RemoteError, Tier, TierFull

HOLDERS_TRIED_MAX = 4
_MISSES = {miss.value: miss for miss in Miss}


@dataclass(frozen=True, slots=True)
class Pulled:
    """What a pull brought: the serving slot, or a reason. `slot` is not leased yet."""

    slot: Slot | None
    peer: str = ""
    transport: str = ""
    miss: Miss | None = None
    seconds: float = 0.0


@dataclass(slots=True)
class _Batch:
    """Requests to one peer that gather during one turn of the loop and leave as one message."""

    items: list[Any] = field(default_factory=list)
    waiting: list[asyncio.Future[Any]] = field(default_factory=list)
    deadline_s: float = 0.0  # the latest of those who wait


class Puller:
    """The reader's side of a transfer. Belongs to the node's loop."""

    def __init__(
        self,
        config: NodeConfig,
        control: Control,
        transports: list[Transport],
        residency: Residency,
        costs: Costs,
        counters: Counters,
    ):
        """transports: those of this node, in order of preference."""
        self._config = config
        self._control = control
        self._transports = {t.name: t for t in transports}
        self._residency = residency
        self._costs = costs
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self.flights = Flights(
            flights_max=config.pulls_in_flight_max, bytes_max=config.pull_bytes_in_flight_max
        )
        self._opening: dict[tuple[str, str], _Batch] = {}
        self._closing: dict[str, list[bytes]] = {}
        self._broken: dict[tuple[str, int, str], float] = {}  # (peer, incarnation, transport) -> until
        self._silent: dict[tuple[str, int], float] = {}  # (peer, incarnation) -> left alone until
        self._tasks: set[asyncio.Task] = set()
        self.view = View()

    def ways(self, peer: Member) -> list[Transport]:
        """Transports that may work with this peer now, the preferred one first.

        None for a while after it let a deadline pass: a frozen peer must not cost every fetch one.
        """
        if self._silent.get((peer.name, peer.incarnation), 0.0) > self._loop.time():
            return []
        names = self._config.transports_by_peer.get(peer.name, tuple(self._transports))
        now_s = self._loop.time()
        return [
            self._transports[name]
            for name in names
            if name in self._transports
            and name in peer.transports
            and self._transports[name].reaches(peer)
            and self._broken.get((peer.name, peer.incarnation, name), 0.0) <= now_s
        ]

    async def pull(self, body: BodyInfo, holders: tuple[Holder, ...], deadline_s: float) -> Pulled:
        """Bring a body here, or join whoever is at it. Never raises for a fault: a miss has a reason."""
        try:
            async with asyncio.timeout_at(deadline_s):
                while True:
                    turn: asyncio.Future[Any] = self._loop.create_future()
                    peer = holders[0].node if holders else ""
                    ask = self.flights.ask(body.exact, body.nbytes, peer, turn)
                    if ask is not FlightTicket.JOIN:
                        return await self._pilot(body, holders, deadline_s, turn, ask)
                    self._counters["joined"] += 1
                    outcome = await turn
                    # A pilot whose own time was up has shown nothing about ours: ask again.
                    if outcome.miss is not Miss.DEADLINE:
                        return outcome
        except TimeoutError:
            return Pulled(None, miss=Miss.DEADLINE)

    async def _pilot(
        self,
        body: BodyInfo,
        holders: tuple[Holder, ...],
        deadline_s: float,
        turn: asyncio.Future,
        ask: FlightTicket,
    ) -> Pulled:
        """Fly, and land whatever happens, so that no passenger is left behind."""
        outcome = Pulled(None, miss=Miss.HOLDER_UNREACHABLE)
        try:
            if ask is FlightTicket.QUEUE:
                await turn
            outcome = await self._fly(body, holders, deadline_s)
            return outcome
        except (asyncio.CancelledError, TimeoutError):
            outcome = Pulled(None, miss=Miss.DEADLINE)
            raise
        finally:
            self._land(body, outcome)

    def _land(self, body: BodyInfo, outcome: Pulled) -> None:
        passengers, started = self.flights.landed(body.exact)
        for waiting in passengers:
            if not waiting.done():
                waiting.set_result(outcome)
        for pilot in started:
            if not pilot.done():
                pilot.set_result(None)

    async def _fly(self, body: BodyInfo, holders: tuple[Holder, ...], deadline_s: float) -> Pulled:
        # The answer may have come in with a flight that landed while this one was being planned.
        here = self._residency.tier.get(body.exact)
        if here is not None:
            return Pulled(here)
        miss = Miss.HOLDER_UNREACHABLE
        holders = holders[:HOLDERS_TRIED_MAX]
        for holder in holders:
            peer = self.view.members.get(holder.node)
            if peer is None or peer.incarnation != holder.incarnation:
                miss = Miss.HOLDER_GONE
                continue
            # Half of what is left, so that a silent holder leaves time for the next.
            now_s = self._loop.time()
            answer_by_s = deadline_s if holder is holders[-1] else now_s + (deadline_s - now_s) / 2
            for transport in self.ways(peer):
                outcome = await self._try(body, peer, holder.tier, transport, answer_by_s, deadline_s)
                if outcome.slot is not None:
                    return outcome
                miss = outcome.miss or miss
                if miss is not Miss.HOLDER_UNREACHABLE:
                    break  # the holder has answered: another transport would not change its mind
            if miss is Miss.NO_ROOM or self._loop.time() >= deadline_s:
                break
        return Pulled(None, miss=miss)

    async def _try(
        self,
        body: BodyInfo,
        peer: Member,
        tier: Tier,
        transport: Transport,
        answer_by_s: float,
        deadline_s: float,
    ) -> Pulled:
        """One holder by one transport. answer_by_s: until when it may take to give its leave."""
        try:
            slot = await self._residency.reserve(body, peer.name)
        except TierFull:
            return Pulled(None, miss=Miss.NO_ROOM)
        started_s = self._loop.time()
        settled: asyncio.Future[None] = self._loop.create_future()
        settled.set_result(None)
        ticket = None
        meter = self._costs.meter(transport.name, peer.name)
        try:
            idle = not meter.period.active
            ticket = await self._open(peer, transport.name, body, answer_by_s)
            if isinstance(ticket, Miss):
                self._residency.give_up(slot, settled)
                return Pulled(None, peer.name, transport.name, ticket)
            # A ticket behind other bytes waits for those, and one from NVMe for the holder's disk.
            if idle and not meter.period.active and tier is not Tier.NVME:
                meter.opened(self._loop.time() - started_s, self._loop.time())
            pull = _Transfer(self._loop, self._residency, slot, ticket, meter)
            settled = pull.start(peer, transport)
            await pull.finish(deadline_s)
            slot = self._residency.commit(slot, ticket.checksums, ticket.meta)
        except BaseException as error:
            self._residency.give_up(slot, settled)
            waited_s = 0.0 if meter.came_s > started_s else self._loop.time() - started_s
            miss = self._why(error, peer, transport, waited_s)
            if miss is None:
                raise
            return Pulled(None, peer.name, transport.name, miss)
        finally:
            if isinstance(ticket, Ticket):
                self._close(peer, ticket.token)
        seconds = self._loop.time() - started_s
        meter.brought(seconds)
        self._counters[f"pulls_{transport.name}"] += 1
        return Pulled(slot, peer.name, transport.name, None, seconds)

    def _why(self, error: BaseException, peer: Member, transport: Transport, waited_s: float) -> Miss | None:
        """A fault as a reason; None for what is not a fault of the way or the peer.

        waited_s: how long nothing had come from the peer by this way.
        """
        if isinstance(error, CorruptBody):
            self._counters["corrupt"] += 1
            return Miss.CORRUPT
        if isinstance(error, TicketGone):
            return Miss.HOLDER_GONE
        if isinstance(error, TransportError):
            self._counters[f"failed_{transport.name}"] += 1
            until_s = self._loop.time() + self._config.transport_retry_s
            self._broken[peer.name, peer.incarnation, transport.name] = until_s
            return Miss.HOLDER_UNREACHABLE
        if isinstance(error, DeadlineExceeded | TimeoutError):
            if waited_s >= self._config.silent_after_s:  # a caller in a hurry says nothing about the peer
                until_s = self._loop.time() + self._config.silent_retry_s
                self._silent[peer.name, peer.incarnation] = until_s
            return Miss.DEADLINE
        if isinstance(error, RemoteError):
            return Miss.HOLDER_UNREACHABLE
        return None

    # -- tickets, many a message -----------------------------------------------------------------

    async def _open(self, peer: Member, transport: str, body: BodyInfo, deadline_s: float) -> Ticket | Miss:
        batch = self._opening.get((peer.name, transport))
        if batch is None:
            batch = self._opening[peer.name, transport] = _Batch()
            self._spawn(self._send_open(peer, transport, batch))
        answer: asyncio.Future[list] = self._loop.create_future()
        batch.items.append(body)
        batch.waiting.append(answer)
        batch.deadline_s = max(batch.deadline_s, deadline_s)
        async with asyncio.timeout_at(deadline_s):
            status, lease = await answer
        if status != "ok":
            return _MISSES.get(status, Miss.HOLDER_GONE)
        token, offset, generation, checksums, meta, held = lease
        # The directory's word on a body is a hint; the holder's is not. Where its keys stand (its base
        # position) is part of what makes the bytes right, so it has to be what was asked for.
        if body_from_wire(held) != body or not checksums or body.nbytes % len(checksums):
            self._close(peer, token)
            return Miss.HOLDER_GONE
        return Ticket(token, offset, body.nbytes, generation, tuple(checksums), meta)

    async def _send_open(self, peer: Member, transport: str, batch: _Batch) -> None:
        await asyncio.sleep(0)  # let the other pulls of this turn get on
        del self._opening[peer.name, transport]
        request = {
            "bodies": [body.exact for body in batch.items],
            "transport": transport,
            "deadline_s": max(batch.deadline_s - self._loop.time(), 0.0),
        }
        try:
            reply = await self._control.request(peer, "pull.open", request, batch.deadline_s)
            tickets = reply["tickets"]
            if len(tickets) != len(batch.items):
                raise RemoteError(f"{peer.name} answered {len(tickets)} tickets to {len(batch.items)}")
        except BaseException as error:
            for waiting in batch.waiting:
                if not waiting.done():
                    waiting.set_exception(
                        error if isinstance(error, RemoteError) else RemoteError(repr(error))
                    )
            return
        for waiting, ticket in zip(batch.waiting, tickets, strict=True):
            if not waiting.done():
                waiting.set_result(ticket)
            elif ticket[0] == "ok":
                self._close(peer, ticket[1][0])  # the asker has given up; so does the ticket

    def _close(self, peer: Member, token: bytes) -> None:
        """Tell the holder, some time soon, that a ticket is no longer needed."""
        tokens = self._closing.get(peer.name)
        if tokens is None:
            tokens = self._closing[peer.name] = []
            self._spawn(self._send_close(peer, tokens))
        tokens.append(token)

    async def _send_close(self, peer: Member, tokens: list[bytes]) -> None:
        await asyncio.sleep(0)
        del self._closing[peer.name]
        try:
            deadline_s = self._loop.time() + self._config.rpc_timeout_s
            await self._control.request(peer, "pull.close", {"tokens": tokens}, deadline_s)
        except RemoteError:
            pass  # the ticket ends by its own clock

    def _spawn(self, coroutine: Any) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class _Transfer:
    """Bytes arriving in a slot, checked layer by layer while the next ones are on their way."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        residency: Residency,
        slot: Slot,
        ticket: Ticket,
        meter: Meter,
    ):
        """meter: is told of the bytes as they come, and of those that did not."""
        self._loop = loop
        self._meter = meter
        self._residency = residency
        self._slot = slot
        self._ticket = ticket
        self._arrived = 0
        self._news = asyncio.Event()
        self._pull: Pull | None = None

    def start(self, peer: Member, transport: Transport) -> asyncio.Future[None]:
        """Begin; returns the future that says when nothing will write to the slot any more."""
        dest = self._residency.slab.view(self._slot.offset, self._slot.nbytes)
        self._pull = transport.pull(peer, self._ticket, dest, self._on_progress)
        self._meter.begin(self._loop.time())
        self._pull.done.add_done_callback(lambda _: self._news.set())
        return self._pull.settled

    def _on_progress(self, nbytes: int) -> None:
        if nbytes > self._arrived:
            self._meter.came(nbytes - self._arrived, self._loop.time())
            self._arrived = nbytes
        self._news.set()

    async def finish(self, deadline_s: float) -> None:
        """Wait until all layers are here and right. Raises what went wrong, or TimeoutError."""
        assert self._pull is not None
        ticket, layers, checked = self._ticket, len(self._ticket.checksums), 0
        layer_bytes = ticket.nbytes // layers
        late, lost = False, 0
        try:
            async with asyncio.timeout_at(deadline_s):
                while checked < layers:
                    whole = (
                        layers
                        if self._pull.done.done()
                        else self._arrived // layer_bytes
                        if layer_bytes
                        else 0
                    )
                    if self._pull.done.done():
                        self._pull.done.result()
                    if whole == checked:
                        self._news.clear()
                        await self._news.wait()
                        continue
                    bad = await self._residency.slab.first_bad_layer(
                        self._slot.offset,
                        ticket.nbytes,
                        self._slot.body.exact,
                        ticket.checksums,
                        checked,
                        whole,
                    )
                    if bad is not None:
                        raise CorruptBody(f"layer {bad} does not match its checksum")
                    checked = whole
                await self._pull.done
            self._on_progress(ticket.nbytes)  # the end needs no report
        except (TimeoutError, asyncio.CancelledError):
            late = True
            raise
        finally:
            if late:
                self._on_progress(getattr(self._pull, "landed_bytes", 0))
                lost = ticket.nbytes - self._arrived
            self._meter.end(self._loop.time(), lost=lost, fault=not late and self._arrived < ticket.nbytes)
            if not self._pull.done.done() or not self._pull.settled.done():
                self._pull.abandon()
            # Somebody has to look at it, or asyncio complains of an exception never retrieved.
            self._pull.done.add_done_callback(lambda f: f.cancelled() or f.exception())
