"""A network of this process's own, with nothing but loopback: for servers that insist on all interfaces.

Ray Serve's replicas listen on every interface and have no setting for it. In a network namespace of its
own that reaches nobody. Threads and processes started afterwards are in it too. Needs root, or
unprivileged user namespaces.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

_CLONE_NEWNET = 0x40000000
_CLONE_NEWUSER = 0x10000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1
_libc = ctypes.CDLL(None, use_errno=True)


def enter() -> None:
    """Move the calling thread into a new network with loopback up. Raises OSError where it may not."""
    flags = _CLONE_NEWNET if os.geteuid() == 0 else _CLONE_NEWNET | _CLONE_NEWUSER
    _call(_libc.unshare, flags)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        asked = struct.pack("16sH14x", b"lo", 0)
        (flags,) = struct.unpack("16xH14x", fcntl.ioctl(s, _SIOCGIFFLAGS, asked))
        fcntl.ioctl(s, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))


@contextmanager
def entered() -> Iterator[None]:
    """The same for a block: afterwards the calling thread is where it was. Needs root."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        try:
            enter()
            yield
        finally:  # also where loopback did not come up
            _call(_libc.setns, home, _CLONE_NEWNET)
    finally:
        os.close(home)


def _call(function: ctypes._CFuncPtr, *arguments: int) -> None:
    if function(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{function.__name__}: {os.strerror(number)}")
