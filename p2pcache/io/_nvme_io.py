"""How bytes move between a file and memory: io_uring, or plain reads and writes; past the page cache.

A private part of `store_nvme`. A body moves in *pieces*; a backend moves a piece's parts with one
vectored call, and may have several pieces under way. With O_DIRECT all of an IO must be whole pages, on
disk and in memory, so what is not (the end of a body, or all of one in memory that starts off a page)
goes through `Scratch`, page-aligned memory that each thread has of its own. No byte beside the caller's
is read or written.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from p2pcache import _native
from p2pcache.core.nvmelog import HEADER_BYTES_MAX, PAGE_BYTES, round_up
from p2pcache.types import ConfigError

PIECE_BYTES = 1 << 20
"""Also how much is still moved, for each piece under way, after a call has been cancelled."""
PIECES_IN_FLIGHT = 4
BACKENDS = ("auto", "uring", "threads")

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Piece:
    """Consecutive bytes of a file, and the memory they come from or go to."""

    offset: int  # in the file
    parts: list[memoryview]
    outside: memoryview  # the caller's bytes that `spill` stands for; empty: none
    spill: memoryview  # scratch, whole pages

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def before_write(self) -> None:
        if not self.outside.nbytes:
            return
        self.spill[: self.outside.nbytes] = self.outside
        self.spill[self.outside.nbytes :] = bytes(self.spill.nbytes - self.outside.nbytes)

    def after_read(self) -> None:
        self.outside[:] = self.spill[: self.outside.nbytes]


class Scratch:
    """One thread's aligned memory: a header, and room for each piece under way. Taken when touched."""

    def __init__(self) -> None:
        self._bytes = memoryview(mmap.mmap(-1, HEADER_BYTES_MAX + PIECES_IN_FLIGHT * PIECE_BYTES))

    def header(self, encoded: bytes) -> memoryview:
        """The encoded header (whole pages), on pages."""
        self._bytes[: len(encoded)] = encoded
        return self._bytes[: len(encoded)]

    def pieces(self, offset: int, body: memoryview, *, direct: bool) -> Iterator[Piece]:
        """A body at `offset` of a file as pieces of whole pages.

        A piece's scratch is used again PIECES_IN_FLIGHT pieces on.
        """
        aligned = not direct or _address(body) % PAGE_BYTES == 0
        for index, start in enumerate(range(0, body.nbytes, PIECE_BYTES)):
            part = body[start : start + PIECE_BYTES]
            inside_bytes = part.nbytes // PAGE_BYTES * PAGE_BYTES if aligned else 0
            inside, outside = part[:inside_bytes], part[inside_bytes:]
            spill_at = HEADER_BYTES_MAX + index % PIECES_IN_FLIGHT * PIECE_BYTES
            spill = self._bytes[spill_at:][: round_up(outside.nbytes)]
            yield Piece(offset + start, [p for p in (inside, spill) if p.nbytes], outside, spill)


class Backend(Protocol):
    """Moves pieces. Used by several threads at once."""

    name: str

    def move(self, fd: int, pieces: Iterable[Piece], *, write: bool) -> Iterator[Piece]:
        """Read or write pieces; each is yielded, in order, once it is whole.

        Up to PIECES_IN_FLIGHT pieces are drawn that have not been handed back. Raises OSError, and what
        `pieces` raises. However the iterator ends (close it!), nothing reads or writes memory any more.
        """


class ThreadsIo:
    """`preadv` and `pwritev`, a piece at a time: the calling threads are the queue's depth."""

    name = "threads"

    def move(self, fd: int, pieces: Iterable[Piece], *, write: bool) -> Iterator[Piece]:
        for piece in pieces:
            finish(fd, piece, 0, write=write)
            yield piece


class UringIo:
    """An io_uring for each calling thread: while one piece is looked at, the next are on their way.

    What a ring cannot move, for want of memory or of descriptors, the plain calls move, or say why not.
    """

    name = "uring"

    def __init__(self) -> None:
        """Raises OSError where the kernel, or a filter of system calls, refuses io_uring."""
        self._local = threading.local()
        self._plain = ThreadsIo()
        _native.Ring(PIECES_IN_FLIGHT)

    def move(self, fd: int, pieces: Iterable[Piece], *, write: bool) -> Iterator[Piece]:
        ring = self._ring()
        if ring is None:
            yield from self._plain.move(fd, pieces, write=write)
            return
        drawn = iter(enumerate(pieces))
        under_way: deque[tuple[int, Piece]] = deque()
        ended: dict[int, int] = {}  # piece's number -> bytes moved, or minus errno
        try:
            while True:
                while len(under_way) < PIECES_IN_FLIGHT and (numbered := next(drawn, None)):
                    number, piece = numbered
                    under_way.append(numbered)
                    try:
                        ring.submit(number, write, fd, piece.offset, piece.parts)
                    except OSError:
                        ended[number] = 0
                if not under_way:
                    return
                number, piece = under_way.popleft()
                while number not in ended:
                    which, moved = ring.wait()
                    ended[which] = moved
                finish(fd, piece, max(ended.pop(number), 0), write=write)
                yield piece
        finally:
            while ring.in_flight:
                ring.wait()

    def _ring(self) -> _native.Ring | None:
        if not hasattr(self._local, "ring"):
            try:
                self._local.ring = _native.Ring(PIECES_IN_FLIGHT)
            except OSError:
                return None
        return self._local.ring


def finish(fd: int, piece: Piece, moved_bytes: int, *, write: bool) -> None:
    """Move what is left of a piece, blocking. Raises OSError, also where the file ends within it."""
    parts, offset = list(piece.parts), piece.offset
    while True:
        offset += moved_bytes
        while parts and moved_bytes >= parts[0].nbytes:
            moved_bytes -= parts.pop(0).nbytes
        if not parts:
            return
        parts[0] = parts[0][moved_bytes:]
        moved_bytes = os.pwritev(fd, parts, offset) if write else os.preadv(fd, parts, offset)
        if moved_bytes == 0:
            raise OSError(errno.EIO, f"the file ends at {offset}")


def backend(name: str) -> Backend:
    """`uring`, `threads`, or `auto`: io_uring where the kernel lets us. Raises ConfigError."""
    if name not in BACKENDS:
        raise ConfigError(f"unknown NVMe IO {name!r}: it is one of {', '.join(BACKENDS)}")
    if name != "threads":
        try:
            return UringIo()
        except OSError as error:
            if name == "uring":
                raise ConfigError(f"io_uring is refused here: {error.strerror}") from error
            _log.info("no io_uring here (%s): the NVMe tier uses threads", error.strerror)
    return ThreadsIo()


def set_direct(fd: int) -> bool:
    """Turn O_DIRECT on for an open file whose first page can be read. False: refused; nothing changed."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        with mmap.mmap(-1, PAGE_BYTES) as page:
            os.preadv(fd, [page], 0)  # some take the flag and then refuse every page of 4096 bytes
    except OSError:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        return False
    return True


def _address(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).__array_interface__["data"][0]
