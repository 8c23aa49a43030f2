"""What lookups, fetches and stores give back: values, tensors, and the leases under them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from p2pcache.core.keys import ChunkKeys
from p2pcache.core.records import Bodies
from p2pcache.io.streams import Event, Stream
from p2pcache.types import BodyInfo, Found, Match, Miss, Source

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LookupChunk:
    """What the mesh knows of one chunk of the prompt.

    body: the one chosen. peer: the chosen holder, this node's own name for a local one. found: every
    body known under the chunk's content key with every known holder. expected_s: until its bytes
    can be used. miss, detail: why there is no choice, where there is none. follows: the chosen body
    was computed right behind the body chosen for the chunk before it.
    """

    keys: ChunkKeys
    match: Match
    source: Source
    body: BodyInfo | None
    peer: str
    found: tuple[Found, ...]
    expected_s: float
    miss: Miss | None
    detail: str = ""
    follows: bool = False


class Lazy(Sequence[T]):
    """A tuple that is made when it is first looked at: the objects of hundreds of chunks take a while."""

    __slots__ = ("_items", "_length", "_make")

    def __init__(self, length: int, make: Callable[[], Iterable[T]]):
        self._length = length
        self._make: Callable[[], Iterable[T]] | None = make
        self._items: tuple[T, ...] | None = None

    def _made(self) -> tuple[T, ...]:
        make = self._make
        if self._items is None and make is not None:  # two threads may both make it, and the last one stays
            self._items = tuple(make())
            self._make = None  # and what it held on to
        assert self._items is not None
        return self._items

    def __getitem__(self, index: Any) -> Any:
        return self._made()[index]

    def __iter__(self) -> Iterator[T]:
        return iter(self._made())

    def __len__(self) -> int:
        return self._length


class SingleChunks(Lazy[LookupChunk]):
    """Chunks of a lookup of which each one's exact body is chosen, and no other body is known.

    wants: what a fetch of them asks for, already in wire form.
    """

    __slots__ = ("wants",)

    def __init__(self, wants: Bodies, make: Callable[[], Iterable[LookupChunk]]):
        super().__init__(wants.count, make)
        self.wants = wants


@dataclass(frozen=True, slots=True)
class Lookup:
    """The chunks of one prompt, in order, without gaps.

    patience_s: a fetch of these chunks that takes longer is slower than computing them; None: the engine's
    prefill is unknown. by_s: of `time.monotonic`, when the bytes must be here; None: no matter when.
    """

    tokens: np.ndarray
    chunks: Sequence[LookupChunk]
    seconds: float
    patience_s: float | None = None
    by_s: float | None = None

    def within_s(self, budget_s: float, now_s: float) -> float:
        """How long a fetch that begins now may take, of a budget. now_s: of `time.monotonic`."""
        if self.patience_s is not None:
            budget_s = min(budget_s, self.patience_s)
        return budget_s if self.by_s is None else max(min(budget_s, self.by_s - now_s), 0.0)

    @property
    def exact_tokens(self) -> int:
        return sum(c.keys.tokens for c in self.chunks if c.match is Match.EXACT)

    @property
    def content_tokens(self) -> int:
        return sum(c.keys.tokens for c in self.chunks if c.match is Match.CONTENT)

    @property
    def exact_prefix_tokens(self) -> int:
        """Tokens from the start up to the first chunk without an exact match."""
        for c in self.chunks:
            if c.match is not Match.EXACT:
                return c.keys.start
        return len(self.tokens)


class FetchedChunk(NamedTuple):
    """One chunk after a fetch.

    chunks, index: where the lookup's word on it stands, see `found`.
    kv: `[layers, 2, tokens, kv_heads, head_dim]` in the namespace's dtype, K rotated for
    `found.body.base_position`; a view of the node's slab, not a copy: read it, never write it, and
    only until the `Fetched` is released. None: not fetched, `miss` says why.
    """

    chunks: Sequence[LookupChunk]
    index: int
    kv: torch.Tensor | None
    source: Source
    peer: str
    transport: str
    miss: Miss | None
    seconds: float

    @property
    def found(self) -> LookupChunk:
        """What the lookup said of this chunk."""
        return self.chunks[self.index]

    def __repr__(self) -> str:  # without all the other chunks
        miss = f", miss={self.miss.value}" if self.miss is not None else ""
        return f"<FetchedChunk {self.index} of {len(self.chunks)}, {self.source.value}{miss}>"


class Fetched(Sequence[FetchedChunk]):
    """Fetched chunks and the leases under them. Release it, or use it in a `with` block."""

    def __init__(self, chunks: Sequence[FetchedChunk], release: Callable[[bool], None]):
        """release: ends the leases, now or (False) with the next message to the node."""
        self._chunks = chunks
        self._release = release
        self._released = threading.Lock()

    def __getitem__(self, index: Any) -> Any:
        return self._chunks[index]

    def __iter__(self) -> Iterator[FetchedChunk]:
        return iter(self._chunks)

    def __len__(self) -> int:
        return len(self._chunks)

    def __enter__(self) -> Fetched:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def __del__(self) -> None:
        # Dropped without `release`: the leases go back with the next message. Sending one from here
        # could meet a lock that this very thread holds, since collection may run anywhere.
        if self._released.acquire(blocking=False):
            self._release(False)

    def release(self) -> None:
        """End the leases: from now on the tensors must not be read. Idempotent."""
        if self._released.acquire(blocking=False):
            self._release(True)


@dataclass(frozen=True, slots=True)
class Stored:
    """What became of a store's chunks: `stored` now, `resident` before, `refused` by reason."""

    stored: int
    resident: int
    refused: Counter[str]
    _published: Callable[[float], bool] = field(repr=False, compare=False, default=lambda _: True)

    def published(self, budget_s: float = 2.0) -> bool:
        """Wait until the owners have been told. False where one of them was not, or not in time."""
        return self._published(budget_s)


class Prefetch:
    """A fetch on its way to the engine's device, with an event a layer.

    `chunks` blocks until the pull has ended (not the copy to the device). `layer(i)` waits for
    layer i and returns, per chunk that came, `(FetchedChunk, kv)` with kv `[2, tokens, kv_heads,
    head_dim]` on the stream's device. On the CPU the bytes are used in place; elsewhere they are
    copied. The leases end with `close`: call it, or use a `with` block.
    """

    def __init__(
        self,
        fetch: Callable[[], Fetched],
        layers: int,
        stream: Stream,
        chunks: int = 0,
        refused: Callable[[], Fetched] | None = None,
    ):
        """chunks: how many it is about. refused: makes the answer where too many wait already."""
        self._stream = stream
        self._in_place = stream.device.type == "cpu"
        self._on_device: list[list[torch.Tensor]] = [[] for _ in range(layers)]
        self._events: list[Event] = []
        # Not on the stream: a pull that waits for a peer must not hold up the copies of others.
        pull = _pulls.submit(chunks, partial(self._bring, fetch))
        self._pull: Future[Fetched] = pull if pull is not None else _pulls.answered(refused)

    def chunks(self) -> Fetched:
        return self._pull.result()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the pull has ended. False where it has not by then. Raises nothing of the pull's own."""
        return not futures.wait([self._pull], timeout_s).not_done

    def wait_layer(self, layer: int) -> None:
        """Wait until this layer is on the device (its event)."""
        self._pull.result()
        if not self._in_place:
            self._events[layer].wait()

    def layer(self, layer: int) -> list[tuple[FetchedChunk, torch.Tensor]]:
        self.wait_layer(layer)
        came = [c for c in self.chunks() if c.kv is not None]
        if self._in_place:
            return [(c, c.kv[layer]) for c in came]
        return list(zip(came, self._on_device[layer], strict=True))

    def close(self) -> None:
        """Wait for what is under way, then end the leases."""
        with self._pull.result():
            for event in self._events:
                event.wait()

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _bring(self, fetch: Callable[[], Fetched]) -> Fetched:
        fetched = fetch()
        if not self._in_place:
            uploads = (partial(self._upload, fetched, i) for i in range(len(self._on_device)))
            self._events = [self._stream.submit(upload) for upload in uploads]
        return fetched

    def _upload(self, fetched: Fetched, layer: int) -> None:
        device = self._stream.device
        self._on_device[layer] = [
            c.kv[layer].to(device, non_blocking=True) for c in fetched if c.kv is not None
        ]


class PullQueue:
    """Threads that pull, and a line in front of them that is bounded in memory. From any thread."""

    def __init__(self, bytes_max: int, threads: int):
        self._bytes_max = bytes_max
        self._bytes = 0
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="p2pcache-prefetch")

    @property
    def nbytes(self) -> int:
        """Memory of what waits or is under way, as it is counted."""
        return self._bytes

    def submit(self, chunks: int, work: Callable[[], Fetched]) -> Future[Fetched] | None:
        """Have a pull of so many chunks done when its turn comes; None where the line is full."""
        nbytes = PREFETCH_BYTES + chunks * PREFETCH_CHUNK_BYTES
        with self._lock:
            if self._bytes + nbytes > self._bytes_max:
                return None
            self._bytes += nbytes

        def run() -> Fetched:
            try:
                return work()
            finally:
                with self._lock:
                    self._bytes -= nbytes

        return self._threads.submit(run)

    @staticmethod
    def answered(refused: Callable[[], Fetched] | None) -> Future[Fetched]:
        """An answer without a pull."""
        out: Future[Fetched] = Future()
        out.set_result(refused() if refused is not None else Fetched([], lambda now: None))
        return out


PREFETCH_QUEUE_BYTES_MAX = 64 << 20
"""Memory of this process's prefetches that have not ended; what is asked for beyond it is `Miss.BUSY`."""
PREFETCH_BYTES, PREFETCH_CHUNK_BYTES = 4096, 2048  # what a prefetch takes, and each of its chunks, at most
_pulls = PullQueue(PREFETCH_QUEUE_BYTES_MAX, 16)
