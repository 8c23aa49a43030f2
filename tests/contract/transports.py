"""What the transports' contract suite runs on: kinds of transports, fake tickets, holders to kill.

To put another transport under the suite, add a `Kind` to `KINDS`. As a program
(`python -m tests.contract.transports holder tcp 1048576 0`) this file is the other process of
the tests that kill or freeze one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import mmap
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest

from p2pcache.core.checksum import checksum_body
from p2pcache.core.membership import Member
from p2pcache.io.engine_socket import EngineSocket
from p2pcache.io.ports import Pull, Ticket, Transport
from p2pcache.io.slab import HostSlab
from p2pcache.io.transport_shm import ShmTransport
from p2pcache.io.transport_tcp import TcpTransport
from p2pcache.io.transport_ucx import UcxTransport, ucx_available

REPOSITORY = Path(__file__).parents[2]
PATIENCE_S = 20.0  # for what should take milliseconds, on a loaded machine


class FakeTickets:
    """Tickets on parts of one memory, that count what was begun and ended."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._changed = threading.Condition()
        self._granted: dict[bytes, tuple[int, int]] = {}
        self.watchers: list[Callable[[bytes], None]] = []
        self.begins = self.ends = 0

    def grant(
        self,
        nbytes: int,
        offset: int = 0,
        token: bytes | None = None,
        layers: int = 0,
        exact: bytes = b"the body's name.",
    ) -> Ticket:
        """layers: as many checksums of what is there now; 0: none, and the reader checks nothing."""
        token = token or secrets.token_bytes(16)
        self._granted[token] = (offset, nbytes)
        body = self._memory[offset : offset + nbytes]
        sums = checksum_body(body, exact, layers) if layers else ()
        return Ticket(token, offset, nbytes, generation=1, checksums=sums, exact=exact)

    def revoke(self, ticket: Ticket) -> None:
        del self._granted[ticket.token]

    def begin(self, token: bytes) -> memoryview | None:
        with self._changed:
            if token not in self._granted:
                return None
            self.begins += 1
            self._changed.notify_all()
            offset, nbytes = self._granted[token]
            return self._memory[offset : offset + nbytes].toreadonly()

    def end(self, token: bytes) -> None:
        with self._changed:
            assert token in self._granted
            self.ends += 1
            self._changed.notify_all()

    async def until_balanced(self, begins_min: int = 0) -> None:
        def balanced() -> bool:
            return self.begins == self.ends and self.begins >= begins_min

        def wait() -> bool:
            with self._changed:
                return self._changed.wait_for(balanced, PATIENCE_S)

        assert await asyncio.to_thread(wait), f"{self.begins} begins, {self.ends} ends"


class Memory:
    """What a holder serves bodies from; sparse until it is written to."""

    def __init__(self, nbytes: int) -> None:
        self.view = memoryview(mmap.mmap(-1, max(nbytes, 1)))

    def close(self) -> None:
        pass


class SlabMemory:
    """A real slab, which takes its memory at once."""

    def __init__(self, nbytes: int) -> None:
        self.slab = HostSlab(max(nbytes, 1))
        self.view = self.slab.view(0, nbytes)

    def close(self) -> None:
        self.slab.close()


class Holder(Protocol):
    """A `Transport` that was started, or what takes its place."""

    async def close(self) -> None: ...


@dataclass(frozen=True)
class Kind:
    """One implementation under test.

    memory(nbytes): what to serve. serve(memory, tickets, port): a started holder and how it is
    known; port 0 is any. reader(): a transport that only pulls. unavailable(): why it cannot be
    tested here, or None.
    holder_sends: False where the reader maps the memory itself, so that neither the holder's
    tickets nor its death matter to a pull under way.
    """

    name: str
    serve: Callable[[Any, FakeTickets, int], Awaitable[tuple[Holder, Member]]]
    reader: Callable[[], Transport]
    unavailable: Callable[[], str | None] = lambda: None
    memory: Callable[[int], Memory | SlabMemory] = Memory
    holder_sends: bool = True
    marks: tuple = ()


BOOT_ID = "the kernel of the tests"


def member(name: str, address: str) -> Member:
    return Member("holder", secrets.randbits(63), "", BOOT_ID, {name: address})


async def _serve_tcp(memory: Memory, tickets: FakeTickets, port: int) -> tuple[Holder, Member]:
    transport = TcpTransport("127.0.0.1", port)
    return transport, member("tcp", await transport.start(tickets))


async def _serve_ucx(memory: Memory, tickets: FakeTickets, port: int) -> tuple[Holder, Member]:
    transport = UcxTransport("127.0.0.1", port)
    return transport, member("ucx", await transport.start(tickets))


class ShmHolder:
    """The part that a node plays in `shm`: it hands out its slab."""

    def __init__(self, slab: HostSlab) -> None:
        self._slab = slab
        self._folder = tempfile.mkdtemp(prefix="p2pcache-")
        self._socket = EngineSocket(f"{self._folder}/socket", slab)

    async def start(self, tickets: FakeTickets) -> Member:
        address = await ShmTransport(self._socket.path, BOOT_ID).start(tickets)
        self.member = member("shm", address)
        await self._socket.start(self)
        return self.member

    async def close(self) -> None:
        await self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    # `EngineHandler`; peers ask for nothing but the slab.

    def attach_reply(self) -> dict[str, Any]:
        known_as = self.member.to_wire()
        return {"member": known_as, "nonce": self._slab.nonce, "slab_bytes": self._slab.nbytes}

    def open_session(self) -> Any:
        raise NotImplementedError

    def end_session(self, session: Any) -> None:
        raise NotImplementedError

    async def handle(self, session: Any, op: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        raise NotImplementedError


async def _serve_shm(memory: SlabMemory, tickets: FakeTickets, port: int) -> tuple[Holder, Member]:
    holder = ShmHolder(memory.slab)
    return holder, await holder.start(tickets)


KINDS: dict[str, Kind] = {
    "shm": Kind("shm", _serve_shm, lambda: ShmTransport("", BOOT_ID), memory=SlabMemory, holder_sends=False),
    "tcp": Kind("tcp", _serve_tcp, lambda: TcpTransport("127.0.0.1")),
    "tcp of 4 streams": Kind("tcp", _serve_tcp, lambda: TcpTransport("127.0.0.1", streams_max=4)),
    "ucx": Kind(
        "ucx", _serve_ucx, lambda: UcxTransport("127.0.0.1"), ucx_available, marks=(pytest.mark.ucx,)
    ),
}


@dataclass
class Mesh:
    """One holder and one reader."""

    kind: Kind
    source: Memory | SlabMemory
    tickets: FakeTickets
    holder: Holder
    member: Member
    reader: Transport

    @property
    def memory(self) -> memoryview:
        return self.source.view


@contextlib.asynccontextmanager
async def mesh(kind: Kind, nbytes: int, fill: bool = True) -> AsyncIterator[Mesh]:
    """A mesh of two in this process; checks at its end that nothing is left over.

    fill: random bytes; else the memory stays sparse, and a large body costs nothing.
    """
    before = set(threading.enumerate())
    source = kind.memory(nbytes)
    if fill:
        source.view[:nbytes] = os.urandom(nbytes)
    tickets = FakeTickets(source.view)
    holder, known_as = await kind.serve(source, tickets, 0)
    made = Mesh(kind, source, tickets, holder, known_as, kind.reader())
    try:
        yield made
    finally:
        await made.reader.close()
        await made.holder.close()
        source.close()
    assert tickets.begins == tickets.ends
    left = [t for t in set(threading.enumerate()) - before if not t.name.startswith("asyncio_")]
    assert not left, f"threads left behind: {left}"


class Watched:
    """A pull into a poisoned destination, that records and (asked to) checks its progress."""

    def __init__(
        self,
        transport: Transport,
        peer: Member,
        ticket: Ticket,
        dest: mmap.mmap | None = None,
        check: Callable[[memoryview, int, int], None] | None = None,
    ) -> None:
        self.dest = dest if dest is not None else poisoned(ticket.nbytes)
        self.told: list[int] = []
        self.problems: list[BaseException] = []
        self.moving = asyncio.Event()
        self._check = check
        self._view = memoryview(self.dest)[: ticket.nbytes]
        self.pull: Pull = transport.pull(peer, ticket, self._view, self._progress)

    def _progress(self, nbytes: int) -> None:
        try:
            assert not self.told or nbytes > self.told[-1], f"{nbytes} after {self.told[-1]}"
            if self._check is not None:
                self._check(self._view, self.told[-1] if self.told else 0, nbytes)
        except BaseException as problem:
            self.problems.append(problem)
        self.told.append(nbytes)
        self.moving.set()

    async def done(self, within_s: float = PATIENCE_S) -> BaseException | None:
        """How the pull ended; None is success."""
        return await ended(self.pull.done, within_s)

    async def settled(self, within_s: float = PATIENCE_S) -> None:
        assert await ended(self.pull.settled, within_s) is None

    async def until_moving(self, total: int) -> None:
        """The pull has begun to arrive, and is far from its end."""
        async with asyncio.timeout(PATIENCE_S):
            await self.moving.wait()
        assert self.told[-1] < total and not self.pull.done.done(), "the body is too small for this test"


POISON = 0xA5


def poisoned(nbytes: int) -> mmap.mmap:
    dest = mmap.mmap(-1, max(nbytes, 1))
    if nbytes <= 64 << 20:  # larger ones stay sparse
        dest[:nbytes] = bytes([POISON]) * nbytes
    return dest


async def ended(future: asyncio.Future, within_s: float) -> BaseException | None:
    await asyncio.wait({future}, timeout=within_s)
    assert future.done(), f"nothing for {within_s} s"
    return future.exception()


# The other process.


class Child:
    """This file as a program: a holder, or a reader, to be killed or frozen."""

    def __init__(self, *args: str) -> None:
        environ = dict(os.environ, PYTHONPATH=f"{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.contract.transports", *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env=environ,
        )

    def answer(self) -> dict:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the other process is gone"
        return json.loads(line)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()


@contextlib.contextmanager
def child(*args: object) -> Iterator[Child]:
    made = Child(*map(str, args))
    try:
        yield made
    finally:
        made.kill()


TOKEN = b"the only ticket!"


async def _be_holder(kind: Kind, nbytes: int, port: int) -> None:
    memory = kind.memory(nbytes)
    tickets = FakeTickets(memory.view)
    tickets.grant(nbytes, token=TOKEN)
    _, known_as = await kind.serve(memory, tickets, port)
    print(json.dumps(known_as.to_wire()), flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until the test ends
    os._exit(0)


async def _be_reader(kind: Kind, peer: Member, token: bytes, nbytes: int) -> None:
    watched = Watched(kind.reader(), peer, Ticket(token, 0, nbytes, 1, ()))
    await watched.moving.wait()
    print(json.dumps({"moving": watched.told[-1]}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    os._exit(0)


def main(role: str, name: str, *args: str) -> None:
    if role == "holder":
        asyncio.run(_be_holder(KINDS[name], int(args[0]), int(args[1])))
    else:
        peer, token, nbytes = Member.from_wire(json.loads(args[0])), bytes.fromhex(args[1]), int(args[2])
        asyncio.run(_be_reader(KINDS[name], peer, token, nbytes))


if __name__ == "__main__":
    main(*sys.argv[1:])
