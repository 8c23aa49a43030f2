"""Asking peers' directories, and answering for this node's own: the two implementations of `Lookups`.

`NativeLookups` keeps a lookup out of Python on both sides. A native thread owns a TCP connection to each peer
(`native/directory_client.cpp`) and wakes the loop once a batch; another answers out of the shard
(`native/directory_server.cpp`). On the connection there is

    16 bytes                 the pass that stands in the peer's `Member`, once
    u32 length, message      requests one way, replies the other: `directory.lookup` of `core/wire.py`

The address and the pass are `Member.directory`: `host:port#pass`, the pass in hex. So who may ask is who
was told of the member by the control plane, as with the tickets of a pull.

Plain sockets and not zmq's: with 15 owners on one host an exchange took 0.27 ms over sockets and 0.66 to
0.81 ms over zmq's from C++ (two cores), since each message passes two threads fewer.

`ControlLookups` asks over the control plane. It is the twin in Python, and the way to a member that names no
directory.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from p2pcache import _native
from p2pcache.core.directory import Directory
from p2pcache.core.found import Table
from p2pcache.core.membership import Member, View
from p2pcache.core.wire import WireError
from p2pcache.io.ports import Control, Findings
from p2pcache.types import ConfigError, DeadlineExceeded, Fenced, RemoteError, VersionMismatch

_OP = "directory.lookup"
_LISTEN_MAX = 256
_ERRORS: dict[str, type[RemoteError]] = {
    "version": VersionMismatch,
    "deadline": DeadlineExceeded,
    "fenced": Fenced,
    "wire": WireError,
}
Outcomes = list[Findings | RemoteError]


class ControlLookups:
    """Implements `Lookups` by requests of the control plane, which answers by the node's handler."""

    address = ""

    def __init__(self, control: Control):
        self._control = control

    async def start(self, directory: Directory) -> None:
        pass

    def follow(self, view: View, past: Iterable[tuple[str, int]]) -> None:
        pass

    def unknown_until(self, until_s: float) -> None:
        pass

    def ask(self, asked: Sequence[tuple[Member, bytes]], by_s: float) -> asyncio.Future[Outcomes]:
        replies = [self._control.ask(peer, _OP, {"contents": keys}, by_s) for peer, keys in asked]

        async def outcomes() -> Outcomes:
            got = await asyncio.gather(*replies, return_exceptions=True)
            return [_judged(keys, reply) for (_, keys), reply in zip(asked, got, strict=True)]

        return asyncio.ensure_future(outcomes())

    async def close(self) -> None:
        pass


def _judged(keys: bytes, reply: Mapping[str, Any] | BaseException) -> Findings | RemoteError:
    if isinstance(reply, RemoteError):
        return reply
    if isinstance(reply, BaseException):
        raise reply
    table = Table(*reply["found"])
    if 16 * len(table.counts) != len(keys):
        return WireError("answered another question")
    return table, reply["unknown"]


class NativeLookups:
    """Implements `Lookups` by threads that need no GIL. Belongs to the node's loop."""

    def __init__(self, host: str, name: str, incarnation: int, control: Control):
        """host: the address to listen on. control: asks members that name no directory."""
        self._host = host
        self._name, self._incarnation = name, incarnation
        self._others = ControlLookups(control)
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, tuple[asyncio.Future[Outcomes], list[Member]]] = {}
        self._targets: dict[str, tuple[str, bytes] | None] = {}  # of `Member.directory`
        self._server: Any = None
        self._client: Any = _native.DirectoryClient(name, incarnation)  # None once closed
        self._loop.add_reader(self._client.fd, self._on_done)
        self.address = ""

    async def start(self, directory: Directory) -> None:
        pass_ = secrets.token_bytes(16)
        listener = socket.socket(socket.AF_INET6 if ":" in self._host else socket.AF_INET)
        try:
            listener.bind((self._host, 0))
            listener.listen(_LISTEN_MAX)
            listener.setblocking(False)
            host, port = listener.getsockname()[:2]
        except OSError as error:
            listener.close()
            raise ConfigError(f"directory socket cannot bind {self._host}: {error.strerror}") from None
        self._server = _native.DirectoryServer(
            directory.native, listener.detach(), pass_, self._name, self._incarnation
        )
        self.address = f"[{host}]:{port}#{pass_.hex()}" if ":" in host else f"{host}:{port}#{pass_.hex()}"

    def follow(self, view: View, past: Iterable[tuple[str, int]]) -> None:
        if self._client is None:
            return
        members = view.members.values()
        self._targets = {m.directory: _target(m.directory) for m in members}
        self._client.follow(view.view_id)
        self._client.keep([target for target in self._targets.values() if target is not None])
        if self._server is not None:
            self._server.follow(view.view_id, [(m.name, m.incarnation) for m in members], past)

    def unknown_until(self, until_s: float) -> None:
        if self._server is not None:
            self._server.unknown_until(until_s)

    def ask(self, asked: Sequence[tuple[Member, bytes]], by_s: float) -> asyncio.Future[Outcomes]:
        targets = [self._target(peer.directory) for peer, _ in asked]
        if None not in targets:
            return self._ask(
                [(*t, p.incarnation, k) for t, (p, k) in zip(targets, asked, strict=True)], asked, by_s
            )
        ours = [a for a, target in zip(asked, targets, strict=True) if target is not None]
        others = [a for a, target in zip(asked, targets, strict=True) if target is None]
        by_kind = self.ask(ours, by_s), self._others.ask(others, by_s)

        async def merged() -> Outcomes:
            native, plain = map(iter, await asyncio.gather(*by_kind))
            return [next(plain if target is None else native) for target in targets]

        return asyncio.ensure_future(merged())

    async def close(self) -> None:
        client, server = self._client, self._server
        self._client = self._server = None  # their descriptors end with them
        if client is not None:
            self._loop.remove_reader(client.fd)
            client.stop()
        if server is not None:
            server.stop()
        for future, _ in self._waiting.values():
            if not future.done():
                future.set_exception(RemoteError("this node's lookups have been closed"))
        self._waiting.clear()

    def _target(self, directory: str) -> tuple[str, bytes] | None:
        if directory in self._targets:
            return self._targets[directory]
        return _target(directory)

    def _ask(
        self, batch: list[tuple], asked: Sequence[tuple[Member, bytes]], by_s: float
    ) -> asyncio.Future[Outcomes]:
        answers: asyncio.Future[Outcomes] = self._loop.create_future()
        if not batch:
            answers.set_result([])
        elif self._client is None:
            answers.set_exception(RemoteError("this node's lookups have been closed"))
        elif number := self._client.ask(batch, by_s):
            self._waiting[number] = answers, [peer for peer, _ in asked]
        else:
            answers.set_result([RemoteError("too many lookups are under way")] * len(batch))
        return answers

    def _on_done(self) -> None:
        for number, outcomes in self._client.take():
            answers, peers = self._waiting.pop(number)
            if not answers.done():
                answers.set_result([_outcome(p, got) for p, got in zip(peers, outcomes, strict=True)])


def _outcome(peer: Member, got: tuple[Any, Any]) -> Findings | RemoteError:
    """(table, unknown), or what the code of an error stands for."""
    first, second = got
    if isinstance(first, str):
        return _ERRORS.get(first, RemoteError)(f"{peer.name}: {second}")
    return Table(*first), second


def _target(directory: str) -> tuple[str, bytes] | None:
    """Address and pass of a `Member.directory`; None where it is none."""
    address, _, pass_ = directory.partition("#")
    try:
        raw = bytes.fromhex(pass_)
    except ValueError:
        return None
    return (address, raw) if address and len(raw) == 16 else None
