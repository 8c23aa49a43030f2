"""Encoding and decoding off the loop, in a few threads of their own, and what it brought.

Places are where encoded bytes go to and come from: `nvme` and `wire`.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from p2pcache import codecs
from p2pcache.config import NodeConfig
from p2pcache.core.coding import Coding
from p2pcache.types import BodyInfo, NodeDown

T = TypeVar("T")


@dataclass(slots=True)
class _Tally:
    """Of one place, codec and direction. error: the worst channel's of any body."""

    bodies: int = 0
    raw_bytes: int = 0
    encoded_bytes: int = 0
    error: float = 0.0

    def add(self, raw_bytes: int, encoded_bytes: int, error: float = 0.0) -> None:
        self.bodies += 1
        self.raw_bytes += raw_bytes
        self.encoded_bytes += encoded_bytes
        self.error = max(self.error, error)


class Coder:
    """A node's codecs. Buffers given to it are the caller's again when a call ends, also by cancellation."""

    def __init__(self, config: NodeConfig):
        self._saving_min = config.codec_saving_min
        self._pool = ThreadPoolExecutor(config.codec_workers, thread_name_prefix="p2pcache-codec")
        self._tallies: dict[tuple[str, str, str], _Tally] = defaultdict(_Tally)
        self._kept_raw: Counter[tuple[str, str]] = Counter()
        self._closed = False

    async def pack(
        self, place: str, codec: str, raw: memoryview, body: BodyInfo, checksums: tuple[int, ...]
    ) -> codecs.Packed | None:
        """The encoded body in memory of its own; None where it is better kept raw. checksums: of `raw`."""
        saving_min = self._saving_min
        packed = await self._run(lambda: codecs.pack(codec, raw, body, len(checksums), saving_min=saving_min))
        if isinstance(packed, str):
            self._kept_raw[place, packed] += 1
            return None
        self._tallies[place, codec, "encode"].add(body.nbytes, packed.coding.nbytes, packed.error)
        return packed

    async def unpack(
        self,
        place: str,
        coding: Coding,
        encoded: memoryview,
        body: BodyInfo,
        checksums: tuple[int, ...],
        dest: memoryview,
    ) -> None:
        """Decode into `dest` and check the raw checksums. Raises CorruptBody; see `codecs.unpack`."""
        await self._run(lambda: codecs.unpack(coding, encoded, body, checksums, dest))
        self._tallies[place, coding.codec, "decode"].add(body.nbytes, coding.nbytes)

    def kept_raw(self, place: str, reason: str) -> None:
        """Count a body that somebody did not even try to encode."""
        self._kept_raw[place, reason] += 1

    def plain(self) -> dict[str, Any]:
        """What it brought, for people: rows of plain values."""
        return {
            "coded": [
                {
                    "tier": place,
                    "codec": codec,
                    "direction": direction,
                    "bodies": tally.bodies,
                    "raw_bytes": tally.raw_bytes,
                    "encoded_bytes": tally.encoded_bytes,
                    "error": tally.error,
                }
                for (place, codec, direction), tally in sorted(self._tallies.items())
            ],
            "kept_raw": [
                {"tier": place, "reason": reason, "bodies": count}
                for (place, reason), count in sorted(self._kept_raw.items())
            ],
        }

    async def _run(self, work: Callable[[], T]) -> T:
        """`work()` on the pool. If cancelled: wait until it has let go of its buffers (law 5)."""
        if self._closed:
            raise NodeDown("this node's codecs have been closed")
        running = asyncio.get_running_loop().run_in_executor(self._pool, work)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            while not running.done():
                try:
                    await asyncio.wait([running])
                except asyncio.CancelledError:
                    continue
            if not running.cancelled():
                running.exception()  # seen: the cancellation is what the caller gets
            raise

    async def close(self) -> None:
        """Wait for what is under way. Idempotent."""
        self._closed = True
        await asyncio.to_thread(self._pool.shutdown)
