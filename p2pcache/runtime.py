"""A node with everything it needs around it, on an event loop thread of its own.

The actor, the embedded mode and the tests all start nodes through `NodeRuntime`; nothing else
wires ports together.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import random
import secrets
import socket
import tempfile
import threading
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from p2pcache.config import NodeConfig
from p2pcache.core.membership import Member, View
from p2pcache.io.control_zmq import ZmqControl
from p2pcache.io.engine_socket import EngineSocket, private_folder, remove_left_over
from p2pcache.io.lookups import NativeLookups
from p2pcache.io.members_static import Greeter
from p2pcache.io.ports import Transport
from p2pcache.io.slab import HostSlab
from p2pcache.io.store_nvme import NvmeStore
from p2pcache.io.transport_shm import ShmTransport
from p2pcache.io.transport_tcp import TcpTransport
from p2pcache.io.transport_ucx import UcxTransport, ucx_available
from p2pcache.node import Node, Ports
from p2pcache.node.engines import EngineDesk
from p2pcache.node.report import status
from p2pcache.types import ConfigError, NodeDown

_log = logging.getLogger(__name__)
T = TypeVar("T")
CALL_TIMEOUT_S = 30.0


class NodeRuntime:
    """One running node. Made by `start`; `close` stops it and leaves nothing behind."""

    def __init__(self) -> None:
        """Not for callers: use `start`."""
        self._loop: asyncio.AbstractEventLoop
        self._thread: threading.Thread
        self._closers: list[Any] = []
        self.config: NodeConfig
        self.member: Member
        self.node: Node
        self.socket_path: str

    @staticmethod
    def start(config: NodeConfig) -> NodeRuntime:
        """Bring a node up. Raises ConfigError, with nothing left running, where a setting cannot hold."""
        self = NodeRuntime()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="p2pcache-node", daemon=True)
        self._thread.start()
        try:
            self.call(self._bring_up(config))
        except BaseException:
            self.close()
            raise
        return self

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float = CALL_TIMEOUT_S) -> T:
        """Run a coroutine on the node's loop and wait for it. Raises NodeDown after `close`."""
        if self._loop.is_closed():
            coroutine.close()
            raise NodeDown("this node has been closed")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise NodeDown(f"the node did not answer within {timeout_s} s") from None

    def apply_view(self, members: list[Member], absent: Mapping[str, str] | None = None) -> None:
        """Tell the node who is in the mesh. absent: hosts without a node in it, and why."""

        def apply() -> None:
            self.node.absent = dict(absent or {})
            self.node.apply_view(View.of(members))

        self._loop.call_soon_threadsafe(apply)

    def contact(self) -> None:
        """Its supervisor spoke to the node."""
        self._loop.call_soon_threadsafe(self.node.contact)

    def drain(self, budget_s: float) -> dict[str, int]:
        """Hand the node's hottest bodies to its peers; see `Node.drain`."""
        return self.call(self.node.drain(budget_s), budget_s + CALL_TIMEOUT_S)

    def stay(self) -> None:
        """The drain has been called off."""
        self._loop.call_soon_threadsafe(self.node.stay)

    def quiet(self, budget_s: float) -> bool:
        """Wait until no peer reads from the node. False where one still did at the end."""
        return self.call(self.node.quiet(budget_s), budget_s + CALL_TIMEOUT_S)

    def follow(self, addresses: Sequence[str]) -> None:
        """Make a mesh without Ray: with the nodes behind these `host:port` control addresses, and with
        whoever knows this one."""

        async def start() -> None:
            greeter = Greeter(
                self.node.ports.control,
                addresses,
                self.member,
                lambda members: self.node.apply_view(View.of(members)),
            )
            self.node.on_hello = greeter.met
            greeting = self._loop.create_task(greeter.run())

            async def stop() -> None:
                greeting.cancel()
                await asyncio.gather(greeting, return_exceptions=True)

            self._closers.append(stop)

        self.call(start())

    def flush(self) -> None:
        """Wait until the owners have been told all that this node holds now."""
        self.call(self.node.publisher.flushed())

    def status(self) -> dict[str, Any]:
        async def read() -> dict[str, Any]:
            return status(self.node)

        return self.call(read())

    def close(self) -> None:
        """Stop serving, let go of memory and files. Idempotent."""
        if self._loop.is_closed():
            return
        try:
            self.call(self._tear_down())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _bring_up(self, config: NodeConfig) -> None:
        incarnation = secrets.randbits(63) or 1
        name = config.name or f"{socket.gethostname()}-{incarnation & 0xFFFF:04x}"
        self.config = config
        slab = HostSlab(config.host_bytes_max)
        self._closers.append(slab.close)
        control = ZmqControl(config.host, config.control_port, lambda: self._identity(name, incarnation))
        self._closers.append(control.close)
        lookups = NativeLookups(config.host, name, incarnation, control)
        self._closers.append(lookups.close)
        nvme = None
        if config.nvme_path:
            nvme = await NvmeStore.open(
                config.nvme_path,
                capacity_bytes=config.nvme_bytes_max,
                segment_bytes=config.segment_bytes,
                depth=config.nvme_depth,
                io=config.nvme_io,
            )
            self._closers.append(nvme.close)
        folder = runtime_folder(config)
        remove_left_over(folder)
        self.socket_path = str(folder / f"{incarnation:016x}.sock")
        transports = _transports(config, self.socket_path)
        ports = Ports(control, lookups, slab, transports, nvme)
        rng = random.Random(incarnation)
        node = self.node = Node(config, name, incarnation, ports, rng, lambda: self.member)
        addresses = {}
        for transport in list(transports):
            try:
                addresses[transport.name] = await transport.start(node.desk.office)
            except ConfigError as error:
                if len(transports) == 1:
                    raise
                _log.warning("the node goes without %s: %s", transport.name, error)
                transports.remove(transport)
                continue
            self._closers.append(transport.close)
        await lookups.start(node.shard.directory)
        await control.start(node.peers.answer)
        self.member = Member(name, incarnation, control.address, _boot_id(), addresses, lookups.address)
        engines = EngineSocket(self.socket_path, slab)
        await engines.start(EngineDesk(node))
        self._closers += [node.close, engines.close]
        node.start()
        node.apply_view(View.of([self.member]))

    def _identity(self, name: str, incarnation: int) -> tuple[str, int, bytes]:
        node = getattr(self, "node", None)
        return name, incarnation, node.view.view_id if node is not None else b""

    async def _tear_down(self) -> None:
        # In reverse: first nobody comes in any more, last the memory goes.
        while self._closers:
            try:
                result = self._closers.pop()()
                if asyncio.iscoroutine(result):
                    await result
            except Exception:  # what comes after it must be let go of all the same
                _log.exception("a part of the node did not close")
        await self._loop.shutdown_default_executor()


def stay_responsive() -> None:
    """Give this thread, and those that it starts, the usual priority, where it may.

    Ray runs its workers at nice 15. Who only waits and answers, as a node does, must not wait behind all
    those who compute.
    """
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)


def _transports(config: NodeConfig, socket_path: str) -> list[Transport]:
    """This node's transports, in order of preference. One whose library is absent is left out."""
    wanted = dict.fromkeys(
        [*config.transports, *(t for ts in config.transports_by_peer.values() for t in ts)]
    )
    made: list[Transport] = []
    for name in wanted:
        if name == "shm":
            made.append(ShmTransport(socket_path, _boot_id()))
        elif name == "tcp":
            slowest = config.serve_bytes_per_s_min
            made.append(TcpTransport(config.host, streams_max=config.tcp_streams, bytes_per_s_min=slowest))
        elif name == "ucx" and ucx_available() is None:
            made.append(UcxTransport(config.host))
    return made


def runtime_folder(config: NodeConfig) -> Path:
    """The 0700 folder of the engine socket. Raises ConfigError where it cannot be one."""
    if config.runtime_dir:
        return private_folder(Path(config.runtime_dir))
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return private_folder(Path(base) / f"p2pcache-{os.geteuid()}")


def _boot_id() -> str:
    """Names the running kernel *and* this mount of /proc's host: equal ids can pass descriptors."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
