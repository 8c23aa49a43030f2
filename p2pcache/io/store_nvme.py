"""The NVMe tier: a directory of preallocated segment files, written and read by a few threads.

`core.nvmelog` is the format, `core.nvmeindex` decides where records go, `_nvme_files` knows the files and
`_nvme_io` moves the bytes. What this module promises:

- `path` is a directory of mode 0700 with one file a segment, named by its number (`000000.seg`) and
  allocated in full when the store is opened: the cap cannot be passed later, and no write fails for
  want of space. Other files are left alone. Nothing in the store is named after what it holds.
- The directory itself is locked (flock): one live process a store.
- IO goes past the page cache (O_DIRECT), straight between the disk and the caller's memory where that
  starts on a page: re-reads of what is warm are the host tier's business. Filesystems that refuse it get
  buffered IO and a warning. Nothing is flushed: checksums tell whole bytes from torn ones, so a crash costs
  the last records and never gives wrong ones. The youngest bodies are read at the start for that.
- Only the event loop's thread touches the index; the pool's threads touch file descriptors and the
  caller's buffers. A cancelled call returns once its thread has let go of the buffer (law 5): it is
  told to stop, and does after the few pieces that are under way.

Opening reads every header, one a record, and counts what it finds at once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from p2pcache.core.checksum import CorruptBody
from p2pcache.core.nvmeindex import (
    EPOCH_RANDOM_BITS,
    Already,
    Location,
    LogIndex,
    NeedsReclaim,
    Placement,
    segment_bytes_for,
)
from p2pcache.core.nvmelog import Record, encode_segment
from p2pcache.io import _nvme_io
from p2pcache.io._nvme_files import NvmeStats, SegmentFiles, open_files
from p2pcache.types import (
    BodyInfo,
    ConfigError,
    ContentKey,
    ExactKey,
    InvariantError,
    LayoutError,
    NodeDown,
    TierFull,
)

__all__ = ["DEPTH_MAX", "Appended", "NvmeStats", "NvmeStore"]

DEPTH_MAX = 64
VERIFIED_AT_START = 2
"""Times `depth` records, the youngest: their bodies are read, for a dead machine may have torn them."""


class Appended(enum.StrEnum):
    """How an append ended. Only for `IN_FLIGHT` is the record not there to be read yet."""

    STORED = "stored"
    PRESENT = "present"  # this exact key was here before
    IN_FLIGHT = "in-flight"  # another append of this exact key is under way


class NvmeStore:
    """One node's NVMe tier. Made by `open`; all calls come from the event loop that opened it."""

    def __init__(self, index: LogIndex, files: SegmentFiles, pool: ThreadPoolExecutor, stats: NvmeStats):
        self._index = index
        self._files = files
        self._pool = pool
        self._stats = stats
        self._reclaiming = asyncio.Lock()
        # Whose eviction list held which condemned segment: only they may have it reclaimed.
        self._told: dict[int, set[ExactKey]] = {}
        self._closing: asyncio.Future[None] | None = None

    @classmethod
    async def open(
        cls,
        path: str | os.PathLike[str],
        *,
        capacity_bytes: int,
        segment_bytes: int | None = None,
        depth: int = 8,
        io: str = "auto",
        verify_bodies: bool = False,
    ) -> NvmeStore:
        """Open or make the store in directory `path` and find what it holds.

        Takes `capacity_bytes` rounded down to whole segments, at once. `segment_bytes`, a multiple
        of 4096, bounds a record and is what is evicted at a time; None chooses it by the cap. Segments
        of another size, or beyond a lowered cap, are given up. `depth`: records written or read at once,
        a thread each. `io`: `uring`, `threads`, or `auto`, which is the first where the kernel allows it.
        `verify_bodies` reads all bodies, and not only the youngest, which a crash may have torn.
        Raises ConfigError, which names the path: not a directory, open to other users, not
        writable, too little space, or held by a live process; or io_uring was asked for and is refused.
        """
        if not 1 <= depth <= DEPTH_MAX:
            raise ConfigError(f"NVMe depth must be 1 to {DEPTH_MAX}, not {depth}")
        backend = _nvme_io.backend(io)
        if segment_bytes is None:
            segment_bytes = segment_bytes_for(capacity_bytes)
        index = LogIndex(capacity_bytes, segment_bytes)
        stats = NvmeStats(capacity_bytes=capacity_bytes)
        verify = None if verify_bodies else VERIFIED_AT_START * depth
        pool = ThreadPoolExecutor(depth, thread_name_prefix="p2pcache-nvme")
        loop = asyncio.get_running_loop()
        opening = loop.run_in_executor(pool, open_files, Path(path), index, stats, backend, verify)
        try:
            files = await asyncio.shield(opening)
        except BaseException:
            # If cancelled, the thread goes on: what it opens is closed when it ends.
            opening.add_done_callback(_close_unwanted)
            pool.shutdown(wait=False)
            raise
        return cls(index, files, pool, stats)

    async def close(self) -> None:
        """Wait for IO under way, then let go of the files and the lock. Idempotent.

        If cancelled, closing goes on, and another call waits for its end.
        """
        if self._closing is None:
            self._closing = asyncio.get_running_loop().run_in_executor(None, self._shut)
        await asyncio.shield(self._closing)

    def _shut(self) -> None:
        self._pool.shutdown()
        self._files.close()

    @property
    def capacity_bytes(self) -> int:
        return self._index.capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self._index.used_bytes

    def stats(self) -> NvmeStats:
        """A snapshot."""
        return dataclasses.replace(
            self._stats,
            used_bytes=self._index.used_bytes,
            live_bytes=self._index.live_bytes,
            records=len(self._index),
        )

    def status(self) -> dict[str, Any]:
        """The snapshot as plain values, for people."""
        return dataclasses.asdict(self.stats())

    def lookup(self, exact: ExactKey) -> Record | None:
        location = self._index.lookup(exact)
        return location.record if location is not None else None

    def by_content(self, content: ContentKey) -> list[Record]:
        return self._index.by_content(content)

    def records(self) -> Iterator[Record]:
        """All records, oldest first, to be published after a start. No awaits between its steps."""
        return iter(self._index)

    async def make_room(self, record: Record) -> list[BodyInfo]:
        """The bodies that the caller must withdraw before it calls `append(record)`.

        They are gone from this store already, in any case. Withdrawing twice is possible (two
        callers may be told the same ones) and harmless. Raises TierFull: the record is larger than
        a segment, or every segment is being read or written.
        """
        self._check_open()
        needs = self._index.room(record)
        if needs is None:
            return []
        self._told.setdefault(needs.segment, set()).add(record.body.exact)
        return self._index.condemned(needs.segment)

    async def append(self, record: Record, body: memoryview) -> Appended:
        """Write a record. `body`, as it is to be stored, is the caller's, unchanged until this returns or
        raises.

        The checksums in `record` are taken on trust. Call `make_room` first and withdraw what it
        names. Raises TierFull: no room was made (others took it: make room again), or the device
        refused the write, which costs this record and not the store. LayoutError: wrong length.
        """
        self._check_open()
        body = body.cast("B")
        if body.nbytes != record.stored_bytes:
            raise LayoutError(f"body has {body.nbytes} bytes, its record says {record.stored_bytes}")
        placement = await self._place(record)
        if isinstance(placement, Already):
            return Appended.PRESENT if placement.committed else Appended.IN_FLIGHT
        whole = False

        def write(stop: threading.Event) -> None:
            nonlocal whole
            self._files.write_record(stop, placement, body)
            whole = True

        try:
            await self._run(write)
        except OSError as error:
            self._stats.write_errors += 1
            raise TierFull(f"NVMe write failed: {error}") from error
        finally:
            if whole:  # also where this call was cancelled: a restart would find it, so it is here
                self._index.commit(placement)
                self._stats.appended += 1
            else:
                self._index.abort(placement)
        return Appended.STORED

    async def read_into(self, exact: ExactKey, dest: memoryview) -> Record | None:
        """Read a body as it is stored into `dest` (writable, `stored_bytes` long) and verify every part.

        None: not here. `dest` is this call's until it returns or raises, and is whole only when a
        Record is returned. Raises CorruptBody when a layer's checksum fails or the device does: the
        record has been dropped, for this process and the next. LayoutError: wrong length.
        """
        self._check_open()
        location = self._index.pin(exact)
        if location is None:
            return None
        try:
            dest = dest.cast("B")
            if dest.nbytes != location.record.stored_bytes or dest.readonly:
                raise LayoutError(f"need {location.record.stored_bytes} writable bytes, got {dest.nbytes}")
            bad_layer = await self._run(self._files.read_verified, location, dest)
            if bad_layer is None:
                return location.record
            self._stats.corrupt += 1
            await self._discard(location)
            raise CorruptBody(f"NVMe: layer {bad_layer} of {exact.hex()} does not match its checksum")
        except OSError as error:
            self._stats.read_errors += 1
            await self._discard(location)
            raise CorruptBody(f"NVMe: {exact.hex()} cannot be read: {error}") from error
        finally:
            self._index.unpin(location)

    async def drop(self, exact: ExactKey) -> bool:
        """Forget a record, for this process and the next. False: it was not here."""
        self._check_open()
        location = self._index.pin(exact)
        if location is None:
            return False
        try:
            await self._discard(location)
        finally:
            self._index.unpin(location)
        return True

    async def _place(self, record: Record) -> Placement | Already:
        """Reserve a place, reclaiming a segment whose keys this record's caller has withdrawn."""
        async with self._reclaiming:
            place = self._index.place(record)
            if not isinstance(place, NeedsReclaim):
                return place
            if record.body.exact not in self._told.get(place.segment, ()):
                raise TierFull("no room has been made for this record, or others took it: make_room again")
            epoch = self._index.next_epoch(secrets.randbits(EPOCH_RANDOM_BITS))
            page = encode_segment(epoch, self._index.segment_bytes)
            try:
                await self._run(self._files.write_pages, place.segment, 0, page)
            except OSError as error:
                self._stats.write_errors += 1
                self._stats.evicted += self._index.retire(place.segment)
                self._told.pop(place.segment, None)
                raise TierFull(f"NVMe segment {place.segment} cannot be written: {error}") from error
            self._stats.evicted += self._index.reclaim(place.segment, epoch)
            self._told.pop(place.segment, None)
            again = self._index.place(record)
            if isinstance(again, NeedsReclaim):
                raise InvariantError("a record that fits a segment found no room in a free one")
            return again

    async def _discard(self, location: Location) -> None:
        """Drop a pinned record, and mark it dead on disk if that can be done."""
        if self._index.lookup(location.record.body.exact) is not location:
            return  # another reader found it out first
        self._index.drop(location.record.body.exact)
        if self._closing is not None:
            return
        try:
            await self._run(self._files.write_dead, location, to_the_end=True)
        except OSError:
            self._stats.write_errors += 1  # the next process will find the damage by itself

    async def _run(self, work: Callable[..., Any], *args: Any, to_the_end: bool = False) -> Any:
        """`work(stop, *args)` on the pool. If cancelled: stop it, and wait until it has if it had begun.

        to_the_end: if cancelled, do it all the same, and wait until it has been done.
        """
        self._check_open()
        stop = threading.Event()
        job = self._pool.submit(work, stop, *args)
        running = asyncio.wrap_future(job)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            if not to_the_end:
                stop.set()
            if not to_the_end and job.cancel():
                raise  # it never began: nothing has touched the buffers
            while not running.done():
                try:
                    await asyncio.wait([running])
                except asyncio.CancelledError:
                    continue  # the buffers are not the caller's yet
            running.exception()  # seen: the cancellation is what the caller gets
            raise

    def _check_open(self) -> None:
        if self._closing is not None:
            raise NodeDown("the NVMe store has been closed")


def _close_unwanted(opening: asyncio.Future[SegmentFiles]) -> None:
    if opening.exception() is None:
        opening.result().close()
