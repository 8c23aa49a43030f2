"""The files of the NVMe store: its locked directory, preallocated segments, and their recovery.

A private part of `store_nvme`. Everything here blocks and runs on the store's own threads. Recovery reads
through the page cache, whose read-ahead suits it; then the files are set to go past it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import logging
import os
import re
import secrets
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from p2pcache.core.checksum import checksum_layer
from p2pcache.core.nvmeindex import EPOCH_RANDOM_BITS, Location, LogIndex
from p2pcache.core.nvmelog import (
    PAGE_BYTES,
    Damage,
    Scan,
    State,
    decode_segment,
    encode_header,
    encode_segment,
    scan,
)
from p2pcache.io._nvme_io import Backend, Piece, Scratch, set_direct
from p2pcache.types import ConfigError

SCAN_WINDOW_BYTES = 256 << 10
RECOVERY_THREADS = 8
SEGMENT_NAME = re.compile(r"[0-9]{6}\.seg")

_log = logging.getLogger(__name__)


class Stopped(Exception):
    """The caller of this IO was cancelled and waits for its buffer."""


@dataclasses.dataclass(slots=True)
class NvmeStats:
    """Counts since the store was opened; bytes and records as of now."""

    capacity_bytes: int
    used_bytes: int = 0  # headers, live, dead and in flight
    live_bytes: int = 0
    records: int = 0
    appended: int = 0
    evicted: int = 0  # records that went with a reclaimed segment
    torn: int = 0  # found at start: appends that never ended
    flipped: int = 0  # found at start: damaged headers, of records or of segments
    corrupt: int = 0  # bodies that failed their checksum
    read_errors: int = 0  # of the device
    write_errors: int = 0  # of the device
    io: str = ""  # how bytes are moved: uring or threads
    direct: bool = False  # with O_DIRECT, or else through the page cache


class SegmentFiles:
    """The open segment files and the lock on their directory. Reads and writes are whole or raise."""

    def __init__(
        self, directory_fd: int, segment_fds: list[int], created: frozenset[int], backend: Backend
    ) -> None:
        self._directory_fd = directory_fd
        self._segment_fds = segment_fds
        self._local = threading.local()
        self.created = created  # numbers of the segments that were not there before
        self.backend = backend
        self.direct = False

    def read(self, segment: int, offset: int, dest: memoryview) -> None:
        """Fill `dest` (flat, writable), of any alignment. Only before `go_direct`. Raises OSError."""
        done = 0
        while done < dest.nbytes:
            count = os.preadv(self._segment_fds[segment], [dest[done:]], offset + done)
            if count == 0:
                raise OSError(errno.EIO, f"segment {segment} ends at {offset + done}")
            done += count

    def write_pages(self, stop: threading.Event | None, segment: int, offset: int, encoded: bytes) -> None:
        """Write a header. Raises OSError, or Stopped once `stop` is set."""
        header = self._scratch().header(encoded)
        nothing = memoryview(b"")
        self._write(stop, segment, iter([Piece(offset, [header], nothing, nothing)]))

    def write_record(self, stop: threading.Event | None, place: Location, body: memoryview) -> None:
        """Write a record: all of its body but the first piece, then that piece behind the header.

        So a record of one piece costs one write, and a header never stands before a body that is not whole,
        unless the machine dies. Raises OSError, or Stopped once `stop` is set: the header is not there then.
        """
        scratch, nothing = self._scratch(), memoryview(b"")
        pieces = scratch.pieces(place.body_offset, body, direct=self.direct)
        last = next(pieces) if self.direct else Piece(place.body_offset, [], nothing, nothing)
        self._write(stop, place.segment, pieces)
        last.offset = place.offset
        last.parts.insert(0, scratch.header(encode_header(place.record, place.epoch)))
        try:
            self._write(stop, place.segment, iter([last]))
        except OSError:
            with contextlib.suppress(OSError):  # the header may be there all the same
                self.write_dead(None, place)
            raise

    def write_dead(self, stop: threading.Event | None, place: Location) -> None:
        """Mark a record: its body is not to be read again. Raises OSError, or Stopped once `stop` is set."""
        header = encode_header(place.record, place.epoch, State.DEAD)
        self.write_pages(stop, place.segment, place.offset, header)

    def read_verified(self, stop: threading.Event | None, place: Location, dest: memoryview) -> int | None:
        """Fill `dest` with a body as it is stored; the first part that fails its checksum, or None.

        Parts, the layers of a raw body, are checked as they become whole, while later pieces are on their
        way. Raises OSError, or Stopped once `stop` is set.
        """
        record, layer, whole_bytes = place.record, 0, 0
        checksums = record.stored_checksums
        part_bytes = record.stored_bytes // len(checksums)
        pieces = self._scratch().pieces(place.body_offset, dest, direct=self.direct)
        moving = self.backend.move(self._segment_fds[place.segment], _until(stop, pieces), write=False)
        with contextlib.closing(moving):
            for piece in moving:
                piece.after_read()
                whole_bytes = min(whole_bytes + piece.nbytes, dest.nbytes)
                while (layer + 1) * part_bytes <= whole_bytes:
                    part = dest[layer * part_bytes : (layer + 1) * part_bytes]
                    if checksum_layer(part, record.body.exact, layer) != checksums[layer]:
                        return layer
                    layer += 1
        return None

    def go_direct(self) -> None:
        """Set all files to O_DIRECT, or none where the filesystem refuses it."""
        self.direct = all(set_direct(fd) for fd in self._segment_fds)
        if not self.direct:
            for fd in self._segment_fds:
                fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)

    def close(self) -> None:
        """Close all files; closing the directory releases the lock."""
        for fd in self._segment_fds:
            os.close(fd)
        self._segment_fds = []
        if self._directory_fd >= 0:
            os.close(self._directory_fd)
            self._directory_fd = -1

    def _write(self, stop: threading.Event | None, segment: int, pieces: Iterator[Piece]) -> None:
        moving = self.backend.move(self._segment_fds[segment], _until(stop, pieces, fill=True), write=True)
        with contextlib.closing(moving):
            for _ in moving:
                pass

    def _scratch(self) -> Scratch:
        if not hasattr(self._local, "scratch"):
            self._local.scratch = Scratch()
        return self._local.scratch


def _until(stop: threading.Event | None, pieces: Iterator[Piece], fill: bool = False) -> Iterator[Piece]:
    """The pieces, up to the one before which `stop` was set: then Stopped. fill: they are to be written."""
    for piece in pieces:
        if stop is not None and stop.is_set():
            raise Stopped
        if fill:
            piece.before_write()
        yield piece


def open_files(
    path: Path, index: LogIndex, stats: NvmeStats, backend: Backend, verify: int | None
) -> SegmentFiles:
    """Lock `path`, allocate the segments, and feed `index` and `stats` with what they hold.

    verify: of how many of the youngest records the bodies are read as well; None: of all. Raises ConfigError,
    which names the path.
    """
    directory_fd = _lock_directory(path)
    try:
        files = _open_segments(path, directory_fd, index.segment_count, index.segment_bytes, backend)
    except BaseException:
        os.close(directory_fd)
        raise
    try:
        _recover(files, index, stats, verify)
        files.go_direct()
    except OSError as error:
        files.close()
        raise ConfigError(f"NVMe path {path} cannot be used: {error.strerror}") from error
    except BaseException:
        files.close()
        raise
    if not files.direct:
        _log.warning("NVMe path %s is on a filesystem without O_DIRECT: it goes through the page cache", path)
    stats.io, stats.direct = backend.name, files.direct
    return files


def directory_problem(status: os.stat_result) -> str:
    """Why a directory of such a status is not to be a store's, or nothing."""
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.geteuid():
        return f"belongs to user {status.st_uid}, not to this one"
    if mode & 0o077:
        # Not tightened here: it may be a directory that others need, named by mistake.
        return (
            f"is open to other users (mode {mode:o}): chmod 700 it, "
            "or name a directory that does not exist yet"
        )
    return ""


def _lock_directory(path: Path) -> int:
    """A locked file descriptor of the directory, which is made if need be."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(f"NVMe path {path} is not a directory") from error
    except OSError as error:
        raise ConfigError(f"NVMe path {path} cannot be made or opened: {error.strerror}") from error
    try:
        if problem := directory_problem(os.fstat(directory_fd)):
            raise ConfigError(f"NVMe path {path} {problem}")
        fcntl.flock(directory_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(directory_fd)
        raise ConfigError(f"NVMe path {path} is held by another live process") from error
    except OSError as error:
        os.close(directory_fd)
        raise ConfigError(f"NVMe path {path} cannot be locked: {error.strerror}") from error
    except BaseException:
        os.close(directory_fd)
        raise
    return directory_fd


def _open_segments(
    path: Path, directory_fd: int, count: int, segment_bytes: int, backend: Backend
) -> SegmentFiles:
    """Open `count` fully allocated segments; on any error, leave none behind that was not there."""
    names = [f"{number:06d}.seg" for number in range(count)]
    fds: list[int] = []
    created: list[int] = []
    try:
        kept = _drop_misfits(directory_fd, names, segment_bytes)
        asked_bytes = (count - len(kept)) * segment_bytes
        space = os.fstatvfs(directory_fd)
        there_bytes = space.f_bavail * space.f_frsize
        if asked_bytes > there_bytes:
            raise ConfigError(
                f"NVMe path {path}: {asked_bytes} bytes are asked for ({count} segments of "
                f"{segment_bytes}, {len(kept)} of them there), {there_bytes} are free"
            )
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        for number, name in enumerate(names):
            fds.append(os.open(name, flags, 0o600, dir_fd=directory_fd))
            if name not in kept:
                created.append(number)
            # A kept one too: it may be sparse, if it was copied here or its allocation was cut short.
            os.posix_fallocate(fds[-1], 0, segment_bytes)
    except (OSError, ConfigError) as error:
        for fd in fds:
            os.close(fd)
        for number in created:
            os.unlink(names[number], dir_fd=directory_fd)
        if isinstance(error, ConfigError):
            raise
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ConfigError(
                f"NVMe path {path}: {asked_bytes} bytes are asked for, and space or quota ended "
                f"at {len(created)} segments of {segment_bytes} ({there_bytes} bytes seemed free)"
            ) from error
        raise ConfigError(f"NVMe path {path} cannot be written: {error.strerror}") from error
    return SegmentFiles(directory_fd, fds, frozenset(created), backend)


def _drop_misfits(directory_fd: int, names: list[str], segment_bytes: int) -> set[str]:
    """Remove segments beyond the cap or of another size, before new ones are made; name the others.

    A file that is not named like a segment is not ours, and stays.
    """
    kept = set()
    for name in os.listdir(directory_fd):
        if not SEGMENT_NAME.fullmatch(name):
            continue
        status = os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
        if name in names and stat.S_ISREG(status.st_mode) and status.st_size == segment_bytes:
            kept.add(name)
        else:
            os.unlink(name, dir_fd=directory_fd)
    return kept


class _ScanWindow:
    """Reads of a scan: single headers as asked; far ahead where the next one lies near the last."""

    def __init__(self, files: SegmentFiles, segment: int, segment_bytes: int) -> None:
        self._files = files
        self._segment = segment
        self._segment_bytes = segment_bytes
        self._start = 0
        self._data = memoryview(b"")
        self._asked_last = 0
        self.read_errors = 0

    def read(self, offset: int, nbytes: int) -> memoryview:
        """`nbytes` from `offset`; zeros where the device fails, so that the scan goes on behind."""
        if not self._start <= offset <= offset + nbytes <= self._start + self._data.nbytes:
            near = offset - self._asked_last <= SCAN_WINDOW_BYTES // 4
            ahead_bytes = SCAN_WINDOW_BYTES if near else nbytes
            self._start = offset
            self._data = memoryview(bytearray(min(ahead_bytes, self._segment_bytes - offset)))
            try:
                self._files.read(self._segment, offset, self._data)
            except OSError:
                self.read_errors += 1
        self._asked_last = offset
        return self._data[offset - self._start :][:nbytes]


@dataclasses.dataclass(slots=True)
class _Found:
    """What one segment holds, and what went wrong while it was read."""

    number: int
    epoch: int | Damage
    scan: Scan
    blank: bool  # its first page is all zeros
    read_errors: int


def _recover(files: SegmentFiles, index: LogIndex, stats: NvmeStats, verify: int | None) -> None:
    """Feed the index with every segment. Raises OSError when a new segment header cannot be written."""
    there = [number for number in range(index.segment_count) if number not in files.created]
    lost = sorted(files.created)
    whole: list[_Found] = []
    with ThreadPoolExecutor(RECOVERY_THREADS, thread_name_prefix="p2pcache-recover") as pool:
        for found in pool.map(lambda number: _look(files, number, index.segment_bytes), there):
            index.saw_epoch(found.scan.epoch_max)
            stats.torn += found.scan.torn
            stats.flipped += found.scan.flipped
            stats.read_errors += found.read_errors
            if isinstance(found.epoch, Damage):
                stats.flipped += not found.blank  # a blank one was made by a process that died there
                lost.append(found.number)
            else:
                whole.append(found)
        for found in sorted(whole, key=lambda found: found.epoch):  # so the index is in the order of the log
            index.restore(found.number, found.epoch, found.scan.entries)
        _verify(files, index, stats, pool, verify)
    for number in lost:
        epoch = index.next_epoch(secrets.randbits(EPOCH_RANDOM_BITS))
        files.write_pages(None, number, 0, encode_segment(epoch, index.segment_bytes))
        index.restore(number, epoch, [])


def _look(files: SegmentFiles, number: int, segment_bytes: int) -> _Found:
    """Scan one segment."""
    window = _ScanWindow(files, number, segment_bytes)
    page = window.read(0, PAGE_BYTES)
    epoch = decode_segment(page, segment_bytes)
    scanned = scan(window.read, segment_bytes, 0 if isinstance(epoch, Damage) else epoch)
    return _Found(number, epoch, scanned, blank=not any(page), read_errors=window.read_errors)


def _verify(
    files: SegmentFiles, index: LogIndex, stats: NvmeStats, pool: ThreadPoolExecutor, youngest: int | None
) -> None:
    """Read the bodies of the youngest records (None: of all); drop the damaged ones, on disk too."""

    def is_whole(place: Location) -> bool | OSError:
        try:
            body = memoryview(bytearray(place.record.stored_bytes))
            return files.read_verified(None, place, body) is None
        except OSError as error:
            return error

    places = [place for record in index if (place := index.lookup(record.body.exact)) is not None]
    places = places if youngest is None else places[max(len(places) - youngest, 0) :]
    for place, whole in zip(places, pool.map(is_whole, places), strict=True):
        if whole is True:
            continue
        stats.corrupt += whole is False
        stats.read_errors += whole is not False
        index.drop(place.record.body.exact)
        try:
            files.write_dead(None, place)
        except OSError:
            stats.write_errors += 1
