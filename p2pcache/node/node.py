"""One node of the mesh: `lookup`, `fetch` and `store`, each readable top to bottom.

It runs on its own event loop (never Ray's) over the ports of `io/ports.py` alone, so the simulator
can run it whole. All its state belongs to that loop; engines and peers come in as coroutines.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

import numpy as np

from p2pcache.config import NodeConfig
from p2pcache.core.checksum import CorruptBody
from p2pcache.core.flight import Waiting
from p2pcache.core.membership import Member, View
from p2pcache.core.nvmelog import Record
from p2pcache.core.planner import Costs
from p2pcache.core.plans import Tally
from p2pcache.core.records import Bodies
from p2pcache.core.tiers import Slot
from p2pcache.io.ports import Control, Lookups, NvmeTier, Slab, Transport
from p2pcache.node.coder import Coder
from p2pcache.node.counters import Counters
from p2pcache.node.drain import Heir, hand_over
from p2pcache.node.fence import Fence
from p2pcache.node.gather import Known
from p2pcache.node.holder import Holder as PeerDesk
from p2pcache.node.home import Home
from p2pcache.node.namespaces import Namespaces
from p2pcache.node.owners import Owners
from p2pcache.node.peers import Peers
from p2pcache.node.publisher import Publisher
from p2pcache.node.puller import Puller
from p2pcache.node.residency import Residency
from p2pcache.node.session import Session
from p2pcache.node.shard import Shard
from p2pcache.node.sight import Sight
from p2pcache.types import (
    BodyInfo,
    ContentKey,
    ExactKey,
    Found,
    Holder,
    LayoutError,
    Miss,
    RemoteError,
    Source,
    Tier,
    TierFull,
)

_log = logging.getLogger(__name__)
_SWEEP_S = 1.0
FETCH_BYTES = 4096
"""What a chunk that is being fetched takes of this process's memory at most: its task, timers and names."""


@dataclass(frozen=True)
class Ports:
    """What a node is wired to. The node starts none of it and closes none of it."""

    control: Control
    lookups: Lookups
    slab: Slab
    transports: list[Transport]
    nvme: NvmeTier | None = None


class Grant(NamedTuple):
    """What a fetch brought for one chunk: a leased slot, or the reason of the miss."""

    slot: Slot | None
    source: Source
    peer: str = ""
    transport: str = ""
    miss: Miss | None = None
    seconds: float = 0.0


class Node:
    """Tiers, shard and transfers of one node. Build it on its loop; `start`, then `apply_view`."""

    def __init__(
        self,
        config: NodeConfig,
        name: str,
        incarnation: int,
        ports: Ports,
        rng: Random,
        member: Callable[[], Member],
    ):
        """member: how this node describes itself, once its sockets are bound."""
        self.member = member
        self.on_hello: Callable[[Member], None] = lambda stranger: None
        self.config = config
        self.name = name
        self.incarnation = incarnation
        self.ports = ports
        self.counters = Counters()
        self.costs = Costs()
        self.view = View()
        self._loop = asyncio.get_running_loop()
        clock = self._loop.time
        self.sight = Sight(clock)
        me = Holder(name, incarnation, Tier.HOST)
        self.coder = Coder(config)
        self.residency = Residency(config, me, ports.slab, ports.nvme, self.counters, self.coder, clock)
        self.shard = Shard(name, config, clock)
        self.shard.on_unknown_until = ports.lookups.unknown_until
        self.publisher = Publisher(
            config, ports.control, self.shard, self.counters, rng, self.residency.holdings
        )
        self.residency.on_held = self.publisher.held
        self.residency.on_gone = self.publisher.gone
        self.puller = Puller(
            config, ports.control, ports.transports, self.residency, self.coder, self.costs, self.counters
        )
        self.waiting = Waiting(config.fetch_queue_bytes_max, FETCH_BYTES)
        self.desk = PeerDesk(config, self.residency, self.coder, self.counters)
        self.heirs = Heir(self.residency, self.puller)
        self.owners = Owners(ports.lookups, self.shard, self.counters)
        self.home = Home(name, incarnation, self.residency, self.costs, self.counters, self.sight, clock)
        self.fence = Fence(config.contact_lost_s, clock)
        self.publisher.on_fenced = self.fence.told_off
        self.publisher.cut_off = lambda: self.fence.cut_off
        self.absent: dict[str, str] = {}  # hosts without a node in the mesh, and why
        self.draining = False
        self.sessions: set[Session] = set()
        self.namespaces = Namespaces(ports.control)
        self.peers = Peers(self)
        self._housekeeper: asyncio.Task | None = None

    def start(self) -> None:
        self.publisher.start()
        self._housekeeper = self._loop.create_task(self._keep_house())

    async def close(self) -> None:
        """Stop all work of the node's own. Sessions end with their sockets."""
        if self._housekeeper is not None:
            self._housekeeper.cancel()
            await asyncio.gather(self._housekeeper, return_exceptions=True)
        await self.puller.close()
        await self.residency.close()
        await self.publisher.close()
        await self.coder.close()

    @property
    def now_s(self) -> float:
        """The loop's clock, on which all deadlines are."""
        return self._loop.time()

    @property
    def others(self) -> list[Member]:
        """The members but this node."""
        return [m for m in self.view.members.values() if m.name != self.name]

    def contact(self) -> None:
        """The supervisor spoke to this node, so it is a member."""
        self.fence.contact()
        self.publisher.look_again()

    def apply_view(self, view: View) -> None:
        """The mesh has changed. A View without this very incarnation is not ours to follow (law 6)."""
        if view.view_id == self.view.view_id:
            return
        if not view.has(self.name, self.incarnation):
            _log.warning("a View without this incarnation was ignored")
            return
        self.view = view
        self.puller.view = self.owners.view = view
        self.fence.on_view(view)
        self.costs.keep(view.members)
        self.shard.on_view(view)
        self.ports.lookups.follow(view, self.fence.past)
        self.publisher.on_view(view)

    # -- lookup ----------------------------------------------------------------------------------

    async def lookup(
        self,
        keys: bytes,
        chunks: Sequence[tuple[ContentKey, ExactKey]],
        *,
        content_reuse: bool,
        everywhere: bool,
        deadline_s: float,
        starts: np.ndarray,
        bytes_by_s: float = float("inf"),
    ) -> dict[str, Any]:
        """Find the chunks of a prompt and plan where each comes from; the reply of `core/records.py`.

        keys: content and exact key of each chunk, joined; chunks: the same one by one. starts: int64
        `[chunks]`, where each begins in the prompt, in tokens. content_reuse: accept bodies computed behind
        other tokens. everywhere: ask the owners even where this node has the exact body. deadline_s: on the
        loop's clock; owners that have not answered by then count as misses with that reason. bytes_by_s: on
        the same clock, until when the bytes must be here; what is not expected by then is planned as a
        miss.
        """
        started_s = self._loop.time()
        self.counters["lookups"] += 1
        self.counters["chunks"] += len(chunks)
        # 1. Our own tiers. A body that is here whole and exact needs no directory.
        contents = dict.fromkeys([content for content, _ in chunks])
        home = self._at_home(contents)
        if home and not everywhere:
            here = {f.body.exact for found in home.values() for f in found}
            contents = dict.fromkeys([c for c, e in chunks if e not in here])
        ask = list(contents)
        # 2. The owners: one request each, all in parallel, the whole prompt at once.
        heard, absent = await self.owners.ask(b"".join(ask), deadline_s)
        # 3. The plan.
        now_s = self._loop.time()
        known = Known(self.name, keys, chunks, starts, home, ask, heard, absent)
        tally, reply = known.planned(
            ways={p.name: ways[0].name for p in self.view.members.values() if (ways := self.puller.ways(p))},
            busy_bytes=self.puller.flights.bytes_by_peer(),
            costs=self.costs,
            content_reuse=content_reuse,
            now_s=now_s,
            within_s=bytes_by_s - now_s,
        )
        self._count(tally, now_s - started_s)
        return reply

    def _at_home(self, contents: Iterable[ContentKey]) -> dict[ContentKey, list[Found]]:
        """What this node has under content keys; only of those of which it has anything."""
        if not self.residency.has_nvme:
            here = self.residency.tier.contents
            contents = [c for c in contents if c in here]
        return {c: found for c in contents if (found := self.residency.find(c))}

    def _count(self, tally: Tally, seconds: float) -> None:
        for (match, _), count in tally.hits.items():
            self.counters[f"hits_{match}"] += count
        for miss, count in tally.misses.items():
            self.counters[f"miss_{miss}"] += count
        self.sight.looked_up(tally, seconds)

    # -- fetch -----------------------------------------------------------------------------------

    async def fetch(self, session: Session, wants: Bodies, deadline_s: float) -> list[Slot | Grant]:
        """Have bodies in this node's slab, leased to the engine. Never raises for a fault.

        What lay in the host tier anyhow comes as its slot, everything else as a grant. Raises RemoteError
        where `wants` is no table of bodies.
        """
        started_s = self._loop.time()
        # 1. What the host tier has, at once.
        at_home = self.home.lease(session, wants)
        slots = [slot for slot in at_home if slot is not None]
        seconds = self._loop.time() - started_s
        self.counters["served_local"] += len(slots)
        self.counters["bytes_local"] += sum([slot.nbytes for slot in slots])
        self._loop.call_soon(self.sight.fetched_at_home, slots, seconds)  # behind the answer
        if len(slots) == len(at_home):
            return list(slots)
        # 2. Everything else, all in parallel.
        try:
            found = wants.found()
        except RemoteError:
            for slot in slots:
                session.release(slot.generation)
            raise
        rest = [f for f, slot in zip(found, at_home, strict=True) if slot is None]
        brought = await asyncio.gather(
            *(self._fetch_one(session, f.body, f.holders, deadline_s) for f in rest), return_exceptions=True
        )
        broken = [g for g in brought if isinstance(g, BaseException)]
        if broken:  # a fault of our own: the engine gets none of it, and must not be left with leases
            kept = [g.slot for g in brought if isinstance(g, Grant) and g.slot is not None]
            for slot in [*slots, *kept]:
                session.release(slot.generation)
            raise broken[0]
        seconds = self._loop.time() - started_s
        self.sight.fetched([f.body for f in rest], brought, seconds, chunks=wants.count)
        there = iter(brought)
        return [next(there) if slot is None else slot for slot in at_home]

    def refuse(self, count: int) -> Grant:
        """The answer to as many chunks that were asked for beyond the limit on memory."""
        grant = Grant(None, Source.RECOMPUTE, miss=Miss.BUSY)
        if count:
            self.counters[f"miss_{Miss.BUSY}"] += count
            self.sight.refused(count, Miss.BUSY)
        return grant

    async def _fetch_one(
        self, session: Session, body: BodyInfo, holders: tuple[Holder, ...], deadline_s: float
    ) -> Grant:
        grant = await self._bring(body, holders, deadline_s)
        if grant.slot is not None:
            try:
                session.adopt(grant.slot)
            except TierFull:
                grant = Grant(None, grant.source, miss=Miss.BUSY)
        if grant.miss is not None:
            self.counters[f"miss_{grant.miss}"] += 1
        else:
            self.counters[f"served_{grant.source}"] += 1
            self.counters[f"bytes_{grant.source}"] += body.nbytes
        return grant

    async def _bring(self, body: BodyInfo, holders: tuple[Holder, ...], deadline_s: float) -> Grant:
        """A leased slot with the body, from the nearest place, or a reason."""
        started_s = self._loop.time()
        source, peer, transport = Source.LOCAL, "", ""
        remote = tuple(h for h in holders if h.node != self.name)
        for attempt in range(2):
            # 1. Here already, or one tier down.
            try:
                async with asyncio.timeout_at(deadline_s):
                    with self._measured_disk(body):
                        got = await self.residency.lease(body.exact)
            except TimeoutError:
                return Grant(None, source, miss=Miss.DEADLINE)
            except TierFull:
                return Grant(None, source, miss=Miss.NO_ROOM)
            except CorruptBody:
                got = None  # dropped and counted; a peer may have a sound copy
            if got is not None:
                slot, tier = got
                if slot.body != body:  # what the asker was told of it is not what it is
                    self.residency.tier.release(slot)
                    return Grant(None, source, peer, transport, Miss.LAYOUT)
                if tier is Tier.NVME and source is Source.LOCAL:
                    source = Source.NVME
                    self.costs.meter("nvme").brought(self._loop.time() - started_s)
                return Grant(slot, source, peer, transport, None, self._loop.time() - started_s)
            # 2. A peer. What it brings is committed here, so the next turn finds it at hand.
            if attempt or not remote:
                break
            pulled = await self.puller.pull(body, remote, deadline_s)
            if pulled.slot is None:
                return Grant(None, Source.PEER, pulled.peer, pulled.transport, pulled.miss)
            source, peer, transport = Source.PEER, pulled.peer, pulled.transport
        return Grant(None, source, miss=Miss.HOLDER_GONE)

    @contextmanager
    def _measured_disk(self, body: BodyInfo) -> Iterator[None]:
        """Around a lease: tells the planner how fast bodies come up from this node's NVMe tier."""
        if self.residency.where(body.exact) is not Tier.NVME:
            yield
            return
        disk, lost, fault = self.costs.meter("nvme"), 0, True
        disk.begin(self._loop.time())
        try:
            yield
            disk.came(body.nbytes, self._loop.time())
            fault = False
        except (TimeoutError, asyncio.CancelledError):
            lost, fault = body.nbytes, False
            raise
        finally:
            disk.end(self._loop.time(), lost=lost, fault=fault)

    # -- store -----------------------------------------------------------------------------------

    async def reserve(
        self, session: Session, bodies: Sequence[BodyInfo], deadline_s: float
    ) -> list[Slot | str]:
        """Slots for an engine to write into; `resident` or a reason where there is none to write."""
        out: list[Slot | str] = []
        for body in bodies:
            await asyncio.sleep(0)  # finding room may take a while without ever waiting: others have a turn
            if self._loop.time() >= deadline_s:
                out.append(Miss.DEADLINE.value)
                continue
            if self.residency.where(body.exact) is not None:
                out.append("resident")
                continue
            try:
                async with asyncio.timeout_at(deadline_s):
                    slot = await self.residency.reserve(body, session.name)
            except TimeoutError:
                out.append(Miss.DEADLINE.value)
            except TierFull:
                out.append(Miss.NO_ROOM.value)
            else:
                session.write(slot)
                out.append(slot)
        self.sight.reserved(out)
        return out

    def commit(self, session: Session, generation: int, checksums: tuple[int, ...], meta: bytes) -> bool:
        """An engine's bytes are whole: serve and publish them. False where it had no such slot."""
        slot = session.written(generation)
        if slot is None:
            return False
        try:
            Record(slot.body, checksums, meta)
        except LayoutError as error:  # no tier below could keep it, and no peer check it
            _log.warning("an engine's body was refused: %s", error)
            self.residency.tier.abort(slot)
            return False
        self.residency.commit(slot, checksums, meta)
        self.counters["stored"] += 1
        return True

    def abort(self, session: Session, generation: int) -> None:
        """An engine gave up a slot and will not write to it again."""
        slot = session.written(generation)
        if slot is not None:
            self.residency.tier.abort(slot)

    def pin(self, exact: ExactKey, ttl_s: float) -> bool:
        """Keep a body of the host tier from eviction for a while."""
        return self.residency.tier.pin(exact, self._loop.time() + ttl_s)

    # -- sessions --------------------------------------------------------------------------------

    def open_session(self) -> Session:
        session = Session(self.residency.tier, self.config.client_leases_max)
        self.sessions.add(session)
        return session

    def end_session(self, session: Session) -> None:
        self.sessions.discard(session)
        session.end()

    # -- leaving ---------------------------------------------------------------------------------

    async def drain(self, budget_s: float) -> dict[str, int]:
        """Hand the hottest bodies to peers before this node leaves. It goes on answering everybody.

        Returns counts: `bodies` and `bytes` that peers took over, `left` behind for want of time or room.
        """
        self.draining = True
        hottest_first = [slot.body for slot in reversed(list(self.residency.tier.resident()))]
        by_s = self._loop.time() + budget_s
        handed = await hand_over(hottest_first, self.name, self.view, self.ports.control, by_s)
        return handed | {"left": sum(1 for _ in self.residency.holdings()) - handed["bodies"]}

    def stay(self) -> None:
        """The drain has been called off."""
        self.draining = False

    async def quiet(self, budget_s: float) -> bool:
        """Wait until no peer reads from this node. False where one still did at the end."""
        return await self.desk.office.empty(budget_s)

    # -- housekeeping ----------------------------------------------------------------------------

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            try:
                self.publisher.look_again()
                self.desk.office.sweep()
                self.shard.sweep()
            except Exception:  # without this loop no ticket of a reader that died would ever end
                _log.exception("housekeeping met an error of its own; it goes on")
