"""Keeping runs together: consecutive chunks whose bodies were computed one right behind the other.

A body that was computed right behind the one before it has attended to it, so the seam between the
two needs no mending. Their exact keys say so, because they chain.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from p2pcache.core.keys import exact_key
from p2pcache.results import LookupChunk
from p2pcache.types import BodyInfo, Found, Match, Source


def mark_runs(namespace_key: bytes, chunks: Sequence[LookupChunk]) -> Iterator[LookupChunk]:
    """Say of each chosen body whether it was computed right behind the one before it.

    Where several bodies of a chunk are known, one that continues the run is taken, provided that a
    node has it from which the planner takes something for this prompt anyhow.
    """
    reachable = {c.peer for c in chunks if c.body is not None}
    before: BodyInfo | None = None
    for c in chunks:
        if before is not None and c.match is Match.CONTENT:
            follower = exact_key(namespace_key, before.exact, c.keys.digest)
            c = next((_on(c, f, reachable) for f in c.found if f.body.exact == follower), c)
        yield c
        before = c.body


def _on(c: LookupChunk, found: Found, reachable: set[str]) -> LookupChunk:
    """The same chunk from a body that follows the one before it; unchanged where out of reach."""
    if c.body is not None and found.body.exact == c.body.exact:
        return dataclasses.replace(c, follows=True)
    near = [h for h in found.holders if h.node in reachable]
    if not near:
        return c
    peer = min(near, key=lambda h: (h.node != c.peer, h.tier)).node
    source = c.source if peer == c.peer else Source.PEER
    return dataclasses.replace(c, body=found.body, peer=peer, source=source, follows=True)
