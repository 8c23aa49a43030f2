"""What an engine calls: `connect()`, open a namespace, then lookup, fetch, store, prefetch, pin, explain.

    client = p2pcache.connect()
    cache = client.open(namespace)
    lookup = cache.lookup(tokens)
    with cache.fetch(lookup) as fetched:
        for chunk in fetched:           # chunk.kv: [layers, 2, tokens, kv_heads, head_dim] or None
            ...
    cache.store([c.keys for c in lookup.chunks], kv)

A fault never raises here: it is a miss with a reason. Only a mistake of the caller raises
(`ConfigError`, `LayoutError`). All calls are synchronous and may come from any thread; each has a
budget in seconds, at whose end the answer is a miss.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from p2pcache.core.checksum import checksum_body
from p2pcache.core.chunking import Chunker, ContentChunker, as_tokens
from p2pcache.core.keys import ChunkKeys, Namespace, body_key, chunk_keys
from p2pcache.core.records import (
    asked_tokens,
    check_grants,
    chosen_alone,
    leased,
    pack_asked,
    pack_bodies,
    pack_starts,
    unpack_answers,
)
from p2pcache.core.wire import ANSWER, ASK
from p2pcache.discovery import find_socket
from p2pcache.io.link import Link, seconds
from p2pcache.io.streams import Stream, default_stream
from p2pcache.node.wireform import body_to_wire
from p2pcache.replies import DTYPES, as_missed, fetched_chunks, holders_of, lookup_chunk, slab_bytes
from p2pcache.results import Fetched, Lazy, Lookup, LookupChunk, Prefetch, SingleChunks, Stored
from p2pcache.runs import mark_runs
from p2pcache.types import (
    BodyInfo,
    ConfigError,
    DeadlineExceeded,
    LayoutError,
    Match,
    Miss,
    NodeDown,
    Provenance,
    RemoteError,
    Source,
)

_log = logging.getLogger(__name__)
LOOKUP_BUDGET_S = 0.25
FETCH_BUDGET_S = 5.0
_LOOKUP_SHARE = 0.5  # of a deadline, what the lookup may take of it
_REPLY_SHARE = 0.1  # and what is kept for replies to reach the caller
_RECONNECT_S = 1.0
_COMMIT_S = 1.0


class Client:
    """A connection to this host's node. Reconnects by itself when the node has been restarted."""

    def __init__(self, path: str | None, timeout_s: float, find: Callable[[], str] | None = None):
        """path: None for a node that is not there yet. find: where the node is once the connection has
        broken; default: on the same path.
        """
        if path is None and find is None:
            raise ConfigError("a client needs a path, or a way to find one")
        self.socket_path = path or ""
        self.budget_s = timeout_s
        self._find = find or (lambda: self.socket_path)
        self._lock = threading.Lock()
        self._link = Link(path, timeout_s) if path is not None else None
        self._reconnecting = self._closed = False
        self._retry_at_s = 0.0

    @property
    def node(self) -> str:
        """The name of the node behind this connection; empty where there has been none yet."""
        return self._link.member.name if self._link is not None else ""

    def link(self) -> Link:
        """The live link. Raises NodeDown at once where there is none; another is then looked for."""
        with self._lock:
            if self._link is not None and not self._link.broken:
                return self._link
            if self._closed:
                raise NodeDown("this client has been closed")
            if not self._reconnecting and time.monotonic() >= self._retry_at_s:
                # Beside the caller: finding a node can take longer than a lookup may.
                self._reconnecting = True
                threading.Thread(target=self._reconnect, name="p2pcache-reconnect", daemon=True).start()
        raise NodeDown("this process's node is down")

    def open(self, namespace: Namespace) -> Cache:
        """Open a namespace: the KV of one model, layout, dtype, adapter and tenant."""
        if not isinstance(namespace, Namespace):
            raise ConfigError(f"open takes a Namespace, not {type(namespace).__name__}")
        return Cache(self, namespace)

    def report_prefill_rate(self, tokens_per_s: float) -> None:
        """Tell the planner how fast this engine computes, instead of all that was reported before.

        0: unknown, then nothing is recomputed for being faster to compute than to fetch.
        """
        request = {"prefill_tokens_per_s": float(tokens_per_s), "prefills": []}
        self._ask("report", request, self.budget_s)

    def report_prefill(self, tokens: int, attended: int, seconds: float) -> None:
        """Tell the planner what one prefill took: it learns from these how fast this engine computes.

        tokens: computed ones. attended: the sum, over these, of how many tokens stood before each, reused
        ones too. seconds: until the device was done, waiting for bytes not counted. Does not wait, and never
        raises for a fault.
        """
        request = {"prefill_tokens_per_s": None, "prefills": [[int(tokens), int(attended), float(seconds)]]}
        with suppress(NodeDown):  # without a node there is nothing to plan
            self.link().notify("report", request)

    def namespaces(self, tenant: bytes | None = None) -> list[Namespace]:
        """The namespaces that were opened in the mesh, as this tenant's. Raises NodeDown."""
        found = []
        for raw in self._ask("siblings", {"descriptor": b""}, self.budget_s)["descriptors"]:
            try:
                found.append(Namespace.from_description(raw, tenant))
            except ConfigError:
                continue  # of another version; it cannot be named here anyhow
        return found

    def mesh(self, budget_s: float = 2.0) -> list[dict[str, Any]]:
        """The status of every node. Raises NodeDown, DeadlineExceeded."""
        return self._ask("mesh", {"deadline_s": budget_s}, budget_s)["nodes"]

    def close(self) -> None:
        """End the connection and with it every lease. Fetched tensors must not be used any more."""
        with self._lock:
            self._closed = True
            link = self._link
        if link is not None:
            link.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _ask(self, op: str, body: dict[str, Any], budget_s: float) -> Any:
        return self.link().call(op, body, budget_s)

    def _reconnect(self) -> None:
        link = None
        try:
            path = self._find()
            link = Link(path, self.budget_s)
        except Exception as error:  # whatever it is (Ray may raise anything), the next try is due
            _log.info("still without a node: %s", error)
        with self._lock:
            self._reconnecting = False
            self._retry_at_s = time.monotonic() + _RECONNECT_S
            if link is not None and not self._closed:
                self.socket_path, self._link, link = path, link, None
        if link is not None:
            link.close()


def connect(socket: str | None = None, *, timeout_s: float = 5.0, required: bool = True) -> Client:
    """Connect to the node on this host.

    socket: path of its engine socket; else `P2PCACHE_SOCKET`, else the node actor of this Ray node,
    else the only socket in the runtime folder. Raises NodeDown where there is none; with
    `required=False` the client then looks for one whenever it is used, and all is a miss until then.
    """

    def find() -> str:
        return find_socket(socket)

    try:
        return Client(find(), timeout_s, find)
    except NodeDown:
        if required:
            raise
        return Client(None, timeout_s, find)


class Cache:
    """The mesh as one namespace sees it."""

    def __init__(self, client: Client, namespace: Namespace):
        self.client = client
        self.namespace = namespace
        self.layout = namespace.layout
        self._key = namespace.key()
        self._announced: Link | None = None
        self._announce(wait=True)

    # -- find ------------------------------------------------------------------------------------

    def chunks(self, tokens: Any, chunker: Chunker | None = None) -> list[ChunkKeys]:
        """Cut a prompt and name its chunks. tokens: integers `[n]`, any array or tensor of them."""
        run = as_tokens(tokens)
        return chunk_keys(self._key, run, (chunker or ContentChunker()).spans(run))

    def lookup(
        self,
        tokens: Any,
        *,
        chunker: Chunker | None = None,
        content_reuse: bool = True,
        everywhere: bool = False,
        budget_s: float = LOOKUP_BUDGET_S,
        deadline_s: float | None = None,
    ) -> Lookup:
        """Find the chunks of a prompt in the mesh and plan where each comes from.

        content_reuse: accept bodies computed behind other tokens (non-prefix reuse). everywhere:
        list other holders even of what is at hand. deadline_s: from now until the bytes must be here,
        lookup and fetch together; what cannot come by then is a miss, and the fetch of this lookup ends then.
        """
        started_s, by_s = time.perf_counter(), None
        budget_s = seconds(budget_s)
        if deadline_s is not None:
            deadline_s = seconds(deadline_s)
            by_s = time.monotonic() + deadline_s * (1 - _REPLY_SHARE)
            budget_s = min(budget_s, deadline_s * _LOOKUP_SHARE)
        run = as_tokens(tokens)
        keys = chunk_keys(self._key, run, (chunker or ContentChunker()).spans(run))
        if not keys:
            return Lookup(run, (), time.perf_counter() - started_s)
        patience_s = None
        try:
            self._announce(wait=False)
            asked = pack_asked(keys)
            within_s = None if by_s is None else max(by_s - time.monotonic(), 0.0)
            reply = self._ask_for(keys, asked, content_reuse, everywhere, budget_s, within_s)
            patience_s = reply["patience_s"]
            wants = chosen_alone(reply, asked, [stop - start for start, stop, *_ in keys])
            if wants is not None:  # nothing to choose, and no objects before somebody looks at them
                chunks = SingleChunks(wants, lambda: map(lookup_chunk, keys, unpack_answers(reply)))
                return Lookup(run, chunks, time.perf_counter() - started_s, patience_s, by_s)
            found = list(map(lookup_chunk, keys, unpack_answers(reply)))
        except (NodeDown, RemoteError) as error:
            miss = Miss.DEADLINE if isinstance(error, DeadlineExceeded) else Miss.NODE_DOWN
            found = [
                LookupChunk(k, Match.NONE, Source.RECOMPUTE, None, "", (), 0.0, miss, str(error))
                for k in keys
            ]
        chunks = tuple(mark_runs(self._key, found))
        return Lookup(run, chunks, time.perf_counter() - started_s, patience_s, by_s)

    def explain(
        self,
        tokens: Any,
        *,
        chunker: Chunker | None = None,
        content_reuse: bool = True,
        budget_s: float = 2.0,
    ) -> Lookup:
        """A lookup that asks everybody, and says of what is missing whether it is held otherwise.

        A difference in any field of a namespace is another key, so a mismatch looks like an absence;
        this asks under the namespaces of the same model that the mesh knows of, as this tenant.
        """
        found = self.lookup(
            tokens, chunker=chunker, content_reuse=content_reuse, everywhere=True, budget_s=budget_s
        )
        missing = [c for c in found.chunks if c.miss is Miss.ABSENT]
        if not missing:
            return found
        spans = [(c.keys.start, c.keys.stop) for c in missing]
        details: dict[int, str] = {}
        for held in self._siblings():
            keys = chunk_keys(held.key(), found.tokens, spans)
            try:
                answers = unpack_answers(self._ask_for(keys, pack_asked(keys), True, True, budget_s, None))
            except (NodeDown, RemoteError):
                break
            for k, answer in zip(keys, answers, strict=True):
                if answer.found:
                    details[k.start] = "; ".join(self.namespace.differences(held))
        chunks = tuple(
            dataclasses.replace(c, miss=Miss.LAYOUT, detail=details[c.keys.start])
            if c.keys.start in details
            else c
            for c in found.chunks
        )
        return dataclasses.replace(found, chunks=chunks)

    # -- bring -----------------------------------------------------------------------------------

    def fetch(self, lookup: Lookup, *, budget_s: float = FETCH_BUDGET_S) -> Fetched:
        """Bring what a lookup found into this host's slab. Ownership: see `FetchedChunk`.

        It ends with the budget, the lookup's deadline, or its patience, whichever is first.
        """
        budget_s = lookup.within_s(seconds(budget_s), time.monotonic())
        chunks = lookup.chunks
        if isinstance(chunks, SingleChunks):
            asked: Sequence[int] = range(len(chunks))
            wants, tokens = chunks.wants, asked_tokens(chunks.wants)
        else:
            asked = [i for i, c in enumerate(chunks) if c.body is not None]
            wants = pack_bodies((c.body, holders_of(c)) for i in asked if (c := chunks[i]).body is not None)
            tokens = [chunks[i].keys.tokens for i in asked]
        if not asked:
            return Fetched([as_missed(chunks, i, chunks[i].miss) for i in range(len(chunks))], _nothing)
        request = {
            "names": wants.names,
            "wants": wants.bodies,
            "holders": wants.holders,
            "deadline_s": budget_s,
        }
        link, held = None, []
        try:
            link = self.client.link()
            reply = link.call("fetch", request, budget_s)
            held = leased(reply["grants"])
            check_grants(reply["names"], reply["grants"], len(asked))
            slab = slab_bytes(link.slab)
        except (NodeDown, RemoteError) as error:
            if link is not None:
                link.release(held)
            miss = Miss.DEADLINE if isinstance(error, DeadlineExceeded) else Miss.NODE_DOWN
            came = set(asked)
            missed = [as_missed(chunks, i, miss if i in came else chunks[i].miss) for i in range(len(chunks))]
            return Fetched(missed, _nothing)
        fetched = Lazy(len(chunks), lambda: fetched_chunks(self.layout, slab, chunks, asked, tokens, reply))
        return Fetched(fetched, lambda now: link.release(held, now))

    def prefetch(
        self, lookup: Lookup, *, stream: Stream | None = None, budget_s: float = FETCH_BUDGET_S
    ) -> Prefetch:
        """Start a fetch beside the caller. stream: where layers go; default: this process's CPU one.

        Where so many wait that their memory would pass PREFETCH_QUEUE_BYTES_MAX it is answered at once:
        all of it a miss, BUSY.
        """
        by_s = time.monotonic() + budget_s  # from now on, also while other prefetches are before it

        def fetch() -> Fetched:
            return self.fetch(lookup, budget_s=max(by_s - time.monotonic(), 0.0))

        def refused() -> Fetched:
            chunks = lookup.chunks
            missed = [as_missed(chunks, i, c.miss or Miss.BUSY) for i, c in enumerate(chunks)]
            return Fetched(missed, _nothing)

        streams, layers = stream or default_stream(), self.layout.layers
        return Prefetch(fetch, layers, streams, len(lookup.chunks), refused)

    # -- keep ------------------------------------------------------------------------------------

    def store(
        self,
        chunks: Sequence[ChunkKeys],
        kv: torch.Tensor | Callable[[ChunkKeys, torch.Tensor], None],
        *,
        provenance: Provenance | Sequence[Provenance] = Provenance.IN_CONTEXT,
        offset: int = 0,
        budget_s: float = FETCH_BUDGET_S,
    ) -> Stored:
        """Store chunks of one prompt; returns once this node serves them (see `Stored.published`).

        kv: `[layers, 2, n, kv_heads, head_dim]`, whose token axis starts at prompt position
        `offset`, any strides and any device; or a function that writes a chunk's KV straight into the
        tensor of that shape it is handed (part of the slab). provenance: of all chunks, or one each;
        what attended to reused KV must be APPROXIMATE, and is then never offered as exact.
        Slots for all chunks are taken before the first is written: store a prompt that is larger than
        the host tier in parts. Raises LayoutError where the tensor is not what the namespace says.
        """
        if isinstance(kv, torch.Tensor):
            self._check(kv, chunks, offset)
        elif not callable(kv):
            raise LayoutError(f"kv is a tensor or a function that writes one, not {type(kv).__name__}")
        each = [provenance] * len(chunks) if isinstance(provenance, Provenance) else list(provenance)
        if len(each) != len(chunks):
            raise ConfigError(f"{len(each)} provenances for {len(chunks)} chunks")
        bodies = [self.body(c, p) for c, p in zip(chunks, each, strict=True) if c.tokens > 0]
        chunks = [c for c in chunks if c.tokens > 0]
        if not bodies:
            return Stored(0, 0, Counter())
        budget_s = seconds(budget_s)
        by_s = time.monotonic() + budget_s
        refused: Counter[str] = Counter()
        try:
            link = self.client.link()
            request = {"bodies": [body_to_wire(b) for b in bodies], "deadline_s": budget_s}
            slots = link.call("reserve", request, budget_s)["slots"]
            committed, resident, lost = self._write(link, chunks, bodies, slots, kv, offset, refused, by_s)
        except (NodeDown, RemoteError) as error:
            refused[Miss.DEADLINE if isinstance(error, DeadlineExceeded) else Miss.NODE_DOWN] += len(bodies)
            return Stored(0, 0, refused, lambda _: False)
        return Stored(committed, resident, refused, lambda wait_s: self._published(link, lost, wait_s))

    def pin(self, lookup: Lookup, ttl_s: float, *, budget_s: float = LOOKUP_BUDGET_S) -> int:
        """Keep what this node's host tier holds of a lookup from eviction. Returns how many chunks."""
        bodies = [c.body.exact for c in lookup.chunks if c.body is not None]
        try:
            return self.client._ask("pin", {"bodies": bodies, "ttl_s": float(ttl_s)}, budget_s)["pinned"]
        except (NodeDown, RemoteError):
            return 0

    # -- inside ----------------------------------------------------------------------------------

    def _announce(self, *, wait: bool) -> None:
        """Tell the mesh of this namespace, once a link: it explains other people's misses."""
        try:
            link = self.client.link()
            if self._announced is link:
                return
            described = {"descriptor": self.namespace.describe()}
            if wait:
                link.call("open", described, self.client.budget_s)
            else:
                link.notify("open", described)
            self._announced = link
        except (NodeDown, RemoteError) as error:
            _log.info("namespace not announced: %s", error)

    def _siblings(self) -> Iterator[Namespace]:
        try:
            known = self.client.namespaces(self.namespace.tenant)
        except (NodeDown, RemoteError):
            return
        for held in known:
            if held.model == self.namespace.model and held != self.namespace:
                yield held

    def _ask_for(
        self,
        keys: Sequence[ChunkKeys],
        asked: bytes,
        content_reuse: bool,
        everywhere: bool,
        budget_s: float,
        within_s: float | None,
    ) -> Mapping[str, Any]:
        request = {
            "chunks": asked,
            "starts": pack_starts([start for start, *_ in keys]),
            "content_reuse": content_reuse,
            "everywhere": everywhere,
            "deadline_s": budget_s,
            "bytes_within_s": within_s,
        }
        reply = self.client._ask("lookup", request, budget_s)
        if len(reply["answers"]) // ANSWER.size != len(asked) // ASK.size:
            raise RemoteError("the node did not answer for every chunk")
        return reply

    def _tensor(self, link: Link, offset: int, nbytes: int, tokens: int) -> torch.Tensor:
        flat = torch.frombuffer(link.slab.view(offset, nbytes), dtype=DTYPES[self.layout.dtype])
        return flat.view(self.layout.shape(tokens))

    def body(self, chunk: ChunkKeys, provenance: Provenance) -> BodyInfo:
        """How the KV of a chunk is named when it was computed so."""
        exact = body_key(self._key, chunk.exact, provenance)
        nbytes = self.layout.body_bytes(chunk.tokens)
        return BodyInfo(chunk.content, exact, chunk.tokens, nbytes, provenance, chunk.start)

    def _check(self, kv: torch.Tensor, chunks: Sequence[ChunkKeys], offset: int) -> None:
        layers, two, _, heads, dim = self.layout.shape(0)
        shape = tuple(kv.shape)
        if len(shape) != 5 or (shape[0], shape[1], shape[3], shape[4]) != (layers, two, heads, dim):
            raise LayoutError(f"kv is {list(shape)}, expected [{layers}, 2, tokens, {heads}, {dim}]")
        if kv.dtype is not DTYPES[self.layout.dtype]:
            raise LayoutError(f"kv is {kv.dtype}, its namespace says {self.layout.dtype}")
        if kv.device.type == "meta":
            raise LayoutError("kv is on the meta device: it has no bytes")
        if kv.layout is not torch.strided:
            raise LayoutError(f"kv is of layout {kv.layout}, only strided tensors can be stored")
        for c in chunks:
            if not offset <= c.start <= c.stop <= offset + shape[2]:
                raise LayoutError(
                    f"chunk [{c.start}, {c.stop}) is outside the tokens [{offset}, {offset + shape[2]}) of kv"
                )

    def _write(
        self,
        link: Link,
        chunks: Sequence[ChunkKeys],
        bodies: Sequence[BodyInfo],
        slots: Sequence[Sequence[Any]],
        kv: torch.Tensor | Callable[[ChunkKeys, torch.Tensor], None],
        offset: int,
        refused: Counter[str],
        by_s: float,
    ) -> tuple[int, int, int]:
        """Fill reserved slots and commit them. Returns (committed, resident before, lost before).

        lost: how many batches to owners had been lost then, for `_published` to compare with.
        """
        resident, ready = 0, []
        pending = {slot[2] for slot in slots if slot[0] == "ok"}
        try:
            with link.writing():
                for chunk, body, (status, where, generation) in zip(chunks, bodies, slots, strict=True):
                    if status == "resident":
                        resident += 1
                    elif status != "ok":
                        refused[status] += 1
                    else:
                        out = self._tensor(link, where, body.nbytes, chunk.tokens)
                        if isinstance(kv, torch.Tensor):
                            out.copy_(kv[:, :, chunk.start - offset : chunk.stop - offset])
                        else:
                            kv(chunk, out)
                        sums = checksum_body(
                            link.slab.view(where, body.nbytes), body.exact, self.layout.layers
                        )
                        ready.append([generation, list(sums), b""])
            # What is written is worth a moment: the caller's writer may have used up the budget.
            left_s = max(by_s - time.monotonic(), _COMMIT_S)
            reply = link.call("commit", {"slots": ready}, left_s)
            pending.clear()
            return reply["committed"], resident, reply["lost"]
        finally:
            if pending:  # the caller's own writer failed: nothing of it may stay
                link.notify("abort", {"generations": list(pending)})

    @staticmethod
    def _published(link: Link, lost: int, budget_s: float) -> bool:
        try:
            return link.call("published", {"lost": lost, "deadline_s": budget_s}, budget_s)["told"]
        except (NodeDown, RemoteError):
            return False


def _nothing(now: bool) -> None:
    """There are no leases to end."""
