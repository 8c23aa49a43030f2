"""What the node needs of the outside world, as Protocols. Shells implement them, tests fake them.

The node calls every method on its event loop's thread. Blocking work is the shell's own business
(threads, epoll); it comes back as a future of that loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from p2pcache.core.directory import Directory
from p2pcache.core.found import Table
from p2pcache.core.membership import Member, View
from p2pcache.core.nvmelog import Record
from p2pcache.types import KEY_BYTES, BodyInfo, ContentKey, ExactKey, RemoteError


class TransportError(RemoteError):
    """This way to the peer does not work (now): try the next transport."""


class TicketGone(RemoteError):
    """The holder no longer honours the ticket: evicted, expired, or of another incarnation."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """A holder's leave to read one body from its slab, for a short time.

    token: 16 random bytes; whoever shows them may read. exact, checksums: what the reader checks the bytes
    by, one checksum a layer; without any they are not checked.
    """

    token: bytes
    offset: int
    nbytes: int
    generation: int
    checksums: tuple[int, ...]
    exact: bytes = bytes(KEY_BYTES)
    meta: bytes = b""


class Tickets(Protocol):
    """The holder's side of a pull, as a transport sees it. Called from any thread."""

    watchers: list[Callable[[bytes], None]]
    """Called, on the node's loop, with a token that a reader chose, once its ticket is issued or refused."""

    def begin(self, token: bytes) -> memoryview | None:
        """The bytes to send, read-only; they stay put until `end`. None: no such ticket (any more)."""

    def end(self, token: bytes) -> None:
        """The transport no longer reads them."""


NO_TOKEN = bytes(16)
"""Of no ticket."""


class Pull(Protocol):
    """One body under way into a destination.

    `done` ends with None once all of it is here and right, or with TransportError, TicketGone or
    CorruptBody. `settled` ends when nothing will write to the destination any more, which may be later
    than `done` (law 5). Whoever waits for `done` may cancel it, and is then to `abandon`. A pull that
    counts the bytes that have come between two reports of progress offers them as `landed_bytes`.
    """

    done: asyncio.Future[None]
    settled: asyncio.Future[None]

    def abandon(self) -> None:
        """Stop as soon as possible: the deadline has passed, or nobody wants it any more."""


class Transport(Protocol):
    """One way to move a body from a peer's slab into ours, copied once, and checked on the way.

    That a transport checks, and not whoever gets the bytes, is for speed: it has them in the cache.
    """

    name: str

    async def start(self, tickets: Tickets) -> str:
        """Listen for readers. Returns the address to advertise. Raises ConfigError."""

    def reaches(self, peer: Member) -> bool:
        """Whether this transport could work with the peer, judged by what it advertises."""

    def pull(self, peer: Member, ticket: Ticket, dest: memoryview, progress: Callable[[int], None]) -> Pull:
        """Fetch `ticket.nbytes` into `dest` (writable, exactly as long) and check it layer by layer.

        `progress(n)` is called on the loop as the first n bytes are here and right: whole layers, where there
        are checksums. n only grows.
        """

    def ask_early(self, peer: Member, nbytes: int) -> bytes | None:
        """Ask a peer for a body for which it has not given leave yet, where that costs nothing.

        Returns the token that its leave is then to name: `pull` goes on from there, with a ticket of this
        token; `forget_early` ends it. None: nothing has been asked.
        """

    def forget_early(self, token: bytes) -> None:
        """No `pull` comes of it, or one has already."""

    def description(self) -> dict[str, Any]:
        """What a person may want to know of it, for `status`; plain values."""

    async def close(self) -> None:
        """Stop listening, drop connections; no pull is under way any more when it returns."""


Handler = Callable[[str, Mapping[str, Any], str, int], Mapping[str, Any] | Awaitable[Mapping[str, Any]]]
"""(op, body, sender, sender's incarnation) -> reply body, or an awaitable of it where it has to wait."""


class Control(Protocol):
    """Small messages between nodes."""

    address: str

    async def start(self, handler: Handler) -> None:
        """Bind and serve. Raises ConfigError where the port is taken."""

    def ask(
        self, peer: Member, op: str, body: Mapping[str, Any], deadline_s: float
    ) -> asyncio.Future[Mapping[str, Any]]:
        """Ask a peer; the future ends with its reply, DeadlineExceeded or RemoteError.

        deadline_s: on the loop's clock. Many at once cost no task each.
        """

    async def request(
        self, peer: Member, op: str, body: Mapping[str, Any], deadline_s: float
    ) -> Mapping[str, Any]:
        """`ask`, awaited."""

    async def close(self) -> None: ...


Findings = tuple[Table, bool]
"""What an owner knows of keys, and whether the rest is unknown to it rather than absent."""


class Lookups(Protocol):
    """Questions between directories: what peers' shards know, and what this node's own tells peers."""

    address: str  # for `Member.directory`; "" where there is nobody to ask here but by the control plane

    async def start(self, directory: Directory) -> None:
        """Answer for this node's shard. Raises ConfigError."""

    def follow(self, view: View, past: Iterable[tuple[str, int]]) -> None:
        """The mesh has changed. past: (name, incarnation) of those that have left and are refused."""

    def unknown_until(self, until_s: float) -> None:
        """Until then, on the loop's clock, what the shard does not know is unknown and not absent."""

    def ask(
        self, asked: Sequence[tuple[Member, bytes]], by_s: float
    ) -> asyncio.Future[list[Findings | RemoteError]]:
        """Ask each peer for keys, joined, all at once; the future ends with what each says, or
        why it says nothing.

        by_s: on the loop's clock. Who has not answered by then has let the deadline pass: DeadlineExceeded.
        """

    async def close(self) -> None: ...


class Slab(Protocol):
    """The host tier's memory."""

    nbytes: int

    def view(self, offset: int, nbytes: int) -> memoryview:
        """A writable view. The node alone decides who may use which part when."""


class NvmeTier(Protocol):
    """The NVMe tier: bodies behind the host tier, found again after a restart."""

    async def make_room(self, record: Record) -> list[BodyInfo]:
        """Forget what has to go for this record; the caller withdraws it before `append`."""

    async def append(self, record: Record, body: memoryview) -> object:
        """Write a record. `body`, as it is to be stored, is the caller's, unchanged until this returns.

        Raises TierFull.
        """

    async def read_into(self, exact: ExactKey, dest: memoryview) -> Record | None:
        """Read and verify a body as it is stored; None where it is not here.

        `dest` is `record.stored_bytes` long. Raises CorruptBody, having dropped it.
        """

    async def drop(self, exact: ExactKey) -> bool:
        """Forget a record for good. False: it was not here."""

    def lookup(self, exact: ExactKey) -> Record | None: ...

    def by_content(self, content: ContentKey) -> list[Record]: ...

    def records(self) -> Iterator[Record]:
        """All records, oldest first."""

    def status(self) -> dict[str, Any]:
        """Bytes, records and what was found damaged, as plain values."""
