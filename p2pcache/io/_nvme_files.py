"""The files of the NVMe store: its locked directory, preallocated segments, and their recovery.

A private part of `store_nvme`. Everything here blocks and runs on the store's own threads.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import os
import re
import secrets
import stat
import threading
from pathlib import Path

from p2pcache.core.checksum import checksum_layer
from p2pcache.core.nvmeindex import EPOCH_RANDOM_BITS, Location, LogIndex
from p2pcache.core.nvmelog import (
    PAGE_BYTES,
    Damage,
    Header,
    State,
    decode_segment,
    encode_header,
    encode_segment,
    scan,
)
from p2pcache.types import ConfigError

IO_BYTES_MAX = 4 << 20
"""Longest single read or write: how much is still moved after a call has been cancelled."""
SCAN_WINDOW_BYTES = 256 << 10
SEGMENT_NAME = re.compile(r"[0-9]{6}\.seg")


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


class SegmentFiles:
    """The open segment files and the lock on their directory. Reads and writes are whole or raise."""

    def __init__(self, directory_fd: int, segment_fds: list[int], created: frozenset[int]) -> None:
        self._directory_fd = directory_fd
        self._segment_fds = segment_fds
        self.created = created  # numbers of the segments that were not there before

    def read(self, stop: threading.Event | None, segment: int, offset: int, dest: memoryview) -> None:
        """Fill `dest` (flat, writable). Raises OSError, or Stopped once `stop` is set."""
        done = 0
        while done < dest.nbytes:
            if stop is not None and stop.is_set():
                raise Stopped
            part = dest[done : done + IO_BYTES_MAX]
            count = os.preadv(self._segment_fds[segment], [part], offset + done)
            if count == 0:
                raise OSError(errno.EIO, f"segment {segment} ends at {offset + done}")
            done += count

    def write(self, stop: threading.Event | None, segment: int, offset: int, data: memoryview) -> None:
        """Write all of `data` (flat). Raises OSError, or Stopped once `stop` is set."""
        done = 0
        while done < data.nbytes:
            if stop is not None and stop.is_set():
                raise Stopped
            part = data[done : done + IO_BYTES_MAX]
            done += os.pwritev(self._segment_fds[segment], [part], offset + done)

    def read_verified(self, stop: threading.Event | None, place: Location, dest: memoryview) -> int | None:
        """Fill `dest` with a body; the first layer that fails its checksum, or None.

        Layer by layer, so that a layer is checked while it is still in the processor's cache.
        """
        record = place.record
        part_bytes = record.body.nbytes // len(record.checksums)
        for layer, expected in enumerate(record.checksums):
            part = dest[layer * part_bytes : (layer + 1) * part_bytes]
            self.read(stop, place.segment, place.body_offset + layer * part_bytes, part)
            if checksum_layer(part, record.body.exact, layer) != expected:
                return layer
        return None

    def close(self) -> None:
        """Close all files; closing the directory releases the lock."""
        for fd in self._segment_fds:
            os.close(fd)
        self._segment_fds = []
        if self._directory_fd >= 0:
            os.close(self._directory_fd)
            self._directory_fd = -1


def open_files(path: Path, index: LogIndex, stats: NvmeStats, *, verify_bodies: bool) -> SegmentFiles:
    """Lock `path`, allocate the segments, and feed `index` and `stats` with what they hold.

    Raises ConfigError, which names the path.
    """
    directory_fd = _lock_directory(path)
    try:
        files = _open_segments(path, directory_fd, index.segment_count, index.segment_bytes)
    except BaseException:
        os.close(directory_fd)
        raise
    try:
        _recover(files, index, stats, verify_bodies=verify_bodies)
    except OSError as error:
        files.close()
        raise ConfigError(f"NVMe path {path} cannot be used: {error.strerror}") from error
    except BaseException:
        files.close()
        raise
    return files


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
        status = os.fstat(directory_fd)
        mode = stat.S_IMODE(status.st_mode)
        if status.st_uid != os.geteuid():
            raise ConfigError(f"NVMe path {path} belongs to user {status.st_uid}, not to this one")
        if mode & 0o077:
            # Not tightened here: it may be a directory that others need, named by mistake.
            raise ConfigError(
                f"NVMe path {path} is open to other users (mode {mode:o}): chmod 700 it, "
                "or name a directory that does not exist yet"
            )
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


def _open_segments(path: Path, directory_fd: int, count: int, segment_bytes: int) -> SegmentFiles:
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
    return SegmentFiles(directory_fd, fds, frozenset(created))


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
    """Reads of a scan. Single headers as asked; page after page, in a hole or free space, far ahead."""

    def __init__(self, files: SegmentFiles, segment: int, segment_bytes: int, stats: NvmeStats) -> None:
        self._files = files
        self._segment = segment
        self._segment_bytes = segment_bytes
        self._stats = stats
        self._start = 0
        self._data = memoryview(b"")
        self._asked_last = 0

    def read(self, offset: int, nbytes: int) -> memoryview:
        """`nbytes` from `offset`; zeros where the device fails, so that the scan goes on behind."""
        if not self._start <= offset <= offset + nbytes <= self._start + self._data.nbytes:
            ahead_bytes = SCAN_WINDOW_BYTES if offset == self._asked_last + PAGE_BYTES else nbytes
            self._start = offset
            self._data = memoryview(bytearray(min(ahead_bytes, self._segment_bytes - offset)))
            try:
                self._files.read(None, self._segment, offset, self._data)
            except OSError:
                self._stats.read_errors += 1
        self._asked_last = offset
        return self._data[offset - self._start :][:nbytes]


def _recover(files: SegmentFiles, index: LogIndex, stats: NvmeStats, *, verify_bodies: bool) -> None:
    """Feed the index with every segment. Raises OSError when a new segment header cannot be written."""
    lost = []
    for number in range(index.segment_count):
        if number in files.created:
            lost.append(number)
            continue
        window = _ScanWindow(files, number, index.segment_bytes, stats)
        page = window.read(0, PAGE_BYTES)
        epoch = decode_segment(page, index.segment_bytes)
        found = scan(window.read, index.segment_bytes, 0 if isinstance(epoch, Damage) else epoch)
        index.saw_epoch(found.epoch_max)
        stats.torn += found.torn
        stats.flipped += found.flipped
        if isinstance(epoch, Damage):
            stats.flipped += any(page)  # a blank one was made by a process that died there
            lost.append(number)
            continue
        entries = found.entries
        if verify_bodies:
            entries = [_verified(files, number, offset, header, stats) for offset, header in entries]
        index.restore(number, epoch, entries)
    for number in lost:
        epoch = index.next_epoch(secrets.randbits(EPOCH_RANDOM_BITS))
        files.write(None, number, 0, memoryview(encode_segment(epoch, index.segment_bytes)))
        index.restore(number, epoch, [])


def _verified(
    files: SegmentFiles, number: int, offset: int, header: Header, stats: NvmeStats
) -> tuple[int, Header]:
    """The same entry, or a dead one (on disk too) when its body is damaged."""
    if header.state is not State.COMMITTED:
        return offset, header
    place = Location(number, header.epoch, offset, header.record)
    body = memoryview(bytearray(header.record.body.nbytes))
    try:
        if files.read_verified(None, place, body) is None:
            return offset, header
        stats.corrupt += 1
    except OSError:
        stats.read_errors += 1
    dead = encode_header(header.record, header.epoch, State.DEAD)
    try:
        files.write(None, number, offset, memoryview(dead))
    except OSError:
        stats.write_errors += 1
    return offset, dataclasses.replace(header, state=State.DEAD)
