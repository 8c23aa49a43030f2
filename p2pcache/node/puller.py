"""Bringing one body from a peer into a slot of ours: ticket, transfer, verify, commit.

One flight a body: whoever asks while it is under way joins it. Each holder is tried by the best
transport that both sides have, and by the next where that one fails; a holder that no longer has
the body costs one round trip. The deadline is the caller's and covers all of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from p2pcache.config import NodeConfig
from p2pcache.core.checksum import CorruptBody
from p2pcache.core.flight import Flights
from p2pcache.core.flight import Ticket as FlightTicket
from p2pcache.core.membership import Member, View
from p2pcache.core.nvmelog import Record
from p2pcache.core.planner import Costs
from p2pcache.core.rates import Meter
from p2pcache.core.tiers import Slot
from p2pcache.io.ports import NO_TOKEN, Control, Pull, TicketGone, Transport, TransportError
from p2pcache.node.coder import Coder
from p2pcache.node.counters import Counters
from p2pcache.node.inbox import Inbox
from p2pcache.node.leaves import Leaves, Refusal
from p2pcache.node.residency import Residency
from p2pcache.node.wireform import Leave
from p2pcache.types import BodyInfo, DeadlineExceeded, Holder, Miss, RemoteError, Tier, TierFull

HOLDERS_TRIED_MAX = 4
RETRY_MAX_S = 0.5  # whatever a holder says
RETRY_INBOX_S = 0.02


@dataclass(frozen=True, slots=True)
class Pulled:
    """What a pull brought: the serving slot, or a reason. `slot` is not leased yet."""

    slot: Slot | None
    peer: str = ""
    transport: str = ""
    miss: Miss | None = None
    seconds: float = 0.0
    retry_after_s: float = 0.0  # of a miss that may be none later: the holder is busy


class Puller:
    """The reader's side of a transfer. Belongs to the node's loop."""

    def __init__(
        self,
        config: NodeConfig,
        control: Control,
        transports: list[Transport],
        residency: Residency,
        coder: Coder,
        costs: Costs,
        counters: Counters,
    ):
        """transports: those of this node, in order of preference."""
        self._config = config
        self._transports = {t.name: t for t in transports}
        self._residency = residency
        self._coder = coder
        self.leaves = Leaves(control, config.rpc_timeout_s)
        self.inbox = Inbox(config.pull_bytes_in_flight_max)
        self._costs = costs
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self.flights = Flights(
            flights_max=config.pulls_in_flight_max,
            bytes_max=config.pull_bytes_in_flight_max,
            line_bytes_max=config.pull_line_bytes_max or config.host_bytes_max,
        )
        self._broken: dict[tuple[str, int, str], float] = {}  # (peer, incarnation, transport) -> until
        self._silent: dict[tuple[str, int], float] = {}  # (peer, incarnation) -> left alone until
        self._view = View()

    @property
    def view(self) -> View:
        return self._view

    @view.setter
    def view(self, view: View) -> None:
        """The mesh has changed: what is remembered of incarnations that have left is dropped."""
        self._view = view
        self._silent = {key: s for key, s in self._silent.items() if view.has(*key)}
        self._broken = {key: s for key, s in self._broken.items() if view.has(*key[:2])}

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
        # A flight that others began may have known other holders than we do: so we ask once more ourselves.
        joins_left, wait_s = 1, 0.0
        turn: asyncio.Future[Any] | None = None
        try:
            async with asyncio.timeout_at(deadline_s):
                while True:
                    turn = self._loop.create_future()
                    peer = holders[0].node if holders else ""
                    ask = self.flights.ask(body.exact, body.nbytes, peer, turn)
                    if ask is FlightTicket.BUSY:
                        return Pulled(None, peer, miss=Miss.BUSY)
                    joined = ask is FlightTicket.JOIN
                    if joined:
                        self._counters["joined"] += 1
                        outcome = await turn
                    else:
                        outcome = await self._pilot(body, holders, deadline_s, turn, ask)
                    if outcome.slot is not None:
                        return outcome
                    if outcome.retry_after_s:
                        # All who have it are busy, or gone. Whoever is busy says when to ask again; we wait
                        # outside of the line, and longer each time, so that other pulls go on.
                        wait_s = min(max(outcome.retry_after_s, 2 * wait_s), RETRY_MAX_S)
                        wait_s *= 1 + body.exact[0] / 512  # not all at once
                        if self._loop.time() + wait_s >= deadline_s:
                            return outcome
                        self._counters["retried_pulls"] += 1
                        await asyncio.sleep(wait_s)
                        continue
                    # A pilot whose own time was up has shown nothing about ours.
                    if not joined or (outcome.miss is not Miss.DEADLINE and not joins_left):
                        return outcome
                    joins_left -= outcome.miss is not Miss.DEADLINE
        except TimeoutError:
            if turn is not None:
                self.flights.leave(body.exact, turn)
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
        return await self._try_all(body, holders[:HOLDERS_TRIED_MAX], deadline_s)

    async def _try_all(self, body: BodyInfo, holders: tuple[Holder, ...], deadline_s: float) -> Pulled:
        """Each holder by each transport until one gives the body; else the miss, and when to ask again."""
        miss, retry_after_s = Miss.HOLDER_UNREACHABLE, 0.0
        for holder in holders:
            peer = self._view.members.get(holder.node)
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
                retry_after_s = min(filter(None, (retry_after_s, outcome.retry_after_s)), default=0.0)
                if miss is not Miss.HOLDER_UNREACHABLE:
                    break  # the holder has answered: another transport would not change its mind
            if miss is Miss.NO_ROOM or self._loop.time() >= deadline_s:
                break
        if retry_after_s and miss is not Miss.NO_ROOM:
            return Pulled(None, miss=Miss.BUSY, retry_after_s=retry_after_s)
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
        started_s = self._loop.time()
        leave: Leave | Refusal | None = None
        slot: Slot | None = None
        encoded: memoryview | None = None
        pull: Pull | None = None
        early: bytes | None = None
        meter = self._costs.meter(transport.name, peer.name)
        try:
            idle = not meter.period.active
            # Asked of the transport as well as of the holder, whose bytes then come right behind its leave.
            pace_s = self._costs.rate(transport.name, peer.name).at(started_s)[1]
            codecs = self._coder.taken(transport.name, peer.name, pace_s)
            early = transport.ask_early(peer, body.nbytes) if not codecs else None
            leave = await self.leaves.ask(peer, transport.name, body, answer_by_s, early or NO_TOKEN, codecs)
            if isinstance(leave, Refusal):
                return Pulled(None, peer.name, transport.name, leave.miss, 0.0, leave.retry_after_s)
            ticket, checksums, coding = leave
            # A ticket behind other bytes waits for those, and one from NVMe for the holder's disk.
            if idle and not meter.period.active and tier is not Tier.NVME:
                meter.opened(self._loop.time() - started_s, self._loop.time())
            if coding is not None:
                encoded = self.inbox.take(coding.nbytes)
                if encoded is None:
                    return Pulled(None, peer.name, transport.name, Miss.BUSY, 0.0, RETRY_INBOX_S)
            # After the holder's leave, so that nothing of ours goes for a body that does not come.
            slot = await self._residency.reserve(body, peer.name)
            dest = self._residency.slab.view(slot.offset, slot.nbytes)
            async with asyncio.timeout_at(deadline_s):
                with _Metered(meter, body.nbytes, ticket.nbytes, self._loop.time) as metered:
                    into = dest if encoded is None else encoded
                    pull = metered.pull = transport.pull(peer, ticket, into, metered.progress)
                    await pull.done
                    metered.progress(ticket.nbytes)  # the end needs no report
                if coding is not None and encoded is not None:
                    record = Record(body, checksums, ticket.meta)
                    await self._coder.unpack("wire", coding, encoded, record, dest)
            slot = self._residency.commit(slot, checksums, ticket.meta, replica=True)
        except BaseException as error:
            if pull is not None:
                pull.abandon()
            if slot is not None:  # what comes encoded does not come into the slot
                self._residency.give_up(slot, None if pull is None or encoded is not None else pull.settled)
            # Of a deadline that was shorter nobody can say that it was let pass, however late we are.
            waited_s = min(self._loop.time(), deadline_s) - started_s if meter.came_s <= started_s else 0.0
            if isinstance(error, asyncio.CancelledError) and self._loop.time() >= deadline_s:
                self._note_silence(peer, waited_s)  # the caller's deadline is ours, and may strike first
            miss = self._why(error, peer, transport, waited_s)
            if miss is None:
                raise
            return Pulled(None, peer.name, transport.name, miss)
        finally:
            if early is not None:
                transport.forget_early(early)
            if isinstance(leave, Leave):
                self.leaves.give_back(peer, leave.ticket.token)
            if encoded is not None:
                self.inbox.give_back(encoded.nbytes, None if pull is None else pull.settled)
        seconds = self._loop.time() - started_s
        meter.brought(seconds)
        self._counters[f"pulls_{transport.name}"] += 1
        return Pulled(slot, peer.name, transport.name, None, seconds)

    def _why(self, error: BaseException, peer: Member, transport: Transport, waited_s: float) -> Miss | None:
        """A fault as a reason; None for what is not a fault of the way or the peer.

        waited_s: how long nothing had come from the peer by this way.
        """
        if isinstance(error, TierFull):
            return Miss.NO_ROOM
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
            self._note_silence(peer, waited_s)
            return Miss.DEADLINE
        if isinstance(error, RemoteError):
            return Miss.HOLDER_UNREACHABLE
        return None

    def _note_silence(self, peer: Member, waited_s: float) -> None:
        if waited_s >= self._config.silent_after_s:  # a caller in a hurry says nothing about the peer
            until_s = self._loop.time() + self._config.silent_retry_s
            self._silent[peer.name, peer.incarnation] = until_s

    async def close(self) -> None:
        self.leaves.close()


class _Metered:
    """Tells a meter of the bytes of one pull as they come, and in the end of those that did not.

    An encoded body counts as what it is raw: how soon a body is here is what the planner wants to know.
    """

    def __init__(self, meter: Meter, raw_bytes: int, moved_bytes: int, clock: Callable[[], float]):
        self._meter = meter
        self._raw_bytes = raw_bytes
        self._moved_bytes = max(moved_bytes, 1)
        self._clock = clock
        self._arrived = 0
        self.pull: Pull | None = None

    def progress(self, moved_bytes: int) -> None:
        nbytes = moved_bytes * self._raw_bytes // self._moved_bytes
        if nbytes > self._arrived:
            self._meter.came(nbytes - self._arrived, self._clock())
            self._arrived = nbytes

    def __enter__(self) -> _Metered:
        self._meter.begin(self._clock())
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        late = kind is not None and issubclass(kind, TimeoutError | asyncio.CancelledError)
        if late:
            self.progress(getattr(self.pull, "landed_bytes", 0))
        missing = self._raw_bytes - self._arrived
        self._meter.end(self._clock(), lost=missing if late else 0, fault=missing > 0 and not late)
