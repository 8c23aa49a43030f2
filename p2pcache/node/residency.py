"""Both tiers of this node under one roof: make room, demote, promote; withdraw before reuse.

Bodies go down when the host tier fills: above a mark, cold ones are copied to the NVMe tier in the
background, so that making room later is a matter of forgetting and not of writing. They come up
again when somebody asks for them.

With a lossy codec what goes down is another body, with a key of its own. It stands in for the one that it was
made of: nobody is told of it before that one leaves the host tier.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator

from p2pcache.codecs import page_aligned
from p2pcache.config import NodeConfig
from p2pcache.core.admission import Admission
from p2pcache.core.checksum import CorruptBody
from p2pcache.core.coding import EXACT_CODECS, LOSSY_CODECS, may_be_lossy
from p2pcache.core.eviction import POLICIES
from p2pcache.core.keys import lossy_key
from p2pcache.core.nvmelog import Record
from p2pcache.core.tiers import HostTier, Slot
from p2pcache.io.ports import NvmeTier, Slab
from p2pcache.node.coder import Coder
from p2pcache.node.counters import Counters
from p2pcache.types import BodyInfo, ContentKey, ExactKey, Found, Holder, P2PCacheError, Tier, TierFull

_log = logging.getLogger(__name__)
_ROOM_TRIES = 3


class Residency:
    """The node's own bodies. Everything runs on the node's loop; bytes move in the shells."""

    def __init__(
        self,
        config: NodeConfig,
        me: Holder,
        slab: Slab,
        nvme: NvmeTier | None,
        counters: Counters,
        coder: Coder,
        clock: Callable[[], float],
    ):
        """me: this node as a holder (its tier is ignored)."""
        self.tier = HostTier(slab.nbytes, POLICIES[config.eviction], config.eviction_weighs_cost)
        self._me = me
        self.slab = slab
        self._nvme = nvme
        self._counters = counters
        self._coder = coder
        self._codec = config.nvme_codec
        self._lossy = config.nvme_codec in LOSSY_CODECS
        self._clock = clock
        self._demote_above_bytes = int(config.demote_above * self.tier.capacity_bytes)
        # Half of the NVMe tier's depth: reads, for which somebody waits, find the other half free.
        self._demotions_max = max(config.nvme_depth // 2, 1)
        # Encoded bodies lie in memory of their own on their way: so many each way, and no more.
        self._encoding = asyncio.Semaphore(self._demotions_max)
        self._decoding = asyncio.Semaphore(config.nvme_depth)
        self._admission = Admission(config.nvme_write_bytes_per_s_max, used_only=config.nvme_admit == "used")
        self._stand_ins: set[ExactKey] = set()  # in the NVMe tier, made of what is still in the host one
        self._promoting: dict[ExactKey, asyncio.Future[None]] = {}
        self._demoting: asyncio.Task | None = None
        self._demotions: set[asyncio.Future[None]] = set()  # writes to the NVMe tier under way
        self.on_held: Callable[[BodyInfo, Tier], None] = lambda body, tier: None
        self.on_gone: Callable[[BodyInfo], None] = lambda body: None

    @property
    def has_nvme(self) -> bool:
        return self._nvme is not None

    # -- what is here ----------------------------------------------------------------------------

    def where(self, exact: ExactKey) -> Tier | None:
        """The best tier that holds the body on this node."""
        if self.tier.get(exact) is not None:
            return Tier.HOST
        if self._nvme is not None and self._nvme.lookup(exact) is not None:
            return Tier.NVME
        return None

    def body(self, exact: ExactKey) -> BodyInfo | None:
        """What is known of a body of this node, in whatever tier; None where it is not here."""
        slot = self.tier.get(exact)
        if slot is not None:
            return slot.body
        record = self._nvme.lookup(exact) if self._nvme is not None else None
        return None if record is None else record.body

    def find(self, content: ContentKey) -> list[Found]:
        """Bodies of a content key on this node, each in its best tier."""
        bodies = {slot.body.exact: slot.body for slot in self.tier.by_content(content)}
        if self._nvme is not None:
            for record in self._nvme.by_content(content):
                if record.body.exact not in self._stand_ins:
                    bodies.setdefault(record.body.exact, record.body)
        return [Found(body, (self._here(exact),)) for exact, body in bodies.items()]

    def holdings(self) -> Iterator[tuple[BodyInfo, Tier]]:
        """Everything this node holds, best tier each."""
        seen = set(self._stand_ins)
        for slot in self.tier.resident():
            seen.add(slot.body.exact)
            yield slot.body, Tier.HOST
        if self._nvme is not None:
            for record in self._nvme.records():
                if record.body.exact not in seen:
                    yield record.body, Tier.NVME

    def tier_bytes(self) -> dict[str, dict[str, int]]:
        """Bytes taken and bytes there are, and whole bodies, by tier. For people."""
        host = self.tier
        tiers = {"host": {"used": host.taken_bytes, "capacity": host.capacity_bytes, "bodies": len(host)}}
        if self._nvme is not None:
            log = self._nvme.status()
            tiers["nvme"] = {
                "used": log["used_bytes"],
                "capacity": log["capacity_bytes"],
                "bodies": log["records"],
            }
        return tiers

    def _here(self, exact: ExactKey) -> Holder:
        return Holder(self._me.node, self._me.incarnation, self.where(exact) or Tier.HOST)

    # -- room ------------------------------------------------------------------------------------

    async def reserve(self, body: BodyInfo, owner: str) -> Slot:
        """A slot to write `body` into, evicting what is cold. Raises TierFull."""
        while (slot := self.tier.reserve(body, owner)) is None:
            victims = self.tier.victims(body.nbytes, self._clock())
            if not victims and self._demotions:  # leases of our own, which end soon
                await asyncio.wait(self._demotions, return_when=asyncio.FIRST_COMPLETED)
                continue
            if not victims:
                raise TierFull(
                    f"no room for {body.nbytes:,} bytes in one piece: too much of the"
                    f" {self.tier.capacity_bytes:,} bytes of the host tier is leased, pinned or being written"
                )
            await self._evict(victims)
        return slot

    def commit(
        self, slot: Slot, checksums: tuple[int, ...], meta: bytes = b"", replica: bool = False
    ) -> Slot:
        """The bytes are whole: serve them. Returns the slot that serves the body from now on.

        replica: a peer has the body too, so it may go before others.
        """
        serving = self.tier.commit(slot, checksums, meta, replica)
        if serving is slot:
            self._stand_ins.discard(slot.exact)
            self.on_held(slot.body, Tier.HOST)
            self._demote_soon()
        return serving

    def give_up(self, slot: Slot, settled: asyncio.Future[None] | None) -> None:
        """A pull into `slot` failed: free it now, or when nothing will write there any more (law 5).

        settled: None where nothing was ever to write there.
        """
        if settled is None or settled.done():
            self.tier.abort(slot)
            return
        self._counters["quarantined"] += 1
        self.tier.quarantine(slot)
        settled.add_done_callback(lambda _: self.tier.release_quarantine(slot))

    async def _evict(self, victims: list[Slot]) -> None:
        """Free slots, all or none; their bodies stay in the NVMe tier if there is one that takes them.

        All at once after the last write, so that nobody takes a part of the piece that they make.
        """
        for victim in victims:
            # It may have been leased, pinned, evicted by somebody else, or come again meanwhile.
            if not self._may_go(victim):
                return
            if self._nvme is not None and self._below(victim.exact) is None:
                if self._admits(victim):
                    await self._demote(victim)
                else:
                    self._counters["nvme_refused"] += 1
        if not all(map(self._may_go, victims)):
            return
        for victim in victims:
            self._tell_of_leaving(victim)
            self._counters["evicted"] += 1
            self.tier.evict(victim)

    def _tell_of_leaving(self, slot: Slot) -> None:
        """Before a slot is freed: that its body is gone, or is one tier down, or what was made of it."""
        below = self._below(slot.exact)
        if self._lossy:
            self._stand_ins.discard(lossy_key(slot.exact, self._codec))
        if below is not None and self.tier.get(below.body.exact) in (None, slot):
            self.on_held(below.body, Tier.NVME)
        if below is None or below.body.exact != slot.exact:
            self.on_gone(slot.body)

    def _below(self, exact: ExactKey) -> Record | None:
        """What the NVMe tier has of a body: itself, or what the lossy codec made of it."""
        if self._nvme is None:
            return None
        record = self._nvme.lookup(exact)
        if record is None and self._lossy:
            record = self._nvme.lookup(lossy_key(exact, self._codec))
        return record

    def _may_go(self, slot: Slot) -> bool:
        return self.tier.current(slot.exact, slot.generation) and not slot.held(self._clock())

    async def forget(self, exact: ExactKey) -> None:
        """Drop a body, and what lossy codecs made of it, from this node as far as nobody reads it.

        What stays is evicted in its time.
        """
        for name in (exact, *(lossy_key(exact, codec) for codec in LOSSY_CODECS)):
            await self._forget(name)

    async def _forget(self, exact: ExactKey) -> None:
        slot = self.tier.get(exact)
        record = self._nvme.lookup(exact) if self._nvme is not None else None
        if slot is not None and not slot.leases:
            self.on_gone(slot.body)
            self.tier.evict(slot)
        elif slot is None and record is not None:
            self.on_gone(record.body)
        self._stand_ins.discard(exact)
        if self._nvme is not None and record is not None:
            await self._nvme.drop(exact)

    # -- down ------------------------------------------------------------------------------------

    def _demote_soon(self) -> None:
        above = self.tier.taken_bytes > self._demote_above_bytes
        if self._nvme is not None and above and (self._demoting is None or self._demoting.done()):
            self._demoting = asyncio.get_running_loop().create_task(self._demote_cold())

    async def _demote_cold(self) -> None:
        """Copy the coldest bodies down until what is above the mark could be dropped at once."""
        excess = self.tier.taken_bytes - self._demote_above_bytes
        left = iter(self.tier.coldest(excess))

        async def lane() -> None:
            for slot in left:
                alive = self.tier.current(slot.body.exact, slot.generation)
                if alive and self._below(slot.exact) is None and self._admits(slot):
                    await self._demote(slot)

        await asyncio.gather(*(lane() for _ in range(self._demotions_max)))

    def _admits(self, slot: Slot) -> bool:
        return self._admission.admits(slot.nbytes, self._clock(), used=slot.used)

    async def _demote(self, slot: Slot) -> None:
        """Copy one body to the NVMe tier; where that fails the body is only less well kept."""
        assert self._nvme is not None
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._demotions.add(written)
        slot.leases += 1  # ours, for the time of the write; it is no use and leaves the order alone
        damaged = False
        try:
            record = Record(slot.body, slot.checksums, slot.meta)
            body = self.slab.view(slot.offset, slot.nbytes)
            if self._codec == "none":
                await self._write_down(record, body)
            else:
                record = await self._encode_down(record, body)
            if record.body.exact != slot.exact:
                self._stand_ins.add(record.body.exact)
            self._counters["demoted"] += 1
        except CorruptBody as error:
            damaged = True
            self._counters["corrupt"] += 1
            _log.warning("a body was found damaged in the host tier: %s", error)
        except (P2PCacheError, MemoryError) as error:
            _log.warning("a body was not demoted: %s", error)
        finally:
            self.tier.release(slot)
            if damaged and self._may_go(slot):
                self.on_gone(slot.body)
                self.tier.evict(slot)
            self._demotions.discard(written)
            written.set_result(None)

    async def _encode_down(self, record: Record, raw: memoryview) -> Record:
        """Write a body down as small as it may be. Returns what lies there: maybe another body made of it."""
        async with self._encoding:
            packed = None
            if self._lossy and may_be_lossy(record.body):
                packed = await self._coder.pack("nvme", self._codec, raw, record)
            if packed is None:  # what may not change, or would change too much, goes down as it is
                packed = await self._coder.pack("nvme", EXACT_CODECS[0], raw, record)
            if packed is not None:
                admitted = record.body.nbytes
                record, raw = Record(packed.body, packed.checksums, record.meta, packed.coding), packed.data
                self._admission.give_back(admitted - record.stored_bytes)
            await self._write_down(record, raw)
            return record

    async def _write_down(self, record: Record, body: memoryview) -> None:
        """Make room in the log, withdraw what goes for it, then write. Raises TierFull."""
        assert self._nvme is not None
        for attempt in range(_ROOM_TRIES):
            for gone in await self._nvme.make_room(record):
                self._counters["nvme_evicted"] += 1
                if gone.exact in self._stand_ins:  # nobody was told of it
                    self._stand_ins.discard(gone.exact)
                elif self.tier.get(gone.exact) is None:
                    self.on_gone(gone)
            try:
                await self._nvme.append(record, body)
                return
            except TierFull:  # another write may have taken the room that was made
                if attempt == _ROOM_TRIES - 1:
                    raise

    # -- up --------------------------------------------------------------------------------------

    async def lease(self, exact: ExactKey) -> tuple[Slot, Tier] | None:
        """A lease on a body of this node and the tier it came from; None where it is not here.

        One that is only in the NVMe tier is read up first. Raises TierFull, CorruptBody.
        """
        came_from = Tier.HOST
        while (slot := self.tier.lease(exact)) is None:
            if self._nvme is None or self._nvme.lookup(exact) is None:
                return None
            under_way = self._promoting.get(exact)
            if under_way is not None:
                await asyncio.wait([under_way])
            else:
                await self._promote(exact)
            came_from = Tier.NVME
        return slot, came_from

    async def _promote(self, exact: ExactKey) -> None:
        assert self._nvme is not None
        record = self._nvme.lookup(exact)
        if record is None:
            return
        done = self._promoting[exact] = asyncio.get_running_loop().create_future()
        slot = None
        try:
            slot = await self.reserve(record.body, "promotion")
            whole = await self._read_up(exact, self.slab.view(slot.offset, slot.nbytes))
            if whole is None:
                self.tier.abort(slot)
            else:
                self.commit(slot, whole.checksums, whole.meta)
        except BaseException as error:
            if slot is not None:
                self.tier.abort(slot)
            if isinstance(error, CorruptBody):
                self._counters["corrupt"] += 1
                self.on_gone(record.body)
            raise
        finally:
            del self._promoting[exact]
            done.set_result(None)

    async def _read_up(self, exact: ExactKey, dest: memoryview) -> Record | None:
        """Read a body into `dest`, and decode it where it is encoded. Raises CorruptBody.

        Store and coder let go of buffers before they return, even where they are cancelled.
        """
        assert self._nvme is not None
        record = self._nvme.lookup(exact)
        if record is None or record.coding is None:
            return await self._nvme.read_into(exact, dest)
        async with self._decoding:
            record = self._nvme.lookup(exact)  # again: it may have gone, or come back in another form
            if record is None or record.coding is None:
                return await self._nvme.read_into(exact, dest)
            encoded = page_aligned(record.stored_bytes)
            whole = await self._nvme.read_into(exact, encoded)
            if whole is None:
                return None
            try:
                await self._coder.unpack("nvme", record.coding, encoded, whole, dest)
            except CorruptBody:
                await self._nvme.drop(exact)
                raise
            return whole

    async def close(self) -> None:
        if self._demoting is not None:
            await asyncio.gather(self._demoting, return_exceptions=True)
