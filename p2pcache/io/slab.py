"""The host slab: a memfd that the node, its engines and same-host peers map.

A memfd has no name in `/dev/shm` to leak or to clash, lives until the last process lets go of it,
and is sealed against resizing, so that a mapping can never fault because somebody truncated it.
The node hands the descriptor over a unix socket in a 0700 folder: read-write to its engines,
read-only to peers. The first page holds a nonce that the mapper compares with the one it was told.

    page 0:  "p2pcache" | u32 version | u32 zero | u64 slab bytes | 16 bytes nonce
    then the slab; offset 0 of the slab is byte HEADER_BYTES of the file
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from p2pcache.core import wire
from p2pcache.core.membership import Member
from p2pcache.io._memory import available_bytes
from p2pcache.types import ConfigError, NodeDown, RemoteError

HEADER_BYTES = mmap.PAGESIZE
_HEADER = struct.Struct("<8sIIQ16s")
_MAGIC, _VERSION = b"p2pcache", 1
_ROOM_LEFT_BYTES = 64 << 20
_LENGTH = struct.Struct("<I")
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class MappedSlab:
    """A slab mapped into this process. `view` slices it without a copy."""

    def __init__(self, fd: int, nbytes: int, nonce: bytes, *, writable: bool):
        """Maps `fd` (which stays the caller's). Raises RemoteError unless it is the slab named by nonce."""
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        if not _sealed(fd):
            raise RemoteError("the slab handed over is not sealed: its owner could cut it under this mapping")
        if os.fstat(fd).st_size != nbytes + HEADER_BYTES:
            raise RemoteError("the slab handed over has another size than announced")
        self._map = mmap.mmap(fd, nbytes + HEADER_BYTES, access=access)
        expected = _HEADER.pack(_MAGIC, _VERSION, 0, nbytes, nonce)
        if self._map[: _HEADER.size] != expected:
            self._map.close()
            raise RemoteError("the slab handed over is not the one announced: its nonce differs")
        self.nbytes = nbytes
        self._bytes = memoryview(self._map)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """`nbytes` from `offset`; writable where the mapping is.

        Raises ValueError out of bounds, NodeDown after `unmap`.
        """
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise ValueError(f"[{offset}, {offset + nbytes}) is outside a slab of {self.nbytes} bytes")
        try:
            return self._bytes[HEADER_BYTES + offset : HEADER_BYTES + offset + nbytes]
        except ValueError:  # released
            raise NodeDown("this mapping of the slab has been given up") from None

    def unmap(self) -> None:
        """Give up the mapping: at once, or with the last view of it that somebody still has. Idempotent."""
        self._bytes.release()
        with contextlib.suppress(BufferError):
            self._map.close()


class HostSlab(MappedSlab):
    """The node's own slab: creates the memfd and owns it."""

    def __init__(self, nbytes: int):
        """Takes the memory now: a slab that does not fit must fail here, not under a later write."""
        available = available_bytes()
        if nbytes + _ROOM_LEFT_BYTES > available:
            raise ConfigError(
                f"host_bytes_max asks for a slab of {nbytes:,} bytes, but this host or control group has"
                f" {available:,} bytes of memory available"
            )
        self.nonce = secrets.token_bytes(16)
        self.fd = os.memfd_create("p2pcache-slab", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self.fd, 0, nbytes + HEADER_BYTES)
            os.pwrite(self.fd, _HEADER.pack(_MAGIC, _VERSION, 0, nbytes, self.nonce), 0)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | fcntl.F_SEAL_SEAL)
            super().__init__(self.fd, nbytes, self.nonce, writable=True)
        except OSError as error:
            os.close(self.fd)
            raise ConfigError(f"a slab of {nbytes:,} bytes cannot be had: {error.strerror}") from None

    def read_only_fd(self) -> int:
        """A new descriptor of the slab that cannot write. The caller closes it."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Give up our hold; the memory lives on until the last engine has let go too."""
        self.unmap()
        os.close(self.fd)


def attach(
    path: str,
    role: str,
    timeout_s: float,
    using: Callable[[socket.socket], AbstractContextManager[None]] = contextlib.nullcontext,
) -> tuple[socket.socket, Member, MappedSlab]:
    """Connect to a node's socket and map its slab: role `engine` read-write, `peer` read-only.

    Blocking, for `timeout_s` in all; using: entered for that long, and may shut the socket down to end it.
    The caller owns the socket and keeps it open for as long as it uses the slab: its end
    of file is how the node learns that this process is gone. Raises OSError or RemoteError.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout_s)
    deadline_s = time.monotonic() + timeout_s
    fds: list[int] = []
    try:
        with using(sock):
            sock.connect(path)
            send_frame(sock, wire.encode(wire.Message("q", 0, "attach", {"role": role})))
            _set_deadline(sock, deadline_s)
            head, fds, _, _ = socket.recv_fds(sock, _LENGTH.size, 1)
            reply = wire.decode(_receive(sock, _frame_length(head), deadline_s=deadline_s))
        sock.settimeout(timeout_s)
        if reply.kind != "r" or reply.op != "attach" or len(fds) != 1:
            raise RemoteError(
                f"the node refused to hand over its slab: {reply.body.get('text', 'no reason')}"
            )
        slab = MappedSlab(fds[0], reply.body["slab_bytes"], reply.body["nonce"], writable=role == "engine")
        return sock, Member.from_wire(reply.body["member"]), slab
    except BaseException:
        sock.close()
        raise
    finally:
        for fd in fds:
            os.close(fd)


def send_frame(sock: socket.socket, raw: bytes) -> None:
    """One message, preceded by its length."""
    sock.sendall(_LENGTH.pack(len(raw)) + raw)


def receive_frame(sock: socket.socket) -> bytes | None:
    """The next message, or None at the end of file. Blocking."""
    head = _receive(sock, _LENGTH.size, eof_ok=True)
    return None if not head else _receive(sock, _frame_length(head))


def _frame_length(head: bytes) -> int:
    if len(head) < _LENGTH.size:
        raise RemoteError("the node closed the connection")
    (length,) = _LENGTH.unpack(head)
    if length > wire.MESSAGE_BYTES_MAX:
        raise wire.WireError(f"a message of {length:,} bytes was announced")
    return length


def _set_deadline(sock: socket.socket, deadline_s: float) -> None:
    """For the next call on `sock`. Raises TimeoutError where it has passed."""
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the node took too long to answer")
    sock.settimeout(left_s)


def _receive(
    sock: socket.socket, nbytes: int, *, eof_ok: bool = False, deadline_s: float | None = None
) -> bytes:
    buffer = bytearray(nbytes)
    view, have = memoryview(buffer), 0
    while have < nbytes:
        if deadline_s is not None:
            _set_deadline(sock, deadline_s)
        got = sock.recv_into(view[have:])
        if got == 0:
            if eof_ok and have == 0:
                return b""
            raise RemoteError("the node closed the connection")
        have += got
    return bytes(buffer)


def _sealed(fd: int) -> bool:
    """Whether nobody can change the size of a file any more."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SIZE_SEALS == _SIZE_SEALS
    except OSError:  # no memfd
        return False
