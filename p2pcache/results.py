"""What lookups, fetches and stores give back: values, tensors, and the leases under them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from p2pcache.core.keys import ChunkKeys
from p2pcache.io.streams import Event, Stream
from p2pcache.types import BodyInfo, Found, Match, Miss, Source


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


@dataclass(frozen=True, slots=True)
class Lookup:
    """The chunks of one prompt, in order, without gaps.

    patience_s: a fetch of these chunks that takes longer is slower than computing them; None: the engine's
    prefill is unknown. by_s: of `time.monotonic`, when the bytes must be here; None: no matter when.
    """

    tokens: np.ndarray
    chunks: tuple[LookupChunk, ...]
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


@dataclass(frozen=True, slots=True)
class FetchedChunk:
    """One chunk after a fetch.

    kv: `[layers, 2, tokens, kv_heads, head_dim]` in the namespace's dtype, K rotated for
    `found.body.base_position`; a view of the node's slab, not a copy: read it, never write it, and
    only until the `Fetched` is released. None: not fetched, `miss` says why.
    """

    found: LookupChunk
    kv: torch.Tensor | None
    source: Source
    peer: str
    transport: str
    miss: Miss | None
    seconds: float


class Fetched(Sequence[FetchedChunk]):
    """Fetched chunks and the leases under them. Release it, or use it in a `with` block."""

    def __init__(self, chunks: Sequence[FetchedChunk], release: Callable[[bool], None]):
        """release: ends the leases, now or (False) with the next message to the node."""
        self._chunks = tuple(chunks)
        self._release = release
        self._released = threading.Lock()

    def __getitem__(self, index: Any) -> Any:
        return self._chunks[index]

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

    def __init__(self, fetch: Callable[[], Fetched], layers: int, stream: Stream):
        self._stream = stream
        self._in_place = stream.device.type == "cpu"
        self._on_device: list[list[torch.Tensor]] = [[] for _ in range(layers)]
        self._events: list[Event] = []
        # Not on the stream: a pull that waits for a peer must not hold up the copies of others.
        self._pull: Future[Fetched] = _pulls.submit(self._bring, fetch)

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


_pulls = ThreadPoolExecutor(16, thread_name_prefix="p2pcache-prefetch")
