"""UCX: pulls over RDMA or NVLink where the fabric has them, over TCP where it has not.

The reader posts receives into its slab, the holder sends from its slab, and UCX's rendezvous moves
the bytes: no copy on either side, and no remote key ever leaves a process. Layout of a pull:

    request  stream           4s magic "P2PK" | B version | 3x | 16s token | Q nbytes | Q tag
    body     tag + 1, ...     pieces of PIECE_BYTES, the last one shorter
    answer   tag              4s magic | B version | B status | 2x | Q nbytes: why none comes

An answer comes only where no body does, because it is empty or refused: receives for both are posted
before the request leaves, so there is no answer to wait for, and what comes is expected. The tag is the
reader's choice: random, the low 20 bits zero. Integers are big-endian. An endpoint carries one pull at
a time and is then used again. Everything on UCX happens on the engine's thread; see `_ucx_engine` for
its rules.

Every port is bound to one address: our listener to `host`, UCX's own to that of the devices' interface.
Nothing is sent without a ticket, but UCX itself trusts whoever connects: use it on a network whose
machines are trusted. A setting of ours gives way to a `UCX_*` variable that the user has set; one that
names the devices decides where UCX's own ports listen.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import importlib.util
import os
import re
import socket
import struct
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from p2pcache.core.membership import Member
from p2pcache.io._pulls import Workers, check_host, join, parse_address
from p2pcache.io._ucp import UcpError
from p2pcache.io._ucx_engine import SETTINGS, Engine, import_ucx
from p2pcache.io._ucx_pulls import Arrival, IdleLinks, UcxPull
from p2pcache.io._ucx_sends import Reception
from p2pcache.io.ports import Ticket, Tickets, TransportError
from p2pcache.types import ConfigError

CHECKERS = 2  # threads; one checks about as fast as one core copies


def ucx_available() -> str | None:
    """Why UCX cannot be used here, or None. Imports ucxx, which takes half a second once."""
    try:
        import_ucx()
    except ConfigError as exc:
        return str(exc)
    return None


class UcxTransport:
    """Pulls over UCX, and serves them.

    devices: UCX's names of the network devices to use; by default those of `UCX_NET_DEVICES`, or else
    the interface that has `host` and the RDMA devices behind it. connections_max: readers' endpoints
    held open.
    """

    name = "ucx"

    def __init__(self, host: str, port: int = 0, devices: str = "", connections_max: int = 128) -> None:
        self._host, self._port = host, port
        self._devices = devices or _USERS_ENVIRONMENT.get("UCX_NET_DEVICES") or _devices_of(host)
        self._problem = _problem_with(host, self._devices)
        self._connections_max = connections_max
        self._engine: Engine | None = None
        self._idle: IdleLinks | None = None
        self._checkers = Workers("p2pcache-ucx-check", CHECKERS)
        self._closed = False

    async def start(self, tickets: Tickets) -> str:
        if self._problem:
            raise ConfigError(self._problem)
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
        return parse_address(peer.transports.get(self.name, "")) is not None

    def pull(
        self, peer: Member, ticket: Ticket, dest: memoryview, progress: Callable[[int], None]
    ) -> UcxPull:
        """See `ports.Transport`. `dest` is held until `settled`."""
        pull = UcxPull(peer.name, ticket, dest, progress, self._checkers)
        advertised = peer.transports.get(self.name, "")
        address = parse_address(advertised)
        why = "the transport is closed" if self._closed else self._problem
        if why or address is None:
            pull.finish(TransportError(f"{peer.name}: {why or f'no ucx address: {advertised!r}'}"))
            return pull
        try:
            engine = self._running_engine()
        except RuntimeError as exc:  # no thread for it
            pull.finish(TransportError(f"{peer.name}: ucx does not run: {exc}"))
            return pull
        idle = self._idle
        assert idle is not None
        arrival = Arrival(engine, idle, pull, (peer.name, peer.incarnation, address))
        pull.stop = lambda: engine.call(partial(arrival.stop, TransportError("abandoned")))
        if not engine.call(arrival.begin):
            pull.finish(TransportError(f"ucx does not run: {engine.error}"))
        return pull

    async def close(self) -> None:
        self._closed = True
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
            await join([engine.thread])
        await join(self._checkers.stop())

    def ask_early(self, peer: Member, nbytes: int) -> bytes | None:
        return None

    def forget_early(self, token: bytes) -> None:
        pass

    def description(self) -> dict[str, Any]:
        """`ucx_facts`, and what it has been given to use."""
        facts = ucx_facts()
        if not facts["available"]:
            return facts
        info = self._engine.info if self._engine is not None else ""
        return facts | {
            "devices": self._devices,
            "resources": _resources(info),
            "settings": dict(self._settings()),
        }

    def _settings(self) -> Mapping[str, str]:
        chosen = {name: value for name, value in SETTINGS.items() if f"UCX_{name}" not in _USERS_ENVIRONMENT}
        return {**chosen, "NET_DEVICES": self._devices}

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
        try:
            return engine.listen(self._host, self._port, reception.accept)
        except UcpError as exc:
            raise ConfigError(f"{where}: {exc}") from exc


_USERS_ENVIRONMENT = {name: value for name, value in os.environ.items() if name.startswith("UCX_")}
"""Taken before ucxx is imported, since that sets some of UCX's variables itself."""


def _problem_with(host: str, devices: str) -> str:
    """Why UCX cannot listen on `host` alone, or nothing."""
    try:
        check_host(host)
    except ConfigError as exc:
        return str(exc)
    if ":" in host:
        return f"the ucx transport listens on IPv4 only, not on {host}"
    if not devices:
        # UCX binds to an interface's first IPv4 address, and without devices to those of them all.
        return f"{host} is not the first IPv4 address of an interface, which is where UCX would listen"
    return ""


def _devices_of(host: str) -> str:
    """UCX's names of what reaches `host`'s network: its interface, and RDMA ports behind that.

    Empty where no interface has `host` as its first address.
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


def ucx_facts() -> dict[str, Any]:
    """Which UCX this process has loaded, or why none: plain values. Imports ucxx.

    library: its file. wheel: whether that is the libucx wheel's, not the system's. modules: the transports'
    that lie beside it. verbs: whether it could do RDMA at all.
    """
    reason = ucx_available()
    if reason is not None:
        return {"available": False, "reason": reason}
    library, wheel = _loaded_library(), importlib.util.find_spec("libucx")
    folder = Path(os.environ.get("UCX_MODULE_DIR") or Path(library).parent / "ucx")
    found = {re.sub(r"^libuct_|\.so.*", "", file.name) for file in folder.glob("libuct_*.so*")}
    return {
        "available": True,
        "version": ".".join(map(str, import_ucx().get_ucx_version())),
        "library": library,
        "wheel": wheel is not None and library.startswith(str(Path(wheel.origin).parent)),
        "modules": sorted(found),
        "verbs": any(name == "ib" or name.startswith("ib_") for name in found),
    }


def ucx_resources() -> list[str]:
    """What UCX would find to use on this host, on all devices: `tcp/eth0`, `rc_mlx5/mlx5_0:1`, ...

    Opens no port. Raises ConfigError.
    """
    ucx = import_ucx()
    features = ucx.Feature
    try:
        return _resources(ucx.UCXContext({}, feature_flags=(features.TAG, features.WAKEUP)).info)
    except (ucx.UCXError, OSError) as exc:
        raise ConfigError(f"UCX does not start: {exc}") from exc


def _resources(info: str) -> list[str]:
    return sorted(set(re.findall(r"flags -- (\S+)", info)))


@functools.cache
def _loaded_library() -> str:
    """The libucp of this process: the wheel's, or the system's where that was preferred."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.rpartition(" ")[2]
        if "/libucp" in path:
            return path
    return ""
