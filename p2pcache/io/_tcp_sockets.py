"""What both ends of the tcp transport share: its frames and its sockets."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import termios
from array import array
from collections.abc import Iterable

from p2pcache.io._pulls import Address, check_host
from p2pcache.types import ConfigError

MAGIC = b"P2PK"
VERSION = 2
REQUEST = struct.Struct(">4sBB2x16sQQQ")
ANSWER = struct.Struct(">4sBB2xQ")
OK, GONE, BAD_RANGE, BAD_VERSION = range(4)
EARLY = 1  # a request that may be here before its ticket

PIECE_BYTES = 512 << 10  # of one send or receive
BUFFER_BYTES = 4 << 20  # of a socket: 1.3 to 2 times what autotuning reaches on loopback
STALLED_S = 10.0  # a peer that took no byte for so long is dropped
SILENT_S = 60.0  # a holder that sent no byte for so long; the deadline of the node comes far earlier


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def listen(host: str, port: int) -> socket.socket:
    check_host(host)
    sock = socket.socket(_family(host), socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _set_buffers(sock)  # connections inherit them; after `listen` the window would stay small
        sock.bind((host, port))
        sock.listen(128)
        sock.setblocking(False)
    except (OSError, OverflowError) as exc:
        sock.close()
        raise ConfigError(f"cannot listen for tcp readers on {host} port {port}: {exc}") from exc
    return sock


def reader_socket(address: Address) -> socket.socket:
    sock = socket.socket(_family(address[0]), socket.SOCK_STREAM)
    _set_buffers(sock)
    tune(sock)
    set_timeouts(sock, receive_s=SILENT_S, send_s=STALLED_S)
    return sock


def ask(sock: socket.socket, token: bytes, nbytes: int, start: int, count: int, early: int = 0) -> None:
    """Send a request. An early one never waits. Raises OSError."""
    request = REQUEST.pack(MAGIC, VERSION, early, token, nbytes, start, count)
    if not early:
        sock.sendall(request)
    elif sock.send(request, socket.MSG_DONTWAIT) < len(request):
        raise BlockingIOError("no room for a request")


def tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def set_timeouts(sock: socket.socket, receive_s: float, send_s: float) -> None:
    """By the kernel: Python's own timeout would make the socket non-blocking and poll each piece."""
    sock.setblocking(True)
    for option, seconds in ((socket.SO_RCVTIMEO, receive_s), (socket.SO_SNDTIMEO, send_s)):
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", int(seconds), 0))


def _set_buffers(sock: socket.socket) -> None:
    """Fixed large buffers, where the kernel grants them: a small fixed one is worse than its tuning."""
    for option, limit in ((socket.SO_RCVBUF, "rmem_max"), (socket.SO_SNDBUF, "wmem_max")):
        with contextlib.suppress(OSError, ValueError), open(f"/proc/sys/net/core/{limit}") as file:
            if int(file.read()) >= BUFFER_BYTES:
                sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)


def readable(sock: socket.socket) -> int:
    """Bytes that have come and can be received without a wait."""
    count = array("i", [0])
    fcntl.ioctl(sock, termios.FIONREAD, count)
    return count[0]


def reset(sock: socket.socket) -> None:
    """Close at once: what is unsent is of no use, and the reader should know without delay."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def close_all(socks: Iterable[socket.socket]) -> None:
    for sock in socks:
        sock.close()
