"""UCX: pulls over RDMA or NVLink where the fabric has them, over TCP where it has not.

The reader posts receives into its slab, the holder sends from its slab, and UCX's rendezvous moves
the bytes: no copy on either side, and no remote key ever leaves a process. Layout of a pull:

    hello    stream, once     4s magic "P2PK" | B version | 3x | Q request tag
    request  its request tag  4s magic | B version | 3x | 16s token | Q nbytes | Q tag
    answer   tag              4s magic | B version | B status | 2x | Q nbytes
    body     tag + 1, ...     pieces of PIECE_BYTES, the last one shorter

Both tags are the reader's choice: random, the low 20 bits zero. Integers are big-endian. An
endpoint carries one pull at a time and is then used again. Everything on UCX happens on the
engine's thread; see `_ucx_engine` for its rules.

UCXX binds its listener to every IPv4 interface. Nothing is sent without a ticket, but UCX itself
is exposed: use it on a network whose machines are trusted. A setting of ours gives way to a
`UCX_*` variable that the user has set.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import ipaddress
import os
import re
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from p2pcache.core.membership import Member
from p2pcache.io._ucx_engine import SETTINGS, Engine, import_ucx
from p2pcache.io._ucx_pulls import Address, Arrival, IdleLinks, UcxPull
from p2pcache.io._ucx_sends import Reception
from p2pcache.io.ports import Ticket, Tickets, TransportError
from p2pcache.types import ConfigError


def ucx_available() -> str | None:
    """Why UCX cannot be used here, or None. Imports ucxx, which takes half a second once."""
    try:
        import_ucx()
    except ConfigError as exc:
        return str(exc)
    return None


class UcxTransport:
    """Pulls over UCX, and serves them.

    devices: UCX's names of the network devices to use; by default the interface that has `host`
    and the RDMA devices behind it. connections_max: readers' endpoints held open.
    """

    name = "ucx"

    def __init__(
        self, host: str, port: int = 0, devices: str = "", connections_max: int = 128
    ) -> None:
        self._host, self._port = host, port
        self._devices = devices or _devices_of(host)
        self._connections_max = connections_max
        self._engine: Engine | None = None
        self._idle: IdleLinks | None = None
        self._pulls: set[UcxPull] = set()
        self._closed = False

    async def start(self, tickets: Tickets) -> str:
        _check_host(self._host)
        loop = asyncio.get_running_loop()
        listening: asyncio.Future[int] = loop.create_future()
        engine = self._running_engine()

        def listen() -> None:
            try:
                outcome = partial(listening.set_result, self._listen(engine, tickets))
            except Exception as exc:
                outcome = partial(listening.set_exception, exc)
            with contextlib.suppress(RuntimeError):  # the loop has gone
                loop.call_soon_threadsafe(outcome)

        if not engine.call(listen):
            raise ConfigError(f"UCX does not run: {engine.error}")
        try:
            return f"{self._host}:{await listening}"
        except ConfigError:
            await self.close()
            raise

    def reaches(self, peer: Member) -> bool:
        return _parse_address(peer.transports.get(self.name, "")) is not None

    def pull(
        self, peer: Member, ticket: Ticket, dest: memoryview, progress: Callable[[int], None]
    ) -> UcxPull:
        """See `ports.Transport`. `dest` is held until `settled`."""
        pull = UcxPull(peer.name, ticket, dest, progress)
        advertised = peer.transports.get(self.name, "")
        address = _parse_address(advertised)
        if self._closed or address is None:
            why = "the transport is closed" if self._closed else f"no ucx address: {advertised!r}"
            pull.finish(TransportError(f"{peer.name}: {why}"))
            return pull
        self._pulls.add(pull)
        pull.settled.add_done_callback(lambda _: self._pulls.discard(pull))
        engine = self._running_engine()
        idle = self._idle
        assert idle is not None
        arrival = Arrival(engine, idle, pull, (peer.name, peer.incarnation, address))
        pull.abandoned = lambda: engine.call(partial(arrival.stop, TransportError("abandoned")))
        if not engine.call(arrival.begin):
            pull.finish(TransportError(f"ucx does not run: {engine.error}"))
        return pull

    async def close(self) -> None:
        self._closed = True
        engine, self._engine = self._engine, None
        if engine is None:
            return
        engine.close()
        await _join(engine.thread)

    def description(self) -> dict[str, Any]:
        """For `status` and `doctor`: versions, the library loaded, and what it can use."""
        reason = ucx_available()
        if reason is not None:
            return {"available": False, "reason": reason}
        ucx, _ = import_ucx()
        info = self._engine.info if self._engine is not None else ""
        return {
            "available": True,
            "version": ".".join(map(str, ucx.get_ucx_version())),
            "library": _loaded_library(),
            "devices": self._devices,
            "resources": sorted(set(re.findall(r"flags -- (\S+)", info))),
            "settings": dict(self._settings()),
        }

    def _settings(self) -> Mapping[str, str]:
        wanted = dict(SETTINGS)
        if self._devices:
            wanted["NET_DEVICES"] = self._devices
        return {name: value for name, value in wanted.items() if f"UCX_{name}" not in _USERS_ENVIRONMENT}

    def _running_engine(self) -> Engine:
        if self._engine is None:
            engine = self._engine = Engine(self._settings())
            idle = self._idle = IdleLinks(engine)
            engine.call(lambda: engine.add(idle))
        return self._engine

    def _listen(self, engine: Engine, tickets: Tickets) -> int:
        """On the engine's thread. Returns the port. Raises ConfigError."""
        where = f"cannot listen for ucx readers on {self._host} port {self._port}"
        if engine.closing:
            if isinstance(engine.error, ConfigError):
                raise engine.error
            raise ConfigError(f"{where}: {engine.error or 'closed'}")
        reception = Reception(engine, tickets, self._connections_max)

        def on_request(connection: int) -> None:
            engine.call(partial(reception.accept, connection))  # not inside UCX's callback

        try:
            engine.listener = engine.ucx.UCXListener.create(engine.worker, self._port, on_request)
        except (engine.ucx.UCXError, OverflowError, RuntimeError) as exc:
            raise ConfigError(f"{where}: {exc}") from exc
        return engine.listener.port


_USERS_ENVIRONMENT = frozenset(os.environ)
"""Taken before ucxx is imported, since that sets some of UCX's variables itself."""


async def _join(thread: threading.Thread) -> None:
    """Join without blocking the loop, and without a thread that the loop's executor would keep."""
    loop = asyncio.get_running_loop()
    joined = loop.create_future()

    def wait() -> None:
        thread.join()
        loop.call_soon_threadsafe(lambda: joined.done() or joined.set_result(None))

    waiter = threading.Thread(target=wait, name="p2pcache-ucx-join", daemon=True)
    waiter.start()
    await joined
    waiter.join()


def _check_host(host: str) -> None:
    try:
        wildcard = ipaddress.IPv4Address(host).is_unspecified
    except ValueError as exc:
        raise ConfigError(f"the ucx transport needs an IPv4 address, not {host!r}") from exc
    if wildcard:
        raise ConfigError(f"the ucx transport cannot advertise the wildcard {host}")


def _parse_address(text: str) -> Address | None:
    host, _, port = text.rpartition(":")
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        return None
    valid_port = port.isascii() and port.isdecimal() and 0 < int(port) < 65_536
    return (host, int(port)) if valid_port else None


def _devices_of(host: str) -> str:
    """UCX's names of what reaches `host`'s network: its interface, and RDMA ports behind that.

    Empty, which leaves the choice to UCX, where no interface has `host` as its first address.
    """
    interface = _interface_of(host)
    if not interface:
        return ""
    names = [interface]
    with contextlib.suppress(OSError, ValueError):
        device = Path("/sys/class/net", interface)
        port = int((device / "dev_port").read_text()) + 1
        names += [f"{rdma.name}:{port}" for rdma in sorted((device / "device/infiniband").iterdir())]
    return ",".join(names)


def _interface_of(host: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                asked = struct.pack("256s", name.encode()[:15])
                if socket.inet_ntoa(fcntl.ioctl(sock, _SIOCGIFADDR, asked)[20:24]) == host:
                    return name
    return ""


_SIOCGIFADDR = 0x8915


def _loaded_library() -> str:
    """The libucp of this process: the wheel's, or the system's where that was preferred."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.rpartition(" ")[2]
        if "/libucp" in path:
            return path
    return ""
