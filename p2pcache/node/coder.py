"""Encoding and decoding off the loop, in a few threads of their own, and what it brought.

Places are where encoded bytes go to and come from: `nvme` and `wire`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from p2pcache import codecs
from p2pcache.config import NodeConfig
from p2pcache.core.checksum import checksum_body
from p2pcache.core.coding import EXACT_CODECS, Coding, layout_of
from p2pcache.core.histogram import Histogram
from p2pcache.core.keys import CHAIN_ROOT
from p2pcache.core.nvmelog import Record
from p2pcache.core.wirechoice import WireChoice
from p2pcache.types import BodyInfo, ContentKey, NodeDown

T = TypeVar("T")

WIRE_CODEC = "lossless"
"""The one that acts on the wire: a reader gets the very body that it asked for."""
LINES_MAX = 4096
_SMOOTHING = 0.2
_RATIO = 0.75  # of encoded bytes to raw ones, before a body has come
_TRIAL_TOKENS, _TRIAL_VALUES = 1024, 1024  # a body of 2 MiB, on which speed is measured before there is one
ERROR_BOUNDS = tuple(float(f"{digit}e{power}") for power in range(-4, 0) for digit in (1, 2.5, 5)) + (1.0,)
"""Of the histogram of errors: three buckets a decade from 0.01 % to 100 %."""


@dataclass(slots=True)
class _Tally:
    """Of one place, codec and direction. seconds: that threads were at it."""

    bodies: int = 0
    raw_bytes: int = 0
    encoded_bytes: int = 0
    seconds: float = 0.0

    def add(self, raw_bytes: int, encoded_bytes: int, seconds: float) -> None:
        self.bodies += 1
        self.raw_bytes += raw_bytes
        self.encoded_bytes += encoded_bytes
        self.seconds += seconds


@dataclass(slots=True)
class _Pace:
    """Seconds a raw byte, of late; None before anything was measured."""

    seconds: float | None = None

    def add(self, seconds: float) -> None:
        before = seconds if self.seconds is None else self.seconds
        self.seconds = before + _SMOOTHING * (seconds - before)


@dataclass(slots=True)
class _Errors:
    """The worst channel's of each body that one codec encoded for one place, used or not."""

    histogram: Histogram = field(default_factory=lambda: Histogram(ERROR_BOUNDS))
    worst: float = 0.0

    def add(self, error: float | None) -> None:
        if error is not None and math.isfinite(error):
            self.histogram.observe(error)
            self.worst = max(self.worst, error)


class Coder:
    """A node's codecs. Buffers given to it are the caller's again when a call ends, also by cancellation."""

    def __init__(self, config: NodeConfig):
        self._saving_min = config.codec_saving_min
        self._error_max = config.codec_error_max
        self._pool = ThreadPoolExecutor(config.codec_workers, thread_name_prefix="p2pcache-codec")
        self._tallies: dict[tuple[str, str, str], _Tally] = defaultdict(_Tally)
        self._errors: dict[tuple[str, str], _Errors] = defaultdict(_Errors)
        self._kept_raw: Counter[tuple[str, str]] = Counter()
        self._wire_codec = config.wire_codec
        self._wire: dict[tuple[str, str], WireChoice] = {}  # (transport, peer) -> ...
        self._wire_ratio = _RATIO
        self._encode, self._decode = _Pace(), _Pace()  # by WIRE_CODEC
        self._trial: asyncio.Task[None] | None = None
        self._closed = False

    async def pack(self, place: str, codec: str, raw: memoryview, record: Record) -> codecs.Packed | None:
        """The encoded body in memory of its own; None where it is better kept as it is.

        record: of the body as it is. What a lossy codec makes is another one, see `Packed.body`. Raises
        CorruptBody where `raw` is not what the record says.
        """
        packed, seconds = await self._run(lambda: self._pack(codec, raw, record))
        self._errors[place, codec].add(packed.error)
        if isinstance(packed, codecs.Kept):
            self._kept_raw[place, packed.reason] += 1
            return None
        self._tallies[place, codec, "encode"].add(record.body.nbytes, packed.coding.nbytes, seconds)
        if codec == WIRE_CODEC:
            self._encode.add(seconds / record.body.nbytes)
        return packed

    def _pack(self, codec: str, raw: memoryview, record: Record) -> codecs.Packed | codecs.Kept:
        body, sums = record.body, record.checksums
        if codec in EXACT_CODECS:
            return codecs.pack(codec, raw, body, sums, saving_min=self._saving_min)
        layout = layout_of(body, len(sums), record.meta)
        if layout is None:
            return codecs.Kept("shape")
        bounds = {"error_max": self._error_max, "saving_min": self._saving_min}
        return codecs.pack_lossy(codec, raw, body, sums, layout, **bounds)

    async def unpack(
        self, place: str, coding: Coding, encoded: memoryview, record: Record, dest: memoryview
    ) -> None:
        """Decode into `dest` and check it by the record's raw checksums. Raises CorruptBody.

        record: of the body as it is raw. See `codecs.unpack`.
        """
        body, sums = record.body, record.checksums
        layout = layout_of(body, len(sums), record.meta)
        _, seconds = await self._run(lambda: codecs.unpack(coding, encoded, body, sums, dest, layout))
        self._tallies[place, coding.codec, "decode"].add(body.nbytes, coding.nbytes, seconds)
        if coding.codec == WIRE_CODEC:
            self._decode.add(seconds / body.nbytes)
        if place == "wire":
            self._wire_ratio += _SMOOTHING * (coding.nbytes / body.nbytes - self._wire_ratio)

    # -- whether it pays on the wire -------------------------------------------------------------

    def taken(self, transport: str, peer: str, pace_s: float) -> tuple[str, ...]:
        """The codecs in which a peer may send now. Over shm, which copies from the slab itself, none.

        pace_s: what a raw byte takes to come from there, as measured. With `auto` a peer's encoder is taken
        to be as fast as this node's.
        """
        if self._wire_codec == "none" or transport == "shm":
            return ()
        if self._wire_codec == "auto" and not self._pays(transport, peer, pace_s):
            return ()
        return (WIRE_CODEC,)

    def _pays(self, transport: str, peer: str, pace_s: float) -> bool:
        encode_s, decode_s = self._encode.seconds, self._decode.seconds
        if encode_s is None or decode_s is None:
            if self._trial is None and not self._closed:
                self._trial = asyncio.get_running_loop().create_task(self._try_out())
            return False
        choice = self._wire.get((transport, peer))
        if choice is None:
            while len(self._wire) >= LINES_MAX:
                del self._wire[next(iter(self._wire))]
            choice = self._wire[transport, peer] = WireChoice()
        return choice.update(pace_s, self._wire_ratio, max(encode_s, decode_s))

    async def _try_out(self) -> None:
        """Measure this host's speed once, on values of a body's kind, where no body has shown it yet."""
        try:
            (raw, body, sums), _ = await self._run(_trial_body)
            dest = codecs.page_aligned(body.nbytes)
            for timed in (False, True):  # the first time memory is new, which says nothing of the codec
                packed, encode_s = await self._run(
                    lambda: codecs.pack(WIRE_CODEC, raw, body, sums, saving_min=0.0)
                )
                assert isinstance(packed, codecs.Packed)
                _, decode_s = await self._run(
                    lambda packed=packed: codecs.unpack(packed.coding, packed.data, body, sums, dest)
                )
                if timed:
                    self._encode.add(encode_s / body.nbytes)
                    self._decode.add(decode_s / body.nbytes)
        except NodeDown:
            pass

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
                    "seconds": tally.seconds,
                }
                for (place, codec, direction), tally in sorted(self._tallies.items())
            ],
            "errors": [
                {"tier": place, "codec": codec, "worst": errors.worst, **errors.histogram.plain()}
                for (place, codec), errors in sorted(self._errors.items())
                if errors.histogram.count
            ],
            "wire": [
                {"way": way, "peer": peer, "encoded": choice.encoded}
                for (way, peer), choice in sorted(self._wire.items())
            ],
            "kept_raw": [
                {"tier": place, "reason": reason, "bodies": count}
                for (place, reason), count in sorted(self._kept_raw.items())
            ],
        }

    async def _run(self, work: Callable[[], T]) -> tuple[T, float]:
        """`(work(), its seconds)` on the pool. If cancelled: wait until it has let go of buffers (law 5)."""
        if self._closed:
            raise NodeDown("this node's codecs have been closed")

        def timed() -> tuple[T, float]:
            started_s = time.perf_counter()
            return work(), time.perf_counter() - started_s

        job = self._pool.submit(timed)
        running = asyncio.wrap_future(job)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            if job.cancel():
                raise  # it never began: nothing has touched the buffers
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
        if self._trial is not None:
            await asyncio.gather(self._trial, return_exceptions=True)
        await asyncio.to_thread(self._pool.shutdown)


def _trial_body() -> tuple[memoryview, BodyInfo, tuple[int, ...]]:
    """Noise in bfloat16, whose exponents spread as those of KV do, as a body of one layer."""
    values = np.random.default_rng(0).standard_normal(_TRIAL_TOKENS * _TRIAL_VALUES, np.float32)
    raw = memoryview((values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8))
    body = BodyInfo(ContentKey(CHAIN_ROOT), CHAIN_ROOT, _TRIAL_TOKENS, raw.nbytes)
    return raw, body, checksum_body(raw, body.exact, 1)
