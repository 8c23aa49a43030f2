"""Bodies encoded for peers: each once, kept while there is room, since who was asked once is asked again.

A parcel stays as long as a ticket for it is open; of the others the one that was asked for longest ago goes
first. That a body is not worth encoding is remembered as well.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from dataclasses import dataclass

from p2pcache import codecs
from p2pcache.core.nvmelog import Record
from p2pcache.core.tiers import Slot
from p2pcache.io.ports import Slab
from p2pcache.node.coder import Coder
from p2pcache.types import ExactKey, P2PCacheError

_log = logging.getLogger(__name__)
PARCEL_BYTES, LAYER_BYTES = 2048, 112
"""What a parcel takes besides its bytes at most: a place in the table, and two checksums a layer."""
_Key = tuple[ExactKey, tuple[int, ...]]  # one exact key may come again with other bits


@dataclass(slots=True)
class Parcel:
    """An encoded body. packed: None while it is being made, and for good where it is better sent raw."""

    ready: asyncio.Future[None]
    nbytes: int  # counted towards the cap
    packed: codecs.Packed | None = None
    holds: int = 0


class Outbox:
    """Belongs to the node's loop."""

    def __init__(self, codec: str, coder: Coder, slab: Slab, bytes_max: int):
        self._codec = codec
        self._coder = coder
        self._slab = slab
        self._bytes_max = bytes_max
        self._parcels: OrderedDict[_Key, Parcel] = OrderedDict()
        self.nbytes = 0

    async def take(self, slot: Slot) -> Parcel | None:
        """A body's parcel, to be given back; None where it goes raw. The caller has leased `slot`."""
        key = slot.exact, slot.checksums
        parcel = self._parcels.get(key)
        first = parcel is None
        if parcel is None:
            nbytes = slot.nbytes + _overhead_bytes(slot)
            if not self._make_room(nbytes):
                self._coder.kept_raw("wire", "room")
                return None
            parcel = Parcel(asyncio.get_running_loop().create_future(), nbytes)
            self._parcels[key] = parcel
            self.nbytes += nbytes
        self._parcels.move_to_end(key)
        parcel.holds += 1
        try:
            if first:
                await self._fill(key, parcel, slot)
            else:
                await asyncio.wait([parcel.ready])
        except (P2PCacheError, MemoryError) as error:
            _log.warning("a body is sent as it is: %s", error)
        except BaseException:
            self.give_back(parcel)
            raise
        if parcel.packed is None:
            self.give_back(parcel)
            return None
        return parcel

    def give_back(self, parcel: Parcel) -> None:
        parcel.holds -= 1

    async def _fill(self, key: _Key, parcel: Parcel, slot: Slot) -> None:
        raw = self._slab.view(slot.offset, slot.nbytes)
        try:
            record = Record(slot.body, slot.checksums, slot.meta)
            packed = await self._coder.pack("wire", self._codec, raw, record)
        except BaseException:
            del self._parcels[key]  # those who wait for it send raw; the next one tries again
            self.nbytes -= parcel.nbytes
            raise
        else:
            parcel.packed = packed
            nbytes = _overhead_bytes(slot) + (0 if packed is None else packed.coding.nbytes)
            self.nbytes += nbytes - parcel.nbytes
            parcel.nbytes = nbytes
        finally:
            parcel.ready.set_result(None)

    def _make_room(self, nbytes: int) -> bool:
        """Drop what nobody reads, oldest first, until so much fits under the cap. False: it does not."""
        while self.nbytes + nbytes > self._bytes_max:
            oldest = next((key for key, parcel in self._parcels.items() if not parcel.holds), None)
            if oldest is None:
                return False
            self.nbytes -= self._parcels.pop(oldest).nbytes
        return True


def _overhead_bytes(slot: Slot) -> int:
    return PARCEL_BYTES + LAYER_BYTES * len(slot.checksums)
