"""What of known documents is found again: at seams, and where their text has changed. No model runs."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from bench.reuse.text import Document, Format, changed
from p2pcache.core.chunking import Chunker, ContentChunker, SegmentChunker
from p2pcache.core.keys import chunk_keys

NAMESPACE_KEY = bytes(32)
ORDERS, DOCUMENTS = 50, 6
CHANGED = (0.01, 0.05, 0.10)
CHUNKERS = (ContentChunker(), ContentChunker(16, 64, 256))


def seams(pool: Sequence[Document], seed: int = 1) -> list[dict[str, Any]]:
    """Documents in new orders: which share of their tokens is not found, and chunks per end of a document.

    Every document has been in one prompt before, among others.
    """
    rng = random.Random(seed)
    rows = []
    for segments, chunkers in ((True, (None,)), (False, CHUNKERS)):
        for chunker in chunkers:
            known = {
                content
                for order in _orders(pool, rng, len(pool) // DOCUMENTS)
                for content, *_ in _chunks(order, chunker)
            }
            lost = tokens = chunks = ends = 0
            for order in _orders(pool, rng, ORDERS):
                missing = [(start, stop) for c, start, stop in _chunks(order, chunker) if c not in known]
                lost += sum(stop - start for start, stop in missing)
                tokens += sum(len(d.part) for d in order)
                chunks += len(missing)
                ends += len(order) + 1  # in front of each document, and behind the last
            name = "segments" if segments else _name(chunker)
            rows.append(
                {"what": "seams", "chunker": name, "lost": lost / tokens, "chunks_an_end": chunks / ends}
            )
    return rows


def similar(form: Format, pool: Sequence[Document], seed: int = 1) -> list[dict[str, Any]]:
    """Documents of which some words were replaced: which share of their tokens is found again."""
    rng = random.Random(seed)
    rows = []
    for share in CHANGED:
        pairs = [(d, changed(form, d, share, rng)) for d in pool]
        for chunker in CHUNKERS:
            kept = tokens = 0
            for old, new in pairs:
                known = {content for content, *_ in _chunks([old], chunker)}
                kept += sum(stop - start for c, start, stop in _chunks([new], chunker) if c in known)
                tokens += len(new.part)
            rows.append(
                {"what": f"{share:.0%} of words changed", "chunker": _name(chunker), "reused": kept / tokens}
            )
    return rows


def _orders(pool: Sequence[Document], rng: random.Random, count: int) -> Iterator[list[Document]]:
    """Orders of DOCUMENTS documents; over `len(pool) / DOCUMENTS` of them every document comes once."""
    deck: list[Document] = []
    for _ in range(count):
        if len(deck) < DOCUMENTS:
            deck = rng.sample(list(pool), len(pool))
        yield [deck.pop() for _ in range(DOCUMENTS)]


def _chunks(order: Sequence[Document], chunker: Chunker | None) -> Iterator[tuple[bytes, int, int]]:
    """`(content key, start, stop)` of a prompt's chunks. chunker: None for one segment a document."""
    run = np.array([t for d in order for t in d.part], np.uint32)
    if chunker is None:
        starts = np.cumsum([0, *(len(d.part) for d in order[:-1])])
        chunker = SegmentChunker([int(s) for s in starts])
    for key in chunk_keys(NAMESPACE_KEY, run, chunker.spans(run)):
        yield key.content, key.start, key.stop


def _name(chunker: ContentChunker | None) -> str:
    return f"content, {chunker.average_tokens} on average" if chunker else "segments"
