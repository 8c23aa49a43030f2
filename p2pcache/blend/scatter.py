"""The cache of a sparse prefill: reused KV fills it layer by layer, computed tokens overwrite their places.

Slot i holds position i. Reused KV is asked for just before its layer runs, so that a pull over the
network overlaps with compute, and only what some later token can see is copied: in a sliding layer
most of a long prompt is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from p2pcache.blend.attend import Runs
from p2pcache.blend.rotate import LayerRopes, RopeSpec
from p2pcache.blend.select import Piece
from p2pcache.types import LayoutError

DECODE_TOKENS_SPARE = 256
"""Room behind the prompt when the caller names no capacity. A cache that fills up grows by half."""


class LayerSource(Protocol):
    """Where reused KV comes from, in layer order."""

    def layer(self, index: int) -> Iterable[tuple[Piece, torch.Tensor]]:
        """Every piece of the prompt with its KV of one layer, `[2, tokens, kv_heads, head_dim]`.

        Called at most once a layer, in order, from the model's thread, and may block until the layer has
        arrived. A layer of which nothing is needed is not asked for, and a piece of which no later
        token sees anything there may be left out (`sparse.pieces_needed` says which). The tensors are
        read, never kept; for a model on a GPU the reads are queued on the current stream, so their memory
        may be reused behind an event recorded there. Whatever it raises ends the prefill and reaches the
        caller, who can always prefill in full.
        """
        ...


def slots_needed(
    total: int, pieces: Sequence[Piece], computed: np.ndarray, queries: np.ndarray, window: int | None
) -> np.ndarray:
    """Which slots of a layer must hold reused KV: bool `[total]`.

    Those in pieces that are not `computed` there and that one of `queries` (both positions, sorted) sees,
    or a token behind the prompt. window: how many last slots a query sees, itself included; None for all.
    """
    needed = np.zeros(total, dtype=bool)
    for piece in pieces:
        needed[piece.start : piece.stop] = True
    needed[computed] = False
    if window is not None:
        slots = np.arange(total)
        after = np.append(queries[queries < total], total)
        next_query = after[np.searchsorted(after, slots, side="right").clip(max=len(after) - 1)]
        needed &= next_query - slots < window
    return needed


class KeysAreIn(Exception):
    """A forward was stopped on purpose, where what it was for has been had."""


@dataclass
class Plan:
    """What a cache's layers share during a prefill. The prefill changes it as it goes."""

    total: int
    capacity: int
    pieces: tuple[Piece, ...]
    source: LayerSource | None
    rope: RopeSpec | LayerRopes | None
    windows: Sequence[int | None]  # a layer
    device: Any
    runs: Runs | None = None  # where our attention runs
    positions: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # that run now
    queries: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Positions that run in this layer now or later in the prefill; `positions`, where that is known."""
    on_keys: Callable[[ScatterLayer, torch.Tensor, torch.Tensor], None] | None = None
    """Called once, with the next layer, which holds all reused KV, and with the K and V computed for it.
    They are written then, and the layer goes no further: `KeysAreIn` is raised."""
    index: torch.Tensor | None = None  # positions, on the device

    def run(self, positions: np.ndarray, queries: np.ndarray | None = None) -> None:
        """Say which tokens run from now on, int64 sorted, and which may run over what is filled now."""
        self.positions, self.queries = positions, positions if queries is None else queries
        self.index = torch.from_numpy(positions).to(self.device)
        if self.runs is not None:
            self.runs.set_positions(positions)


class ScatterLayer(CacheLayerMixin):
    """One layer's K and V, `[1, kv_heads, capacity, head_dim]`, allocated once and owned by the layer.

    Updates of the prefill scatter; every later one appends.
    """

    is_sliding = False  # it has a slot for every token; a sliding model's mask says what is seen
    is_croppable = True
    supports_early_init = False

    def __init__(self, index: int, plan: Plan) -> None:
        super().__init__()
        self.index = index
        self.plan: Plan | None = plan  # dropped after the prefill, with the source it names
        self.filled = False
        self.length = 0
        self.holes = np.zeros(0, dtype=bool)  # [total]: slots without KV, which no later token sees

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate, uninitialised, in the model's own dtype and on its device."""
        capacity = self.plan.capacity if self.plan else key_states.shape[2] + DECODE_TOKENS_SPARE
        self.keys, self.values = (
            t.new_empty((*t.shape[:2], capacity, t.shape[3])) for t in (key_states, value_states)
        )
        self.device = key_states.device
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any):
        """Take in K/V `[1, kv_heads, n, head_dim]`; return views of all K and V up to the new length.

        The views are valid until the next update.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.plan is None:
            self._append(key_states, value_states)
        else:
            self._scatter(self.plan, key_states, value_states)
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def _scatter(self, plan: Plan, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if key_states.shape[2] != len(plan.positions):
            raise LayoutError(f"{key_states.shape[2]} tokens came where {len(plan.positions)} were planned")
        if plan.runs is not None:
            plan.runs.keys_came(self.index)
        if not self.filled:
            self._fill(plan)
        watch, plan.on_keys = plan.on_keys, None
        if watch is not None:
            watch(self, key_states, value_states)
        if len(plan.positions) == plan.total:
            self.keys[:, :, : plan.total] = key_states
            self.values[:, :, : plan.total] = value_states
        else:
            self.keys.index_copy_(2, plan.index, key_states)
            self.values.index_copy_(2, plan.index, value_states)
        self.holes[plan.positions] = False
        self.length = plan.total
        if watch is not None:
            if plan.runs is not None:
                plan.runs.layer = None
            raise KeysAreIn

    def _fill(self, plan: Plan) -> None:
        """Write what is needed of every piece into place; keys of moved ones are turned on the way."""
        self.filled = True
        computed = np.zeros(0, dtype=np.int64) if plan.on_keys is not None else plan.positions
        needed = slots_needed(plan.total, plan.pieces, computed, plan.queries, plan.windows[self.index])
        self.holes = ~needed
        self.holes[computed] = False
        spans = {piece: _span(needed, piece) for piece in plan.pieces}
        if self.holes.any():  # hidden by masks, but what is masked must be a number
            self.keys[:, :, : plan.total], self.values[:, :, : plan.total] = 0, 0
        missing = {piece for piece, span in spans.items() if span is not None}
        if not missing:
            return
        for piece, kv in plan.source.layer(self.index):
            want = (2, piece.tokens, self.keys.shape[1], self.keys.shape[3])
            if tuple(kv.shape) != want:
                raise LayoutError(f"layer {self.index}, {piece}: KV is {tuple(kv.shape)}, not {want}")
            if piece in missing:
                self._write(plan, piece, spans[piece], kv)
                missing.discard(piece)
        if missing:  # the buffer is uninitialised there: never let it be read
            raise LayoutError(
                f"layer {self.index}: the source gave no KV for {sorted(missing, key=lambda p: p.start)}"
            )

    def _write(self, plan: Plan, piece: Piece, span: slice, kv: torch.Tensor) -> None:
        """Slots `span` of a piece, out of its KV `[2, tokens, kv_heads, head_dim]`."""
        own = slice(span.start - piece.start, span.stop - piece.start)
        kv = kv[:, own].to(self.device, non_blocking=True)
        keys, values = (t[0, :, span].transpose(0, 1) for t in (self.keys, self.values))
        if piece.delta:
            plan.rope.layer(self.index).rotate(kv[0], piece.delta, out=keys)
        else:
            keys.copy_(kv[0])
        values.copy_(kv[1])
        self.holes[span] = False

    def _append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        stop = self.length + key_states.shape[2]
        if stop > self.keys.shape[2]:
            grown = stop + stop // 2
            for name in ("keys", "values"):
                old = getattr(self, name)
                new = old.new_empty((*old.shape[:2], grown, old.shape[3]))
                new[:, :, : self.length] = old[:, :, : self.length]
                setattr(self, name, new)
        self.keys[:, :, self.length : stop] = key_states
        self.values[:, :, self.length : stop] = value_states
        self.length = stop

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """`(kv length, kv offset)` of the next forward, from which the model builds its own mask."""
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens; transformers gives their number as a negative.

        Raises LayoutError where a token at the new end would see slots that were left out.
        """
        length = self.length - min(abs(tokens_to_remove), self.length)
        if length < len(self.holes) and self.holes[:length].any():
            raise LayoutError(f"layer {self.index} has dropped tokens that position {length} may see")
        self.length = length

    def reset(self) -> None:
        self.length = 0


def _span(needed: np.ndarray, piece: Piece) -> slice | None:
    """The smallest span of a piece with all of its needed slots, None where there are none."""
    at = np.flatnonzero(needed[piece.start : piece.stop])
    return slice(piece.start + int(at[0]), piece.start + int(at[-1]) + 1) if len(at) else None


class ScatterCache(Cache):
    """A transformers cache whose prefill scatters, and whose decode appends. Batch of one."""

    def __init__(self, layers: int, plan: Plan) -> None:
        super().__init__(layers=[ScatterLayer(index, plan) for index in range(layers)])

    def finish(self) -> None:
        """End the prefill: what comes from now on is appended."""
        for layer in self.layers:
            layer.plan = None
