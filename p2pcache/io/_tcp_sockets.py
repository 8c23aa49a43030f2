"""What both ends of the tcp transport share: its frames, its sockets and its threads."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterable

from p2pcache.types import ConfigError

MAGIC = b"P2PK"
VERSION = 1
REQUEST = struct.Struct(">4sB3x16sQ")
ANSWER = struct.Struct(">4sBB2xQ")
OK, GONE, BAD_LENGTH, BAD_VERSION = range(4)

PIECE_BYTES = 512 << 10  # of one send or receive
BUFFER_BYTES = 4 << 20  # of a socket: 1.3 to 2 times what autotuning reaches on loopback
STALLED_S = 10.0  # a peer that took no byte for so long is dropped
SILENT_S = 60.0  # a holder that sent no byte for so long; the deadline of the node comes far earlier

Address = tuple[str, int]


class Workers:
    """Up to `threads_max` daemon threads, started when first needed, that run jobs in order."""

    def __init__(self, name: str, threads_max: int) -> None:
        if threads_max < 1:
            raise ConfigError(f"threads_max must be at least 1, not {threads_max}")
        self._name, self._threads_max = name, threads_max
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._unfinished = 0

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job`, which does not raise, on some thread."""
        with self._lock:
            self._unfinished += 1
            if len(self._threads) < min(self._unfinished, self._threads_max):
                name = f"{self._name}-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
                self._threads[-1].start()
        self._jobs.put(job)

    def stop(self) -> list[threading.Thread]:
        """Threads leave when the jobs submitted so far are done. Returns them, to be joined."""
        with self._lock:
            threads, self._threads = self._threads, []
        for _ in threads:
            self._jobs.put(None)
        return threads

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # it refers to a destination, and the next may be long in coming
            with self._lock:
                self._unfinished -= 1


async def join(threads: list[threading.Thread]) -> None:
    """Join without blocking the loop, and without a thread that the loop's executor would keep."""
    loop = asyncio.get_running_loop()
    joined = loop.create_future()

    def wait() -> None:
        for thread in threads:
            thread.join()
        loop.call_soon_threadsafe(lambda: joined.done() or joined.set_result(None))

    waiter = threading.Thread(target=wait, name="p2pcache-tcp-join", daemon=True)
    waiter.start()
    await joined
    waiter.join()


def parse_address(text: str) -> Address | None:
    host, _, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        return None
    valid_port = port.isascii() and port.isdecimal() and 0 < int(port) < 65_536
    return (host, int(port)) if valid_port and bracketed == (version == 6) else None


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def listen(host: str, port: int) -> socket.socket:
    sock = socket.socket(_family(host), socket.SOCK_STREAM)
    try:
        if ipaddress.ip_address(host).is_unspecified:
            raise ValueError("peers cannot reach a wildcard")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _set_buffers(sock)  # connections inherit them; after `listen` the window would stay small
        sock.bind((host, port))
        sock.listen(128)
        sock.setblocking(False)
    except (OSError, ValueError, OverflowError) as exc:
        sock.close()
        raise ConfigError(f"cannot listen for tcp readers on {host} port {port}: {exc}") from exc
    return sock


def reader_socket(address: Address) -> socket.socket:
    sock = socket.socket(_family(address[0]), socket.SOCK_STREAM)
    _set_buffers(sock)
    tune(sock)
    set_timeouts(sock, receive_s=SILENT_S, send_s=STALLED_S)
    return sock


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


def reset(sock: socket.socket) -> None:
    """Close at once: what is unsent is of no use, and the reader should know without delay."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def close_all(socks: Iterable[socket.socket]) -> None:
    for sock in socks:
        sock.close()
