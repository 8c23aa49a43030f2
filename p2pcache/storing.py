"""How an engine's KV gets into its node's slab: slots are reserved, written in place, committed.

The engine writes; the node only learns what was written, and serves nothing before it has the checksums.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from p2pcache.core.checksum import checksum_body
from p2pcache.core.coding import layout_meta
from p2pcache.core.keys import ChunkKeys
from p2pcache.core.layout import KVLayout
from p2pcache.io.link import Link
from p2pcache.node.wireform import body_to_wire
from p2pcache.replies import DTYPES
from p2pcache.results import Stored
from p2pcache.types import BodyInfo, DeadlineExceeded, LayoutError, Miss, NodeDown, RemoteError

Writer = Callable[[ChunkKeys, torch.Tensor], None]
"""Writes a chunk's KV into the tensor `[layers, 2, tokens, kv_heads, head_dim]` that it is handed."""

_COMMIT_S = 1.0


def writer(layout: KVLayout, kv: torch.Tensor | Writer, chunks: Sequence[ChunkKeys], offset: int) -> Writer:
    """The function that writes each chunk, whatever `Cache.store` was given. Raises LayoutError."""
    if callable(kv) and not isinstance(kv, torch.Tensor):
        return kv
    if not isinstance(kv, torch.Tensor):
        raise LayoutError(f"kv is a tensor or a function that writes one, not {type(kv).__name__}")
    _check(layout, kv, chunks, offset)
    return lambda chunk, out: out.copy_(kv[:, :, chunk.start - offset : chunk.stop - offset])


def store_bodies(
    link: Callable[[], Link],
    layout: KVLayout,
    parts: Sequence[tuple[ChunkKeys, BodyInfo]],
    write: Writer,
    budget_s: float,
) -> Stored:
    """Reserve, write and commit. A fault is counted as refused.

    link: gives the live link, or raises NodeDown.
    """
    if not parts:
        return Stored(0, 0, Counter())
    by_s = time.monotonic() + budget_s
    refused: Counter[str] = Counter()
    try:
        live = link()
        request = {"bodies": [body_to_wire(b) for _, b in parts], "deadline_s": budget_s}
        slots = live.call("reserve", request, budget_s)["slots"]
        committed, resident, lost = _write(live, layout, parts, slots, write, refused, by_s)
    except (NodeDown, RemoteError) as error:
        refused[Miss.DEADLINE if isinstance(error, DeadlineExceeded) else Miss.NODE_DOWN] += len(parts)
        return Stored(0, 0, refused, lambda _: False)
    return Stored(committed, resident, refused, lambda wait_s: _published(live, lost, wait_s))


def _write(
    link: Link,
    layout: KVLayout,
    parts: Sequence[tuple[ChunkKeys, BodyInfo]],
    slots: Sequence[Sequence[Any]],
    write: Writer,
    refused: Counter[str],
    by_s: float,
) -> tuple[int, int, int]:
    """Fill reserved slots and commit them. Returns (committed, resident before, lost before).

    lost: how many batches to owners had been lost then, for `_published` to compare with.
    """
    resident, ready = 0, []
    meta = layout_meta(layout)  # for codecs that change values
    pending = {slot[2] for slot in slots if slot[0] == "ok"}
    try:
        with link.writing():
            for (chunk, body), (status, where, generation) in zip(parts, slots, strict=True):
                if status == "resident":
                    resident += 1
                elif status != "ok":
                    refused[status] += 1
                else:
                    raw = link.slab.view(where, body.nbytes)
                    flat = torch.frombuffer(raw, dtype=DTYPES[layout.dtype])
                    write(chunk, flat.view(layout.shape(chunk.tokens)))
                    sums = checksum_body(raw, body.exact, layout.layers)
                    ready.append([generation, list(sums), meta])
        # What is written is worth a moment: the caller's writer may have used up the budget.
        left_s = max(by_s - time.monotonic(), _COMMIT_S)
        reply = link.call("commit", {"slots": ready}, left_s)
        pending.clear()
        return reply["committed"], resident, reply["lost"]
    finally:
        if pending:  # the caller's own writer failed: nothing of it may stay
            link.notify("abort", {"generations": list(pending)})


def _published(link: Link, lost: int, budget_s: float) -> bool:
    try:
        return link.call("published", {"lost": lost, "deadline_s": budget_s}, budget_s)["told"]
    except (NodeDown, RemoteError):
        return False


def _check(layout: KVLayout, kv: torch.Tensor, chunks: Sequence[ChunkKeys], offset: int) -> None:
    layers, two, _, heads, dim = layout.shape(0)
    shape = tuple(kv.shape)
    if len(shape) != 5 or (shape[0], shape[1], shape[3], shape[4]) != (layers, two, heads, dim):
        raise LayoutError(f"kv is {list(shape)}, expected [{layers}, {two}, tokens, {heads}, {dim}]")
    if kv.dtype is not DTYPES[layout.dtype]:
        raise LayoutError(f"kv is {kv.dtype}, its namespace says {layout.dtype}")
    if kv.device.type == "meta":
        raise LayoutError("kv is on the meta device: it has no bytes")
    if kv.layout is not torch.strided:
        raise LayoutError(f"kv is of layout {kv.layout}, only strided tensors can be stored")
    for c in chunks:
        if not offset <= c.start <= c.stop <= offset + shape[2]:
            raise LayoutError(
                f"chunk [{c.start}, {c.stop}) is outside the tokens [{offset}, {offset + shape[2]}) of kv"
            )
