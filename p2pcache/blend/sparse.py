"""Sparse prefill: one forward over the tokens that must be recomputed, the rest from reused KV.

A prompt of n tokens is covered by *pieces* of stored KV and by tokens to recompute. The recomputed
tokens run at their true positions, attend to everything before them, reused or not, and scatter
their K/V into place (Yao et al., *CacheBlend*, 2024). Reused KV is asked for a layer at a time, just
before the layer needs it, so that a pull over the network overlaps with compute.

The cache that comes out is a transformers cache like any other: slot i holds position i, and later
tokens are appended, by `decode` or by the model's own `generate`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from p2pcache.blend.forward import attention_mask, run_model
from p2pcache.blend.rotate import RopeSpec
from p2pcache.blend.select import HEAD_TOKENS, Piece, recompute_positions
from p2pcache.types import ConfigError, LayoutError

DECODE_TOKENS_SPARE = 256
"""Room behind the prompt when the caller names no capacity. A cache that fills up grows by half."""


class LayerSource(Protocol):
    """Where reused KV comes from, in layer order."""

    def layer(self, index: int) -> Iterable[tuple[Piece, torch.Tensor]]:
        """Every piece of the prompt with its KV of one layer, `[2, tokens, kv_heads, head_dim]`.

        Called once a layer, in order, from the model's thread, and may block until the layer has
        arrived. The tensors are read, never kept; for a model on a GPU the reads are queued on the
        current stream, so their memory may be reused behind an event recorded there. Whatever it
        raises ends the prefill and reaches the caller, who can always prefill in full.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a cache's layers share during the prefill."""

    total: int
    capacity: int
    positions: torch.Tensor  # [recomputed] int64, sorted, on the model's device
    pieces: tuple[Piece, ...]
    source: LayerSource | None
    rope: RopeSpec | None


class ScatterLayer(CacheLayerMixin):
    """One layer's K and V, `[1, kv_heads, capacity, head_dim]`, allocated once and owned by the layer.

    The first update is the prefill: reused KV goes in, recomputed tokens overwrite their places.
    Every later one appends.
    """

    is_sliding = False  # it holds every token; a sliding model's mask says what is seen
    is_croppable = True
    supports_early_init = False

    def __init__(self, index: int, plan: _Plan) -> None:
        super().__init__()
        self.index = index
        self.plan: _Plan | None = plan  # dropped after the prefill, with the source it names
        self.length = 0

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
        plan, self.plan = self.plan, None
        if plan is None:
            self._append(key_states, value_states)
        else:
            if key_states.shape[2] != plan.positions.numel():
                raise LayoutError(
                    f"{key_states.shape[2]} tokens came where {plan.positions.numel()} were planned"
                )
            self._fill(plan)
            self.keys.index_copy_(2, plan.positions, key_states)
            self.values.index_copy_(2, plan.positions, value_states)
            self.length = plan.total
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def _fill(self, plan: _Plan) -> None:
        """Write every piece into place; keys of moved ones are turned on the way, in one pass."""
        if plan.source is None:
            return
        missing = set(plan.pieces)
        for piece, kv in plan.source.layer(self.index):
            want = (2, piece.tokens, self.keys.shape[1], self.keys.shape[3])
            if tuple(kv.shape) != want:
                raise LayoutError(f"layer {self.index}, {piece}: KV is {tuple(kv.shape)}, not {want}")
            kv = kv.to(self.device, non_blocking=True)
            span = slice(piece.start, piece.stop)
            keys, values = (t[0, :, span].transpose(0, 1) for t in (self.keys, self.values))
            if piece.delta:
                plan.rope.rotate(kv[0], piece.delta, out=keys)
            else:
                keys.copy_(kv[0])
            values.copy_(kv[1])
            missing.discard(piece)
        if missing:  # the buffer is uninitialised there: never let it be read
            raise LayoutError(
                f"layer {self.index}: the source gave no KV for {sorted(missing, key=lambda p: p.start)}"
            )

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
        """Forget the last tokens; transformers gives their number as a negative."""
        self.length -= min(abs(tokens_to_remove), self.length)

    def reset(self) -> None:
        self.length = 0


class ScatterCache(Cache):
    """A transformers cache whose prefill scatters, and whose decode appends. Batch of one."""

    def __init__(self, layers: int, plan: _Plan) -> None:
        super().__init__(layers=[ScatterLayer(index, plan) for index in range(layers)])


@dataclass(frozen=True, slots=True)
class SparsePrefill:
    """What a sparse prefill leaves: the answer's first logits, and a cache to go on with."""

    logits_last: torch.Tensor  # [vocab] behind the prompt's last token
    cache: ScatterCache
    recomputed: np.ndarray  # int64 positions, sorted
    exact_tokens: int  # KV before this position is what a full prefill gives; later KV is approximate


@torch.no_grad()
def sparse_prefill(
    model: Any,
    tokens: torch.Tensor | np.ndarray | Sequence[int],
    pieces: Sequence[Piece],
    source: LayerSource | None,
    rope: RopeSpec | None,
    head_tokens: int = HEAD_TOKENS,
    capacity: int | None = None,
) -> SparsePrefill:
    """Prefill `tokens` (`[n]`), reusing `pieces` (in order) whose KV `source` gives.

    Args:
        model: a transformers decoder with rotary positions, in eval mode.
        source: may be None when there are no pieces.
        rope: how keys are turned; may be None when no piece is moved.
        head_tokens: how many first tokens of an inexact piece are recomputed (see `select`).
        capacity: tokens to allocate for, at least n; n + 256 when None.

    Raises `ConfigError` and `LayoutError` for arguments that do not fit, and what `source` raises.
    """
    ids = _as_ids(model, tokens)
    total = ids.numel()
    recomputed = recompute_positions(total, pieces, head_tokens)
    if capacity is None:
        capacity = total + DECODE_TOKENS_SPARE
    if capacity < total:
        raise ConfigError(f"capacity {capacity} is less than the prompt's {total} tokens")
    if pieces and source is None:
        raise ConfigError("pieces need a source")
    if rope is None and any(piece.delta for piece in pieces):
        raise ConfigError("a piece at another position needs the model's RopeSpec")
    positions = torch.from_numpy(recomputed).to(ids.device)
    plan = _Plan(total, capacity, positions, tuple(pieces), source if pieces else None, rope)
    cache = ScatterCache(model.config.get_text_config().num_hidden_layers, plan)
    # Nothing reused: no mask, so that attention keeps its causal fast path.
    dense = recomputed.size == total
    mask = None if dense else attention_mask(model.config.get_text_config(), positions, total, model.dtype)
    logits = run_model(model, ids[positions], positions, cache, mask, logits_to_keep=1)
    exact_tokens = next((piece.start for piece in pieces if not piece.exact), total)
    return SparsePrefill(logits[-1], cache, recomputed, exact_tokens)


@torch.no_grad()
def full_prefill(
    model: Any, tokens: torch.Tensor | np.ndarray | Sequence[int]
) -> tuple[torch.Tensor, DynamicCache]:
    """The baseline: every token computed, causally. Returns `(logits of the last token [vocab], cache)`.

    The cache is made without the model's config, because one made with it drops tokens that
    sliding layers no longer see, and KV could then not be captured.
    """
    ids = _as_ids(model, tokens)
    cache = DynamicCache()
    logits = run_model(model, ids, torch.arange(ids.numel(), device=ids.device), cache, logits_to_keep=1)
    return logits[-1], cache


@torch.no_grad()
def decode(model: Any, cache: Cache, tokens: torch.Tensor | np.ndarray | Sequence[int]) -> torch.Tensor:
    """Append `tokens` (`[n]`) behind what `cache` holds, and change it. Returns logits `[n, vocab]`.

    Several at once are masked causally among themselves, as n calls with one token would be.
    """
    ids = _as_ids(model, tokens)
    past = cache.get_seq_length()
    return run_model(model, ids, torch.arange(past, past + ids.numel(), device=ids.device), cache)


@torch.no_grad()
def extract_kv(cache: Cache, start: int, stop: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """Copy the KV of tokens `start .. stop-1` into the canonical `[layers, 2, tokens, kv_heads, head_dim]`.

    `out` (of that shape, any float dtype, any device) is written in place: give a view of the slab
    and the bytes move once. Without it a new contiguous tensor of the cache's dtype is returned.
    """
    if not 0 <= start < stop <= cache.get_seq_length():
        raise LayoutError(f"tokens {start}..{stop} are not in a cache of {cache.get_seq_length()}")
    first = cache.layers[0].keys
    shape = (len(cache.layers), 2, stop - start, first.shape[1], first.shape[3])
    if out is None:
        out = torch.empty(shape, dtype=first.dtype, device=first.device)
    if tuple(out.shape) != shape:
        raise LayoutError(f"out is {tuple(out.shape)}, these tokens' KV is {shape}")
    for index, layer in enumerate(cache.layers):
        if layer.keys.shape[2] < stop or getattr(layer, "is_sliding", False):
            raise LayoutError(f"layer {index} of this cache has dropped tokens; capture KV with full_prefill")
        for axis, states in enumerate((layer.keys, layer.values)):
            out[index, axis].copy_(states[0, :, start:stop].transpose(0, 1))
    return out


def _as_ids(model: Any, tokens: torch.Tensor | np.ndarray | Sequence[int]) -> torch.Tensor:
    """Token ids as `[n]` int64 where the model's embeddings are; n of at least 1."""
    if isinstance(tokens, np.ndarray):
        tokens = tokens.astype(np.int64)  # uint32, the form of a token run, is poorly supported in torch
    ids = torch.as_tensor(tokens, dtype=torch.int64, device=model.get_input_embeddings().weight.device)
    if ids.ndim != 1 or ids.numel() == 0:
        raise LayoutError(f"tokens must be one row of at least one id, not {tuple(ids.shape)}")
    return ids
