"""The node's unix socket: engines attach here for as long as they live, peers to map the slab.

It stands in a folder of mode 0700, which is the guard on one host. The first message is `attach`;
its reply carries the slab's descriptor. After it an engine's requests are answered side by side,
matched by id, and the end of file ends the engine's session, whatever it held.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from p2pcache.core import wire
from p2pcache.io.slab import HostSlab
from p2pcache.types import ConfigError, P2PCacheError, RemoteError, VersionMismatch

_log = logging.getLogger(__name__)
_LENGTH = struct.Struct("<I")
_ATTACH_TIMEOUT_S = 5.0
_ACCEPT_AGAIN_S = 0.5
_REQUESTS_MAX = 256
_YOUNG_S = 10.0


class EngineHandler(Protocol):
    """Who answers engines. Sessions are opaque to the socket."""

    def open_session(self) -> Any: ...
    def end_session(self, session: Any) -> None: ...
    def attach_reply(self) -> dict[str, Any]: ...
    async def handle(self, session: Any, op: str, body: Mapping[str, Any]) -> Mapping[str, Any]: ...


class EngineSocket:
    """Listens on one path. Lives on the node's loop."""

    def __init__(self, path: str, slab: HostSlab):
        self.path = path
        self._slab = slab
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task] = set()

    async def start(self, handler: EngineHandler) -> None:
        """Raises ConfigError: another node listens there, or the folder is not ours alone."""
        self._handler = handler
        private_folder(Path(self.path).parent)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            await self._remove_stale()
            listener.bind(self.path)
            listener.listen(128)
        except OSError as error:
            listener.close()
            raise ConfigError(
                f"the engine socket {self.path} cannot be made: {error.strerror or error}"
            ) from None
        except ConfigError:
            listener.close()
            raise
        listener.setblocking(False)
        self._listener = listener
        self._spawn(self._accept(listener))

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
            Path(self.path).unlink(missing_ok=True)

    async def _remove_stale(self) -> None:
        """A socket file that nobody listens on was left by a node that was killed."""
        if not os.path.exists(self.path):
            return
        probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        probe.setblocking(False)
        try:
            await asyncio.wait_for(asyncio.get_running_loop().sock_connect(probe, self.path), 1.0)
        except ConnectionRefusedError:
            os.unlink(self.path)
        except TimeoutError:
            raise ConfigError(f"another node holds {self.path} and does not answer") from None
        else:
            raise ConfigError(f"another node already listens on {self.path}")
        finally:
            probe.close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:  # no descriptors: the listener stays readable, so do not spin
                _log.warning("cannot accept a client: %s", error)
                await asyncio.sleep(_ACCEPT_AGAIN_S)
                continue
            self._spawn(self._serve(sock))

    async def _serve(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        try:
            role = await self._attach(sock)
            reader, writer = await asyncio.open_unix_connection(sock=sock)
        except (OSError, TimeoutError, EOFError, P2PCacheError) as error:
            _log.info("a client was refused: %s", error)
            sock.close()
            return
        except asyncio.CancelledError:
            sock.close()
            raise
        try:
            if role == "engine":
                await self._converse(reader, writer)
            else:
                await reader.read()  # a peer says nothing more; its end of file ends the call
        except (OSError, EOFError) as error:
            _log.info("a client's connection broke: %s", error)
        finally:
            writer.close()

    async def _attach(self, sock: socket.socket) -> str:
        """Read the first message, hand over the slab. Returns the client's role."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(_ATTACH_TIMEOUT_S):
            (length,) = _LENGTH.unpack(await _exactly(loop, sock, _LENGTH.size))
            if length > 4096:
                raise wire.WireError("the first message is no attach")
            raw = await _exactly(loop, sock, length)
        try:
            message = wire.decode(raw)
            role = message.body.get("role") if message.op == "attach" and message.kind == "q" else None
            if role not in ("engine", "peer"):
                raise wire.WireError("the first message is no attach")
        except RemoteError as error:
            code = "version" if isinstance(error, VersionMismatch) else "refused"
            raw = wire.encode(wire.Message("e", 0, "attach", {"code": code, "text": str(error)}))
            await loop.sock_sendall(sock, _LENGTH.pack(len(raw)) + raw)
            raise
        raw = wire.encode(wire.Message("r", message.id, "attach", self._handler.attach_reply()))
        frame = _LENGTH.pack(len(raw)) + raw
        fd = self._slab.fd if role == "engine" else self._slab.read_only_fd()
        try:
            sent = socket.send_fds(sock, [frame], [fd])  # a new socket's buffer takes it whole
        finally:
            if role != "engine":
                os.close(fd)
        if sent != len(frame):
            raise RemoteError("the client's socket does not take the reply")
        return role

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        session = self._handler.open_session()
        requests: set[asyncio.Task] = set()
        try:
            while True:
                try:
                    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                except asyncio.IncompleteReadError:
                    return
                if length > wire.MESSAGE_BYTES_MAX:
                    raise EOFError(f"a message of {length:,} bytes was announced")
                raw = await reader.readexactly(length)
                while len(requests) >= _REQUESTS_MAX:
                    await asyncio.wait(requests, return_when=asyncio.FIRST_COMPLETED)
                task = asyncio.get_running_loop().create_task(self._answer(session, raw, writer))
                requests.add(task)
                task.add_done_callback(requests.discard)
        finally:
            # Requests first: one of them may be about to give this session a lease.
            for task in list(requests):
                task.cancel()
            await asyncio.gather(*requests, return_exceptions=True)
            self._handler.end_session(session)

    async def _answer(self, session: Any, raw: bytes, writer: asyncio.StreamWriter) -> None:
        id_, op = 0, ""
        try:
            message = wire.decode(raw)
            id_, op = message.id, message.op
            if message.kind not in ("q", "n"):
                raise wire.WireError("only requests and notices are answered here")
            reply = await self._handler.handle(session, op, message.body)
            if message.kind == "n":
                return
            out = wire.encode(wire.Message("r", id_, op, reply))
        except P2PCacheError as error:
            out = _error(id_ or wire.peek_id(raw), op, "refused", str(error))
        except Exception as error:
            _log.exception("op %s failed", op)
            out = _error(id_, op, "internal", f"the node met an error of its own: {error!r}")
        if not writer.is_closing():
            writer.write(_LENGTH.pack(len(out)) + out)
            # A client that does not read is not read either, once _REQUESTS_MAX answers wait for it.
            with contextlib.suppress(OSError):
                await writer.drain()

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def listens(path: str) -> bool:
    """Whether a node is behind a socket file; one that was killed leaves its file behind."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(0.2)
        try:
            probe.connect(path)
        except TimeoutError:
            return True  # somebody does, and is busy
        except OSError:
            return False
    return True


def remove_left_over(folder: Path) -> None:
    """Unlink what killed nodes have left in a runtime folder."""
    for path in folder.glob("*.sock"):
        with contextlib.suppress(OSError):
            # A node binds before it listens: its young socket must not be taken for a dead one.
            if time.time() - path.stat().st_mtime > _YOUNG_S and not listens(str(path)):
                path.unlink()


def private_folder(path: Path) -> Path:
    """Make a folder that only its owner can enter, or check that it is one. Raises ConfigError."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
    except OSError as error:
        raise ConfigError(f"the folder {path} cannot be used: {error.strerror}") from None
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(f"the folder {path} must be yours and of mode 0700: it guards the engine socket")
    return path


def _error(id_: int, op: str, code: str, text: str) -> bytes:
    return wire.encode(wire.Message("e", id_, op, {"code": code, "text": text[:4096]}))


async def _exactly(loop: asyncio.AbstractEventLoop, sock: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        part = await loop.sock_recv(sock, nbytes - len(data))
        if not part:
            raise EOFError("the client closed the connection")
        data += part
    return data
