"""From a node's packed replies to what an engine gets: chunks of a lookup, and tensors over the slab."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from p2pcache.core.keys import ChunkKeys
from p2pcache.core.layout import KVLayout
from p2pcache.core.records import MISSES, SOURCES, Answer
from p2pcache.core.wire import GRANT
from p2pcache.io.slab import MappedSlab
from p2pcache.results import FetchedChunk, LookupChunk
from p2pcache.types import Holder, Miss, Source

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "uint8": torch.uint8,
}
DTYPES |= {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}


def lookup_chunk(keys: ChunkKeys, a: Answer) -> LookupChunk:
    """What a lookup's answer says of a chunk."""
    return LookupChunk(keys, a.match, a.source, a.body, a.peer, a.found, a.cost_s, a.miss)


def as_missed(chunks: Sequence[LookupChunk], index: int, miss: Miss | None) -> FetchedChunk:
    """A chunk of which no byte came."""
    return FetchedChunk(chunks, index, None, Source.RECOMPUTE, "", "", miss, 0.0)


def holders_of(c: LookupChunk) -> list[Holder]:
    """Who to ask for the chosen body: the planner's choice first."""
    for found in c.found:
        if c.body is not None and found.body.exact == c.body.exact:
            return sorted(found.holders, key=lambda h: (h.node != c.peer, h.tier, h.node))
    return []


def slab_bytes(slab: MappedSlab) -> torch.Tensor:
    """The slab as one tensor, which keeps it mapped. A host tier may have no bytes at all."""
    if not slab.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(slab.view(0, slab.nbytes), dtype=torch.uint8)


def fetched_chunks(
    layout: KVLayout,
    slab: torch.Tensor,
    chunks: Sequence[LookupChunk],
    asked: Sequence[int],
    tokens: Sequence[int],
    reply: Mapping[str, Any],
) -> list[FetchedChunk]:
    """Each chunk of a lookup after its fetch.

    slab: its bytes, uint8 `[n]`. asked, tokens: index and length of the chunks that were asked for.
    """
    item_bytes = DTYPES[layout.dtype].itemsize
    flat = slab[: len(slab) // item_bytes * item_bytes].view(DTYPES[layout.dtype])
    layers, two, _, heads, dim = layout.shape(0)
    row, end = heads * dim, len(slab)
    geometry: dict[int, tuple[int, tuple[int, ...], tuple[int, ...]]] = {}  # of chunks of so many tokens
    out: list[FetchedChunk] = []
    names, new = reply["names"], tuple.__new__
    for i, n, grant in zip(asked, tokens, GRANT.iter_unpack(reply["grants"]), strict=True):
        while len(out) < i:  # not asked for
            out.append(as_missed(chunks, len(out), chunks[len(out)].miss))
        source_code, peer, transport, miss_code, offset, nbytes, generation, seconds = grant
        source, miss, kv = SOURCES[source_code], MISSES[miss_code], None
        if generation:
            if n not in geometry:
                strides = (two * n * row, n * row, row, dim, 1)
                geometry[n] = layout.body_bytes(n), (layers, two, n, heads, dim), strides
            body_bytes, shape, strides = geometry[n]
            if nbytes == body_bytes and offset + nbytes <= end and not offset % item_bytes:
                kv = flat.as_strided(shape, strides, offset // item_bytes)
            else:
                source, miss = Source.RECOMPUTE, Miss.LAYOUT
        fields = (chunks, i, kv, source, names[peer], names[transport], miss, seconds)
        out.append(new(FetchedChunk, fields))
    while len(out) < len(chunks):
        out.append(as_missed(chunks, len(out), chunks[len(out)].miss))
    return out
