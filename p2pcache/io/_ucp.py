"""UCP's listener, endpoints and transfers, by ctypes, on a worker that ucxx made.

ucxx's listener binds to every interface, takes no address, and nothing but that listener makes
endpoints of what it accepted. UCP's own listener binds to the address it is given. So these are
UCP's here; the library, its context, its worker and its progress stay ucxx's.

Structures are those of `ucp/api/ucp.h` 1.x. Each says by a mask which of its fields are set, so later
versions read them too. All of this belongs to the worker's thread, and so do the callbacks, which
run inside `progress`. The calls never wait, so they keep the GIL.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import itertools
import os
import socket
import struct
from collections.abc import Callable
from ctypes import POINTER, c_char, c_int, c_int8, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

Buffer = memoryview | bytes | bytearray

HALF_IN_S = 0.05  # round trips between a connection and its first message

_SO_ATTACH_FILTER = 26
_BPF_RETURN = 0x06
_IN_PROGRESS = 1
_NO_MORE_THAN_A_STATUS = 2**64 - 100  # from here on a pointer is an error's number
_EVERY_BIT = 2**64 - 1


class UcpError(ConnectionError):
    """UCP said no, or the peer has gone."""


class _SockAddr(ctypes.Structure):
    _fields_ = [("addr", c_void_p), ("addrlen", c_uint32)]


class _Handler(ctypes.Structure):
    _fields_ = [("callback", c_void_p), ("arg", c_void_p)]


class _ListenerParams(ctypes.Structure):
    _fields_ = [
        ("field_mask", c_uint64),
        ("sockaddr", _SockAddr),
        ("accept_handler", _Handler),
        ("conn_handler", _Handler),
    ]
    SOCK_ADDR, CONN_HANDLER = 1 << 0, 1 << 2


class _ListenerAttr(ctypes.Structure):
    _fields_ = [("field_mask", c_uint64), ("sockaddr", c_char * 128)]
    SOCK_ADDR = 1 << 0


class _EndpointParams(ctypes.Structure):
    _fields_ = [
        ("field_mask", c_uint64),
        ("address", c_void_p),
        ("err_mode", c_int),
        ("err_handler", _Handler),
        ("user_data", c_void_p),
        ("flags", c_uint32),
        ("sockaddr", _SockAddr),
        ("conn_request", c_void_p),
        ("name", c_void_p),
        ("local_sockaddr", _SockAddr),
    ]
    ERR_MODE, ERR_HANDLER, SOCK_ADDR, FLAGS, CONN_REQUEST = 1 << 1, 1 << 2, 1 << 4, 1 << 5, 1 << 6
    ERR_MODE_PEER = 1
    CLIENT_SERVER = 1


class _RequestParams(ctypes.Structure):
    _fields_ = [
        ("op_attr_mask", c_uint32),
        ("flags", c_uint32),
        ("request", c_void_p),
        ("callback", c_void_p),
        ("datatype", c_uint64),
        ("user_data", c_void_p),
        ("reply_buffer", c_void_p),
        ("memory_type", c_uint32),
        ("recv_info", c_void_p),
        ("memh", c_void_p),
    ]
    FLAGS = 1 << 4
    CLOSE_FORCE = 1
    RECEIVE_ALL = 1


_PLAIN = _RequestParams()
_WHOLE = _RequestParams(op_attr_mask=_RequestParams.FLAGS, flags=_RequestParams.RECEIVE_ALL)
_FORCE = _RequestParams(op_attr_mask=_RequestParams.FLAGS, flags=_RequestParams.CLOSE_FORCE)

_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "ucp_listener_create": (c_int8, [c_void_p, POINTER(_ListenerParams), POINTER(c_void_p)]),
    "ucp_listener_query": (c_int8, [c_void_p, POINTER(_ListenerAttr)]),
    "ucp_listener_reject": (c_int8, [c_void_p, c_void_p]),
    "ucp_listener_destroy": (None, [c_void_p]),
    "ucp_ep_create": (c_int8, [c_void_p, POINTER(_EndpointParams), POINTER(c_void_p)]),
    "ucp_ep_close_nbx": (c_void_p, [c_void_p, POINTER(_RequestParams)]),
    "ucp_tag_send_nbx": (c_void_p, [c_void_p, c_void_p, c_size_t, c_uint64, POINTER(_RequestParams)]),
    "ucp_tag_recv_nbx": (
        c_void_p,
        [c_void_p, c_void_p, c_size_t, c_uint64, c_uint64, POINTER(_RequestParams)],
    ),
    "ucp_stream_send_nbx": (c_void_p, [c_void_p, c_void_p, c_size_t, POINTER(_RequestParams)]),
    "ucp_stream_recv_nbx": (
        c_void_p,
        [c_void_p, c_void_p, c_size_t, POINTER(c_size_t), POINTER(_RequestParams)],
    ),
    "ucp_request_check_status": (c_int8, [c_void_p]),
    "ucp_request_cancel": (None, [c_void_p, c_void_p]),
    "ucp_request_free": (None, [c_void_p]),
}


class Ucp:
    """The library that ucxx has loaded, and one of its workers."""

    def __init__(self, worker: int) -> None:
        """worker: its `ucp_worker_h`. Raises OSError where the library is not loaded."""
        self.worker = worker
        # Already in the process, so the loader finds it by this name, wherever it came from.
        self.library = ctypes.PyDLL("libucp.so.0")
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self.library, name)
            function.restype, function.argtypes = result, arguments
        self._describe = ctypes.PyDLL("libucs.so.0").ucs_status_string
        self._describe.restype, self._describe.argtypes = ctypes.c_char_p, [c_int8]

    def check(self, status: int) -> None:
        if status < 0:
            raise UcpError(self.describe(status))

    def describe(self, status: int) -> str:
        return self._describe(status).decode()


class Request:
    """A transfer under way. It keeps its buffer until it has completed; UCP does not."""

    def __init__(self, ucp: Ucp, pointer: int | None, buffer: object = None) -> None:
        self._ucp = ucp
        self._pointer, self._buffer = pointer or 0, buffer
        self._status = 0
        if self._pointer >= _NO_MORE_THAN_A_STATUS:
            self._end(self._pointer - 2**64)

    @property
    def completed(self) -> bool:
        """Whether nothing reads or writes the buffer any more. Once true, it stays so."""
        if self._pointer:
            status = self._ucp.library.ucp_request_check_status(self._pointer)
            if status == _IN_PROGRESS:
                return False
            self._ucp.library.ucp_request_free(self._pointer)
            self._end(status)
        self._buffer = None
        return True

    def check_error(self) -> None:
        """Raises UcpError where the transfer has failed."""
        self._ucp.check(self._status)

    def cancel(self) -> None:
        """Of use only to a receive that has not met its message; it completes soon."""
        if not self.completed:
            self._ucp.library.ucp_request_cancel(self._ucp.worker, self._pointer)

    def _end(self, status: int) -> None:
        self._pointer, self._status = 0, status


class Endpoint:
    """A connection, with UCP's error handling: without it a peer that dies is never noticed."""

    def __init__(self, ucp: Ucp, params: _EndpointParams) -> None:
        """Raises UcpError."""
        self._ucp = ucp
        self.failure = ""
        id_ = next(_ids)
        _endpoints[id_] = self
        params.field_mask |= params.ERR_MODE | params.ERR_HANDLER
        params.err_mode = params.ERR_MODE_PEER
        params.err_handler = _Handler(ctypes.cast(_on_failure, c_void_p), id_)
        handle = c_void_p()
        ucp.check(ucp.library.ucp_ep_create(ucp.worker, params, handle))
        self._handle = handle.value

    @classmethod
    def connected(cls, ucp: Ucp, host: str, port: int) -> Endpoint:
        params = _EndpointParams(
            field_mask=_EndpointParams.SOCK_ADDR | _EndpointParams.FLAGS,
            flags=_EndpointParams.CLIENT_SERVER,
        )
        raw = _packed_address(host, port)
        params.sockaddr = _SockAddr(ctypes.cast(raw, c_void_p), len(raw))
        return cls(ucp, params)

    @classmethod
    def accepted(cls, ucp: Ucp, connection: int) -> Endpoint:
        """connection: as a `Listener` told of it."""
        return cls(ucp, _EndpointParams(field_mask=_EndpointParams.CONN_REQUEST, conn_request=connection))

    def send(self, memory: Buffer, tag: int) -> Request:
        array = np.frombuffer(memory, np.uint8)
        sent = self._ucp.library.ucp_tag_send_nbx(self._handle, array.ctypes.data, array.nbytes, tag, _PLAIN)
        return Request(self._ucp, sent, array)

    def receive(self, memory: Buffer, tag: int) -> Request:
        """From whoever sends under this tag: tags are the worker's. To give up, cancel it too."""
        array = np.frombuffer(memory, np.uint8)
        received = self._ucp.library.ucp_tag_recv_nbx(
            self._ucp.worker, array.ctypes.data, array.nbytes, tag, _EVERY_BIT, _PLAIN
        )
        return Request(self._ucp, received, array)

    def send_stream(self, memory: Buffer) -> Request:
        array = np.frombuffer(memory, np.uint8)
        sent = self._ucp.library.ucp_stream_send_nbx(self._handle, array.ctypes.data, array.nbytes, _PLAIN)
        return Request(self._ucp, sent, array)

    def receive_stream(self, memory: bytearray) -> Request:
        """The next bytes that this very peer sends, all of them."""
        array, length = np.frombuffer(memory, np.uint8), c_size_t()
        received = self._ucp.library.ucp_stream_recv_nbx(
            self._handle, array.ctypes.data, array.nbytes, length, _WHOLE
        )
        return Request(self._ucp, received, (array, length))

    def force_close(self) -> Request:
        """At once, without a flush, which a frozen peer would never let end. Once only."""
        return Request(self._ucp, self._ucp.library.ucp_ep_close_nbx(self._handle, _FORCE))


class Listener:
    """Tells of connections: make each an `Endpoint`, or `reject` it."""

    def __init__(self, ucp: Ucp, host: str, port: int, on_request: Callable[[int], None]) -> None:
        """Binds to `host` alone. `on_request` runs inside `progress`. Raises UcpError."""
        self._ucp, self._host, self.on_request = ucp, host, on_request
        id_ = next(_ids)
        _listeners[id_] = self
        raw = _packed_address(host, port)
        params = _ListenerParams(
            field_mask=_ListenerParams.SOCK_ADDR | _ListenerParams.CONN_HANDLER,
            sockaddr=_SockAddr(ctypes.cast(raw, c_void_p), len(raw)),
            conn_handler=_Handler(ctypes.cast(_on_connection, c_void_p), id_),
        )
        handle = c_void_p()
        ucp.check(ucp.library.ucp_listener_create(ucp.worker, params, handle))
        self._handle = handle.value
        attr = _ListenerAttr(field_mask=_ListenerAttr.SOCK_ADDR)
        ucp.check(ucp.library.ucp_listener_query(self._handle, attr))
        # Either family's port: two bytes after the family.
        at = ctypes.addressof(attr) + _ListenerAttr.sockaddr.offset + 2
        (self.port,) = struct.unpack(">H", ctypes.string_at(at, 2))

    def reject(self, connection: int) -> None:
        self._ucp.library.ucp_listener_reject(self._handle, connection)

    def deafen(self) -> None:
        """Let no connection in any more; those that are in are still told of.

        UCX loses track of a connection that is in but has not said what it wants. If its listener
        has gone when it does, UCX follows a dangling pointer. So this comes first, then `HALF_IN_S`
        in which they speak, and only then `close`.
        """
        sock = _listening_socket(self._host, self.port)
        if sock is None:
            return
        # Not `shutdown`: UCX would try to accept, fail and say so, over and over.
        drop_all = ctypes.create_string_buffer(struct.pack("=HBBI", _BPF_RETURN, 0, 0, 0), 8)
        program = struct.pack("@HP", 1, ctypes.addressof(drop_all))
        with sock, contextlib.suppress(OSError):  # a kernel without socket filters
            sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)

    def close(self) -> None:
        """Connections are refused from now on. Once only."""
        self._ucp.library.ucp_listener_destroy(self._handle)


def _listening_socket(host: str, port: int) -> socket.socket | None:
    """A descriptor of our own for what UCX listens on, which it does not show."""
    for entry in os.listdir("/proc/self/fd"):
        try:
            fd = os.dup(int(entry))
        except OSError:  # listed, and gone
            continue
        try:
            sock = socket.socket(fileno=fd)
        except OSError:  # no socket
            os.close(fd)
            continue
        with contextlib.suppress(OSError):
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                if sock.getsockname()[:2] == (host, port):
                    return sock
        sock.close()
    return None


def _packed_address(host: str, port: int) -> ctypes.Array:
    """A `sockaddr_in` or `sockaddr_in6`. Raises UcpError for a port that is none."""
    address = ipaddress.ip_address(host)
    if not 0 <= port < 65_536:
        raise UcpError(f"{port} is no port")
    if address.version == 4:
        raw = struct.pack("=H", socket.AF_INET) + struct.pack(">H4s8x", port, address.packed)
    else:
        raw = struct.pack("=H", socket.AF_INET6) + struct.pack(">H4x16s4x", port, address.packed)
    return ctypes.create_string_buffer(raw, len(raw))


# C holds these two for as long as it lives, and so must we; who is meant is looked up by number.
_ids = itertools.count(1)
_endpoints: WeakValueDictionary[int, Endpoint] = WeakValueDictionary()
_listeners: WeakValueDictionary[int, Listener] = WeakValueDictionary()


@ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_int8)
def _on_failure(id_: int, _: int, status: int) -> None:
    endpoint = _endpoints.get(id_)
    if endpoint is not None:
        endpoint.failure = endpoint._ucp.describe(status)


@ctypes.CFUNCTYPE(None, c_void_p, c_void_p)
def _on_connection(connection: int, id_: int) -> None:
    listener = _listeners.get(id_)
    if listener is not None:
        listener.on_request(connection)
