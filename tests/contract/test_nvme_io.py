"""What moves the NVMe store's bytes, by itself: which backend, O_DIRECT, and the native ring's bounds."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os

import pytest

from p2pcache import _native
from p2pcache.io import _nvme_files, _nvme_io
from p2pcache.io.store_nvme import NvmeStore
from p2pcache.types import ConfigError


@pytest.fixture
def ring():
    try:
        return _native.Ring(2)
    except OSError as error:
        pytest.skip(f"io_uring is refused here: {error}")


@pytest.fixture
def file(tmp_path):
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.pwrite(fd, bytes(range(256)) * 64, 0)
    yield fd
    os.close(fd)


def test_where_io_uring_is_refused_threads_are_used_unless_it_was_asked_for(monkeypatch):
    def refused(_entries):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(_native, "Ring", refused)
    assert _nvme_io.backend("auto").name == _nvme_io.backend("threads").name == "threads"
    with pytest.raises(ConfigError, match="io_uring is refused here: Operation not permitted"):
        _nvme_io.backend("uring")
    with pytest.raises(ConfigError, match="unknown NVMe IO 'mmap'"):
        _nvme_io.backend("mmap")


@pytest.mark.parametrize("fault", ["no ring", "not taken", "not done"])
def test_what_a_ring_cannot_move_is_moved_all_the_same(ring, file, monkeypatch, fault):
    class Short:
        """A ring that is short of something every other time."""

        def __init__(self, entries):
            made.append(self)
            if fault == "no ring" and len(made) > 1:  # the first one is the probe
                raise OSError(errno.EMFILE, "Too many open files")
            self.ring, self.turn = Ring(entries), 0

        in_flight = property(lambda self: self.ring.in_flight)

        def submit(self, *how):
            self.turn += 1
            if fault == "not taken" and self.turn % 2:
                raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
            self.ring.submit(*how)

        def wait(self):
            self.turn += 1
            tag, moved = self.ring.wait()
            return tag, -errno.EAGAIN if fault == "not done" and self.turn % 2 else moved

    made, Ring = [], _native.Ring
    monkeypatch.setattr(_native, "Ring", Short)
    uring = _nvme_io.UringIo()
    nothing = memoryview(b"")
    parts = [memoryview(bytearray(1000)) for _ in range(10)]
    pieces = (_nvme_io.Piece(1000 * n, [part], nothing, nothing) for n, part in enumerate(parts))
    assert [piece.offset for piece in uring.move(file, pieces, write=False)] == list(range(0, 10_000, 1000))
    assert b"".join(parts) == os.pread(file, 10_000, 0) and len(made) == 2
    with pytest.raises(OSError, match="Bad file descriptor"):
        list(uring.move(-1, [_nvme_io.Piece(0, parts[:1], nothing, nothing)], write=False))


def test_a_file_that_cannot_be_direct_stays_as_it_was():
    with open("/proc/version", "rb") as file:
        before = fcntl.fcntl(file, fcntl.F_GETFL)
        assert not _nvme_io.set_direct(file.fileno())
        assert fcntl.fcntl(file, fcntl.F_GETFL) == before and file.read(5) == b"Linux"


def test_a_filesystem_without_direct_io_is_warned_of_once(tmp_path, monkeypatch, caplog):
    answers = iter([True, False])  # one that takes it for some files only counts as one that does not
    monkeypatch.setattr(_nvme_files, "set_direct", lambda fd: next(answers))

    async def scenario():
        store = await NvmeStore.open(tmp_path / "nvme", capacity_bytes=4 << 20, segment_bytes=1 << 20)
        flags = [fcntl.fcntl(fd, fcntl.F_GETFL) for fd in store._files._segment_fds]
        await store.close()
        return flags, store.status()

    with caplog.at_level(logging.WARNING):
        flags, status = asyncio.run(scenario())
    assert not status["direct"] and not any(flag & os.O_DIRECT for flag in flags)
    assert [r.getMessage() for r in caplog.records if "O_DIRECT" in r.getMessage()] == [
        f"NVMe path {tmp_path / 'nvme'} is on a filesystem without O_DIRECT: it goes through the page cache"
    ]


def test_the_ring_moves_scattered_parts_and_tells_each_by_its_tag(ring, file):
    one, two = bytearray(100), bytearray(50)
    ring.submit(7, False, file, 10, [one, two])
    ring.submit(1 << 40, True, file, 1000, [b"abc", b"", b"de"])
    assert ring.in_flight == 2
    assert dict([ring.wait(), ring.wait()]) == {7: 150, 1 << 40: 5} and ring.in_flight == 0
    assert one == bytes(range(10, 110)) and two == bytes(range(110, 160))
    assert os.pread(file, 7, 999) == bytes([999 % 256]) + b"abcde" + bytes([1005 % 256])


def test_the_ring_refuses_what_it_cannot_hold_and_tells_errors_as_numbers(ring, file):
    with pytest.raises(ValueError, match="nothing is under way"):
        ring.wait()
    with pytest.raises(ValueError, match="too many parts"):
        ring.submit(0, True, file, 0, [b"x"] * 9)
    with pytest.raises(BufferError):
        ring.submit(0, False, file, 0, [b"read-only"])
    ring.submit(1, False, -1, 0, [bytearray(1)])
    ring.submit(2, False, file, 1 << 40, [bytearray(1)])
    with pytest.raises(ValueError, match="full"):
        ring.submit(3, False, file, 0, [bytearray(1)])
    assert dict([ring.wait(), ring.wait()]) == {1: -errno.EBADF, 2: 0}
