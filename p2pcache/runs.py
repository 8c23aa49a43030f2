"""Keeping runs together: consecutive chunks whose bodies were computed one right behind the other.

A body that was computed right behind the one before it has attended to it, so the seam between the
two needs no mending. Their exact keys say so, because they chain. A body that a lossy codec made attended to
the same as the one it was made of, so it counts as that one, where it can be told which one that was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from p2pcache.core.coding import RAW
from p2pcache.core.keys import exact_key, lossy_key
from p2pcache.results import LookupChunk
from p2pcache.types import BodyInfo, ExactKey, Found, Match, Source


def mark_runs(namespace_key: bytes, chunks: Sequence[LookupChunk]) -> Iterator[LookupChunk]:
    """Say of each chosen body whether it was computed right behind the one before it.

    Where several bodies of a chunk are known, one that continues the run is taken, provided that a
    node has it from which the planner takes something for this prompt anyhow.
    """
    reachable = {c.peer for c in chunks if c.body is not None}
    before: ExactKey | None = None
    for c in chunks:
        follower = None
        if before is not None and c.match is Match.CONTENT:
            follower = exact_key(namespace_key, before, c.keys.digest)
            runs = sorted((f for f in c.found if _is_of(f.body, follower)), key=lambda f: f.body.codec != RAW)
            c = next((on for f in runs if (on := _on(c, f, reachable)).follows), c)
        yield c
        before = _computed_as(c, follower)


def _is_of(body: BodyInfo, exact: ExactKey) -> bool:
    """Whether it is the body with this key, or what a lossy codec made of it."""
    return body.exact == (exact if body.codec == RAW else lossy_key(exact, body.codec))


def _computed_as(c: LookupChunk, follower: ExactKey | None) -> ExactKey | None:
    """The key under which the chosen body was computed; None where there is none, or it cannot be told."""
    if c.body is None:
        return None
    if c.body.codec == RAW:
        return c.body.exact
    return next((e for e in (follower, c.keys.exact) if e is not None and _is_of(c.body, e)), None)


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
